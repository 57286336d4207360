// Attention of one or two decoded rows in one launch: norm and rotation of heads, the cache's new slots,
// attending, merging, gating. Three launches spend most of their time waiting for each other's results.
//
// The arithmetic is that of attention_few.cuh, bit for bit. A block has one kv head and a part of the cache;
// each prepares the queries it needs, and the block with the last part the new key and value too. What does
// not depend on the projections is done before the wait: the stored keys and values are on their way, angles
// are computed. Parts go to the blocks that merge them (one for each query head) through L2, each float
// beside the number of the launch, so that reading them is also waiting for them. All blocks of the launch
// are resident: there is one to a multiprocessor.
//
// Two rows, of one sequence or of two, have the same blocks: each has a part of either row. Parts of the
// second row begin at the block after the last part of the first, so while both have no more parts than there
// are blocks, no block has work of two rows. A block that has attends one row after the other, and reads what
// both see twice. A chain in a longer context is attended together: a block has the same part of both rows,
// reads it once, and gives each row a tile of the mma. Siblings are not, as both call their own slot by the
// same position. The second row of a chain sees the first one's key and value: a block that needs them makes
// them itself, whether or not it is the one that puts them into the cache.
//
// A token of the 35B-A3B (10 such layers, 169 slots), before rows in company had the same arithmetic: 1.438
// against 1.484 ms in three launches; at 16439 slots 1.605 against 1.659. Of the 9 us that were left at 169
// slots: queries 1.6, attending 1.2, warps 1.5, exchange and merging 3. A step of two rows took 2.32 ms with
// three launches for them and 2.15 with this one, together with faster tails of other launches.
#pragma once

#include "kernels/attention/attention_row_part.cuh"

namespace thermo {

template <int kDim, int kRows>
__global__ void __launch_bounds__(32 * kRowWarps, 1)
    attend_row_kernel(const __grid_constant__ DeviceAttentionArgs a) {
  constexpr int kPer = kDim / 32;
  constexpr bool kTwo = kRows == 2;
  static_assert(kRows == 1 || kRows == 2);
  extern __shared__ __align__(128) std::byte shared_bytes[];
  RowShared<kDim, kRows>& shared = *reinterpret_cast<RowShared<kDim, kRows>*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int kv_head = blockIdx.x, part = blockIdx.y, per_kv = a.n_head / a.n_head_kv;
  std::byte* const keys = shared.stages[warp];
  std::byte* const values = keys + kFewSlots * kDim * 2;

  touch_params(a);
  // The step's rows, the page table and the stored slots were there before the kernels in front of this one
  // started.
  RowReach reach[kRows];
  const bool any = find_reach(a, reach);
  RowReach &first = reach[0], &second = reach[kRows - 1];
  const bool chain = kTwo && second.end == second.past + 2;
  const bool together = chain && first.parts.n + second.parts.n > a.n_splits;
  const int part2 = !kTwo || together ? part : second_part(first.parts, second.parts, part, a.n_splits);
  // What the block has to do: whether it attends a row, makes its key and value, and keeps these.
  const bool attends[2] = {any && first.parts.has(part), kTwo && any && second.parts.has(part2)};
  const bool keeps[2] = {any && first.sees(first.end - 1, part, a.n_splits),
                         kTwo && any && second.sees(second.end - 1, part2, a.n_splits)};
  const bool makes[2] = {keeps[0] || (chain && any && second.sees(second.past, part2, a.n_splits)), keeps[1]};
  const bool active = attends[0] || attends[1];

  // The rows in turn, or together.
  bool turn = kTwo && !together && !attends[0];
  const auto walk_in_turn = [&] {
    if (!kTwo || !turn)
      return walk_of<kDim>(a, first, together ? second.end : first.end, kv_head, part, warp);
    return walk_of<kDim>(a, second, second.end, kv_head, part2, warp);
  };
  RowWalk walk = walk_in_turn();
  if (active) {
    stage_keys<kDim>(a, walk, walk.slot, keys, lane);
    stage_values<kDim>(a, walk, walk.slot, values, lane);
    for (int d = threadIdx.x; d < kDim; d += 32 * kRowWarps) {
      shared.norms[0][d] = __ldg(a.q_norm + d);
      shared.norms[1][d] = __ldg(a.k_norm + d);
    }
    for (int i = threadIdx.x; i < a.n_rot / 2; i += 32 * kRowWarps) {
      const float frequency = __ldg(a.inv_freq + i);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float s, c;
        sincosf(static_cast<float>(reach[r].position) * frequency, &s, &c);
        shared.turns[r][i] = {c * a.rope_magnitude, s * a.rope_magnitude};
      }
    }
  }
  allow_next();
  __syncthreads();
  wait_for_inputs();
  if (!any) return;
  const uint32_t launch = *a.launch + 1;  // memory that nobody wrote has 0

