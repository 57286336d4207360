// Hidden states on the GPU on their way from one network to another: rows gathered, and rows in the forms
// that products read.
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "kernels/row_ops/row_ops_cuda.h"

namespace thermo {

// to[i] = all taps of row i, one after the other.
struct GatherRowsArgs {
  const float* from;
  int64_t tap_stride, row_stride;  // floats, multiples of 4
  int n_taps, n_embd;              // n_embd: a multiple of 4
  int n;                           // rows
  const int32_t* rows;             // which, in main memory; nullptr: 0, 1, 2, ...
  float* to;                       // [n][n_taps * n_embd]; no row that is still to be read
};
void gather_rows_cuda(const GatherRowsArgs& args, StreamView stream) noexcept;

// Pieces of a row side by side: out[r] = [piece 0 of r; piece 1 of r; ...], each normed on its own where it
// has a weight.
inline constexpr int kMaxJoinedPieces = 2;
struct JoinRowsArgs {
  struct Piece {
    const float* x;     // [rows][n_cols]
    const float* norm;  // [n_cols]; nullptr: as it is
  } pieces[kMaxJoinedPieces];
  int n_pieces, n_cols, n_rows;
  float eps;
  DeviceActsOut out;  // f16 and f32
};
void join_rows_cuda(const JoinRowsArgs& args, StreamView stream) noexcept;

}  // namespace thermo
