// A weight matrix and a gated FFN as the kernels see them. Non-owning.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace thermo {

// y = W x.
struct Matrix {
  DType dtype = DType::F32;
  int n_rows = 0;                     // outputs
  int n_cols = 0;                     // inputs
  const std::byte* panels = nullptr;  // repacked (kernels/quant_matmul); nullptr: pack from `rows` when used
  const std::byte* rows = nullptr;    // as in the file
  size_t row_stride = 0;              // bytes between these; 0: they follow each other

  bool empty() const { return n_rows == 0; }
  uint64_t n_bytes() const {
    return row_bytes(dtype, static_cast<uint64_t>(n_cols)) * static_cast<uint64_t>(n_rows);
  }
};

// y = down (silu(gate x) * (up x)).
struct Ffn {
  Matrix gate, up, down;

  bool empty() const { return gate.empty(); }
  uint64_t n_bytes() const { return gate.n_bytes() + up.n_bytes() + down.n_bytes(); }
};

}  // namespace thermo
