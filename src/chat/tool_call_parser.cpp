#include "chat/tool_call_parser.h"

#include <algorithm>
#include <utility>

#include "chat/argument_value.h"

namespace thermo {
namespace {

constexpr std::string_view kSpace = " \t\r\n";
constexpr size_t kMaxName = 128, kMaxKey = 256;
constexpr size_t kMaxGap = 64;  // spaces between a closing tag and what must follow it

constexpr std::string_view kFunction = "<function=";

// Whether `text` begins with `tag`, or could once more of it is there.
enum class Match { No, Maybe, Yes };
Match match(std::string_view text, std::string_view tag, bool at_end) {
  if (text.starts_with(tag)) return Match::Yes;
  return !at_end && tag.starts_with(text) ? Match::Maybe : Match::No;
}

bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
         c == '-';
}

}  // namespace

struct ToolCallParser::Dialect {
  std::string_view next_key, key_end, value_open, value_close, call_close;
  bool newlines;  // one after the key and one before the closing tag belong to the syntax
};

void ToolCallParser::push(std::string_view bytes) {
  if (state_ == State::Done) {
    if (bytes.find_first_not_of(kSpace) != std::string_view::npos) ++repairs_->dropped_texts;
    return;
  }
  if (!tool_) body_ += bytes;
  if (rejected()) return;
  held_ += bytes;
  while (step(false)) {
  }
}

void ToolCallParser::end(bool marker_missing) {
  while (step(true)) {
  }
  if (state_ == State::JsonBody) read_json();
  if (state_ == State::Done || rejected()) return;
  if (!tool_) {
    state_ = State::Rejected;
    return;
  }
  if (state_ == State::Value) close_value();
  if (marker_missing || !dialect_->call_close.empty()) ++repairs_->calls_closed;
  fragment_ += '}';
  state_ = State::Done;
}

// One move; false: it takes more text.
bool ToolCallParser::step(bool at_end) {
  switch (state_) {
    case State::Start:
      return step_start(at_end);
    case State::Name:
      return step_name(at_end);
    case State::Between:
      return step_between(at_end);
    case State::Key:
    case State::ValueOpen:
      return step_key(at_end);
    case State::Value:
      return step_value(at_end);
    case State::JsonBody:
    case State::Done:
    case State::Rejected:
      break;
  }
  return false;
}

bool ToolCallParser::step_start(bool at_end) {
  static constexpr Dialect kQwen{"<parameter=", ">", "", "</parameter>", "</function>", true};
  static constexpr Dialect kLaguna{"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", false};
  skip_space();
  if (held_.empty()) return false;
  if (held_[0] == '{') {
    state_ = State::JsonBody;
    return false;
  }
  const Match found = match(held_, kFunction, at_end);
  if (found == Match::Maybe) return false;
  dialect_ = found == Match::Yes ? &kQwen : &kLaguna;
  if (found == Match::Yes) held_.erase(0, kFunction.size());
  state_ = State::Name;
  return true;
}

bool ToolCallParser::step_name(bool at_end) {
  const auto stop = std::find_if_not(held_.begin(), held_.end(), is_name_char);
  const size_t n = static_cast<size_t>(stop - held_.begin());
  const bool tagged = !dialect_->call_close.empty();  // <function=NAME>
  if (n > kMaxName) {
    state_ = State::Rejected;
    return false;
  }
  if (stop == held_.end() && !(at_end && !tagged)) return false;
  const bool ends_well =
      stop == held_.end() ||
      (tagged ? *stop == '>' : *stop == '<' || kSpace.find(*stop) != std::string_view::npos);
  if (!ends_well) {
    state_ = State::Rejected;
    return false;
  }
  begin(std::string_view(held_).substr(0, n), State::Between);
  if (rejected()) return false;
  held_.erase(0, n + (tagged ? 1 : 0));
  return true;
}

void ToolCallParser::begin(std::string_view name, State next) {
  const auto found =
      std::find_if(tools_.begin(), tools_.end(), [name](const Tool& tool) { return tool.name == name; });
  if (found == tools_.end()) {
    state_ = State::Rejected;
    return;
  }
  tool_ = &*found;
  body_.clear();
  state_ = next;
  if (next == State::Between) fragment_ += '{';
}

