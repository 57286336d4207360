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
  return chain_blocks(values, 16, n_blocks,
                      [&](int b) { return __fmul_rn(step_of_block(acts, big, b), scale); });
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

// The weighted sum over experts of 16 outputs, by a block. Values and steps lie expert by expert, the shared
// one last.
struct OutputSum {
  const float* values;
  const float* steps;
  const float* weights;        // [n_used + 1]
  int n_used, slot_values;     // of a routed expert
  int row_blocks;              // of a row of a routed expert; 0: there is none
  RowBlocks shared;            // of a row of the shared one
  SumCuts shared_cuts = {};    // of a dense layer
  unsigned elsewhere = 0;      // bits of experts that others compute

  static constexpr int kMaxTerms = 31 * 16;

  __device__ __forceinline__ bool has(int slot) const {
    return slot == n_used ? shared.n > 0 : row_blocks > 0 && (elsewhere >> slot & 1) == 0;
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
        const auto step_of = [&](int b) { return steps[at + b]; };
        const float* const from = values + at * 16 + r;
        if (slot < n_used || !shared_cuts.any())
          sum.add(weights[slot], chain_blocks(from, 16, slot == n_used ? shared.n : row_blocks, step_of));
        else
          for (int part = 0; part < 1 << shared_cuts.parts_log2; ++part)
            sum.add(weights[slot], chain_part(from, shared, shared_cuts, part, step_of));
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
