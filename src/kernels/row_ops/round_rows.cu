// Rows rounded to int8 for the products that follow, a warp for 256 columns of a row: between kernels whose
// blocks make fewer columns than share a step.
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/quant_matmul/panel_exact.cuh"
#include "kernels/row_ops/row_ops_cuda.h"
#include "kernels/row_ops/unrounded_row.cuh"

namespace thermo {
namespace {

constexpr int kRoundThreads = 128;

struct RoundPlan {
  DeviceActs from;
  const float *gate, *up;  // not null: silu(gate) * up instead, rows n_cols apart
  DeviceActsOut to;
  int n_rows, n_cols, n_chunks;
};

__global__ void __launch_bounds__(kRoundThreads) round_rows_kernel(const __grid_constant__ RoundPlan plan) {
  allow_next();
  wait_for_inputs();
  const int lane = threadIdx.x % 32, i = blockIdx.x * (kRoundThreads / 32) + threadIdx.x / 32;
  const int row = i / plan.n_chunks, chunk = i % plan.n_chunks;
  if (row >= plan.n_rows) return;
  const ActPiece piece = unrounded_piece(plan.from, plan.gate, plan.up, row, chunk, plan.n_cols, lane);
  const int64_t at = row * plan.to.blocks_stride + chunk;
  if (plan.to.blocks256 != nullptr)
    put_block_acts<256>(piece.low, piece.high, lane, static_cast<BlockActs*>(plan.to.blocks256)[at]);
  if (plan.to.blocks32 != nullptr)
    put_block_acts<32>(piece.low, piece.high, lane, static_cast<BlockActs*>(plan.to.blocks32)[at]);
}

void launch_round(const RoundPlan& plan, StreamView stream) {
  launch(round_rows_kernel, static_cast<unsigned>(ceil_div(plan.n_rows * plan.n_chunks, kRoundThreads / 32)),
         kRoundThreads, 0, stream, plan);
}

}  // namespace

void round_rows_cuda(const DeviceActs& from, int n_rows, int n_cols, const DeviceActsOut& to,
                     StreamView stream) noexcept {
  launch_round({from, nullptr, nullptr, to, n_rows, n_cols, ceil_div(n_cols, 256)}, stream);
}

void swiglu_rows_cuda(const float* gate, const float* up, int n_rows, int n_cols, const DeviceActsOut& to,
                      StreamView stream) noexcept {
  launch_round({{}, gate, up, to, n_rows, n_cols, ceil_div(n_cols, 256)}, stream);
}

}  // namespace thermo
