// How often experts are used where all of them are with the other weights on a GPU. Its kernels count in
// device memory, at no cost; every few hundred tokens, and when somebody asks, the counts are added to a heat
// map.
#pragma once

#include <cstdint>

#include "device/buffer.h"
#include "device/stream.h"
#include "experts/heat.h"

namespace thermo {

class UseCounts {
 public:
  // `counts`: [layer][n_expert] in device memory, of as many layers as the heat map has. It and the stream,
  // on which everything runs, must outlive this.
  UseCounts(HeatMap heat, uint32_t* counts, int n_expert, Stream& stream);

  uint32_t* of_layer(int layer) const noexcept {
    return counts_ + static_cast<size_t>(layer) * static_cast<size_t>(n_expert_);
  }
  // Before the first step: kernels may have run without rows.
  void clear() noexcept;
  // After a step of so many rows.
  void took_step(int n_rows) noexcept;
  // Between steps.
  const HeatMap& heat() noexcept;
  void set_heat(const HeatMap& heat);

 private:
  void collect() noexcept;

  HeatMap heat_;
  uint32_t* counts_;
  int n_expert_;
  Stream& stream_;
  PinnedBuffer host_;
  int n_rows_ = 0;  // that are counted on the device only
};

}  // namespace thermo
