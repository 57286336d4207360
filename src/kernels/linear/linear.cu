// y = W x for the rows of a step.
//
// One row (decode): bound by the bytes of W. One launch for all matrices that read the same input; the warps
// of a block share a panel, each with one or two chunks of 256 columns, so that the whole matrix is in flight
// at once and a warp waits for memory once: integer dot products (dot_product.cuh). Up to 64 rows that come
// rounded: integer tensor cores (linear_few.cuh). Other rows, and float weights: warp_product.cuh for few,
// f16 tensor cores with activations in shared memory for more (linear_tiles.cu).
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/linear/dot_product.cuh"
#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/linear_few_cuda.h"
#include "kernels/linear/linear_tiles_cuda.h"
#include "kernels/linear/warp_product.cuh"

namespace thermo {
namespace {

constexpr int min_of(int a, int b) {
  return a < b ? a : b;
}
constexpr int log2_floor(int x) {
  int log = 0;
  while (2 << log <= x) ++log;
  return log;
}

struct SmallPlan {
  DeviceLinearArgs args;
  int first_block[kMaxLinearJobs + 1];
  int split_log2[kMaxLinearJobs];  // warps that share a panel
  int stage_bytes;                 // shared memory of a warp
};

enum class DotSource { F16, I8, Norm };

// One row. `plan.split_log2` may reach kWarpsLog2.
template <DotSource kSource, int kWarpsLog2>
__global__ void __launch_bounds__(32 << kWarpsLog2, kWarpsLog2 == 4 ? 2 : 3)
    linear_dot_kernel(const __grid_constant__ SmallPlan plan) {
  constexpr int kWarps = 1 << kWarpsLog2;
  __shared__ __align__(16) float part[kWarps][16];
  __shared__ float squares[kWarps];
  extern __shared__ __align__(16) std::byte stages[];
  DotActs* const stage = reinterpret_cast<DotActs*>(stages);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  touch_params(plan);
  int j = 0;
  while (j + 1 < plan.args.n_jobs && static_cast<int>(blockIdx.x) >= plan.first_block[j + 1]) ++j;
  const DeviceLinearJob& job = plan.args.jobs[j];
  const DeviceMatrix& w = job.w;
  const int split = plan.split_log2[j], panels_here = kWarps >> split;
  const int block = static_cast<int>(blockIdx.x) - plan.first_block[j];
  const int k_part = job.k_parts == 2 ? block & 1 : 0;
  const int first_panel = (job.k_parts == 2 ? block >> 1 : block) * panels_here;
  const int panel = first_panel + (warp >> split);
  const int32_t* const row_index = plan.args.row_index;
  const uint8_t* const bytes = panel * 16 < w.n_rows ? w.panels + panel * w.panel_bytes : nullptr;
  const int first_chunk = (k_part << split) + (warp & ((1 << split) - 1)), step = job.k_parts << split;
  const auto row_of = [&](int) { return row_index == nullptr ? 0 : row_index[0]; };
  if constexpr (kSource == DotSource::Norm) {
    const DeviceNormIn& norm = plan.args.norm;
    NormWeights norm_weights;
    norm_weights.load(norm.weight, w.n_cols, warp, lane);
    dot_product<1>(w, bytes, first_chunk, step, SharedActs{stage}, lane, part[warp], [&] {
      allow_next();
      wait_for_inputs();
      make_norm_acts(
          norm.x, norm.weight, norm_weights, w.n_cols, warp, kWarps, lane, squares,
          [&](int chunk, float4 low, float4 high) { put_dot_acts(low, high, 1.0f, lane, stage[chunk]); });
      __syncthreads();
    });
  } else {
    const auto ready = [] {
      allow_next();
      wait_for_inputs();
    };
    if constexpr (kSource == DotSource::I8)
      dot_product<1>(w, bytes, first_chunk, step, StoredActs{plan.args.x, row_of}, lane, part[warp], ready);
    else
      dot_product<1>(w, bytes, first_chunk, step,
                     RoundedActs<1, decltype(row_of)>{plan.args.x, row_of, stage + warp}, lane, part[warp],
                     ready);
  }
  // The sums are short, so their latency counts: what is added to is on its way before the barrier, and the
  // reads of a sum run together.
  const int r = threadIdx.x & 15, p = threadIdx.x >> 4, row = (first_panel + p) * 16 + r;
  const bool has = p < panels_here && row < w.n_rows;
  float* const y = job.y + k_part * job.part_stride + row;
  float sum = has && job.add ? *y : 0.0f;
  __syncthreads();
  if (!has) return;
  if constexpr (kSource == DotSource::Norm) {
    const float scale = norm_scale(squares, kWarps, w.n_cols, plan.args.norm.eps);
    float all = 0.0f;
#pragma unroll
    for (int s = 0; s < kWarps; ++s)
      if (s < 1 << split) all += part[(p << split) + s][r];
    sum += all * scale;
  } else {
#pragma unroll
    for (int s = 0; s < kWarps; ++s)
      if (s < 1 << split) sum += part[(p << split) + s][r];
  }
  *y = sum;
}

template <int NT8>
__global__ void __launch_bounds__(256, NT8 == 1 ? 4 : 3)
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

