// Comparison of a kernel's output with the reference. Bounds come from arithmetic, not from what passes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace thermo::testing {

inline constexpr double kF32Epsilon = 0x1p-24;  // relative error of one rounding

struct Bound {
  double absolute = 0.0;
  double relative = 0.0;
  double similarity = 0.99999;  // cosine over the whole tensor
};

// In order: NaN and infinity in the same places, each element within absolute + relative * |want|,
// similarity.
template <class AbsoluteAt>
::testing::AssertionResult all_close_at(std::span<const float> got, std::span<const float> want,
                                        AbsoluteAt absolute_at, double relative, double similarity) {
  if (got.size() != want.size())
    return ::testing::AssertionFailure() << "sizes differ: " << got.size() << " and " << want.size();
  for (size_t i = 0; i < got.size(); ++i) {
    const bool same = std::isnan(got[i]) == std::isnan(want[i]) &&
                      std::isinf(got[i]) == std::isinf(want[i]) && (!std::isinf(got[i]) || got[i] == want[i]);
    if (!same)
      return ::testing::AssertionFailure() << "at " << i << ": got " << got[i] << ", want " << want[i];
  }
  double dot = 0.0, got2 = 0.0, want2 = 0.0, worst = 0.0, worst_bound = 0.0;
  size_t worst_at = 0, n_bad = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(want[i])) continue;
    const double g = got[i], w = want[i];
    dot += g * w, got2 += g * g, want2 += w * w;
    const double bound = absolute_at(i) + relative * std::fabs(w);
    const double excess = std::fabs(g - w) / std::max(bound, std::numeric_limits<double>::min());
    if (excess > 1.0) ++n_bad;
    if (excess > worst) worst = excess, worst_at = i, worst_bound = bound;
  }
  if (n_bad > 0)
    return ::testing::AssertionFailure()
           << n_bad << " of " << got.size() << " out of bounds; worst at " << worst_at << ": got "
           << got[worst_at] << ", want " << want[worst_at] << ", bound " << worst_bound << " (" << worst
           << " times)";
  if (want2 > 0.0 && dot < similarity * std::sqrt(got2) * std::sqrt(want2))
    return ::testing::AssertionFailure()
           << "similarity " << dot / std::sqrt(got2) / std::sqrt(want2) << " below " << similarity;
  return ::testing::AssertionSuccess();
}

inline ::testing::AssertionResult all_close(std::span<const float> got, std::span<const float> want,
                                            const Bound& bound) {
  return all_close_at(
      got, want, [&](size_t) { return bound.absolute; }, bound.relative, bound.similarity);
}

// Bit for bit, so that a NaN equals itself and the two zeros differ.
inline ::testing::AssertionResult same_bits(std::span<const float> got, std::span<const float> want) {
  if (got.size() != want.size())
    return ::testing::AssertionFailure() << "sizes differ: " << got.size() << " and " << want.size();
  size_t n_bad = 0, first = 0;
  for (size_t i = got.size(); i-- > 0;)
    if (std::bit_cast<uint32_t>(got[i]) != std::bit_cast<uint32_t>(want[i])) ++n_bad, first = i;
  if (n_bad == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << n_bad << " of " << got.size() << " differ, the first at " << first
                                       << ": got " << got[first] << ", want " << want[first];
}

}  // namespace thermo::testing
