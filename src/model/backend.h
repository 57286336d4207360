// What the engine needs of a loaded model, wherever it runs: Model on the processor, GpuModel on a GPU.
//
// One thread at a time may call a backend.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "experts/expert_place.h"
#include "experts/split_options.h"
#include "experts/telemetry.h"
#include "kernels/isa.h"
#include "model/hidden_states.h"
#include "model/kv_pages.h"
#include "model/sequence_layout.h"
#include "model/step.h"

namespace thermo {

class HeatMap;

struct ModelOptions {
  int n_batch = 512;  // most rows of a step
  int n_sequences = 1;
  SequenceConfig sequence;  // of each; n_pages is of all together
  SplitOptions experts;     // where the routed experts are
  Isa isa = Isa::Portable;  // of what the processor computes
  bool stand_in = false;    // on the processor: with a stand-in for a GPU
  int device = 0;           // on a GPU: which one
  bool graphs = true;       // on a GPU; false: queue every kernel, to measure what graphs buy
};

// Main memory that a backend copies sequences from and to: page-locked beside a GPU.
class HostMemory {
 public:
  virtual ~HostMemory() = default;
  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }

 protected:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Some positions of a sequence, and where they are in a block (SequenceLayout::kBlockTokens) of main memory.
struct KvRange {
  int position = 0;
  int slot = 0;  // of the first one, in the block
  int n = 0;
};

// A sequence at one length, kept where sequences live. Made by a backend and good for any of its sequences.
class Checkpoint {
 public:
  virtual ~Checkpoint() = default;
  int n_past() const noexcept { return n_past_; }
  // Without keys and values it can only be restored where these are: in the sequence it was taken of, while
  // its first n_past() tokens are the same, and in one that shares them. Sliding layers' are always there.
  bool has_kv() const noexcept { return has_kv_; }

 protected:
  Checkpoint(int n_past, bool has_kv) : n_past_(n_past), has_kv_(has_kv) {}

 private:
  int n_past_;
  bool has_kv_;
};

// Keys and values of layers that see the whole context lie in pages of one pool.
struct KvPoolState {
  int page_tokens = 0;
  int n_pages = 0;
  int n_free = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const ModelConfig& config() const = 0;
  virtual bool is_gpu() const noexcept = 0;
  // The numbers of rows that small steps are computed with, in order: any other takes as long as the next
  // one. Empty: all.
  virtual std::span<const int> step_sizes() const noexcept { return {}; }

  // REQUIRES (checked by Engine::step, which refuses instead): groups of different sequences without
  // uncommitted rows, parents before children, a chain unless uncommitted, rows <= n_batch, tokens in the
  // vocabulary, positions inside the context, room for all rows (reserve()). After a fault there are no
  // logits.
  virtual StepOutput step(const StepBatch& batch) noexcept = 0;
  // All logits of rows[i] of the last step's output, wherever they are; empty after a fault. Valid until the
  // next step.
  virtual std::span<const float> fetch_logits(int i) noexcept = 0;
  // Makes `path` of a sequence's uncommitted rows its new end. REQUIRES: parents first, each the parent of
  // the next.
  virtual void commit(int sequence, std::span<const int32_t> path) noexcept = 0;
  // The hidden states that insert_taps() asked for, of all rows of the last step. Valid until the next one.
  virtual StateRows states() const noexcept = 0;
  // Throws MemoryError.
  virtual std::unique_ptr<StateBuffer> make_states(int n_rows, int n_taps) = 0;
  // A drafter's: makes keys and values of hidden states of its target the new end of the sequence. REQUIRES:
  // a network with features, no uncommitted rows, at most n_batch rows, room for them.
  virtual void append_features(int sequence, const StateRows& features) noexcept = 0;
  // Why steps can no longer be trusted; empty while they can.
  virtual std::string_view fault() const noexcept = 0;

  // The memory of all sequences.
  KvPoolState kv_pool() const noexcept {
    const PagePool& pool = pages().pool(KvKind::Full);
    return {.page_tokens = kKvPage, .n_pages = pool.size(), .n_free = pool.n_free()};
  }
  // Of the pool; shared ones count for each.
  int n_pages(int sequence) const noexcept { return pages().n_pages(sequence); }
  // Whether a sequence can be cut anywhere. Otherwise going back needs a checkpoint.
  bool can_cut() const noexcept { return layout().can_cut(); }
  size_t block_bytes() const noexcept { return layout().block_bytes(); }
  // Memory of a checkpoint at a length.
  size_t checkpoint_bytes(int n_past, bool with_kv) const noexcept {
    return layout().piece_bytes(n_past, with_kv);
  }

