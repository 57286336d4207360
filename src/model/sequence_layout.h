// Where the memory of sequences lies: keys and values of attention layers, matrices and convolution columns
// of recurrent layers, and the tape of uncommitted rows. Arithmetic only, the same for the processor and a
// GPU.
//
//   kv         [sequence][attention layer]: K [slot][n_head_kv][head_dim], V likewise
//   recurrent  [sequence][recurrent layer]: state [n_head_v][dim][dim], columns [taps - 1][channel stride]
//   tape       [sequence][recurrent layer]: conv input [row][channel stride], k [row][n_head_k * dim],
//              g [row][n_head_v], delta [row][n_head_v * dim]
//
// Each region is one buffer, and each part of a layer begins at a multiple of kPartAlign. Here and nowhere
// else (sequence, layer, position) becomes an address; kernels step from slot to slot within a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/units.h"
#include "kernels/attention/attention.h"
#include "model/model_config.h"

namespace thermo {

struct SequenceConfig {
  int n_ctx = 0;           // positions
  int max_draft_rows = 0;  // uncommitted rows; at most kDeltaChunk
  KvType k_type = KvType::F16;
  KvType v_type = KvType::F16;
};

class SequenceLayout {
 public:
  static constexpr size_t kPartAlign = 256;

  // The processor pads the rows of the convolution's channels (ModelConfig::ssm_channel_stride), a GPU does
  // not.
  static SequenceLayout on_cpu(const ModelConfig& c, const SequenceConfig& o) {
    return {c, o, c.ssm_channel_stride()};
  }
  static SequenceLayout on_gpu(const ModelConfig& c, const SequenceConfig& o) {
    return {c, o, c.ssm_channels()};
  }

  // Of one sequence.
  size_t kv_bytes() const { return static_cast<size_t>(n_attention_) * kv_layer_; }
  size_t recurrent_bytes() const { return static_cast<size_t>(n_recurrent_) * recurrent_layer_; }
  size_t tape_bytes() const { return static_cast<size_t>(n_recurrent_) * tape_layer_; }

  bool is_recurrent(int layer) const { return recurrent_[static_cast<size_t>(layer)]; }
  int n_layers() const { return static_cast<int>(index_.size()); }
  // How many layers of a kind there are, the first of them, and the bytes from one to the next.
  int n_attention() const { return n_attention_; }
  int n_recurrent() const { return n_recurrent_; }
  int first_attention() const { return first_of(false); }
  int first_recurrent() const { return first_of(true); }
  size_t kv_layer_bytes() const { return kv_layer_; }
  size_t recurrent_layer_bytes() const { return recurrent_layer_; }
  size_t tape_layer_bytes() const { return tape_layer_; }
  // Bytes from one slot to the next.
  size_t k_slot_bytes() const { return k_slot_; }
  size_t v_slot_bytes() const { return v_slot_; }

  // Offsets in bytes, each from the start of its region.
  struct Kv {
    size_t k, v;
  };
  Kv kv(int sequence, int layer, int position = 0) const {
    const size_t at = part(sequence, layer, kv_bytes(), kv_layer_), slot = static_cast<size_t>(position);
    return {at + slot * k_slot_, at + k_part_ + slot * v_slot_};
  }
  struct Recurrent {
    size_t state, columns;
  };
  Recurrent recurrent(int sequence, int layer) const {
    const size_t at = part(sequence, layer, recurrent_bytes(), recurrent_layer_);
    return {at, at + state_part_};
  }
  struct Tape {
    size_t conv_input, k, g, delta;
  };
  Tape tape(int sequence, int layer) const {
    const size_t at = part(sequence, layer, tape_bytes(), tape_layer_);
    return {at, at + tape_conv_, at + tape_conv_ + tape_k_, at + tape_conv_ + tape_k_ + tape_g_};
  }

  // Calls f(region, offset, bytes) for everything that makes up a sequence of n_past tokens, in a fixed
  // order; without its keys and values on request.
  enum class Region : uint8_t { Kv, Recurrent };
  template <class F>
  void for_each_piece(int sequence, int n_past, bool with_kv, F&& f) const {
    const size_t bytes = recurrent_bytes();
    if (bytes > 0) f(Region::Recurrent, static_cast<size_t>(sequence) * bytes, bytes);
    for (int il = 0; with_kv && n_past > 0 && il < n_layers(); ++il) {
      if (is_recurrent(il)) continue;
      const Kv at = kv(sequence, il);
      f(Region::Kv, at.k, static_cast<size_t>(n_past) * k_slot_);
      f(Region::Kv, at.v, static_cast<size_t>(n_past) * v_slot_);
    }
  }
  size_t piece_bytes(int n_past, bool with_kv) const {
    size_t sum = 0;
    for_each_piece(0, n_past, with_kv, [&](Region, size_t, size_t bytes) { sum += bytes; });
    return sum;
  }

 private:
  SequenceLayout(const ModelConfig& c, const SequenceConfig& o, int channel_stride) {
    for (int il = 0; il < c.n_layer; ++il) {
      recurrent_.push_back(c.recurrent(il));
      index_.push_back(recurrent_.back() ? n_recurrent_++ : n_attention_++);
    }
    const auto aligned = [](size_t bytes) { return align_up<size_t>(bytes, kPartAlign); };
    const auto slots =
        static_cast<size_t>(o.n_ctx + o.max_draft_rows);  // uncommitted rows lie after the rest
    k_slot_ = static_cast<size_t>(c.n_head_kv) * kv_head_bytes(o.k_type, c.head_dim);
    v_slot_ = static_cast<size_t>(c.n_head_kv) * kv_head_bytes(o.v_type, c.head_dim);
    k_part_ = aligned(slots * k_slot_);
    kv_layer_ = k_part_ + aligned(slots * v_slot_);
    if (n_recurrent_ == 0) return;
    const auto floats = [&](auto... sizes) {
      return aligned((static_cast<size_t>(sizes) * ...) * sizeof(float));
    };
    state_part_ = floats(c.ssm_n_head_v, c.ssm_dim, c.ssm_dim);
    recurrent_layer_ = state_part_ + floats(c.ssm_taps - 1, channel_stride);
    tape_conv_ = floats(o.max_draft_rows, channel_stride);
    tape_k_ = floats(o.max_draft_rows, c.ssm_n_head_k, c.ssm_dim);
    tape_g_ = floats(o.max_draft_rows, c.ssm_n_head_v);
    tape_layer_ = tape_conv_ + tape_k_ + tape_g_ + floats(o.max_draft_rows, c.ssm_n_head_v, c.ssm_dim);
  }

  int first_of(bool recurrent) const {
    int il = 0;
    while (recurrent_[static_cast<size_t>(il)] != recurrent) ++il;
    return il;
  }
  size_t part(int sequence, int layer, size_t sequence_bytes, size_t layer_bytes) const {
    return static_cast<size_t>(sequence) * sequence_bytes +
           static_cast<size_t>(index_[static_cast<size_t>(layer)]) * layer_bytes;
  }

  std::vector<bool> recurrent_;  // of each layer of the main stack
  std::vector<int> index_;       // of each layer among its kind
  int n_attention_ = 0, n_recurrent_ = 0;
  size_t k_slot_ = 0, v_slot_ = 0, k_part_ = 0, kv_layer_ = 0;
  size_t state_part_ = 0, recurrent_layer_ = 0;
  size_t tape_conv_ = 0, tape_k_ = 0, tape_g_ = 0, tape_layer_ = 0;
};

}  // namespace thermo
