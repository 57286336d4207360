// Small f32 matrix products out of cache-resident buffers.
//
//   gemm:        C = row_scale * C + A B, each sum over depth one step after the other
//   gemm_lanes:  C = A B, each sum as kWidth sums over the steps that are equal modulo kWidth, added by the
//   tree
//                of vsum_each: the bits of a dot product over registers
//
//   B of gemm_lanes has its rows by lanes (transpose_by_lanes), so that they are read in order: 4 KiB apart
//   they would fall into a few sets of the cache.
//
//   A: M x depth, element (m, d) at a[m * a_row + d * a_col]  (either stride may be 1: it is read by
//   broadcasts) B: depth x N, rows of ldb floats C: M x N, rows of ldc floats; row_scale[m] multiplies the
//   old row
//
// Register tile: kGemmRows x kGemmVecs accumulators; per step of depth kGemmVecs loads and kGemmRows
// broadcasts feed kGemmRows * kGemmVecs multiply-adds. The strip of B (depth x one tile) is walked for all
// rows of A before the next strip, so it stays in the first-level cache. N of gemm need not be a multiple of
// the register: the last strip is masked.
#pragma once

#include "kernels/simd/math_impl.h"

namespace thermo {
namespace {

// One register, or its first n_lanes.
template <bool kMasked>
inline Vf load_lanes(const float* p, int n_lanes) {
  if constexpr (kMasked)
    return vload_n(p, n_lanes);
  else
    return vload(p);
}

// acc += A B over n steps of depth.
template <int kRows, int kVecs, bool kMasked>
inline void gemm_steps(Vf (&acc)[kRows][kVecs], int n, const float* a, int64_t a_row, int64_t a_step,
                       const float* b, int64_t b_step, int n_lanes) {
  for (int d = 0; d < n; ++d) {
    Vf row[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) row[v] = load_lanes<kMasked>(b + v * Vf::kWidth, n_lanes);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Vf x = vset1(a[m * a_row]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[m][v] = vfma(x, row[v], acc[m][v]);
    }
    a += a_step;
    b += b_step;
  }
}

template <int kRows, int kVecs, bool kMasked>
inline void gemm_tile(int depth, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t ldb,
                      float* c, int64_t ldc, const float* row_scale, int n_lanes) {
  constexpr int W = Vf::kWidth;
  Vf acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v)
      acc[m][v] = vset1(row_scale[m]) * load_lanes<kMasked>(c + m * ldc + v * W, n_lanes);
  gemm_steps<kRows, kVecs, kMasked>(acc, depth, a, a_row, a_col, b, ldb, n_lanes);
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      if constexpr (kMasked)
        vstore_n(c + m * ldc + v * W, acc[m][v], n_lanes);
      else
        vstore(c + m * ldc + v * W, acc[m][v]);
    }
}

// Sums that wait for their partner in the tree lie in memory, one set for each level.
template <int kRows, int kVecs>
inline void gemm_lanes_tile(int depth, const float* a, int64_t a_row, const float* b, int64_t ldb, float* c,
                            int64_t ldc) {
  constexpr int W = Vf::kWidth;
  constexpr int kLevels = W == 16 ? 4 : W == 8 ? 3 : 2;
  static_assert(W == 1 << kLevels);
  const int64_t lane_floats = (depth + W - 1) / W * ldb;
  Vf waiting[kLevels][kRows][kVecs];
  for (int i = 0; i < W; ++i) {
    const int lane = kLaneSumOrder[i];
    Vf acc[kRows][kVecs];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[m][v] = vzero();
    gemm_steps<kRows, kVecs, false>(acc, (depth - lane + W - 1) / W, a + lane, a_row, W,
                                    b + lane * lane_floats, ldb, W);
    int level = 0;
    for (; (i >> level) & 1; ++level)
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) acc[m][v] = waiting[level][m][v] + acc[m][v];
    if (level < kLevels) {
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) waiting[level][m][v] = acc[m][v];
    } else {
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) vstore(c + m * ldc + v * W, acc[m][v]);
    }
  }
}

// tile<kRows>(m) for tiles of kGemmRows, 2 and 1 rows.
template <class Tile>
inline void for_row_tiles(int n_rows, Tile tile) {
  int m = 0;
  for (; n_rows - m >= kGemmRows; m += kGemmRows) tile.template operator()<kGemmRows>(m);
  for (; n_rows - m >= 2; m += 2) tile.template operator()<2>(m);
  if (n_rows - m == 1) tile.template operator()<1>(m);
}

// strip<kVecs, kMasked>(n, n_lanes) for strips of columns; masked: the first n_lanes of one register.
template <class Strip>
inline void for_strips(int n_cols, Strip strip) {
  constexpr int W = Vf::kWidth;
  int n = 0;
  for (; n + kGemmVecs * W <= n_cols; n += kGemmVecs * W) strip.template operator()<kGemmVecs, false>(n, W);
  for (; kGemmVecs > 2 && n + 2 * W <= n_cols; n += 2 * W) strip.template operator()<2, false>(n, W);
  for (; n + W <= n_cols; n += W) strip.template operator()<1, false>(n, W);
  if (n < n_cols) strip.template operator()<1, true>(n, n_cols - n);
}

inline void gemm(int n_rows, int n_cols, int depth, const float* a, int64_t a_row, int64_t a_col,
                 const float* b, int64_t ldb, float* c, int64_t ldc, const float* row_scale) {
  for_strips(n_cols, [&]<int kVecs, bool kMasked>(int n, int n_lanes) {
    for_row_tiles(n_rows, [&]<int kRows>(int m) {
      gemm_tile<kRows, kVecs, kMasked>(depth, a + m * a_row, a_row, a_col, b + n, ldb, c + m * ldc + n, ldc,
                                       row_scale + m, n_lanes);
    });
  });
}

// REQUIRES: n_cols a multiple of kWidth. a_col is 1.
inline void gemm_lanes(int n_rows, int n_cols, int depth, const float* a, int64_t a_row, const float* b,
                       int64_t ldb, float* c, int64_t ldc) {
  for_strips(n_cols, [&]<int kVecs, bool>(int n, int) {
    for_row_tiles(n_rows, [&]<int kRows>(int m) {
      gemm_lanes_tile<kRows, kVecs>(depth, a + m * a_row, a_row, b + n, ldb, c + m * ldc + n, ldc);
    });
  });
}

// in[r][c] to column r of row (c mod kWidth) * ceil(n_cols / kWidth) + c / kWidth of `out`, rows of
// out_stride floats.
inline void transpose_by_lanes(const float* in, int64_t in_stride, int n_rows, int n_cols, float* out,
                               int64_t out_stride) {
  constexpr int W = Vf::kWidth;
  const int64_t lane_floats = (n_cols + W - 1) / W * out_stride;
  int r = 0;
  for (; r + W <= n_rows; r += W) {
    int c = 0;
    for (; c + W <= n_cols; c += W)
      transpose_square(in + r * in_stride + c, in_stride, out + c / W * out_stride + r, lane_floats);
    for (; c < n_cols; ++c)
      for (int k = r; k < r + W; ++k)
        out[c % W * lane_floats + c / W * out_stride + k] = in[k * in_stride + c];
  }
  for (; r < n_rows; ++r)
    for (int c = 0; c < n_cols; ++c)
      out[c % W * lane_floats + c / W * out_stride + r] = in[r * in_stride + c];
}

}  // namespace
}  // namespace thermo
