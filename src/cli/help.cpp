#include "cli/help.h"

#include <fmt/format.h>

namespace thermo {
namespace {

constexpr size_t kWidth = 80;
constexpr size_t kHelpColumn = 32;

// Breaks at spaces so that no line is longer than kWidth; every line but the first begins with `indent`
// spaces, and every line but the last ends with `tail`.
std::string wrap(std::string_view text, size_t first_column, size_t indent, std::string_view tail = "") {
  std::string result;
  size_t column = first_column;
  while (!text.empty()) {
    size_t space = text.find(' ');
    std::string_view word = text.substr(0, space);
    text = space == std::string_view::npos ? std::string_view{} : text.substr(space + 1);
    bool first = result.empty();
    const size_t after = text.empty() ? 0 : tail.size();
    if (!first && column + 1 + word.size() + after > kWidth) {
      result += tail;
      result += '\n';
      result.append(indent, ' ');
      column = indent;
      first = true;
    }
    if (!first) {
      result += ' ';
      ++column;
    }
    result += word;
    column += word.size();
  }
  return result;
}

// Texts with line breaks of their own: each line is wrapped by itself. Lines of `commands` can be pasted into
// a shell.
std::string wrap_lines(std::string_view text, size_t indent, bool commands = false) {
  std::string result;
  while (!text.empty()) {
    size_t end = text.find('\n');
    result.append(indent, ' ');
    result += commands ? wrap(text.substr(0, end), indent, indent + 4, " \\")
                       : wrap(text.substr(0, end), indent, indent);
    result += '\n';
    text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
  }
  return result;
}

std::string option_names(const OptionView& view) {
  std::string names;
  for (const std::string& name : view.shorts())
    names += fmt::format("{}-{}", names.empty() ? "" : ", ", name);
  for (const std::string& name : view.longs())
    names += fmt::format("{}--{}", names.empty() ? "" : ", ", name);
  if (!view.metavar().empty()) names += " " + view.metavar();
  return names;
}

std::string entry(const std::string& left, const std::string& help) {
  std::string line = "  " + left;
  if (help.empty()) return line + "\n";
  if (line.size() + 2 > kHelpColumn) {
    line += '\n';
    line.append(kHelpColumn, ' ');
  } else {
    line.append(kHelpColumn - line.size(), ' ');
  }
  return line + wrap(help, kHelpColumn, kHelpColumn) + "\n";
}

}  // namespace

std::string program_help(std::span<const std::unique_ptr<Command>> commands, const Terminal& terminal) {
  std::string out = "Thermocline runs mixture-of-experts language models from GGUF files.\n\n";
  out += terminal.on_stdout(Style::Bold, "Usage") + "\n  thermocline COMMAND [MODEL] [options]\n\n";
  out += terminal.on_stdout(Style::Bold, "Commands") + "\n";
  for (const std::unique_ptr<Command>& command : commands) {
    CommandText text = command->text();
    out += fmt::format("  {:<12}{}\n", text.name, text.summary);
  }
  out += fmt::format("  {:<12}{}\n\n", "help", "this text, or the help of a command: help run");
  out += terminal.on_stdout(Style::Bold, "Examples") + "\n";
  out += "  thermocline run -p \"What is 17 + 25?\"\n";
  out += "  thermocline chat Qwen3.6-35B-A3B-Q4_K_M.gguf\n";
  out += "  thermocline plan Qwen3.6-35B-A3B-Q4_K_M.gguf\n\n";
  out += wrap_lines(
      "MODEL is a GGUF file, the first file of a split model, or a folder with one model in it; without it "
      "the small model inside the program is used. `thermocline COMMAND -h` shows the common options of a "
      "command, --help-all shows all of them.",
      0);
  return out;
}

std::string command_help(const CommandText& text, const OptionSet& set, bool all, const Terminal& terminal) {
  std::string out = terminal.on_stdout(Style::Bold, "Usage") + "\n  thermocline " + text.usage + "\n\n";
  std::string summary = text.summary;
  if (!summary.empty() && summary[0] >= 'a' && summary[0] <= 'z')
    summary[0] = static_cast<char>(summary[0] - 32);
  out += wrap_lines(summary + ".", 0);
  if (!text.details.empty()) out += wrap_lines(text.details, 0);

  if (!set.positionals().empty()) out += "\n";
  for (const Positional& positional : set.positionals()) out += entry(positional.metavar, positional.help);

  std::vector<std::string> sections;
  for (const Option& option : set.options()) {
    bool known = false;
    for (const std::string& section : sections) known |= section == OptionView{&option}.section();
    if (!known) sections.push_back(OptionView{&option}.section());
  }
  bool left_out = false;
  for (const std::string& section : sections) {
    std::string entries;
    for (const Option& option : set.options()) {
      OptionView view{&option};
      if (view.section() != section) continue;
      if (view.is_advanced() && !all) {
        left_out = true;
        continue;
      }
      entries += entry(option_names(view), view.help());
    }
    if (!entries.empty()) out += "\n" + terminal.on_stdout(Style::Bold, section) + "\n" + entries;
  }
  if (!text.examples.empty())
    out += "\n" + terminal.on_stdout(Style::Bold, "Examples") + "\n" + wrap_lines(text.examples, 2, true);
  if (left_out) out += "\nMore options: thermocline " + text.name + " --help-all\n";
  return out;
}

}  // namespace thermo
