// What a conversation is made of, whatever API or terminal it came through.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace thermo {

struct ToolCall {
  std::string id;  // empty: the caller has none
  std::string name;
  std::string arguments;  // JSON text of an object; of a call that was cut off, as far as it came
  bool complete = true;
  bool repaired = false;  // it was damaged; see ToolCallRepairs
};

struct Turn {
  std::string role;  // "system", "user", "assistant", "tool"
  std::string content;
  std::string reasoning = {};             // of an assistant
  std::vector<ToolCall> tool_calls = {};  // of an assistant
  std::string tool_call_id = {};          // of a tool: the call it answers
  std::vector<size_t> marks = {};         // bytes of the content after which another prompt may differ
};

// A function that the model may call.
struct Tool {
  std::string name;
  std::string description = {};
  Json parameters = {};  // JSON schema of an object; null: anything
  bool strict = false;   // the arguments of a call must fit the schema, not only its names and types

  // The schema that declares them: `parameters`, or what these only refer to.
  const Json& declared() const;
  // The schema of a parameter, nullptr if it is not declared.
  const Json* property(const std::string& key) const;
};

}  // namespace thermo