void ToolCallParser::read_json() {
  const Json call = nests_too_deeply(held_) ? Json() : Json::parse(held_, nullptr, false);
  if (!call.is_object() || !call.contains("name") || !call["name"].is_string()) {
    state_ = State::Rejected;
    return;
  }
  Json arguments = Json::object();
  for (const char* key : {"arguments", "parameters"})
    if (call.contains(key)) {
      arguments = call[key];
      break;
    }
  if (arguments.is_string() && !nests_too_deeply(arguments.get_ref<const std::string&>()))
    arguments = Json::parse(arguments.get<std::string>(), nullptr, false);
  if (!arguments.is_object()) {
    state_ = State::Rejected;
    return;
  }
  begin(call["name"].get<std::string>(), State::Done);
  if (rejected()) return;
  ++repairs_->json_bodies;
  fragment_ = arguments.dump(-1, ' ', false, Json::error_handler_t::replace);
}

bool ToolCallParser::step_between(bool at_end) {
  skip_space();
  if (held_.empty()) return false;
  const Match key = match(held_, dialect_->next_key, at_end);
  if (key == Match::Yes) {
    held_.erase(0, dialect_->next_key.size());
    state_ = State::Key;
    return true;
  }
  const Match close = dialect_->call_close.empty() ? Match::No : match(held_, dialect_->call_close, at_end);
  if (close == Match::Yes) {
    const std::string rest = held_.substr(dialect_->call_close.size());
    held_.clear();
    fragment_ += '}';
    state_ = State::Done;
    if (!rest.empty()) push(rest);
    return false;
  }
  if (key == Match::Maybe || close == Match::Maybe) return false;
  ++repairs_->dropped_texts;
  held_.erase(0, std::max<size_t>(1, std::min(held_.find('<', 1), held_.size())));  // up to the next tag
  return true;
}

bool ToolCallParser::step_key(bool at_end) {
  if (state_ == State::Key) {
    const size_t end = held_.find(dialect_->key_end);
    if (end == std::string::npos && held_.size() <= kMaxKey + dialect_->key_end.size() && !at_end)
      return false;
    if (end == std::string::npos || end > kMaxKey) {
      ++repairs_->dropped_texts;  // a tag that never ends
      state_ = State::Between;
      return true;
    }
    open_value(held_.substr(0, end));
    held_.erase(0, end + dialect_->key_end.size());
    state_ = dialect_->value_open.empty() ? State::Value : State::ValueOpen;
    return true;
  }
  skip_space();
  const Match open = match(held_, dialect_->value_open, at_end);
  if (open == Match::Maybe) return false;
  if (open == Match::Yes) held_.erase(0, dialect_->value_open.size());
  state_ = State::Value;  // without its opening tag, too
  return true;
}

void ToolCallParser::open_value(std::string key) {
  const bool first = keys_.insert(key).second;
  schema_ = tool_->property(key);
  may_drop_newline_ = dialect_->newlines;
  value_.clear();
  if (!first) {
    ++repairs_->repeated_keys;
    kind_ = ValueKind::Dropped;
    return;
  }
  kind_ = takes_only_strings(schema_, tool_->parameters) ? ValueKind::Streamed : ValueKind::Collected;
  if (keys_.size() > 1) fragment_ += ", ";
  fragment_ += quote_json(key) + ": ";
  if (kind_ == ValueKind::Streamed) fragment_ += '"';
}

void ToolCallParser::add_value(std::string_view bytes) {
  if (bytes.empty() || kind_ == ValueKind::Dropped) return;
  if (kind_ == ValueKind::Collected) {
    value_ += bytes;
    return;
  }
  const std::string quoted = quote_json(utf8_.push(bytes));
  fragment_ += std::string_view(quoted).substr(1, quoted.size() - 2);
}

void ToolCallParser::close_value() {
  if (kind_ == ValueKind::Streamed) fragment_ += utf8_.finish() + '"';
  if (kind_ == ValueKind::Collected) fragment_ += argument_json(value_, schema_, tool_->parameters);
}

