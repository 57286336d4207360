// Regular expressions, as `pattern` of a JSON schema has them: literals, classes, groups, alternatives and
// repetitions. No references back, no looking around, no word borders.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "grammar/rule_set.h"

namespace thermo {

// How a character of these ranges is written, e.g. escaped in a JSON string.
using CharWriter = std::function<ExprId(const std::vector<CharRange>& ranges, bool negated)>;

// The texts that the pattern matches. Where it is not anchored with ^ and $ anything may come before and
// after. InvalidArgument: not understood, with what and where.
Result<ExprId> regex_expr(RuleSet& rules, std::string_view pattern, const CharWriter& write);

}  // namespace thermo
