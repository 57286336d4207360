// Small questions about one schema, without what it refers to.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace thermo {

// The types that it allows: those of "type", else those that its keywords are about; empty: any.
std::vector<std::string> schema_types(const Json& schema);

// Whether a value of an enum has a type of the schema, and is within its bounds if it is a number or a
// string.
bool fits_scalar_keywords(const Json& value, const Json& schema);

// A keyword that counts something; nullopt: absent, or no number that can be used.
std::optional<int> count_of(const Json& schema, const char* keyword);

// The anchored pattern of a format by its name; empty: not known.
std::string pattern_of_format(const std::string& format);

// Brackets within brackets.
int nesting_of(const Json& value);

}  // namespace thermo
