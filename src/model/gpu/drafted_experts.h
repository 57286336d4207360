// The experts that the uncommitted rows of each sequence chose, in device memory:
// [sequence][layer][max_rows][n_used]. The kernels that choose write them; accepted rows are counted later.
#pragma once

#include <cstdint>

#include "kernels/attention/attention_cuda.h"
#include "kernels/route_topk/route_topk_cuda.h"
#include "model/backend.h"
#include "model/model_config.h"

namespace thermo {

struct DraftedExperts {
  int16_t* ids = nullptr;
  int n_sequences = 0, n_layer = 0, max_rows = 0, n_used = 0;

  DraftedExperts(const ModelConfig& config, const ModelOptions& options, int16_t* memory = nullptr)
      : ids(memory),
        n_sequences(options.n_sequences),
        n_layer(config.n_layer),
        max_rows(options.sequence.max_draft_rows),
        n_used(config.route.n_expert > 0 ? config.route.n_expert_used : 0) {}

  int64_t layer_stride() const noexcept { return static_cast<int64_t>(max_rows) * n_used; }
  int64_t sequence_stride() const noexcept { return n_layer * layer_stride(); }
  size_t count() const noexcept { return static_cast<size_t>(n_sequences * sequence_stride()); }
  const int16_t* of_sequence(int sequence) const noexcept { return ids + sequence * sequence_stride(); }

  // The choices of a layer in a step of these rows go here.
  void take(const DeviceRows& rows, int layer, DeviceUses& uses) const noexcept {
    uses.drafted = ids + layer * layer_stride();
    uses.sequence_stride = sequence_stride();
    uses.n_valid = rows.n_valid;
    uses.group = rows.group;
    uses.group_begin = rows.group_begin;
    uses.group_sequence = rows.group_sequence;
    uses.group_uncommitted = rows.group_uncommitted;
  }
};

}  // namespace thermo
