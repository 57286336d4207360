// What a row is before it is rounded for integer products.
#pragma once

#include "kernels/linear/device_matrix.h"
#include "kernels/quant_matmul/panel_exact.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

// The lane's columns of a chunk of a row of `from`; `gate` not null: of silu(gate) * up, rows n_cols apart.
__device__ __forceinline__ ActPiece unrounded_piece(const DeviceActs& from, const float* gate,
                                                    const float* up, int row, int chunk, int n_cols,
                                                    int lane) {
  ActPiece piece;
  if (gate != nullptr) {
    const int64_t at = static_cast<int64_t>(row) * n_cols;
    ActPiece right;
    piece.load(gate + at, chunk, n_cols, lane);
    right.load(up + at, chunk, n_cols, lane);
    const auto swiglu = [](float4 g, float4 u) {
      return float4{swiglu_exact(g.x, u.x), swiglu_exact(g.y, u.y), swiglu_exact(g.z, u.z),
                    swiglu_exact(g.w, u.w)};
    };
    piece.low = swiglu(piece.low, right.low);
    piece.high = swiglu(piece.high, right.high);
  } else if (from.f16 != nullptr) {
    piece.load_halves(static_cast<const half*>(from.f16) + row * from.f16_stride, chunk, n_cols, from.scale,
                      lane);
  } else {
    piece.load(from.f32 + row * from.f32_stride, chunk, n_cols, lane);
  }
  return piece;
}

}  // namespace thermo
