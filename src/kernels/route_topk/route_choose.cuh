// The choice of one row's experts by one warp: scores in registers, one warp-wide maximum per chosen expert.
#pragma once

#include "kernels/route_topk/route_topk_cuda.h"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
  for (int mask = 16; mask > 0; mask /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
#endif
}
__device__ __forceinline__ uint32_t warp_min(uint32_t x) {
  return ~warp_max(~x);
}

// Order of floats as order of unsigned numbers above 1; 1 is a NaN, which loses to every number; 0 is no
// expert.
__device__ __forceinline__ uint32_t order_key(float x) {
  if (isnan(x)) return 1;
  const uint32_t bits = __float_as_uint(x);
  return max(2u, bits & 0x80000000u ? ~bits : bits | 0x80000000u);
}

// Ids and weights of one row, entry k in lane k. `logit(e)`: of expert e.
template <int kPer, class Logit>
__device__ __forceinline__ void choose(const RouteConfig& config, const Logit& logit, const float* bias, int lane, int& id,
                       float& weight) {
  float value[kPer];   // what becomes the weight
  uint32_t key[kPer];  // what is compared
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = lane + 32 * i;
    value[i] = e < config.n_expert ? logit(e) : -INFINITY;
    if (value[i] > top) top = value[i];
  }
  for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
  const bool softmax = config.gating == Gating::Softmax;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = lane + 32 * i;
    const float x = value[i];
    if (config.gating == Gating::Sigmoid) value[i] = sigmoid_device(x);
    if (config.gating == Gating::SqrtSoftplus) value[i] = sqrtf(softplus_device(x));
    if (softmax) {
      value[i] = expf(x - top);
      if (e < config.n_expert && !isnan(value[i])) total += value[i];
    }
    key[i] = e < config.n_expert ? order_key(softmax && bias == nullptr ? x : value[i]) : 0;
  }
  if (softmax) {
    total = warp_sum(total);
#pragma unroll
    for (int i = 0; i < kPer; ++i) value[i] /= total;
  }
  if (bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (lane + 32 * i < config.n_expert) key[i] = order_key(value[i] + bias[lane + 32 * i]);
  }

  id = 0;
  weight = 0.0f;
  float sum = 0.0f;
  for (int k = 0; k < config.n_expert_used; ++k) {
    uint32_t best = key[0];
    int best_i = 0;
    float best_value = value[0];
#pragma unroll
    for (int i = 1; i < kPer; ++i)
      if (key[i] > best) best = key[i], best_i = i, best_value = value[i];
    const uint32_t winner = warp_max(best);
    const int chosen =
        static_cast<int>(warp_min(best == winner ? static_cast<uint32_t>(lane + 32 * best_i) : 0xffffu));
    best_value = __shfl_sync(0xffffffffu, best_value, chosen & 31);
    if (config.gating == Gating::SoftmaxSelected) best_value = expf(best_value - top);
    if (isnan(best_value)) best_value = 0.0f;
    sum += best_value;
    if (lane == k) id = chosen, weight = best_value;
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (lane + 32 * i == chosen) key[i] = 0;
  }
  if (!(sum > 0.0f) && config.normalize) {
    weight = 1.0f;
    sum = static_cast<float>(config.n_expert_used);
  }
  const bool divide = config.normalize || config.gating == Gating::SoftmaxSelected;
  if (divide && sum > 0.0f) weight /= sum;
  weight *= config.weights_scale;
}

template <class Logit>
__device__ __forceinline__ void choose_any(const RouteConfig& config, const Logit& logit, const float* bias,
                                           int lane, int& id, float& weight) {
  if (config.n_expert <= 256)
    choose<8>(config, logit, bias, lane, id, weight);
  else
    choose<kMaxDeviceExperts / 32>(config, logit, bias, lane, id, weight);
}

__device__ __forceinline__ uint32_t count_up(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

}  // namespace thermo