bool ToolCallParser::step_value(bool at_end) {
  if (held_.empty()) return false;
  if (may_drop_newline_ && held_[0] == '\n') held_.erase(0, 1);
  may_drop_newline_ = false;
  const ValueEnd end = find_value_end(at_end);
  add_value(std::string_view(held_).substr(0, end.text));
  if (end.next == std::string::npos) {
    held_.erase(0, end.text);
    return false;
  }
  close_value();
  held_.erase(0, end.next);
  state_ = State::Between;
  return true;
}

// Whether a key that begins a line ends the value before it, whose closing tag is missing: it is declared and
// was not given.
bool ToolCallParser::is_expected_key(std::string_view key, bool whole) const {
  const Json& declared = tool_->declared();
  if (!declared.is_object() || !declared.contains("properties")) return false;
  const Json& properties = declared["properties"];
  if (!properties.is_object()) return false;
  for (const auto& [name, schema] : properties.items())
    if ((whole ? name == key : name.starts_with(key)) && !keys_.contains(name)) return true;
  return false;
}

ToolCallParser::ValueEnd ToolCallParser::find_value_end(bool at_end) {
  const std::string_view held = held_;
  const auto after_gap = [held](size_t from) {
    return std::min(held.find_first_not_of(kSpace, from), held.size());
  };
  for (size_t at = held.find('<'); at != std::string_view::npos; at = held.find('<', at + 1)) {
    const bool begins_line = at == 0 || held[at - 1] == '\n';
    const size_t text = dialect_->newlines && at > 0 && held[at - 1] == '\n' ? at - 1 : at;
    const std::string_view rest = held.substr(at);

    const Match close = match(rest, dialect_->value_close, at_end);
    if (close == Match::Maybe) return {text};
    if (close == Match::Yes) {
      const size_t next = after_gap(at + dialect_->value_close.size());
      if (next - at > dialect_->value_close.size() + kMaxGap) continue;
      if (next == held.size()) {
        if (!at_end) return {text};
        return {text, next};
      }
      const Match key = match(held.substr(next), dialect_->next_key, at_end);
      const Match last =
          dialect_->call_close.empty() ? Match::No : match(held.substr(next), dialect_->call_close, at_end);
      const bool cut = at_end && dialect_->call_close.starts_with(held.substr(next));
      if (key == Match::Yes || last == Match::Yes || cut) return {text, next};
      if (key == Match::Maybe || last == Match::Maybe) return {text};
      continue;
    }
    if (!begins_line) continue;
    const Match key = match(rest, dialect_->next_key, at_end);
    if (key == Match::Maybe) return {text};
    if (key == Match::Yes) {
      const std::string_view name = rest.substr(dialect_->next_key.size(), kMaxKey);
      const size_t end = name.find(dialect_->key_end);
      if (end != std::string_view::npos && is_expected_key(name.substr(0, end), true)) {
        ++repairs_->values_closed;
        return {text, at};
      }
      if (end != std::string_view::npos || at_end) continue;
      const size_t partial = std::min(name.find(dialect_->key_end[0]), name.size());
      if (is_expected_key(name.substr(0, partial), partial < name.size()) &&
          dialect_->key_end.starts_with(name.substr(partial)))
        return {text};
      continue;
    }
    if (dialect_->call_close.empty()) continue;
    const Match last = match(rest, dialect_->call_close, at_end);
    if (last == Match::Maybe) return {text};
    if (last == Match::Yes && after_gap(at + dialect_->call_close.size()) == held.size() &&
        rest.size() <= dialect_->call_close.size() + kMaxGap) {
      if (!at_end) return {text};
      ++repairs_->values_closed;
      return {text, at};
    }
  }
  // A newline may still turn out to belong to the syntax.
  return {!at_end && dialect_->newlines && held.ends_with('\n') ? held.size() - 1 : held.size()};
}

void ToolCallParser::skip_space() {
  held_.erase(0, std::min(held_.find_first_not_of(kSpace), held_.size()));
}

}  // namespace thermo
