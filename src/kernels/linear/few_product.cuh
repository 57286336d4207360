// A chunk of 256 columns of one panel times 8 * kTiles activation rows, on integer tensor cores, with the
// bits of panel_exact.cuh: what a warp does for steps of 2 to 64 rows.
//
// The chunk lies in shared memory as in the panel, the activation rows as BlockActs, kFewRowBytes apart.
// Lanes and rows as in panel_mma.cuh: lane = 4 g + t has rows 2g and 2g + 1 of the panel and activation rows
// 8n + 2t and 8n + 2t + 1.
//
// Instructions of a warp for a chunk of Q4_K: about 150 to unpack codes and scales, and 75 for each tile of 8
// rows: a product of 32 columns and four multiply-adds with the scales in each of 8 sub-blocks, and what
// makes a float of the sums. Minima and code offsets cost two more products a chunk:
//
//   sum_g min[row][g] * (sum of codes of act in g),    g = 16 groups of 16 columns
//
// is a product of bytes when the sums of codes are cut in two (BlockActs::Meta::sum_bytes).
#pragma once

#include "kernels/quant_matmul/panel_exact.cuh"

namespace thermo {

// How the rows of a chunk lie in shared memory: neighbours 8 banks apart. As BlockActs:
inline constexpr int kFewRowBytes = kDotChunkBytes + 32;
// kSame: one row stands for all.
template <bool kSame = false>
struct FewRows {
  static constexpr int chunk_bytes(int n_rows) { return kSame ? kFewRowBytes : n_rows * kFewRowBytes; }

  const std::byte* chunk;

  __device__ __forceinline__ const BlockActs& row(int i) const {
    return *reinterpret_cast<const BlockActs*>(chunk + (kSame ? 0 : i * kFewRowBytes));
  }
  __device__ __forceinline__ uint2 codes(int i, int sub, int t) const {
    return *reinterpret_cast<const uint2*>(row(i).codes[sub][t]);
  }
  __device__ __forceinline__ uint32_t sum_bytes(int i, int j) const { return row(i).meta[j].sum_bytes; }
  __device__ __forceinline__ float2 steps(int i) const {
    return {row(i).meta[0].step, row(i + 1).meta[0].step};
  }
};
// Or without what blocks of 256 columns do not need: codes and the sums as bytes, then the steps of all rows.
template <int kRows>
struct PackedFewRows {
  static constexpr int kBytes = 256 + 32;
  static constexpr int chunk_bytes(int n_rows) { return n_rows * (kBytes + 4); }

  const std::byte* chunk;

  __device__ __forceinline__ uint2 codes(int i, int sub, int t) const {
    return *reinterpret_cast<const uint2*>(chunk + i * kBytes + sub * 32 + t * 8);
  }
  __device__ __forceinline__ uint32_t sum_bytes(int i, int j) const {
    return *reinterpret_cast<const uint32_t*>(chunk + i * kBytes + 256 + j * 4);
  }
  __device__ __forceinline__ float2 steps(int i) const {
    return *reinterpret_cast<const float2*>(chunk + kRows * kBytes + i * 4);
  }
};

// c = a * b, 32 columns: bytes of the codes x (first 16) and y are unsigned, of `b` signed.
__device__ __forceinline__ void mma_codes32(int (&c)[4], const uint32_t (&x)[2], const uint32_t (&y)[2],
                                            uint2 b) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(x[0]), "r"(x[1]), "r"(y[0]), "r"(y[1]), "r"(b.x), "r"(b.y), "r"(0));
#else
  c[0] = c[1] = c[2] = c[3] = 0;
  mma_int8(c, x[0], x[1], b.x);
  mma_int8(c, y[0], y[1], b.y);
#endif
}
// 16 columns.
__device__ __forceinline__ void mma_codes16(int (&c)[4], const uint32_t (&x)[2], uint32_t b) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(x[0]), "r"(x[1]), "r"(b), "r"(0));
#else
  c[0] = c[1] = c[2] = c[3] = 0;
  mma_int8(c, x[0], x[1], b);
#endif
}
// The same with signed bytes on both sides.
__device__ __forceinline__ void mma_signed16(int (&c)[4], const uint32_t (&x)[2], uint32_t b) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(x[0]), "r"(x[1]), "r"(b), "r"(0));
#else
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%4,%4};"
      : "=r"(c[0]), "=r"(c[1])
      : "r"(x[0]), "r"(b), "r"(0));
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%4,%4};"
      : "=r"(c[2]), "=r"(c[3])
      : "r"(x[1]), "r"(b), "r"(0));
#endif
}

