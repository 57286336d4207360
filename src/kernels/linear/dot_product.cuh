// One or two decoded rows times weights of a type that has_dot(), with the bits of a row among others
// (linear_few.cuh): who shares a launch must not show.
//
// Values of blocks (panel_exact.cuh) go to shared memory, each warp's from its own chunks of 256 columns, and
// a thread per output adds them up in the order of columns, cut as linear_few.cuh cuts them. The first
// chunk's weights are loaded into registers and the second's asked into L2 before `ready()` is called:
// between kernels that is the wait for the one before, so weights travel while it ends.
#pragma once

#include "kernels/linear/copy_async.cuh"
#include "kernels/linear/sum_cuts.h"
#include "kernels/quant_matmul/panel_exact.cuh"

namespace thermo {

// Brings a chunk as far as L2.
__device__ __forceinline__ void prefetch_chunk(const DeviceMatrix& w, const uint8_t* panel, int chunk,
                                               int lane) {
  const int body = (chunk >> w.unit_log2) * w.unit_bytes + (chunk & ((1 << w.unit_log2) - 1)) * w.body_bytes;
  const int at = body + lane * 128;
  if (lane * 128 < 64 + w.body_bytes && at < static_cast<int>(w.panel_bytes))
    asm volatile("prefetch.global.L2 [%0];" ::"l"(panel + at));
}

template <class Body>
__host__ __device__ __forceinline__ void for_dot_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::Q4_K:
      body.template operator()<DType::Q4_K>();
      break;
    case DType::Q5_K:
      body.template operator()<DType::Q5_K>();
      break;
    case DType::Q6_K:
      body.template operator()<DType::Q6_K>();
      break;
    default:
      body.template operator()<DType::Q8_0>();
      break;
  }
}

// ---- the norm that a product of one row reads through ----

// The row is x * weight / sqrt(mean(x^2) + eps). x * weight is rounded and published before the mean is
// known: the factor multiplies the steps. Rows that come in company are rounded in the same way
// (residual_norm_cuda).
//
// The sum of squares is one for every kernel, written so that the compiler has no choice. Of 256 columns: the
// lane of columns 4t.. and 16 + 4t.. of sub-block s adds these eight up one after the other, then lanes are
// added in pairs, neighbours first. Chunks of 256 columns follow one after the other.
inline constexpr int kMaxNormChunks = 64;

// The lane's sum, continued.
__device__ __forceinline__ float add_squares(float sum, const float4& x) {
  for (const float v : {x.x, x.y, x.z, x.w}) sum = __fmaf_rn(v, v, sum);
  return sum;
}
// The same of (x * weight) * gate.
__device__ __forceinline__ float add_products(float sum, const float4& x, const float4& weight,
                                              const float4& gate) {
  sum = __fmaf_rn(__fmul_rn(x.x, weight.x), gate.x, sum);
  sum = __fmaf_rn(__fmul_rn(x.y, weight.y), gate.y, sum);
  sum = __fmaf_rn(__fmul_rn(x.z, weight.z), gate.z, sum);
  return __fmaf_rn(__fmul_rn(x.w, weight.w), gate.w, sum);
}
__device__ __forceinline__ float add_lanes(float sum) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
  return sum;
}
__device__ __forceinline__ float add_chunks(const float* sums, int n_chunks) {
  float sum = 0.0f;
  for (int begin = 0; begin < n_chunks; begin += 8) {
    float part[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) part[i] = begin + i < n_chunks ? sums[begin + i] : 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = __fadd_rn(sum, part[i]);
  }
  return sum;
}
// The division does not wait for the sum.
__device__ __forceinline__ float norm_factor(float square, int n_cols, float eps) {
  return rsqrtf(__fmaf_rn(square, __frcp_rn(static_cast<float>(n_cols)), eps));
}
__device__ __forceinline__ float4 times(const float4& a, const float4& b) {
  return {__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w)};
}

// A row's weights, or the row: the lane's columns of a chunk, on their way before there is time for them.
struct NormWeights {
  float4 low, high;

