// Choice of experts: router logits of one row to the k experts it uses and their weights.
#pragma once

#include <cstdint>

namespace thermo {

// Numbers of the file format's expert_gating_func.
enum class Gating : uint8_t { Softmax = 1, Sigmoid = 2, SoftmaxSelected = 3, SqrtSoftplus = 4 };

struct RouteConfig {
  Gating gating = Gating::Softmax;
  int n_expert = 0;
  int n_expert_used = 0;
  bool normalize = true;      // divide the chosen weights by their sum
  float weights_scale = 1.0f;
};

// logits[n_expert] (overwritten with scratch), bias[n_expert] or nullptr: added for the choice only.
// Writes n_expert_used ids, best first (ties: lowest index), and weights. NaN logits lose to every number;
// ids are always in range and distinct.
void route_topk(const RouteConfig& config, float* logits, const float* bias, int32_t* ids, float* weights) noexcept;

}  // namespace thermo