// What the lane's two rows multiply the sums of codes with, of groups 4t..4t+3: minima, or for codes with an
// offset their scales, as signed bytes.
template <DType T>
__device__ __forceinline__ void sum_factors(const BlockScaleReader<T>& scales, int t, uint32_t (&out)[2]) {
  constexpr PanelFormat f = kPanelFormat<T>;
  static_assert(f.block_cols == 256 && (f.has_min() || f.offset_log2 >= 0));
  const auto word = [&](int j, int row) -> uint32_t {
    if constexpr (kPanelFormat<T>.has_min()) return scales.min_word(j, row);
    if constexpr (kPanelFormat<T>.scales == ScaleKind::Byte) return scales.part(j, row);
    return __vsub4(scales.scale_word(j, row), 0x20202020u);
  };
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if constexpr (f.group_cols == 16) {
      const uint32_t low = t & 1 ? word(1, row) : word(0, row), high = t & 1 ? word(3, row) : word(2, row);
      out[row] = t & 2 ? high : low;
    } else {
      out[row] = __byte_perm(t & 2 ? word(1, row) : word(0, row), 0, t & 1 ? 0x3322 : 0x1100);
    }
  }
}

// `rows`: of the chunk, 8 * kTiles activation rows; what lies in rows that are none does not matter.
// emit(block of the chunk, n, value, step of act 8n + 2t, of the next one): value[2 * r + i] of row 2g + r
// and act 8n + 2t + i.
template <DType T, int kTiles, class Rows, class Emit>
__device__ __forceinline__ void few_chunk(const uint8_t* chunk, int place, int n_subs, const Rows& rows,
                                          int lane, const Emit& emit) {
  constexpr PanelFormat f = kPanelFormat<T>;
  constexpr int kOffset = f.offset_log2 >= 0 ? 1 << f.offset_log2 : 0;
  constexpr bool kHalves = f.group_cols == 16;
  const int g = lane >> 2, t = lane & 3;
  if constexpr (f.block_cols == 256) {
    const uint8_t* const body = chunk + 64;
    BlockScaleReader<T> scales;
    scales.load_staged(chunk + place * f.header_step(), body, g);
    int sums[kTiles][4] = {};
#pragma unroll
    for (int sub = 0; sub < 8; ++sub) {
      uint32_t x[2], y[2];
      code_bytes<T>(StagedChunk<T>::codes(body + f.scale_bytes + sub * f.sub_bytes(), g, t), t, x, y);
      int scale0[2], scale1[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        scale0[row] = scales.group_scale(row, kHalves ? 2 * sub : sub);
        scale1[row] = kHalves ? scales.group_scale(row, 2 * sub + 1) : 0;
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint2 b = rows.codes(8 * n + g, sub, t);
        int c[4];
        if constexpr (kHalves) {
          int d[4];
          mma_codes16(c, x, b.x);
          mma_codes16(d, y, b.y);
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[n][i] += scale0[i / 2] * c[i] + scale1[i / 2] * d[i];
        } else {
          mma_codes32(c, x, y, b);
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[n][i] += scale0[i / 2] * c[i];
        }
      }
    }
    uint32_t factors[2];
    sum_factors<T>(scales, t, factors);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      int low[4], high[4];
      mma_signed16(low, factors, rows.sum_bytes(8 * n + g, t));
      mma_signed16(high, factors, rows.sum_bytes(8 * n + g, 4 + t));
      float value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int with_sums = low[i] + 64 * high[i];
        if constexpr (f.has_min())
          value[i] = subtract_min(block_value(scales.block_scale(i / 2), sums[n][i]), scales.block_min(i / 2),
                                  with_sums);
        else
          value[i] = block_value(scales.block_scale(i / 2), sums[n][i] - kOffset * with_sums);
      }
      const float2 steps = rows.steps(8 * n + 2 * t);
      emit(0, n, value, steps.x, steps.y);
    }
  } else {
#pragma unroll
    for (int sub = 0; sub < 8; ++sub) {
      if (sub >= n_subs) break;
      const uint8_t* const unit = chunk + sub / f.unit_blocks * f.unit_bytes();
      const uint8_t* const body = unit + 64 + sub % f.unit_blocks * f.body_bytes();
      BlockScaleReader<T> scales;
      scales.load_staged(unit + sub % f.unit_blocks * f.header_step(), body, g);
      uint32_t x[2], y[2];
      code_bytes<T>(StagedChunk<T>::codes(body, g, t), t, x, y);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        int c[4];
        mma_codes32(c, x, y, rows.codes(8 * n + g, sub, t));
        const BlockActs::Meta meta[2] = {rows.row(8 * n + 2 * t).meta[sub],
                                         rows.row(8 * n + 2 * t + 1).meta[sub]};
        float value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int sum = meta[i & 1].sum0 + meta[i & 1].sum1;
          value[i] = block_value(scales.block_scale(i / 2), c[i] - kOffset * sum);
          // Minima are stored with their sign turned here.
          if constexpr (f.has_min()) value[i] = subtract_min(value[i], scales.block_min(i / 2), -sum);
        }
        emit(sub, n, value, meta[0].step, meta[1].step);
      }
    }
  }
}

}  // namespace thermo
