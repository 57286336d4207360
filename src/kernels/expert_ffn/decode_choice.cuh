// A row's choice of experts, made by every block that needs it, and what becomes of cold ones.
#pragma once

#include "kernels/expert_ffn/decode_ffn_cuda.h"
#include "kernels/route_topk/cold_answer.cuh"
#include "kernels/route_topk/count_uses.cuh"
#include "kernels/route_topk/route_choose.cuh"

namespace thermo {

// The logit of expert e of a row of kRows.
template <int kRows = 1>
__device__ __forceinline__ float logit_of(const DecodeFfnArgs& a, int e, int row = 0) {
  float sum = -INFINITY;
  if (e < a.config.n_expert) {
    sum = 0.0f;
#pragma unroll
    for (int p = 0; p < kRouterParts; ++p)
      sum += __ldcg(a.routes.partial + (p * kRows + row) * a.config.n_expert + e);
  }
  return sum;
}
__device__ __forceinline__ const uint8_t* base_of(const DecodeFfnArgs& a, int e) {
  return e < a.config.n_expert ? a.base[e] : nullptr;
}
// What a block must know about cold experts. One warp asks for it: a line that every warp of every block asks
// for comes late (3.7 us more for a layer).
struct BlockCold {
  CameParcel came[kMaxParcels];
  int n_cold;  // of the layer
};

// A lane's part of it: begin() as soon as it may be read, end() before the barrier that makes it known.
struct BlockColdPart {
  ulonglong2 parcel;
  int n_cold;

  __device__ __forceinline__ void begin(const DeviceCold& cold, int lane) {
    if (lane < kMaxParcels) parcel = __ldcg(reinterpret_cast<const ulonglong2*>(cold.came) + lane);
    n_cold = *cold.n_cold;
  }
  __device__ __forceinline__ void end(BlockCold& to, int lane) const {
    if (lane < kMaxParcels)
      to.came[lane] = {reinterpret_cast<const uint8_t*>(parcel.x), static_cast<int64_t>(parcel.y)};
    if (lane == 0) to.n_cold = n_cold;
  }
};

// What becomes of the chosen experts: hot ones and parcels that came are read on the device, of cold ones
// some in host memory, and the others go to the processor.
struct ColdChoice {
  const uint8_t* base = nullptr;      // where the one at place `lane` is read; nullptr: not here
  unsigned in_host = 0, in_mail = 0;  // bits by place
  int n_cold = 0;
};

// By each warp for itself, all with the same result.
__device__ __forceinline__ ColdChoice deal_cold(const DecodeFfnArgs& a, const BlockChoice& choice,
                                                const BlockCold& block, int lane) {
  ColdChoice out;
  const bool here = lane < a.config.n_expert_used;
  if (here) {
    const int expert = choice.chosen[lane];
    out.base = choice.chosen_base[lane];
#pragma unroll
    for (int i = 0; i < kMaxParcels; ++i)
      if (block.came[i].address != nullptr && block.came[i].expert == expert)
        out.base = block.came[i].address;
  }
  // No expert is cold either while the table is not filled yet.
  const bool cold = here && block.n_cold > 0 && out.base == nullptr;
  const unsigned mask = __ballot_sync(0xffffffffu, cold);
  if (mask == 0) return out;
  out.n_cold = __popc(mask);
  const int rank = __popc(mask & ((1u << lane) - 1));
  if (cold && rank < fetched_of(a.cold, out.n_cold)) out.base = a.cold.host_base[choice.chosen[lane]];
  out.in_host = __ballot_sync(0xffffffffu, cold && out.base != nullptr);
  out.in_mail = mask & ~out.in_host;
  return out;
}

// Where the expert at a place is read. By a whole warp.
template <bool kSplit>
__device__ __forceinline__ const uint8_t* chosen_base_of(const BlockChoice& choice, const ColdChoice& dealt,
                                                         int slot) {
  if constexpr (!kSplit) return choice.chosen_base[slot];
  return reinterpret_cast<const uint8_t*>(
      __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(dealt.base), slot));
}

// Counts the experts of a row: one warp of the step. `drafted`: drafted_of() the row.
__device__ __forceinline__ void count_uses(const DecodeFfnArgs& a, const BlockChoice& choice,
                                           int16_t* drafted, int lane) {
  if (a.routes.uses.counts != nullptr && lane < a.config.n_expert_used)
    count_use(a.routes.uses, drafted, lane, choice.chosen[lane]);
}

// Tells the host: one warp of the step.
__device__ __noinline__ void post_cold(const DecodeFfnArgs& a, const BlockChoice& choice,
                                       const BlockCold& block, const ColdChoice& dealt, float x_scale) {
  const int lane = threadIdx.x % 32, n_used = a.config.n_expert_used;
  const DeviceCold& cold = a.cold;
  const float weight = weight_of_choice(a.config, a.bias, choice, lane);
  if (lane < n_used) cold.chosen[lane] = static_cast<int16_t>(choice.chosen[lane]);
  const int n_pairs = __popc(dealt.in_mail);
  if (dealt.in_mail >> lane & 1)
    cold.mail->pairs[__popc(dealt.in_mail & ((1u << lane) - 1))] = {
        0, static_cast<int16_t>(choice.chosen[lane]), weight};
  unsigned came = 0, carried = 0;
#pragma unroll
  for (int i = 0; i < kMaxParcels; ++i) {
    const CameParcel& parcel = block.came[i];
    if (parcel.address == nullptr) continue;
    came |= 1u << i;
    if (__any_sync(0xffffffffu, lane < n_used && choice.chosen[lane] == parcel.expert)) carried |= 1u << i;
  }
  __syncwarp();
  if (lane != 0) return;
  cold.record->n_pairs = n_pairs;
  cold.record->n_cold = dealt.n_cold;
  cold.record->n_fetched = dealt.n_cold - n_pairs;
  cold.record->came = came;
  cold.record->carried = carried;
  cold.record->x_scale[0] = x_scale;
  if (n_pairs > 0 || carried != 0)
    post_mail(cold, n_pairs);
  else
    cold.record->posted_ns = device_clock_ns();
}

}  // namespace thermo
