// Products of many activation rows: a block of up to 8 warps multiplies 2 panels a warp (256 weight rows in
// all) with a tile of kActs activation rows that it stages in shared memory, 256 columns at a time, the next
// stage copied while the current one is multiplied. Each warp decodes its panels straight from memory into
// tensor-core operands (panel_mma.cuh), once for all rows; every load of activations from shared memory feeds
// four products. Codes are loaded some sub-blocks ahead: with few rows, where the products take no time, the
// whole next chunk.
//
// Q4_K on an H200, 2048 x 4096 weights, 2048 rows: 304 TFLOP/s with 128 rows a tile, 261 with 64; 197 with
// one panel a warp and 64 rows, which loads shared memory twice as often.
#pragma once

#include "kernels/linear/copy_async.cuh"
#include "kernels/quant_matmul/panel_mma.cuh"

namespace thermo {

inline constexpr int kMaxTileThreads = 256;
inline constexpr int kTilePanels = 2;                   // of a warp
inline constexpr int kTileWarpRows = 16 * kTilePanels;  // weight rows of a warp
inline constexpr int kTileRowBytes = 512 + 64;  // 256 columns, shifted by half the banks from row to row
template <int kActs>
inline constexpr int kTileStageBytes = kActs* kTileRowBytes;
template <int kActs>
inline constexpr int kTileSharedBytes = 2 * kTileStageBytes<kActs> + kActs* static_cast<int>(sizeof(int));

// Stages chunk `chunk` of the tile's rows. rows[i] < 0: zeros.
__device__ __forceinline__ void stage_acts(std::byte* stage, const DeviceActs& x, const int* rows, int chunk,
                                           int n_cols, int n_acts) {
  const int padded = (n_cols + 31) / 32 * 4 - chunk * 32;  // 16-byte pieces of a row from here on
  for (int i = threadIdx.x; i < (n_acts + 15) / 16 * 16 * 32; i += blockDim.x) {
    const int act = i / 32, piece = i % 32;
    const int row = rows[act];
    const bool valid = row >= 0 && piece < padded;
    const half* const from =
        static_cast<const half*>(x.f16) + (valid ? row * x.f16_stride + chunk * 256 + piece * 8 : 0);
    copy16(stage + act * kTileRowBytes + piece * 16, from, valid);
  }
}

// The codes and scales that a lane needs of a panel. Codes are loaded kAhead sub-blocks before they are used.
template <DType T, int kAhead>
struct PanelReader {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr bool kBig = f.block_cols == 256;

  RawCodes raw[kAhead];
  BlockScaleReader<T> scales[kBig ? 1 : kAhead];

  // Sub-block `sub` of a chunk; of the types with small blocks its scales too.
  __device__ __forceinline__ void load(const uint8_t* panel, int chunk, int sub, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const int block = kBig ? chunk : chunk * 8 + sub;
    const uint8_t* const unit = panel + static_cast<size_t>(block / f.unit_blocks) * f.unit_bytes();
    const int place = block % f.unit_blocks;
    const uint8_t* const body = unit + 64 + place * f.body_bytes();
    raw[sub % kAhead] = load_codes<T>(body + (kBig ? f.scale_bytes + sub * f.sub_bytes() : 0), g, t);
    if constexpr (!kBig) scales[sub % kAhead].load(unit + place * f.header_step(), body, g);
  }
  __device__ __forceinline__ void load_scales(const uint8_t* panel, int chunk, int lane) {
    if constexpr (kBig) {
      const uint8_t* const unit = panel + static_cast<size_t>(chunk / f.unit_blocks) * f.unit_bytes();
      const int place = chunk % f.unit_blocks;
      scales[0].load(unit + place * f.header_step(), unit + 64 + place * f.body_bytes(), lane >> 2);
    }
  }
  __device__ __forceinline__ void operands(int sub, int lane, uint32_t (&a0)[4], uint32_t (&a1)[4]) const {
    make_operands<T>(raw[sub % kAhead], scales[kBig ? 0 : sub % kAhead], kBig ? sub : 0, lane & 3, a0, a1);
  }
};

// acc[p] += panel p of a warp, all of one type, times the tile. The first may be null: nothing to do for this
// warp, but it still takes part in the staging. REQUIRES: rows filled and visible to the block.
template <DType T, int kActs>
__device__ __forceinline__ void tile_product(const uint8_t* const (&panels)[kTilePanels], int n_cols,
                                             const DeviceActs& x, std::byte* shared, const int* rows,
                                             int n_acts, float (&acc)[kTilePanels][kActs / 8][4]) {
  // What registers allow with two blocks to a multiprocessor, or one with 128 rows.
  constexpr int kAhead = kActs <= 16 ? 8 : kActs <= 64 ? 2 : 4;
  using Reader = PanelReader<T, kAhead>;
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int n_chunks = (n_cols + 255) / 256, n_subs = (n_cols + 31) / 32;
  const bool works = panels[0] != nullptr;
  Reader readers[kTilePanels];
  const auto load = [&](int chunk, int sub) {
    if (!works || chunk * 8 + sub >= n_subs) return;
#pragma unroll
    for (int p = 0; p < kTilePanels; ++p) readers[p].load(panels[p], chunk, sub, lane);
  };
  stage_acts(shared, x, rows, 0, n_cols, n_acts);
  copy_commit();
#pragma unroll
  for (int sub = 0; sub < kAhead; ++sub) load(0, sub);
  for (int chunk = 0; chunk < n_chunks; ++chunk) {
    if (works) {
#pragma unroll
      for (int p = 0; p < kTilePanels; ++p) readers[p].load_scales(panels[p], chunk, lane);
    }
    if (chunk + 1 < n_chunks)
      stage_acts(shared + (chunk + 1) % 2 * kTileStageBytes<kActs>, x, rows, chunk + 1, n_cols, n_acts);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    const std::byte* const stage = shared + chunk % 2 * kTileStageBytes<kActs> + g * kTileRowBytes + t * 16;
    if (works) {
#pragma unroll
      for (int sub = 0; sub < 8; ++sub) {
        if (!Reader::kBig && chunk * 8 + sub >= n_subs) break;
        uint32_t a0[kTilePanels][4], a1[kTilePanels][4];
#pragma unroll
        for (int p = 0; p < kTilePanels; ++p) readers[p].operands(sub, lane, a0[p], a1[p]);
        load(sub + kAhead < 8 ? chunk : chunk + 1, (sub + kAhead) % 8);
#pragma unroll
        for (int n = 0; n < kActs / 8; n += 2) {
          if (8 * n >= n_acts) break;
          const std::byte* const at = stage + n * 8 * kTileRowBytes + sub * 64;
          const uint4 b = *reinterpret_cast<const uint4*>(at),
                      c = *reinterpret_cast<const uint4*>(at + 8 * kTileRowBytes);
#pragma unroll
          for (int p = 0; p < kTilePanels; ++p) {
            mma_16816(acc[p][n], a0[p], b.x, b.y);
            mma_16816(acc[p][n + 1], a0[p], c.x, c.y);
          }
#pragma unroll
          for (int p = 0; p < kTilePanels; ++p) {
            mma_16816(acc[p][n], a1[p], b.z, b.w);
            mma_16816(acc[p][n + 1], a1[p], c.z, c.w);
          }
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace thermo
