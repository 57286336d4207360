// y = W x for many rows. Quantised weights: tile_product.cuh. Float weights, whose products are asked for in
// f32 (the router): exact_mma.cuh, a block of 8 warps for 64 activation rows and 64 weight rows, 64 columns
// at a time, a warp for 16 x 32 of them.
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/linear/exact_mma.cuh"
#include "kernels/linear/linear_tiles_cuda.h"
#include "kernels/linear/tile_product.cuh"

namespace thermo {
namespace {

// Jobs of one weight type; job j has blocks first_block[j] .. first_block[j + 1].
struct TilePlan {
  DeviceLinearArgs args;
  int first_block[kMaxLinearJobs + 1];
};

__device__ __forceinline__ int job_of_block(const TilePlan& plan) {
  int j = 0;
  while (j + 1 < plan.args.n_jobs && static_cast<int>(blockIdx.x) >= plan.first_block[j + 1]) ++j;
  return j;
}
__device__ __forceinline__ int act_row(const DeviceLinearArgs& args, int a) {
  return args.row_index == nullptr ? a : args.row_index[a];
}

template <DType T, int kActs>
__global__ void __launch_bounds__(kMaxTileThreads, kActs <= 64 ? 2 : 1)
    linear_tile_kernel(const __grid_constant__ TilePlan plan) {
  extern __shared__ __align__(16) std::byte shared[];
  int* const rows = reinterpret_cast<int*>(shared + 2 * kTileStageBytes<kActs>);
  const int j = job_of_block(plan);
  const DeviceLinearArgs& args = plan.args;
  const DeviceLinearJob& job = args.jobs[j];
  const DeviceMatrix& w = job.w;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int panel = ((blockIdx.x - plan.first_block[j]) * (blockDim.x / 32) + warp) * kTilePanels;
  const int first_act = blockIdx.y * kActs;
  const int n_acts = min(kActs, args.n_acts - first_act);
  allow_next();
  wait_for_inputs();
  for (int a = threadIdx.x; a < kActs; a += blockDim.x)
    rows[a] = a >= n_acts ? -1 : act_row(args, first_act + a);
  __syncthreads();

  float acc[kTilePanels][kActs / 8][4] = {};
  const uint8_t* panels[kTilePanels];
#pragma unroll
  for (int p = 0; p < kTilePanels; ++p)  // past the end: the last one again, stored nowhere
    panels[p] =
        panel * 16 >= w.n_rows ? nullptr : w.panels + min(panel + p, (w.n_rows - 1) / 16) * w.panel_bytes;
  tile_product<T, kActs>(panels, w.n_cols, args.x, shared, rows, n_acts, acc);

  const float scale = args.x.scale;
#pragma unroll
  for (int p = 0; p < kTilePanels; ++p) {
    const int row = (panel + p) * 16 + 2 * g;
    if (row >= w.n_rows) break;
    const bool pair = row + 1 < w.n_rows;
#pragma unroll
    for (int n = 0; n < kActs / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int a = 8 * n + 2 * t + i;
        if (a >= n_acts) continue;
        float* const y = job.y + (first_act + a) * job.y_stride + row;
        y[0] = acc[p][n][i] * scale;
        if (pair) y[1] = acc[p][n][i + 2] * scale;
      }
  }
}

// ---- float weights ----

constexpr int kFloatThreads = 256, kFloatActs = 64, kFloatRows = 64, kFloatCols = 64;
constexpr int kFloatActStep = kFloatCols + 4, kFloatRowStep = kFloatRows + 8;  // see ChunkShape
constexpr int kFloatStage = kFloatActs * kFloatActStep + kFloatCols * kFloatRowStep;

template <DType T>
__global__ void __launch_bounds__(kFloatThreads, 2)
    linear_float_tile_kernel(const __grid_constant__ TilePlan plan) {
  extern __shared__ __align__(16) float stages[];  // two: activations [act][column], weights [column][row]
  const int j = job_of_block(plan);
  const DeviceLinearArgs& args = plan.args;
  const DeviceLinearJob& job = args.jobs[j];
  const DeviceMatrix& w = job.w;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int first_row = (blockIdx.x - plan.first_block[j]) * kFloatRows, first_act = blockIdx.y * kFloatActs;
  const int n_acts = min(kFloatActs, args.n_acts - first_act);
  const int n_panels = (w.n_rows + 15) / 16;
  allow_next();
  wait_for_inputs();

  const auto stage_x = [&](float* stage, int first) {
    for (int i = threadIdx.x; i < kFloatActs * kFloatCols / 4; i += kFloatThreads) {
      const int act = i / (kFloatCols / 4), column = first + i % (kFloatCols / 4) * 4;
      const bool valid = act < n_acts && column < w.n_cols;
      copy16(stage + act * kFloatActStep + column - first,
             args.x.f32 + (valid ? act_row(args, first_act + act) * args.x.f32_stride + column : 0), valid);
    }
    copy_commit();
  };
  // Four rows of a column at a time, through registers: they may have to be widened.
  constexpr int kLoads = kFloatRows * kFloatCols / 4 / kFloatThreads;
  float4 loaded[kLoads];
  const auto load_w = [&](int first) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int i = threadIdx.x + n * kFloatThreads;
      const int q = i % 4, column = first + i / 4 % kFloatCols, panel = first_row / 16 + i / 4 / kFloatCols;
      loaded[n] = column < w.n_cols && panel < n_panels
                      ? load_column<T>(w.panels + panel * w.panel_bytes, column, q)
                      : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
  };
  const auto store_w = [&](float* stage) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int i = threadIdx.x + n * kFloatThreads;
      const int q = i % 4, column = i / 4 % kFloatCols, panel = i / 4 / kFloatCols;
      *reinterpret_cast<float4*>(stage + kFloatActs * kFloatActStep + column * kFloatRowStep + panel * 16 +
                                 4 * q) = loaded[n];
    }
  };

  float acc[4][4] = {};
  const int warp_act = warp % 4 * 16, warp_row = warp / 4 * 32;
  stage_x(stages, 0);
  load_w(0);
  for (int first = 0, turn = 0; first < w.n_cols; first += kFloatCols, turn ^= 1) {
    float* const stage = stages + turn * kFloatStage;
    store_w(stage);
    if (first + kFloatCols < w.n_cols) {
      stage_x(stages + (turn ^ 1) * kFloatStage, first + kFloatCols);
      load_w(first + kFloatCols);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    const float* const x = stage + warp_act * kFloatActStep;
    const float* const weights = stage + kFloatActs * kFloatActStep + warp_row;
    // Tensor cores cut off what they add: long sums are added up here.
#pragma unroll 1
    for (int part = 0; part < kFloatCols; part += kFloatCols / 2) {
      float sum[1][4][4] = {};
      multiply_exact<1, 4>(
          kFloatCols / 16, lane, [&](int act, int k) { return x[act * kFloatActStep + part + k]; },
          [&](int k, int row) { return weights[(part + k) * kFloatRowStep + row]; }, sum);
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] += sum[0][n][i];
    }
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int act = warp_act + g + i / 2 * 8, row = first_row + warp_row + 8 * n + 2 * t + i % 2;
      if (act < n_acts && row < w.n_rows) job.y[(first_act + act) * job.y_stride + row] = acc[n][i];
    }
}

