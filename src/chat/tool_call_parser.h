// One tool call, from the text between its markers to a name and the JSON text of its arguments, as it
// arrives.
//
// The dialect shows in the first characters of the body:
//
//     <function=NAME> <parameter=KEY>\nVALUE\n</parameter> ... </function>     Qwen3.5 and later, Plankton
//     NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n ...         Laguna
//     {"name": NAME, "arguments": {...}}                                      older models; read at its end
//
// A value may hold this very markup (a model writes files). So a closing tag ends it only if what follows can
// follow it; what may still become such an end is held back. A body that names no known tool is no call: see
// rejected(). However the text is cut up, what comes out is the same. One thread per object.
#pragma once

#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "chat/message.h"
#include "tokenizer/stream_decoder.h"

namespace thermo {

// What had to be repaired, for those who watch a model.
struct ToolCallRepairs {
  int values_closed = 0;   // a value without its closing tag
  int calls_closed = 0;    // a call without its closing tag at the end of the turn
  int repeated_keys = 0;   // dropped: the first one counts
  int bare_functions = 0;  // a call without the marker before it
  int json_bodies = 0;     // a JSON object instead of tags
  int unknown_tools = 0;   // a call of a tool that was not offered: shown as content
  int dropped_texts = 0;   // text where none may stand

  // Of damaged calls. A JSON object may be what the model was made to write.
  int n_damaged() const {
    return values_closed + calls_closed + repeated_keys + bare_functions + dropped_texts;
  }
};

class ToolCallParser {
 public:
  // `tools` and `repairs` outlive the parser.
  ToolCallParser(std::span<const Tool> tools, ToolCallRepairs& repairs) : tools_(tools), repairs_(&repairs) {}

  void push(std::string_view bytes);
  // The closing marker, or the end of the turn without one: what is open is closed.
  void end(bool marker_missing);

  // The body is no call of a known tool; body() is all of it so far, and nothing else will come.
  bool rejected() const { return state_ == State::Rejected; }
  bool begun() const { return tool_ != nullptr; }
  bool complete() const { return state_ == State::Done; }
  const std::string& name() const { return tool_->name; }  // REQUIRES: begun()
  // The arguments that became certain since the last time.
  std::string take_arguments() { return std::exchange(fragment_, {}); }
  const std::string& body() const { return body_; }

 private:
  enum class State { Start, Name, JsonBody, Between, Key, ValueOpen, Value, Done, Rejected };
  struct Dialect;
  struct ValueEnd {
    size_t text;                      // bytes of held_ that belong to the value for certain
    size_t next = std::string::npos;  // where to go on; npos: the value does not end yet
  };

  bool step(bool at_end);
  bool step_start(bool at_end);
  bool step_name(bool at_end);
  bool step_between(bool at_end);
  bool step_key(bool at_end);
  bool step_value(bool at_end);
  void begin(std::string_view name, State next);
  void read_json();
  void open_value(std::string key);
  void add_value(std::string_view bytes);
  void close_value();
  ValueEnd find_value_end(bool at_end);
  bool is_expected_key(std::string_view key, bool whole) const;
  void skip_space();

  std::span<const Tool> tools_;
  ToolCallRepairs* repairs_;
  State state_ = State::Start;
  const Dialect* dialect_ = nullptr;
  const Tool* tool_ = nullptr;
  std::string body_;  // until the name is known
  std::string held_;  // not yet understood
  std::string fragment_;
  std::set<std::string> keys_;

  // The value being read.
  const Json* schema_ = nullptr;
  enum class ValueKind { Streamed, Collected, Dropped } kind_{};
  bool may_drop_newline_ = false;
  std::string value_;
  Utf8Assembler utf8_;
};

}  // namespace thermo
