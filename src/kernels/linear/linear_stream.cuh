// y = W x for up to 64 rows in the form of BlockActs, of matrices with panels for every multiprocessor.
//
// One block stays on each multiprocessor. Panels are dealt evenly: none has more than one panel above the
// mean, where blocks of four panels left a fifth of the card idle at the end. A warp streams its panels
// through shared memory and meets the others only to take the rows, which lie there whole. With few panels
// two or four warps share one: the first adds up, the others leave it their sums, or the values of their
// blocks where the sum is one chain.
//
// The bits are those of linear_few.cuh: sums are cut by shapes alone.
//
// H200, 27B, a decoded row: 6.09 -> 5.74 ms, two rows 7.63 -> 7.23. 100 MB take 30 us alone (ncu), of which
// the bytes explain 21: the rest is the start. With three chunks of each warp on their way 5.88 and 7.49,
// with four 5.92 and 7.68. More rows lost, probably because every multiprocessor reads all of them before it
// begins: 8 rows 8.43 -> 8.9, 16 rows 10.8 -> 12.0. With rows in pieces of four chunks, 32 rows 14.2 -> 20.1.
#pragma once

#include <optional>

#include "device/launch.cuh"
#include "kernels/linear/dot_product.cuh"
#include "kernels/linear/few_product.cuh"
#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/stage_chunk.cuh"
#include "kernels/row_ops/unrounded_row.cuh"

namespace thermo {

// Of a block: as many as registers allow.
template <int kTiles>
inline constexpr int kMaxStreamWarps = kTiles == 1   ? 20
                                       : kTiles == 2 ? 24
                                                     : 16;

inline constexpr int kLeastStreamWarps = 8, kLeastStreamPanels = 4;  // of a block
inline constexpr int kStreamStages = 2;                              // chunks of a warp on their way

struct StreamPlan {
  DeviceLinearArgs args;
  SumCuts cuts;
  int first_panel[kMaxLinearJobs + 1];  // of all jobs, one after the other
  int row_tiles;                        // blocks that have the same weights, neighbours
  int n_blocks;                         // for a part and a row tile
  int n_warps;                          // of a block
  int split_log2;                       // warps that share a panel; where columns are cut, one for each cut
  int left_at, left_bytes;              // in shared memory: what warps leave to the first of a panel
  int chunks_at;
  int chunk_bytes;

  int shared_bytes() const { return chunks_at + n_warps * kStreamStages * chunk_bytes; }
};

// One row of a type that tensor cores take long to unpack: dot products.
template <DType T, bool kOne>
inline constexpr bool kStreamDots = kOne&& kPanelFormat<T>.block_cols == 256 && kPanelFormat<T>.bits > 4;

__device__ __forceinline__ void meet(int barrier, int n_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(n_threads) : "memory");
}

// One row is all eight of a tile, and keeps the sums of its codes, which dot products need.
template <int kTiles, bool kOne, bool kBig>
struct StreamRowsOf {
  using Type = FewRows<kOne>;
};
template <int kTiles>
struct StreamRowsOf<kTiles, false, true> {
  using Type = PackedFewRows<8 * kTiles>;
};
template <DType T, int kTiles, bool kOne>
using StreamRows = typename StreamRowsOf<kTiles, kOne, kPanelFormat<T>.block_cols == 256>::Type;
template <int kTiles, bool kOne>
constexpr int stream_row_chunk(bool big) {
  return big ? StreamRowsOf<kTiles, kOne, true>::Type::chunk_bytes(8 * kTiles)
             : StreamRowsOf<kTiles, kOne, false>::Type::chunk_bytes(8 * kTiles);
}

// emit(n, value, step of act 8n + 2t, of the next one) for each block in the order of columns; with
// kStreamDots value[0] is of row stream_dot_row() alone.
template <DType T, int kTiles, bool kOne, class Emit>
__device__ __forceinline__ void stream_chunk(const uint8_t* chunk, int place, int n_subs,
                                             const StreamRows<T, kTiles, kOne>& rows, int lane,
                                             const Emit& emit) {
  if constexpr (kStreamDots<T, kOne>) {
    const BlockActs& acts = rows.row(0);
    DotChunk<T> data;
    data.template load_block<true>(chunk + place * kPanelFormat<T>.header_step(), chunk + 64, lane);
    SubCodes x[1];
    x[0].load(acts, lane >> 2);
    int sums[kDotSums<T, 1>];
    dot_sums<T, 1>(data, x, lane >> 2, sums);
    const LaneValue v = lane_value<T, 1>(data, sums, lane);
    const float step = acts.meta[0].step;
    emit(0, {v.value, 0.0f, 0.0f, 0.0f}, step, step);
  } else {
    few_chunk<T, kTiles>(chunk, place, n_subs, rows, lane,
                         [&](int, int n, const float(&value)[4], float left, float right) {
                           emit(n, {value[0], value[1], value[2], value[3]}, left, right);
                         });
  }
}

