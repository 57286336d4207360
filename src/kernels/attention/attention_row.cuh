// Attention of one decoded row in one launch: norm and rotation of heads, the cache's new slot, attending,
// merging, gating. Three launches spend most of their time waiting for each other's results.
//
// The arithmetic is that of attention_few.cuh, bit for bit. A block has one kv head and a part of the cache;
// each prepares the queries it needs, and the block with the last part the new key and value too. What does
// not depend on the projections is done before the wait: the stored keys and values are on their way, angles
// are computed. Parts go to the blocks that merge them (one for each query head) through L2, each float
// beside the number of the launch, so that reading them is also waiting for them. All blocks of the launch
// are resident: there is one to a multiprocessor.
//
// A token of the 35B-A3B (10 such layers, 169 slots), before rows in company had the same arithmetic: 1.438
// against 1.484 ms in three launches; at 16439 slots 1.605 against 1.659. Of the 9 us that were left at 169
// slots: queries 1.6, attending 1.2, warps 1.5, exchange and merging 3.
#pragma once

#include "kernels/attention/attention_few.cuh"

namespace thermo {

inline constexpr int kRowWarps = 8;
inline constexpr int kRowQueries = 8;  // of a kv head, at most
inline constexpr int kRowPart = kRowWarps * kFewSlots;

template <int kDim>
struct RowShared {
  static constexpr int kQStep = kDim + 8;  // halves: rows of ldmatrix fall into different banks
  std::byte stages[kRowWarps][kFewWarpBytes<kDim, 1>];
  half q[kRowQueries][kQStep];
  half fresh[2][kDim];  // new key and value, as the cache has them
  float norms[2][kDim];
  float2 turns[kDim / 2];  // cos, sin
  float4 merged[kRowWarps * 32];
};

// Floats of a part beside the number of the launch: sums, largest score, sum of weights.
inline constexpr int64_t row_part_entries(int dim) {
  return dim + 2;
}
__device__ __forceinline__ uint2* row_part(const DeviceAttentionArgs& a, int head, int part) {
  return static_cast<uint2*>(a.tagged) +
         (static_cast<int64_t>(head) * a.n_splits + part) * row_part_entries(a.head_dim);
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

// The lane's elements of a new key or value, to the cache and as halves with the cache's rounding to `fresh`.
template <int kPer>
__device__ __forceinline__ void store_fresh(KvType type, std::byte* head, const float (&x)[kPer], int lane,
                                            half* fresh) {
  __align__(16) half rounded[kPer];
  if (type == KvType::F16) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) rounded[j] = __float2half_rn(x[j]);
#pragma unroll
    for (int j = 0; j < kPer; j += 2)
      *reinterpret_cast<half2*>(reinterpret_cast<half*>(head) + lane * kPer + j) =
          *reinterpret_cast<const half2*>(rounded + j);
  } else if (type == KvType::BF16) {
#pragma unroll
    for (int j = 0; j < kPer; j += 2) {
      const uint32_t bits = bf16_bits(x[j]) | static_cast<uint32_t>(bf16_bits(x[j + 1])) << 16;
      *reinterpret_cast<uint32_t*>(head + 2 * (lane * kPer + j)) = bits;
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
    if (lane % kLanes == 0) *reinterpret_cast<half*>(block) = scale;
#pragma unroll
    for (int j = 0; j < kPer; j += 2) {
      const int q0 = q4_code(x[j], inverse), q1 = q4_code(x[j + 1], inverse), pair = q0 | q1 << 8,
                other = __shfl_xor_sync(0xffffffffu, pair, kLanes / 2);
      if (lane % kLanes < kLanes / 2)
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
    if (lane * kPer % 32 == 0) *reinterpret_cast<half*>(block) = scale;
#pragma unroll
    for (int j = 0; j < kPer; j += 2) {
      const int q0 = d > 0.0f ? __float2int_rn(x[j] / d) : 0,
                q1 = d > 0.0f ? __float2int_rn(x[j + 1] / d) : 0;
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

template <int kDim>
__global__ void __launch_bounds__(32 * kRowWarps, 1)
    attend_row_kernel(const __grid_constant__ DeviceAttentionArgs a) {
  constexpr int kSteps = kDim / 16, kPer = kDim / 32;
  extern __shared__ __align__(128) std::byte shared_bytes[];
  RowShared<kDim>& shared = *reinterpret_cast<RowShared<kDim>*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kv_head = blockIdx.x, part = blockIdx.y, per_kv = a.n_head / a.n_head_kv;
  std::byte* const keys = shared.stages[warp];
  std::byte* const values = keys + kFewSlots * kDim * 2;
  const MatrixLane<kDim> key_lane(keys, 0, false, lane), value_lane(values, 0, true, lane);

  touch_params(a);
  // The step's rows, the page table and the stored slots were there before the kernels in front of this one
  // started. One row is the first group, if any: its numbers are asked for together, since the table has to
  // be read after them, and the slots after that.
  const int group = a.rows.group[0];
  const int past = a.rows.group_past[0], position = a.rows.position[0], sequence = a.rows.group_sequence[0];
  const int begin = a.window > 0 ? max(0, position - a.window + 1) : 0, end = past + 1;
  const PartRange parts_in_use(begin, end, kRowPart, a.n_splits);
  const bool active = group >= 0 && parts_in_use.has(part),
             last = active && part == past / kRowPart % a.n_splits;
  const PagedHead k_head = paged_head(a.kv, false, sequence, a.n_head_kv, kv_head, kDim),
                  v_head = paged_head(a.kv, true, sequence, a.n_head_kv, kv_head, kDim);
  // The row's own slot is left out: `fresh` has it.
  const auto stage_keys = [&](int slot) {
    if (slot < end) stage_slots<kDim, kFewSlots, 32>(a.kv.k_type, keys, k_head, slot, min(end, past), lane);
    copy_commit();
  };
  const auto stage_values = [&](int slot) {
    if (slot < end) stage_slots<kDim, kFewSlots, 32>(a.kv.v_type, values, v_head, slot, min(end, past), lane);
    copy_commit();
  };
  const int stride = a.n_splits * kRowPart;
  int slot = first_in_turn(begin / kRowPart, part, a.n_splits) * kRowPart + warp * kFewSlots;
  if (slot + kFewSlots <= begin) slot += stride;
  const bool busy = slot < end;
  if (active) {
    stage_keys(slot);
    stage_values(slot);
    for (int d = threadIdx.x; d < kDim; d += 32 * kRowWarps) {
      shared.norms[0][d] = __ldg(a.q_norm + d);
      shared.norms[1][d] = __ldg(a.k_norm + d);
    }
    for (int i = threadIdx.x; i < a.n_rot / 2; i += 32 * kRowWarps) {
      float s, c;
      sincosf(static_cast<float>(position) * __ldg(a.inv_freq + i), &s, &c);
      shared.turns[i] = {c * a.rope_magnitude, s * a.rope_magnitude};
    }
  }
  allow_next();
  __syncthreads();
  wait_for_inputs();
  if (group < 0) return;
  const uint32_t launch = *a.launch + 1;  // memory that nobody wrote has 0

  // What the merging at the end needs.
  const bool merges = part < per_kv;
  float4 gate{0.0f, 0.0f, 0.0f, 0.0f};
  if (merges && threadIdx.x < kDim / 4) gate = load_gate(a, 0, kv_head * per_kv + part, 4 * threadIdx.x);

  if (active) {
    // Queries, then the new key and value.
    const int items = last ? per_kv + 2 : per_kv;
    const int q_step = a.head_gate == HeadGate::SigmoidElement ? 2 * kDim : kDim;
    const auto load = [&](int item, float(&x)[kPer]) {
      if (item >= items) return;
      const float* const from = (item < per_kv    ? a.q_full + (kv_head * per_kv + item) * q_step
                                 : item == per_kv ? a.k + kv_head * kDim
                                                  : a.v + kv_head * kDim) +
                                lane * kPer;
#pragma unroll
      for (int j = 0; j < kPer; j += 2) {
        const float2 v = *reinterpret_cast<const float2*>(from + j);
        x[j] = v.x;
        x[j + 1] = v.y;
      }
    };
    const int half_rot = a.n_rot / 2, apart = half_rot / kPer, first = lane * kPer;
    const bool low = first < half_rot, turned = first < a.n_rot;
    const int partner = !turned ? lane : low ? lane + apart : lane - apart;
    float next[kPer];
    load(warp, next);
#pragma unroll 1
    for (int item = warp; item < items; item += kRowWarps) {
      float x[kPer];
#pragma unroll
      for (int j = 0; j < kPer; ++j) x[j] = next[j];
      load(item + kRowWarps, next);
      if (item <= per_kv) {
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < kPer; ++j) square = fmaf(x[j], x[j], square);
        const float scale = rsqrtf(warp_sum(square) / static_cast<float>(kDim) + a.eps);
        const float* const weight = shared.norms[item == per_kv] + first;
        const float2* const turns = shared.turns + (low ? first : first - half_rot);
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
          x[j] *= scale * weight[j];
          const float other = __shfl_sync(0xffffffffu, x[j], partner);
          if (turned) {
            const float2 turn = turns[j];
            x[j] = fmaf(x[j], turn.x, low ? -(other * turn.y) : other * turn.y);
          }
        }
      }
      if (item < per_kv) {
        const float scale = a.scale * kLog2E;
#pragma unroll
        for (int j = 0; j < kPer; j += 2)
          *reinterpret_cast<half2*>(shared.q[item] + first + j) =
              __floats2half2_rn(x[j] * scale, x[j + 1] * scale);
      } else if (item == per_kv) {
        store_fresh(a.kv.k_type, k_head.at(past), x, lane, shared.fresh[0]);
      } else {
        store_fresh(a.kv.v_type, v_head.at(past), x, lane, shared.fresh[1]);
      }
    }
    // Queries that are not there.
    for (int i = threadIdx.x; i < (kRowQueries - per_kv) * (kDim / 2); i += 32 * kRowWarps)
      reinterpret_cast<uint32_t*>(shared.q[per_kv + i / (kDim / 2)])[i % (kDim / 2)] = 0;
    __syncthreads();

    uint32_t q[kSteps][2];
    {
      const uint32_t at =
          static_cast<uint32_t>(__cvta_generic_to_shared(&shared.q[lane % 8][0])) + (lane / 8) * 16;
#pragma unroll
      for (int i = 0; i < kSteps; i += 2) {
        uint32_t v[4];
        load_matrices(v, at + i * 32);
        q[i][0] = v[0], q[i][1] = v[1], q[i + 1][0] = v[2], q[i + 1][1] = v[3];
      }
    }
    float sums[kSteps][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
    const auto put_fresh = [&](std::byte* stage, const half* row) {
      if (past < slot || past >= slot + kFewSlots) return;
      if (lane < kDim / 8)
        *reinterpret_cast<uint4*>(stage + piece_offset<kDim>(past - slot, lane)) =
            reinterpret_cast<const uint4*>(row)[lane];
      __syncwarp();
    };
#pragma unroll 1
    for (; slot < end; slot += stride) {
      copy_wait<1>();
      __syncwarp();
      put_fresh(keys, shared.fresh[0]);
      float score[4] = {}, other[4] = {};  // two chains of sums: half the latency
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t k[4];
        load_matrices(k, key_lane.at(0, i));
        mma_16816(i % 2 == 0 ? score : other, k, q[i][0], q[i][1]);
      }
      __syncwarp();
      stage_keys(slot + stride);
      float shrink[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float x = score[j] + other[j], y = score[2 + j] + other[2 + j];
        if (slot + g < begin || slot + g >= end) x = -INFINITY;
        if (slot + g + 8 < begin || slot + g + 8 >= end) y = -INFINITY;
        shrink[j] = weigh_tile(x, y, top[j], total[j]);
        score[j] = x;
        score[2 + j] = y;
      }
      const uint32_t p0 = turn_matrix(pack_halves(score[0], score[1])),
                     p1 = turn_matrix(pack_halves(score[2], score[3]));
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][c] *= shrink[c % 2];
      copy_wait<1>();
      __syncwarp();
      put_fresh(values, shared.fresh[1]);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t v[4];
        load_transposed(v, value_lane.at(0, i));
        mma_16816(sums[i], v, p0, p1);
      }
      __syncwarp();
      stage_values(slot + stride);
    }
    copy_wait<0>();
    __syncwarp();

    // Add up the warps.
    constexpr int kStep = kDim + 4;  // of a query; the lanes of a store fall into different banks
    float* const own = reinterpret_cast<float*>(keys);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int query = 2 * t + j;
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) total[j] += __shfl_xor_sync(0xffffffffu, total[j], mask);
      if (busy) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          own[query * kStep + 16 * i + g] = sums[i][j];
          own[query * kStep + 16 * i + g + 8] = sums[i][2 + j];
        }
      }
      if (g == 0) *reinterpret_cast<float2*>(own + 8 * kStep + 2 * query) = {top[j], total[j]};
    }
    __syncthreads();
