// Any bytes on the input of `serve --stdio`: commands or refusals, the same however the input is cut, and
// lines out that hold one object each.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "server/stdio/pipe_message.h"

namespace {

using namespace thermo;

std::string read_all(std::string_view input, size_t n_bytes) {
  constexpr size_t kMaxLine = 4096;
  LineSplitter splitter(kMaxLine);
  std::string seen;
  const auto take = [&](const LineSplitter::Line& line) {
    THERMO_CHECK(line.text.size() <= kMaxLine && line.text.find('\n') == std::string::npos,
                 "a line as promised");
    if (line.too_long) {
      seen += "too long\n";
      return;
    }
    try {
      const PipeCommand command = parse_command(line.text);
      THERMO_CHECK(command.op == PipeCommand::Op::List || !command.id.empty(), "requests have an id");
      seen += pipe_line(command.id, "start", {{"body", command.body}});
    } catch (const ApiError& error) {
      THERMO_CHECK(error.status == 400, "a line that cannot be read is the caller's fault");
      seen += pipe_line("", "error", {{"data", error_json(error, Dialect::Chat, "")}});
    }
    THERMO_CHECK(seen.ends_with("}\n"), "one object to a line");
  };
  for (size_t at = 0; at < input.size(); at += n_bytes)
    for (const LineSplitter::Line& line : splitter.push(input.substr(at, n_bytes))) take(line);
  if (const auto rest = splitter.finish()) take(*rest);
  return seen;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  THERMO_CHECK(read_all(input, size + 1) == read_all(input, 7), "the same however it is cut");
  pipe_lines_of_stream("id", input);
  return 0;
}
