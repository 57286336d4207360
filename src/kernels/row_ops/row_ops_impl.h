// Row operations over the Vf of the simd_*.h included before. Anonymous namespace: see simd_avx512.h.
#pragma once

#include "kernels/row_ops/row_ops.h"
#include "kernels/row_ops/sum_grid.h"
#include "kernels/simd/math_impl.h"

namespace thermo {
namespace {

void rms_norm_rows(const float* x, const float* weight, int n, float eps, float* y) noexcept {
  const float scale = 1.0f / __builtin_sqrtf(dot_floats(x, x, n) / static_cast<float>(n) + eps);
  const Vf s = vset1(scale);
  for_each_vec(n, [&](int i, int count) {
    vstore_part(y + i, vload_part(x + i, count) * s * vload_part(weight + i, count), count);
  });
}

template <bool kFirst>
void add_to_sum_row(double* sum, const float* y, float scale, int n) noexcept {
  constexpr int W = Vf::kWidth;
  const Vf s = vset1(scale);
  int i = 0;
  for (; i + W <= n; i += W) vadd_on_grid<kFirst>(sum + i, s * vload(y + i), kSumMagic);
  if (i == n) return;
  double rest[W];
  vadd_on_grid<true>(rest, s * vload_n(y + i, n - i), kSumMagic);
  for (int k = 0; i + k < n; ++k) sum[i + k] = (kFirst ? 0.0 : sum[i + k]) + rest[k];
}

void add_sum_row(float* x, const double* sum, int n) noexcept {
  constexpr int W = Vf::kWidth;
  int i = 0;
  for (; i + W <= n; i += W) vstore(x + i, vload(x + i) + vload_sum(sum + i));
  for (; i < n; ++i) x[i] += static_cast<float>(sum[i]);
}

void swiglu_row(float* gate, const float* up, int n) noexcept {
  for_each_vec(n, [&](int i, int count) {
    vstore_part(gate + i, vsilu(vload_part(gate + i, count)) * vload_part(up + i, count), count);
  });
}

void mul_sigmoid_row(float* x, const float* gate, int n) noexcept {
  for_each_vec(n, [&](int i, int count) {
    vstore_part(x + i, vload_part(x + i, count) * vsigmoid(vload_part(gate + i, count)), count);
  });
}

void rope_heads(float* x, int n_head, int head_dim, int64_t head_stride, int n_rot,
                const float* cos_sin) noexcept {
  (void)head_dim;  // dims from n_rot on pass through
  const int half = n_rot / 2;
  for (int h = 0; h < n_head; ++h) {
    float* a = x + h * head_stride;
    float* b = a + half;
    for_each_vec(half, [&](int i, int count) {
      const Vf c = vload_part(cos_sin + i, count), s = vload_part(cos_sin + half + i, count);
      const Vf u = vload_part(a + i, count), v = vload_part(b + i, count);
      vstore_part(a + i, u * c - v * s, count);
      vstore_part(b + i, vfma(u, s, v * c), count);
    });
  }
}

// In parts, so that a long row does not round its small terms away.
double sum_exp_row(const float* x, float max, int n) noexcept {
  constexpr int kPart = 1024;
  const Vf shift = vset1(max);
  double total = 0.0;
  for (int begin = 0; begin < n; begin += kPart) {
    const int end = min_int(begin + kPart, n);
    Vf sums[2] = {vzero(), vzero()};
    int i = begin;
    for (; i + 2 * Vf::kWidth <= end; i += 2 * Vf::kWidth)
      for (int u = 0; u < 2; ++u) sums[u] = sums[u] + vexp(vload(x + i + u * Vf::kWidth) - shift);
    total += static_cast<double>(vsum(sums[0] + sums[1]));
    for (; i < end; ++i) total += static_cast<double>(__builtin_expf(x[i] - max));
  }
  return total;
}

float dot_row(const float* a, const float* b, int n) noexcept {
  return dot_floats(a, b, n);
}

constexpr RowOpKernels kRowOps = {
    .rms_norm = rms_norm_rows,
    .start_sum = add_to_sum_row<true>,
    .add_to_sum = add_to_sum_row<false>,
    .add_sum = add_sum_row,
    .swiglu = swiglu_row,
    .mul_sigmoid = mul_sigmoid_row,
    .rope = rope_heads,
    .dot = dot_row,
    .sum_exp = sum_exp_row,
};

}  // namespace
}  // namespace thermo
