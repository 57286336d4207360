// Rows that a drafter has been told of and has not computed yet: they wait until it drafts, so that one pass
// does both, or until they are many.
#pragma once

#include <span>
#include <vector>

#include "speculative/drafter.h"

namespace thermo {

struct StateQueue {
  std::vector<TokenId> tokens;
  std::vector<float> states;  // [rows][width]

  size_t size() const { return tokens.size(); }
  // All taps of row i, one after the other.
  void push(TokenId token, const StateRows& rows, size_t i, size_t n_taps) {
    tokens.push_back(token);
    for (size_t tap = 0; tap < n_taps; ++tap) push_state({rows.row(tap, i), rows.n_embd});
  }
  void push_state(std::span<const float> state) { states.insert(states.end(), state.begin(), state.end()); }
  void resize(size_t n, size_t width) {
    tokens.resize(n);
    states.resize(n * width);
  }
};

}  // namespace thermo
