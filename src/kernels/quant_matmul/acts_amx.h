// The activation rows of a pass as AMX reads them: 16 rows to a tile, two tiles to a pair. Included by the
// AMX file only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "kernels/quant_matmul/panel_avx512.h"
#include "kernels/quant_matmul/quant_matmul_impl.h"

namespace thermo {
namespace {

constexpr int kTileActs = 16;
constexpr int kPairActs = 2 * kTileActs;
constexpr int kMaxActs = 128;  // of a pass: they share an unpacked strip

// Memory of a thread for activation rows that are not the same distance apart.
struct Gathered {
  std::byte* data = nullptr;
  size_t size = 0;
  ~Gathered() { ::operator delete[](data, std::align_val_t{64}); }
  int8_t* reserve(size_t bytes) {
    if (bytes > size) {
      ::operator delete[](data, std::align_val_t{64});
      data = static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{64}));
      size = bytes;
    }
    return reinterpret_cast<int8_t*>(data);
  }
};
thread_local Gathered gathered;

struct ActTile {
  const int8_t* codes;
  size_t stride;
};

struct ActTiles {
  ActTile tile[kMaxActs / kTileActs];
  const std::byte* meta[kMaxActs];
  int n_acts;

  int n_pairs() const { return (n_acts + kPairActs - 1) / kPairActs; }
  // Rows of pair j that count.
  int n_rows(int j) const { return n_acts - kPairActs * j < kPairActs ? n_acts - kPairActs * j : kPairActs; }
  // Rows of the lower or upper tiles, whose configuration serves all pairs: of several pairs the last one's
  // tiles are full too, and what is past n_acts is not read.
  int tile_rows(int upper) const {
    const int n = n_acts > kPairActs ? kPairActs : n_acts;
    // A tile that is not used has one row: none would be no valid configuration.
    return upper ? (n > kTileActs ? n - kTileActs : 1) : (n < kTileActs ? n : kTileActs);
  }

  // Rows t0.. of a. Copies those that do not follow each other, and the ones of a last tile that is short.
  void read(const PanelMatmulArgs& a, int t0, int n, size_t code_bytes) {
    n_acts = n;
    const auto row = [&](int t) {
      return a.acts + static_cast<size_t>(a.act_index ? a.act_index[t0 + t] : t0 + t) * a.act_stride;
    };
    for (int t = 0; t < n; ++t) meta[t] = row(t) + code_bytes;
    const size_t copy_stride = (code_bytes / 64 | 1) * 64;  // an odd number of cache lines, as act_row_bytes
    int8_t* const copies = gathered.reserve(static_cast<size_t>(kMaxActs) * copy_stride);
    for (int t = 0; t < n; t += kTileActs) {
      const int rows = n - t < kTileActs ? n - t : kTileActs;
      bool as_it_lies = rows == kTileActs || n <= kPairActs;
      for (int m = 1; m < rows && as_it_lies && a.act_index; ++m)
        as_it_lies = a.act_index[t0 + t + m] == a.act_index[t0 + t] + m;
      if (as_it_lies) {
        tile[t / kTileActs] = {reinterpret_cast<const int8_t*>(row(t)), a.act_stride};
        continue;
      }
      int8_t* const copy = copies + static_cast<size_t>(t) * copy_stride;
      for (int m = 0; m < rows; ++m)
        std::memcpy(copy + static_cast<size_t>(m) * copy_stride, row(t + m), code_bytes);
      tile[t / kTileActs] = {copy, copy_stride};
    }
  }
};

// In which order the strips (256 columns) of a task's panels are multiplied: the same strip of a few panels,
// then their next one. A strip reads 256 columns of every activation row, more than the first-level cache
// keeps if all columns of a panel come in between; the sums of those few panels are what it can keep instead.
constexpr int kGroupSums = 256;
constexpr int kStripsAhead = 5;  // weights are asked for so many strips before their use

// Goes through the strips in that order; past the last panel to what follows in memory, which is mostly the
// thread's next task.
struct StripCursor {
  int n_panels, n_strips, group_panels;
  int first = 0;  // panel of the group
  int panel = 0, strip = 0;

  StripCursor(int panels, int strips, int acts)
      : n_panels(panels), n_strips(strips), group_panels(kGroupSums / acts) {}

  int in_group() const { return panel - first; }
  void advance(int n = 1) {
    for (int i = 0; i < n; ++i) {
      if (++panel != n_panels && panel != first + group_panels) continue;
      if (++strip == n_strips) {
        strip = 0;
        first = panel;
      }
      panel = first;
    }
  }
};

}  // namespace
}  // namespace thermo
