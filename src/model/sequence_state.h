// What a model on the processor remembers of one sequence: keys and values of its attention layers, matrices
// and convolution columns of its DeltaNet layers, and the tape of its uncommitted rows.
//
// Attention memory can be cut back to any length. Recurrent memory cannot: going back needs a Checkpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/host_buffer.h"
#include "kernels/attention/attention.h"
#include "kernels/delta_net/delta_net.h"
#include "model/backend.h"
#include "model/model_config.h"
#include "model/sequence_layout.h"

namespace thermo {

// Channels [begin, end) of the stored convolution columns after the rows `path` of `inputs`
// (rows `stride` floats apart) were appended.
void shift_conv_state(float* state, const float* inputs, std::span<const int32_t> path, int taps, int stride,
                      int begin, int end) noexcept;

// The memory of all sequences of a model.
struct SequenceMemory {
  SequenceLayout layout;
  HostBuffer kv, recurrent, tape;

  SequenceMemory(const ModelConfig& config, const SequenceConfig& options, int n_sequences);
};

class SequenceState {
 public:
  // Both must outlive it.
  SequenceState(const ModelConfig& config, SequenceMemory& memory, const SequenceConfig& options, int index);

  int n_past() const noexcept { return n_past_; }

  // Forgets everything.
  void clear() noexcept;
  std::unique_ptr<Checkpoint> checkpoint(bool with_kv) const;
  void restore(const Checkpoint& checkpoint) noexcept;
  void truncate(int n) noexcept;

  // For the forward pass.
  KvView kv(int layer) noexcept;
  float* delta_state(int layer) noexcept;  // [n_head_v][dim][dim]
  float* conv_state(int layer) noexcept;   // [taps - 1] columns of ssm_channel_stride

  // The tape of one DeltaNet layer: what commit() needs of each row.
  struct Tape {
    float* conv_input;  // [rows] of ssm_channel_stride, raw
    float* k;           // [rows][n_head_k * dim]
    float* g;           // [rows][n_head_v]
    float* delta;       // [rows][n_head_v * dim]
  };
  Tape tape(int layer) noexcept;

  // After a step that committed its n rows: DeltaNet layers were updated in place.
  void advance(int n) noexcept { n_past_ += n; }
  // Makes `path` of the uncommitted rows (increasing, each the parent of the next) the new end of the
  // sequence.
  void commit_path(std::span<const int32_t> path, const DeltaNetKernels& kernels) noexcept;

 private:
  const ModelConfig* config_;
  SequenceMemory* memory_;
  KvType k_type_, v_type_;
  int index_;
  int n_past_ = 0;
};

}  // namespace thermo