  __device__ __forceinline__ void load(const float* weight, int n_cols, int chunk, int lane) {
    const int at = ActPiece::column(chunk, lane);
    low = high = {0.0f, 0.0f, 0.0f, 0.0f};
    if (at < n_cols) {
      low = __ldg(reinterpret_cast<const float4*>(weight + at));
      high = __ldg(reinterpret_cast<const float4*>(weight + at + 16));
    }
  }
};
struct NormRow : ActPiece {
  // put(low, high) of their products with the weights; returns the chunk's sum of squares.
  template <class Put>
  __device__ __forceinline__ float make_acts(const NormWeights& w, const Put& put) const {
    put(times(low, w.low), times(high, w.high));
    return add_lanes(add_squares(add_squares(0.0f, low), high));
  }
};

// All threads of the block, of kRows rows. put(at, low, high): of the warp's chunks, `at` counts through all
// chunks of the first row, then of the next. `first`: the norm's weights of chunk norm_chunk(). Before the
// barrier that publishes what it makes, each warp leaves sums of squares in squares[kRows * kMaxNormChunks];
// norm_scale() adds those of a row up after it. `late`: 256 floats of shared memory for each warp, where the
// second of its chunks waits; registers hold weights meanwhile.
__device__ __forceinline__ int norm_chunk(int n_cols, int warp) {
  const int n_chunks = dot_chunks(n_cols);
  return warp < n_chunks ? warp : warp - n_chunks;
}
template <int kRows = 1, class Put>
__device__ __forceinline__ void make_norm_acts(const float* x, const float* weight, const NormWeights& first,
                                               int n_cols, int warp, int n_warps, int lane, float* squares,
                                               const Put& put, float* late = nullptr) {
  const int n_chunks = dot_chunks(n_cols);
  const auto row_of = [&](int item) { return kRows > 1 && item >= n_chunks ? 1 : 0; };
  if (kRows > 1 && late != nullptr) {
    late += warp * 256 + lane * 8;
    const int item = warp + n_warps, row = row_of(item), at = ActPiece::column(item - row * n_chunks, lane);
    if (item < kRows * n_chunks && at < n_cols) {
      copy16(late, x + row * n_cols + at, true);
      copy16(late + 4, x + row * n_cols + at + 16, true);
    }
    copy_commit();
  }
#pragma unroll 1
  for (int item = warp; item < kRows * n_chunks; item += n_warps) {
    const int row = row_of(item), chunk = item - row * n_chunks;
    NormRow piece;
    NormWeights w = first;
    if (chunk != norm_chunk(n_cols, warp)) w.load(weight, n_cols, chunk, lane);
    if (kRows > 1 && late != nullptr && item == warp + n_warps) {
      copy_wait<0>();
      if (ActPiece::column(chunk, lane) < n_cols) {
        piece.low = *reinterpret_cast<const float4*>(late);
        piece.high = *reinterpret_cast<const float4*>(late + 4);
      }
    } else {
      piece.load(x + row * n_cols, chunk, n_cols, lane);
    }
    const float square = piece.make_acts(w, [&](float4 low, float4 high) { put(item, low, high); });
    if (lane == 0) squares[row * kMaxNormChunks + chunk] = square;
  }
}
__device__ __forceinline__ float norm_scale(const float* squares, int n_cols, float eps) {
  return norm_factor(add_chunks(squares, dot_chunks(n_cols)), n_cols, eps);
}

// ---- values of blocks and their sums ----

// Blocks of all columns, and of one chunk: by the host, since it divides.
constexpr int blocks_of(const DeviceMatrix& w) {
  return w.n_rows == 0 ? 0 : w.n_cols / act_group_cols(w.dtype);
}
constexpr int chunk_blocks_of(const DeviceMatrix& w) {
  return w.n_rows == 0 ? 0 : 256 / act_group_cols(w.dtype);
}

