#include "model/gpu/use_counts.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

namespace thermo {
namespace {

constexpr int kCollectEvery = 1024;  // rows; uses fade over a few thousand

}  // namespace

UseCounts::UseCounts(HeatMap heat, uint32_t* counts, int n_expert, const DraftedExperts& drafted,
                     Stream& stream)
    : heat_(std::move(heat)),
      counts_(counts),
      n_expert_(n_expert),
      drafted_(drafted),
      stream_(stream),
      host_(static_cast<size_t>(heat_.n_layers()) * static_cast<size_t>(n_expert) * sizeof(uint32_t)) {}

DeviceUses UseCounts::of_layer(int layer, const DeviceRows& rows) const noexcept {
  DeviceUses uses;
  uses.counts = counts_ + static_cast<size_t>(layer) * static_cast<size_t>(n_expert_);
  if (rows.any_uncommitted) drafted_.take(rows, layer, uses);
  return uses;
}

void UseCounts::clear() noexcept {
  cudaMemsetAsync(counts_, 0, host_.size(), stream_.view().handle);
}

void UseCounts::took_step(int n_committed) noexcept {
  n_rows_ += n_committed;
  if (n_rows_ >= kCollectEvery) collect();
}

void UseCounts::commit(int sequence, std::span<const int32_t> path) noexcept {
  CountDraftedArgs args{.drafted = drafted_.of_sequence(sequence),
                        .layer_stride = drafted_.layer_stride(),
                        .counts = counts_,
                        .n_layer = heat_.n_layers(),
                        .n_expert = n_expert_,
                        .n_used = drafted_.n_used,
                        .n_rows = static_cast<int>(path.size())};
  std::copy(path.begin(), path.end(), args.rows);
  count_drafted_cuda(args, stream_.view());
  n_rows_ += args.n_rows;
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
