// What the launches of one decoded row share: rounding the normed row and hidden rows, and block values on
// their way to sums (panel_exact.cuh).
#pragma once

#include "kernels/expert_ffn/slot_product.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

// Sum of a row's blocks times the activations they were multiplied with; `scale`: the norm's factor, which
// was not known when the row was rounded.
__device__ __forceinline__ float chain_values(const float* values, int n_blocks, const BlockActs* acts,
                                              bool big, float scale) {
  return chain_blocks(values, 16, n_blocks, [&](int b) {
    return __fmul_rn(big ? acts[b].meta[0].step : acts[b / 8].meta[b % 8].step, scale);
  });
}

// Blocks of all columns, and floats of their values in shared memory.
__host__ __device__ constexpr int blocks_of(const DeviceMatrix& w) {
  return w.n_rows == 0 ? 0 : w.n_cols / act_group_cols(w.dtype);
}
// Blocks of one chunk.
__host__ __device__ constexpr int chunk_blocks_of(const DeviceMatrix& w) {
  return w.n_rows == 0 ? 0 : 256 / act_group_cols(w.dtype);
}

// Shared memory of a block that makes 16 hidden columns: the rounded row, values of gate, values of up.
struct InShared {
  size_t gate, up, bytes;

  __host__ __device__ InShared(const DeviceMatrix& w, int n_embd) {
    const size_t values = sizeof(float) * 16 * static_cast<size_t>(blocks_of(w));
    gate = sizeof(BlockActs) * static_cast<size_t>(dot_chunks(n_embd));
    up = gate + values;
    bytes = up + values;
  }
};

// Values of the warp's chunks of a panel, of one row that lies in shared memory from ready() on, without sums
// of codes.
template <DType T, class Ready>
__device__ __forceinline__ void in_values(const DeviceMatrix& w, const uint8_t* panel, int first_chunk,
                                          int chunk_step, const BlockActs* acts, int lane, float* values,
                                          const Ready& ready) {
  const int n_chunks = dot_chunks(w.n_cols), s = lane >> 2;
  const auto subs_of = [&](int chunk) { return min(8, (w.n_cols - chunk * 256) / 32); };
  DotChunk<T> data;
  if (first_chunk < n_chunks) data.load(panel, first_chunk, subs_of(first_chunk), lane);
  if (first_chunk + chunk_step < n_chunks) prefetch_chunk(w, panel, first_chunk + chunk_step, lane);
  ready();
#pragma unroll 1
  for (int chunk = first_chunk; chunk < n_chunks; chunk += chunk_step) {
    if (chunk != first_chunk) data.load(panel, chunk, subs_of(chunk), lane);
    SubCodes x[1];
    x[0].load_and_sum<T>(acts[chunk], s);
    dot_values<T, 1>(data, x, subs_of(chunk), lane, values + chunk * kChunkBlocks<T> * 16);
  }
}

// Values and steps of one chunk of a hidden row: `piece` is rounded by the warp. `stage`: of this warp.
template <DType T>
__device__ __forceinline__ void hidden_values(const DotChunk<T>& data, const ActPiece& piece, int n_subs,
                                              int lane, BlockActs& stage, float* values, float* steps) {
  __syncwarp();
  put_block_acts<kPanelFormat<T>.block_cols, false>(piece.low, piece.high, lane, stage);
  __syncwarp();
  SubCodes x[1];
  x[0].load_and_sum<T>(stage, lane >> 2);
  dot_values<T, 1>(data, x, n_subs, lane, values);
  if (lane < min(kChunkBlocks<T>, n_subs)) steps[lane] = stage.meta[lane].step;
}

// The weighted sum over experts of 16 outputs, by a block. Values and steps lie expert by expert, the shared
// one last.
struct OutputSum {
  const float* values;
  const float* steps;
  const float* weights;     // [n_used + 1]
  int n_used, slot_values;  // of a routed expert
  int row_blocks;           // of a row of a routed expert; 0: there is none
  int shared_blocks;        // of the shared one
  unsigned elsewhere = 0;   // bits of experts that others compute

  static constexpr int kMaxTerms = 31 * 16;

  __device__ __forceinline__ bool has(int slot) const {
    return slot == n_used ? shared_blocks > 0 : row_blocks > 0 && (elsewhere >> slot & 1) == 0;
  }
  // All threads, after a barrier; has one itself. The sum comes to threads 0 .. 15.
  __device__ __forceinline__ GridSum all(long long* terms) const {
    const int r = threadIdx.x % 16, n_groups = min(static_cast<int>(blockDim.x) / 16, n_used + 1);
    const int group = threadIdx.x / 16;
    GridSum sum;
    if (group < n_groups)
      for (int slot = group; slot <= n_used; slot += n_groups) {
        if (!has(slot)) continue;
        const int at = slot * slot_values;
        sum.add(weights[slot],
                chain_blocks(values + at * 16 + r, 16, slot == n_used ? shared_blocks : row_blocks,
                             [&](int b) { return steps[at + b]; }));
      }
    if (group > 0 && group < n_groups) terms[threadIdx.x - 16] = sum.part();
    __syncthreads();
    if (group == 0)
#pragma unroll 8
      for (int g = 1; g < n_groups; ++g) sum.add_part(terms[(g - 1) * 16 + r]);
    return sum;
  }
};

}  // namespace thermo
