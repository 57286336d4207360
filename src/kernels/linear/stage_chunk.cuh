// A chunk of a panel through shared memory.
#pragma once

#include "kernels/linear/copy_async.cuh"
#include "kernels/linear/device_matrix.h"
#include "kernels/quant_matmul/panel_layout.h"

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

// The same of a known type: a few instructions. `bytes`: of the panel.
template <DType T>
__device__ __forceinline__ void stage_chunk_of(std::byte* stage, const uint8_t* panel, size_t bytes,
                                               int chunk, int lane) {
  constexpr PanelFormat f = kPanelFormat<T>;
  constexpr bool kBig = f.block_cols == 256;
  constexpr int kUnits = kBig ? 1 : 8 / f.unit_blocks;
  constexpr int kBytes = kBig ? 64 + f.body_bytes() : kUnits * f.unit_bytes();
  const int header = kBig ? chunk / f.unit_blocks * f.unit_bytes() : chunk * kBytes;
  const uint8_t* const from = panel + header + lane * 16;
  std::byte* const to = stage + lane * 16;
  // From byte 64 on; a last chunk of a 32-column type may be short.
  const int skip = kBig ? chunk % f.unit_blocks * f.body_bytes() : 0;
  const int n = kBig ? kBytes : min(kBytes, static_cast<int>(bytes) - header);
#pragma unroll
  for (int i = 0; i < kBytes; i += 512)
    if (lane * 16 + i < n)
      copy16(to + i, from + i + (f.unit_blocks > 1 && (i > 0 || lane >= 4) ? skip : 0), true);
}

}  // namespace thermo
