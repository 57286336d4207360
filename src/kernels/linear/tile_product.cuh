// Products of many activation rows: a block of up to 8 warps multiplies 1 or 2 panels a warp (256 weight rows
// in all) with a tile of kActs activation rows that it stages in shared memory, 256 columns at a time, the
// next stage copied while the current one is multiplied. Each warp decodes its panels straight from memory
// into tensor-core operands (panel_mma.cuh), once for all rows; every load of activations from shared memory
// feeds four products. Codes are loaded some sub-blocks ahead: with few rows, where the products take no
// time, the whole next chunk.
//
// Q4_K on an H200, 2048 x 4096 weights, 2048 rows: 304 TFLOP/s with 128 rows a tile, 261 with 64; 197 with
// one panel a warp and 64 rows, which loads shared memory twice as often. One panel is for products of so few
// tiles that two leave most of the card's schedulers without a warp.
#pragma once

#include "kernels/linear/copy_async.cuh"
#include "kernels/quant_matmul/panel_mma.cuh"

namespace thermo {

inline constexpr int kMaxTileThreads = 256;
inline constexpr int kTilePanels = 2;                   // of a warp, at most
inline constexpr int kTileWarpRows = 16 * kTilePanels;  // weight rows of a warp

// The panels of a warp from `panel` on; past the end the last one again, stored nowhere. nullptr: none is
// there.
__device__ __forceinline__ void warp_panels(const DeviceMatrix& w, int panel,
                                            const uint8_t* (&panels)[kTilePanels]) {
#pragma unroll
  for (int p = 0; p < kTilePanels; ++p)
    panels[p] =
        panel * 16 >= w.n_rows ? nullptr : w.panels + min(panel + p, (w.n_rows - 1) / 16) * w.panel_bytes;
}

// What a warp has of n_acts activation rows: output(act) is where the products of one begin.
template <int kActs, class Output>
__device__ __forceinline__ void store_warp_tile(const float (&acc)[kTilePanels][kActs / 8][4], int panel,
                                                int n_rows, int n_acts, float scale, const Output& output) {
  const int g = threadIdx.x % 32 >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int p = 0; p < kTilePanels; ++p) {
    const int row = (panel + p) * 16 + 2 * g;
    if (row >= n_rows) break;
    const bool pair = row + 1 < n_rows;
#pragma unroll
    for (int n = 0; n < kActs / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int a = 8 * n + 2 * t + i;
        if (a >= n_acts) continue;
        float* const y = output(a) + row;
        y[0] = acc[p][n][i] * scale;
        if (pair) y[1] = acc[p][n][i + 2] * scale;
      }
  }
}
inline constexpr int kTileRowBytes = 512 + 64;  // 256 columns, shifted by half the banks from row to row
template <int kActs>
inline constexpr int kTileStageBytes = kActs* kTileRowBytes;
template <int kActs>
inline constexpr int kTileSharedBytes = 2 * kTileStageBytes<kActs> + kActs* static_cast<int>(sizeof(int));

// The threads that stage and multiply a tile together: a block, or a part of one.
struct TileThreads {
  int thread, n_threads;

  __device__ __forceinline__ static TileThreads block() {
    return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  }
};
// Chunks first .. end - 1 of a part of a block. All parts wait for each other as often as the one with the
// most: each goes on to `stop`, without work after `end`.
struct TileChunks {
  int first, end;
  int stop = end;
};

// Where an activation row begins, in pieces of 16 bytes.
__device__ __forceinline__ uint32_t tile_row(const DeviceActs& x, int row) {
  return static_cast<uint32_t>(row) * static_cast<uint32_t>(x.f16_stride / 8);
}
inline constexpr uint32_t kNoTileRow = ~0u;

