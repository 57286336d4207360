#include "cli/terminal.h"

#include <fmt/format.h>

#include <cstring>

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/error.h"
#include "base/utf8.h"
#include "cli/user_folders.h"

namespace thermo {
namespace {

bool obeys_escapes() {
  const std::string term = environment_variable("TERM");
  return !term.empty() && term != "dumb";
}

bool wants_color(When when, bool is_terminal) {
  if (when != When::Auto) return when == When::Always;
  if (!environment_variable("NO_COLOR").empty()) return false;
  const std::string force = environment_variable("CLICOLOR_FORCE");
  if (!force.empty() && force != "0") return true;
  return is_terminal && obeys_escapes();
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string value = environment_variable(name);
    if (value.empty()) continue;
    return value.find("UTF-8") != std::string::npos || value.find("utf8") != std::string::npos ||
           value.find("utf-8") != std::string::npos;
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
  const std::string text = on_stderr(Style::Dim, stderr_is_terminal ? printable(line) : line) + "\n";
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
  terminal.escapes = obeys_escapes();
  terminal.unicode = locale_is_utf8();
  terminal.quiet = options.quiet;
  terminal.progress = options.progress == When::Auto
                          ? terminal.stderr_is_terminal && terminal.escapes && !options.quiet
                          : options.progress == When::Always;
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) terminal.width = size.ws_col;
  return terminal;
}

void write_stdout(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDOUT_FILENO, text.data(), text.size());
    if (n >= 0) {
      text.remove_prefix(static_cast<size_t>(n));
    } else if (errno == EPIPE) {
      throw OutputClosed{};
    } else if (errno == EAGAIN) {  // it does not block: another program may have left a terminal so
      pollfd room{.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
      poll(&room, 1, -1);
    } else if (errno != EINTR) {  // a signal (Ctrl-C while the pipe is full) is no failure
      throw ConfigError(
          errno == EBADF
              ? "stdout is closed: send it somewhere, to /dev/null if nobody reads it"
              : fmt::format("cannot write to stdout: {}; is the disk full?", std::strerror(errno)));
    }
  }
}

}  // namespace thermo
