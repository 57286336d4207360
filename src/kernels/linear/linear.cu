// y = W x for the rows of a step.
//
// One row, or two that come through a norm or are added to y (decode): bound by the bytes of W. One launch
// for all matrices that read the same input; the warps of a block share a panel, each with one or two chunks
// of 256 columns, so that the whole matrix is in flight at once and a warp waits for memory once: integer dot
// products (dot_product.cuh). Up to 64 rows that come rounded: integer tensor cores (linear_few.cuh), with
// the same bits. Other rows, and float weights: warp_product.cuh for few, f16 tensor cores with activations
// in shared memory for more (linear_tiles.cu, on Hopper linear_wide.cu).
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
  int in_flight;                   // chunks of a warp
};

// Where one row comes from: rounded, from the residual stream through a norm, or as halves, and then the
// product is added to y.
enum class DotSource { Blocks, Norm, Add };

constexpr unsigned kAheadBlocks = 128;

struct DotPlan {
  SmallPlan small;
  SumCuts cuts;
  RowBlocks blocks[kMaxLinearJobs];
  int values_at, panel_values;  // in shared memory: bytes; floats of a panel
  int steps_at;                 // bytes; as many floats for a panel as it has blocks
  int late_at;                  // bytes; two rows through a norm: see make_norm_acts()
  bool halves;                  // a warp for each panel adds up
};

// A line for each thread of the first blocks, which start before the others.
__device__ __forceinline__ void ask_ahead(const DeviceAhead& ahead) {
  if (ahead.sequence == nullptr || blockIdx.x >= kAheadBlocks) return;
  const int64_t of_sequence = *ahead.sequence * ahead.sequence_stride;
  int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * 32;
#pragma unroll
  for (int i = 0; i < DeviceAhead::kPieces; ++i) {
    if (at >= 0 && at < ahead.n_floats[i])
      asm volatile("prefetch.global.L2 [%0];" ::"l"(ahead.from[i] + (i < 2 ? of_sequence : 0) + at));
    at -= (ahead.n_floats[i] + 31) / 32 * 32;
  }
}

