// The residual stream on the GPU: embedding rows in, blocks' outputs added, norms out.
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "kernels/linear/device_matrix.h"
#include "kernels/route_topk/cold_mail.h"

namespace thermo {

// Where a kernel leaves rows for a product; the writing side of DeviceActs.
struct DeviceActsOut {
  void* f16 = nullptr;
  float* f32 = nullptr;
  int64_t f16_stride = 0;
  int64_t f32_stride = 0;
  float scale = 1.0f;
  void* blocks256 = nullptr;
  void* blocks32 = nullptr;
  int64_t blocks_stride = 0;

  constexpr DeviceActs read() const {
    return {f16, f32, f16_stride, f32_stride, scale, blocks256, blocks32, blocks_stride};
  }
};

// x[r] = row tokens[r] of the table.
void embed_cuda(const DeviceMatrix& table, const int32_t* tokens, int n_rows, float* x, int n_embd,
                StreamView stream) noexcept;

// Rows (f16 if there, else f32) rounded into to.blocks256 and to.blocks32, whichever is there.
void round_rows_cuda(const DeviceActs& from, int n_rows, int n_cols, const DeviceActsOut& to,
                     StreamView stream) noexcept;
// The same of silu(gate) * up, rows n_cols floats apart, with the bits of experts.
void swiglu_rows_cuda(const float* gate, const float* up, int n_rows, int n_cols, const DeviceActsOut& to,
                      StreamView stream) noexcept;

// to = from, n floats (a multiple of 4): a hidden state set aside inside a step.
void copy_floats_cuda(const float* from, float* to, size_t n, StreamView stream) noexcept;

// The last taps - 1 inputs of every channel, shifted along the rows of a step; runs beside a norm because it
// must wait for all readers of the old columns, as the norm does.
struct ConvShiftArgs {
  float* state = nullptr;  // of sequence 0: [taps - 1][n_channels]; nullptr: nothing to shift
  int64_t sequence_stride = 0;
  const float* input = nullptr;  // [rows][n_channels]
  const int32_t* n_groups = nullptr;
  const int32_t* group_sequence = nullptr;
  const int32_t* group_begin = nullptr;
  const int32_t* group_rows = nullptr;
  const int32_t* group_uncommitted = nullptr;  // these keep theirs; nullptr: no group does
  int max_groups = 0;
  int n_channels = 0;
  int taps = 0;
};

// x[r] += sum_k weight[r, k] * parts[pair_of[r, k]], then h[r] = x[r] / sqrt(mean(x[r]^2) + eps) * norm.
struct ResidualNormArgs {
  float* x;                          // [rows][n_embd]
  const float* parts = nullptr;      // [pairs][n_embd]; nullptr: nothing to add
  const int32_t* pair_of = nullptr;  // [rows][n_parts], -1: none; nullptr: r + k * n_rows, weight 1
  const float* pair_weight = nullptr;
  bool on_grid = false;  // parts are added as experts are (GridSum), else as floats
  int n_parts = 0;
  const float* norm;  // [n_embd]
  float eps;
  DeviceActsOut h;
  // Rounded rows are x * norm, and the factor multiplies their steps, as one decoded row has it; else h is
  // rounded.
  bool factor_last = false;
  float* factor = nullptr;             // [rows] 1 / sqrt(mean(x^2) + eps), if asked for
  const float* shared_gate = nullptr;  // [n_embd]; nullptr: none
  float* shared_logit = nullptr;       // [rows] = shared_gate . h
  int n_rows, n_embd;
  uint32_t* count = nullptr;  // counted up once, if there
  ConvShiftArgs conv;
  DeviceCold cold_in;   // of the layer that ends here: waits for its answer, if it posted, and adds it
  DeviceCold cold_out;  // of the layer that begins here: x * norm and the factor go to its mail, if it has
                        // cold experts
};
void residual_norm_cuda(const ResidualNormArgs& args, StreamView stream) noexcept;

}  // namespace thermo
