#include "cli/options/config_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <toml++/toml.h>
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>

#include "base/error.h"
#include "cli/user_folders.h"

namespace thermo {
namespace {

std::string upper_snake(std::string_view name) {
  std::string result;
  for (char c : name)
    result += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return result;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Of a flag, which may be spelled 1, true, on; `negated`: its name was --no-x.
std::string on_or_off(const std::string& value, bool negated, const std::string& where) {
  bool on = false;
  try {
    parse_value(value, on);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}: '{}' cannot be used, {}", where, value, error.what()));
  }
  return on != negated ? "on" : "off";
}

// --no-x is read from the variable without NO.
void add_variable(const Option& option, const std::string& name, const std::string& value, bool negated,
                  OptionSource source, OptionValues& values) {
  values.add(option, option.is_flag() ? on_or_off(value, negated, name) : value, source, name);
}

// What a number of a file is for an option.
template <class Number>
std::string number_text(Number number) {
  return fmt::format("{}", number);
}

// Whether this text is read again from a file that has it as a number.
bool is_number(const std::string& value) {
  try {
    if (value.find_first_of(".e") == std::string::npos) {
      int64_t number = 0;
      parse_value(value, number);
      return number_text(number) == value;
    }
    double number = 0.0;
    parse_value(value, number);
    return number_text(number) == value;
  } catch (const ConfigError&) {
    return false;
  }
}

// A value as TOML: true, 0.5, "text".
std::string toml_text(const std::string& value, bool is_flag) {
  if (is_flag) return value == "on" ? "true" : "false";
  if (is_number(value)) return value;
  std::string quoted = "\"";
  for (const char c : value) {
    if (c == '\n')
      quoted += "\\n";
    else if ((c >= 0 && c < ' ') || c == 0x7F)
      quoted += fmt::format("\\u{:04x}", static_cast<int>(c));
    else
      quoted += c == '"' || c == '\\' ? std::string{'\\', c} : std::string{c};
  }
  return quoted + "\"";
}

struct FileReader {
  const std::string& path;
  const OptionSet& set;
  const KnownOptions& known;
  OptionValues& values;
  std::map<const Option*, uint32_t> lines = {};  // where an option was set

  [[noreturn]] void fail(const toml::node& node, const std::string& sentence) const {
    throw ConfigError(fmt::format("{}:{}: {}", path, node.source().begin.line, sentence));
  }

  std::string scalar(const std::string& key, const toml::node& node) const {
    if (auto text = node.value_exact<std::string>()) return *text;
    if (auto number = node.value_exact<int64_t>()) return number_text(*number);
    if (auto number = node.value_exact<double>()) return number_text(*number);
    if (auto on = node.value_exact<bool>()) return *on ? "on" : "off";
    fail(node, fmt::format("{} has a date or a nested value; give text, a number, true or false", key));
  }

  // Tables only group: in two of them, one of the values would be lost.
  void refuse_second(const Option& option, const std::string& key, const toml::node& node) {
    const auto [first, is_new] = lines.try_emplace(&option, node.source().begin.line);
    if (!is_new && !OptionView{&option}.is_repeatable())
      fail(node, fmt::format("{} sets --{}, which line {} sets too: keep one of them", key, option.name(),
                             first->second));
  }

  void read(const toml::table& table) {
    for (auto&& [toml_key, node] : table) {
      std::string key(toml_key.str());
      if (const toml::table* inner = node.as_table()) {  // tables only group
        read(*inner);
        continue;
      }
      if (key == "config") fail(node, "a configuration file cannot name another one; take it out");
      OptionSet::Match match = set.find_key(key);
      if (match.option == nullptr || !OptionView{match.option}.reads_file()) {
        skip_or_refuse(key, node);
        continue;
      }
      refuse_second(*match.option, key, node);
      std::string where = fmt::format("{}:{}: {}", path, node.source().begin.line, key);
      const toml::array* array = node.as_array();
      if (array != nullptr && !OptionView{match.option}.is_repeatable())
        fail(node, fmt::format("{} takes one value, not a list", key));
      if (array != nullptr) {
        for (const toml::node& element : *array)
          values.add(*match.option, scalar(key, element), OptionSource::File, where);
        continue;
      }
      std::string value = scalar(key, node);
      if (match.option->is_flag()) value = on_or_off(value, match.negated, where);
      values.add(*match.option, value, OptionSource::File, where);
    }
  }

