#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/sample/sample.h"

namespace thermo {

void top_logits_ref(std::span<const float> logits, int n_wanted, TopLogits& out) {
  std::vector<TokenLogit> all;
  for (size_t i = 0; i < logits.size(); ++i)
    if (logits[i] > -INFINITY) all.push_back({logits[i], static_cast<int32_t>(i)});
  std::stable_sort(all.begin(), all.end(),
                   [](const TokenLogit& a, const TokenLogit& b) { return a.logit > b.logit; });
  out.max = all.empty() ? -INFINITY : all[0].logit;
  out.best = all.empty() ? -1 : all[0].id;
  double sum = 0.0;
  for (const TokenLogit& token : all) sum += std::exp(static_cast<double>(token.logit) - out.max);
  out.sum_exp = static_cast<float>(sum);
  out.n = TopLogits::kNotListed;
  out.floor = INFINITY;
  out.unused = 0;
  if (n_wanted <= 1) return;
  out.floor =
      all.size() <= static_cast<size_t>(n_wanted) ? -INFINITY : all[static_cast<size_t>(n_wanted) - 1].logit;
  const auto end =
      std::find_if(all.begin(), all.end(), [&](const TokenLogit& t) { return t.logit < out.floor; });
  if (end - all.begin() > kMaxTopTokens) return;
  out.n = static_cast<int32_t>(end - all.begin());
  std::copy(all.begin(), end, out.tokens);
}

}  // namespace thermo
