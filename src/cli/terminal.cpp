#include "cli/terminal.h"

#include <fmt/format.h>

#include <cstring>

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "base/error.h"
#include "base/utf8.h"

namespace thermo {
namespace {

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view{} : std::string_view{value};
}

bool wants_color(When when, bool is_terminal) {
  if (when != When::Auto) return when == When::Always;
  if (!environment("NO_COLOR").empty()) return false;
  std::string_view force = environment("CLICOLOR_FORCE");
  if (!force.empty() && force != "0") return true;
  return is_terminal && environment("TERM") != "dumb" && !environment("TERM").empty();
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    std::string_view value = environment(name);
    if (value.empty()) continue;
    return value.find("UTF-8") != std::string_view::npos || value.find("utf8") != std::string_view::npos ||
           value.find("utf-8") != std::string_view::npos;
  }
  return false;
}

const char* escape_of(Style style) {
  switch (style) {
    case Style::Bold:
      return "\x1b[1m";
    case Style::Dim:
      return "\x1b[2m";
    case Style::Red:
      return "\x1b[31m";
    case Style::Yellow:
      return "\x1b[33m";
    case Style::Green:
      return "\x1b[32m";
    case Style::Cyan:
      return "\x1b[36m";
  }
  return "";
}

std::string styled(bool color, Style style, std::string_view text) {
  if (!color) return std::string(text);
  std::string result = escape_of(style);
  result += text;
  return result += "\x1b[0m";
}

}  // namespace

std::string Terminal::on_stdout(Style style, std::string_view text) const {
  return styled(color_stdout, style, text);
}
std::string Terminal::on_stderr(Style style, std::string_view text) const {
  return styled(color_stderr, style, text);
}

void Terminal::note(std::string_view line) const {
  if (quiet) return;
  std::string text = on_stderr(Style::Dim, line) + "\n";
  std::fputs(text.c_str(), stderr);
}

void Terminal::note_unless_empty(std::string_view line) const {
  if (!line.empty()) note(line);
}

Terminal detect_terminal(const TerminalOptions& options) {
  Terminal terminal;
  terminal.stdin_is_terminal = isatty(STDIN_FILENO) != 0;
  terminal.stdout_is_terminal = isatty(STDOUT_FILENO) != 0;
  terminal.stderr_is_terminal = isatty(STDERR_FILENO) != 0;
  terminal.color_stdout = wants_color(options.color, terminal.stdout_is_terminal);
  terminal.color_stderr = wants_color(options.color, terminal.stderr_is_terminal);
  terminal.unicode = locale_is_utf8();
  terminal.quiet = options.quiet;
  terminal.progress = options.progress == When::Auto
                          ? terminal.stderr_is_terminal && environment("TERM") != "dumb" && !options.quiet
                          : options.progress == When::Always;
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) terminal.width = size.ws_col;
  return terminal;
}

std::string printable(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const DecodedChar c = decode_utf8(text, i);
    const bool obeyed =
        (c.code < 0x20 && c.code != '\n' && c.code != '\t') || (c.code >= 0x7F && c.code < 0xA0);
    if (obeyed || !c.valid) {
      out += kReplacementUtf8;
    } else {
      out += text.substr(i, c.length);
    }
    i += c.length;
  }
  return out;
}

void write_stdout(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDOUT_FILENO, text.data(), text.size());
    if (n >= 0) {
      text.remove_prefix(static_cast<size_t>(n));
    } else if (errno == EPIPE) {
      throw OutputClosed{};
    } else if (errno != EINTR) {  // a signal (Ctrl-C while the pipe is full) is no failure
      throw ThermoError(ExitCode::Internal,
                        fmt::format("cannot write to stdout: {}; is the disk full?", std::strerror(errno)));
    }
  }
}

}  // namespace thermo