  void skip_or_refuse(const std::string& key, const toml::node& node) const {
    std::string name = key;
    std::replace(name.begin(), name.end(), '_', '-');
    if (contains(known.anywhere, name)) return;
    if (contains(known.command_line_only, name))
      fail(node,
           fmt::format("{} is taken from the command line only (--{}); take it out of the file", key, name));
    std::string nearest = nearest_match(name, known.anywhere);
    fail(node, fmt::format("unknown key '{}': {}", key,
                           nearest.empty() ? "keys are the long names of options, see --help-all"
                                           : fmt::format("did you mean '{}'?", nearest)));
  }
};

// Read by others than the options: the caps of the kernels, and what the tests use.
constexpr std::string_view kOtherVariables[] = {"THERMO_MAX_ISA", "THERMO_MAX_SM", "THERMO_TEMPLATES"};

}  // namespace

void KnownOptions::add(const OptionSet& set) {
  for (const Option& option : set.options()) {
    const OptionView view{&option};
    for (const std::string& name : view.longs())
      (view.reads_environment() ? anywhere : command_line_only).push_back(name);
  }
}

std::vector<std::string> unknown_variables(const KnownOptions& known) {
  std::vector<std::string> sentences, names;
  for (const std::string& name : known.anywhere) names.push_back("THERMO_" + upper_snake(name));
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string variable(*entry, std::strcspn(*entry, "="));
    if (!variable.starts_with("THERMO_") || contains(names, variable)) continue;
    if (std::find(std::begin(kOtherVariables), std::end(kOtherVariables), variable) !=
        std::end(kOtherVariables))
      continue;
    const bool on_line =
        std::any_of(known.command_line_only.begin(), known.command_line_only.end(),
                    [&](const std::string& name) { return "THERMO_" + upper_snake(name) == variable; });
    const std::string nearest = nearest_match(variable, names);
    sentences.push_back(fmt::format("{} has no effect: {}", variable,
                                    on_line           ? "this option is taken from the command line only"
                                    : nearest.empty() ? "no option has this name"
                                                      : fmt::format("did you mean {}?", nearest)));
  }
  return sentences;
}

void add_environment(const OptionSet& set, OptionValues& values) {
  for (const Option& option : set.options()) {
    OptionView view{&option};
    if (!view.reads_environment()) continue;
    std::string name = "THERMO_" + upper_snake(option.name());
    if (const std::string value = environment_variable(name); !value.empty()) {
      add_variable(option, name, value, false, OptionSource::Environment, values);
      continue;
    }
    std::string llama_name, value;
    for (size_t i = 0; i < view.llama_envs().size() && value.empty(); ++i) {
      llama_name = view.llama_envs()[i];
      value = environment_variable(llama_name);
    }
    bool negated = false;
    if (value.empty() && option.is_flag() && llama_name.starts_with("LLAMA_ARG_")) {
      llama_name = "LLAMA_ARG_NO_" + llama_name.substr(10);
      value = environment_variable(llama_name);
      negated = true;
    }
    if (value.empty()) continue;
    add_variable(option, llama_name, value, negated, OptionSource::LlamaEnvironment, values);
  }
}

std::vector<std::string> used_llama_variables(const OptionValues& values) {
  std::vector<std::string> lines;
  for (const OptionValues::Given& given : values.given())
    if (given.source == OptionSource::LlamaEnvironment)  // without the value, which may be a key
      lines.push_back(fmt::format("{} is used for --{}", given.where, given.option->name()));
  return lines;
}

std::string find_config_file(const OptionSet& set, const OptionValues& values) {
  const Option* option = set.find_key("config").option;
  for (const OptionValues::Given& given : values.given())
    if (given.option == option) return given.values.back();  // an empty one is refused with the values
  for (const std::string& place :
       {in_user_config("thermocline/config.toml").string(), std::string("/etc/thermocline/config.toml")})
    if (access(place.c_str(), F_OK) == 0) return place;
  return "";
}

void add_config_file(const std::string& path, const OptionSet& set, const KnownOptions& known,
                     OptionValues& values) {
  if (std::error_code ignored; std::filesystem::is_directory(path, ignored))
    throw ConfigError(fmt::format("{}: this is a folder; name the configuration file in it", path));
  if (access(path.c_str(), R_OK) != 0)
    throw ConfigError(
        fmt::format("{}: the configuration file cannot be read; check --config and THERMO_CONFIG", path));
  toml::table table;
  try {
    table = toml::parse_file(path);
  } catch (const toml::parse_error& error) {
    throw ConfigError(fmt::format("{}:{}: this is not TOML: {}", path, error.source().begin.line,
                                  std::string(error.description())));
  }
  FileReader{path, set, known, values}.read(table);
}

std::string print_config(const OptionSet& set, const OptionValues& values) {
  std::string out;
  for (const Option& option : set.options()) {
    OptionView view{&option};
    if (!view.reads_environment() || option.name() == "config") continue;
    for (const OptionValues::Given& given : values.given()) {
      if (given.option != &option) continue;
      const char* source = given.source == OptionSource::CommandLine ? "option"
                           : given.source == OptionSource::File      ? "file"
                                                                     : "environment";
      if (view.is_secret()) {
        out += fmt::format("# {} is set, and not shown  # {}: {}\n", option.name(), source, given.where);
        continue;
      }
      std::vector<std::string> texts;
      for (const std::string& value : given.values) texts.push_back(toml_text(value, view.is_flag()));
      std::string value = view.is_repeatable() ? fmt::format("[{}]", fmt::join(texts, ", ")) : texts.back();
      out += fmt::format("{} = {}  # {}: {}\n", option.name(), value, source, given.where);
    }
  }
  return out;
}

}  // namespace thermo
