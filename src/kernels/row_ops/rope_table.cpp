// The angles of rotary positions: plain arithmetic, once per position and not per row.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/row_ops/row_ops.h"

namespace thermo {

double yarn_magnitude(double factor) {
  return factor > 1.0 ? 1.0 + 0.1 * std::log(factor) : 1.0;
}

// YaRN: fast pairs keep their frequency, slow pairs get it divided by the factor, and a
// ramp over the pair index joins them.
RopeTable make_rope_table(const RopeConfig& config) {
  RopeTable table;
  table.n_rot = config.n_rot;
  const int n_pairs = config.n_rot / 2;
  table.inv_freq.resize(static_cast<size_t>(n_pairs));
  const bool scaled = config.scaling != RopeScaling::None && config.factor > 0.0 && config.factor != 1.0;
  const bool yarn = config.scaling == RopeScaling::Yarn;
  const double kept = yarn ? config.extrapolation : 0.0;
  const double n = config.n_rot;
  double low = 0.0, high = 0.0;
  if (yarn) {
    // The pair index that turns `rotations` times over the original context.
    const auto correction_dim = [&](double rotations) {
      return n * std::log(config.original_context / (2.0 * std::numbers::pi * rotations)) /
             (2.0 * std::log(config.freq_base));
    };
    low = std::max(0.0, std::floor(correction_dim(config.beta_fast)));
    high = std::min(n - 1.0, std::ceil(correction_dim(config.beta_slow)));
    const double magnitude = kept > 0.0 ? yarn_magnitude(config.factor) : 1.0;
    table.magnitude = static_cast<float>(magnitude * config.attention);
  }
  for (int i = 0; i < n_pairs; ++i) {
    const double w = std::pow(config.freq_base, -2.0 * i / n);
    const double ramp = std::clamp((i - low) / std::max(0.001, high - low), 0.0, 1.0);
    const double slow = ramp + (1.0 - kept) * (1.0 - ramp);
    table.inv_freq[static_cast<size_t>(i)] =
        static_cast<float>(scaled ? w / config.factor * slow + w * (kept * (1.0 - ramp)) : w);
  }
  return table;
}

void rope_angles(const RopeTable& table, int32_t position, float* out) noexcept {
  const size_t n_pairs = table.inv_freq.size();
  for (size_t i = 0; i < n_pairs; ++i) {
    // The product is rounded to f32, as in the references; only its reduction is done in f64.
    const float angle = static_cast<float>(position) * table.inv_freq[i];
    out[i] = static_cast<float>(table.magnitude * std::cos(static_cast<double>(angle)));
    out[n_pairs + i] = static_cast<float>(table.magnitude * std::sin(static_cast<double>(angle)));
  }
}

}  // namespace thermo
