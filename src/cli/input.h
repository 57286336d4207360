// Texts that the user gives: files, stdin, lines of a conversation.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/units.h"

namespace thermo {

constexpr uint64_t kLargestText = GiB;
constexpr uint64_t kLargestPrompt = 64 * MiB;  // chat templates take no longer strings

// Everything up to the end. Throws ConfigError when stdin is a terminal: nobody waits for a prompt that was
// forgotten. Also when there is more than `limit`: some files never end.
std::string read_stdin(uint64_t limit = kLargestText);

// Whether stdin is a pipe or a file with something in it, so that it belongs to the prompt that was given
// with an option.
bool stdin_brings_text();

// Whether the path names what stdin is: /dev/stdin, or the file that was redirected.
bool is_stdin(const std::string& path);

// "-" is stdin. Throws ConfigError: missing, a folder, not readable, longer than `limit`.
std::string read_text_file(const std::string& path, uint64_t limit = kLargestText);

// Throws ConfigError naming `what` and the byte when `text` is not valid UTF-8.
void require_utf8(std::string_view text, std::string_view what);

// \n \t \r \\ \" \' as llama.cpp's --escape reads them; other backslashes stay.
std::string unescape(std::string_view text);

// Waits until stdin has something, or its end. False: an interrupt came that is not counted in `n_seen`; it
// is now. A signal that comes just before the wait is not missed. `on_wake` is called several times a second.
bool wait_for_stdin(int& n_seen, const std::function<void()>& on_wake = {});

// Lines from stdin, with Ctrl-C as an event of its own.
class LineReader {
 public:
  enum class Event { Line, End, Interrupted };
  // The line without its end. After the last one: End.
  Event next(std::string& line);

 private:
  std::string buffer_;
  bool at_end_ = false;
  int n_seen_ = 0;  // interrupts
};

}  // namespace thermo
