// Choice of experts: router logits of one row to the k experts it uses and their weights.
#pragma once

#include <cstdint>

namespace thermo {

// Numbers of the file format's expert_gating_func. Every: there is no router, each row takes all experts with
// weight 1 (the parts of a dense FFN).
enum class Gating : uint8_t { Every = 0, Softmax = 1, Sigmoid = 2, SoftmaxSelected = 3, SqrtSoftplus = 4 };

struct RouteConfig {
  Gating gating = Gating::Softmax;
  int n_expert = 0;
  int n_expert_used = 0;
  bool normalize = true;  // divide the chosen weights by their sum
  float weights_scale = 1.0f;
};

// logits[n_expert] (overwritten with scratch), bias[n_expert] or nullptr: added for the choice only.
// Writes n_expert_used ids, best first (ties: lowest index), and weights. NaN logits lose to every number;
// ids are always in range and distinct.
// If no chosen weight is above zero (nothing but NaN), normalized weights are even. Softmax without bias
// chooses by the logits; sigmoid and sqrt-softplus by their f32 values, so that saturated experts tie as they
// do in the references. Every: logits are not looked at; n_expert_used is n_expert.
void route_topk(const RouteConfig& config, float* logits, const float* bias, int32_t* ids,
                float* weights) noexcept;
void route_topk_ref(const RouteConfig& config, float* logits, const float* bias, int32_t* ids,
                    float* weights);  // double

}  // namespace thermo
