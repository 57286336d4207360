// Log probabilities to report: natural logarithms of the softmax of the raw logits, before bias, penalties,
// filters and temperature.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace thermo {

struct TokenLogprob {
  int32_t id;
  float logprob;  // -inf for a token that cannot occur
};

// The chosen token first, then the n most likely ones in order (the chosen one among them if it is one).
// Fewer than n when the vocabulary is smaller. REQUIRES: chosen in 0..logits.size()-1.
std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, int32_t chosen, int n);

}  // namespace thermo
