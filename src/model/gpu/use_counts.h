// Counts uses of experts on a GPU that holds all of them with the other weights. Its kernels count in device
// memory, at no cost. Every few hundred tokens, and on request, the counts are added to a heat map. Heat
// counts text that was written: drafted rows count when they are accepted.
#pragma once

#include <cstdint>
#include <span>

#include "device/buffer.h"
#include "device/stream.h"
#include "experts/heat.h"
#include "model/gpu/drafted_experts.h"

namespace thermo {

class UseCounts {
 public:
  // `counts`: [layer][n_expert] in device memory, of as many layers as the heat map has. It and the stream,
  // on which everything runs, must outlive this.
  UseCounts(HeatMap heat, uint32_t* counts, int n_expert, const DraftedExperts& drafted, Stream& stream);

  // For the kernels of a layer, in a step of these rows.
  DeviceUses of_layer(int layer, const DeviceRows& rows) const noexcept;
  // Before the first step: kernels may have run without rows.
  void clear() noexcept;
  // After a step with so many committed rows.
  void took_step(int n_committed) noexcept;
  // These of the sequence's uncommitted rows were accepted. Before its next step.
  void commit(int sequence, std::span<const int32_t> path) noexcept;
  // Between steps.
  const HeatMap& heat() noexcept;
  void set_heat(const HeatMap& heat);

 private:
  void collect() noexcept;

  HeatMap heat_;
  uint32_t* counts_;
  int n_expert_;
  DraftedExperts drafted_;
  Stream& stream_;
  PinnedBuffer host_;
  int n_rows_ = 0;  // that are counted on the device only
};

}  // namespace thermo
