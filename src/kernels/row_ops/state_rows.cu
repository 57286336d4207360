#include <algorithm>

#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/row_ops/state_rows_cuda.h"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {
namespace {

constexpr int kRowsAtOnce = 64;  // whose numbers fit into the parameters
constexpr int kThreads = 256;

struct GatherPlan {
  GatherRowsArgs args;
  bool listed;
  int32_t rows[kRowsAtOnce];
};

__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const __grid_constant__ GatherPlan plan) {
  allow_next();
  wait_for_inputs();
  const GatherRowsArgs& a = plan.args;
  const int i = blockIdx.x, tap = blockIdx.y;
  const int64_t row = plan.listed ? plan.rows[i] : i;
  const float4* const from =
      reinterpret_cast<const float4*>(a.from + tap * a.tap_stride + row * a.row_stride);
  float4* const to = reinterpret_cast<float4*>(a.to + (static_cast<int64_t>(i) * a.n_taps + tap) * a.n_embd);
  for (int c = threadIdx.x; c < a.n_embd / 4; c += kThreads) to[c] = from[c];
}

__global__ void __launch_bounds__(kThreads) join_rows_kernel(const __grid_constant__ JoinRowsArgs a) {
  __shared__ float scratch[32];
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.x, first = blockIdx.y * a.n_cols;
  const JoinRowsArgs::Piece piece = a.pieces[blockIdx.y];
  const float* const x = piece.x + static_cast<int64_t>(row) * a.n_cols;
  float scale = 1.0f;
  if (piece.norm != nullptr) {
    float square = 0.0f;
    for (int c = threadIdx.x; c < a.n_cols; c += kThreads) square += x[c] * x[c];
    scale = rsqrtf(block_sum(square, scratch) / static_cast<float>(a.n_cols) + a.eps);
  }
  const ActsOut out{static_cast<half*>(a.out.f16), a.out.f32, a.out.f16_stride, a.out.f32_stride,
                    a.out.scale};
  for (int c = blockIdx.z * kThreads + threadIdx.x; c < a.n_cols; c += gridDim.z * kThreads)
    out.put(row, first + c, piece.norm == nullptr ? x[c] : x[c] * scale * piece.norm[c]);
}

}  // namespace

void gather_rows_cuda(const GatherRowsArgs& args, StreamView stream) noexcept {
  const int step = args.rows == nullptr ? args.n : kRowsAtOnce;
  for (int begin = 0; begin < args.n; begin += step) {
    GatherPlan plan{.args = args, .listed = args.rows != nullptr, .rows = {}};
    const int n = std::min(step, args.n - begin);
    if (plan.listed) std::copy_n(args.rows + begin, n, plan.rows);
    plan.args.to += static_cast<int64_t>(begin) * args.n_taps * args.n_embd;
    launch(gather_rows_kernel, dim3(static_cast<unsigned>(n), static_cast<unsigned>(args.n_taps)), kThreads,
           0, stream, plan);
  }
}

void join_rows_cuda(const JoinRowsArgs& args, StreamView stream) noexcept {
  // Rows of features are long and have no norm, so many blocks share one: 25 us for 8 rows of 10240 columns
  // with a block each.
  bool any_norm = false;
  for (int i = 0; i < args.n_pieces; ++i) any_norm = any_norm || args.pieces[i].norm != nullptr;
  const int blocks = any_norm ? 1 : ceil_div(args.n_cols, kThreads);
  launch(join_rows_kernel,
         dim3(static_cast<unsigned>(args.n_rows), static_cast<unsigned>(args.n_pieces),
              static_cast<unsigned>(blocks)),
         kThreads, 0, stream, args);
}

}  // namespace thermo
