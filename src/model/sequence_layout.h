// Where the memory of sequences lies: keys and values of attention layers, matrices and convolution columns
// of recurrent layers, and the tape of uncommitted rows. Arithmetic only, the same for the processor and a
// GPU.
//
//   pages      [page][layer of the kind]: K [kKvPage][n_head_kv][head_dim], V likewise
//   recurrent  [sequence][recurrent layer]: state [n_head_v][dim][dim], columns [taps - 1][channel stride]
//   tape       [sequence][recurrent layer]: conv input [row][channel stride], k [row][n_head_k * dim],
//              g [row][n_head_v], delta [row][n_head_v * dim]
//
// Keys and values are pages of kKvPage positions from a pool that all sequences share. A sequence has a table
// that names the page of each of its kKvPage positions (model/kv_pages.h). There are two kinds of attention
// layers, each with a pool and tables: those that see the whole context, and sliding ones, of which a
// sequence keeps the pages that rows may still see. A page holds all layers of its kind.
//
// Each region is one buffer, and each part of a layer begins at a multiple of kPartAlign. Here and nowhere
// else (sequence, layer, position) becomes an address; kernels step from slot to slot within a page.
#pragma once

#include <algorithm>
#include <array>
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
  int n_pages = 0;            // of all sequences, for layers that see everything; 0: all they can need
  bool keep_windows = false;  // sliding layers keep the whole context, so that it can be cut anywhere
};

enum class KvKind : uint8_t {
  Full,     // layers that see the whole context
  Sliding,  // layers that see a window
};
inline constexpr int kKvKinds = 2;
inline constexpr std::array<KvKind, kKvKinds> kEachKvKind = {KvKind::Full, KvKind::Sliding};

// In lists of what is taken.
inline const char* kv_pool_name(KvKind kind) {
  return kind == KvKind::Full ? "kv cache" : "sliding kv";
}

// The page tables of one sequence, by kind.
using PageTables = std::array<const int32_t*, kKvKinds>;

class SequenceLayout {
 public:
  static constexpr size_t kPartAlign = 256;
  static constexpr int kWindowSlack = 128;  // positions that sliding layers keep before their window

  // The processor pads the rows of the convolution's channels (ModelConfig::ssm_channel_stride), a GPU does
  // not.
  static SequenceLayout on_cpu(const ModelConfig& c, const SequenceConfig& o) {
    return {c, o, c.ssm_channel_stride()};
  }
  static SequenceLayout on_gpu(const ModelConfig& c, const SequenceConfig& o) {
    return {c, o, c.ssm_channels()};
  }

  // Of one sequence.
  size_t recurrent_bytes() const { return static_cast<size_t>(n_recurrent_) * recurrent_layer_; }
  size_t tape_bytes() const { return static_cast<size_t>(n_recurrent_) * tape_layer_; }

  // Entries of a page table: the most pages of a sequence.
  int table_pages() const { return table_pages_; }
  // Of the pool of a kind. No number of steps of at most `max_rows` rows takes more sliding pages.
  int pool_pages(KvKind kind, int n_sequences, int max_rows) const {
    if (of(kind).n_layers == 0) return 0;
    const int all = n_sequences * table_pages_;
    if (kind == KvKind::Full) return n_pages_ > 0 ? std::min(n_pages_, all) : all;
    const int kept = window_ + kWindowSlack + kKvTile + max_draft_rows_;
    return std::min(all, n_sequences * (ceil_div(kept, kKvPage) + 2) + ceil_div(max_rows, kKvPage));
  }
  size_t page_bytes(KvKind kind) const { return static_cast<size_t>(of(kind).n_layers) * kv_layer_; }
  size_t pool_bytes(KvKind kind, int n_sequences, int max_rows) const {
    return static_cast<size_t>(pool_pages(kind, n_sequences, max_rows)) * page_bytes(kind);
  }

