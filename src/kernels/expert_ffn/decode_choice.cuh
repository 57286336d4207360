// One row's choice of experts, made by every block that needs it, and what becomes of cold ones.
#pragma once

#include "kernels/expert_ffn/decode_ffn_cuda.h"
#include "kernels/route_topk/cold_answer.cuh"
#include "kernels/route_topk/route_choose.cuh"

namespace thermo {

// The logit of expert threadIdx.x.
__device__ __forceinline__ float logit_of(const DecodeFfnArgs& a) {
  float sum = -INFINITY;
  if (static_cast<int>(threadIdx.x) < a.config.n_expert) {
    sum = 0.0f;
#pragma unroll
    for (int p = 0; p < kRouterParts; ++p)
      sum += __ldcg(a.routes.partial + p * a.config.n_expert + threadIdx.x);
  }
  return sum;
}
__device__ __forceinline__ const uint8_t* base_of(const DecodeFfnArgs& a) {
  return static_cast<int>(threadIdx.x) < a.config.n_expert ? a.base[threadIdx.x] : nullptr;
}
__device__ __forceinline__ CameParcel came_parcel(const DeviceCold& cold, int i) {
  const ulonglong2 parcel = __ldcg(reinterpret_cast<const ulonglong2*>(cold.came) + i);
  return {reinterpret_cast<const uint8_t*>(parcel.x), static_cast<int64_t>(parcel.y)};
}
// Where the experts lie that came as parcels; others stay where `base` says.
__device__ __forceinline__ const uint8_t* base_with_parcels(const DeviceCold& cold, const uint8_t* base) {
#pragma unroll
  for (int i = 0; i < kMaxParcels; ++i) {
    const CameParcel parcel = came_parcel(cold, i);
    if (parcel.address != nullptr && parcel.expert == static_cast<int>(threadIdx.x)) base = parcel.address;
  }
  return base;
}

// What becomes of the chosen experts that are cold, by the first warp of each block, all with the same
// result: some are read in host memory, the others go to the processor and lose their place (base nullptr).
struct ColdChoice {
  unsigned in_host, in_mail;  // bits by place
  int n_cold;
};

__device__ __forceinline__ void deal_cold(const DecodeFfnArgs& a, BlockChoice& choice, ColdChoice& out) {
  const int lane = threadIdx.x;
  const DeviceCold& cold = a.cold;
  const bool here = lane < a.config.n_expert_used;
  const uint8_t* base = here ? choice.chosen_base[lane] : nullptr;
  // No expert is cold either while the table is not filled yet.
  const unsigned mask = __ballot_sync(0xffffffffu, here && base == nullptr && *cold.n_cold > 0);
  const int n_cold = __popc(mask), rank = __popc(mask & ((1u << lane) - 1));
  if ((mask >> lane & 1) && rank < fetched_of(cold, n_cold)) {
    base = cold.host_base[choice.chosen[lane]];
    choice.chosen_base[lane] = base;
  }
  const unsigned in_host = __ballot_sync(0xffffffffu, (mask >> lane & 1) && base != nullptr);
  if (lane == 0) out = {in_host, mask & ~in_host, n_cold};
}

// Tells the host: one warp of the step.
__device__ __noinline__ void post_cold(const DecodeFfnArgs& a, const BlockChoice& choice,
                                       const ColdChoice& dealt, float x_scale) {
  const int lane = threadIdx.x % 32, n_used = a.config.n_expert_used;
  const DeviceCold& cold = a.cold;
  const float weight = weight_of_choice(a.config, a.bias, choice, lane);
  if (lane < n_used) cold.chosen[lane] = static_cast<int16_t>(choice.chosen[lane]);
  const int n_pairs = __popc(dealt.in_mail);
  if (dealt.in_mail >> lane & 1)
    cold.mail->pairs[__popc(dealt.in_mail & ((1u << lane) - 1))] = {
        0, static_cast<int16_t>(choice.chosen[lane]), weight};
  CameParcel parcels[kMaxParcels];
#pragma unroll
  for (int i = 0; i < kMaxParcels; ++i) parcels[i] = came_parcel(cold, i);
  unsigned came = 0, carried = 0;
#pragma unroll
  for (int i = 0; i < kMaxParcels; ++i) {
    const bool here = parcels[i].address != nullptr;
    came |= static_cast<unsigned>(here) << i;
    if (__any_sync(0xffffffffu, here && lane < n_used && choice.chosen[lane] == parcels[i].expert))
      carried |= 1u << i;
  }
  __syncwarp();
  if (lane != 0) return;
  cold.record->n_pairs = n_pairs;
  cold.record->n_cold = dealt.n_cold;
  cold.record->n_fetched = dealt.n_cold - n_pairs;
  cold.record->came = came;
  cold.record->carried = carried;
  if (n_pairs > 0 || carried != 0)
    post_mail(cold, n_pairs, x_scale);
  else
    cold.record->posted_ns = device_clock_ns();
}

}  // namespace thermo
