// The lines of `serve --stdio`: what a caller writes, and the lines that go back. Pure.
//
//     {"op": "start", "id": "a", "api": "chat", "body": {"messages": [...]}}
//     {"op": "continue", "id": "a", "max_tokens": 100}
//     {"op": "cancel", "id": "a"}
//     {"op": "list"}
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/api/api_error.h"

namespace thermo {

struct PipeCommand {
  enum class Op { Start, Continue, Cancel, List };
  Op op = Op::List;
  std::string id;                      // of the request; of List: optional
  Dialect dialect = Dialect::Chat;     // Start
  std::string body;                    // Start: JSON, always a stream
  std::optional<int> max_tokens = {};  // Continue
  std::optional<uint64_t> run = {};    // Continue, Cancel: only if this is the id's last run
};

// Throws ApiError 400.
PipeCommand parse_command(std::string_view line);

// Cuts what comes into lines. A line that is too long is dropped and reported as empty with `too_long`.
class LineSplitter {
 public:
  struct Line {
    std::string text;
    bool too_long = false;
  };
  explicit LineSplitter(size_t max_bytes) : max_bytes_(max_bytes) {}
  // The lines that ended, without their ends. Empty ones are left out.
  std::vector<Line> push(std::string_view bytes);
  // What the input ended with, if it was no whole line.
  std::optional<Line> finish();

 private:
  size_t max_bytes_;
  std::string line_;
  bool too_long_ = false;
};

// One line, with its end: {"id": ..., "event": ..., members}. `members` is an object; an empty id is left
// out.
std::string pipe_line(const std::string& id, std::string_view event, const Json& members = Json::object());
// Events of a stream, whole ones, as lines whose "data" is what they carry. Signs of life and the mark at
// the end of a stream are left out.
std::string pipe_lines_of_stream(const std::string& id, std::string_view events);

}  // namespace thermo
