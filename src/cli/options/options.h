// Options of a command, declared once: the declaration drives parsing, the help, shell completion, the
// environment and the configuration file.
//
// Written by hand and not with CLI11, because llama.cpp's spellings include short names of several letters
// (-ctk, -ngl, -sys), which CLI11 cannot express, and because the same table has to serve all five uses
// above.
//
// Syntax: `--x y`, `--x=y`, `-x y`; flags `--x` and `--no-x`; `--` ends the options; options and positionals
// in any order. The last value of an option wins, except for repeatable ones. A value is taken from the first
// of these that has one: command line, environment, configuration file; otherwise the target keeps its
// default. The same order decides between options that contradict each other.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace thermo {

struct Terminal;

// Text to value; throws ConfigError saying what was expected ("expected a whole number").
void parse_value(std::string_view text, std::string& value);
void parse_value(std::string_view text, bool& value);  // on/off, true/false, yes/no, 1/0
void parse_value(std::string_view text, int& value);
void parse_value(std::string_view text, int64_t& value);
void parse_value(std::string_view text, uint64_t& value);
void parse_value(std::string_view text, float& value);
void parse_value(std::string_view text, double& value);
template <class T>
void parse_value(std::string_view text, std::optional<T>& value) {
  T parsed{};
  parse_value(text, parsed);
  value = parsed;
}

// "4096", "128K", "1M": a count of tokens, K = 1024, M = 1024 K.
int parse_count(std::string_view text);

// "a,b": its parts.
std::vector<std::string> split_list(std::string_view text);

// From the weakest to the strongest.
enum class OptionSource { Default, File, LlamaEnvironment, Environment, CommandLine };

class Option {
 public:
  // Settings of a declaration, each returning the option itself.
  Option& choices(std::vector<std::string> values);  // any other value is refused
  Option& suggest(std::vector<std::string> values);  // for completion; others are taken, too
  Option& range(double low, double high);            // of numbers, both included
  // The variable of llama-server when it is not LLAMA_ARG_<NAME>, and what it was called before.
  Option& llama_env(std::string name, std::string older = "");
  Option& advanced();        // shown by --help-all only
  Option& no_environment();  // on the command line only
  Option& not_in_file();     // the key of a file is another command's option of this name
  Option& secret();          // a key: its values are not shown
  Option& once();            // a second one on the command line is refused: it would drop the first
  // --x alone means --x=VALUE; the next argument is its value only when it is one of the choices, or a list
  // of numbers where there are none.
  Option& bare(std::string value);

  const std::string& name() const { return longs_.front(); }  // "ctx-size"
  bool is_flag() const { return flag_; }

 private:
  friend class OptionSet;
  friend class OptionValues;
  friend struct OptionView;
  std::vector<std::string> longs_;   // without dashes; the first is the name
  std::vector<std::string> shorts_;  // without the dash
  std::string metavar_, help_, section_;
  std::vector<std::string> llama_envs_;  // the first that is set counts
  std::vector<std::string> choices_, suggested_;
  std::optional<std::pair<double, double>> range_;
  std::optional<std::string> bare_;
  bool flag_ = false, count_ = false, repeatable_ = false, advanced_ = false, environment_ = true;
  bool in_file_ = true, secret_ = false, once_ = false;
  std::function<void(std::string_view)> set_;
};

// What the help, the completion scripts and the configuration need to know of an option.
struct OptionView {
  const Option* option;
  std::span<const std::string> longs() const { return option->longs_; }
  std::span<const std::string> shorts() const { return option->shorts_; }
  const std::string& metavar() const { return option->metavar_; }
  const std::string& help() const { return option->help_; }
  const std::string& section() const { return option->section_; }
  std::span<const std::string> llama_envs() const { return option->llama_envs_; }
  std::span<const std::string> choices() const { return option->choices_; }
  // What a completion offers.
  std::span<const std::string> values() const {
    return option->choices_.empty() ? option->suggested_ : option->choices_;
  }
  bool is_flag() const { return option->flag_; }
  bool is_repeatable() const { return option->repeatable_; }
  bool is_advanced() const { return option->advanced_; }
  bool reads_environment() const { return option->environment_; }
  bool reads_file() const { return option->environment_ && option->in_file_; }
  bool is_secret() const { return option->secret_; }
};

struct Positional {
  std::string metavar;
  std::string help;
  std::string option;     // the option that it stands for, or
  std::string* target{};  // where it goes
};

// Options that cannot both count.
struct Contradiction {
  using Test = std::function<bool(const std::string& first, const std::string& second)>;
  std::string first, second;  // with their dashes
  Test between;               // these values; empty: any, but for flags that are off
  bool both_ways = true;      // false: only the first one can leave out the other
};

class OptionSet {
 public:
  OptionSet() = default;
  OptionSet(const OptionSet&) = delete;  // the targets belong to one command
  OptionSet& operator=(const OptionSet&) = delete;

