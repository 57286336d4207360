// Attention of up to 64 rows: one warp multiplies 16 slots at a time with all query heads of a kv head, of a
// row or of a few, 8 * kTiles queries. The products are turned over, S^T = K Q^T and O^T = V^T P^T, so that
// slots and dims fill the 16 rows of an mma and 8 queries its columns: nothing is computed for queries that
// are not there, and O needs 64 registers for 8 queries of 256 dims. A column of an mma does not depend on
// the others.
//
// Each warp has its own 16 keys and 16 values in shared memory and copies the next ones as soon as it has
// read these; no warp waits for another until the end of a part, when the block adds up its warps. 8 warps
// keep 128 KiB in flight on a multiprocessor. Slots that were there before the step are fetched before the
// kernel in front has ended. The arithmetic is described in attention_parts.cuh.
#pragma once

#include <climits>

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

// Block (tile of rows and kv head, i) does parts i, i + gridDim.y, ..
template <int kDim, int kTiles>
__global__ void __launch_bounds__(32 * kMaxFewWarps, 1)
    attend_few_kernel(const __grid_constant__ DeviceAttentionArgs a, AttentionTiling tiling) {
  constexpr int kSteps = kDim / 16;
  extern __shared__ __align__(128) std::byte shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n_warps = blockDim.x / 32, chunk = n_warps * kFewSlots, stride = a.n_splits * chunk;
  const TileQueries queries(a, tiling, blockIdx.x / a.n_head_kv, blockIdx.x % a.n_head_kv);
  std::byte* const keys = shared + warp * kFewWarpBytes<kDim, kTiles>;
  std::byte* const values = keys + kFewSlots * kDim * 2;
  const MatrixLane<kDim> key_lane(keys, 0, false, lane), value_lane(values, 0, true, lane);

  allow_next();
  bool waited = false;
  const auto wait_once = [&] {
    if (!waited) wait_for_inputs();
    waited = true;
  };
  // The rows of the tile. They were there before the kernels in front of this one started.
  __shared__ RowView views[32];
  __shared__ int groups[32];
  if (threadIdx.x < 32) {
    groups[lane] = lane < queries.n_rows ? a.rows.group[queries.first_row + lane] : -1;
    views[lane] = groups[lane] >= 0 ? view_of(a, queries.first_row + lane, kFewSlots) : RowView{};
  }
  __syncthreads();

  uint32_t q[kTiles][kSteps][2];
  bool has_queries = false;
#pragma unroll 1
  for (int part = blockIdx.y; part < a.n_splits; part += gridDim.y) {
    const bool in_use =
        groups[lane] >= 0 && PartRange(views[lane].lo, views[lane].hi, chunk, a.n_splits).has(part);
    if (!__any_sync(0xffffffffu, in_use)) continue;
    float sums[kSteps][kTiles][4] = {};
    float top[kTiles][2], total[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) top[n][0] = top[n][1] = -INFINITY, total[n][0] = total[n][1] = 0.0f;

    // Rows of one sequence together, then each of them that has a tail alone: `turn` is its number or -1.
    for (int first = 0, next_turn = -1; first < queries.n_rows;) {
      const int group = groups[first], turn = next_turn;
      if (group < 0) break;  // padding comes last
      const unsigned members = __ballot_sync(0xffffffffu, groups[lane] == group);
      const RowView& view = views[lane];
      // Where the walk begins and ends, and from where on a row sees nothing of it.
      const bool member = turn < 0 ? groups[lane] == group : lane == turn;
      const int row_end = !member ? 0 : turn < 0 ? view.tail : view.hi;
      int begin = !member ? INT_MAX : turn < 0 ? view.lo : max(view.lo, view.tail), end = row_end;
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
        begin = min(begin, __shfl_xor_sync(0xffffffffu, begin, mask));
        end = max(end, __shfl_xor_sync(0xffffffffu, end, mask));
      }
      const int past = views[first].past;
      const unsigned tails = __ballot_sync(0xffffffffu, view.tail < view.hi) & members & ~0u << (turn + 1);
      next_turn = __ffs(static_cast<int>(tails)) - 1;
      if (tails == 0) first = 32 - __clz(static_cast<int>(members));
      int slot = first_in_turn(begin / chunk, part, a.n_splits) * chunk + warp * kFewSlots;
      if (slot + kFewSlots <= begin) slot += stride;
      if (slot >= end) continue;

      const int sequence = a.rows.group_sequence[group];
      const PagedHead k_head = paged_head(a.kv, false, sequence, a.n_head_kv, queries.kv_head, kDim),
                      v_head = paged_head(a.kv, true, sequence, a.n_head_kv, queries.kv_head, kDim);
      const auto stage = [&](KvType type, std::byte* to, const PagedHead& head, int from) {
        if (from < end) {
          if (turn < 0) {
            stage_slots<kDim, kFewSlots, 32>(type, to, head, from, end, lane);
          } else {
            const int position = from + lane % kFewSlots;
            const uint64_t mine =
                position < end ? reinterpret_cast<uint64_t>(head.at(views[turn].slot_of(position))) : 0;
            stage_gathered<kDim, kFewSlots>(type, to, mine, lane);
          }
        }
        copy_commit();
      };
      if (turn >= 0 || min(slot + kFewSlots, end) > past) wait_once();
      stage(a.kv.k_type, keys, k_head, slot);
      stage(a.kv.v_type, values, v_head, slot);
      wait_once();
      if (!has_queries) {
        has_queries = true;
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
      QueryReach reach[kTiles][2];  // of the lane's queries
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int query = 8 * n + 2 * t + j, row = queries.has(query) ? query / queries.per_kv : 31;
          reach[n][j] = {views[row].lo, __shfl_sync(0xffffffffu, row_end, row)};
        }

#pragma unroll 1
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
        stage(a.kv.k_type, keys, k_head, slot + stride);

        uint32_t p[kTiles][2];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          float shrink[2];
          weigh_scores(score[n], other[n], slot + g, reach[n][0], reach[n][1], top[n], total[n], shrink);
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
        stage(a.kv.v_type, values, v_head, slot + stride);
      }
      copy_wait<0>();
      __syncwarp();
    }
    wait_once();

    // Add up the warps.
    constexpr int kStep = kDim + 4;  // of a query; the lanes of a store fall into different banks
    float* const own = reinterpret_cast<float*>(keys);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int query = 8 * n + 2 * t + j;
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2)
          total[n][j] += __shfl_xor_sync(0xffffffffu, total[n][j], mask);
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
    __syncthreads();
  }
  wait_once();
}

}  // namespace thermo
