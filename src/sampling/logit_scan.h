// Passes over a whole row of logits: largest tokens, sums of exponentials, mean and deviation. A row is about
// a megabyte, so these passes are the cost of sampling; each reads the row once and vectorises.
//
// A NaN counts as minus infinity everywhere.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/sample/sample.h"

namespace thermo {

using Candidate = TokenLogit;

// Larger logit first, lower id on ties: a total order, so every selection is unique.
inline bool comes_first(const Candidate& a, const Candidate& b) noexcept {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// The most likely tokens of one row, most likely first, as many as are asked for. Reads the row once, keeps
// the maximum of each run of kRun logits, and from then on looks only at runs that can matter.
class TopTokens {
 public:
  // `logits` must stay unchanged until the next start().
  void start(std::span<const float> logits);
  // The largest logit, -inf when the row has none above that.
  float max() const noexcept { return max_; }
  // Lowest id with the largest logit, or -1 when every logit is -inf or NaN.
  int32_t argmax() const noexcept;
  // The n first candidates in order, fewer when fewer logits are above -inf. Replaces what `out` held.
  void take(int64_t n, std::vector<Candidate>& out);

 private:
  static constexpr size_t kRun = 128;
  std::span<const float> logits_;
  std::vector<float> run_max_;
  std::vector<float> sorted_max_;  // scratch of take()
  float max_ = 0.0f;
};

// Appends every logit of at least `threshold` and above -inf, in order of id.
void append_from(std::span<const float> logits, float threshold, std::vector<Candidate>& out);

// Sum of exp(logit - max). REQUIRES: max finite and no logit above it.
double sum_exp(std::span<const float> logits, float max) noexcept;

// Standard deviation of the finite logits; 0 when there are none.
double deviation(std::span<const float> logits) noexcept;

}  // namespace thermo