  // The memory of one sequence.
  virtual int n_past(int sequence) const noexcept = 0;
  // Makes room for rows at the end of a sequence. Returns for how many, at most n: with too few pages in the
  // pool it is less. A sequence gives its pages back when it is cleared, cut or replaced.
  int reserve(int sequence, int n) noexcept { return pages().reserve(sequence, n_past(sequence), n); }
  virtual void clear(int sequence) noexcept = 0;
  // nullptr: there is no memory for it. `reuse`: one that nobody needs any more, or nullptr; its memory is
  // taken where it has the right size.
  virtual std::unique_ptr<Checkpoint> checkpoint(int sequence, bool with_kv,
                                                 std::unique_ptr<Checkpoint> reuse = nullptr) = 0;
  // False: the pool has too few pages, and the sequence is empty. REQUIRES: see Checkpoint::has_kv().
  virtual bool restore(int sequence, const Checkpoint& checkpoint) noexcept = 0;
  // Whether it can be cut to n <= n_past() tokens: there is no recurrent state, and what sliding layers see
  // of them is still there.
  bool can_truncate(int sequence, int n) const noexcept {
    return n == n_past(sequence) || n == 0 || (layout().n_recurrent() == 0 && pages().can_cut(sequence, n));
  }
  virtual void truncate(int sequence, int n) noexcept = 0;  // REQUIRES: can_truncate()
  // `to`, another sequence, becomes the first n <= n_past(from) tokens of `from`, whose keys and values both
  // have then. Recurrent state and what sliding layers see do not come along: where there are any, a
  // checkpoint of `from` must be restored in `to` next, of the same length.
  virtual void share(int from, int to, int n) noexcept = 0;

  // Keys and values in blocks of main memory (block_bytes() each): of layers that see the whole context. The
  // others' belong to checkpoints. This is memory for blocks; nullptr: there is none.
  virtual std::unique_ptr<HostMemory> make_host_memory(size_t n_bytes) = 0;
  // Those that the sequence has now, for save_kv(); other steps may run before that. Must go before the
  // backend.
  virtual std::unique_ptr<KvPin> pin_kv(int sequence) = 0;
  // REQUIRES: positions that are pinned.
  virtual void save_kv(const KvPin& pin, const KvRange& range, std::byte* block) noexcept = 0;
  // The sequence ends after them. Unless it can be cut, it is of no use before a checkpoint at that length
  // was restored. False: the pool has too few pages, and the sequence is empty. REQUIRES: position <=
  // n_past().
  virtual bool load_kv(int sequence, const KvRange& range, const std::byte* block) noexcept = 0;

  // For texts that leave memory. Copies to main memory that were queued are done after this.
  virtual void finish_copies() noexcept {}
  virtual std::span<const std::byte> bytes_of(const Checkpoint& checkpoint) const noexcept = 0;
  // One that was bytes, without keys and values; no bytes: memory for checkpoint() to reuse. nullptr: there
  // is no memory for it, or it is not of this length.
  virtual std::unique_ptr<Checkpoint> make_checkpoint(int n_past, std::span<const std::byte> bytes) = 0;

  // How experts were used; nullptr: nobody counts.
  virtual const HeatMap* heat() const noexcept = 0;
  // Between steps: counting goes on from this, which is of the same model. REQUIRES: somebody counts.
  virtual void set_heat(const HeatMap& heat) = 0;
  virtual ExpertTelemetry expert_telemetry() const noexcept = 0;
  // Between steps: where every expert is, layer after layer. REQUIRES: as many as heat() counts.
  virtual void expert_places(std::span<ExpertPlace> out) const noexcept = 0;
  // Of each layer; empty: all experts are where they are computed.
  virtual std::span<const LayerUses> layer_uses() const noexcept = 0;
  virtual bool reset_experts() = 0;  // see Engine

 protected:
  // How the memory of a sequence is laid out, and the pages of each.
  virtual const SequenceLayout& layout() const noexcept = 0;
  virtual KvPages& pages() const noexcept = 0;
};

}  // namespace thermo
