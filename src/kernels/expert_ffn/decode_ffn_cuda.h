// The feed-forward block of one row, from the residual stream to the residual stream. A first launch: norm,
// router, and the shared expert's gate and up. Then everything else in one launch if the card and the shape
// allow it and no expert can be cold; else gate and up of the chosen, and down, weighted sum and residual in
// another. Two rows: only where one launch does it.
#pragma once

#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/sum_cuts.h"
#include "kernels/route_topk/route_topk_cuda.h"
#include "kernels/row_ops/row_ops_cuda.h"

namespace thermo {

// Memory that a later launch reads.
struct DevicePrefetch {
  const uint8_t* from = nullptr;
  size_t bytes = 0;
};

struct DecodeFfnArgs {
  DeviceNormIn norm;   // of x
  float* x = nullptr;  // [n_rows][n_embd], in and out
  int n_embd = 0;
  int n_rows = 1;  // or 2

  RouteConfig config;                    // n_expert 0: a dense layer, only the shared matrices
  DeviceMatrix router;                   // of floats; n_rows 0: none (Gating::Every)
  const float* bias = nullptr;           // [n_expert] or nullptr
  const uint8_t* const* base = nullptr;  // [n_expert] in device memory; nullptr: a cold expert
  DeviceCold cold;                       // what becomes of cold ones
  DeviceMatrix gate, up, down;
  DeviceMatrix shared_gate, shared_up, shared_down;  // n_rows 0: none
  const float* shared_weight = nullptr;              // [n_embd]; nullptr: weight 1

  DevicePrefetch next[4];     // asked into L2 while the router keeps the memory idle
  ConvShiftArgs conv;         // runs beside the router
  DeviceRoutes routes;        // `partial`, `uses`, and pair_weight[n_rows][n_expert_used + 1]
  float* hidden = nullptr;    // [n_rows][n_expert_used + 1][hidden_stride]
  int64_t hidden_stride = 0;  // a multiple of 4
  // Where the blocks of one launch hand hidden rows to each other: decode_exchange_bytes(), zero when
  // made. nullptr: gate, up and down are launches of their own.
  void* exchange = nullptr;
};

// For n_used experts of n_ff hidden columns and up to two rows.
size_t decode_exchange_bytes(int n_used, int n_ff) noexcept;
// What the first launch of each decode_ffn_cuda() counts up there, or the norms of a step without it.
inline uint32_t* decode_launch_number(void* exchange) {
  return static_cast<uint32_t*>(exchange);
}

// Whether these kernels know the types, and two rows have the memory and `exchange`.
bool decode_ffn_possible(const DecodeFfnArgs& args) noexcept;

void decode_ffn_cuda(const DecodeFfnArgs& args, StreamView stream) noexcept;

}  // namespace thermo
