// What a sampler needs of a row of logits: the most likely tokens, and the sum for all of them. A row is a
// megabyte, this is a few kilobytes; a GPU finds it where the logits are and hands over nothing else.
//
//   best     lowest id with the largest logit
//   sum_exp  sum over the row of exp(logit - max)
//   tokens   every token whose logit is at least `floor`, in any order
//
// The floor is the finder's choice, so that no sort and no exact count is needed, but it is low enough for
// n_wanted tokens. A NaN counts as minus infinity everywhere; tokens at minus infinity are never listed.
#pragma once

#include <cstdint>
#include <span>

namespace thermo {

// How much of a row of logits someone reads.
enum class LogitsNeed : uint8_t {
  Best,  // the most likely token
  Few,   // the kFewTokens most likely ones
  Top,   // the most likely tokens; now and then the row after all
  Row,   // all of it
};

struct TokenLogit {
  float logit;
  int32_t id;
};

inline constexpr int kTopTokens = 256;      // n_wanted when a list is wanted
inline constexpr int kFewTokens = 16;       // when a short one is
inline constexpr int kMaxTopTokens = 1024;  // room for ties and for a low floor

struct TopLogits {
  static constexpr int32_t kNotListed = -1;

  float max;       // -inf when no logit is above that
  int32_t best;    // -1 when max is -inf
  float sum_exp;   // within 1e-5 of the exact sum; meaningless when max is infinite
  float floor;     // -inf: the list is the whole row
  int32_t n;       // tokens listed, or kNotListed: not wanted, or more than kMaxTopTokens are tied
  int32_t unused;  // keeps the tokens aligned
  TokenLogit tokens[kMaxTopTokens];

  std::span<const TokenLogit> list() const { return {tokens, n < 0 ? 0u : static_cast<unsigned>(n)}; }
};

// The definition, by sorting. n_wanted 1: no list.
void top_logits_ref(std::span<const float> logits, int n_wanted, TopLogits& out);

}  // namespace thermo
