// y = W x for up to 64 rows in the form of BlockActs: bound by the bytes of W. Included by one file for each
// set of weight types.
//
// A block of 4 warps has up to 4 panels and up to 32 rows; a warp has a panel, or one of the cuts of its
// columns, alone. It streams that through shared memory by copies that need no registers, two or three chunks
// of 256 columns ahead and from before the wait for the kernel before. The activation rows are shared: pieces
// of two chunks, the next one on its way while this one is multiplied, so the block meets once a piece and
// not in every chunk.
//
// Matrices with many panels go through linear_stream.cuh where the card has the memory for all columns of the
// rows.
//
// An output is a sum of chains over the blocks of a cut in the order of columns. Columns are cut by the
// shapes of the matrices alone, whoever computes a cut: so a row has the same bits whatever else is in the
// step.
//
// H200, 27B, gate and up (100 MB): 33, 43, 61 and 106 us for 8, 16, 32 and 64 rows; instructions are the
// bound from 16 rows on. On the way there, 8 rows: 58 us with blocks of 8 warps that met in every chunk and
// left the values of shared panels to each other (of 500 instructions a chunk 280 for copies); 36 us while
// every piece divided to find its columns. Pieces of four chunks: 34 us, but 78 for 32 rows, because one
// block is left to a multiprocessor. Cuts inside of blocks instead of parts for output projections: down 36
// us against 31.
#pragma once

#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/linear/dot_product.cuh"
#include "kernels/linear/few_product.cuh"
#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/linear_stream.cuh"
#include "kernels/linear/stage_chunk.cuh"
#include "kernels/quant_matmul/panel_columns.cuh"

