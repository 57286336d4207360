#include "cli/options/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>

#include "base/error.h"
#include "base/units.h"
#include "cli/options/refused_options.h"

namespace thermo {
namespace {

template <class T>
void parse_number(std::string_view text, T& value, const char* expected) {
  std::string_view digits = text.starts_with('+') ? text.substr(1) : text;
  T parsed{};
  auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), parsed);
  if (error == std::errc::result_out_of_range)
    throw ConfigError(fmt::format("{}, and from {} to {}, was expected", expected,
                                  std::numeric_limits<T>::lowest(), std::numeric_limits<T>::max()));
  if (error != std::errc() || end != digits.data() + digits.size() || digits.empty())
    throw ConfigError(fmt::format("{} was expected", expected));
  value = parsed;
}

bool is_option_like(std::string_view argument) {
  if (argument.size() < 2 || argument[0] != '-') return false;
  return !(argument[1] >= '0' && argument[1] <= '9') && argument[1] != '.' && argument[1] != ' ';
}

bool is_number_list(std::string_view argument) {
  return !argument.empty() && argument.find_first_not_of("0123456789.,%+*-") == std::string_view::npos &&
         argument[0] >= '0' && argument[0] <= '9';
}

std::string with_underscores_as_dashes(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c == '_') c = '-';
  return result;
}

}  // namespace

void parse_value(std::string_view text, std::string& value) {
  value = text;
}

void parse_value(std::string_view text, bool& value) {
  if (text == "1" || text == "true" || text == "on" || text == "yes" || text == "enabled") {
    value = true;
  } else if (text == "0" || text == "false" || text == "off" || text == "no" || text == "disabled") {
    value = false;
  } else {
    throw ConfigError("on or off was expected");
  }
}

void parse_value(std::string_view text, int& value) {
  parse_number(text, value, "a whole number");
}
void parse_value(std::string_view text, int64_t& value) {
  parse_number(text, value, "a whole number");
}
void parse_value(std::string_view text, uint64_t& value) {
  parse_number(text, value, "a whole number that is not negative");
}
void parse_value(std::string_view text, double& value) {
  parse_number(text, value, "a number");
  if (!std::isfinite(value)) throw ConfigError("a finite number was expected");
}
void parse_value(std::string_view text, float& value) {
  double wide = 0.0;
  parse_value(text, wide);
  value = static_cast<float>(wide);
  if (!std::isfinite(value)) throw ConfigError("a finite number was expected");
}

int parse_count(std::string_view text) {
  int64_t factor = 1;
  std::string_view digits = text;
  if (digits.ends_with('k') || digits.ends_with('K')) {
    factor = 1024;
    digits.remove_suffix(1);
  } else if (digits.ends_with('m') || digits.ends_with('M')) {
    factor = 1024 * 1024;
    digits.remove_suffix(1);
  }
  int64_t value = 0;
  parse_number(digits, value, "a number of tokens (4096, 128K)");
  if (value > std::numeric_limits<int>::max() / factor || value < std::numeric_limits<int>::min() / factor)
    throw ConfigError("a number of tokens below two billion was expected");
  return static_cast<int>(value * factor);
}

