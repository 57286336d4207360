// The grammar of tool calls, in each dialect that tool_call_parser.h reads. What it accepts is parsed as
// calls of the given tools with the parameters that they require.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "chat/message.h"
#include "grammar/json_schema.h"

namespace thermo {

enum class ToolDialect : uint8_t { Qwen, Laguna, Hermes };
// The one that a chat template shows to its model.
ToolDialect tool_dialect(std::string_view chat_template);

// How much of a call is enforced.
enum class ToolGrammar : uint8_t {
  Off,     // its markers, and the tool's name where that was chosen
  Auto,    // names of tools and parameters, required parameters, JSON where no string is expected; of tools
           // that are strict, the schema
  Strict,  // the schema of every tool
};

struct ToolCallSyntax {
  ToolDialect dialect = ToolDialect::Qwen;
  ToolGrammar grammar = ToolGrammar::Auto;
  bool keep_names = false;  // only the given tools can be called, also with ToolGrammar::Off
  bool parallel = true;     // several calls, one after the other
  // <tool_call> and </tool_call>, where the vocabulary has them as tokens; otherwise they are text.
  std::optional<int32_t> open, close;
};
inline constexpr std::string_view kCallOpen = "<tool_call>", kCallClose = "</tool_call>";

// One call or more, from the first opening marker on. REQUIRES: tools not empty. InvalidArgument with the
// tool and the path for a schema that cannot be used; only a strict one is refused for what cannot be
// enforced.
Result<SchemaGrammar> compile_tool_calls(std::span<const Tool> tools, const ToolCallSyntax& syntax);
// All that this grammar is made of: see GrammarCache.
std::string source_of_tool_calls(std::span<const Tool> tools, const ToolCallSyntax& syntax);

}  // namespace thermo