// One or two rows. `split_log2` may reach kWarpsLog2. Shared memory: rows that are rounded here, then values
// of the blocks of each panel, then their steps; through a norm those are in the rounded rows.
template <DotSource kSource, int kWarpsLog2, int kRows>
__global__ void __launch_bounds__(32 << kWarpsLog2, kWarpsLog2 == 4 ? 2 : 3)
    linear_dot_kernel(const __grid_constant__ DotPlan plan) {
  constexpr int kWarps = 1 << kWarpsLog2;
  __shared__ float squares[kSource == DotSource::Norm ? kRows * kMaxNormChunks : 1];
  extern __shared__ __align__(16) std::byte stages[];
  const DeviceLinearArgs& args = plan.small.args;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  touch_params(plan);
  int j = 0;
  while (j + 1 < args.n_jobs && static_cast<int>(blockIdx.x) >= plan.small.first_block[j + 1]) ++j;
  const DeviceLinearJob& job = args.jobs[j];
  const DeviceMatrix& w = job.w;
  const int split = plan.small.split_log2[j], panels_here = kWarps >> split;
  const int first_panel = (static_cast<int>(blockIdx.x) - plan.small.first_block[j]) * panels_here;
  const int panel_here = warp >> split, panel = first_panel + panel_here;
  const uint8_t* const bytes = panel * 16 < w.n_rows ? w.panels + panel * w.panel_bytes : nullptr;
  const int first_chunk = warp & ((1 << split) - 1), step = 1 << split;
  BlockActs* const made = reinterpret_cast<BlockActs*>(stages);
  float* const values = reinterpret_cast<float*>(stages + plan.values_at);
  float* const mine = values + panel_here * plan.panel_values;
  const RowBlocks& blocks = plan.blocks[j];
  if constexpr (kSource == DotSource::Norm) {
    const DeviceNormIn& norm = args.norm;
    NormWeights norm_weights;
    norm_weights.load(norm.weight, w.n_cols, norm_chunk(w.n_cols, warp), lane);
    for_dot_type(w.dtype, [&]<DType T>() {
      in_values<T, kRows>(w, bytes, first_chunk, step, made, lane, mine, [&] {
        if constexpr (kRows == 1) ask_ahead(args.ahead);
        allow_next();
        wait_for_inputs();
        make_norm_acts<kRows>(
            norm.x, norm.weight, norm_weights, w.n_cols, warp, kWarps, lane, squares,
            [&](int at, float4 low, float4 high) {
              put_block_acts<kPanelFormat<T>.block_cols, false>(low, high, lane, made[at]);
            },
            kRows > 1 ? reinterpret_cast<float*>(stages + plan.late_at) : nullptr);
        __syncthreads();
      });
    });
  } else {
    float* const steps =
        reinterpret_cast<float*>(stages + plan.steps_at) + panel_here * plan.panel_values / 16;
    for_dot_type(w.dtype, [&]<DType T>() {
      const int n_chunks = bytes == nullptr ? 0 : dot_chunks(w.n_cols);
      const auto subs_of = [&](int chunk) { return min(8, (w.n_cols - chunk * 256) / 32); };
      DotChunk<T> data;
      if (first_chunk < n_chunks) data.load(bytes, first_chunk, subs_of(first_chunk), lane);
      if (first_chunk + step < n_chunks) prefetch_chunk(w, bytes, first_chunk + step, lane);
      allow_next();
      wait_for_inputs();
#pragma unroll 1
      for (int chunk = first_chunk; chunk < n_chunks; chunk += step) {
        if (chunk != first_chunk) data.load(bytes, chunk, subs_of(chunk), lane);
        const int at = chunk * kChunkBlocks<T> * kRows;
        if constexpr (kSource == DotSource::Blocks) {
          const void* const rows = kPanelFormat<T>.block_cols == 256 ? args.x.blocks256 : args.x.blocks32;
          const BlockActs* acts[kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const int64_t row = args.row_index == nullptr ? r : args.row_index[r];
            acts[r] = static_cast<const BlockActs*>(rows) + row * args.x.blocks_stride + chunk;
          }
          stored_values<T, kRows>(data, acts, subs_of(chunk), lane, mine + at * 16, steps + at);
        } else {
          // All loads first; then one row after the other, so that registers are enough.
          uint4 halves[kRows] = {};
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            if (ActPiece::column(chunk, lane) < w.n_cols)
              halves[r] = *reinterpret_cast<const uint4*>(static_cast<const half*>(args.x.f16) +
                                                          r * args.x.f16_stride + chunk * 256 + lane * 8);
#pragma unroll 1
          for (int r = 0; r < kRows; ++r) {
            uint4 now = halves[0];
            if (kRows > 1 && r > 0) now = halves[kRows - 1];
            ActPiece piece;
            piece.take_halves(now, args.x.scale);
            hidden_values<T, kRows>(data, piece, subs_of(chunk), lane, made[warp], mine + (at + r) * 16,
                                    steps + at + r);
          }
        }
      }
    });
  }
  // The sums are short, so their latency counts: what is known before the barrier is made before it.
  const bool halves = kRows == 1 && plan.halves;
  const int r = threadIdx.x & 15, p = halves ? warp : (threadIdx.x >> 4) & (panels_here - 1),
            act = halves ? 0 : threadIdx.x >> 4 >> (kWarpsLog2 - split), row = (first_panel + p) * 16 + r;
  const bool has = act < kRows && p < panels_here && row < w.n_rows;
  float* const y = job.y + act * job.y_stride + row;
  float sum = has && kSource == DotSource::Add ? *y : 0.0f, scale = 1.0f;
  if (kSource == DotSource::Norm && has)
    scale = norm_scale(squares + act * kMaxNormChunks, w.n_cols, args.norm.eps);
  __syncthreads();
  const float* const from = values + p * plan.panel_values + act * 16 + r;
  const float* const steps =
      reinterpret_cast<const float*>(stages + plan.steps_at) + p * plan.panel_values / 16 + act;
  if (halves) {
    if (p >= panels_here) return;
    sum = chain_halves(from, blocks, plan.cuts, sum, kSource == DotSource::Add, lane, [&](int b) {
      return kSource == DotSource::Norm ? __fmul_rn(made[b].meta[0].step, scale) : steps[b];
    });
    if (has && lane < 16) *y = sum;
    return;
  }
  if (!has) return;
  if constexpr (kSource == DotSource::Norm) {
    const bool big = blocks.chunk_blocks == 1;
    const BlockActs* const acts = made + act * blocks.n_chunks;
    sum = chain_all<16 * kRows>(from, blocks, plan.cuts, 0.0f, false,
                                [&](int b) { return __fmul_rn(step_of_block(acts, big, b), scale); });
  } else {
    sum = chain_all<16 * kRows>(from, blocks, plan.cuts, sum, kSource == DotSource::Add,
                                [&](int b) { return steps[b * kRows]; });
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
      stages + warp * plan.stage_bytes, plan.in_flight, part[warp],
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
  SmallPlan plan{.args = args, .first_block = {}, .split_log2 = {}, .stage_bytes = 0, .in_flight = 1};
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

template <DotSource kSource, int kWarpsLog2, int kRows>
void launch_dot_rows(const DeviceLinearArgs& args, StreamView stream) {
  const DeviceLinearJob(&jobs)[kMaxLinearJobs] = args.jobs;
  DotPlan plan{.small = make_plan(args, kWarpsLog2, true),
               .cuts = linear_sum_cuts(args),
               .blocks = {jobs[0].w, jobs[1].w, jobs[2].w, jobs[3].w},
               .values_at = 0,
               .panel_values = 0,
               .steps_at = 0,
               .late_at = 0,
               .halves = kRows == 1};
  int panels = 0;
  for (int j = 0; j < args.n_jobs; ++j) {
    const int values = kRows * 16 * plan.blocks[j].n;
    plan.halves = plan.halves && chains_in_halves(plan.blocks[j], plan.cuts, kSource == DotSource::Add);
    if (values > plan.panel_values) plan.panel_values = values;
    const int here = (1 << kWarpsLog2) >> plan.small.split_log2[j];
    if (here > panels) panels = here;
  }
  size_t bytes = 0;
  if (kSource == DotSource::Norm)
    bytes = kRows * sizeof(BlockActs) * static_cast<size_t>(dot_chunks(args.jobs[0].w.n_cols));
  if (kSource == DotSource::Add) bytes = sizeof(BlockActs) << kWarpsLog2;
  plan.values_at = static_cast<int>(bytes);
  bytes += sizeof(float) * static_cast<size_t>(panels * plan.panel_values);
  plan.steps_at = static_cast<int>(bytes);
  if (kSource != DotSource::Norm)
    bytes += sizeof(float) * static_cast<size_t>(panels * plan.panel_values / 16);
  plan.late_at = static_cast<int>(bytes);
  if (kSource == DotSource::Norm && kRows > 1) bytes += sizeof(float) * 256 << kWarpsLog2;
  // Only where it must be: the memory for it is taken from the cache that holds loads in flight, and a token
  // took a quarter longer.
  if (bytes > 32 * 1024) allow_shared(linear_dot_kernel<kSource, kWarpsLog2, kRows>, bytes);
  launch(linear_dot_kernel<kSource, kWarpsLog2, kRows>,
         static_cast<unsigned>(plan.small.first_block[args.n_jobs]), 32 << kWarpsLog2, bytes, stream, plan);
}
template <DotSource kSource, int kWarpsLog2>
void launch_dot(const DeviceLinearArgs& args, StreamView stream) {
  if (args.n_acts == 2)
    launch_dot_rows<kSource, kWarpsLog2, 2>(args, stream);
  else
    launch_dot_rows<kSource, kWarpsLog2, 1>(args, stream);
}

// With as many chunks in flight as the card has memory for; none: stage_bytes is too large for it.
template <int NT8>
SmallPlan plan_small(const DeviceLinearArgs& args) {
  SmallPlan plan = make_plan(args, 3, false);
  const auto bytes_of = [&](int most) {
    int bytes = 0;
    for (int j = 0; j < args.n_jobs; ++j) {
      const DeviceMatrix& w = args.jobs[j].w;
      const int chunks = chunks_per_warp(w.n_cols, args.jobs[j].k_parts << plan.split_log2[j]);
      const int needed = warp_stage_bytes(w, NT8 == 1 ? min_of(args.n_acts, 8) : 0, min_of(most, chunks));
      if (needed > bytes) bytes = needed;
    }
    return bytes;
  };
  constexpr int kOwn = 8 * NT8 * kPartFloats * static_cast<int>(sizeof(float)) + 1024;
  plan.in_flight = 2;
  do {
    plan.stage_bytes = bytes_of(plan.in_flight);
  } while (8 * plan.stage_bytes + kOwn > static_cast<int>(device_in_use().max_shared_bytes) &&
           --plan.in_flight > 0);
  return plan;
}

template <int NT8>
bool fits_small(const DeviceLinearArgs& args) {
  return plan_small<NT8>(args).in_flight > 0;
}

template <int NT8>
void launch_small(const DeviceLinearArgs& args, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(linear_small_kernel<NT8>, 8 * kMaxWarpStageBytes), true;
  }();
  static_cast<void>(ready);
  const SmallPlan plan = plan_small<NT8>(args);
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

bool linear_reads_norm(const DeviceMatrix& w, int n_acts) noexcept {
  if (w.n_rows == 0) return true;
  if (!has_dot(w.dtype)) return false;
  const int n_chunks = dot_chunks(w.n_cols);
  const size_t panels = n_chunks >= 8 ? 2 : 8;  // of a block, at most
  const size_t values = panels * 17 * sizeof(float) * static_cast<size_t>(blocks_of(w));
  return n_chunks <= kMaxNormChunks &&
         static_cast<size_t>(n_acts) * (values + kMaxNormChunks * sizeof(BlockActs) + 4096) + 1024 <=
             device_in_use().max_shared_bytes;
}

namespace {

// Rows in the f16 form.
void linear_plain(const DeviceLinearArgs& args, StreamView stream) {
  if (args.n_acts <= kMaxSmallActs && !linear_prefers_tiles(args)) {
    // Two tiles of rows need the least shared memory: compute capability 7.5 has it for every type.
    if (args.n_acts <= 8 && fits_small<1>(args)) return launch_small<1>(args, stream);
    if (args.n_acts <= 16 || !fits_small<4>(args)) return launch_small<2>(args, stream);
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

constexpr int kHeadRows = 1 << 16;

void linear_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept {
  if (args.norm.x != nullptr) return launch_dot<DotSource::Norm, 3>(args, stream);
  if (args.jobs[0].add) return launch_dot<DotSource::Add, 4>(args, stream);
  if (args.rounds) return static_cast<void>(linear_stream_cuda(args, stream));
  DeviceLinearArgs few = args, others = args;
  few.n_jobs = others.n_jobs = 0;
  for (int j = 0; j < args.n_jobs; ++j) {
    DeviceLinearArgs& to = linear_few_possible(args, j) ? few : others;
    to.jobs[to.n_jobs++] = args.jobs[j];
  }
  // Two rows only where memory is the bound: 4 or 5 bits are fewer instructions on tensor cores.
  bool dot = args.n_acts <= kMaxNormActs;
  for (int j = 0; j < few.n_jobs; ++j)
    dot = dot && few.jobs[j].k_parts == 1 && linear_reads_norm(few.jobs[j].w, args.n_acts) &&
          (args.n_acts == 1 || (few.jobs[j].w.dtype == DType::Q6_K && few.jobs[j].w.n_rows >= kHeadRows));
  if (args.n_acts == 1 && few.n_jobs > 0 && linear_stream_cuda(few, stream)) few.n_jobs = 0;
  if (few.n_jobs > 0 && dot)
    launch_dot<DotSource::Blocks, 3>(few, stream);
  else if (few.n_jobs > 0)
    linear_few_cuda(few, stream);
  if (others.n_jobs > 0) linear_plain(others, stream);
}

}  // namespace thermo
