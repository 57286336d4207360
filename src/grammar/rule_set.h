// A grammar as it is written: rules of expressions over characters. The reader of GBNF and the compiler of
// JSON schemas both make one; Grammar::compile() turns it into something that can be run.
//
// The folder knows texts, tokens of a vocabulary and JSON, and nothing of models or answers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace thermo {

struct CharRange {
  char32_t first, last;  // both belong to it
};

// Parts of the grammar by number; of the RuleSet that gave them.
using ExprId = uint32_t;
using RuleId = uint32_t;

struct Expr {
  enum class Kind : uint8_t { Bytes, Chars, Sequence, Choice, Repeat, Rule, TextWithout };
  Kind kind{};
  std::string bytes = {};             // Bytes
  std::vector<CharRange> chars = {};  // Chars
  std::vector<ExprId> parts = {};     // Sequence, Choice; the one of Repeat and TextWithout
  RuleId rule = 0;                    // Rule
  int least = 0, most = 0;            // Repeat; most -1: any number
};

class RuleSet {
 public:
  // These bytes, which should be UTF-8. An empty text is allowed.
  ExprId text(std::string_view utf8);
  // This token, one that is not text (see TokenTrie).
  ExprId token(int32_t id);
  // One character of these ranges, which may overlap; `negated`: one of all others.
  ExprId chars(std::vector<CharRange> ranges, bool negated = false);
  ExprId any_char() { return chars({}, true); }
  ExprId sequence(std::vector<ExprId> parts);
  // One of the parts; of none: nothing matches. Many texts are read together as far as they are the same, so
  // that a list of thousands leaves few places open.
  ExprId choice(std::vector<ExprId> parts);
  ExprId repeat(ExprId part, int least, int most);
  ExprId optional(ExprId part) { return repeat(part, 0, 1); }
  ExprId rule(RuleId rule);
  // Any text in which `part`, an expression without rules, matches nowhere.
  ExprId text_without(ExprId part);

  RuleId add_rule(std::string name);
  // A rule that has no body matches nothing.
  void define(RuleId rule, ExprId body);
  // A new rule with this body.
  ExprId named(std::string name, ExprId body);

  const Expr& expr(ExprId id) const { return exprs_[id]; }
  const std::string& rule_name(RuleId id) const { return rules_[id].name; }
  bool is_defined(RuleId id) const { return rules_[id].defined; }
  ExprId body(RuleId id) const { return rules_[id].body; }  // REQUIRES: is_defined(id)

 private:
  struct Rule {
    std::string name;
    bool defined = false;
    ExprId body = 0;
  };
  ExprId add(Expr expr);
  bool is_text(ExprId id) const;
  ExprId one_of(std::span<const std::string> texts, size_t n_read, int depth);

  std::vector<Expr> exprs_;
  std::vector<Rule> rules_;
};

// Tokens that are not text are written as a byte that no text has, and their id.
inline constexpr uint8_t kTokenByte = 0xFF;
std::string token_code(int32_t id);

}  // namespace thermo
