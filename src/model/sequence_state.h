// What a model on the processor remembers of one sequence: keys and values of its attention layers, matrices
// and convolution columns of its DeltaNet layers, and the tape of its uncommitted rows.
//
// Attention memory can be cut back to any length, that of sliding layers by a few tokens. Recurrent memory
// cannot: going back needs a Checkpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/host_buffer.h"
#include "base/thread_pool.h"
#include "kernels/attention/attention.h"
#include "kernels/delta_net/delta_net.h"
#include "model/backend.h"
#include "model/kv_pages.h"
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
  std::array<HostBuffer, kKvKinds> kv;  // the pool of each kind
  HostBuffer recurrent, tape;
  std::vector<int32_t> tables;
  KvPages pages;

  SequenceMemory(const ModelConfig& config, const SequenceConfig& options, int n_sequences, int max_rows);
  SequenceMemory(const SequenceMemory&) = delete;
  SequenceMemory& operator=(const SequenceMemory&) = delete;

  const HostBuffer& pool(KvKind kind) const { return kv[static_cast<size_t>(kind)]; }
  std::byte* at(SequenceLayout::Region region, size_t offset) const;
  void save_kv(const KvPin& pin, const KvRange& range, std::byte* block) const noexcept;
};

class SequenceState {
 public:
  // Both must outlive it.
  SequenceState(const ModelConfig& config, SequenceMemory& memory, const SequenceConfig& options, int index);

  int n_past() const noexcept { return n_past_; }

  // See Backend.
  int reserve(int n) noexcept { return memory_->pages.reserve(index_, n_past_, n); }
  void clear() noexcept;
  std::unique_ptr<Checkpoint> checkpoint(bool with_kv, std::unique_ptr<Checkpoint> reuse) const;
  bool restore(const Checkpoint& checkpoint) noexcept;
  static std::span<const std::byte> bytes_of(const Checkpoint& checkpoint) noexcept;  // and some after them
  // Of so many bytes; they may be absent.
  static std::unique_ptr<Checkpoint> make_checkpoint(int n_past, size_t n_bytes,
                                                     std::span<const std::byte> bytes);
  void truncate(int n) noexcept;
  void share(const SequenceState& from, int n) noexcept;
  std::unique_ptr<KvPin> pin_kv() { return std::make_unique<KvPin>(memory_->pages, index_, n_past_); }
  bool load_kv(const KvRange& range, const std::byte* block) noexcept;

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
  void advance(int n) noexcept;
  // Makes `path` of the uncommitted rows (increasing, each the parent of the next) the new end of the
  // sequence.
  void commit_path(std::span<const int32_t> path, const DeltaNetKernels& kernels, ThreadPool& pool) noexcept;

 private:
  void move_keys(int layer, std::span<const int32_t> path) noexcept;
  void commit_head(int layer, int kh, std::span<const int32_t> path, const DeltaNetKernels& kernels) noexcept;

  const ModelConfig* config_;
  SequenceMemory* memory_;
  KvType k_type_, v_type_;
  int index_;
  int n_past_ = 0;
};

}  // namespace thermo
