// The program: finds the command, fills its options, runs it. The only place that catches everything:
// whatever goes wrong, the last line on stderr is one sentence with cause and remedy, and the exit code says
// what kind it was.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "base/utf8.h"
#include "cli/declared_commands.h"
#include "cli/device_list.h"
#include "cli/help.h"
#include "cli/interrupt.h"
#include "cli/options/config_file.h"
#include "cli/user_folders.h"
#include "cli/version.h"

namespace thermo {
namespace {

using Entry = DeclaredCommand;
using Arguments = std::vector<std::string>;

bool looks_like_model(const std::string& word) {
  std::error_code error;
  return word.ends_with(".gguf") || word.starts_with("hf:") || std::filesystem::exists(word, error);
}

bool contains(const Arguments& arguments, std::initializer_list<const char*> words) {
  for (const std::string& argument : arguments)
    for (const char* word : words)
      if (argument == word) return true;
  return false;
}

// The first argument that is neither an option nor the value of one; arguments.size() when there is none.
size_t find_command_word(const Arguments& arguments, const std::vector<std::unique_ptr<Entry>>& entries) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument.size() < 2 || argument[0] != '-') return i;
    if (argument.find('=') != std::string::npos) continue;
    for (const std::unique_ptr<Entry>& entry : entries) {
      const Option* option = entry->set.find(argument).option;
      if (option == nullptr) continue;
      if (!option->is_flag()) ++i;
      break;
    }
  }
  return arguments.size();
}

[[noreturn]] void refuse_word(const std::string& word, const std::vector<std::unique_ptr<Entry>>& entries) {
  std::vector<std::string> names = {"help"};
  for (const std::unique_ptr<Entry>& entry : entries) names.push_back(entry->command->text().name);
  std::string nearest = nearest_match(word, names);
  throw ConfigError(nearest.empty() ? fmt::format("unknown command '{}': `thermocline help` lists them", word)
                                    : fmt::format("unknown command '{}': did you mean {}?", word, nearest));
}

// "--port is an option of `serve`", for an option that other commands have.
std::string whose_option(const std::string& name, const std::vector<std::unique_ptr<Entry>>& entries) {
  std::vector<std::string> commands;
  for (const std::unique_ptr<Entry>& entry : entries)
    if (entry->set.find(name).option != nullptr)
      commands.push_back(fmt::format("`{}`", entry->command->text().name));
  if (commands.empty()) return "";
  return fmt::format("{} is an option of {}, not of this command", name, fmt::join(commands, ", "));
}

void use_state_folder(const std::string& folder) {
  // Made by us, a mistyped path would never be noticed.
  if (!folder.empty() && !is_folder(folder))
    throw ConfigError(fmt::format("--state-dir: '{}' is no folder; make it first", folder));
  set_state_folder(folder);
}

Entry& find_entry(const std::string& word, const std::vector<std::unique_ptr<Entry>>& entries) {
  for (const std::unique_ptr<Entry>& entry : entries)
    if (entry->command->text().name == word) return *entry;
  refuse_word(word, entries);
}

ExitCode run_command(Entry& entry, const Arguments& arguments,
                     const std::vector<std::unique_ptr<Entry>>& entries) {
  OptionValues values(entry.set, [&entries](const std::string& name) { return whose_option(name, entries); });
  values.parse_arguments(arguments);
  if (values.has(*entry.set.find("--help").option) || values.has(*entry.set.find("--help-all").option)) {
    bool all = values.has(*entry.set.find("--help-all").option);
    write_stdout(command_help(entry.command->text(), entry.set, all, detect_terminal({})));
    return ExitCode::Ok;
  }
  if (values.has(*entry.set.find("--version").option)) {
    write_stdout(version_line() + "\n");
    return ExitCode::Ok;
  }
  if (values.has(*entry.set.find("--list-devices").option)) {
    write_stdout(device_list());
    return ExitCode::Ok;
  }
  if (values.has(*entry.set.find("--completion-bash").option))
    return run_command(find_entry("completion", entries), {"bash"}, entries);
  add_environment(entry.set, values);
  KnownOptions known;
  for (const std::unique_ptr<Entry>& other : entries) known.add(other->set);
  if (std::string path = find_config_file(entry.set, values); !path.empty())
    add_config_file(path, entry.set, known, values);
  values.apply();
  if (entry.general.print_config) {
    write_stdout(print_config(entry.set, values));
    return ExitCode::Ok;
  }
  use_state_folder(entry.general.state_dir);
  Terminal terminal = detect_terminal(entry.general.terminal_options());
  // The log would make missing folders, and a mistyped path would never be noticed.
  const std::filesystem::path log_folder = std::filesystem::path(entry.general.log_file).parent_path();
  if (!log_folder.empty() && !is_folder(log_folder))
    throw ConfigError(fmt::format("--log-file: '{}' cannot be written: the folder {} does not exist",
                                  entry.general.log_file, log_folder.string()));
  try {
    configure_log(entry.general.log_options(terminal.color_stderr));
  } catch (const std::exception&) {
    throw ConfigError(
        fmt::format("--log-file: '{}' cannot be written; choose another file", entry.general.log_file));
  }
  for (const std::string& line : used_llama_variables(values)) log_info("cli", "{}", line);
  for (const std::string& sentence : unknown_variables(known)) log_warning("cli", "{}", sentence);
  for (const OptionSet::Hook& hook : entry.set.hooks()) hook(terminal);
  return entry.command->run(terminal);
}

