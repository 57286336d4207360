// A compiled grammar: one small automaton over bytes for each rule, which may call the others. Every state
// can be finished, no rule calls itself without reading something first, and there are no empty moves, so a
// machine that runs it cannot get stuck or go round.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "grammar/rule_set.h"

namespace thermo {

// Immutable: any thread.
class Grammar {
 public:
  // What a grammar may cost at most.
  static constexpr size_t kMaxStates = 200'000, kMaxEdges = 2'000'000, kMaxRules = 50'000;
  static constexpr int kMaxRepeats = 10'000;

  struct ByteEdge {
    uint8_t first, last;
    uint32_t target;
  };
  struct Call {
    uint32_t rule;
    uint32_t target;  // where to go on after it
    bool tail;        // nothing comes after it: the callers of this rule are those of the called one
  };
  struct State {
    uint32_t bytes_begin, bytes_end, calls_begin, calls_end;
    bool final;  // the rule may end here
  };

  // InvalidArgument with a sentence: too large, nothing matches, a rule that calls itself first.
  static Result<std::shared_ptr<const Grammar>> compile(const RuleSet& rules, RuleId root);

  size_t n_bytes() const {
    return sizeof(*this) + states_.size() * sizeof(State) + byte_edges_.size() * sizeof(ByteEdge) +
           calls_.size() * sizeof(Call) + (starts_.size() + ranks_.size()) * sizeof(uint32_t);
  }
  size_t n_states() const { return states_.size(); }
  const State& state(uint32_t id) const { return states_[id]; }
  std::span<const ByteEdge> byte_edges(uint32_t id) const {
    return std::span(byte_edges_)
        .subspan(states_[id].bytes_begin, states_[id].bytes_end - states_[id].bytes_begin);
  }
  std::span<const Call> calls(uint32_t id) const {
    return std::span(calls_).subspan(states_[id].calls_begin,
                                     states_[id].calls_end - states_[id].calls_begin);
  }
  bool goes_on(uint32_t id) const {
    return states_[id].bytes_begin < states_[id].bytes_end || states_[id].calls_begin < states_[id].calls_end;
  }
  uint32_t start(uint32_t rule) const { return starts_[rule]; }
  // Rules that a rule may call first have a higher rank.
  uint32_t rank(uint32_t rule) const { return ranks_[rule]; }
  uint32_t root() const { return 0; }

 private:
  friend class GrammarCompiler;
  Grammar() = default;

  std::vector<State> states_;
  std::vector<ByteEdge> byte_edges_;
  std::vector<Call> calls_;
  std::vector<uint32_t> starts_;
  std::vector<uint32_t> ranks_;
};

}  // namespace thermo