// Stages chunk `chunk` of the tile's rows, a row to a warp. rows[i]: tile_row() or kNoTileRow: zeros.
__device__ __forceinline__ void stage_acts(std::byte* stage, const DeviceActs& x, const uint32_t* rows,
                                           int chunk, int n_cols, int n_acts, const TileThreads& threads,
                                           int row_bytes = kTileRowBytes) {
  const int piece = threads.thread % 32;
  const bool inside = piece < (n_cols + 31) / 32 * 4 - chunk * 32;
  const uint4* const from = static_cast<const uint4*>(x.f16) + chunk * 32 + piece;
  const int n = (n_acts + 15) / 16 * 16;
#pragma unroll 4
  for (int act = threads.thread / 32; act < n; act += threads.n_threads / 32) {
    const uint32_t row = rows[act];
    const bool valid = inside && row != kNoTileRow;
    copy16(stage + act * row_bytes + piece * 16, valid ? from + row : x.f16, valid);
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
  __device__ static __forceinline__ void load_scales(BlockScaleReader<T>& to, const uint8_t* panel, int chunk,
                                                     int lane) {
    const uint8_t* const unit = panel + static_cast<size_t>(chunk / f.unit_blocks) * f.unit_bytes();
    const int place = chunk % f.unit_blocks;
    to.load(unit + place * f.header_step(), unit + 64 + place * f.body_bytes(), lane >> 2);
  }
  __device__ __forceinline__ void operands(int sub, int lane, uint32_t (&a0)[4], uint32_t (&a1)[4]) const {
    make_operands<T>(raw[sub % kAhead], scales[kBig ? 0 : sub % kAhead], kBig ? sub : 0, lane & 3, a0, a1);
  }
};

// acc[p] += panel p of a warp, all of one type, times the tile, over `chunks`. The first panel may be null:
// nothing to do for this warp, but it still takes part in the staging. ready() is called when the first
// weights are on their way; after it activations may be read, and `rows` is filled and visible to these
// threads.
template <DType T, int kActs, int kPanels, class Ready>
__device__ __forceinline__ void tile_product(const uint8_t* const (&panels)[kPanels], int n_cols,
                                             const DeviceActs& x, std::byte* shared, const uint32_t* rows,
                                             int n_acts, float (&acc)[kPanels][kActs / 8][4],
                                             const TileChunks& chunks, const TileThreads& threads,
                                             const Ready& ready) {
  // What registers allow with two blocks to a multiprocessor, or one with 128 rows.
  constexpr int kAhead = kActs <= 16 ? 8 : kPanels == 1 || kActs > 64 ? 4 : 2;
  using Reader = PanelReader<T, kAhead>;
  constexpr bool kScalesAhead = kPanels == 1 && Reader::kBig;
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int n_subs = min((n_cols + 31) / 32, 8 * chunks.end);
  const bool works = panels[0] != nullptr;
  Reader readers[kPanels];
  BlockScaleReader<T> scales_ahead;
  const auto load = [&](int chunk, int sub) {
    if (!works || chunk * 8 + sub >= n_subs) return;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) readers[p].load(panels[p], chunk, sub, lane);
  };
  if (chunks.first < chunks.end) {
    if (kScalesAhead && works) Reader::load_scales(scales_ahead, panels[0], chunks.first, lane);
#pragma unroll
    for (int sub = 0; sub < kAhead; ++sub) load(chunks.first, sub);
  }
  ready();
  if (chunks.first < chunks.end) stage_acts(shared, x, rows, chunks.first, n_cols, n_acts, threads);
  copy_commit();
  for (int chunk = chunks.first, turn = 0; chunk < chunks.stop; ++chunk, turn ^= 1) {
    const bool multiplies = works && chunk < chunks.end;
    if (multiplies) {
      if constexpr (kScalesAhead) {
        readers[0].scales[0] = scales_ahead;
        if (chunk + 1 < chunks.end) Reader::load_scales(scales_ahead, panels[0], chunk + 1, lane);
      } else if constexpr (Reader::kBig) {
#pragma unroll
        for (int p = 0; p < kPanels; ++p) Reader::load_scales(readers[p].scales[0], panels[p], chunk, lane);
      }
    }
    if (chunk + 1 < chunks.end)
      stage_acts(shared + (turn ^ 1) * kTileStageBytes<kActs>, x, rows, chunk + 1, n_cols, n_acts, threads);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    const std::byte* const stage = shared + turn * kTileStageBytes<kActs> + g * kTileRowBytes + t * 16;
    if (multiplies) {
#pragma unroll
      for (int sub = 0; sub < 8; ++sub) {
        if (!Reader::kBig && chunk * 8 + sub >= n_subs) break;
        uint32_t a0[kPanels][4], a1[kPanels][4];
#pragma unroll
        for (int p = 0; p < kPanels; ++p) readers[p].operands(sub, lane, a0[p], a1[p]);
        load(sub + kAhead < 8 ? chunk : chunk + 1, (sub + kAhead) % 8);
#pragma unroll
        for (int n = 0; n < kActs / 8; n += 2) {
          if (8 * n >= n_acts) break;
          const std::byte* const at = stage + n * 8 * kTileRowBytes + sub * 64;
          const uint4 b = *reinterpret_cast<const uint4*>(at),
                      c = *reinterpret_cast<const uint4*>(at + 8 * kTileRowBytes);
#pragma unroll
          for (int p = 0; p < kPanels; ++p) {
            mma_16816(acc[p][n], a0[p], b.x, b.y);
            mma_16816(acc[p][n + 1], a0[p], c.x, c.y);
          }
#pragma unroll
          for (int p = 0; p < kPanels; ++p) {
            mma_16816(acc[p][n], a1[p], b.z, b.w);
            mma_16816(acc[p][n + 1], a1[p], c.z, c.w);
          }
        }
      }
    }
    __syncthreads();
  }
}