namespace thermo {

inline constexpr int kFewWarps = 4, kFewPiece = 2;

struct FewPlan {
  DeviceLinearArgs args;
  int first_block[kMaxLinearJobs + 1];  // in blocks of all rows
  int row_tiles;                        // blocks that have the same weights, neighbours
  int cuts_log2;                        // of the columns, or of a part of them
  int split_log2;                       // warps that share a panel: one, or one for each cut
  int n_stages, chunk_bytes;
};

template <int kTiles>
constexpr int kFewChunkRows = 8 * kTiles* kFewRowBytes;  // the rows of a chunk
constexpr int few_piece_bytes(int tiles, int split_log2) {
  return (kFewPiece * 8 * tiles * kFewRowBytes) << split_log2;
}

template <bool kAny, class Body>
__device__ __forceinline__ void for_few_type(DType dtype, const Body& body) {
  if constexpr (kAny)
    for_quant_type(dtype, body);
  else
    for_dot_type(dtype, body);
}

template <int kTiles, bool kAny>
__global__ void __launch_bounds__(32 * kFewWarps, kTiles == 1   ? 5
                                                  : kTiles == 2 ? 4
                                                                : 3)
    linear_few_kernel(const __grid_constant__ FewPlan plan) {
  extern __shared__ __align__(16) std::byte shared[];  // two pieces of rows, then the chunks of each warp
  const DeviceLinearArgs& args = plan.args;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block_of_all = static_cast<int>(blockIdx.x) / plan.row_tiles;
  int j = 0;
  while (j + 1 < args.n_jobs && block_of_all >= plan.first_block[j + 1]) ++j;
  const DeviceLinearJob& job = args.jobs[j];
  const DeviceMatrix& w = job.w;
  const int first_act = static_cast<int>(blockIdx.x) % plan.row_tiles * (8 * kTiles);
  const int n_acts = min(8 * kTiles, args.n_acts - first_act);
  const int block = block_of_all - plan.first_block[j], part = block % job.k_parts;
  const int split_log2 = plan.split_log2, split = 1 << split_log2;
  const int panel = (block / job.k_parts << 2 >> split_log2) + (warp >> split_log2);
  static_assert(kFewWarps == 4);
  // Cut c of the part, and the share of a warp: a cut, or all of them. There are 2^n parts.
  const int all_chunks = dot_chunks(w.n_cols), n_cuts = 1 << plan.cuts_log2;
  const SumCuts cuts{.parts_log2 = __ffs(job.k_parts) - 1, .cuts_log2 = plan.cuts_log2};
  const auto cut = [&](int c) { return cuts.begin(all_chunks, part, c); };
  const auto begin_of = [&](int s) { return cut(s << plan.cuts_log2 >> split_log2); };
  const int mine = warp & (split - 1), begin = begin_of(mine), end = begin_of(mine + 1);
  int steps = 0;
  for (int s = 0; s < split; ++s) steps = max(steps, begin_of(s + 1) - begin_of(s));
  const uint8_t* const bytes = panel * 16 < w.n_rows ? w.panels + panel * w.panel_bytes : nullptr;
  const int piece_bytes = kFewPiece * kFewChunkRows<kTiles> << split_log2;
  std::byte* const chunks = shared + 2 * piece_bytes + warp * plan.n_stages * plan.chunk_bytes;
  const std::byte* const blocks =
      static_cast<const std::byte*>(act_group_cols(w.dtype) == 256 ? args.x.blocks256 : args.x.blocks32);
  // The rows of kFewPiece steps of every share, from `step` on.
  const auto copy_rows = [&](int step, std::byte* to, const auto& copy) {
    if (lane >= kDotChunkBytes / 16) return;
#pragma unroll 2
    for (int i = warp; i < n_acts << split_log2; i += kFewWarps) {
      const int a = i >> split_log2, s = i & (split - 1), first = begin_of(s) + step, last = begin_of(s + 1);
      const int64_t row = args.row_index == nullptr ? first_act + a : args.row_index[first_act + a];
      const std::byte* const from =
          blocks + (row * args.x.blocks_stride + first) * kDotChunkBytes + lane * 16;
      std::byte* const at = to + s * (kFewPiece * kFewChunkRows<kTiles>)+a * kFewRowBytes + lane * 16;
#pragma unroll
      for (int c = 0; c < kFewPiece; ++c)
        if (first + c < last) copy(at + c * kFewChunkRows<kTiles>, from + c * kDotChunkBytes);
    }
  };
  float y[kTiles][4] = {}, total[kTiles][4] = {};
  for_few_type<kAny>(w.dtype, [&]<DType T>() {
    const auto ask = [&](int chunk, int stage) {
      if (bytes != nullptr && chunk < end)
        stage_chunk_of<T>(chunks + stage * plan.chunk_bytes, bytes, w.panel_bytes, chunk, lane);
      copy_commit();
    };
    for (int i = 0; i < plan.n_stages; ++i) ask(begin + i, i);
    allow_next();
    wait_for_inputs();
    // The first rows by loads: copies are waited for in order, and the weights were asked for before.
    copy_rows(0, shared, [](std::byte* to, const std::byte* from) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    });
    int stage = 0, next_cut = 1, cut_chunk = split == 1 && n_cuts > 1 ? cut(1) : -1;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int place = step % kFewPiece, half = step / kFewPiece & 1, chunk = begin + step;
      // The rows of a piece were asked for two groups ago.
      if (plan.n_stages == 2 || place == 0)
        copy_wait<1>();
      else
        copy_wait<2>();
      if (place == 0) {
        __syncthreads();
        if (step + kFewPiece < steps)
          copy_rows(step + kFewPiece, shared + (half ^ 1) * piece_bytes,
                    [](std::byte* to, const std::byte* from) { copy16(to, from, true); });
      } else {
        __syncwarp();
      }
      if (bytes != nullptr && chunk < end) {
        if (chunk == cut_chunk) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              total[n][i] = next_cut == 1 ? y[n][i] : total[n][i] + y[n][i];
              y[n][i] = 0.0f;
            }
          ++next_cut;
          cut_chunk = next_cut < n_cuts ? cut(next_cut) : -1;
        }
        few_chunk<T, kTiles>(
            reinterpret_cast<const uint8_t*>(chunks + stage * plan.chunk_bytes),
            chunk & (kPanelFormat<T>.block_cols == 256 ? kPanelFormat<T>.unit_blocks - 1 : 0),
            min(8, (w.n_cols - chunk * 256) / 32),
            FewRows<>{shared + half * piece_bytes + (mine * kFewPiece + place) * kFewChunkRows<kTiles>}, lane,
            [&](int, int n, const float(&value)[4], float left, float right) {
#pragma unroll
              for (int i = 0; i < 4; ++i) y[n][i] = __fmaf_rn(value[i], i % 2 == 0 ? left : right, y[n][i]);
            });
      }
      __syncwarp();
      ask(chunk + plan.n_stages, stage);
      stage = stage + 1 == plan.n_stages ? 0 : stage + 1;
    }
  });
  if (split == 1 && n_cuts > 1) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) y[n][i] = total[n][i] + y[n][i];
  }
  if (split > 1) {
    float* const sums = reinterpret_cast<float*>(shared) + lane;  // [warp][value][lane]
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[((warp * kTiles + n) * 4 + i) * 32] = y[n][i];
    __syncthreads();
    if (mine != 0) return;
    for (int s = 1; s < split; ++s)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) y[n][i] += sums[(((warp + s) * kTiles + n) * 4 + i) * 32];
  }
  store_few<kTiles>(job, w, job.y + part * job.part_stride + first_act * job.y_stride, panel, n_acts, lane,
                    y);
}

