// Products of many activation rows: a block of 8 warps multiplies 8 panels (128 weight rows) with a tile of
// 64 activation rows that it stages in shared memory, 256 columns at a time, the next stage copied while the
// current one is multiplied. Each warp decodes its own panel straight from memory into tensor-core operands
// (panel_mma.cuh), once for all 64 rows.
#pragma once

#include "kernels/linear/copy_async.cuh"
#include "kernels/quant_matmul/panel_mma.cuh"

namespace thermo {

inline constexpr int kTileActs = 64;
inline constexpr int kTileThreads = 256;
inline constexpr int kTileRowBytes = 512 + 64;  // 256 columns, shifted by half the banks from row to row
inline constexpr int kTileStageBytes = kTileActs * kTileRowBytes;
inline constexpr int kTileSharedBytes = 2 * kTileStageBytes + kTileActs * static_cast<int>(sizeof(int));

// Stages chunk `chunk` of the tile's rows. rows[i] < 0: zeros.
__device__ __forceinline__ void stage_acts(std::byte* stage, const DeviceActs& x, const int* rows, int chunk,
                                           int n_cols, int n_acts) {
  const int padded = (n_cols + 31) / 32 * 4 - chunk * 32;  // 16-byte pieces of a row from here on
  for (int i = threadIdx.x; i < (n_acts + 7) / 8 * 8 * 32; i += kTileThreads) {
    const int act = i / 32, piece = i % 32;
    const int row = rows[act];
    const bool valid = row >= 0 && piece < padded;
    const half* const from =
        static_cast<const half*>(x.f16) + (valid ? row * x.f16_stride + chunk * 256 + piece * 8 : 0);
    copy16(stage + act * kTileRowBytes + piece * 16, from, valid);
  }
}

// acc[m] += panel m of kMatrices matrices of one type times the tile. Panels may be null: nothing to do for
// this warp, but it still takes part in the staging. REQUIRES: rows filled and visible to the block.
template <DType T, int kMatrices>
__device__ __forceinline__ void tile_product(const uint8_t* const (&panels)[kMatrices], int n_cols,
                                             const DeviceActs& x, std::byte* shared, const int* rows,
                                             int n_acts, float (&acc)[kMatrices][kTileActs / 8][4]) {
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int n_chunks = (n_cols + 255) / 256;
  const int n_tiles = (n_acts + 7) / 8;
  stage_acts(shared, x, rows, 0, n_cols, n_acts);
  copy_commit();
  for (int chunk = 0; chunk < n_chunks; ++chunk) {
    if (chunk + 1 < n_chunks)
      stage_acts(shared + (chunk + 1) % 2 * kTileStageBytes, x, rows, chunk + 1, n_cols, n_acts);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    const std::byte* const stage = shared + chunk % 2 * kTileStageBytes + g * kTileRowBytes + t * 16;
    const auto load_b = [&](int s, int n) {
      return *reinterpret_cast<const uint4*>(stage + n * 8 * kTileRowBytes + s * 64);
    };
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
      if (panels[m] != nullptr)
        multiply_chunk<T, kTileActs / 8>(panels[m], chunk, min(8, (n_cols - chunk * 256) / 32), n_tiles, lane,
                                         load_b, acc[m]);
    __syncthreads();
  }
}

}  // namespace thermo