// The values of a block lie row by row, 16 floats each, those of its steps likewise.
//
// Values of the warp's chunks of a panel, of kRows rows whose chunks are acts[0 ..], one row after the other,
// from ready() on, rounded without the sums of their codes. `panel` null: nothing to do but ready().
template <DType T, int kRows = 1, class Acts, class Ready>
__device__ __forceinline__ void in_values(const DeviceMatrix& w, const uint8_t* panel, int first_chunk,
                                          int chunk_step, const Acts& acts, int lane, float* values,
                                          const Ready& ready) {
  if (panel == nullptr) return ready();
  const int n_chunks = dot_chunks(w.n_cols), s = lane >> 2;
  const auto subs_of = [&](int chunk) { return min(8, (w.n_cols - chunk * 256) / 32); };
  DotChunk<T> data;
  if (first_chunk < n_chunks) data.load(panel, first_chunk, subs_of(first_chunk), lane);
  if (first_chunk + chunk_step < n_chunks) prefetch_chunk(w, panel, first_chunk + chunk_step, lane);
  ready();
#pragma unroll 1
  for (int chunk = first_chunk; chunk < n_chunks; chunk += chunk_step) {
    if (chunk != first_chunk) data.load(panel, chunk, subs_of(chunk), lane);
    // One row after the other was slower: 15.2 us against 13.0 for the projections of two rows of 35B-A3B.
    SubCodes x[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r].template load_and_sum<T>(acts[r * n_chunks + chunk], s);
    dot_values<T, kRows>(data, x, subs_of(chunk), lane, values + chunk * kChunkBlocks<T> * kRows * 16);
  }
}

// Values and steps of one chunk of rounded rows that lie in memory. The steps go with the values, so that the
// sums after the last barrier read shared memory only.
template <DType T, int kRows>
__device__ __forceinline__ void stored_values(const DotChunk<T>& data, const BlockActs* const (&acts)[kRows],
                                              int n_subs, int lane, float* values, float* steps) {
  const bool has_step = lane < min(kChunkBlocks<T>, n_subs);
  SubCodes x[kRows];
  float step[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    x[r].load(*acts[r], lane >> 2);
    step[r] = has_step ? acts[r]->meta[lane].step : 0.0f;
  }
  dot_values<T, kRows>(data, x, n_subs, lane, values);
  if (has_step)
#pragma unroll
    for (int r = 0; r < kRows; ++r) steps[lane * kRows + r] = step[r];
}

// Values and steps of one chunk of a row, one of kRows, that the warp rounds itself. `stage`: of this warp.
template <DType T, int kRows = 1>
__device__ __forceinline__ void hidden_values(const DotChunk<T>& data, const ActPiece& piece, int n_subs,
                                              int lane, BlockActs& stage, float* values, float* steps) {
  __syncwarp();
  put_block_acts<kPanelFormat<T>.block_cols, false>(piece.low, piece.high, lane, stage);
  __syncwarp();
  SubCodes x[1];
  x[0].load_and_sum<T>(stage, lane >> 2);
  dot_values<T, 1, kRows>(data, x, n_subs, lane, values);
  if (lane < min(kChunkBlocks<T>, n_subs)) steps[lane * kRows] = stage.meta[lane].step;
}

// The blocks of a row of a quantised matrix.
struct RowBlocks {
  int n_chunks = 0, chunk_blocks = 0, n = 0;

  RowBlocks() = default;
  RowBlocks(const DeviceMatrix& w)
      : n_chunks(dot_chunks(w.n_cols)), chunk_blocks(chunk_blocks_of(w)), n(blocks_of(w)) {}
};

