// Small f32 matrix products out of cache-resident buffers: C = row_scale * C + A B.
//
//   A: M x depth, element (m, d) at a[m * a_row + d * a_col]  (either stride may be 1: it is read by
//   broadcasts) B: depth x N, rows of ldb floats C: M x N, rows of ldc floats; row_scale[m] multiplies the
//   old row, nullptr: C is overwritten, not read
//
// Register tile: kGemmRows x kGemmVecs accumulators; per step of depth kGemmVecs loads and kGemmRows
// broadcasts feed kGemmRows * kGemmVecs multiply-adds. The strip of B (depth x one tile) is walked for all
// rows of A before the next strip, so it stays in the first-level cache. N need not be a multiple of the
// register: the last strip is masked.
#pragma once

namespace thermo {
namespace {

template <int kRows, int kVecs, bool kMasked>
inline void gemm_tile(int depth, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t ldb,
                      float* c, int64_t ldc, const float* row_scale, int n_lanes) {
  constexpr int W = Vf::kWidth;
  static_assert(!kMasked || kVecs == 1);
  Vf acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      if (row_scale == nullptr)
        acc[m][v] = vzero();
      else if constexpr (kMasked)
        acc[m][v] = vset1(row_scale[m]) * vload_n(c + m * ldc, n_lanes);
      else
        acc[m][v] = vset1(row_scale[m]) * vload(c + m * ldc + v * W);
    }
  for (int d = 0; d < depth; ++d) {
    Vf row[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      if constexpr (kMasked)
        row[v] = vload_n(b, n_lanes);
      else
        row[v] = vload(b + v * W);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Vf x = vset1(a[m * a_row]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[m][v] = vfma(x, row[v], acc[m][v]);
    }
    a += a_col;
    b += ldb;
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      if constexpr (kMasked)
        vstore_n(c + m * ldc, acc[m][v], n_lanes);
      else
        vstore(c + m * ldc + v * W, acc[m][v]);
    }
}

// All rows of one strip. depth_of(m_end): how many steps of depth the rows before m_end need; a triangular A
// gives fewer for the first rows.
template <int kVecs, bool kMasked, class DepthOf>
inline void gemm_strip(int n_rows, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t ldb,
                       float* c, int64_t ldc, const float* row_scale, int n_lanes, DepthOf depth_of) {
  int m = 0;
  const auto tile = [&]<int kRows>() {
    gemm_tile<kRows, kVecs, kMasked>(depth_of(m + kRows), a + m * a_row, a_row, a_col, b, ldb, c + m * ldc,
                                     ldc, row_scale == nullptr ? nullptr : row_scale + m, n_lanes);
    m += kRows;
  };
  while (n_rows - m >= kGemmRows) tile.template operator()<kGemmRows>();
  while (n_rows - m >= 2) tile.template operator()<2>();
  if (n_rows - m == 1) tile.template operator()<1>();
}

template <class DepthOf>
inline void gemm_by_depth(int n_rows, int n_cols, DepthOf depth_of, const float* a, int64_t a_row,
                          int64_t a_col, const float* b, int64_t ldb, float* c, int64_t ldc,
                          const float* row_scale) {
  constexpr int W = Vf::kWidth;
  int n = 0;
  for (; n + kGemmVecs * W <= n_cols; n += kGemmVecs * W)
    gemm_strip<kGemmVecs, false>(n_rows, a, a_row, a_col, b + n, ldb, c + n, ldc, row_scale, W, depth_of);
  for (; kGemmVecs > 2 && n + 2 * W <= n_cols; n += 2 * W)
    gemm_strip<2, false>(n_rows, a, a_row, a_col, b + n, ldb, c + n, ldc, row_scale, W, depth_of);
  for (; n + W <= n_cols; n += W)
    gemm_strip<1, false>(n_rows, a, a_row, a_col, b + n, ldb, c + n, ldc, row_scale, W, depth_of);
  if (n < n_cols)
    gemm_strip<1, true>(n_rows, a, a_row, a_col, b + n, ldb, c + n, ldc, row_scale, n_cols - n, depth_of);
}

inline void gemm(int n_rows, int n_cols, int depth, const float* a, int64_t a_row, int64_t a_col,
                 const float* b, int64_t ldb, float* c, int64_t ldc, const float* row_scale) {
  gemm_by_depth(
      n_rows, n_cols, [depth](int) { return depth; }, a, a_row, a_col, b, ldb, c, ldc, row_scale);
}

// out[c][r] = in[r][c]: out has n_cols rows of out_stride floats. Only [0, n_rows) of each is written.
inline void transpose(const float* in, int64_t in_stride, int n_rows, int n_cols, float* out,
                      int64_t out_stride) {
  constexpr int W = Vf::kWidth;
  int r = 0;
  for (; r + W <= n_rows; r += W) {
    int c = 0;
    for (; c + W <= n_cols; c += W)
      transpose_square(in + r * in_stride + c, in_stride, out + c * out_stride + r, out_stride);
    for (; c < n_cols; ++c)
      for (int k = r; k < r + W; ++k) out[c * out_stride + k] = in[k * in_stride + c];
  }
  for (; r < n_rows; ++r)
    for (int c = 0; c < n_cols; ++c) out[c * out_stride + r] = in[r * in_stride + c];
}

}  // namespace
}  // namespace thermo