std::vector<std::string> split_list(std::string_view text) {
  std::vector<std::string> parts;
  while (true) {
    const size_t at = text.find(',');
    parts.emplace_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

Option& Option::choices(std::vector<std::string> values) {
  choices_ = std::move(values);
  return *this;
}
Option& Option::suggest(std::vector<std::string> values) {
  suggested_ = std::move(values);
  return *this;
}
Option& Option::range(double low, double high) {
  range_ = {low, high};
  return *this;
}
Option& Option::llama_env(std::string name, std::string older) {
  llama_envs_ = {std::move(name)};
  if (!older.empty()) llama_envs_.push_back(std::move(older));
  return *this;
}
Option& Option::advanced() {
  advanced_ = true;
  return *this;
}
Option& Option::no_environment() {
  environment_ = false;
  return *this;
}

Option& Option::not_in_file() {
  in_file_ = false;
  return *this;
}
Option& Option::secret() {
  secret_ = true;
  return *this;
}
Option& Option::once() {
  once_ = true;
  return *this;
}

Option& Option::bare(std::string value) {
  bare_ = std::move(value);
  return *this;
}

Option& OptionSet::add(std::string_view names) {
  Option option;
  while (!names.empty()) {
    size_t comma = names.find(',');
    std::string_view name = names.substr(0, comma);
    if (name.starts_with("--")) {
      option.longs_.emplace_back(name.substr(2));
    } else {
      option.shorts_.emplace_back(name.substr(1));
    }
    names = comma == std::string_view::npos ? std::string_view{} : names.substr(comma + 1);
  }
  option.section_ = section_;
  std::string& llama_env = option.llama_envs_.emplace_back("LLAMA_ARG_");
  for (char c : option.longs_.front())
    llama_env += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  options_.push_back(std::move(option));
  return options_.back();
}

Option& OptionSet::custom(std::string_view names, std::string metavar,
                          std::function<void(std::string_view)> set, std::string help) {
  Option& option = add(names);
  option.metavar_ = std::move(metavar);
  option.set_ = std::move(set);
  option.help_ = std::move(help);
  return option;
}

Option& OptionSet::custom_flag(std::string_view names, std::function<void(bool)> set, std::string help) {
  Option& option = custom(
      names, "",
      [set = std::move(set)](std::string_view text) {
        bool on = false;
        parse_value(text, on);
        set(on);
      },
      std::move(help));
  option.flag_ = true;
  return option;
}

Option& OptionSet::flag(std::string_view names, bool& target, std::string help) {
  return custom_flag(
      names, [&target](bool on) { target = on; }, std::move(help));
}

Option& OptionSet::size(std::string_view names, std::string metavar, uint64_t& target, std::string help) {
  return custom(
      names, std::move(metavar),
      [&target](std::string_view text) {
        std::optional<uint64_t> bytes = parse_bytes(text);
        if (!bytes) throw ConfigError("a size was expected (4096, 512MiB, 11G)");
        target = *bytes;
      },
      std::move(help));
}

Option& OptionSet::rate(std::string_view names, std::string metavar, uint64_t& target, std::string help) {
  return custom(
      names, std::move(metavar),
      [&target](std::string_view text) {
        const std::optional<uint64_t> bytes =
            text.ends_with("/s") ? parse_bytes(text.substr(0, text.size() - 2)) : std::nullopt;
        if (!bytes || *bytes < MiB) throw ConfigError("a rate of at least 1M/s was expected (12G/s, 800M/s)");
        target = *bytes;
      },
      std::move(help));
}

Option& OptionSet::count(std::string_view names, std::string metavar, int& target, std::string help) {
  Option& option = custom(
      names, std::move(metavar), [&target](std::string_view text) { target = parse_count(text); },
      std::move(help));
  option.count_ = true;
  return option;
}

Option& OptionSet::custom_list(std::string_view names, std::string metavar,
                               std::function<void(std::string_view)> set, std::string help) {
  Option& option = custom(names, std::move(metavar), std::move(set), std::move(help));
  option.repeatable_ = true;
  return option;
}

Option& OptionSet::list(std::string_view names, std::string metavar, std::vector<std::string>& target,
                        std::string help) {
  return custom_list(
      names, std::move(metavar), [&target](std::string_view text) { target.emplace_back(text); },
      std::move(help));
}

void OptionSet::positional(std::string metavar, std::string& target, std::string help) {
  positionals_.push_back({std::move(metavar), std::move(help), "", &target});
}

void OptionSet::positional_for(std::string option, std::string metavar, std::string help) {
  positionals_.push_back({std::move(metavar), std::move(help), std::move(option)});
}

void OptionSet::contradict(std::string first, std::string second, Contradiction::Test between) {
  contradictions_.push_back({std::move(first), std::move(second), std::move(between)});
}

void OptionSet::replace(std::string first, std::string second) {
  contradictions_.push_back({std::move(first), std::move(second), {}, false});
}

void OptionSet::contradict_each_other(const std::vector<std::string>& names) {
  for (size_t i = 0; i < names.size(); ++i)
    for (size_t j = i + 1; j < names.size(); ++j) contradict(names[i], names[j]);
}

void OptionSet::need(std::string option, std::string other) {
  needs_.emplace_back(std::move(option), std::move(other));
}

OptionSet::Match OptionSet::find(std::string_view argument) const {
  if (!argument.starts_with('-')) return {};
  if (argument.starts_with("--")) return find_key(argument.substr(2));
  for (const Option& option : options_)
    for (const std::string& name : option.shorts_)
      if (name == argument.substr(1)) return {&option, false};
  return {};
}

OptionSet::Match OptionSet::find_key(std::string_view key) const {
  std::string name = with_underscores_as_dashes(key);
  for (const Option& option : options_)
    for (const std::string& candidate : option.longs_)
      if (candidate == name) return {&option, false};
  if (!name.starts_with("no-")) return {};
  for (const Option& option : options_)
    for (const std::string& candidate : option.longs_)
      if (option.flag_ && candidate == name.substr(3)) return {&option, true};
  return {};
}

void OptionValues::parse_arguments(std::span<const std::string> arguments) {
  bool options_ended = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (options_ended || !is_option_like(argument)) {
      if (positionals_.size() == set_.positionals().size())
        throw ConfigError(
            fmt::format("unexpected argument '{}': put texts with spaces in quotes after their option, "
                        "and see --help for what the command takes",
                        argument));
      positionals_.push_back(argument);
      continue;
    }
    if (argument == "--") {
      options_ended = true;
      continue;
    }
    size_t equals = argument.find('=');
    std::string name = argument.substr(0, equals);
    OptionSet::Match match = set_.find(name);
    if (match.option == nullptr) throw_unknown(name);
    if (match.option->is_flag()) {
      bool on = true;
      if (equals != std::string::npos) try {
          parse_value(std::string_view(argument).substr(equals + 1), on);
        } catch (const ConfigError& error) {
          throw ConfigError(fmt::format("{}: {} after '='", name, error.what()));
        }
      add(*match.option, on != match.negated ? "on" : "off", OptionSource::CommandLine, name);
      continue;
    }
    if (equals != std::string::npos) {
      add(*match.option, argument.substr(equals + 1), OptionSource::CommandLine, name);
      continue;
    }
    if (match.option->bare_) {
      const std::vector<std::string>& choices = match.option->choices_;
      const bool has_value =
          i + 1 < arguments.size() &&
          (choices.empty() ? is_number_list(arguments[i + 1])
                           : std::find(choices.begin(), choices.end(), arguments[i + 1]) != choices.end());
      add(*match.option, has_value ? arguments[++i] : *match.option->bare_, OptionSource::CommandLine, name);
      continue;
    }
    if (i + 1 == arguments.size())
      throw ConfigError(fmt::format("{} needs a value: {} {}", name, name, match.option->metavar_));
    if (is_option_like(arguments[i + 1]) && set_.find(arguments[i + 1]).option != nullptr)
      throw ConfigError(
          fmt::format("{} needs a value and the option {} follows it; write {}={} if that is the value", name,
                      arguments[i + 1], name, arguments[i + 1]));
    add(*match.option, arguments[++i], OptionSource::CommandLine, name);
  }
  for (size_t i = 0; i < positionals_.size(); ++i) {
    const Positional& positional = set_.positionals()[i];
    if (positional.target != nullptr) continue;
    const Option& option = *set_.find_key(positional.option).option;
    if (has(option, OptionSource::CommandLine))
      throw ConfigError(fmt::format("--{} and '{}' both name the {}: give one of them", positional.option,
                                    positionals_[i], positional.option));
    add(option, positionals_[i], OptionSource::CommandLine, positional.metavar);
  }
}

void OptionValues::throw_unknown(const std::string& name) const {
  if (std::optional<std::string> advice = refusal_advice(name)) throw ConfigError(*advice);
  if (const std::string advice = advice_ ? advice_(name) : ""; !advice.empty()) throw ConfigError(advice);
  std::vector<std::string> known;
  for (const Option& option : set_.options()) {
    for (const std::string& candidate : option.longs_) {
      known.push_back("--" + candidate);
      if (option.flag_ && name.starts_with("--no-")) known.push_back("--no-" + candidate);
    }
    if (!name.starts_with("--"))
      for (const std::string& candidate : option.shorts_) known.push_back("-" + candidate);
  }
  std::string nearest = nearest_match(name, known);
  throw ConfigError(nearest.empty() ? fmt::format("unknown option {}: --help-all lists every option", name)
                                    : fmt::format("unknown option {}: did you mean {}?", name, nearest));
}

void OptionValues::add(const Option& option, std::string value, OptionSource source, std::string where) {
  Given now{&option, {}, source, std::move(where)};
  const auto before =
      std::find_if(given_.begin(), given_.end(), [&](const Given& given) { return given.option == &option; });
  if (before != given_.end()) {
    if (before->source > source) return;
    if (before->source == source && option.once_)
      throw ConfigError(fmt::format("{} is given twice, as '{}' and as '{}': give it once", now.where,
                                    before->values.back(), value));
    if (before->source == source && option.repeatable_) now.values = std::move(before->values);
    given_.erase(before);
  }
  now.values.push_back(std::move(value));
  given_.push_back(std::move(now));  // the last, because others may have the same target
}

bool OptionValues::has(const Option& option, OptionSource at_least) const {
  for (const Given& given : given_)
    if (given.option == &option) return given.source >= at_least;
  return false;
}

void OptionValues::leave_out_contradicted() {
  const auto contradict = [this](const Given& one, const Given& other) {
    for (const Contradiction& c : set_.contradictions()) {
      const Option *first = set_.find(c.first).option, *second = set_.find(c.second).option;
      const bool in_order = one.option == first && other.option == second;
      if (!in_order && (!c.both_ways || one.option != second || other.option != first)) continue;
      const std::string &a = (in_order ? one : other).values.back(),
                        &b = (in_order ? other : one).values.back();
      if (c.between ? c.between(a, b)
                    : !(first->is_flag() && a == "off") && !(second->is_flag() && b == "off"))
        return true;
    }
    return false;
  };
  std::vector<Given> kept;  // the strongest first
  while (!given_.empty()) {
    Given weaker = std::move(given_.back());
    given_.pop_back();
    if (std::none_of(kept.begin(), kept.end(), [&](const Given& given) {
          return given.source > weaker.source && contradict(given, weaker);
        }))
      kept.push_back(std::move(weaker));
  }
  given_.assign(std::make_move_iterator(kept.rbegin()), std::make_move_iterator(kept.rend()));
}

void OptionValues::leave_out_useless() {
  for (const auto& [name, other] : set_.needs()) {
    const Option* const option = set_.find(name).option;
    if (has(*set_.find(other).option)) continue;
    if (has(*option, OptionSource::CommandLine))
      throw ConfigError(fmt::format("{} needs {}: give both, or leave it out", name, other));
    std::erase_if(given_, [option](const Given& given) { return given.option == option; });
  }
}

void OptionValues::apply() {
  // The strongest last, because options may have the same target.
  std::stable_sort(given_.begin(), given_.end(),
                   [](const Given& a, const Given& b) { return a.source < b.source; });
  leave_out_contradicted();
  leave_out_useless();
  for (const Given& given : given_) {
    const Option& option = *given.option;
    for (const std::string& value : given.values) {
      try {
        check(option, value);
        // An empty variable of a script must not leave out what was asked for.
        const std::string& kind = option.metavar_;
        if (value.empty() && given.source == OptionSource::CommandLine &&
            (kind == "FILE" || kind == "FOLDER" || kind == "URL"))
          throw ConfigError(fmt::format("a {} was expected; leave the option out to go without",
                                        kind == "FILE"     ? "file"
                                        : kind == "FOLDER" ? "folder"
                                                           : "URL"));
        option.set_(value);
      } catch (const ConfigError& error) {
        // Some errors begin with the value.
        const std::string why = error.what(), quoted = fmt::format("'{}'", value);
        throw ConfigError(why.starts_with(quoted) ? fmt::format("{}: {}", given.where, why)
                                                  : fmt::format("{}: {} cannot be used, {}", given.where,
                                                                option.secret_ ? "the key" : quoted, why));
      }
    }
  }
  for (size_t i = 0; i < positionals_.size(); ++i)
    if (std::string* target = set_.positionals()[i].target) *target = positionals_[i];
}

void OptionValues::check(const Option& option, const std::string& value) {
  if (!option.choices_.empty()) {
    for (const std::string& choice : option.choices_)
      if (choice == value) return;
    std::string nearest = nearest_match(value, option.choices_);
    throw ConfigError(fmt::format("one of {} was expected{}", fmt::join(option.choices_, ", "),
                                  nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest)));
  }
  if (option.range_) {
    double number = 0.0;
    if (option.count_) {
      number = parse_count(value);
    } else {
      parse_value(value, number);
    }
    if (number < option.range_->first || number > option.range_->second)
      throw ConfigError(
          fmt::format("a number from {} to {} was expected", option.range_->first, option.range_->second));
  }
}

}  // namespace thermo
