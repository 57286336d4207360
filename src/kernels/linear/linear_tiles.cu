// y = W x for many rows. Quantised weights: on Hopper linear_wide.cu, else tile_product.cuh, in one of two
// shapes:
//
// Many tiles: two panels a warp, tiles of 64 or 128 activation rows. Few tiles (up to a few hundred rows of
// the usual matrices): linear_thin_kernel, and sums that are cut over blocks where the reader adds them up
// anyway (linear_parts()). 35B-A3B, 64 rows, input projections of a DeltaNet layer in Q6_K and Q4_K: 27 us;
// with one panel a warp but without the split and in two launches 81. A warp alone on its scheduler takes 5
// us for a chunk of 256 columns, whatever its type: so few tiles must be cut until every scheduler has
// several warps.
//
// Float weights, whose products are asked for in f32 (the router): exact_mma.cuh, a block of 8 warps for 64
// activation rows and 64 weight rows, 64 columns at a time, a warp for 16 x 32 of them; few tiles are cut
// into parts too (float_tile_parts()): 256 x 2048 weights and 64 rows take 8 us in 16 parts.
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/linear/dot_product.cuh"
#include "kernels/linear/exact_mma.cuh"
#include "kernels/linear/linear_tiles_cuda.h"
#include "kernels/linear/linear_wide_cuda.h"
#include "kernels/linear/tile_product.cuh"
#include "kernels/quant_matmul/panel_columns.cuh"

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
  uint32_t* const rows = reinterpret_cast<uint32_t*>(shared + 2 * kTileStageBytes<kActs>);
  const int j = job_of_block(plan);
  const DeviceLinearArgs& args = plan.args;
  const DeviceLinearJob& job = args.jobs[j];
  const DeviceMatrix& w = job.w;
  const int warp = threadIdx.x / 32;
  const int panel = ((blockIdx.x - plan.first_block[j]) * (blockDim.x / 32) + warp) * kTilePanels;
  const int first_act = blockIdx.y * kActs, k_part = blockIdx.z;
  const int n_acts = min(kActs, args.n_acts - first_act);
  float acc[kTilePanels][kActs / 8][4] = {};
  const uint8_t* panels[kTilePanels];
  warp_panels(w, panel, panels);
  const int n_chunks = (w.n_cols + 255) / 256;
  tile_product<T, kActs>(panels, w.n_cols, args.x, shared, rows, n_acts, acc,
                         TileChunks{n_chunks * k_part / job.k_parts, n_chunks * (k_part + 1) / job.k_parts},
                         TileThreads::block(), [&] {
                           allow_next();
                           wait_for_inputs();
                           for (int a = threadIdx.x; a < kActs; a += blockDim.x)
                             rows[a] =
                                 a >= n_acts ? kNoTileRow : tile_row(args.x, act_row(args, first_act + a));
                           __syncthreads();
                         });

  store_warp_tile<kActs>(acc, panel, w.n_rows, n_acts, args.x.scale, [&](int a) {
    return job.y + k_part * job.part_stride + (first_act + a) * job.y_stride;
  });
}

// ---- few tiles ----

// So few tiles that latencies decide: one panel a warp, every panel by two warps with half of the columns
// each, all weight types that has_dot() knows in one launch. The two halves of a block stage apart and wait
// together.
constexpr int kThinActs = 64, kThinSplit = 2, kMaxThinPanels = 8;
constexpr int kThinHalfBytes = kTileSharedBytes<kThinActs>;

