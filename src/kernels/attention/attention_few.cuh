// Attention of few queries over a long cache: one warp multiplies 16 slots at a time with all query heads of
// a kv head (and a draft row or two), 8 * kTiles queries. The products are turned over, S^T = K Q^T and O^T =
// V^T P^T, so that slots and dims fill the 16 rows of an mma and 8 queries its columns: nothing is computed
// for queries that are not there, and O needs 64 registers for 8 queries of 256 dims.
//
// Each warp has its own 16 keys and 16 values in shared memory and copies the next ones as soon as it has
// read these; no warp waits for another until the end, when the block adds up its warps. 8 warps keep 128 KiB
// in flight on a multiprocessor. Slots that were there before the step are fetched before the kernel in front
// has ended.
#pragma once

#include "device/launch.cuh"
#include "kernels/attention/attention_stage.cuh"

namespace thermo {

inline constexpr int kFewSlots = 16;
inline constexpr int kMaxFewWarps = 8;

// Shared memory of a warp: keys and values, in the end its sums and the two numbers of every query.
template <int kDim, int kTiles>
constexpr int kFewWarpBytes = 2 * kFewSlots* kDim * 2 > 8 * kTiles*(kDim + 4) * 4 + 8 * kTiles * 8
                                  ? 2 * kFewSlots* kDim * 2
                                  : 8 * kTiles*(kDim + 4) * 4 + 8 * kTiles * 8;

// Turns an 8 x 8 matrix of halves over: (g, 2t), (g, 2t + 1) becomes (2t, g), (2t + 1, g).
__device__ __forceinline__ uint32_t turn_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

template <int kDim, int kTiles>
__global__ void __launch_bounds__(32 * kMaxFewWarps, 1)
    attend_few_kernel(const __grid_constant__ DeviceAttentionArgs a, AttentionTiling tiling) {
  constexpr int kSteps = kDim / 16;
  extern __shared__ __align__(128) std::byte shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n_warps = blockDim.x / 32, part = blockIdx.y;
  const TileQueries queries(a, tiling, blockIdx.x / a.n_head_kv, blockIdx.x % a.n_head_kv);
  std::byte* const keys = shared + warp * kFewWarpBytes<kDim, kTiles>;
  std::byte* const values = keys + kFewSlots * kDim * 2;
  const MatrixLane<kDim> key_lane(keys, 0, false, lane), value_lane(values, 0, true, lane);

  uint32_t q[kTiles][kSteps][2];
  float sums[kSteps][kTiles][4] = {};
  float top[kTiles][2], total[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) top[n][0] = top[n][1] = -INFINITY, total[n][0] = total[n][1] = 0.0f;

  allow_next();
  bool waited = false, any = false;
  const auto wait_once = [&] {
    if (!waited) wait_for_inputs();
    waited = true;
  };
  const int row_end = queries.first_row + queries.n_rows;
  for (int row = queries.first_row; row < row_end;) {
    if (a.rows.group[row] < 0) break;  // padding comes last
    const Segment s = segment_of(a, tiling, row);
    row = s.row_end;
    if (part >= s.n_parts) continue;
    const int end = min(s.end, s.begin + (part + 1) * s.part), stride = n_warps * kFewSlots;
    const int sequence = a.rows.group_sequence[s.group];
    const PagedHead k_head = paged_head(a.kv, false, sequence, a.n_head_kv, queries.kv_head, kDim),
                    v_head = paged_head(a.kv, true, sequence, a.n_head_kv, queries.kv_head, kDim);
    const auto stage_keys = [&](int slot) {
      if (slot < end) stage_slots<kDim, kFewSlots, 32>(a.kv.k_type, keys, k_head, slot, end, lane);
      copy_commit();
    };
    const auto stage_values = [&](int slot) {
      if (slot < end) stage_slots<kDim, kFewSlots, 32>(a.kv.v_type, values, v_head, slot, end, lane);
      copy_commit();
    };
    int slot = s.begin + part * s.part + warp * kFewSlots;
    if (min(slot + kFewSlots, end) > s.past) wait_once();
    stage_keys(slot);
    stage_values(slot);
    wait_once();
    if (!any) {
      any = true;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const bool has = queries.has(8 * n + g);
        const float* const from = queries.q(a, has ? 8 * n + g : 0) + 2 * t;
        const float scale = has ? a.scale * kLog2E : 0.0f;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const float2 x = *reinterpret_cast<const float2*>(from + 16 * i),
                       y = *reinterpret_cast<const float2*>(from + 16 * i + 8);
          q[n][i][0] = pack_halves(x.x * scale, x.y * scale);
          q[n][i][1] = pack_halves(y.x * scale, y.y * scale);
        }
      }
    }
    int rows[kTiles][2];  // of the lane's queries
    QueryReach reach[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        rows[n][j] = queries.row(8 * n + 2 * t + j);
        reach[n][j] = reach_of(a, s, rows[n][j]);
        reach[n][j].hi = min(reach[n][j].hi, end);
      }