  // Options declared after this appear under that heading.
  void section(std::string title) { section_ = std::move(title); }

  // `names`: "-c,--ctx-size"; the first long one is the name. `target` must outlive the set; what it holds
  // now is the default. The reference returned is valid until the next declaration.
  Option& flag(std::string_view names, bool& target, std::string help);
  template <class T>
  Option& value(std::string_view names, std::string metavar, T& target, std::string help) {
    return custom(
        names, std::move(metavar), [&target](std::string_view text) { parse_value(text, target); },
        std::move(help));
  }
  // Bytes: "11G", "512MiB", "4096".
  Option& size(std::string_view names, std::string metavar, uint64_t& target, std::string help);
  // Bytes a second: "12G/s".
  Option& rate(std::string_view names, std::string metavar, uint64_t& target, std::string help);
  // Tokens: "4096", "128K".
  Option& count(std::string_view names, std::string metavar, int& target, std::string help);
  // May be given several times.
  Option& list(std::string_view names, std::string metavar, std::vector<std::string>& target,
               std::string help);
  // `set` throws ConfigError with what it expected; the option's name and value are put before it.
  Option& custom(std::string_view names, std::string metavar, std::function<void(std::string_view)> set,
                 std::string help);
  // The same for an option that may be given several times: `set` is called for each.
  Option& custom_list(std::string_view names, std::string metavar, std::function<void(std::string_view)> set,
                      std::string help);
  // A flag with a function of its own; called with true, or with false for --no-x.
  Option& custom_flag(std::string_view names, std::function<void(bool)> set, std::string help);

  void positional(std::string metavar, std::string& target, std::string help);
  // Another way to give an option ("model"); naming both is refused.
  void positional_for(std::string option, std::string metavar, std::string help);

  // Of two that contradict each other, the one from the stronger source counts, and the other is as if it had
  // not been given. From the same source both stay, and the command refuses them.
  void contradict(std::string first, std::string second, Contradiction::Test between = {});
  // The same, but the second one leaves nothing out: both stay then.
  void replace(std::string first, std::string second);
  // Each of them every other one.
  void contradict_each_other(const std::vector<std::string>& names);

  // An option that says nothing without another one: on the command line it is then refused, from elsewhere
  // it is as if it had not been given.
  void need(std::string option, std::string other);

  // Called after the values were put into their targets, before the command runs.
  using Hook = std::function<void(const Terminal&)>;
  void before_run(Hook hook) { hooks_.push_back(std::move(hook)); }
  std::span<const Hook> hooks() const { return hooks_; }

  std::span<const Option> options() const { return options_; }
  std::span<const Positional> positionals() const { return positionals_; }
  std::span<const Contradiction> contradictions() const { return contradictions_; }
  std::span<const std::pair<std::string, std::string>> needs() const { return needs_; }

  // What an argument "--no-repack" or "-ctk" means, without its value.
  struct Match {
    const Option* option = nullptr;
    bool negated = false;
  };
  Match find(std::string_view argument) const;  // with its dashes, without "=value"
  // A key of the configuration file: "ctx-size" or "ctx_size".
  Match find_key(std::string_view key) const;

 private:
  Option& add(std::string_view names);

  std::string section_ = "Options";
  std::vector<Option> options_;
  std::vector<Positional> positionals_;
  std::vector<Contradiction> contradictions_;
  std::vector<std::pair<std::string, std::string>> needs_;  // with their dashes
  std::vector<Hook> hooks_;
};

// The values that were given, before they are put into their targets.
class OptionValues {
 public:
  // What to say of an option that the set does not have; empty: nothing is known of it.
  using Advice = std::function<std::string(const std::string& name)>;
  explicit OptionValues(const OptionSet& set, Advice advice = {}) : set_(set), advice_(std::move(advice)) {}

  // Throws ConfigError: unknown option (with the nearest match), value missing, too many positionals.
  void parse_arguments(std::span<const std::string> arguments);
  // `where` says where it stands ("THERMO_TEMP", "config.toml:3"), for messages and --print-config.
  void add(const Option& option, std::string value, OptionSource source, std::string where);
  bool has(const Option& option, OptionSource at_least = OptionSource::File) const;

  // Leaves out what a stronger source contradicts and what lacks another option, and puts the rest into the
  // targets. Throws ConfigError for a value that is refused.
  void apply();

  struct Given {
    const Option* option;
    std::vector<std::string> values;
    OptionSource source;
    std::string where;
  };
  std::span<const Given> given() const { return given_; }

 private:
  [[noreturn]] void throw_unknown(const std::string& name) const;
  void leave_out_contradicted();
  void leave_out_useless();
  static void check(const Option& option, const std::string& value);

  const OptionSet& set_;
  Advice advice_;
  std::vector<Given> given_;
  std::vector<std::string> positionals_;
};

// The candidate nearest to `word` by edit distance, or empty when none is near.
std::string nearest_match(std::string_view word, std::span<const std::string> candidates);

}  // namespace thermo
