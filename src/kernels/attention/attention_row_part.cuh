// What attention_row.cuh is made of: what its rows see, the walk of a warp over the tiles of a part, and how
// the sums of a part get to the blocks that merge them.
#pragma once

#include "kernels/attention/attention_few.cuh"

namespace thermo {

inline constexpr int kRowWarps = 8;
inline constexpr int kRowQueries = 8;  // of a kv head, at most
inline constexpr int kRowPart = kRowWarps * kFewSlots;

template <int kDim, int kRows>
struct RowShared {
  static constexpr int kQStep = kDim + 8;  // halves: rows of ldmatrix fall into different banks
  std::byte stages[kRowWarps][kFewWarpBytes<kDim, kRows>];
  half q[kRows][kRowQueries][kQStep];
  half fresh[kRows][2][kDim];  // new key and value, as the cache has them
  float norms[2][kDim];
  float2 turns[kRows][kDim / 2];  // cos, sin
  float4 merged[kRowWarps * 32];
};

// Floats of a part beside the number of the launch: sums, largest score, sum of weights.
inline constexpr int64_t row_part_entries(int dim) {
  return dim + 2;
}
__device__ __forceinline__ uint2* row_part(const DeviceAttentionArgs& a, int row, int head, int part) {
  return static_cast<uint2*>(a.tagged) +
         ((static_cast<int64_t>(row) * a.n_head + head) * a.n_splits + part) * row_part_entries(a.head_dim);
}
__device__ __forceinline__ void put_pair(uint2* to, float x, float y, uint32_t launch) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(__float_as_uint(x)),
               "r"(launch), "r"(__float_as_uint(y))
               : "memory");
}
// Whether they have come.
__device__ __forceinline__ bool look_at_pair(const uint2* from, uint32_t launch, float2& pair) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  pair = {__uint_as_float(v.x), __uint_as_float(v.z)};
  return v.y == launch && v.w == launch;
}

// The lane's elements of a new key or value as halves with the cache's rounding to `fresh`, and if `keep` to
// the cache.
template <int kPer>
__device__ __forceinline__ void store_fresh(KvType type, bool keep, std::byte* head, const float (&x)[kPer],
                                            int lane, half* fresh) {
  __align__(16) half rounded[kPer];
  if (type == KvType::F16) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) rounded[j] = __float2half_rn(x[j]);
    if (keep) {
#pragma unroll
      for (int j = 0; j < kPer; j += 2)
        *reinterpret_cast<half2*>(reinterpret_cast<half*>(head) + lane * kPer + j) =
            *reinterpret_cast<const half2*>(rounded + j);
    }
  } else if (type == KvType::BF16) {
#pragma unroll
    for (int j = 0; j < kPer; j += 2) {
      const uint32_t bits = bf16_bits(x[j]) | static_cast<uint32_t>(bf16_bits(x[j + 1])) << 16;
      if (keep) *reinterpret_cast<uint32_t*>(head + 2 * (lane * kPer + j)) = bits;
      *reinterpret_cast<uint32_t*>(rounded + j) = halves_of_bf16(bits);
    }
  } else if (type == KvType::Q4_0) {
    constexpr int kLanes = 32 / kPer;  // of a block; the second half of them has the high halves of its bytes
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int j = 0; j < kPer; ++j) low = fminf(low, x[j]), high = fmaxf(high, x[j]);
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      low = fminf(low, __shfl_xor_sync(0xffffffffu, low, mask));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, mask));
    }
    const float d = q4_scale(low, high), inverse = q4_inverse(d);
    const half scale = __float2half_rn(d);
    std::byte* const block = head + lane / kLanes * 18;
    if (keep && lane % kLanes == 0) *reinterpret_cast<half*>(block) = scale;
