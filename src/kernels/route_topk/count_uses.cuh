// Counting the uses of experts where the choice is made: rows of text at once, uncommitted rows when they are
// accepted (count_drafted_cuda()).
#pragma once

#include "kernels/route_topk/route_topk_cuda.h"

namespace thermo {

// Where the choices of an uncommitted row wait; nullptr: the row is text. Three reads that wait for each
// other, of what was there when the step began: to be asked for before the kernel waits for its inputs.
__device__ __forceinline__ int16_t* drafted_of(const DeviceUses& uses, int row, int n_used) {
  if (uses.drafted == nullptr || row >= *uses.n_valid) return nullptr;
  const int g = uses.group[row];
  if (uses.group_uncommitted[g] == 0) return nullptr;
  return uses.drafted + uses.group_sequence[g] * uses.sequence_stride +
         static_cast<int64_t>(row - uses.group_begin[g]) * n_used;
}

// Expert `id` is number k of those that the row chose; `drafted`: drafted_of() it.
__device__ __forceinline__ void count_use(const DeviceUses& uses, int16_t* drafted, int k, int id) {
  if (drafted != nullptr)
    drafted[k] = static_cast<int16_t>(id);
  else if (uses.counts != nullptr)
    atomicAdd(uses.counts + id, 1u);
}

}  // namespace thermo
