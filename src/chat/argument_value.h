// A parameter of a tool call from the text a model wrote to the JSON its schema asks for. Pure functions.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace thermo {

// Whether every value is a string, so that its text can be handed on before it is complete. `schema` is that
// of the parameter, nullptr for one that is not declared; `root` is where its local references lead.
bool takes_only_strings(const Json* schema, const Json& root);

// The names of the types that the schema allows, an array as "type" has it.
Json argument_types(const Json* schema, const Json& root);

// JSON text. What the schema does not allow, or what does not parse, is a string of the text.
std::string argument_json(const std::string& text, const Json* schema, const Json& root);

// A JSON string with its quotes; bytes that are no UTF-8 become U+FFFD.
std::string quote_json(std::string_view text);

// Whether JSON could be nested so deeply that writing it again would use up the stack. Judged by the number
// of brackets, which no sensible call comes near.
bool nests_too_deeply(std::string_view text);

}  // namespace thermo
