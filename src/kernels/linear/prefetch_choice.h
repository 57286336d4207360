// Whether products of few rows ask for their weights ahead of their use, and how far: measured with weights
// of the model, on all threads, since it makes some processors much faster and others slower
// (set_prefetch_ahead() in quant_matmul.h).
#pragma once

#include <array>
#include <span>

#include "kernels/linear/matrix.h"

namespace thermo {

class ThreadPool;
struct QuantMatmulKernels;

// Distances that are compared, in bytes.
inline constexpr std::array<int, 3> kPrefetchDistances = {0, 4096, 8192};

// Weights below this many bytes may stay in caches, where asking only costs.
inline constexpr uint64_t kLeastToMeasure = 256ull << 20;

// The distance with the shortest time, but `now` where none is faster by 3 %: less may be
// chance. seconds[i] belongs to kPrefetchDistances[i].
int fastest_distance(std::span<const double, kPrefetchDistances.size()> seconds, int now) noexcept;

// Multiplies parts of the matrices with one row and sets the distance that was fastest. On two Zen 5 cores
// one of its 19 measurements takes 0.12 to 0.23 ms. Does nothing if fewer than `least_bytes` of block formats
// are packed.
void choose_prefetch(std::span<const Matrix> matrices, const QuantMatmulKernels& kernels, ThreadPool& pool,
                     uint64_t least_bytes = kLeastToMeasure);

}  // namespace thermo