  // What the merging at the end needs: heads of the first row, then of the second.
  const auto gate_of = [&](int h) {
    const int row = kTwo && h >= per_kv ? 1 : 0;
    return load_gate(a, row, kv_head * per_kv + h - row * per_kv, 4 * threadIdx.x);
  };
  float4 gate{0.0f, 0.0f, 0.0f, 0.0f};
  if (part < kRows * per_kv && threadIdx.x < kDim / 4) gate = gate_of(part);

  if (active) {
    // Queries, then new keys and values, each row's key before its value.
    const bool from_second = !attends[0], new_from_second = !makes[0];
    const int queries = kTwo && attends[0] && attends[1] ? 2 * per_kv : per_kv;
    const int items = queries + (makes[0] ? 2 : 0) + (makes[1] ? 2 : 0);
    const int q_step = a.head_gate == HeadGate::SigmoidElement ? 2 * kDim : kDim;
    const auto row_of = [&](int item) {
      if constexpr (!kTwo) return 0;
      const bool later =
          item < queries ? from_second || item >= per_kv : new_from_second || item >= queries + 2;
      return later ? 1 : 0;
    };
    const auto query_of = [&](int item) { return kTwo && item >= per_kv ? item - per_kv : item; };
    const auto is_key = [&](int item) {
      return kTwo ? item >= queries && (item - queries) % 2 == 0 : item == queries;
    };
    const auto load = [&](int item, float(&x)[kPer]) {
      if (item >= items) return;
      const int row = row_of(item);
      const float* const from =
          (item < queries ? a.q_full + (row * a.n_head + kv_head * per_kv + query_of(item)) * q_step
                          : (is_key(item) ? a.k : a.v) + (row * a.n_head_kv + kv_head) * kDim) +
          lane * kPer;
#pragma unroll
      for (int j = 0; j < kPer; j += 2) {
        const float2 v = *reinterpret_cast<const float2*>(from + j);
        x[j] = v.x;
        x[j + 1] = v.y;
      }
    };
    const int half_rot = a.n_rot / 2, apart = half_rot / kPer, first_column = lane * kPer;
    const bool low = first_column < half_rot, turned = first_column < a.n_rot;
    const int partner = !turned ? lane : low ? lane + apart : lane - apart;
    float next[kPer];
    load(warp, next);
#pragma unroll 1
    for (int item = warp; item < items; item += kRowWarps) {
      float x[kPer];
#pragma unroll
      for (int j = 0; j < kPer; ++j) x[j] = next[j];
      load(item + kRowWarps, next);
      const int row = row_of(item);
      const bool is_query = item < queries, is_value = !is_query && !is_key(item);
      if (!is_value) {
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < kPer; ++j) square = fmaf(x[j], x[j], square);
        const float scale = rsqrtf(warp_sum(square) / static_cast<float>(kDim) + a.eps);
        const float* const weight = shared.norms[is_query ? 0 : 1] + first_column;
        const float2* const turns = shared.turns[row] + (low ? first_column : first_column - half_rot);
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
          x[j] *= scale * weight[j];
          const float other = __shfl_sync(0xffffffffu, x[j], partner);
          if (turned) {
            const float2 angle = turns[j];
            x[j] = fmaf(x[j], angle.x, low ? -(other * angle.y) : other * angle.y);
          }
        }
      }
      if (is_query) {
        const float scale = a.scale * kLog2E;
#pragma unroll
        for (int j = 0; j < kPer; j += 2)
          *reinterpret_cast<half2*>(shared.q[row][query_of(item)] + first_column + j) =
              __floats2half2_rn(x[j] * scale, x[j + 1] * scale);
      } else {
        const bool keep = !kTwo || (row == 0 ? keeps[0] : keeps[1]);
        const auto slot_in = [&](bool is_v) {
          if constexpr (!kTwo) return (is_v ? walk.v_head : walk.k_head).at(first.slot);
          return paged_head(a.kv, is_v, row == 0 ? first.sequence : second.sequence, a.n_head_kv, kv_head,
                            kDim)
              .at(row == 0 ? first.slot : second.slot);
        };
        if (is_value)
          store_fresh(a.kv.v_type, keep, slot_in(true), x, lane, shared.fresh[row][1]);
        else
          store_fresh(a.kv.k_type, keep, slot_in(false), x, lane, shared.fresh[row][0]);
      }
    }
    // Queries that are not there.
    for (int i = threadIdx.x; i < (kRowQueries - per_kv) * (kDim / 2); i += 32 * kRowWarps)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        reinterpret_cast<uint32_t*>(shared.q[r][per_kv + i / (kDim / 2)])[i % (kDim / 2)] = 0;
    __syncthreads();

    if constexpr (kTwo) {
      if (together) {
        attend_part<2>(a, shared, walk, {{first.begin, first.end}, {second.begin, second.end}},
                       {attends[0], attends[1]}, 0, part, kv_head, launch);
      } else {
#pragma unroll 1
        for (;;) {
          attend_part<1>(a, shared, walk, {{walk.begin, walk.end}}, {true}, turn ? 1 : 0, turn ? part2 : part,
                         kv_head, launch);
          if (turn || !attends[1]) break;
          turn = true;
          walk = walk_in_turn();
          __syncthreads();  // the sums have been read
          stage_keys<kDim>(a, walk, walk.slot, keys, lane);
          stage_values<kDim>(a, walk, walk.slot, values, lane);
        }
      }
    } else {
      attend_part<1>(a, shared, walk, {{walk.begin, walk.end}}, {true}, 0, part, kv_head, launch);
    }
  }

  // One head of all parts.
  constexpr int kLanes = kDim / 2, kGroups = 32 * kRowWarps / kLanes;
  static_assert(kGroups == part_turns(kDim));