struct Card {
  bool tf32;
  int n_multiprocessors;
  size_t shared_bytes;
};
const Card& card() {
  static const Card all = [] {
    int device = 0, major = 0, n = 0, bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return Card{major >= 8, n, static_cast<size_t>(bytes)};
  }();
  return all;
}

// Blocks of `rows` weight rows, in tiles of `acts` activation rows.
template <class Kernel>
void launch_tiles(Kernel* kernel, TilePlan& plan, int rows, int acts, unsigned threads, size_t bytes,
                  StreamView stream) {
  for (int j = 0; j < plan.args.n_jobs; ++j)
    plan.first_block[j + 1] = plan.first_block[j] + ceil_div(plan.args.jobs[j].w.n_rows, rows);
  launch(kernel,
         dim3(static_cast<unsigned>(plan.first_block[plan.args.n_jobs]),
              static_cast<unsigned>(ceil_div(plan.args.n_acts, acts))),
         threads, bytes, stream, plan);
}

template <DType T>
void launch_float(TilePlan& plan, StreamView stream) {
  constexpr size_t kBytes = 2 * kFloatStage * sizeof(float);
  static const bool ready = [] { return allow_shared(linear_float_tile_kernel<T>, kBytes), true; }();
  static_cast<void>(ready);
  launch_tiles(linear_float_tile_kernel<T>, plan, kFloatRows, kFloatActs, kFloatThreads, kBytes, stream);
}

