// `thermocline completion`: scripts for shells, made from the declarations of the options.
#include <fmt/format.h>

#include "cli/declared_commands.h"

namespace thermo {
namespace {

using Declared = DeclaredCommand;

// For single quotes of a shell.
std::string quoted(std::string_view text) {
  std::string result = "'";
  for (char c : text) {
    if (c == '\'') {
      result += "'\\''";
    } else {
      result += c;
    }
  }
  return result + "'";
}

std::string option_words(const OptionSet& set) {
  std::string words;
  for (const Option& option : set.options()) {
    OptionView view{&option};
    for (const std::string& name : view.shorts()) words += " -" + name;
    for (const std::string& name : view.longs()) words += " --" + name;
  }
  return words.empty() ? words : words.substr(1);
}

// "-ctk|--cache-type-k"
std::string pattern_of(const OptionView& view) {
  std::string pattern;
  for (const std::string& name : view.shorts())
    pattern += fmt::format("{}-{}", pattern.empty() ? "" : "|", name);
  for (const std::string& name : view.longs())
    pattern += fmt::format("{}--{}", pattern.empty() ? "" : "|", name);
  return pattern;
}

std::string command_names(const std::vector<std::unique_ptr<Declared>>& all) {
  std::string names;
  for (const std::unique_ptr<Declared>& declared : all) names += declared->command->text().name + " ";
  return names + "help";
}

std::string bash_script(const std::vector<std::unique_ptr<Declared>>& all) {
  std::string out =
      "# bash completion for thermocline; load with: source <(thermocline completion bash)\n"
      "_thermocline() {\n"
      "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command= word options=\n"
      "  for word in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n"
      "    case $word in -*) ;; *) command=$word; break ;; esac\n"
      "  done\n"
      "  case $command in\n";
  for (const std::unique_ptr<Declared>& declared : all) {
    out += fmt::format("    {})\n      options={}\n      case $prev in\n", declared->command->text().name,
                       quoted(option_words(declared->set)));
    for (const Option& option : declared->set.options()) {
      OptionView view{&option};
      if (view.values().empty()) continue;
      out += fmt::format("        {}) COMPREPLY=($(compgen -W {} -- \"$cur\")); return ;;\n",
                         pattern_of(view), quoted(fmt::format("{}", fmt::join(view.values(), " "))));
    }
    out += "        *) ;;\n      esac ;;\n";
  }
  out += fmt::format("    '' | help) COMPREPLY=($(compgen -W {} -- \"$cur\")); return ;;\n  esac\n",
                     quoted(command_names(all)));
  out +=
      "  if [[ $command == completion && $cur != -* ]]; then\n"
      "    COMPREPLY=($(compgen -W 'bash zsh fish' -- \"$cur\"))\n"
      "  elif [[ $cur == -* ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$options\" -- \"$cur\"))\n"
      "  else\n"
      "    COMPREPLY=($(compgen -f -- \"$cur\"))\n"
      "  fi\n"
      "}\n"
      "complete -o filenames -F _thermocline thermocline\n";
  return out;
}

// A description inside [..] of _arguments.
std::string zsh_text(std::string_view text) {
  std::string result;
  for (char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') result += '\\';
    result += c;
  }
  return result;
}

std::string zsh_script(const std::vector<std::unique_ptr<Declared>>& all) {
  std::string out =
      "#compdef thermocline\n"
      "# zsh completion for thermocline; load with: source <(thermocline completion zsh)\n"
      "_thermocline() {\n"
      "  local -a commands\n"
      "  commands=(\n";
  for (const std::unique_ptr<Declared>& declared : all)
    out += fmt::format("    {}\n", quoted(declared->command->text().name + ":" +
                                          zsh_text(declared->command->text().summary)));
  out +=
      "  )\n"
      "  if (( CURRENT == 2 )); then\n"
      "    _describe command commands\n"
      "    return\n"
      "  fi\n"
      "  local command=$words[2]\n"
      "  shift words\n"
      "  (( CURRENT-- ))\n"
      "  case $command in\n";
  for (const std::unique_ptr<Declared>& declared : all) {
    out += fmt::format("    {})\n      _arguments \\\n", declared->command->text().name);
    for (const Option& option : declared->set.options()) {
      OptionView view{&option};
      std::string value;
      if (!view.is_flag())
        value = ":" + zsh_text(view.metavar()) + ":" +
                (view.values().empty() ? "_files" : fmt::format("({})", fmt::join(view.values(), " ")));
      for (const std::string& name : view.longs())
        out +=
            fmt::format("        {} \\\n", quoted(fmt::format("{}--{}[{}]{}", view.is_repeatable() ? "*" : "",
                                                              name, zsh_text(view.help()), value)));
      for (const std::string& name : view.shorts())
        out +=
            fmt::format("        {} \\\n", quoted(fmt::format("{}-{}[{}]{}", view.is_repeatable() ? "*" : "",
                                                              name, zsh_text(view.help()), value)));
    }
    out += declared->command->text().name == "completion" ? "        '1:shell:(bash zsh fish)' ;;\n"
                                                          : "        '*:model:_files' ;;\n";
  }
  out +=
      "  esac\n"
      "}\n"
      "if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _thermocline \"$@\"; else compdef _thermocline "
      "thermocline; "
      "fi\n";
  return out;
}

std::string fish_script(const std::vector<std::unique_ptr<Declared>>& all) {
  std::string out = "# fish completion for thermocline; load with: thermocline completion fish | source\n";
  for (const std::unique_ptr<Declared>& declared : all) {
    out += fmt::format("complete -c thermocline -n __fish_use_subcommand -f -a {} -d {}\n",
                       declared->command->text().name, quoted(declared->command->text().summary));
    for (const Option& option : declared->set.options()) {
      OptionView view{&option};
      std::string line = fmt::format("complete -c thermocline -n '__fish_seen_subcommand_from {}'",
                                     declared->command->text().name);
      // fish calls short names of several letters "old style".
      for (const std::string& name : view.shorts())
        line += fmt::format(" -{} {}", name.size() == 1 ? 's' : 'o', name);
      for (const std::string& name : view.longs()) line += fmt::format(" -l {}", name);
      if (!view.values().empty()) {
        line += fmt::format(" -x -a {}", quoted(fmt::format("{}", fmt::join(view.values(), " "))));
      } else if (!view.is_flag()) {
        line += " -r";
      }
      out += line + " -d " + quoted(view.help()) + "\n";
    }
  }
  out += "complete -c thermocline -n '__fish_seen_subcommand_from completion' -f -a 'bash zsh fish'\n";
  return out;
}

class CompletionCommand : public Command {
 public:
  CommandText text() const override {
    return {"completion", "completion bash|zsh|fish", "a completion script for your shell", "",
            "source <(thermocline completion bash)"};
  }

  void declare(OptionSet& set) override { set.positional("SHELL", shell_, "bash, zsh or fish"); }

  ExitCode run(const Terminal&) override {
    const std::vector<std::unique_ptr<Declared>> all = declare_commands();
    if (shell_ == "bash") {
      write_stdout(bash_script(all));
    } else if (shell_ == "zsh") {
      write_stdout(zsh_script(all));
    } else if (shell_ == "fish") {
      write_stdout(fish_script(all));
    } else {
      throw ConfigError(
          shell_.empty()
              ? "no shell was named: use completion bash, completion zsh or completion fish"
              : fmt::format("there is no completion script for '{}': use bash, zsh or fish", shell_));
    }
    return ExitCode::Ok;
  }

 private:
  std::string shell_;
};

}  // namespace

std::unique_ptr<Command> make_completion_command() {
  return std::make_unique<CompletionCommand>();
}

}  // namespace thermo
