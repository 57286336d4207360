#include "sampling/logprobs.h"

#include <algorithm>
#include <cmath>

#include "sampling/logit_scan.h"

namespace thermo {

std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, int32_t chosen, int n) {
  TopTokens top;
  top.start(logits);
  // An infinite logit is infinitely more likely than a finite one; several of them share.
  const bool overflow = top.max() == INFINITY;
  const double log_sum =
      overflow ? std::log(static_cast<double>(std::count(logits.begin(), logits.end(), INFINITY)))
      : top.max() == -INFINITY ? 0.0
                               : std::log(sum_exp(logits, top.max()));
  const auto logprob = [&](float logit) {
    if (std::isnan(logit) || (overflow && logit != INFINITY)) return -INFINITY;
    const double below_max = overflow || logit == top.max() ? 0.0 : static_cast<double>(logit) - top.max();
    return logit == -INFINITY ? -INFINITY : static_cast<float>(below_max - log_sum);
  };

  std::vector<Candidate> candidates;
  top.take(n, candidates);
  std::vector<TokenLogprob> result{{chosen, logprob(logits[static_cast<size_t>(chosen)])}};
  for (const Candidate& c : candidates) result.push_back({c.id, logprob(c.logit)});
  // Tokens that cannot occur fill up the list, lowest id first.
  const auto want = static_cast<size_t>(std::clamp<int64_t>(n, 0, static_cast<int64_t>(logits.size())));
  for (size_t id = 0; id < logits.size() && result.size() < want + 1; ++id)
    if (!(logits[id] > -INFINITY)) result.push_back({static_cast<int32_t>(id), -INFINITY});
  return result;
}

}  // namespace thermo
