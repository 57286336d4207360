// y[t, r] = sum_c W[r, c] * x[t, c] for weights of every block format, few rows (decode) or many (prefill).
//
// Weights are repacked at load into panels of 16 matrix rows, so that one 64-byte vector holds 4 consecutive
// columns of all 16 rows: one dot instruction feeds 16 outputs, there is no horizontal sum, and a panel is
// one sequential stream. The same bytes serve the portable, AVX2, AVX-VNNI, AVX-512 and AMX kernels. The
// layout of each type is drawn in panel_layout.h.
//
// Activations are quantised once per row to int8 for quantised weights; float weights multiply float rows.
//
// AVX2, AVX-VNNI, AVX-512 and AMX kernels give the same bits for quantised weights, whatever n_act is: the
// product of a block is an exact integer until it meets its float scale, and blocks are added in the order of
// columns with the same multiply-adds. So do the experts' products on the GPU (panel_exact.cuh).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/isa.h"
#include "tensor/dtype.h"

namespace thermo {

inline constexpr int kPanelRows = 16;

// The form of an activation row that a weight type multiplies with.
enum class ActFormat : uint8_t {
  F32,     // plain floats: F32, F16, BF16 weights
  Q8x32,   // int8, a scale per 32: formats with 32-element blocks
  Q8x256,  // int8, a scale per 256 and sums per sub-block: the K formats and IQ4_XS
};
inline constexpr int kActFormats = 3;

ActFormat act_format(DType weight);
// Bytes of one activation row, a multiple of 64. n_cols need not be a multiple of the block: the tail is
// zero.
size_t act_row_bytes(ActFormat format, int n_cols);

// Multiplies a row in that form with a number: its steps, each rounded once.
void scale_act_row(ActFormat format, int n_cols, float scale, std::byte* row) noexcept;

// Bytes of one panel (16 rows of n_cols), a multiple of 64. REQUIRES: n_cols a multiple of the type's block.
size_t panel_bytes(DType dtype, int n_cols);
inline int n_panels(int n_rows) {
  return (n_rows + kPanelRows - 1) / kPanelRows;
}
inline size_t packed_matrix_bytes(DType dtype, int n_rows, int n_cols) {
  return static_cast<size_t>(n_panels(n_rows)) * panel_bytes(dtype, n_cols);
}

// Repacks panel `panel` of a matrix stored as GGUF rows into `out` (panel_bytes). Rows past n_rows read as
// zero. Exact: only the places of the bits change. `out` is 64-byte aligned; `rows` has no alignment.
void pack_panel(DType dtype, const std::byte* rows, int n_rows, int n_cols, int panel,
                std::byte* out) noexcept;

// Consecutive panels of one matrix times a set of activation rows.
struct PanelMatmulArgs {
  DType dtype;
  int n_cols;
  const std::byte* panels;   // the first panel to multiply, 64-byte aligned
  int n_panels;              // how many follow each other
  int n_rows;                // outputs to write: at most 16 * n_panels; less when the last panel is padded
  const std::byte* acts;     // activation rows in act_format(dtype), 64-byte aligned
  size_t act_stride;         // bytes between activation rows, a multiple of 64
  const int32_t* act_index;  // activation row of each of the n_act inputs, or nullptr: 0, 1, 2, ...
  int n_act;                 // activation rows to multiply, >= 1
  float* y;                  // y[i * y_stride + r], i in 0..n_act-1
  int64_t y_stride;          // floats
};

struct QuantMatmulKernels {
  // x[n_cols] -> out[act_row_bytes]. `out` is 64-byte aligned.
  void (*quantize_row)(ActFormat format, const float* x, int n_cols, std::byte* out) noexcept;
  // Single-threaded; callers split panels over threads. Overwrites y.
  void (*matmul)(const PanelMatmulArgs& args) noexcept;
};

const QuantMatmulKernels& quant_matmul_kernels(Isa isa);

// How many bytes ahead of their use the weights of one or two activation rows are asked for; 0: not at all.
// Processors differ. From memory with AVX2, Q4_K on one core, without and with 8 KiB: Zen 5 reads 10 to 12
// and 23 GB/s; Zen 4 is 10 to 25 % slower with it; Sapphire Rapids needs it. choose_prefetch() measures
// (kernels/linear). For the whole process and its next products; results are the same.
void set_prefetch_ahead(int bytes) noexcept;
int prefetch_ahead() noexcept;

// The definition of correct: decodes the GGUF rows to float and accumulates in double, activations as given.
// y[t * n_rows + r].
void quant_matmul_ref(DType dtype, const std::byte* rows, int n_rows, int n_cols, const float* x, int n_act,
                      float* y);

}  // namespace thermo