#pragma unroll
    for (int j = 0; j < kPer; j += 2) {
      const int q0 = q4_code(x[j], inverse), q1 = q4_code(x[j + 1], inverse), pair = q0 | q1 << 8,
                other = __shfl_xor_sync(0xffffffffu, pair, kLanes / 2);
      if (keep && lane % kLanes < kLanes / 2)
        *reinterpret_cast<uint16_t*>(block + 2 + lane % kLanes * kPer + j) =
            static_cast<uint16_t>(pair | other << 4);
      rounded[j] = __hmul(__int2half_rn(q0 - 8), scale);
      rounded[j + 1] = __hmul(__int2half_rn(q1 - 8), scale);
    }
  } else {
    float top = 0.0f;
#pragma unroll
    for (int j = 0; j < kPer; ++j) top = fmaxf(top, fabsf(x[j]));
#pragma unroll
    for (int mask = 1; mask < 32 / kPer; mask *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
    const float d = top / 127.0f;
    const half scale = __float2half_rn(d);
    std::byte* const block = head + lane * kPer / 32 * 34;
    if (keep && lane * kPer % 32 == 0) *reinterpret_cast<half*>(block) = scale;
#pragma unroll
    for (int j = 0; j < kPer; j += 2) {
      const int q0 = d > 0.0f ? __float2int_rn(x[j] / d) : 0,
                q1 = d > 0.0f ? __float2int_rn(x[j + 1] / d) : 0;
      if (keep)
        *reinterpret_cast<uint16_t*>(block + 2 + lane * kPer % 32 + j) =
            static_cast<uint16_t>((q0 & 255) | (q1 & 255) << 8);
      rounded[j] = __hmul(__int2half_rn(q0), scale);
      rounded[j + 1] = __hmul(__int2half_rn(q1), scale);
    }
  }
#pragma unroll
  for (int j = 0; j < kPer; j += 2)
    *reinterpret_cast<half2*>(fresh + lane * kPer + j) = *reinterpret_cast<const half2*>(rounded + j);
}

// What a row sees: positions begin .. end - 1 of its sequence. Those from `past` on are of this step: the
// last one is the row itself, one before that is the row before.
struct RowReach {
  int sequence = 0, position = 0, past = 0, begin = 0, end = 0;
  int slot = 0;        // where its key and value go
  PartRange parts{0};  // that it has; padding has none

  __device__ __forceinline__ void find_parts(const DeviceAttentionArgs& a) {
    begin = a.window > 0 ? max(0, position - a.window + 1) : 0;
    parts = PartRange(begin, end, kRowPart, a.n_splits);
  }
  // Whether `part` has this position.
  __device__ __forceinline__ bool sees(int at, int part, int n_splits) const {
    return parts.has(part) && part == at / kRowPart % n_splits;
  }
};

// False: all rows are padding. The first row is of the first group, the second one of that or of the next:
// all numbers are asked for together, since the page table has to be read after them, and slots after that.
template <int kRows>
__device__ __forceinline__ bool find_reach(const DeviceAttentionArgs& a, RowReach (&reach)[kRows]) {
  const DeviceRows& rows = a.rows;
  const int group = rows.group[0];
  RowReach& first = reach[0];
  first.past = first.slot = rows.group_past[0];
  first.position = rows.position[0];
  first.sequence = rows.group_sequence[0];
  first.end = first.past + 1;
  if constexpr (kRows == 2) {
    RowReach& second = reach[1];
    const int its_group = rows.group[1], other_past = rows.group_past[1],
              other_sequence = rows.group_sequence[1];
    second.position = rows.position[1];
    bool chain = its_group == 0;
    if (rows.any_uncommitted) {
      const bool uncommitted = rows.group_uncommitted[0] != 0, child = (rows.ancestors[1] & 1) != 0;
      chain = chain && (child || !uncommitted);
    }
    second.past = its_group == 1 ? other_past : first.past;
    second.sequence = its_group == 1 ? other_sequence : first.sequence;
    second.slot = its_group == 1 ? other_past : first.past + 1;
    second.end = second.past + (chain ? 2 : 1);
    if (its_group >= 0) second.find_parts(a);
  }
  first.find_parts(a);
  return group >= 0;
}

// Two rows: the block's part of the second one. Its first part is at the block after the last one with a part
// of the first row.
__device__ __forceinline__ int second_part(const PartRange& first, const PartRange& second, int block,
                                           int n_splits) {
  return (block + second.first - first.first - min(first.n, n_splits) + 2 * n_splits) % n_splits;
}

