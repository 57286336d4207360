// What a model remembers of one sequence: keys and values of its attention layers, matrices and convolution
// inputs of its DeltaNet layers, and the tape of a step whose rows are not committed yet.
//
// Attention memory can be cut back to any length. Recurrent memory cannot: going back needs a Checkpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/delta_net/delta_net.h"
#include "model/model_config.h"

namespace thermo {

struct SequenceConfig {
  int n_ctx = 0;           // positions
  int max_draft_rows = 0;  // rows of an uncommitted step; at most kDeltaChunk
  KvType k_type = KvType::F16;
  KvType v_type = KvType::F16;
};

// The recurrent part of a sequence at one length; attention memory below that length stays where it is.
struct Checkpoint {
  int n_past = 0;
  std::vector<float> recurrent;
};

// Channels [begin, end) of the stored convolution columns after the rows `path` of `inputs`
// (rows `stride` floats apart) were appended.
void shift_conv_state(float* state, const float* inputs, std::span<const int32_t> path, int taps, int stride,
                      int begin, int end) noexcept;

class SequenceState {
 public:
  SequenceState(const ModelConfig& config, const SequenceConfig& options);
  ~SequenceState();
  SequenceState(SequenceState&&) noexcept;
  SequenceState& operator=(SequenceState&&) noexcept;

  static uint64_t kv_bytes(const ModelConfig& config, const SequenceConfig& options);
  static uint64_t recurrent_bytes(const ModelConfig& config);
  static uint64_t tape_bytes(const ModelConfig& config, const SequenceConfig& options);

  int n_past() const noexcept { return n_past_; }
  int n_ctx() const noexcept { return options_.n_ctx; }
  int max_draft_rows() const noexcept { return options_.max_draft_rows; }

  // Forgets everything.
  void clear() noexcept;
  Checkpoint checkpoint() const;
  // Back to a checkpoint of this sequence. REQUIRES: its length <= n_past().
  void restore(const Checkpoint& checkpoint) noexcept;
  // Cuts attention memory; only models without recurrent layers can do that alone.
  // REQUIRES: no recurrent layers, n <= n_past().
  void truncate(int n) noexcept;

  // For the forward pass. `layer` counts all layers; the next-token block's layer included.
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

  // After a step that commits all its n rows: DeltaNet layers were updated in place.
  void advance(int n) noexcept { n_past_ += n; }
  // After a step that kept its state: makes `path` (increasing rows, each the parent of the next) the new end
  // of the sequence.
  void commit_path(std::span<const int32_t> path, const DeltaNetKernels& kernels) noexcept;

 private:
  struct Memory;
  const ModelConfig* config_;
  SequenceConfig options_;
  int n_past_ = 0;
  std::vector<int> memory_index_;  // of each layer: its place among the attention or the recurrent layers
  int n_attention_ = 0;
  int n_recurrent_ = 0;
  std::unique_ptr<Memory> memory_;
};

}  // namespace thermo
