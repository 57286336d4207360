// y = W x for the rows of a step.
//
// Few rows (decode): bound by the bytes of W. One launch for all matrices that read the same input; a block
// of 8 warps takes one panel of K >= 2048 with a chunk of 256 columns per warp (K = 512: four panels with two
// chunks each), so that the whole matrix is in flight at once and a warp waits for memory once. Many rows
// (prefill): bound by the tensor cores, tile_product.cuh.
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/linear_tiles_cuda.h"
#include "kernels/linear/warp_product.cuh"

namespace thermo {
namespace {

struct SmallPlan {
  DeviceLinearArgs args;
  int first_block[kMaxLinearJobs + 1];
  int split_log2[kMaxLinearJobs];  // warps that share a panel
  int stage_bytes;                 // shared memory of a warp
};

template <int NT8, bool kDot>
__global__ void __launch_bounds__(256, NT8 == 1 && !kDot ? 4 : 3)
    linear_small_kernel(const __grid_constant__ SmallPlan plan) {
  __shared__ __align__(16) float part[8][NT8 * kPartFloats];
  extern __shared__ __align__(16) std::byte stages[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int j = 0;
  while (j + 1 < plan.args.n_jobs && static_cast<int>(blockIdx.x) >= plan.first_block[j + 1]) ++j;
  const DeviceLinearJob& job = plan.args.jobs[j];
  const DeviceMatrix& w = job.w;
  const int split = plan.split_log2[j], panels_here = 8 >> split;
  const int block = static_cast<int>(blockIdx.x) - plan.first_block[j];
  const int k_part = job.k_parts == 2 ? block & 1 : 0;
  const int first_panel = (job.k_parts == 2 ? block >> 1 : block) * panels_here;
  const int panel = first_panel + (warp >> split);
  const int first_act = blockIdx.y * NT8 * 8;
  const int n_acts = min(NT8 * 8, plan.args.n_acts - first_act);
  const int32_t* const row_index = plan.args.row_index;

  warp_product<NT8, kDot>(
      w, panel * 16 < w.n_rows ? w.panels + panel * w.panel_bytes : nullptr,
      (k_part << split) + (warp & ((1 << split) - 1)), job.k_parts << split, plan.args.x,
      [&](int a) { return row_index == nullptr ? first_act + a : row_index[first_act + a]; }, n_acts, lane,
      stages + warp * plan.stage_bytes, part[warp],
      [] {
        allow_next();
        wait_for_inputs();
      });
  __syncthreads();
  for (int i = threadIdx.x; i < (n_acts * 16) << (3 - split); i += 256) {
    const int r = i & 15, p = (i >> 4) & (panels_here - 1), a = i >> (7 - split);
    const int row = (first_panel + p) * 16 + r;
    if (row >= w.n_rows) continue;
    float sum = 0.0f;
    for (int s = 0; s < 1 << split; ++s) sum += part[(p << split) + s][a * 16 + r];
    job.y[k_part * job.part_stride + (first_act + a) * job.y_stride + row] = sum;
  }
}

template <int NT8, bool kDot>
void launch_small(const DeviceLinearArgs& args, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(linear_small_kernel<NT8, kDot>, 8 * kMaxWarpStageBytes), true;
  }();
  static_cast<void>(ready);
  SmallPlan plan{.args = args, .first_block = {}, .split_log2 = {}, .stage_bytes = 0};
  int all_panels = 0;
  for (int j = 0; j < args.n_jobs; ++j)
    all_panels += ceil_div(args.jobs[j].w.n_rows, 16) * args.jobs[j].k_parts;
  for (int j = 0; j < args.n_jobs; ++j) {
    const DeviceMatrix& w = args.jobs[j].w;
    const int split = split_log2(w.n_cols / args.jobs[j].k_parts, all_panels, kDot);
    plan.split_log2[j] = split;
    plan.first_block[j + 1] =
        plan.first_block[j] + args.jobs[j].k_parts * ceil_div(ceil_div(w.n_rows, 16), 8 >> split);
    const int bytes = warp_stage_bytes(w, NT8 == 1 ? (args.n_acts < 8 ? args.n_acts : 8) : 0,
                                       chunks_per_warp(w.n_cols, args.jobs[j].k_parts << split), kDot);
    if (bytes > plan.stage_bytes) plan.stage_bytes = bytes;
  }
  const dim3 grid(static_cast<unsigned>(plan.first_block[args.n_jobs]),
                  static_cast<unsigned>(ceil_div(args.n_acts, NT8 * 8)));
  launch(linear_small_kernel<NT8, kDot>, grid, 256, 8 * static_cast<size_t>(plan.stage_bytes), stream, plan);
}

}  // namespace

DeviceMatrix with_chunks(DeviceMatrix m) noexcept {
  const auto fill = [&]<DType T>() {
    constexpr PanelFormat f = kPanelFormat<T>;
    if constexpr (f.block_cols == 256) {
      static_assert(f.unit_blocks == 1 || f.unit_blocks == 2);
      m.unit_log2 = f.unit_blocks - 1;
      m.unit_bytes = f.unit_bytes();
      m.body_bytes = f.body_bytes();
    } else {
      m.unit_log2 = 0;
      m.unit_bytes = 8 / f.unit_blocks * f.unit_bytes();
      m.body_bytes = m.unit_bytes - 64;
    }
  };
#define CASE(t)                         \
  fill.template operator()<DType::t>(); \
  break
  THERMO_FOR_QUANT_TYPE(m.dtype, CASE)
#undef CASE
  return m;
}

void linear_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept {
  if (args.n_acts <= kMaxSmallActs) {
    bool dot = args.n_acts == 1;
    for (int j = 0; j < args.n_jobs; ++j) dot = dot && has_dot(args.jobs[j].w.dtype);
    if (dot) return launch_small<1, true>(args, stream);
    if (args.n_acts <= 8) return launch_small<1, false>(args, stream);
    if (args.n_acts <= 16) return launch_small<2, false>(args, stream);
    return launch_small<4, false>(args, stream);
  }
  for (int j = 0; j < args.n_jobs; ++j) {
    if (has_tiles(args, j)) continue;
    DeviceLinearArgs one = args;
    one.jobs[0] = args.jobs[j];
    one.n_jobs = 1;
    launch_small<1, false>(one, stream);
  }
  linear_tiles_cuda(args, stream);
}

}  // namespace thermo
