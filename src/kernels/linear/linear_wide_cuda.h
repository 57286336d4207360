// Products with more than 64 rows on Hopper (compute capability 9.0): activations are cut into tiles first. A
// part of linear_cuda; the pair of gate and up is also called alone.
#pragma once

#include "kernels/linear/linear_cuda.h"

namespace thermo {

// Activation rows of a tile: 128 or 256. Room for n_acts rows as tiles.
inline constexpr int kWideTileRows = 256, kLowWideTileRows = 128;
constexpr int wide_tile_rows(int n_acts) {
  return n_acts <= kLowWideTileRows ? kLowWideTileRows : kWideTileRows;
}
size_t wide_bytes(int n_acts, int n_cols) noexcept;

// Whether this card and this build have the kernels, and there are rows enough for them.
bool wide_possible(const DeviceMatrix& w, int n_acts) noexcept;
// Whether the matrix is large enough, too.
bool wide_preferred(const DeviceMatrix& w, int n_acts) noexcept;

// linear_parts() of such a matrix.
int wide_parts(const DeviceMatrix& w, int n_acts) noexcept;

// The f16 form of rows as tiles, wide_bytes() of them.
void wide_tiles_cuda(const DeviceActs& x, const int32_t* row_index, int n_acts, int n_cols, void* tiles,
                     StreamView stream) noexcept;

// The jobs of args, which all are wide_possible(), over tiles of their rows.
void linear_wide_cuda(const DeviceLinearArgs& args, const void* tiles, StreamView stream) noexcept;

// silu(gate x) * (up x) as tiles, divided by hidden_scale. REQUIRES: gate and up wide_possible(), of one type
// and shape, with a multiple of 256 rows.
struct WideSwigluArgs {
  DeviceMatrix gate, up;
  const void* tiles = nullptr;
  float scale = 1.0f;  // of the tiles
  int n_acts = 0;
  void* hidden = nullptr;  // wide_bytes() of gate.n_rows columns
  float hidden_scale = 1.0f;
};
bool wide_swiglu_preferred(const DeviceMatrix& gate, const DeviceMatrix& up, int n_acts) noexcept;
void wide_swiglu_cuda(const WideSwigluArgs& args, StreamView stream) noexcept;

}  // namespace thermo