    for (; slot < end; slot += stride) {
      copy_wait<1>();
      __syncwarp();
      float score[kTiles][4] = {}, other[kTiles][4] = {};  // two chains of sums: half the latency
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t k[4];
        load_matrices(k, key_lane.at(0, i));
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          mma_16816(i % 2 == 0 ? score[n] : other[n], k, q[n][i][0], q[n][i][1]);
      }
      __syncwarp();
      stage_keys(slot + stride);

      uint32_t p[kTiles][2];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float shrink[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x = score[n][j] + other[n][j], y = score[n][2 + j] + other[n][2 + j];
          if (!sees(a, s, reach[n][j], rows[n][j], slot + g)) x = -INFINITY;
          if (!sees(a, s, reach[n][j], rows[n][j], slot + g + 8)) y = -INFINITY;
          float now = fmaxf(fmaxf(x, y), top[n][j]);
#pragma unroll
          for (int mask = 4; mask < 32; mask *= 2) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, mask));
          const float base = now == -INFINITY ? 0.0f : now;
          shrink[j] = exp2_fast(top[n][j] - base);
          top[n][j] = now;
          score[n][j] = exp2_fast(x - base);
          score[n][2 + j] = exp2_fast(y - base);
          total[n][j] = total[n][j] * shrink[j] + score[n][j] + score[n][2 + j];
        }
        p[n][0] = turn_matrix(pack_halves(score[n][0], score[n][1]));
        p[n][1] = turn_matrix(pack_halves(score[n][2], score[n][3]));
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[i][n][c] *= shrink[c % 2];
      }
      copy_wait<1>();
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t v[4];
        load_transposed(v, value_lane.at(0, i));
#pragma unroll
        for (int n = 0; n < kTiles; ++n) mma_16816(sums[i][n], v, p[n][0], p[n][1]);
      }
      __syncwarp();
      stage_values(slot + stride);
    }
    copy_wait<0>();
    __syncwarp();
  }
  wait_once();
  if (!any) return;

  // Add up the warps.
  constexpr int kStep = kDim + 4;  // of a query; the lanes of a store fall into different banks
  float* const own = reinterpret_cast<float*>(keys);
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int query = 8 * n + 2 * t + j;
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) total[n][j] += __shfl_xor_sync(0xffffffffu, total[n][j], mask);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        own[query * kStep + 16 * i + g] = sums[i][n][j];
        own[query * kStep + 16 * i + g + 8] = sums[i][n][2 + j];
      }
      if (g == 0) {
        own[8 * kTiles * kStep + 2 * query] = top[n][j];
        own[8 * kTiles * kStep + 2 * query + 1] = total[n][j];
      }
    }
  __syncthreads();
  const auto area = [&](int w) {
    return reinterpret_cast<const float*>(shared + w * kFewWarpBytes<kDim, kTiles>);
  };
  for (int i = threadIdx.x; i < queries.n_rows * queries.per_kv * (kDim / 4); i += blockDim.x) {
    const int query = i / (kDim / 4), d = i % (kDim / 4) * 4;
    float all_top = -INFINITY, all_total = 0.0f;
    for (int w = 0; w < n_warps; ++w) all_top = fmaxf(all_top, area(w)[8 * kTiles * kStep + 2 * query]);
    const float base = all_top == -INFINITY ? 0.0f : all_top;
    float4 x{0.0f, 0.0f, 0.0f, 0.0f};
    for (int w = 0; w < n_warps; ++w) {
      const float* const stats = area(w) + 8 * kTiles * kStep + 2 * query;
      const float f = exp2_fast(stats[0] - base);
      const float4 y = *reinterpret_cast<const float4*>(area(w) + query * kStep + d);
      x.x = fmaf(f, y.x, x.x), x.y = fmaf(f, y.y, x.y), x.z = fmaf(f, y.z, x.z), x.w = fmaf(f, y.w, x.w);
      all_total = fmaf(f, stats[1], all_total);
    }
    const int row = queries.row(query), head = queries.head(query);
    *reinterpret_cast<float4*>(part_sums(a, row, head, part) + d) = x;
    if (d == 0) *part_stats(a, row, head, part) = {all_top, all_total};
  }
}

}  // namespace thermo