template <DType T, int kActs>
void launch_quant(TilePlan& plan, int n_warps, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(linear_tile_kernel<T, kActs>, kTileSharedBytes<kActs>), true;
  }();
  static_cast<void>(ready);
  launch_tiles(linear_tile_kernel<T, kActs>, plan, n_warps * kTileWarpRows, kActs,
               static_cast<unsigned>(32 * n_warps), kTileSharedBytes<kActs>, stream);
}

}  // namespace

bool has_tiles(const DeviceLinearArgs& args, int job) noexcept {
  const DeviceMatrix& w = args.jobs[job].w;
  if (!is_float_type(w.dtype)) return true;
  // Fewer tiles leave the card idle: 256 x 2048 weights take 79 us with 2048 rows (169 row by row), and still
  // 78 us with 128.
  const int tiles = ceil_div(args.n_acts, kFloatActs) * ceil_div(w.n_rows, kFloatRows);
  return card().tf32 && w.n_cols % 4 == 0 && args.x.f32_stride % 4 == 0 &&
         2 * tiles >= card().n_multiprocessors;
}

void linear_tiles_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept {
  bool done[kMaxLinearJobs] = {};
  for (int j = 0; j < args.n_jobs; ++j) {
    if (done[j] || !has_tiles(args, j)) continue;
    TilePlan plan{.args = args, .first_block = {}};
    plan.args.n_jobs = 0;
    const DType dtype = args.jobs[j].w.dtype;
    for (int i = j; i < args.n_jobs; ++i)
      if (args.jobs[i].w.dtype == dtype && has_tiles(args, i)) {
        plan.args.jobs[plan.args.n_jobs++] = args.jobs[i];
        done[i] = true;
      }
    switch (dtype) {
      case DType::F32:
        launch_float<DType::F32>(plan, stream);
        continue;
      case DType::F16:
        launch_float<DType::F16>(plan, stream);
        continue;
      case DType::BF16:
        launch_float<DType::BF16>(plan, stream);
        continue;
      default:
        break;
    }
    // Wide tiles where they fill the card, else the fewest warps a block that do. Compute capability 7.5 has
    // not the memory for more than low ones.
    int n_rows = 0;
    for (int i = 0; i < plan.args.n_jobs; ++i) n_rows += plan.args.jobs[i].w.n_rows;
    const auto blocks = [&](int acts, int n_warps) {
      return ceil_div(args.n_acts, acts) * ceil_div(n_rows, n_warps * kTileWarpRows);
    };
    const auto fits = [](int bytes) { return static_cast<size_t>(bytes) <= card().shared_bytes; };
    constexpr int kWide = 128, kNarrow = 64, kLow = 16, kMost = kMaxTileThreads / 32;
    const bool wide =
        fits(kTileSharedBytes<kWide>) && 8 * blocks(kWide, kMost) >= 7 * card().n_multiprocessors;
    int n_warps = kMost;
    while (!wide && n_warps > 2 && blocks(kNarrow, n_warps) < 2 * card().n_multiprocessors) n_warps /= 2;
#define CASE(t)                                             \
  if (wide)                                                 \
    launch_quant<DType::t, kWide>(plan, n_warps, stream);   \
  else if (fits(kTileSharedBytes<kNarrow>))                 \
    launch_quant<DType::t, kNarrow>(plan, n_warps, stream); \
  else                                                      \
    launch_quant<DType::t, kLow>(plan, n_warps, stream);    \
  break
    THERMO_FOR_QUANT_TYPE(dtype, CASE)
#undef CASE
  }
}

}  // namespace thermo
