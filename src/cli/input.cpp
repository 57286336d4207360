#include "cli/input.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/units.h"
#include "base/utf8.h"
#include "cli/interrupt.h"

namespace thermo {
namespace {

constexpr int kPatienceMs = 2000;
constexpr int kWakeMs = 100;

std::string read_all(int fd, std::string_view what, uint64_t limit) {
  std::string text;
  char block[65536];
  while (true) {
    const ssize_t n = read(fd, block, sizeof(block));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw ConfigError(fmt::format("{} cannot be read: {}", what, std::strerror(errno)));
    if (n == 0) return text;
    text.append(block, static_cast<size_t>(n));
    if (text.size() > limit)
      throw ConfigError(
          fmt::format("{} has more than {}, which is too long; use a part of it", what, format_bytes(limit)));
  }
}

}  // namespace

std::string read_stdin(uint64_t limit) {
  if (isatty(STDIN_FILENO) != 0)
    throw ConfigError("no text was given: use -p TEXT, -f FILE, or send it through a pipe");
  // Nobody should wonder what is waited for: a pipe that was inherited may never end.
  pollfd ready{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
  if (poll(&ready, 1, kPatienceMs) == 0)
    std::fputs("waiting for text on stdin; < /dev/null if there is none\n", stderr);
  return read_all(STDIN_FILENO, "stdin", limit);
}

bool stdin_brings_text() {
  struct stat info {};
  if (fstat(STDIN_FILENO, &info) != 0) return false;
  return S_ISFIFO(info.st_mode) || S_ISSOCK(info.st_mode) || (S_ISREG(info.st_mode) && info.st_size > 0);
}

bool is_stdin(const std::string& path) {
  struct stat named {
  }, input{};
  return stat(path.c_str(), &named) == 0 && fstat(STDIN_FILENO, &input) == 0 &&
         named.st_dev == input.st_dev && named.st_ino == input.st_ino;
}

std::string read_text_file(const std::string& path, uint64_t limit) {
  if (path == "-") return read_stdin(limit);
  struct stat info {};
  if (stat(path.c_str(), &info) != 0)
    throw ConfigError(
        fmt::format("{}: the file cannot be read ({}); check the path", path, std::strerror(errno)));
  if (S_ISDIR(info.st_mode)) throw ConfigError(fmt::format("{}: this is a folder; name a text file", path));
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    throw ConfigError(
        fmt::format("{}: the file cannot be read ({}); check its permissions", path, std::strerror(errno)));
  const std::unique_ptr<const int, void (*)(const int*)> closer(&fd,
                                                                [](const int* opened) { close(*opened); });
  return read_all(fd, path, limit);
}

void require_utf8(std::string_view text, std::string_view what) {
  for (size_t i = skip_ascii(text, 0); i < text.size(); i = skip_ascii(text, i)) {
    const DecodedChar c = decode_utf8(text, i);
    if (!c.valid)
      throw ConfigError(fmt::format("{} is not UTF-8 (byte 0x{:02X} at offset {}); convert it first", what,
                                    static_cast<unsigned char>(text[i]), i));
    i += c.length;
  }
}

std::string unescape(std::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      result += text[i];
      continue;
    }
    switch (text[++i]) {
      case 'n':
        result += '\n';
        break;
      case 'r':
        result += '\r';
        break;
      case 't':
        result += '\t';
        break;
      case '\\':
      case '"':
      case '\'':
        result += text[i];
        break;
      default:
        result += '\\';
        result += text[i];
    }
  }
  return result;
}

bool wait_for_stdin(int& n_seen, const std::function<void()>& on_wake) {
  while (true) {
    const int n = InterruptScope::n_interrupts();
    const bool is_new = n > n_seen;
    n_seen = n;
    if (is_new) return false;
    pollfd ready{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, kWakeMs) > 0) return true;
    if (on_wake) on_wake();
  }
}

LineReader::Event LineReader::next(std::string& line) {
  while (true) {
    if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
      line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      if (line.ends_with('\r')) line.pop_back();
      n_seen_ = 0;  // with a message the count begins anew
      return Event::Line;
    }
    if (at_end_) {
      if (buffer_.empty()) return Event::End;
      line = std::move(buffer_);
      buffer_.clear();
      return Event::Line;
    }
    if (!wait_for_stdin(n_seen_)) {
      buffer_.clear();
      return Event::Interrupted;
    }
    char block[4096];
    const ssize_t n = read(STDIN_FILENO, block, sizeof(block));
    if (n > 0) {
      buffer_.append(block, static_cast<size_t>(n));
    } else if (n == 0 || errno != EINTR) {
      at_end_ = true;
    }
  }
}

}  // namespace thermo
