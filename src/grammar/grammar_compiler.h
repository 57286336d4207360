// The inside of Grammar::compile().
//
//   build     expressions to automata with empty moves (Thompson), rule by rule, from the root on
//   trim      what cannot be finished goes away
//   flatten   empty moves and calls that may read nothing become edges
//   rank      rules in the order in which one may call the other first; a circle there is an error
#pragma once

#include <fmt/format.h>

#include <map>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "grammar/grammar.h"

namespace thermo {

// Why a grammar is refused that nothing fits.
inline constexpr const char* kMatchesNothing = "the grammar matches no text at all";

class GrammarCompiler {
 public:
  // What compile() reports as an error. Thrown and caught inside this folder only.
  struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  explicit GrammarCompiler(const RuleSet& rules) : rules_(rules) {}
  std::shared_ptr<const Grammar> compile(RuleId root);

 private:
  struct DraftCall {
    uint32_t rule, target;
  };
  struct DraftState {
    std::vector<Grammar::ByteEdge> bytes;
    std::vector<DraftCall> calls;
    std::vector<uint32_t> empty;
  };
  struct DraftRule {
    ExprId body;
    std::string name;
    uint32_t start = 0, end = 0;
  };

  uint32_t new_state();
  uint32_t build(ExprId id, uint32_t from);
  uint32_t build_chars(const Expr& expr, uint32_t from);
  uint32_t build_repeat(const Expr& expr, uint32_t from);
  uint32_t build_text_without(const Expr& expr, uint32_t from);
  uint32_t build_call(uint32_t rule, uint32_t from);
  uint32_t rule_of(RuleId id);
  uint32_t rule_of_expr(ExprId id);
  bool is_small(ExprId id) const;
  // States from which the end of their rule can be reached: `reading` by any text, otherwise by the empty
  // one.
  std::vector<bool> states_that_end(bool reading) const;
  void trim(const std::vector<bool>& good);
  void flatten(Grammar& grammar);
  void rank(Grammar& grammar) const;

  const RuleSet& rules_;
  std::vector<DraftState> states_;
  std::vector<DraftRule> draft_rules_;
  std::unordered_map<RuleId, uint32_t> by_id_;
  std::unordered_map<ExprId, uint32_t> by_expr_;
};

}  // namespace thermo