// The warp's sums of a panel. `out`: of the first of its rows.
template <int kTiles>
__device__ __forceinline__ void store_few(const DeviceLinearJob& job, const DeviceMatrix& w, float* out,
                                          int panel, int n_acts, int lane, const float (&y)[kTiles][4]) {
  const int row = panel * 16 + 2 * (lane >> 2);
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int act = 8 * n + 2 * (lane & 3) + i % 2;
      if (act < n_acts && row + i / 2 < w.n_rows) out[act * job.y_stride + row + i / 2] = y[n][i];
    }
}

// Of the sum that a lane has with kStreamDots (lane_value()).
__device__ __forceinline__ int stream_dot_row(int lane) {
  return 4 * (lane & 3) + 2 * (lane >> 2 & 1) + (lane >> 3 & 1);
}

__device__ __forceinline__ void chain_values(float (&y)[4], const float4& value, float left, float right) {
  y[0] = __fmaf_rn(value.x, left, y[0]);
  y[1] = __fmaf_rn(value.y, right, y[1]);
  y[2] = __fmaf_rn(value.z, left, y[2]);
  y[3] = __fmaf_rn(value.w, right, y[3]);
}

template <int kTiles, bool kOne>
__global__ void __launch_bounds__(32 * kMaxStreamWarps<kTiles>, 1)
    linear_stream_kernel(const __grid_constant__ StreamPlan plan) {
  extern __shared__ __align__(16) std::byte shared[];  // rows, what is left, then the chunks of each warp
  const DeviceLinearArgs& args = plan.args;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
  const int tile = static_cast<int>(blockIdx.x) % plan.row_tiles,
            rest = static_cast<int>(blockIdx.x) / plan.row_tiles;
  const int part = rest & ((1 << plan.cuts.parts_log2) - 1), block = rest >> plan.cuts.parts_log2;
  const int first_act = tile * (8 * kTiles), n_acts = min(8 * kTiles, args.n_acts - first_act);
  const int group = warp >> plan.split_log2, n_groups = n_warps >> plan.split_log2,
            share = warp & ((1 << plan.split_log2) - 1);
  const int n_chunks = dot_chunks(args.jobs[0].w.n_cols), n_panels = plan.first_panel[args.n_jobs];
  const int part_begin = plan.cuts.begin(n_chunks, part, 0),
            part_chunks = plan.cuts.begin(n_chunks, part + 1, 0) - part_begin;
  const auto begin_of = [&](int s) {
    return plan.cuts.cuts_log2 > 0 ? plan.cuts.begin(n_chunks, part, s)
                                   : part_begin + (part_chunks * s >> plan.split_log2);
  };
  const int begin = begin_of(share), end = begin_of(share + 1);
  const bool chains = share == 0 || plan.cuts.cuts_log2 > 0;
  std::byte* const chunks = shared + plan.chunks_at + warp * kStreamStages * plan.chunk_bytes;
  float4* const left = reinterpret_cast<float4*>(shared + plan.left_at + warp * plan.left_bytes) + lane;

  const bool is_big = act_group_cols(args.jobs[0].w.dtype) == 256;
  const std::byte* const blocks = static_cast<const std::byte*>(is_big ? args.x.blocks256 : args.x.blocks32);
  const int row_chunk = stream_row_chunk<kTiles, kOne>(is_big);
  const auto row_at = [&](int a) {
    const int64_t row = args.row_index == nullptr ? first_act + a : args.row_index[first_act + a];
    return blocks + row * args.x.blocks_stride * kDotChunkBytes;
  };
  // A warp brings a chunk of all rows, eight at a time: loads run together. Or it makes it.
  const auto take_rows = [&] {
    allow_next();
    wait_for_inputs();
    if (kOne && args.rounds) {
      for (int c = warp; c < part_chunks; c += n_warps) {
        const ActPiece piece =
            unrounded_piece(args.x, args.gate, args.up, 0, part_begin + c, args.jobs[0].w.n_cols, lane);
        BlockActs& out = *reinterpret_cast<BlockActs*>(shared + c * row_chunk);
        if (is_big)
          put_block_acts<256>(piece.low, piece.high, lane, out);
        else
          put_block_acts<32>(piece.low, piece.high, lane, out);
      }
      return __syncthreads();
    }
    constexpr int kTogether = kOne ? 1 : 8;
    using Packed = PackedFewRows<8 * kTiles>;
    if (lane < kDotChunkBytes / 16)
#pragma unroll 1
      for (int c = warp; c < part_chunks; c += n_warps) {
        std::byte* const chunk = shared + c * row_chunk;
#pragma unroll 1
        for (int a0 = 0; a0 < n_acts; a0 += kTogether) {
          uint4 piece[kTogether];
#pragma unroll
          for (int k = 0; k < kTogether; ++k)
            if (a0 + k < n_acts)
              piece[k] = *reinterpret_cast<const uint4*>(row_at(a0 + k) + (part_begin + c) * kDotChunkBytes +
                                                         lane * 16);
#pragma unroll
          for (int k = 0; k < kTogether; ++k) {
            const int a = a0 + k;
            if (a >= n_acts) break;
            if (kOne || !is_big) {
              *reinterpret_cast<uint4*>(chunk + a * kFewRowBytes + lane * 16) = piece[k];
            } else if (lane < 16) {
              *reinterpret_cast<uint4*>(chunk + a * Packed::kBytes + lane * 16) = piece[k];
            } else {  // BlockActs::Meta
              *reinterpret_cast<uint32_t*>(chunk + a * Packed::kBytes + 256 + (lane - 16) * 4) = piece[k].w;
              if (lane == 16)
                *reinterpret_cast<uint32_t*>(chunk + 8 * kTiles * Packed::kBytes + a * 4) = piece[k].x;
            }
          }
        }
      }
    __syncthreads();
  };
  const int last = n_panels * (block + 1) / plan.n_blocks;
  int panel = n_panels * block / plan.n_blocks + group;
  bool has_rows = false;
  if (panel >= last) take_rows();
  while (panel < last) {
    int j = 0;
    while (j + 1 < args.n_jobs && panel >= plan.first_panel[j + 1]) ++j;
    const DeviceLinearJob& job = args.jobs[j];
    const DeviceMatrix& w = job.w;
    const int first_of_job = plan.first_panel[j], job_end = min(last, plan.first_panel[j + 1]);
    // Asks for the chunk `n` after `chunk` of panel `at`, that of a later panel where those end. Each call is
    // one group of copies, also when nothing is left.
    const auto ask = [&](int at, int chunk, int n, const auto& stage_chunk_at) {
      chunk += n;
      while (chunk >= end) chunk -= end - begin, at += n_groups;
      if (at < job_end) stage_chunk_at(w.panels + (at - first_of_job) * w.panel_bytes, chunk);
      copy_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kStreamStages; ++i)
      ask(panel, begin, i, [&](const uint8_t* from, int chunk) {
        stage_chunk(chunks + i * plan.chunk_bytes, w, from, chunk, lane);
      });
    if (!has_rows) take_rows();
    has_rows = true;
    for_dot_type(w.dtype, [&]<DType T>() {
      constexpr int kRowChunk = stream_row_chunk<kTiles, kOne>(kPanelFormat<T>.block_cols == 256);
      int stage = 0;
#pragma unroll 1
      for (; panel < job_end; panel += n_groups) {
        float y[kTiles][4] = {};
        const std::byte* rows = shared + (begin - part_begin) * kRowChunk;
#pragma unroll 1
        for (int chunk = begin; chunk < end; ++chunk, rows += kRowChunk) {
          std::byte* const here = chunks + stage * plan.chunk_bytes;
          copy_wait<kStreamStages - 1>();
          __syncwarp();
          stream_chunk<T, kTiles, kOne>(
              reinterpret_cast<const uint8_t*>(here),
              chunk & (kPanelFormat<T>.block_cols == 256 ? kPanelFormat<T>.unit_blocks - 1 : 0),
              min(8, (w.n_cols - chunk * 256) / 32), StreamRows<T, kTiles, kOne>{rows}, lane,
              [&](int n, const float4& value, float step0, float step1) {
                if (chains)
                  chain_values(y[n], value, step0, step1);
                else
                  left[((chunk - begin) * kTiles + n) * 32] = value;
              });
          __syncwarp();
          ask(panel, chunk, kStreamStages, [&](const uint8_t* from, int asked) {
            stage_chunk_of<T>(here, from, w.panel_bytes, asked, lane);
          });
          stage ^= 1;
        }
        if (plan.split_log2 > 0) {
          if (share > 0 && plan.cuts.cuts_log2 > 0)
#pragma unroll
            for (int n = 0; n < kTiles; ++n) left[n * 32] = {y[n][0], y[n][1], y[n][2], y[n][3]};
          meet(1 + group, 32 << plan.split_log2);
          if (share == 0)
            for (int s = 1; s < 1 << plan.split_log2; ++s) {
              const float4* const from = left + s * (plan.left_bytes / 16);
              if (plan.cuts.cuts_log2 > 0) {
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                  const float4 sum = from[n * 32];
                  y[n][0] += sum.x, y[n][1] += sum.y, y[n][2] += sum.z, y[n][3] += sum.w;
                }
                continue;
              }
              const std::byte* row = shared + (begin_of(s) - part_begin) * kRowChunk;
#pragma unroll 2
              for (int c = 0; c < begin_of(s + 1) - begin_of(s); ++c, row += kRowChunk)
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                  const float2 step = StreamRows<T, kTiles, kOne>{row}.steps(
                      kStreamDots<T, kOne> ? 0 : 8 * n + 2 * (lane & 3));
                  chain_values(y[n], from[(c * kTiles + n) * 32], step.x, step.y);
                }
            }
          if (panel + n_groups < last) meet(1 + group, 32 << plan.split_log2);  // it was read
        }
        if (share > 0) continue;
        float* const out = job.y + part * job.part_stride + first_act * job.y_stride;
        if constexpr (kStreamDots<T, kOne>) {
          const int row = (panel - first_of_job) * 16 + stream_dot_row(lane);
          if (lane < 16 && row < w.n_rows) out[row] = y[0][0];
        } else {
          store_few<kTiles>(job, w, out, panel - first_of_job, n_acts, lane, y);
        }
      }
    });
  }
}

