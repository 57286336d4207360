#include "server/stdio/pipe_message.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "server/api/fields.h"

namespace thermo {
namespace {

constexpr size_t kMaxId = 128;

bool is_tag(std::string_view text) {
  return !text.empty() && text.size() <= kMaxId &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
}

std::string dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Dialect dialect_named(const std::string& name) {
  constexpr std::pair<std::string_view, Dialect> kNames[] = {{"chat", Dialect::Chat},
                                                             {"completions", Dialect::Completions},
                                                             {"responses", Dialect::Responses},
                                                             {"messages", Dialect::Messages}};
  for (const auto& [known, dialect] : kNames)
    if (known == name) return dialect;
  throw invalid_value("api", "api: chat, completions, responses or messages was expected");
}

}  // namespace

PipeCommand parse_command(std::string_view line) {
  const Json json = parse_body(line);
  Fields fields(json);
  PipeCommand command;
  const std::string op = fields.string("op").value_or("");
  if (op == "start")
    command.op = PipeCommand::Op::Start;
  else if (op == "continue")
    command.op = PipeCommand::Op::Continue;
  else if (op == "cancel")
    command.op = PipeCommand::Op::Cancel;
  else if (op != "list")
    throw invalid_value("op", "op: start, continue, cancel or list was expected");
  command.id = fields.string("id").value_or("");
  if (!is_tag(command.id) && !(command.op == PipeCommand::Op::List && command.id.empty()))
    throw invalid_value("id", fmt::format("id: 1 to {} visible ASCII characters were expected", kMaxId));
  if (command.op == PipeCommand::Op::Start) {
    command.dialect = dialect_named(fields.string("api").value_or("chat"));
    const Json* const object = fields.object("body");
    if (object == nullptr) throw ApiError(400, "missing_required_parameter", "body: it is missing", "body");
    Json body = *object;
    body["stream"] = true;
    const bool counts = command.dialect == Dialect::Chat || command.dialect == Dialect::Completions;
    if (counts && !body.contains("stream_options")) body["stream_options"] = {{"include_usage", true}};
    command.body = dump(body);
  }
  if (command.op == PipeCommand::Op::Continue)
    if (const auto n = fields.integer("max_tokens", 1, 1 << 30)) command.max_tokens = static_cast<int>(*n);
  if (command.op == PipeCommand::Op::Continue || command.op == PipeCommand::Op::Cancel)
    if (const auto run = fields.integer("run", 1, INT64_MAX)) command.run = static_cast<uint64_t>(*run);
  if (const std::vector<std::string> unknown = fields.unknown(); !unknown.empty())
    throw unsupported(unknown.front(), unknown.front() + ": this operation has no such member");
  return command;
}

std::vector<LineSplitter::Line> LineSplitter::push(std::string_view bytes) {
  std::vector<Line> lines;
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    const std::string_view piece = bytes.substr(0, end);
    if (!too_long_ && line_.size() + piece.size() > max_bytes_) {
      too_long_ = true;
      line_ = {};
    }
    if (!too_long_) line_.append(piece);
    if (end == std::string_view::npos) break;
    bytes.remove_prefix(end + 1);
    if (std::optional<Line> line = finish()) lines.push_back(std::move(*line));
  }
  return lines;
}

std::optional<LineSplitter::Line> LineSplitter::finish() {
  Line line{std::exchange(line_, {}), std::exchange(too_long_, false)};
  if (line.text.ends_with('\r')) line.text.pop_back();
  if (line.text.empty() && !line.too_long) return std::nullopt;
  return line;
}

std::string pipe_line(const std::string& id, std::string_view event, const Json& members) {
  Json line = Json::object();
  if (!id.empty()) line["id"] = id;
  line["event"] = event;
  line.update(members);
  return dump(line) + "\n";
}

std::string pipe_lines_of_stream(const std::string& id, std::string_view events) {
  std::string out;
  while (!events.empty()) {
    const size_t end = std::min(events.find('\n'), events.size());
    std::string_view line = events.substr(0, end);
    events.remove_prefix(std::min(end + 1, events.size()));
    if (!line.starts_with("data: ")) continue;
    line.remove_prefix(6);
    if (!line.starts_with('{') || line == "{\"type\":\"ping\"}") continue;  // [DONE]
    // The data is JSON on one line as it is: reading it would only write it again.
    out += fmt::format("{{\"id\":{},\"event\":\"tokens\",\"data\":{}}}\n", dump(id), line);
  }
  return out;
}

}  // namespace thermo