// Part `part` of a sum over blocks: a chain for each of its cuts, added up in order. `values`: of the row's
// first block, kStride floats from one block to the next.
template <int kStride = 16, class StepOf>
__device__ __forceinline__ float chain_part(const float* values, const RowBlocks& blocks, const SumCuts& cuts,
                                            int part, const StepOf& step_of) {
  const auto begin_of = [&](int cut) {
    return min(blocks.n, cuts.begin(blocks.n_chunks, part, cut) * blocks.chunk_blocks);
  };
  float sum = 0.0f;
  int begin = begin_of(0);
  for (int cut = 0; cut < 1 << cuts.cuts_log2; ++cut) {
    const int end = begin_of(cut + 1);
    const float y = chain_blocks(values + begin * kStride, kStride, end - begin,
                                 [&](int b) { return step_of(begin + b); });
    sum = cut == 0 ? y : __fadd_rn(sum, y);
    begin = end;
  }
  return sum;
}
// start + every part, one after the other; or, where nothing is added to, the only part. Up to 16 blocks are
// read together: a chain of reads that wait for each other would take longer than the sums.
template <int kStride = 16, class StepOf>
__device__ __forceinline__ float chain_all(const float* values, const RowBlocks& blocks, const SumCuts& cuts,
                                           float start, bool adds, const StepOf& step_of) {
  constexpr int kTogether = 16;
  const int n_cuts = 1 << (cuts.parts_log2 + cuts.cuts_log2);
  float sum = start;
  if (blocks.n > kTogether || blocks.chunk_blocks > 1 || (adds && cuts.cuts_log2 > 0)) {
    for (int part = 0; part < 1 << cuts.parts_log2; ++part) {
      const float y = chain_part<kStride>(values, blocks, cuts, part, step_of);
      sum = adds ? __fadd_rn(sum, y) : y;
    }
    return sum;
  }
  float v[kTogether], step[kTogether], y = 0.0f;
#pragma unroll
  for (int b = 0; b < kTogether; ++b) {
    v[b] = step[b] = 0.0f;
    if (b < blocks.n) v[b] = values[b * kStride], step[b] = step_of(b);
  }
  int cut = 1, border = n_cuts > 1 ? cuts.begin(blocks.n_chunks, 0, 1) : kTogether;
  bool first = !adds;
#pragma unroll
  for (int b = 0; b < kTogether; ++b) {
    if (b == border) {
      sum = first ? y : __fadd_rn(sum, y);
      first = false;
      y = 0.0f;
      border = ++cut < n_cuts ? cuts.begin(blocks.n_chunks, 0, cut) : kTogether;
    }
    if (b < blocks.n) y = __fmaf_rn(v[b], step[b], y);
  }
  return first ? y : __fadd_rn(sum, y);
}
// The same of one row by both halves of a warp, each with half of the cuts: one warp alone spends its time on
// latency. The sum comes to the lower half. Both have the same `values` and `start`.
__host__ __device__ constexpr bool chains_in_halves(const RowBlocks& blocks, const SumCuts& cuts, bool adds) {
  const int n_log2 = cuts.parts_log2 + cuts.cuts_log2;
  return blocks.chunk_blocks == 1 && blocks.n <= 16 && (n_log2 == 1 || n_log2 == 2) &&
         (adds ? cuts.cuts_log2 == 0 : cuts.parts_log2 == 0);
}
template <class StepOf>
__device__ __forceinline__ float chain_halves(const float* values, const RowBlocks& blocks,
                                              const SumCuts& cuts, float start, bool adds, int lane,
                                              const StepOf& step_of) {
  constexpr int kTogether = 8;
  const int n_log2 = cuts.parts_log2 + cuts.cuts_log2, half = lane >> 4;
  const int first = blocks.n_chunks * half >> 1, end = blocks.n_chunks * (half + 1) >> 1,
            border = n_log2 == 2 ? blocks.n_chunks * (2 * half + 1) >> 2 : -1;
  float v[kTogether], step[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    v[i] = step[i] = 0.0f;
    if (first + i < end) v[i] = values[(first + i) * 16], step[i] = step_of(first + i);
  }
  float y = 0.0f, before = 0.0f;  // of this cut, and of the one before it
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    if (first + i == border) before = y, y = 0.0f;
    y = __fmaf_rn(v[i], step[i], y);
  }
  const float other = __shfl_xor_sync(0xffffffffu, y, 16),
              other_before = __shfl_xor_sync(0xffffffffu, before, 16);
  if (n_log2 == 1) return __fadd_rn(adds ? __fadd_rn(start, y) : y, other);
  const float sum = __fadd_rn(adds ? __fadd_rn(start, before) : before, y);
  return __fadd_rn(__fadd_rn(sum, other_before), other);
}
// The step of block b of a row.
template <class Acts>
__device__ __forceinline__ float step_of_block(const Acts& acts, bool big, int b) {
  return big ? acts[b].meta[0].step : acts[b / 8].meta[b % 8].step;
}

}  // namespace thermo
