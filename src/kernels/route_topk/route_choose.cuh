// The choice of one row's experts by one warp: scores in registers, one warp-wide maximum per chosen expert.
#pragma once

#include "kernels/route_topk/route_topk_cuda.h"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

// Order of floats as order of unsigned numbers above 1; 1 is a NaN, which loses to every number; 0 is no
// expert.
__device__ __forceinline__ uint32_t order_key(float x) {
  if (isnan(x)) return 1;
  const uint32_t bits = __float_as_uint(x);
  return max(2u, bits & 0x80000000u ? ~bits : bits | 0x80000000u);
}

__device__ __forceinline__ float from_order_key(uint32_t key) {
  if (key <= 1) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ float gate_value(Gating gating, float x, float top) {
  if (gating == Gating::Every) return 1.0f;
  if (gating == Gating::Sigmoid) return sigmoid_device(x);
  if (gating == Gating::SqrtSoftplus) return sqrtf(softplus_device(x));
  return expf(x - top);
}

// Ids and weights of one row, entry k in lane k. `logit(e)`: of expert e; lane l has the experts kPer * l ...
// One warp runs this while the card waits, mostly with cold instructions: loops are not unrolled where
// that makes code long, and only the chosen are turned into weights where their order is that of the logits.
template <int kPer, class Logit>
__device__ __forceinline__ void choose(const RouteConfig& config, const Logit& logit, const float* bias,
                                       int lane, int& id, float& weight) {
  float value[kPer];   // the logit; later what becomes the weight, where it orders the experts
  uint32_t key[kPer];  // what is compared
  uint32_t top_key = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = lane * kPer + i;
    value[i] = e < config.n_expert ? logit(e) : -INFINITY;
    key[i] = e < config.n_expert ? order_key(value[i]) : 0;
    top_key = max(top_key, key[i]);
  }
  const float top = from_order_key(warp_max(top_key));
  const bool softmax = config.gating == Gating::Softmax;
  const bool by_logit =
      config.gating == Gating::SoftmaxSelected || (softmax && bias == nullptr && config.normalize);
  if (!by_logit) {
    float total = 0.0f;
#pragma unroll 1
    for (int i = 0; i < kPer; ++i) {
      const float x = gate_value(config.gating, value[0], top);
      if (lane * kPer + i < config.n_expert && !isnan(x)) total += x;
#pragma unroll
      for (int j = 0; j + 1 < kPer; ++j) value[j] = value[j + 1];
      value[kPer - 1] = x;
    }
    const float scale = softmax ? 1.0f / warp_sum(total) : 1.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int e = lane * kPer + i;
      value[i] *= scale;
      if (e < config.n_expert && !(softmax && bias == nullptr))
        key[i] = order_key(bias == nullptr ? value[i] : value[i] + bias[e]);
    }
  }
  if (config.gating == Gating::SoftmaxSelected && bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (lane * kPer + i < config.n_expert) key[i] = order_key(value[i] + bias[lane * kPer + i]);
  }

  id = 0;
#pragma unroll 1
  for (int k = 0; k < config.n_expert_used; ++k) {
    uint32_t best = key[0];
#pragma unroll
    for (int i = 1; i < kPer; ++i) best = max(best, key[i]);
    const uint32_t winner = warp_max(best);
    const int from = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, best == winner))) - 1;
    int place = 0;
#pragma unroll
    for (int i = kPer - 1; i >= 0; --i)
      if (key[i] == winner) place = i;
    const int chosen = __shfl_sync(0xffffffffu, place, from);
    if (lane == k) id = from * kPer + chosen;
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (lane == from && i == chosen) key[i] = 0;
  }
  float mine = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const float x = __shfl_sync(0xffffffffu, value[i], id / kPer);
    if (id % kPer == i) mine = x;
  }
  if (by_logit) mine = expf(mine - top);
  if (isnan(mine) || lane >= config.n_expert_used) mine = 0.0f;
  const float sum = warp_sum(mine);
  weight = mine;
  if (!(sum > 0.0f) && config.normalize)
    weight = 1.0f / static_cast<float>(config.n_expert_used);
  else if ((config.normalize || config.gating == Gating::SoftmaxSelected) && sum > 0.0f)
    weight = mine / sum;
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

// The choice of one row by kBlockExperts threads or more, expert e in thread e: the fastest way for a single
// row, 0.5 us against several of one warp. A warp ranks its own 32 by comparing each with each;
// the first n_expert_used of every warp are ranked against each other. n_expert <= kBlockExperts,
// n_expert_used <= 31.
inline constexpr int kBlockExperts = 256;

// The first of each warp. Not needed once they are ranked.
struct BlockCandidates {
  alignas(16) unsigned long long key[8 * 32];  // order_key above, 0xffff - expert below
  float value[8 * 32];
  const uint8_t* base[8 * 32];
  float scratch[2][8];
};
// By place.
struct BlockChoice {
  const uint8_t* chosen_base[32];
  float chosen_value[32];
  int32_t chosen[32];
};