// The tiles that a warp of a block attends.
struct RowWalk {
  PagedHead k_head, v_head;
  int begin, end, past;  // as in RowReach
  int slot;              // the next tile
};

template <int kDim>
__device__ __forceinline__ RowWalk walk_of(const DeviceAttentionArgs& a, const RowReach& reach, int end,
                                           int kv_head, int part, int warp) {
  RowWalk walk{paged_head(a.kv, false, reach.sequence, a.n_head_kv, kv_head, kDim),
               paged_head(a.kv, true, reach.sequence, a.n_head_kv, kv_head, kDim),
               reach.begin,
               end,
               reach.past,
               first_in_turn(reach.begin / kRowPart, part, a.n_splits) * kRowPart + warp * kFewSlots};
  if (walk.slot + kFewSlots <= walk.begin) walk.slot += a.n_splits * kRowPart;
  return walk;
}

// Of the tile at `slot`. The step's own slots are left out: `fresh` has them.
template <int kDim>
__device__ __forceinline__ void stage_keys(const DeviceAttentionArgs& a, const RowWalk& walk, int slot,
                                           std::byte* keys, int lane) {
  if (slot < walk.end)
    stage_slots<kDim, kFewSlots, 32>(a.kv.k_type, keys, walk.k_head, slot, walk.past, lane);
  copy_commit();
}
template <int kDim>
__device__ __forceinline__ void stage_values(const DeviceAttentionArgs& a, const RowWalk& walk, int slot,
                                             std::byte* values, int lane) {
  if (slot < walk.end)
    stage_slots<kDim, kFewSlots, 32>(a.kv.v_type, values, walk.v_head, slot, walk.past, lane);
  copy_commit();
}

// A part of row `row`, or with kTiles 2 of both rows, whose first tiles are on their way. `reach`: of these.
template <int kTiles, int kDim, int kRows>
__device__ __forceinline__ void attend_part(const DeviceAttentionArgs& a, RowShared<kDim, kRows>& shared,
                                            RowWalk walk, const QueryReach (&reach)[kTiles],
                                            const bool (&publish)[kTiles], int row, int part, int kv_head,
                                            uint32_t launch) {
  constexpr int kSteps = kDim / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int per_kv = a.n_head / a.n_head_kv, stride = a.n_splits * kRowPart;
  std::byte* const keys = shared.stages[warp];
  std::byte* const values = keys + kFewSlots * kDim * 2;
  const MatrixLane<kDim> key_lane(keys, 0, false, lane), value_lane(values, 0, true, lane);
  const bool busy = walk.slot < walk.end;

  // Queries in registers, or two steps of them: registers hold no more than 256 columns beside the sums.
  constexpr bool kHeld = kTiles * kDim <= 256;
  uint32_t q[kTiles][kHeld ? kSteps : 2][2];
  const uint32_t q_at =
      static_cast<uint32_t>(__cvta_generic_to_shared(&shared.q[row][lane % 8][0])) + (lane / 8) * 16;
  const auto load_queries = [&](int step) {
    const int to = kHeld ? step : 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      uint32_t v[4];
      load_matrices(v, q_at + n * static_cast<uint32_t>(sizeof(shared.q[0])) + step * 32);
      q[n][to][0] = v[0], q[n][to][1] = v[1], q[n][to + 1][0] = v[2], q[n][to + 1][1] = v[3];
    }
  };
  if constexpr (kHeld) {
#pragma unroll
    for (int i = 0; i < kSteps; i += 2) load_queries(i);
  }
  float sums[kTiles][kSteps][4] = {}, top[kTiles][2], total[kTiles][2] = {};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) top[n][0] = top[n][1] = -INFINITY;
  const auto put_fresh = [&](std::byte* stage, int which) {
#pragma unroll
    for (int back = kRows - 1; back >= 0; --back) {
      const int at = walk.end - 1 - back;
      if (at < walk.past || at < walk.slot || at >= walk.slot + kFewSlots) continue;
      if (lane < kDim / 8)
        *reinterpret_cast<uint4*>(stage + piece_offset<kDim>(at - walk.slot, lane)) =
            reinterpret_cast<const uint4*>(shared.fresh[row + kTiles - 1 - back][which])[lane];
      __syncwarp();
    }
  };
