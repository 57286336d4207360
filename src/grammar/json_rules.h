// Expressions for JSON: what any value looks like, and strings and numbers within bounds. White space is what
// programs write: one blank, or a line end with up to 32 blanks after it. A model that wrote more would soon
// write nothing else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "grammar/rule_set.h"

namespace thermo {

// Bounds of a number, as decimal texts are compared: exactly.
struct NumberBounds {
  std::optional<double> least, most;
  bool above_least = false, below_most = false;  // the bound itself is excluded
};

// One for each RuleSet, which outlives it. Rules are made when they are first asked for.
class JsonRules {
 public:
  explicit JsonRules(RuleSet& rules) : rules_(rules) {}

  ExprId space();
  ExprId value();   // any JSON
  ExprId object();  // any object
  ExprId array();
  ExprId string();
  ExprId string_char();  // one character of a string, escaped where it must be
  // One character of these ranges as it is written in a string.
  ExprId string_char_of(const std::vector<CharRange>& ranges, bool negated);
  // A string of so many characters; most -1: any number.
  ExprId string_of(int least, int most);
  // A key that is none of these, and not empty.
  ExprId key_except(const std::vector<std::string>& keys);
  ExprId number();
  ExprId integer();
  ExprId boolean();
  ExprId null();
  // Up to 16 digits before the point and, of numbers, some after it. nullopt: nothing lies between.
  std::optional<ExprId> integer_between(const NumberBounds& bounds);
  std::optional<ExprId> number_between(const NumberBounds& bounds);
  // This value; white space within it is free.
  ExprId exactly(const Json& value);
  // "{" or "[", the parts with commas between them, "}" or "]".
  ExprId braces(ExprId body);
  ExprId brackets(ExprId body);

  RuleSet& rules() { return rules_; }

 private:
  ExprId once(std::optional<RuleId>& rule, const char* name, ExprId (JsonRules::*make)());
  ExprId make_space();
  ExprId make_value();
  ExprId make_object();
  ExprId make_array();
  ExprId make_string();
  ExprId make_string_char();
  ExprId make_number();
  ExprId make_integer();

  RuleSet& rules_;
  std::optional<RuleId> space_, value_, object_, array_, string_, char_, number_, integer_;
};

// The text of a JSON string, with its quotes.
std::string json_text(std::string_view text);

}  // namespace thermo
