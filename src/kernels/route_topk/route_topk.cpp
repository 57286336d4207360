#include "kernels/route_topk/route_topk.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/simd/simd_portable.h"

#include "kernels/simd/math_impl.h"

namespace thermo {
namespace {

// Orders floats as integers: NaN below everything, both zeros equal.
int32_t sort_key(float x) {
  if (std::isnan(x)) return std::numeric_limits<int32_t>::min();
  const int32_t bits = std::bit_cast<int32_t>(x + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The k highest scores, best first. Few of n scores displace another, so most cost one comparison.
void choose_top(const float* scores, const float* bias, int n, int k, int32_t* ids) {
  constexpr int kStackKeys = 64;
  int32_t keys[kStackKeys];
  if (k > kStackKeys) {  // no known model has so many: plain selection, quadratic but right
    for (int i = 0; i < k; ++i) {
      int best = -1;
      int32_t best_key = 0;
      for (int e = 0; e < n; ++e) {
        bool taken = false;
        for (int j = 0; j < i; ++j) taken = taken || ids[j] == e;
        const int32_t key = sort_key(bias == nullptr ? scores[e] : scores[e] + bias[e]);
        if (!taken && (best < 0 || key > best_key)) best = e, best_key = key;
      }
      ids[i] = best;
    }
    return;
  }
  int n_kept = 0;
  for (int e = 0; e < n; ++e) {
    const int32_t key = sort_key(bias == nullptr ? scores[e] : scores[e] + bias[e]);
    if (n_kept == k && key <= keys[k - 1]) continue;  // a tie keeps the lower index
    int at = n_kept < k ? n_kept++ : k - 1;
    for (; at > 0 && key > keys[at - 1]; --at) {
      keys[at] = keys[at - 1];
      ids[at] = ids[at - 1];
    }
    keys[at] = key;
    ids[at] = e;
  }
}

template <class Function>
void map(float* x, int n, Function function) {
  for_each_vec(n, [&](int i, int count) { vstore_part(x + i, function(vload_part(x + i, count)), count); });
}

// Logits without NaN or infinity, which would spread over all weights. NaN becomes the least.
float tame(float x) {
  constexpr float kMost = std::numeric_limits<float>::max();
  return x > kMost ? kMost : x >= -kMost ? x : -kMost;
}

float largest(const float* x, int n) {
  float top = -std::numeric_limits<float>::max();
  for (int i = 0; i < n; ++i) top = tame(x[i]) > top ? tame(x[i]) : top;
  return top;
}

}  // namespace

void route_topk(const RouteConfig& config, float* logits, const float* bias, int32_t* ids,
                float* weights) noexcept {
  const int n = config.n_expert;
  const int k = config.n_expert_used;
  const auto weigh = [&](auto weight_of) {
    for (int i = 0; i < k; ++i) weights[i] = weight_of(logits[ids[i]]);
  };
  switch (config.gating) {
    case Gating::Every:
      std::iota(ids, ids + k, 0);
      std::fill(weights, weights + k, 1.0f);
      return;
    case Gating::Softmax: {
      const float top = largest(logits, n);
      if (bias == nullptr) {
        // e^x keeps the order: choose by the logits themselves, which rounding has not made equal.
        choose_top(logits, nullptr, n, k, ids);
        float total = 1.0f;
        if (!config.normalize) {
          total = 0.0f;
          for (int e = 0; e < n; ++e) total += std::exp(tame(logits[e]) - top);
        }
        weigh([&](float x) { return std::isnan(x) ? 0.0f : std::exp(tame(x) - top) / total; });
        break;
      }
      float total = 0.0f;
      for (int e = 0; e < n; ++e) {
        if (std::isnan(logits[e])) continue;  // stays NaN, so it still loses
        logits[e] = std::exp(tame(logits[e]) - top);
        total += logits[e];
      }
      for (int e = 0; e < n; ++e) logits[e] /= total;
      choose_top(logits, bias, n, k, ids);
      weigh([](float p) { return std::isnan(p) ? 0.0f : p; });
      break;
    }
    case Gating::Sigmoid:
      map(logits, n, [](Vf x) { return vsigmoid(x); });
      choose_top(logits, bias, n, k, ids);
      weigh([](float s) { return std::isnan(s) ? 0.0f : s; });
      break;
    case Gating::SoftmaxSelected: {
      choose_top(logits, bias, n, k, ids);
      float top = -std::numeric_limits<float>::max();
      for (int i = 0; i < k; ++i) top = tame(logits[ids[i]]) > top ? tame(logits[ids[i]]) : top;
      float total = 0.0f;
      weigh([&](float x) { return std::isnan(x) ? 0.0f : std::exp(tame(x) - top); });
      for (int i = 0; i < k; ++i) total += weights[i];
      for (int i = 0; i < k; ++i) weights[i] = total > 0.0f ? weights[i] / total : 0.0f;
      break;
    }
    case Gating::SqrtSoftplus:
      for (int e = 0; e < n; ++e) {
        const float x = logits[e];
        logits[e] = std::sqrt(x > 20.0f ? x : std::log1p(std::exp(x)));
      }
      choose_top(logits, bias, n, k, ids);
      weigh([](float s) { return std::isnan(s) ? 0.0f : tame(s); });
      break;
  }

  float scale = config.weights_scale;
  if (config.normalize) {
    float total = 0.0f;
    for (int i = 0; i < k; ++i) total += weights[i];
    if (!(total > 0.0f)) {
      // Nothing but NaN (or weights that all underflowed): an even mix is finite and in range.
      for (int i = 0; i < k; ++i) weights[i] = 1.0f;
      total = static_cast<float>(k);
    }
    scale /= total;
  }
  for (int i = 0; i < k; ++i) weights[i] *= scale;
}

}  // namespace thermo