__global__ void __launch_bounds__(32 * kThinSplit * kMaxThinPanels, 1)
    linear_thin_kernel(const __grid_constant__ TilePlan plan) {
  extern __shared__ __align__(16) std::byte shared[];
  const int j = job_of_block(plan);
  const DeviceLinearArgs& args = plan.args;
  const DeviceLinearJob& job = args.jobs[j];
  const DeviceMatrix& w = job.w;
  const int n_threads = blockDim.x / kThinSplit, half = threadIdx.x / n_threads;
  const TileThreads threads{static_cast<int>(threadIdx.x) % n_threads, n_threads};
  const int warp = threads.thread / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int panel = (blockIdx.x - plan.first_block[j]) * (n_threads / 32) + warp;
  const int first_act = blockIdx.y * kThinActs, k_part = blockIdx.z;
  const int n_acts = min(kThinActs, args.n_acts - first_act);
  std::byte* const stages = shared + half * kThinHalfBytes;
  uint32_t* const rows = reinterpret_cast<uint32_t*>(stages + 2 * kTileStageBytes<kThinActs>);
  const uint8_t* const panels[1] = {panel * 16 < w.n_rows ? w.panels + panel * w.panel_bytes : nullptr};
  const int n_chunks = (w.n_cols + 255) / 256, n_parts = kThinSplit * job.k_parts, part = kThinSplit * k_part;
  const int begin = n_chunks * part / n_parts, middle = n_chunks * (part + 1) / n_parts,
            end = n_chunks * (part + 2) / n_parts;
  const int turns = max(middle - begin, end - middle);
  const TileChunks chunks =
      half == 0 ? TileChunks{begin, middle, begin + turns} : TileChunks{middle, end, middle + turns};
  float acc[1][kThinActs / 8][4] = {};
  for_dot_type(w.dtype, [&]<DType T>() {
    tile_product<T, kThinActs>(panels, w.n_cols, args.x, stages, rows, n_acts, acc, chunks, threads, [&] {
      allow_next();
      wait_for_inputs();
      for (int a = threads.thread; a < kThinActs; a += n_threads)
        rows[a] = a >= n_acts ? kNoTileRow : tile_row(args.x, act_row(args, first_act + a));
      __syncthreads();
    });
  });
  // The second half hands its sums to the first.
  float4* const sums = reinterpret_cast<float4*>(shared) + warp * (kThinActs / 8 * 32) + lane;
  __syncthreads();
  if (half == 1) {
#pragma unroll
    for (int n = 0; n < kThinActs / 8; ++n)
      sums[n * 32] = {acc[0][n][0], acc[0][n][1], acc[0][n][2], acc[0][n][3]};
  }
  __syncthreads();
  const int row = panel * 16 + 2 * g;
  if (half == 1 || row >= w.n_rows) return;
  const float scale = args.x.scale;
  const bool pair = row + 1 < w.n_rows;
  float* const to = job.y + k_part * job.part_stride + first_act * job.y_stride + row;
#pragma unroll
  for (int n = 0; n < kThinActs / 8; ++n) {
    const float4 other = sums[n * 32];
    const float sum[4] = {acc[0][n][0] + other.x, acc[0][n][1] + other.y, acc[0][n][2] + other.z,
                          acc[0][n][3] + other.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int a = 8 * n + 2 * t + i;
      if (a >= n_acts) continue;
      float* const y = to + a * job.y_stride;
      y[0] = sum[i] * scale;
      if (pair) y[1] = sum[i + 2] * scale;
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
  const int n_steps = (w.n_cols + kFloatCols - 1) / kFloatCols, k_part = blockIdx.z;
  const int begin = n_steps * k_part / job.k_parts * kFloatCols,
            end = n_steps * (k_part + 1) / job.k_parts * kFloatCols;  // columns; the last step may be short

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
  if (begin < end) load_w(begin);
  allow_next();
  wait_for_inputs();
  if (begin < end) stage_x(stages, begin);
  for (int first = begin, turn = 0; first < end; first += kFloatCols, turn ^= 1) {
    float* const stage = stages + turn * kFloatStage;
    store_w(stage);
    if (first + kFloatCols < end) {
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
      if (act < n_acts && row < w.n_rows)
        job.y[k_part * job.part_stride + (first_act + act) * job.y_stride + row] = acc[n][i];
    }
}

constexpr int kThinTiles = 16;  // of 16 x 64, of a multiprocessor: where two panels a warp are as fast

// Blocks of `rows` weight rows, in tiles of `acts` activation rows.
template <class Kernel>
void launch_tiles(Kernel* kernel, TilePlan& plan, int rows, int acts, unsigned threads, size_t bytes,
                  StreamView stream) {
  for (int j = 0; j < plan.args.n_jobs; ++j)
    plan.first_block[j + 1] = plan.first_block[j] + ceil_div(plan.args.jobs[j].w.n_rows, rows);
  launch(kernel,
         dim3(static_cast<unsigned>(plan.first_block[plan.args.n_jobs]),
              static_cast<unsigned>(ceil_div(plan.args.n_acts, acts)),
              static_cast<unsigned>(plan.args.jobs[0].k_parts)),
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

constexpr int kThinBytes = kThinSplit * kThinHalfBytes;

bool thin_possible(DType dtype) {
  return has_dot(dtype) && static_cast<size_t>(kThinBytes) <= device_in_use().max_shared_bytes;
}

void launch_thin(TilePlan& plan, int tiles, StreamView stream) {
  static const bool ready = [] { return allow_shared(linear_thin_kernel, kThinBytes), true; }();
  static_cast<void>(ready);
  int n_panels =
      ceil_div(tiles, device_in_use().n_multiprocessors);  // of a block: one round of blocks, if possible
  if (n_panels > kMaxThinPanels) n_panels = ceil_div(tiles, 2 * device_in_use().n_multiprocessors);
  n_panels = n_panels < 2 ? 2 : n_panels > kMaxThinPanels ? kMaxThinPanels : n_panels;
  launch_tiles(linear_thin_kernel, plan, 16 * n_panels, kThinActs,
               static_cast<unsigned>(32 * kThinSplit * n_panels), kThinBytes, stream);
}

// Tiles of 16 x 64 of one job.
int thin_tiles(const DeviceLinearJob& job, int n_acts) {
  return job.k_parts * ceil_div(job.w.n_rows, 16) * ceil_div(n_acts, kThinActs);
}

}  // namespace

int linear_parts(const DeviceMatrix& w, int n_acts) noexcept {
  if (wide_preferred(w, n_acts)) return wide_parts(w, n_acts);
  if (n_acts <= (thin_possible(w.dtype) ? kMaxPanelActs : kMaxSmallActs)) return 2;
  if (is_float_type(w.dtype)) return 1;
  const int most = n_acts <= kMaxCutActs ? kMaxLinearParts : 1;
  int parts = 1;
  const int tiles = ceil_div(n_acts, kThinActs) * ceil_div(w.n_rows, 16);
  while (parts < most && 2 * parts * tiles <= kMaxThinPanels * device_in_use().n_multiprocessors) parts *= 2;
  return parts;
}

bool linear_prefers_tiles(const DeviceLinearArgs& args) noexcept {
  if (args.n_acts <= kMaxPanelActs) return false;
  for (int j = 0; j < args.n_jobs; ++j)
    if (!thin_possible(args.jobs[j].w.dtype)) return false;
  return true;
}

namespace {

bool float_tiles_possible(const DeviceMatrix& w, const DeviceActs& x) {
  return (device_in_use().compute_capability >= 80) && w.n_cols % 4 == 0 && x.f32_stride % 4 == 0;
}
int float_tiles(const DeviceMatrix& w, int n_acts) {
  return ceil_div(n_acts, kFloatActs) * ceil_div(w.n_rows, kFloatRows);
}

}  // namespace

int float_tile_parts(const DeviceMatrix& w, const DeviceActs& x, int n_acts) noexcept {
  if (!is_float_type(w.dtype) || !float_tiles_possible(w, x)) return 0;
  int parts = 1;
  while (parts < kMaxFloatParts && 2 * parts * n_acts <= kMaxFloatPartRows &&
         2 * parts * float_tiles(w, n_acts) <= device_in_use().n_multiprocessors &&
         2 * parts * kFloatCols <= w.n_cols)
    parts *= 2;
  return parts;
}

bool has_tiles(const DeviceLinearArgs& args, int job) noexcept {
  const DeviceMatrix& w = args.jobs[job].w;
  if (!is_float_type(w.dtype)) return true;
  // Fewer tiles leave the card idle: 256 x 2048 weights take 79 us with 2048 rows (169 row by row), and still
  // 78 us with 128, if the sum is in one part.
  return float_tiles_possible(w, args.x) &&
         (args.jobs[job].k_parts > 2 || 2 * float_tiles(w, args.n_acts) >= device_in_use().n_multiprocessors);
}

void linear_tiles_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept {
  bool done[kMaxLinearJobs] = {};
  DeviceLinearArgs wide = args;
  wide.n_jobs = 0;
  for (int j = 0; j < args.n_jobs; ++j) {
    if (args.room_bytes < linear_room(args.n_acts, args.jobs[j].w.n_cols)) continue;
    // A small matrix goes with a large one of its type.
    for (int i = 0; i < args.n_jobs && !done[j]; ++i)
      done[j] = args.jobs[i].w.dtype == args.jobs[j].w.dtype && wide_preferred(args.jobs[i].w, args.n_acts);
    if (done[j]) wide.jobs[wide.n_jobs++] = args.jobs[j];
  }
  if (wide.n_jobs > 0) {
    wide_tiles_cuda(args.x, args.row_index, args.n_acts, wide.jobs[0].w.n_cols, args.room, stream);
    linear_wide_cuda(wide, args.room, stream);
  }
  TilePlan thin{.args = args, .first_block = {}};
  thin.args.n_jobs = 0;
  int tiles = 0;
  // Jobs of few tiles, and all of them if they are few together.
  for (int j = 0; j < args.n_jobs; ++j) {
    const DeviceLinearJob& job = args.jobs[j];
    const int more = thin_tiles(job, args.n_acts);
    if (done[j] || !thin_possible(job.w.dtype) ||
        tiles + more > kThinTiles * device_in_use().n_multiprocessors)
      continue;
    tiles += more;
    thin.args.jobs[thin.args.n_jobs++] = job;
    done[j] = true;
  }
  if (thin.args.n_jobs > 0) launch_thin(thin, tiles, stream);
  for (int j = 0; j < args.n_jobs; ++j) {
    if (done[j] || !has_tiles(args, j)) continue;
    TilePlan plan{.args = args, .first_block = {}};
    plan.args.n_jobs = 0;
    const DType dtype = args.jobs[j].w.dtype;
    for (int i = j; i < args.n_jobs; ++i)
      if (!done[i] && args.jobs[i].w.dtype == dtype && has_tiles(args, i)) {
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
      return plan.args.jobs[0].k_parts * ceil_div(args.n_acts, acts) *
             ceil_div(n_rows, n_warps * kTileWarpRows);
    };
    const auto fits = [](int bytes) {
      return static_cast<size_t>(bytes) <= device_in_use().max_shared_bytes;
    };
    constexpr int kWide = 128, kNarrow = 64, kLow = 16, kMost = kMaxTileThreads / 32;
    const bool wide = args.n_acts > kNarrow && fits(kTileSharedBytes<kWide>) &&
                      8 * blocks(kWide, kMost) >= 7 * device_in_use().n_multiprocessors;
    const bool narrow = args.n_acts > kLow && fits(kTileSharedBytes<kNarrow>);
    int n_warps = kMost;
    while (!wide && n_warps > 2 && blocks(kNarrow, n_warps) < 2 * device_in_use().n_multiprocessors)
      n_warps /= 2;
#define CASE(t)                                             \
  if (wide)                                                 \
    launch_quant<DType::t, kWide>(plan, n_warps, stream);   \
  else if (narrow)                                          \
    launch_quant<DType::t, kNarrow>(plan, n_warps, stream); \
  else                                                      \
    launch_quant<DType::t, kLow>(plan, n_warps, stream);    \
  break
    THERMO_FOR_QUANT_TYPE(dtype, CASE)
#undef CASE
  }
}

}  // namespace thermo