// Begins with the logit of expert e (`base`: where it lies), ends before a barrier. All threads of the block
// take part, those of the same row have the same `c`.
__device__ __forceinline__ void offer_candidate(const RouteConfig& config, int e, float x, const float* bias,
                                                const uint8_t* base, BlockCandidates& c) {
  const int warp = e / 32, lane = e % 32, n_used = config.n_expert_used;
  const bool here = e < config.n_expert;
  const bool softmax = config.gating == Gating::Softmax;
  // Where the order is that of the logits and only ratios count, the chosen alone are turned into weights.
  const bool by_logit =
      config.gating == Gating::SoftmaxSelected || (softmax && bias == nullptr && config.normalize);
  float value = x, score = x;
  if (!by_logit) {
    if (softmax) {
      uint32_t top = here ? order_key(x) : 0;
      top = warp_max(top);
      if (lane == 0 && warp < 8) c.scratch[0][warp] = __uint_as_float(top);
      __syncthreads();
      uint32_t most = 0;
      for (int w = 0; w < 8; ++w) most = max(most, __float_as_uint(c.scratch[0][w]));
      value = expf(x - from_order_key(most));
      const float part = warp_sum(here && !isnan(value) ? value : 0.0f);
      if (lane == 0 && warp < 8) c.scratch[1][warp] = part;
      __syncthreads();
      float total = 0.0f;
      for (int w = 0; w < 8; ++w) total += c.scratch[1][w];
      value /= total;
      score = bias == nullptr ? x : value;
    } else {
      value = score = gate_value(config.gating, x, 0.0f);
    }
  }
  if (bias != nullptr && here) score += bias[e];
  if (warp >= 8) return;
  const uint32_t key = here ? order_key(score) : 0;
  int before = 0;
#pragma unroll 8
  for (int i = 0; i < 32; ++i) {
    const uint32_t other = __shfl_sync(0xffffffffu, key, i);
    before += other > key || (other == key && i < lane);
  }
  if (before >= n_used) return;
  const int at = warp * n_used + before;
  c.key[at] = static_cast<unsigned long long>(key) << 32 | static_cast<unsigned>(0xffff - e);
  c.value[at] = value;
  c.base[at] = base;
}

// Between two barriers, by thread e of n_threads: fills `chosen`. kQuads: four threads to a candidate where
// there are as many, 0.3 us less.
template <bool kQuads = false>
__device__ __forceinline__ void rank_candidates(const RouteConfig& config, int e, int n_threads,
                                                const BlockCandidates& c, BlockChoice& chosen) {
  const int n_used = config.n_expert_used, n = 8 * n_used;
  const bool wide = kQuads && n_threads >= 4 * n;
  const int at = wide ? e / 4 : e, share = wide ? e % 4 : 0;
  if (at >= n) return;
  const unsigned long long key = c.key[at];
  int before = 0;
#pragma unroll 8
  for (int i = 2 * share; i < n; i += wide ? 8 : 2) {
    const ulonglong2 other = *reinterpret_cast<const ulonglong2*>(c.key + i);
    before += (other.x > key) + (other.y > key);
  }
  if (wide) {
    const unsigned quad = 0xfu << (threadIdx.x & 28);
    before += __shfl_xor_sync(quad, before, 1);
    before += __shfl_xor_sync(quad, before, 2);
  }
  if (before >= n_used || share != 0) return;
  chosen.chosen[before] = 0xffff - static_cast<int>(key & 0xffffu);
  chosen.chosen_value[before] = c.value[at];
  chosen.chosen_base[before] = c.base[at];
}

// The weight of place `lane`, by one warp, after the barrier.
__device__ __forceinline__ float weight_of_choice(const RouteConfig& config, const float* bias,
                                                  const BlockChoice& c, int lane) {
  const int n_used = config.n_expert_used;
  const bool softmax = config.gating == Gating::Softmax;
  const bool by_logit =
      config.gating == Gating::SoftmaxSelected || (softmax && bias == nullptr && config.normalize);
  float mine = lane < n_used ? c.chosen_value[lane] : -INFINITY;
  if (by_logit) {
    float top = mine;
    for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
    mine = expf(mine - top);
  }
  if (isnan(mine) || lane >= n_used) mine = 0.0f;
  const float sum = warp_sum(mine);
  float weight = mine;
  if (!(sum > 0.0f) && config.normalize)
    weight = 1.0f / static_cast<float>(n_used);
  else if ((config.normalize || config.gating == Gating::SoftmaxSelected) && sum > 0.0f)
    weight = mine / sum;
  return weight * config.weights_scale;
}

__device__ __forceinline__ uint32_t count_up(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

}  // namespace thermo
