// Sizes shared by the attention kernels and by the code that hands out their scratch. Anonymous namespace:
// see simd_avx512.h.
#pragma once

#include <cstddef>

namespace thermo {
namespace {

constexpr int kAttentionQueries = 64;  // query vectors (row, head of the group) of one tile
constexpr int kAttentionKeys = 64;     // slots of one block

struct AttentionScratch {
  // Offsets in floats, each a multiple of 16.
  static constexpr size_t kScores = static_cast<size_t>(kAttentionQueries) * kAttentionKeys;
  static constexpr size_t kStats = 4 * static_cast<size_t>(kAttentionQueries);

  size_t dim;  // head_dim rounded up to 16
  explicit AttentionScratch(int head_dim) : dim(static_cast<size_t>((head_dim + 15) / 16 * 16)) {}

  size_t queries() const { return 0; }  // [head_dim][queries], or [queries][head_dim]
  size_t keys() const { return queries() + dim * kAttentionQueries; }  // [keys][head_dim] as f32
  size_t values() const { return keys() + dim * kAttentionKeys; }      // [keys][head_dim] as f32
  size_t sums() const { return values() + dim * kAttentionKeys; }      // [queries][head_dim]
  size_t scores() const { return sums() + dim * kAttentionQueries; }   // [keys][queries]
  size_t stats() const { return scores() + kScores; }
  size_t work_floats() const { return stats() + kStats; }
  // One tile's partial results.
  size_t partial_floats() const { return (dim + 16) * kAttentionQueries; }
};

}  // namespace
}  // namespace thermo
