#include "model/gpu/use_counts.h"

#include <cuda_runtime.h>

#include <utility>

namespace thermo {
namespace {

constexpr int kCollectEvery = 1024;  // rows; uses fade over a few thousand

}  // namespace

UseCounts::UseCounts(HeatMap heat, uint32_t* counts, int n_expert, Stream& stream)
    : heat_(std::move(heat)),
      counts_(counts),
      n_expert_(n_expert),
      stream_(stream),
      host_(static_cast<size_t>(heat_.n_layers()) * static_cast<size_t>(n_expert) * sizeof(uint32_t)) {}

void UseCounts::clear() noexcept {
  cudaMemsetAsync(counts_, 0, host_.size(), stream_.view().handle);
}

void UseCounts::took_step(int n_rows) noexcept {
  n_rows_ += n_rows;
  if (n_rows_ >= kCollectEvery) collect();
}

const HeatMap& UseCounts::heat() noexcept {
  if (n_rows_ > 0) collect();
  return heat_;
}

void UseCounts::set_heat(const HeatMap& heat) {
  clear();
  n_rows_ = 0;
  heat_ = heat;
}

// A failure shows in the next step.
void UseCounts::collect() noexcept {
  cudaMemcpyAsync(host_.data(), counts_, host_.size(), cudaMemcpyDeviceToHost, stream_.view().handle);
  clear();
  const int n_rows = std::exchange(n_rows_, 0);
  if (!stream_.synchronize()) return;
  const uint32_t* const counts = host_.as<uint32_t>();
  for (int il = 0; il < heat_.n_layers(); ++il)
    for (int e = 0; e < heat_.n_expert(il); ++e)
      if (const uint32_t n = counts[il * n_expert_ + e]; n > 0) heat_.use(il, e, static_cast<float>(n));
  heat_.advance(n_rows);
}

}  // namespace thermo