// The same over all columns for at most kLowActs rows, of which all columns are staged at once: the warps of
// a block then run without waiting for each other. `rows` lies after the stage.
inline constexpr int kLowActs = 16;
__host__ __device__ constexpr int low_row_bytes(int n_cols) {
  return (n_cols + 255) / 256 * 512 + 64;
}
__host__ __device__ constexpr int low_shared_bytes(int n_cols) {
  return kLowActs * (low_row_bytes(n_cols) + static_cast<int>(sizeof(uint32_t)));
}

// What is loaded of a chunk before its turn: all codes, and the scales, of which the four lanes of a quad
// hold a vector each.
template <DType T>
struct ChunkAhead {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr bool kBig = f.block_cols == 256;
  static constexpr bool kShared = kBig && f.scales != ScaleKind::SixSplit;
  static constexpr int kVectors = f.scale_bytes / 64;

  RawCodes raw[8];
  BlockScaleReader<T> scales[kBig ? 1 : 8];
  uint32_t d, m;
  uint2 vector;
  const uint8_t *header, *body;

  __device__ __forceinline__ void aim(const uint8_t* panel, int chunk) {
    if constexpr (kBig) {
      const uint8_t* const unit = panel + static_cast<size_t>(chunk / f.unit_blocks) * f.unit_bytes();
      const int place = chunk % f.unit_blocks;
      header = unit + place * f.header_step();
      body = unit + 64 + place * f.body_bytes();
    } else {
      header = body = panel + static_cast<size_t>(chunk * 8 / f.unit_blocks) * f.unit_bytes();
    }
  }
  // Of the chunk that was aimed at.
  __device__ __forceinline__ void load_codes_of(int sub, int lane) {
    const int g = lane >> 2, t = lane & 3;
    if constexpr (kBig) {
      raw[sub] = load_codes<T>(body + f.scale_bytes + sub * f.sub_bytes(), g, t);
    } else {
      const uint8_t* const unit = body + sub / f.unit_blocks * f.unit_bytes();
      const int place = sub % f.unit_blocks;
      raw[sub] = load_codes<T>(unit + 64 + place * f.body_bytes(), g, t);
      scales[sub].load(unit + place * f.header_step(), unit + 64 + place * f.body_bytes(), g);
    }
  }
  __device__ __forceinline__ void load_scales(int lane) {
    const int g = lane >> 2, t = lane & 3;
    if constexpr (kShared) {
      d = load4(header + 4 * g);
      if constexpr (f.has_min()) m = load4(header + 32 + 4 * g);
      vector = load8(body + 64 * min(t, kVectors - 1) + 8 * g);
    } else if constexpr (kBig) {
      scales[0].load(header, body, g);
    }
  }
  // Gives every lane of a quad all of it.
  __device__ __forceinline__ void spread_scales() {
    if constexpr (kShared) {
      scales[0].d = d;
      if constexpr (f.has_min()) scales[0].m = m;
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        scales[0].small[j] = {__shfl_sync(0xffffffffu, vector.x, j, 4),
                              __shfl_sync(0xffffffffu, vector.y, j, 4)};
    }
  }
};

