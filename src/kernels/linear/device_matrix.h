// A weight matrix in GPU memory: the same panels as on the host (quant_matmul/panel_layout.h). Non-owning.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace thermo {

struct DeviceMatrix {
  const uint8_t* panels = nullptr;
  size_t panel_bytes = 0;
  DType dtype = DType::F32;
  int n_rows = 0;
  int n_cols = 0;

  // How a chunk of 256 columns lies in a panel of a quantised type: chunk c is the 64-byte header at
  // (c >> unit_log2) * unit_bytes and the body_bytes at 64 + (c & (1 << unit_log2) - 1) * body_bytes after
  // it.
  int unit_log2 = 0;
  int unit_bytes = 0;
  int body_bytes = 0;
};

// Fills in the shape of a chunk from the type; `dtype` and the rest are as given.
DeviceMatrix with_chunks(DeviceMatrix m) noexcept;

// Activation rows on the GPU. Quantised weights multiply the f16 form, float weights the f32 form; either may
// be missing when nothing reads it.
//
// In the f16 form the columns of each 32 are stored in the order in which a tensor-core lane reads them: lane
// t = 0..3 of a quad takes columns 4t..4t+3 and 16+4t..16+4t+3 with one 16-byte load, each four as 0 2 1 3
// (act_place()). Rows are padded with zeros to a multiple of 32 columns. x = value * scale.
//
// The rounded forms (BlockActs per 256 columns, panel_exact.cuh) are for integer products of up to 64 rows.
struct DeviceActs {
  const void* f16 = nullptr;
  const float* f32 = nullptr;
  int64_t f16_stride = 0;  // elements
  int64_t f32_stride = 0;
  float scale = 1.0f;               // of the f16 form
  const void* blocks256 = nullptr;  // rounded in groups of 256 columns, and of 32
  const void* blocks32 = nullptr;
  int64_t blocks_stride = 0;  // chunks of 256 columns
};

inline constexpr int kDotChunkBytes = 384;  // sizeof(BlockActs)

// Products that grow without bound are stored divided by this: f16 then reaches 1e6.
inline constexpr float kHiddenScale = 16.0f;

inline constexpr bool is_float_type(DType dtype) {
  return dtype == DType::F32 || dtype == DType::F16 || dtype == DType::BF16;
}

}  // namespace thermo
