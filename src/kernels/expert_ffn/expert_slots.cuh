// What the small and the large form of the experts' products share: slots and where their experts lie.
#pragma once

#include "device/launch.cuh"
#include "kernels/expert_ffn/expert_ffn_cuda.h"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

__device__ __forceinline__ ActsOut acts_out(const DeviceActsOut& o) {
  return {static_cast<half*>(o.f16), o.f32, o.f16_stride, o.f32_stride, o.scale};
}

// Whether the slot is to be computed now, and where its expert lies (nullptr: the shared one).
__device__ __forceinline__ bool resolve(const DeviceExpertArgs& a, const DeviceSlot& slot,
                                        const uint8_t*& base) {
  base = slot.base;
  if (a.table == nullptr) return true;
  const int expert = slot.expert;
  if (expert == a.n_expert) {
    base = nullptr;
    return a.with_shared;
  }
  base = a.table[expert];
  return base != nullptr;
}

// The small form: quantised weights, and all others.
void expert_few_cuda(const DeviceExpertArgs& args, StreamView stream) noexcept;
void expert_ffn_small_cuda(const DeviceExpertArgs& args, StreamView stream) noexcept;

}  // namespace thermo
