// Attention of many queries: a block takes 64 queries that read one kv head (8 rows of 8 heads each), 16 per
// warp, and walks over the cache 64 slots at a time. Queries, keys and values lie in shared memory; the
// values of a tile are copied while its scores are computed, the next keys while the values are added. Two
// blocks share a multiprocessor, so one multiplies while the other waits. Later rows, which see more, come
// first.
#pragma once

#include "device/launch.cuh"
#include "kernels/attention/attention_stage.cuh"

namespace thermo {

inline constexpr int kManyQueries = 64;
inline constexpr int kManySlots = 64;
inline constexpr int kManyThreads = 128;

// Queries, keys, values; in the end the sums.
template <int kDim>
constexpr int kManySharedBytes = (kManyQueries + 2 * kManySlots) * kDim * 2;

template <int kDim>
__global__ void __launch_bounds__(kManyThreads, 2)
    attend_many_kernel(const __grid_constant__ DeviceAttentionArgs a, AttentionTiling tiling) {
  constexpr int kSteps = kDim / 16, kTiles = kManySlots / 8;
  extern __shared__ __align__(128) std::byte shared[];
  std::byte* const keys = shared + kManyQueries * kDim * 2;
  std::byte* const values = keys + kManySlots * kDim * 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n_tiles = gridDim.x / a.n_head_kv, part = blockIdx.y;
  const TileQueries queries(a, tiling, n_tiles - 1 - blockIdx.x / a.n_head_kv, blockIdx.x % a.n_head_kv);
  const MatrixLane<kDim> query_lane(shared, 16 * warp, false, lane), key_lane(keys, 0, true, lane),
      value_lane(values, 0, false, lane);

  allow_next();
  wait_for_inputs();
  const float scale = a.scale * kLog2E;
  // Some loads at a time, then their stores: the compiler does not move loads ahead of stores.
  constexpr int kPieces = kManyQueries * (kDim / 8) / kManyThreads, kBatch = kPieces < 4 ? kPieces : 4;
#pragma unroll 1
  for (int first = 0; first < kPieces; first += kBatch) {
    float4 x[kBatch][2];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int i = threadIdx.x + (first + n) * kManyThreads, query = i / (kDim / 8), piece = i % (kDim / 8);
      x[n][0] = x[n][1] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (!queries.has(query)) continue;
      const float4* const from = reinterpret_cast<const float4*>(queries.q(a, query) + piece * 8);
      x[n][0] = from[0], x[n][1] = from[1];
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int i = threadIdx.x + (first + n) * kManyThreads, query = i / (kDim / 8), piece = i % (kDim / 8);
      const float4 u = x[n][0], v = x[n][1];
      *reinterpret_cast<uint4*>(shared + piece_offset<kDim>(query, piece)) = {
          pack_halves(u.x * scale, u.y * scale), pack_halves(u.z * scale, u.w * scale),
          pack_halves(v.x * scale, v.y * scale), pack_halves(v.z * scale, v.w * scale)};
    }
  }

  float sums[2 * kSteps][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {};
  const int rows[2] = {queries.row(16 * warp + g), queries.row(16 * warp + g + 8)};  // of the lane's queries
  const int row_end = queries.first_row + queries.n_rows;
  bool any = a.n_splits == 1;
  for (int row = queries.first_row; row < row_end;) {
    if (a.rows.group[row] < 0) break;  // padding comes last
    const Segment s = segment_of(a, tiling, row);
    row = s.row_end;
    if (part >= s.n_parts) continue;
    any = true;
    const int begin = s.begin + part * s.part, end = min(s.end, begin + s.part);
    const int sequence = a.rows.group_sequence[s.group];
    const PagedHead k_head = paged_head(a.kv, false, sequence, a.n_head_kv, queries.kv_head, kDim),
                    v_head = paged_head(a.kv, true, sequence, a.n_head_kv, queries.kv_head, kDim);
    QueryReach reach[2] = {reach_of(a, s, rows[0]), reach_of(a, s, rows[1])};
    reach[0].hi = min(reach[0].hi, end);
    reach[1].hi = min(reach[1].hi, end);
    // Slots that every query of the warp sees without a look at the tree.
    int open_lo = max(reach[0].lo, reach[1].lo), open_hi = min(reach[0].hi, reach[1].hi);
    if (s.uncommitted) open_hi = min(open_hi, s.past);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      open_lo = max(open_lo, __shfl_xor_sync(0xffffffffu, open_lo, mask));
      open_hi = min(open_hi, __shfl_xor_sync(0xffffffffu, open_hi, mask));
    }

    stage_slots<kDim, kManySlots, kManyThreads>(a.kv.k_type, keys, k_head, begin, end, threadIdx.x);
    copy_commit();
    for (int slot = begin; slot < end; slot += kManySlots) {
      copy_wait<0>();
      __syncthreads();  // the keys are there, and all warps are through with the values
      stage_slots<kDim, kManySlots, kManyThreads>(a.kv.v_type, values, v_head, slot, end, threadIdx.x);
      copy_commit();
      float score[kTiles][4] = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t q[4];
        load_matrices(q, query_lane.at(0, i));
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
          uint32_t k[4];
          load_matrices(k, key_lane.at(n, i));
          mma_16816(score[2 * n], q, k[0], k[1]);
          mma_16816(score[2 * n + 1], q, k[2], k[3]);
        }
      }
      if (slot < open_lo || slot + kManySlots > open_hi) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            if (!sees(a, s, reach[c / 2], rows[c / 2], slot + 8 * n + 2 * t + c % 2)) score[n][c] = -INFINITY;
      }
      float shrink[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float now = top[j];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) now = fmaxf(now, fmaxf(score[n][2 * j], score[n][2 * j + 1]));
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
        const float base = now == -INFINITY ? 0.0f : now;
        shrink[j] = exp2_fast(top[j] - base);
        top[j] = now;
        total[j] *= shrink[j];
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int c = 2 * j; c < 2 * j + 2; ++c) {
            score[n][c] = exp2_fast(score[n][c] - base);
            total[j] += score[n][c];
          }
      }
      if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[i][c] *= shrink[c / 2];
      }
      uint32_t p[kTiles / 2][4];
