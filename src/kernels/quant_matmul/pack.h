// Repacking rows that do not follow each other: some columns of a wider matrix.
#pragma once

#include <cstddef>

#include "tensor/dtype.h"

namespace thermo {

// As pack_panel() in quant_matmul.h; `row_stride`: bytes between rows, 0 where they follow each other.
void pack_panel(DType dtype, const std::byte* rows, size_t row_stride, int n_rows, int n_cols, int panel,
                std::byte* out) noexcept;

}  // namespace thermo