  // The first position of sliding layers that rows after n tokens may read: the start of a tile. Pages are
  // kept a little longer, so that a sequence can be cut by a few tokens.
  int sliding_begin(int n) const { return std::max(0, n + 1 - window_) / kKvTile * kKvTile; }
  int first_kept_page(int n) const { return sliding_begin(std::max(0, n - kWindowSlack)) / kKvPage; }

  bool is_recurrent(int layer) const { return recurrent_[static_cast<size_t>(layer)]; }
  int n_layers() const { return static_cast<int>(index_.size()); }
  KvKind kv_kind(int layer) const { return kind_[static_cast<size_t>(layer)]; }
  // Whether every layer keeps what it needs to go on from any earlier position.
  bool can_cut() const { return n_recurrent_ == 0 && of(KvKind::Sliding).n_layers == 0; }
  // How many layers of a kind there are, the first of them, and the bytes from one to the next.
  int n_layers(KvKind kind) const { return of(kind).n_layers; }
  int n_recurrent() const { return n_recurrent_; }
  int first_layer(KvKind kind) const { return of(kind).first; }
  int first_recurrent() const { return first_recurrent_; }
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
  Kv kv(int layer, int page, int slot = 0) const {
    const size_t at = static_cast<size_t>(page) * page_bytes(kv_kind(layer)) +
                      static_cast<size_t>(index_[static_cast<size_t>(layer)]) * kv_layer_,
                 i = static_cast<size_t>(slot);
    return {at + i * k_slot_, at + k_part_ + i * v_slot_};
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

  // Calls f(offset, bytes) for the pieces of a pool that hold positions [begin, end) of a sequence, in a
  // fixed order: positions ascending, a page that is meant as a whole in one piece.
  template <class F>
  void for_each_kv_piece(KvKind kind, const int32_t* pages, int begin, int end, F&& f) const {
    if (of(kind).n_layers == 0) return;
    for (int p = begin; p < end;) {
      const int slot = p % kKvPage, n = std::min(kKvPage - slot, end - p), page = pages[p / kKvPage];
      p += n;
      if (n == kKvPage) {
        f(static_cast<size_t>(page) * page_bytes(kind), page_bytes(kind));
        continue;
      }
      for (int il = 0; il < n_layers(); ++il) {
        if (is_recurrent(il) || kv_kind(il) != kind) continue;
        const Kv at = kv(il, page, slot);
        f(at.k, static_cast<size_t>(n) * k_slot_);
        f(at.v, static_cast<size_t>(n) * v_slot_);
      }
    }
  }
  size_t kv_piece_bytes(KvKind kind, int begin, int end) const {
    return static_cast<size_t>(std::max(0, end - begin)) * static_cast<size_t>(of(kind).n_layers) *
           (k_slot_ + v_slot_);
  }

  // Calls f(region, offset, bytes) for what makes up a sequence of n_past tokens, in a fixed order: its
  // recurrent state, what its sliding layers may still see, and on request all other keys and values.
  enum class Region : uint8_t { Recurrent, Sliding, Full };
  template <class F>
  void for_each_piece(int sequence, const PageTables& tables, int n_past, bool with_kv, F&& f) const {
    const size_t bytes = recurrent_bytes();
    if (bytes > 0) f(Region::Recurrent, static_cast<size_t>(sequence) * bytes, bytes);
    for_each_kv_piece(KvKind::Sliding, tables[static_cast<size_t>(KvKind::Sliding)], sliding_begin(n_past),
                      n_past, [&](size_t offset, size_t n) { f(Region::Sliding, offset, n); });
    if (with_kv)
      for_each_kv_piece(KvKind::Full, tables[static_cast<size_t>(KvKind::Full)], 0, n_past,
                        [&](size_t offset, size_t n) { f(Region::Full, offset, n); });
  }
  size_t piece_bytes(int n_past, bool with_kv) const {
    return recurrent_bytes() + kv_piece_bytes(KvKind::Sliding, sliding_begin(n_past), n_past) +
           (with_kv ? kv_piece_bytes(KvKind::Full, 0, n_past) : 0);
  }

  // A block in main memory, as caches keep it, is like a page of the layers that see the whole context.
  static constexpr int kBlockTokens = kKvPage;
  size_t block_bytes() const { return page_bytes(KvKind::Full); }
  // Calls f(offset in the pool, offset in the block, bytes) for the n positions of a sequence from `position`
  // on, which are those of a block from `slot` on.
  template <class F>
  void for_each_block_piece(const int32_t* pages, int position, int slot, int n, F&& f) const {
    for (const int end = position + n; position < end;) {
      const int first = position % kKvPage, count = std::min(kKvPage - first, end - position),
                page = pages[position / kKvPage];
      if (count == kKvPage && slot == 0) f(static_cast<size_t>(page) * block_bytes(), 0, block_bytes());
      for (int il = 0; il < n_layers() && !(count == kKvPage && slot == 0); ++il) {
        if (is_recurrent(il) || kv_kind(il) != KvKind::Full) continue;
        const Kv from = kv(il, page, first), to = kv(il, 0, slot);
        f(from.k, to.k, static_cast<size_t>(count) * k_slot_);
        f(from.v, to.v, static_cast<size_t>(count) * v_slot_);
      }
      position += count;
      slot += count;
    }
  }

 private:
  SequenceLayout(const ModelConfig& c, const SequenceConfig& o, int channel_stride) {
    for (int il = 0; il < c.n_layer; ++il) {
      const Block* const attention = c.network.layers[static_cast<size_t>(il)].find(BlockKind::Attention);
      const int window = attention == nullptr || o.keep_windows ? 0 : attention->window;
      window_ = std::max(window_, window);
      recurrent_.push_back(c.recurrent(il));
      kind_.push_back(window > 0 ? KvKind::Sliding : KvKind::Full);
      if (recurrent_.back()) {
        if (n_recurrent_ == 0) first_recurrent_ = il;
        index_.push_back(n_recurrent_++);
      } else {
        KindLayers& kind = kinds_[static_cast<size_t>(kind_.back())];
        if (kind.n_layers == 0) kind.first = il;
        index_.push_back(kind.n_layers++);
      }
    }
    const auto aligned = [](size_t bytes) { return align_up<size_t>(bytes, kPartAlign); };
    n_pages_ = o.n_pages;
    max_draft_rows_ = o.max_draft_rows;
    table_pages_ = ceil_div(o.n_ctx + o.max_draft_rows, kKvPage);  // uncommitted rows lie after the rest
    k_slot_ = static_cast<size_t>(c.n_head_kv) * kv_head_bytes(o.k_type, c.head_dim);
    v_slot_ = static_cast<size_t>(c.n_head_kv) * kv_head_bytes(o.v_type, c.head_dim);
    static_assert(kKvPage % kPartAlign == 0);
    k_part_ = kKvPage * k_slot_;
    kv_layer_ = k_part_ + kKvPage * v_slot_;
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

  struct KindLayers {
    int n_layers = 0, first = 0;
  };
  const KindLayers& of(KvKind kind) const { return kinds_[static_cast<size_t>(kind)]; }
  size_t part(int sequence, int layer, size_t sequence_bytes, size_t layer_bytes) const {
    return static_cast<size_t>(sequence) * sequence_bytes +
           static_cast<size_t>(index_[static_cast<size_t>(layer)]) * layer_bytes;
  }

  std::vector<bool> recurrent_;  // of each layer of the main stack
  std::vector<KvKind> kind_;     // of each attention layer
  std::vector<int> index_;       // of each layer among its kind
  std::array<KindLayers, kKvKinds> kinds_;
  int n_recurrent_ = 0, first_recurrent_ = 0;
  int window_ = 0;  // the longest of the sliding layers
  int n_pages_ = 0, max_draft_rows_ = 0, table_pages_ = 0;
  size_t k_slot_ = 0, v_slot_ = 0, k_part_ = 0, kv_layer_ = 0;
  size_t state_part_ = 0, recurrent_layer_ = 0;
  size_t tape_conv_ = 0, tape_k_ = 0, tape_g_ = 0, tape_layer_ = 0;
};

}  // namespace thermo