#pragma unroll
      for (int n = 0; n < kTiles / 2; ++n) {
        p[n][0] = pack_halves(score[2 * n][0], score[2 * n][1]);
        p[n][1] = pack_halves(score[2 * n][2], score[2 * n][3]);
        p[n][2] = pack_halves(score[2 * n + 1][0], score[2 * n + 1][1]);
        p[n][3] = pack_halves(score[2 * n + 1][2], score[2 * n + 1][3]);
      }
      copy_wait<0>();
      __syncthreads();  // the values are there, and all warps are through with the keys
      if (slot + kManySlots < end)
        stage_slots<kDim, kManySlots, kManyThreads>(a.kv.k_type, keys, k_head, slot + kManySlots, end,
                                                    threadIdx.x);
      copy_commit();
#pragma unroll
      for (int n = 0; n < kTiles / 2; ++n)
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          uint32_t v[4];
          load_transposed(v, value_lane.at(n, i));
          mma_16816(sums[2 * i], p[n], v[0], v[1]);
          mma_16816(sums[2 * i + 1], p[n], v[2], v[3]);
        }
    }
  }
  if (!any) return;

  // Through shared memory, so that whole lines are written.
  constexpr int kStep = kDim + 8;
  static_assert(kManyQueries * kStep * 4 + 2 * kManyQueries * 4 <= kManySharedBytes<kDim>);
  float* const all = reinterpret_cast<float*>(shared);
  float* const stats = all + kManyQueries * kStep;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    total[j] += __shfl_xor_sync(0xffffffffu, total[j], 1);
    total[j] += __shfl_xor_sync(0xffffffffu, total[j], 2);
    const int query = 16 * warp + g + 8 * j;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i)
      *reinterpret_cast<float2*>(all + query * kStep + 8 * i + 2 * t) = {sums[i][2 * j], sums[i][2 * j + 1]};
    if (t == 0) stats[2 * query] = top[j], stats[2 * query + 1] = total[j];
  }
  __syncthreads();
  const int n_queries = queries.n_rows * queries.per_kv;
  if (a.n_splits == 1) {
    constexpr int kGates = 8;
#pragma unroll 1
    for (int first = threadIdx.x; first < n_queries * (kDim / 4); first += kGates * kManyThreads) {
      float4 gate[kGates];
#pragma unroll
      for (int n = 0; n < kGates; ++n) {
        const int i = first + n * kManyThreads, query = i / (kDim / 4);
        if (query < n_queries)
          gate[n] = load_gate(a, queries.row(query), queries.head(query), i % (kDim / 4) * 4);
      }
#pragma unroll
      for (int n = 0; n < kGates; ++n) {
        const int i = first + n * kManyThreads, query = i / (kDim / 4), d = i % (kDim / 4) * 4;
        if (query >= n_queries) break;
        const float sum = stats[2 * query + 1], f = sum > 0.0f ? 1.0f / sum : 0.0f;
        const float4 x = *reinterpret_cast<const float4*>(all + query * kStep + d);
        put_gated(a, queries.row(query), queries.head(query), d, {x.x * f, x.y * f, x.z * f, x.w * f},
                  gate[n]);
      }
    }
    return;
  }
  for (int i = threadIdx.x; i < n_queries * (kDim / 4); i += kManyThreads) {
    const int query = i / (kDim / 4), d = i % (kDim / 4) * 4;
    const int row = queries.row(query), head = queries.head(query);
    *reinterpret_cast<float4*>(part_sums(a, row, head, part) + d) =
        *reinterpret_cast<const float4*>(all + query * kStep + d);
    if (d == 0) *part_stats(a, row, head, part) = {stats[2 * query], stats[2 * query + 1]};
  }
}

}  // namespace thermo