ExitCode run_program(Arguments arguments) {
  std::vector<std::unique_ptr<Entry>> entries = declare_commands();
  size_t at = find_command_word(arguments, entries);
  if (at == arguments.size()) {
    if (contains(arguments, {"--version"})) {
      write_stdout(version_line() + "\n");
      return ExitCode::Ok;
    }
    if (contains(arguments, {"--list-devices", "--completion-bash"}))
      return run_command(find_entry("serve", entries), arguments, entries);
    if (contains(arguments, {"-h", "--help", "--help-all"})) {
      write_stdout(program_help(make_commands(), detect_terminal({})));
      return ExitCode::Ok;
    }
    if (contains(arguments, {"-m", "--model"}))
      return run_command(find_entry("serve", entries), arguments, entries);
    throw ConfigError(
        "no command was given: try `thermocline run -p \"What is 17 + 25?\"`, or `thermocline help`");
  }
  std::string word = arguments[at];
  // A model alone is served.
  if (looks_like_model(word)) return run_command(find_entry("serve", entries), arguments, entries);
  arguments.erase(arguments.begin() + static_cast<long>(at));
  if (word == "help") {
    if (arguments.empty()) {
      write_stdout(program_help(make_commands(), detect_terminal({})));
      return ExitCode::Ok;
    }
    word = arguments.front();
    arguments = {"--help"};
  }
  return run_command(find_entry(word, entries), arguments, entries);
}

// The options that stand for a remedy; errors below the command line do not know them.
std::string options_that_help(Remedy remedy) {
  switch (remedy) {
    case Remedy::None:
      break;
    case Remedy::MoreSequences:
      return " (--parallel)";
    case Remedy::LargerContext:
    case Remedy::SmallerContext:
      return " (--ctx-size)";
    case Remedy::LargerBatch:
      return " (--ubatch-size)";
    case Remedy::LessMemory:
      return " (--ctx-size, --no-repack; of the server also --parallel)";
    case Remedy::MoreExpertMemory:
      return " (--expert-ram)";
    case Remedy::Processor:
      return " (--device cpu)";
    case Remedy::FileMapping:
      return " (--no-repack)";
    case Remedy::ChatTemplate:
      return " (--chat-template-file, --raw)";
    case Remedy::NoChatTemplate:
      return " (--raw)";
    case Remedy::SmallerCache:
      return " (--ctx-size; -ctk q8_0 -ctv q8_0)";
    case Remedy::RopeFactor:
      return " (--rope-scale)";
    case Remedy::Yarn:
      return " (--rope-scaling yarn)";
  }
  return "";
}

// The next file that is opened would get the number of a closed descriptor, and what is printed would go into
// that file. Stdout is for reading, so that who writes there still learns that it is closed.
void keep_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDERR_FILENO ? O_WRONLY : O_RDONLY) < 0) return;
}

int fail(ExitCode code, const std::string& sentence) {
  std::fflush(stdout);
  const Terminal terminal = detect_terminal({});
  // Names from files and arguments may hold anything, line ends as well.
  std::string one_line;
  for (const char c : terminal.stderr_is_terminal ? printable(sentence) : sentence) {
    if (c == '\n')
      one_line += "\\n";
    else
      one_line += c;
  }
  const std::string line = terminal.on_stderr(Style::Red, "error:") + " " + one_line + "\n";
  std::fputs(line.c_str(), stderr);
  return static_cast<int>(code);
}

}  // namespace
}  // namespace thermo

int main(int argc, char** argv) {
  using namespace thermo;
  keep_standard_descriptors();
  install_signal_handlers();
  try {
    const ExitCode code = run_program(Arguments(argv + 1, argv + argc));
    if (code == ExitCode::Ok && MappedFile::any_lost())
      return fail(ExitCode::Model,
                  "a file became shorter while it was read, or its disk failed: the output is useless; get "
                  "the whole file and start again");
    return static_cast<int>(code);
  } catch (const ThermoError& error) {
    return fail(error.exit_code(), error.what() + options_that_help(error.remedy()));
  } catch (const OutputClosed&) {
    return static_cast<int>(ExitCode::Ok);
  } catch (const std::bad_alloc&) {
    return fail(ExitCode::Memory, "memory ran out: use a smaller context (-c) or a smaller model");
  } catch (const std::system_error& error) {
    // No thread could be started: its stack found no room.
    if (error.code() == std::errc::resource_unavailable_try_again ||
        error.code() == std::errc::not_enough_memory)
      return fail(ExitCode::Memory,
                  "the address space is used up: raise its limit (ulimit -v), or use fewer threads (-t)");
    return fail(ExitCode::Internal, fmt::format("unexpected error: {}; please report it", error.what()));
  } catch (const std::exception& error) {
    return fail(ExitCode::Internal,
                fmt::format("unexpected error: {}; please report it with the output of `thermocline version`",
                            error.what()));
  } catch (...) {
    return fail(ExitCode::Internal,
                "unexpected error: please report it with the output of `thermocline version`");
  }
}
