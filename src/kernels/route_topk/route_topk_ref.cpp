#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/route_topk/route_topk.h"

namespace thermo {

// Finite or NaN logits.
void route_topk_ref(const RouteConfig& config, float* logits, const float* bias, int32_t* ids,
                    float* weights) {
  const size_t n = static_cast<size_t>(config.n_expert);
  std::vector<double> scores(logits, logits + n);
  double top = -HUGE_VAL, total = 0.0;
  for (double x : scores)
    if (!std::isnan(x)) top = std::max(top, x);
  for (double x : scores)
    if (!std::isnan(x)) total += std::exp(x - top);
  for (double& x : scores) {
    switch (config.gating) {
      case Gating::Every:
        x = 1.0;
        break;
      case Gating::Softmax:
        x = std::exp(x - top) / total;
        break;
      case Gating::Sigmoid:
        x = 1.0 / (1.0 + std::exp(-x));
        break;
      case Gating::SoftmaxSelected:
        break;
      case Gating::SqrtSoftplus:
        x = std::sqrt(x > 20.0 ? x : std::log1p(std::exp(x)));
        break;
    }
  }
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  const auto score = [&](int32_t e) {
    const double s = scores[static_cast<size_t>(e)] + (bias == nullptr ? 0.0 : double{bias[e]});
    return std::isnan(s) ? -HUGE_VAL : s;
  };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const bool nan_a = std::isnan(scores[static_cast<size_t>(a)]),
               nan_b = std::isnan(scores[static_cast<size_t>(b)]);
    return nan_a != nan_b ? nan_b : score(a) > score(b);
  });
  double sum = 0.0;
  std::vector<double> chosen(static_cast<size_t>(config.n_expert_used));
  for (size_t i = 0; i < chosen.size(); ++i) {
    ids[i] = order[i];
    double w = scores[static_cast<size_t>(order[i])];
    if (config.gating == Gating::SoftmaxSelected) w = std::exp(w - top);
    chosen[i] = std::isnan(w) ? 0.0 : w;
    sum += chosen[i];
  }
  if (!(sum > 0.0) && config.normalize) {
    std::fill(chosen.begin(), chosen.end(), 1.0);
    sum = static_cast<double>(chosen.size());
  }
  const bool divide = config.normalize || config.gating == Gating::SoftmaxSelected;
  for (size_t i = 0; i < chosen.size(); ++i)
    weights[i] =
        static_cast<float>((divide && sum > 0.0 ? chosen[i] / sum : chosen[i]) * config.weights_scale);
}

}  // namespace thermo
