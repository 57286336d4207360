#include <cmath>

#include "kernels/row_ops/row_ops.h"
#include "kernels/row_ops/sum_grid.h"

namespace thermo {
namespace {

double sigmoid_of(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

void rms_norm_ref(const float* x, const float* weight, int n, float eps, float* y) noexcept {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += double{x[i]} * double{x[i]};
  const double scale = 1.0 / std::sqrt(sum / n + double{eps});
  for (int i = 0; i < n; ++i) y[i] = static_cast<float>(x[i] * scale * weight[i]);
}

void start_sum_ref(double* sum, const float* y, float scale, int n) noexcept {
  for (int i = 0; i < n; ++i) sum[i] = std::nearbyint(double{scale * y[i]} / kSumGrid) * kSumGrid;
}

void add_to_sum_ref(double* sum, const float* y, float scale, int n) noexcept {
  for (int i = 0; i < n; ++i) sum[i] += std::nearbyint(double{scale * y[i]} / kSumGrid) * kSumGrid;
}

void add_sum_ref(float* x, const double* sum, int n) noexcept {
  for (int i = 0; i < n; ++i) x[i] += static_cast<float>(sum[i]);
}

void swiglu_ref(float* gate, const float* up, int n) noexcept {
  for (int i = 0; i < n; ++i) gate[i] = static_cast<float>(gate[i] * sigmoid_of(gate[i]) * up[i]);
}

void mul_sigmoid_ref(float* x, const float* gate, int n) noexcept {
  for (int i = 0; i < n; ++i) x[i] = static_cast<float>(x[i] * sigmoid_of(gate[i]));
}

void rope_ref(float* x, int n_head, int, int64_t head_stride, int n_rot, const float* cos_sin) noexcept {
  const int half = n_rot / 2;
  for (int h = 0; h < n_head; ++h)
    for (int i = 0; i < half; ++i) {
      float& a = x[h * head_stride + i];
      float& b = x[h * head_stride + half + i];
      const double c = cos_sin[i], s = cos_sin[half + i], u = a, v = b;
      a = static_cast<float>(u * c - v * s);
      b = static_cast<float>(u * s + v * c);
    }
}

double sum_exp_ref(const float* x, float max, int n) noexcept {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += std::exp(double{x[i]} - double{max});
  return sum;
}

float dot_ref(const float* a, const float* b, int n) noexcept {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += double{a[i]} * double{b[i]};
  return static_cast<float>(sum);
}

constexpr RowOpKernels kRef = {
    .rms_norm = rms_norm_ref,
    .start_sum = start_sum_ref,
    .add_to_sum = add_to_sum_ref,
    .add_sum = add_sum_ref,
    .swiglu = swiglu_ref,
    .mul_sigmoid = mul_sigmoid_ref,
    .rope = rope_ref,
    .dot = dot_ref,
    .sum_exp = sum_exp_ref,
};

}  // namespace

const RowOpKernels& row_op_kernels_ref() {
  return kRef;
}

}  // namespace thermo
