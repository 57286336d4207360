// Members that every API has in common: sampling, limits, stops, reasoning, formats, tools.
#pragma once

#include "server/api/generation_request.h"

namespace thermo {

// Section by section, into the request. Throw ApiError.
void read_sampling(Fields& fields, const RequestDefaults& defaults, GenerationRequest& request);
// The first of `names` that is present; -1: as if absent.
void read_max_tokens(Fields& fields, std::initializer_list<const char*> names, GenerationRequest& request);
void read_stops(Fields& fields, const std::string& name, const RequestDefaults& defaults,
                GenerationRequest& request);
void read_stream(Fields& fields, GenerationRequest& request);
// Ids of tokens. 400 where one is none.
std::vector<int32_t> read_token_ids(const Json& list, const std::string& path, int n_vocab);
// chat_template_kwargs and explicit budgets; `effort` and `thinking` were read by the dialect before.
void read_reasoning(Fields& fields, const RequestDefaults& defaults, GenerationRequest& request);
// json_schema, grammar: extensions, in any dialect. `format` of the dialect was read before.
void read_format_extensions(Fields& fields, GenerationRequest& request);
// {"type": "json_schema", ...} in the forms of chat (inside "json_schema") and of Responses and Messages
// (flat).
void read_format(const Json& value, const std::string& path, GenerationRequest& request);
void read_session(Fields& fields, GenerationRequest& request);
// "low" to tokens; none: off. A name that is not known is "high", and its `path` is named as ignored.
// REQUIRES: "high" is among the efforts.
void set_effort(const std::string& effort, const std::string& path, const RequestDefaults& defaults,
                GenerationRequest& request);
// {"effort": "low"}, {"enabled": false}: "reasoning" of chat and of Responses.
void read_effort(const Json& reasoning, const RequestDefaults& defaults, GenerationRequest& request);

// Adds a tool. 400: a name that is taken, or made of other characters than letters, digits, _ . and -; a
// schema that is no object.
void add_tool(GenerationRequest& request, Tool tool, const std::string& path);
// Reads {name, description, parameters}.
Tool read_function(const Json& function, const std::string& path, const char* schema_name);
// After tools and choice: 400 where they do not fit each other.
void check_tool_choice(const GenerationRequest& request);
// {"tool_choice"} of chat and of Responses, after the tools.
void read_tool_choice(Fields& fields, GenerationRequest& request);
// What the model knows a tool by: one of a namespace (empty: of none) has that before its name.
std::string tool_name(const std::string& space, const std::string& name);
// Puts what nobody asked for into ignored_fields.
void note_unknown(const Fields& fields, GenerationRequest& request);

}  // namespace thermo