#pragma unroll 1
  for (int h = part; h < kRows * per_kv; h += gridDim.y) {
    const int row = kTwo && h >= per_kv ? 1 : 0, head = kv_head * per_kv + h - row * per_kv;
    PartRange in_use = first.parts;
    if (kTwo && row == 1) in_use = second.parts;
    if (h != part && threadIdx.x < kDim / 4) gate = gate_of(h);
    const int pair = threadIdx.x % kLanes, first_part = threadIdx.x / kLanes;
    const uint2* const parts = row_part(a, row, head, 0);
    constexpr int kBatch = 8;  // parts on their way at once
    float2 y[kBatch];
    const auto look_at_batch = [&](int p) {
      bool here = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        y[i] = {0.0f, 0.0f};
        if (in_use.has(p + i * kGroups))
          here &= look_at_pair(parts + (p + i * kGroups) * row_part_entries(kDim) + 2 * pair, launch, y[i]);
      }
      return here;
    };
    float2 stats[2];  // of parts lane and lane + 32
    bool here;
    do {
      here = true;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        stats[i] = {-INFINITY, 0.0f};
        if (in_use.has(lane + 32 * i))
          here &= look_at_pair(parts + (lane + 32 * i) * row_part_entries(kDim) + kDim, launch, stats[i]);
      }
      here &= look_at_batch(first_part);
    } while (!here);
    __syncwarp();
    float f0, f1;
    const float total = weigh_parts(stats[0], stats[1], f0, f1);
    float2 x{0.0f, 0.0f};
#pragma unroll 1
    for (int p = first_part;;) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int mine = p + i * kGroups;  // the same in the whole warp
        const float f = __shfl_sync(0xffffffffu, mine < 32 ? f0 : f1, mine & 31);
        x.x = fmaf(f, y[i].x, x.x), x.y = fmaf(f, y[i].y, x.y);
      }
      p += kBatch * kGroups;
      if (p >= in_use.end()) break;
      while (!look_at_batch(p)) {
      }
      __syncwarp();
    }
    float2* const merged = reinterpret_cast<float2*>(shared.merged);
    merged[threadIdx.x] = x;
    __syncthreads();
    if (threadIdx.x < kDim / 4) {
      float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const float4 y = reinterpret_cast<const float4*>(merged + i * kLanes)[threadIdx.x];
        sum.x += y.x, sum.y += y.y, sum.z += y.z, sum.w += y.w;
      }
      const float scale = total > 0.0f ? 1.0f / total : 0.0f;
      put_gated(a, row, head, 4 * threadIdx.x, {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale},
                gate);
    }
    __syncthreads();
  }
}

// Whether the rows of this step can be attended so.
template <int kDim, int kRows>
bool attends_in_one(const DeviceAttentionArgs& a) {
  const bool floats = a.kv.k_type == KvType::F32 || a.kv.v_type == KvType::F32;
  return a.tagged != nullptr && a.n_rows == kRows && (kRows == 1 || !a.both_ways) && !floats &&
         a.n_head / a.n_head_kv <= kRowQueries && a.n_rot / 2 % (kDim / 32) == 0 && a.n_rot <= kDim &&
         dependent_launch();
}

}  // namespace thermo
