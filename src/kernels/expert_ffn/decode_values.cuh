// What the launches of one or two decoded rows share: rounding the normed row and hidden rows, and block
// values on their way to sums (panel_exact.cuh).
#pragma once

#include "kernels/expert_ffn/slot_product.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

// Sum of a row's blocks times the activations they were multiplied with; `scale`: the norm's factor, which
// was not known when the row was rounded. Blocks lie kStride floats apart.
template <int kStride = 16>
__device__ __forceinline__ float chain_values(const float* values, int n_blocks, const BlockActs* acts,
                                              bool big, float scale) {
  return chain_blocks(values, kStride, n_blocks,
                      [&](int b) { return __fmul_rn(step_of_block(acts, big, b), scale); });
}

// silu(gate) * up of 16 rows by a warp: its lower half has gate and gets the result, the upper half has up.
template <int kStride = 16>
__device__ __forceinline__ float swiglu_of_halves(const float* gate, const float* up, int n_blocks,
                                                  const BlockActs* acts, bool big, float scale, int lane) {
  const float mine = chain_values<kStride>((lane < 16 ? gate : up) + lane % 16, n_blocks, acts, big, scale);
  return swiglu_exact(mine, __shfl_xor_sync(0xffffffffu, mine, 16));
}

// Shared memory of a block that makes 16 hidden columns: the rounded rows, values of gate, values of up.
struct InShared {
  int gate, up, bytes;

  // n_blocks: of a row of the matrices.
  __host__ __device__ InShared(int n_blocks, int n_embd, int n_rows = 1) {
    const int values = static_cast<int>(sizeof(float)) * 16 * n_rows * n_blocks;
    gate = static_cast<int>(sizeof(BlockActs)) * n_rows * dot_chunks(n_embd);
    up = gate + values;
    bytes = up + values;
  }
};

// Divides numbers below 2^16 by one that the host knows.
struct KnownDivisor {
  uint32_t divisor, inverse;

  explicit KnownDivisor(int d)
      : divisor(static_cast<uint32_t>(d)), inverse(0xffffffffu / static_cast<uint32_t>(d) + 1) {}
  __device__ __forceinline__ int quotient(int x) const {
    return divisor == 1 ? x : static_cast<int>(__umulhi(static_cast<uint32_t>(x), inverse));
  }
};

// The weighted sum over experts of 16 outputs of each row, by a block. Values and steps lie expert by expert,
// the shared one last, those of the next row after them.
struct OutputSum {
  const float* values;
  const float* steps;
  const float* weights;      // [32] of each row, n_used + 1 of them in use
  int n_used, slot_values;   // of a routed expert
  int row_blocks;            // of a row of a routed expert; 0: there is none
  RowBlocks shared;          // of a row of the shared one
  SumCuts shared_cuts = {};  // of a dense layer
  unsigned elsewhere = 0;    // bits of experts that others compute
  int row_values = 0;        // of all experts, where there are several rows

  static constexpr int kMaxTerms = 31 * 16;

  // Sixteen threads have an expert or some; the first sixteen of a row get its sums.
  template <int kRows>
  static __device__ __forceinline__ int row_groups(int n_used) {
    return min(static_cast<int>(blockDim.x) / (16 * kRows), n_used + 1);
  }

  __device__ __forceinline__ bool has(int slot) const {
    return slot == n_used ? shared.n > 0 : row_blocks > 0 && (elsewhere >> slot & 1) == 0;
  }
  // All threads, after a barrier; has one itself. The sums come to threads 0 .. 15, of a second row to those
  // from 16 * row_groups() on. `terms`: kRows * 16 * n_used.
  template <int kRows = 1>
  __device__ __forceinline__ GridSum all(long long* terms) const {
    static_assert(kRows <= 2);
    const int r = threadIdx.x % 16, n_groups = row_groups<kRows>(n_used);
    const int row = kRows > 1 && static_cast<int>(threadIdx.x) >= 16 * n_groups ? 1 : 0;
    const int group = threadIdx.x / 16 - row * n_groups;
    if (kRows > 1) terms += row * 16 * n_used;
    GridSum sum;
    if (group < n_groups)
      for (int slot = group; slot <= n_used; slot += n_groups) {
        if (!has(slot)) continue;
        const int at = row * row_values + slot * slot_values;
        const auto step_of = [&](int b) { return steps[at + b]; };
        const float* const from = values + at * 16 + r;
        if (slot < n_used || !shared_cuts.any())
          sum.add(weights[32 * row + slot],
                  chain_blocks(from, 16, slot == n_used ? shared.n : row_blocks, step_of));
        else
          for (int part = 0; part < 1 << shared_cuts.parts_log2; ++part)
            sum.add(weights[slot], chain_part(from, shared, shared_cuts, part, step_of));
      }
    if (group > 0 && group < n_groups) terms[(group - 1) * 16 + r] = sum.part();
    __syncthreads();
    if (group == 0)
#pragma unroll 8
      for (int g = 1; g < n_groups; ++g) sum.add_part(terms[(g - 1) * 16 + r]);
    return sum;
  }
};

}  // namespace thermo
