// The expressions of a template.
#pragma once

#include <string>
#include <string_view>

#include "jinja/ast.h"
#include "jinja/token_stream.h"

namespace thermo::jinja {

struct TupleRules {
  bool with_conditional = true;
  std::string_view end_name = "";  // a name that ends the tuple
  bool in_parentheses = false;     // () is an empty tuple
};

ExprPtr parse_expression(TokenStream& in, bool with_conditional = true);
// One expression, or several with commas between them.
ExprPtr parse_tuple(TokenStream& in, const TupleRules& rules = {});
// What comes before "=" or "in".
ExprPtr parse_assign_target(TokenStream& in, std::string_view end_name, bool with_namespace = false);
std::string parse_assign_name(TokenStream& in);
// "| filter | filter" after `input`. inline_start: the first filter has no "|" before it.
ExprPtr parse_filter_chain(TokenStream& in, ExprPtr input, bool inline_start = false);

}  // namespace thermo::jinja