#pragma unroll 1
  for (; walk.slot < walk.end; walk.slot += stride) {
    const int slot = walk.slot;
    copy_wait<1>();
    __syncwarp();
    put_fresh(keys, 0);
    float score[kTiles][4] = {}, other[kTiles][4] = {};  // two chains of sums: half the latency
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (!kHeld && i % 2 == 0) load_queries(i);
      const int at = kHeld ? i : i % 2;
      uint32_t k[4];
      load_matrices(k, key_lane.at(0, i));
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        mma_16816(i % 2 == 0 ? score[n] : other[n], k, q[n][at][0], q[n][at][1]);
    }
    __syncwarp();
    stage_keys<kDim>(a, walk, slot + stride, keys, lane);
    uint32_t p[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float shrink[2];
      weigh_scores(score[n], other[n], slot + g, reach[n], reach[n], top[n], total[n], shrink);
      p[n][0] = turn_matrix(pack_halves(score[n][0], score[n][1]));
      p[n][1] = turn_matrix(pack_halves(score[n][2], score[n][3]));
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[n][i][c] *= shrink[c % 2];
    }
    copy_wait<1>();
    __syncwarp();
    put_fresh(values, 1);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t v[4];
      load_transposed(v, value_lane.at(0, i));
#pragma unroll
      for (int n = 0; n < kTiles; ++n) mma_16816(sums[n][i], v, p[n][0], p[n][1]);
    }
    __syncwarp();
    stage_values<kDim>(a, walk, slot + stride, values, lane);
  }
  copy_wait<0>();
  __syncwarp();

  // Add up the warps.
  constexpr int kStep = kDim + 4;  // of a query; the lanes of a store fall into different banks
  constexpr int kStats = 8 * kTiles * kStep;
  float* const own = reinterpret_cast<float*>(keys);
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int query = 8 * n + 2 * t + j;
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) total[n][j] += __shfl_xor_sync(0xffffffffu, total[n][j], mask);
      if (busy) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          own[query * kStep + 16 * i + g] = sums[n][i][j];
          own[query * kStep + 16 * i + g + 8] = sums[n][i][2 + j];
        }
      }
      if (g == 0) *reinterpret_cast<float2*>(own + kStats + 2 * query) = {top[n][j], total[n][j]};
    }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (!publish[n]) continue;
#pragma unroll 2
    for (int i = threadIdx.x; i < per_kv * (kDim / 4); i += 32 * kRowWarps) {
      const int query = i / (kDim / 4), d = i % (kDim / 4) * 4;
      float2 stats[kRowWarps];
      float4 y[kRowWarps];
      float all_top = -INFINITY, all_total = 0.0f;
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) {
        const float* const area = reinterpret_cast<const float*>(shared.stages[w]);
        stats[w] = *reinterpret_cast<const float2*>(area + kStats + 2 * (8 * n + query));
        y[w] = *reinterpret_cast<const float4*>(area + (8 * n + query) * kStep + d);
      }
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) all_top = fmaxf(all_top, stats[w].x);
      float4 x{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) {
        if (stats[w].x == -INFINITY) continue;  // had no slots, left no sums
        const float f = exp2_fast(stats[w].x - all_top);
        x.x = fmaf(f, y[w].x, x.x), x.y = fmaf(f, y[w].y, x.y), x.z = fmaf(f, y[w].z, x.z),
        x.w = fmaf(f, y[w].w, x.w);
        all_total = fmaf(f, stats[w].y, all_total);
      }
      uint2* const to = row_part(a, row + n, kv_head * per_kv + query, part);
      put_pair(to + d, x.x, x.y, launch);
      put_pair(to + d + 2, x.z, x.w, launch);
      if (d == 0) put_pair(to + kDim, all_top, all_total, launch);
    }
  }
}

}  // namespace thermo
