// Sizes shared by the attention kernels and by the code that hands out their scratch. Anonymous namespace:
// see simd_avx512.h.
#pragma once

#include <cstddef>

#include "kernels/attention/attention.h"

namespace thermo {
namespace {

constexpr int kAttentionQueries = 64;    // query vectors (row, head of the group) of one tile
constexpr int kAttentionKeys = kKvTile;  // positions of one block
// Positions that are summed from scratch before they are merged with those before: what a thread takes when
// one row's context is split. 28 us of one core at 8 heads of 256, so that 4096 positions of two such groups
// keep 32 cores busy; merging takes about 1 % of that.
constexpr int kAttentionSpan = 256;

// What some queries have seen of a span: unfinished sums over values, and for each query its largest score
// and the sum of the weights relative to it.
struct SpanState {
  float* sums;  // [n_queries][head_dim], and memory for one more row
  float* max;
  float* sum;

  static size_t lanes(int n_queries) { return static_cast<size_t>((n_queries + 15) / 16 * 16); }
  static size_t floats(int n_queries, int head_dim) {
    return (lanes(n_queries) + 1) * static_cast<size_t>((head_dim + 15) / 16 * 16) + 2 * lanes(n_queries);
  }
  SpanState(float* base, int n_queries, int head_dim)
      : sums(base + 2 * lanes(n_queries)), max(base), sum(base + lanes(n_queries)) {
    static_cast<void>(head_dim);
  }
};

struct AttentionScratch {
  // Offsets in floats, each a multiple of 16.
  int head_dim;
  explicit AttentionScratch(int dim) : head_dim(dim) {}

  // Two tiles: that of all rows, and one row of it.
  size_t tile(int which) const { return static_cast<size_t>(which) * (rescale() + kAttentionQueries); }
  size_t queries() const { return 0; }  // [head_dim][queries], or [queries][head_dim]
  size_t state() const { return queries() + heads(kAttentionQueries); }
  size_t rescale() const { return state() + SpanState::floats(kAttentionQueries, head_dim); }

  size_t keys() const { return tile(2); }                                   // [keys][head_dim] as f32
  size_t values() const { return keys() + heads(kAttentionKeys); }          // [keys][head_dim] as f32
  size_t gathered() const { return values() + heads(kAttentionKeys); }      // twice as many, as stored
  size_t scores() const { return gathered() + 2 * heads(kAttentionKeys); }  // [keys][queries]
  size_t merged() const { return scores() + static_cast<size_t>(kAttentionQueries) * kAttentionKeys; }
  size_t work_floats() const { return merged() + SpanState::floats(kAttentionQueries, head_dim); }
  // Of a context that is split: what one tile has merged, and spans of it.
  size_t partial_floats() const { return kPartials * SpanState::floats(kAttentionQueries, head_dim); }
  static constexpr int kPartials = 3;

 private:
  size_t heads(int n) const {
    return static_cast<size_t>((head_dim + 15) / 16 * 16) * static_cast<size_t>(n);
  }
};

}  // namespace
}  // namespace thermo