  warp_product<NT8>(
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

int all_panels_of(const DeviceLinearArgs& args) {
  int panels = 0;
  for (int j = 0; j < args.n_jobs; ++j) panels += ceil_div(args.jobs[j].w.n_rows, 16) * args.jobs[j].k_parts;
  return panels;
}

SmallPlan make_plan(const DeviceLinearArgs& args, int n_warps_log2, bool dot) {
  SmallPlan plan{.args = args, .first_block = {}, .split_log2 = {}, .stage_bytes = 0};
  const int all_panels = all_panels_of(args);
  for (int j = 0; j < args.n_jobs; ++j) {
    const DeviceMatrix& w = args.jobs[j].w;
    int split = split_log2(w.n_cols / args.jobs[j].k_parts, all_panels, dot);
    // Adding needs the whole sum in one block, and a block of more warps is meant for that.
    if (n_warps_log2 > 3) split = min_of(n_warps_log2, log2_floor(dot_chunks(w.n_cols)));
    plan.split_log2[j] = split;
    plan.first_block[j + 1] =
        plan.first_block[j] +
        args.jobs[j].k_parts * ceil_div(ceil_div(w.n_rows, 16), (1 << n_warps_log2) >> split);
  }
  return plan;
}

template <DotSource kSource, int kWarpsLog2>
void launch_dot(const DeviceLinearArgs& args, StreamView stream) {
  const SmallPlan plan = make_plan(args, kWarpsLog2, true);
  size_t stage = 0;
  if (kSource == DotSource::F16) stage = sizeof(DotActs) << kWarpsLog2;
  if (kSource == DotSource::Norm)
    stage = sizeof(DotActs) * static_cast<size_t>(dot_chunks(args.jobs[0].w.n_cols));
  launch(linear_dot_kernel<kSource, kWarpsLog2>, static_cast<unsigned>(plan.first_block[args.n_jobs]),
         32 << kWarpsLog2, stage, stream, plan);
}

template <int NT8>
void launch_small(const DeviceLinearArgs& args, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(linear_small_kernel<NT8>, 8 * kMaxWarpStageBytes), true;
  }();
  static_cast<void>(ready);
  SmallPlan plan = make_plan(args, 3, false);
  for (int j = 0; j < args.n_jobs; ++j) {
    const DeviceMatrix& w = args.jobs[j].w;
    const int bytes = warp_stage_bytes(w, NT8 == 1 ? (args.n_acts < 8 ? args.n_acts : 8) : 0,
                                       chunks_per_warp(w.n_cols, args.jobs[j].k_parts << plan.split_log2[j]));
    if (bytes > plan.stage_bytes) plan.stage_bytes = bytes;
  }
  const dim3 grid(static_cast<unsigned>(plan.first_block[args.n_jobs]),
                  static_cast<unsigned>(ceil_div(args.n_acts, NT8 * 8)));
  launch(linear_small_kernel<NT8>, grid, 256, 8 * static_cast<size_t>(plan.stage_bytes), stream, plan);
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

bool linear_reads_norm(const DeviceMatrix& w) noexcept {
  return w.n_rows == 0 || has_dot(w.dtype);
}

namespace {

// Rows in the f16 form, in the int8 form of one row, or through a norm.
void linear_plain(const DeviceLinearArgs& args, StreamView stream) {
  if (args.n_acts <= kMaxSmallActs && !linear_prefers_tiles(args)) {
    bool dot = args.n_acts == 1;
    for (int j = 0; j < args.n_jobs; ++j) dot = dot && has_dot(args.jobs[j].w.dtype);
    if (args.norm.x != nullptr) return launch_dot<DotSource::Norm, 3>(args, stream);
    if (args.jobs[0].add) return launch_dot<DotSource::F16, 4>(args, stream);
    if (dot && args.x.i8 != nullptr) return launch_dot<DotSource::I8, 3>(args, stream);
    if (dot) return launch_dot<DotSource::F16, 3>(args, stream);
    if (args.n_acts <= 8) return launch_small<1>(args, stream);
    if (args.n_acts <= 16) return launch_small<2>(args, stream);
    return launch_small<4>(args, stream);
  }
  DeviceLinearArgs rest = args;
  rest.n_jobs = 0;
  for (int j = 0; j < args.n_jobs; ++j)
    if (!has_tiles(args, j)) rest.jobs[rest.n_jobs++] = args.jobs[j];
  if (rest.n_jobs > 0) launch_small<1>(rest, stream);
  linear_tiles_cuda(args, stream);
}

}  // namespace

void linear_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept {
  DeviceLinearArgs few = args, others = args;
  few.n_jobs = others.n_jobs = 0;
  for (int j = 0; j < args.n_jobs; ++j) {
    DeviceLinearArgs& to = linear_few_possible(args, j) ? few : others;
    to.jobs[to.n_jobs++] = args.jobs[j];
  }
  if (few.n_jobs > 0) linear_few_cuda(few, stream);
  if (others.n_jobs > 0) linear_plain(others, stream);
}

}  // namespace thermo
