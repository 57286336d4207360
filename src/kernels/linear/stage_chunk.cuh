// A chunk of a panel through shared memory.
#pragma once

#include "kernels/linear/copy_async.cuh"
#include "kernels/linear/device_matrix.h"

namespace thermo {

// Asks for a chunk of 256 columns, its header first; copy_commit() and copy_wait() as for every copy. By one
// warp, in order.
__device__ __forceinline__ void stage_chunk(std::byte* stage, const DeviceMatrix& w, const uint8_t* panel,
                                            int chunk, int lane) {
  const int header = (chunk >> w.unit_log2) * w.unit_bytes;
  const int body =
      header + (chunk & ((1 << w.unit_log2) - 1)) * w.body_bytes;  // 64 bytes on, as in the stage
  const int n = min(64 + w.body_bytes, static_cast<int>(w.panel_bytes) - body);  // a last chunk may be short
  const uint8_t* const from = panel + body;
  const int to_header = header - body;
#pragma unroll 2
  for (int i = lane * 16; i < n; i += 32 * 16) copy16(stage + i, from + i + (i < 64 ? to_header : 0), true);
}

}  // namespace thermo
