// JSON schemas as values: what a reference points to, and one schema that says what two say.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"
#include "base/result.h"

namespace thermo {

// What "#", "#/$defs/name" and the like lead to in `root`; nullptr: nothing, or not in this document.
const Json* resolve_reference(const Json& root, std::string_view reference);

// A schema whose values are those of both, as far as its keywords can say it. References are followed in
// `root`. InvalidArgument: two that cannot be put together, or references that go on for ever. Alternatives
// of both multiply, again where they refer to more: `work_left`, from which the members of all that is read
// are taken, may not go below 0.
Result<Json> merge_schemas(const Json& a, const Json& b, const Json& root, size_t& work_left);

// Whether the keyword limits a value, and is no remark.
bool has_meaning(std::string_view keyword);

}  // namespace thermo
