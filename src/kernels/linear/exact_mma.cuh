// Products on tensor cores that are f32 in effect: every operand is cut into a part of 11 bits and a rest of
// 11, and three of the four products are added (tf32). What is left out is 2^-22 of a term. Compute
// capability 8.0.
#pragma once

#include <cstdint>

namespace thermo {

__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

__device__ __forceinline__ void split_float(float x, uint32_t& high, uint32_t& rest) {
  high = __float_as_uint(x) & 0xffffe000u;
  rest = __float_as_uint(x - __uint_as_float(high));
}

// acc += A B over n_steps steps of 8, kM x kN tiles of 16 x 8. `a_at(row, k)` with rows of the kM tiles,
// `b_at(k, column)` with columns of the kN tiles.
template <int kM, int kN, class AtA, class AtB>
__device__ __forceinline__ void multiply_exact(int n_steps, int lane, const AtA& a_at, const AtB& b_at,
                                               float (&acc)[kM][kN][4]) {
  const int g = lane / 4, t = lane % 4;
  float small[kM][kN][4] = {};  // sums of the products with a rest: shorter chains of products
#pragma unroll 4
  for (int s = 0; s < n_steps; ++s) {
    const int k = 8 * s + t;
    uint32_t a_high[kM][4], a_rest[kM][4], b_high[kN][2], b_rest[kN][2];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        split_float(a_at(16 * m + g + i % 2 * 8, k + i / 2 * 4), a_high[m][i], a_rest[m][i]);
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) split_float(b_at(k + 4 * i, 8 * n + g), b_high[n][i], b_rest[n][i]);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) mma_tf32(small[m][n], a_rest[m], b_high[n]);
#pragma unroll
      for (int n = 0; n < kN; ++n) mma_tf32(acc[m][n], a_high[m], b_high[n]);
#pragma unroll
      for (int n = 0; n < kN; ++n) mma_tf32(small[m][n], a_high[m], b_rest[n]);
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] += small[m][n][i];
}

}  // namespace thermo