// nullopt: too few panels for this card, or too little memory for the rows.
template <int kTiles, bool kOne>
std::optional<StreamPlan> plan_stream(const DeviceLinearArgs& args, const SumCuts& cuts, int chunk_bytes) {
  const DeviceInfo& device = device_in_use();
  const int n_parts = 1 << cuts.parts_log2;
  StreamPlan plan{.args = args,
                  .cuts = cuts,
                  .first_panel = {},
                  .row_tiles = ceil_div(args.n_acts, 8 * kTiles),
                  .n_blocks = 0,
                  .n_warps = 0,
                  .split_log2 = cuts.cuts_log2,
                  .left_at = 0,
                  .left_bytes = 0,
                  .chunks_at = 0,
                  .chunk_bytes = chunk_bytes};
  for (int j = 0; j < args.n_jobs; ++j) {
    const DeviceLinearJob& job = args.jobs[j];
    plan.first_panel[j + 1] = plan.first_panel[j] + ceil_div(job.w.n_rows, 16);
    if (job.k_parts != n_parts || act_group_cols(job.w.dtype) != act_group_cols(args.jobs[0].w.dtype))
      return std::nullopt;
  }
  plan.n_blocks = device.n_multiprocessors / (plan.row_tiles * n_parts);
  const int n_panels = plan.first_panel[args.n_jobs];
  if (plan.n_blocks == 0 || n_panels < kLeastStreamPanels * plan.n_blocks) return std::nullopt;
  const int panels = ceil_div(n_panels, plan.n_blocks),
            part_chunks = ceil_div(dot_chunks(args.jobs[0].w.n_cols), n_parts);
  // Warps share a panel where there would be few: they leave a float for each output and chunk.
  const bool is_chain = cuts.cuts_log2 == 0, is_big = act_group_cols(args.jobs[0].w.dtype) == 256;
  if (is_chain && is_big && part_chunks >= 4 && 2 * panels <= kMaxStreamWarps<kTiles>) plan.split_log2 = 1;
  for (;; --plan.split_log2) {
    for (int rounds = ceil_div(panels << plan.split_log2, kMaxStreamWarps<kTiles>);; ++rounds) {
      plan.n_warps = ceil_div(panels, rounds) << plan.split_log2;
      if (plan.n_warps < kLeastStreamWarps) break;
      plan.left_at = part_chunks * stream_row_chunk<kTiles, kOne>(is_big);
      if (plan.split_log2 > 0)
        plan.left_bytes = kTiles * 512 * (is_chain ? ceil_div(part_chunks, 2) : 1);
      else
        plan.left_bytes = 0;
      plan.chunks_at = plan.left_at + plan.n_warps * plan.left_bytes;
      if (plan.shared_bytes() <= static_cast<int>(device.max_shared_bytes)) return plan;
    }
    if (!is_chain || plan.split_log2 == 0) return std::nullopt;
  }
}

template <int kTiles, bool kOne = false>
bool launch_stream(const DeviceLinearArgs& args, const SumCuts& cuts, int chunk_bytes, StreamView stream) {
  const std::optional<StreamPlan> plan = plan_stream<kTiles, kOne>(args, cuts, chunk_bytes);
  if (!plan) return false;
  static const bool ready = [] {
    return allow_shared(linear_stream_kernel<kTiles, kOne>, device_in_use().max_shared_bytes), true;
  }();
  static_cast<void>(ready);
  launch(linear_stream_kernel<kTiles, kOne>,
         static_cast<unsigned>(plan->n_blocks * plan->row_tiles << cuts.parts_log2),
         static_cast<unsigned>(32 * plan->n_warps), static_cast<size_t>(plan->shared_bytes()), stream, *plan);
  return true;
}

}  // namespace thermo
