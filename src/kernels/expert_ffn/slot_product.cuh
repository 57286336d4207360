// A warp's share of a slot's products in the small form: one panel, every n-th chunk of 256 columns, up to 8
// rows, with the bits of panel_exact.cuh.
//
// Two ways to the sums. A warp that has a panel alone adds up its blocks as they come. With few slots the
// warps of a block share panels: each leaves the values of its blocks, and a thread per row adds them up in
// the order of columns.
#pragma once

#include "kernels/linear/dot_product.cuh"
#include "kernels/linear/warp_product.cuh"
#include "kernels/quant_matmul/panel_exact.cuh"

namespace thermo {

inline constexpr int kFewRows = 2;  // of a slot, where panels are shared

// What the warps of a panel leave for each other: values[(block * n_acts + a) * 16 + row] and the steps they
// are multiplied with, [block * n_acts + a].
struct PanelValues {
  float* values;
  float* steps;
  int n_blocks, n_acts;

  __device__ __forceinline__ float sum(int act, int row) const {
    return chain_blocks(values + act * 16 + row, 16 * n_acts, n_blocks,
                        [&](int b) { return steps[b * n_acts + act]; });
  }
};
// Values of a matrix: blocks, or for float weights the warps that share a panel.
__host__ __device__ constexpr int value_blocks(const DeviceMatrix& w, int split) {
  return is_float_type(w.dtype) ? split : w.n_cols / act_group_cols(w.dtype);
}
__host__ __device__ constexpr int value_bytes(int n_blocks, int n_acts) {
  return (n_blocks * n_acts * 17 * static_cast<int>(sizeof(float)) + 15) / 16 * 16;
}

// `acts_of(chunk, a)` is valid from stage(begin, end) on, for those chunks; all warps of the block call
// stage() equally often, also those without a panel (nullptr). The first chunk's weights are asked for
// before. emit(block, value, step of act 2t, of act 2t + 1), blocks in the order of columns: see MmaBlocks.
template <DType T, class ActsOf, class Stage, class Emit>
__device__ __forceinline__ void mma_slot(const DeviceMatrix& w, const uint8_t* panel, int first_chunk,
                                         int chunk_step, int stage_chunks, const ActsOf& acts_of,
                                         const Stage& stage, int lane, const Emit& emit) {
  using Batch = SubBatch<T>;
  const int n_chunks = dot_chunks(w.n_cols);
  const auto subs_of = [&](int chunk) { return min(8, (w.n_cols - chunk * 256) / 32); };
  Batch batch;
  MmaBlocks<T> blocks;
  if (panel != nullptr && first_chunk < n_chunks) {
    batch.load(panel, first_chunk, 0, subs_of(first_chunk), lane);
    if (first_chunk + chunk_step < n_chunks) prefetch_chunk(w, panel, first_chunk + chunk_step, lane);
  }
  int chunk = first_chunk;
#pragma unroll 1
  for (int begin = 0; begin < n_chunks; begin += stage_chunks) {
    const int end = min(n_chunks, begin + stage_chunks);
    stage(begin, end);
    if (panel == nullptr) continue;
#pragma unroll 1
    for (; chunk < end; chunk += chunk_step) {
      if (chunk + chunk_step < n_chunks) prefetch_chunk(w, panel, chunk + chunk_step, lane);
#pragma unroll
      for (int first = 0; first < 8; first += Batch::kSubs) {
        if (first > 0 || chunk != first_chunk) batch.load(panel, chunk, first, subs_of(chunk), lane);
        blocks.multiply(
            batch, first, subs_of(chunk), lane, [&](int n) -> const BlockActs& { return acts_of(chunk, n); },
            [&](int block, const float(&value)[4], float left, float right) {
              emit(chunk * kChunkBlocks<T> + block, value, left, right);
            });
      }
    }
  }
}

// A panel that one warp has alone: sums[act * 16 + row] of up to 8 rows. acts_of must know 8.
template <DType T, class ActsOf, class Stage>
__device__ __forceinline__ void sum_slot(const DeviceMatrix& w, const uint8_t* panel, int stage_chunks,
                                         const ActsOf& acts_of, const Stage& stage, int lane, float* sums) {
  float y[4] = {};
  mma_slot<T>(w, panel, 0, 1, stage_chunks, acts_of, stage, lane,
              [&](int, const float(&value)[4], float left, float right) {
#pragma unroll
                for (int i = 0; i < 4; ++i) y[i] = __fmaf_rn(value[i], i % 2 == 0 ? left : right, y[i]);
              });
  const int g = lane >> 2, t = lane & 3;
  float* const out = sums + 2 * t * 16 + 2 * g;
  *reinterpret_cast<float2*>(out) = {y[0], y[2]};
  *reinterpret_cast<float2*>(out + 16) = {y[1], y[3]};
}

// A share of a panel, of at most kFewRows rows.
template <DType T, class ActsOf, class Stage>
__device__ __forceinline__ void value_slot(const DeviceMatrix& w, const uint8_t* panel, int first_chunk,
                                           int chunk_step, int stage_chunks, const ActsOf& acts_of,
                                           const Stage& stage, int lane, const PanelValues& out) {
  static_assert(kFewRows == 2);
  mma_slot<T>(w, panel, first_chunk, chunk_step, stage_chunks, acts_of, stage, lane,
              [&](int block, const float(&value)[4], float left, float right) {
                if (lane % 4 != 0) return;
                const int g = lane >> 2;
                const float steps[2] = {left, right};
#pragma unroll
                for (int a = 0; a < 2; ++a) {
                  if (a >= out.n_acts) break;
                  *reinterpret_cast<float2*>(out.values + (block * out.n_acts + a) * 16 + 2 * g) = {
                      value[a], value[2 + a]};
                  if (lane == 0) out.steps[block * out.n_acts + a] = steps[a];
                }
              });
}

}  // namespace thermo