template <int kTiles, bool kAny>
void launch_few(FewPlan& plan, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(linear_few_kernel<kTiles, kAny>, device_in_use().max_shared_bytes), true;
  }();
  static_cast<void>(ready);
  const DeviceInfo& device = device_in_use();
  const auto bytes = [&](int stages) {
    return 2 * few_piece_bytes(kTiles, plan.split_log2) + kFewWarps * stages * plan.chunk_bytes;
  };
  const auto fits = [&] { return bytes(2) <= static_cast<int>(device.max_shared_bytes); };
  // Warps that share a panel need the rows of all cuts: only where these are few.
  plan.split_log2 = kTiles == 1 ? plan.cuts_log2 : 0;
  if (!fits()) plan.split_log2 = 0;
  plan.row_tiles = ceil_div(plan.args.n_acts, 8 * kTiles);
  for (int j = 0; j < plan.args.n_jobs; ++j) {
    const DeviceLinearJob& job = plan.args.jobs[j];
    plan.first_block[j + 1] = plan.first_block[j] + job.k_parts * ceil_div(ceil_div(job.w.n_rows, 16),
                                                                           kFewWarps >> plan.split_log2);
  }
  const int n_blocks = plan.first_block[plan.args.n_jobs] * plan.row_tiles;
  // A third chunk on its way if that costs no block its place.
  constexpr int kReserved = 1024;  // of a block, by the system
  const auto resident = [&](int stages) {
    return static_cast<int>(device.max_shared_bytes) / (bytes(stages) + kReserved) * device.n_multiprocessors;
  };
  plan.n_stages = resident(3) > 0 && (resident(3) >= n_blocks || resident(3) == resident(2)) ? 3 : 2;
  launch(linear_few_kernel<kTiles, kAny>, static_cast<unsigned>(n_blocks), 32 * kFewWarps,
         static_cast<size_t>(bytes(plan.n_stages)), stream, plan);
}

// As many rows to a block as there are, up to 32, and as the card has memory for. With few panels fewer, so
// that there are warps enough: a warp alone on its scheduler takes 1.25 us for 256 columns of 16 rows.
template <bool kAny>
void launch_few_rows(FewPlan& plan, StreamView stream) {
  int panels = 0;
  for (int j = 0; j < plan.args.n_jobs; ++j)
    panels += plan.args.jobs[j].k_parts * ceil_div(plan.args.jobs[j].w.n_rows, 16);
  const auto good = [&](int tiles) {
    constexpr int kWarpsEach = 7;
    return panels * ceil_div(plan.args.n_acts, 8 * tiles) >= kWarpsEach * device_in_use().n_multiprocessors &&
           2 * few_piece_bytes(tiles, 0) + 2 * kFewWarps * plan.chunk_bytes <=
               static_cast<int>(device_in_use().max_shared_bytes);
  };
  if (plan.args.n_acts > 16 && good(4)) return launch_few<4, kAny>(plan, stream);
  if (plan.args.n_acts > 8 && good(2)) return launch_few<2, kAny>(plan, stream);
  launch_few<1, kAny>(plan, stream);
}

}  // namespace thermo