#pragma unroll 2
    for (int i = threadIdx.x; i < per_kv * (kDim / 4); i += 32 * kRowWarps) {
      const int query = i / (kDim / 4), d = i % (kDim / 4) * 4;
      float2 stats[kRowWarps];
      float4 y[kRowWarps];
      float all_top = -INFINITY, all_total = 0.0f;
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) {
        const float* const area = reinterpret_cast<const float*>(shared.stages[w]);
        stats[w] = *reinterpret_cast<const float2*>(area + 8 * kStep + 2 * query);
        y[w] = *reinterpret_cast<const float4*>(area + query * kStep + d);
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
      uint2* const to = row_part(a, kv_head * per_kv + query, part);
      put_pair(to + d, x.x, x.y, launch);
      put_pair(to + d + 2, x.z, x.w, launch);
      if (d == 0) put_pair(to + kDim, all_top, all_total, launch);
    }
  }

  // One head of all parts.
  constexpr int kLanes = kDim / 2, kGroups = 32 * kRowWarps / kLanes;
  static_assert(kGroups == part_turns(kDim));
#pragma unroll 1
  for (int h = part; h < per_kv; h += gridDim.y) {
    const int head = kv_head * per_kv + h;
    if (h != part && threadIdx.x < kDim / 4) gate = load_gate(a, 0, head, 4 * threadIdx.x);
    const int pair = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
    const uint2* const parts = row_part(a, head, 0);
    constexpr int kBatch = 8;  // parts on their way at once
    float2 y[kBatch];
    const auto look_at_batch = [&](int p) {
      bool here = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        y[i] = {0.0f, 0.0f};
        if (parts_in_use.has(p + i * kGroups))
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
        if (parts_in_use.has(lane + 32 * i))
          here &= look_at_pair(parts + (lane + 32 * i) * row_part_entries(kDim) + kDim, launch, stats[i]);
      }
      here &= look_at_batch(first);
    } while (!here);
    __syncwarp();
    float f0, f1;
    const float total = weigh_parts(stats[0], stats[1], f0, f1);
    float2 x{0.0f, 0.0f};
#pragma unroll 1
    for (int p = first;;) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int mine = p + i * kGroups;  // the same in the whole warp
        const float f = __shfl_sync(0xffffffffu, mine < 32 ? f0 : f1, mine & 31);
        x.x = fmaf(f, y[i].x, x.x), x.y = fmaf(f, y[i].y, x.y);
      }
      p += kBatch * kGroups;
      if (p >= parts_in_use.end()) break;
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
      put_gated(a, 0, head, 4 * threadIdx.x, {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale},
                gate);
    }
    __syncthreads();
  }
}

// Whether the row of this step can be attended so.
template <int kDim>
bool attends_in_one(const DeviceAttentionArgs& a) {
  const bool floats = a.kv.k_type == KvType::F32 || a.kv.v_type == KvType::F32;
  return a.tagged != nullptr && a.n_rows == 1 && !floats && a.n_head / a.n_head_kv <= kRowQueries &&
         a.n_rot / 2 % (kDim / 32) == 0 && a.n_rot <= kDim && dependent_launch();
}

}  // namespace thermo