template <DType T, int kPanels, class Ready>
__device__ __forceinline__ void low_product(const uint8_t* const (&panels)[kPanels], int n_cols,
                                            const DeviceActs& x, std::byte* shared, const uint32_t* rows,
                                            int n_acts, float (&acc)[kPanels][kLowActs / 8][4],
                                            const Ready& ready) {
  using Ahead = ChunkAhead<T>;
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int n_chunks = (n_cols + 255) / 256, n_subs = (n_cols + 31) / 32, row_bytes = low_row_bytes(n_cols);
  const bool works = panels[0] != nullptr, both = n_acts > 8;
  Ahead ahead[kPanels];
  if (works) {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      ahead[p].aim(panels[p], 0);
      ahead[p].load_scales(lane);
    }
#pragma unroll
    for (int sub = 0; sub < 8; ++sub)
#pragma unroll
      for (int p = 0; p < kPanels; ++p)
        if (Ahead::kBig || sub < n_subs) ahead[p].load_codes_of(sub, lane);
  }
  ready();
  for (int chunk = 0; chunk < n_chunks; ++chunk)
    stage_acts(shared + chunk * 512, x, rows, chunk, n_cols, n_acts, TileThreads::block(), row_bytes);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  if (!works) return;
  const std::byte* stage = shared + g * row_bytes + t * 16;
#pragma unroll 1
  for (int chunk = 0; chunk < n_chunks; ++chunk, stage += 512) {
    const bool more = chunk + 1 < n_chunks;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      ahead[p].spread_scales();
      if (more) {
        ahead[p].aim(panels[p], chunk + 1);
        if constexpr (Ahead::kShared) ahead[p].load_scales(lane);
      }
    }
#pragma unroll
    for (int sub = 0; sub < 8; ++sub) {
      if (!Ahead::kBig && chunk * 8 + sub >= n_subs) break;
      uint32_t a0[kPanels][4], a1[kPanels][4];
#pragma unroll
      for (int p = 0; p < kPanels; ++p)
        make_operands<T>(ahead[p].raw[sub], ahead[p].scales[Ahead::kBig ? 0 : sub], Ahead::kBig ? sub : 0, t,
                         a0[p], a1[p]);
      if (more && (Ahead::kBig || (chunk + 1) * 8 + sub < n_subs)) {
#pragma unroll
        for (int p = 0; p < kPanels; ++p) ahead[p].load_codes_of(sub, lane);
      }
      const uint4 b = *reinterpret_cast<const uint4*>(stage + sub * 64);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) mma_16816(acc[p][0], a0[p], b.x, b.y);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) mma_16816(acc[p][0], a1[p], b.z, b.w);
      if (both) {
        const uint4 c = *reinterpret_cast<const uint4*>(stage + 8 * row_bytes + sub * 64);
#pragma unroll
        for (int p = 0; p < kPanels; ++p) mma_16816(acc[p][1], a0[p], c.x, c.y);
#pragma unroll
        for (int p = 0; p < kPanels; ++p) mma_16816(acc[p][1], a1[p], c.z, c.w);
      }
    }
    if constexpr (Ahead::kBig && !Ahead::kShared) {
      if (more)
#pragma unroll
        for (int p = 0; p < kPanels; ++p) ahead[p].load_scales(lane);
    }
  }
}

}  // namespace thermo
