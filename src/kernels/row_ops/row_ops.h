// Small operations on one row of activations: norms, rotation, activation functions. Each touches a few
// kilobytes and is called by whoever owns the row, so none of them is split over threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/isa.h"

namespace thermo {

// Rotation tables of one kind of layer: inv_freq[i] for pairs (i, i + n_rot/2), YaRN folded in.
struct RopeTable {
  int n_rot = 0;                // rotated dims of a head; the others pass through
  float magnitude = 1.0f;       // multiplies cos and sin
  std::vector<float> inv_freq;  // [n_rot / 2]
};

enum class RopeScaling : uint8_t { None, Linear, Yarn };
struct RopeConfig {
  int n_rot = 0;
  double freq_base = 10000.0;
  // Linear: all frequencies divided by the factor. YaRN: the slow ones, and yarn_magnitude(). A factor of 0
  // divides by nothing.
  RopeScaling scaling = RopeScaling::None;
  double factor = 1.0;
  double original_context = 0.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double extrapolation = 1.0;  // share of its own frequency that a fast pair keeps; 0: as linear
  double attention = 1.0;      // the magnitude times this
};
RopeTable make_rope_table(const RopeConfig& config);
// 1 + 0.1 ln(factor), and 1 where the factor is not above 1.
double yarn_magnitude(double factor);

struct RowOpKernels {
  // y[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]; y may be x.
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* y) noexcept;
  // Exact sums, see sum_grid.h: sum[i] = on_grid(scale * y[i]), the same with +=, and x[i] += sum[i].
  void (*start_sum)(double* sum, const float* y, float scale, int n) noexcept;
  void (*add_to_sum)(double* sum, const float* y, float scale, int n) noexcept;
  void (*add_sum)(float* x, const double* sum, int n) noexcept;
  // gate[i] = silu(gate[i]) * up[i]
  void (*swiglu)(float* gate, const float* up, int n) noexcept;
  // x[i] *= sigmoid(gate[i])
  void (*mul_sigmoid)(float* x, const float* gate, int n) noexcept;
  // Rotates n_head heads of head_dim in place at one position: pairs (i, i + n_rot/2).
  // cos_sin: [n_rot] = cos of each pair then sin of each pair, from rope_angles().
  void (*rope)(float* x, int n_head, int head_dim, int64_t head_stride, int n_rot,
               const float* cos_sin) noexcept;
  float (*dot)(const float* a, const float* b, int n) noexcept;
  // The sum of e^(x[i] - max), for x[i] <= max.
  double (*sum_exp)(const float* x, float max, int n) noexcept;
};
const RowOpKernels& row_op_kernels(Isa isa);
const RowOpKernels& row_op_kernels_ref();  // scalar, double

// cos and sin of every pair at `position`, times the magnitude: out[n_rot].
void rope_angles(const RopeTable& table, int32_t position, float* out) noexcept;

float softplus(float x) noexcept;  // x above 20, else ln(1 + e^x)
float sigmoid(float x) noexcept;

}  // namespace thermo
