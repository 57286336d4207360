// Three launches: prepare (norm and rotation of heads, write into the cache), attend, finish (merge the
// parts, gate, hand over; with one part and many rows attend does that itself). One or two decoded rows: all
// of it in one launch, attention_row.cuh.
//
// attend: caches of all types but f32 on tensor cores, up to 64 rows by attention_few.cuh, more by
// attention_many.cuh. An f32 cache is asked for where results are compared to the last digits, so it is
// attended in f32 below: a block of 4 warps takes one row, 4 or 8 query heads of one kv head, and a part of
// the cache. A lane holds head_dim / 32 elements of the queries and of the sums; four slots at a time are
// loaded, scored and added. The scores of a slot are summed over the warp by halving, after which a lane has
// the score of one head.
//
// In steps of up to 64 rows the bits of a row do not depend on its neighbours: attention_parts.cuh.
#include <algorithm>

#include "base/check.h"
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_few.cuh"
#include "kernels/attention/attention_heads.cuh"
#include "kernels/attention/attention_many.cuh"
#include "kernels/attention/attention_row.cuh"

namespace thermo {
namespace {

constexpr int kFewHeads = 4, kManyHeads = 8;  // query heads of a block in f32: with few rows, with many
constexpr int kWarps = 4;                     // of a block in f32
constexpr int kSlots = 4;                     // slots in flight of a warp
constexpr int kFloatChunk = 64;               // positions that a part of a row gets at a time in f32

// ---- prepare ----

// One warp per head: queries, then keys, then values.
__global__ void __launch_bounds__(128) prepare_heads_kernel(const __grid_constant__ DeviceAttentionArgs a) {
  __shared__ float shared[4][256];
  allow_next();
  wait_for_inputs();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.y, head = blockIdx.x * 4 + warp, dim = a.head_dim;
  if (head >= a.n_head + 2 * a.n_head_kv) return;
  const bool is_q = head < a.n_head, is_v = head >= a.n_head + a.n_head_kv;
  const int kv_head = (head - a.n_head) % a.n_head_kv;
  const int q_step = a.head_gate == HeadGate::SigmoidElement ? 2 * dim : dim;
  const float* const from =
      is_q ? a.q_full + (static_cast<int64_t>(row) * a.n_head + head) * q_step
           : (is_v ? a.v : a.k) + (static_cast<int64_t>(row) * a.n_head_kv + kv_head) * dim;
  float* const x = shared[warp];
  if (is_v)
    load_head(x, from, dim, lane);
  else
    turn_head(x, from, is_q ? a.q_norm : a.k_norm, dim, a.eps,
              {a.inv_freq, a.n_rot, a.rope_magnitude, a.rows.position[row]}, lane);
  __syncwarp();
  if (is_q) {
    for (int d = lane; d < dim; d += 32) a.q[(static_cast<int64_t>(row) * a.n_head + head) * dim + d] = x[d];
    return;
  }
  const int group = a.rows.group[row];
  if (group < 0) return;
  const int slot = a.rows.group_past[group] + row - a.rows.group_begin[group];
  const PagedHead to = paged_head(a.kv, is_v, a.rows.group_sequence[group], a.n_head_kv, kv_head, dim);
  store_head(is_v ? a.kv.v_type : a.kv.k_type, to.at(slot), x, dim, lane);
}

// ---- attend in f32 ----

// The lane's kPer elements of a head.
template <int kPer>
__device__ __forceinline__ void load_elements(KvType type, const std::byte* head, int lane,
                                              float (&x)[kPer]) {
  const int first = lane * kPer;
  if (type == KvType::F16) {
    const half* const p = reinterpret_cast<const half*>(head) + first;
    if constexpr (kPer == 8) {
      const uint4 v = *reinterpret_cast<const uint4*>(p);
      const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 f = __half22float2(as_half2(w[i]));
        x[2 * i] = f.x;
        x[2 * i + 1] = f.y;
      }
    } else if constexpr (kPer == 4) {
      const uint2 v = *reinterpret_cast<const uint2*>(p);
      const float2 f = __half22float2(as_half2(v.x)), h = __half22float2(as_half2(v.y));
      x[0] = f.x, x[1] = f.y, x[2] = h.x, x[3] = h.y;
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) x[i] = __half2float(p[i]);
    }
  } else if (type == KvType::F32) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) x[i] = reinterpret_cast<const float*>(head)[first + i];
  } else if (type == KvType::BF16) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) x[i] = bf16_value(reinterpret_cast<const uint16_t*>(head)[first + i]);
  } else if (type == KvType::Q4_0) {
    const std::byte* const block = head + first / 32 * 18;
    const float d = __half2float(*reinterpret_cast<const half*>(block));
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int pair = static_cast<int>(block[2 + first % 16 + i]);
      x[i] = d * static_cast<float>((pair >> (first % 32 / 16 * 4) & 15) - 8);
    }
  } else {
    const std::byte* const block = head + first / 32 * 34;
    const float d = __half2float(*reinterpret_cast<const half*>(block));
    if constexpr (kPer >= 2) {
#pragma unroll
      for (int i = 0; i < kPer; i += 2) {  // blocks are aligned to 2 bytes only
        const uint16_t v = *reinterpret_cast<const uint16_t*>(block + 2 + first % 32 + i);
        x[i] = d * static_cast<float>(static_cast<int8_t>(v & 255));
        x[i + 1] = d * static_cast<float>(static_cast<int8_t>(v >> 8));
      }
    } else {
      x[0] = d * static_cast<float>(*reinterpret_cast<const int8_t*>(block + 2 + first % 32));
    }
  }
}

// Sums of kHeads values over the warp; lane l gets the sum of value l / (32 / kHeads).
template <int kHeads>
__device__ __forceinline__ float sum_heads(const float (&s)[kHeads], int lane) {
  static_assert(kHeads == 4 || kHeads == 8);
  float x[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) x[i] = s[i];
  int mask = 16;
#pragma unroll
  for (int half = kHeads / 2; half > 0; half /= 2, mask /= 2) {
    const bool up = lane & mask;
#pragma unroll
    for (int i = 0; i < half; ++i)
      x[i] = (up ? x[i + half] : x[i]) + __shfl_xor_sync(0xffffffffu, up ? x[i] : x[i + half], mask);
  }
#pragma unroll
  for (int rest = 16 / kHeads; rest > 0; rest /= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], rest);
  return x[0];
}

template <int kDim, int kHeads>
__global__ void __launch_bounds__(32 * kWarps)
    attend_floats_kernel(const __grid_constant__ DeviceAttentionArgs a) {
  constexpr int kPer = kDim / 32, kLanesOfHead = 32 / kHeads;
  __shared__ float sums[kHeads][kDim];
  __shared__ float tops[kWarps][kHeads], totals[kWarps][kHeads];
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.z, part = blockIdx.y;
  const int group = a.rows.group[row];
  if (group < 0) return;
  const RowView view = view_of(a, row, 1);
  if (!PartRange(view.lo, view.hi, kFloatChunk, a.n_splits).has(part)) return;
  const int per_kv = a.n_head / a.n_head_kv;
  const int head_groups = (per_kv + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.x / head_groups, first_in_kv = blockIdx.x % head_groups * kHeads;
  const int n_heads = min(kHeads, per_kv - first_in_kv);
  const int first_head = kv_head * per_kv + first_in_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __align__(16) float q[kHeads][kPer];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const float* const from =
        a.q + (static_cast<int64_t>(row) * a.n_head + first_head + min(h, n_heads - 1)) * kDim + lane * kPer;
    if constexpr (kPer >= 4) {
#pragma unroll
      for (int i = 0; i < kPer; i += 4)
        *reinterpret_cast<float4*>(&q[h][i]) = *reinterpret_cast<const float4*>(from + i);
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) q[h][i] = from[i];
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) q[h][i] *= a.scale * kLog2E;
  }

  const int sequence = a.rows.group_sequence[group];
  const PagedHead keys = paged_head(a.kv, false, sequence, a.n_head_kv, kv_head, kDim),
                  values = paged_head(a.kv, true, sequence, a.n_head_kv, kv_head, kDim);

  float acc[kHeads][kPer] = {};
  float top = -INFINITY, total = 0.0f;  // of head lane / kLanesOfHead
  // Positions of the part: kSlots for each warp in turn, to the end of a chunk, then the part's next chunk.
  const int stride = kWarps * kSlots;
  int position = first_in_turn(view.lo / kFloatChunk, part, a.n_splits) * kFloatChunk + warp * kSlots;
  for (; position < view.hi; position += (position + stride) % kFloatChunk < stride
                                             ? stride + (a.n_splits - 1) * kFloatChunk
                                             : stride) {
    float k[kSlots][kPer], v[kSlots][kPer];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int at = min(position + s, view.hi - 1), slot = at < view.tail ? at : view.slot_of(at);
      load_elements<kPer>(a.kv.k_type, keys.at(slot), lane, k[s]);
      load_elements<kPer>(a.kv.v_type, values.at(slot), lane, v[s]);
    }
    float score[kSlots], new_top = top;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      float dot[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        dot[h] = 0.0f;
#pragma unroll
        for (int i = 0; i < kPer; ++i) dot[h] = fmaf(q[h][i], k[s][i], dot[h]);
      }
      score[s] = sum_heads<kHeads>(dot, lane);
      if (position + s < view.lo || position + s >= view.hi) score[s] = -INFINITY;
      new_top = fmaxf(new_top, score[s]);
    }
    if (__all_sync(0xffffffffu, new_top == -INFINITY)) continue;
    const float shrink = new_top == -INFINITY ? 1.0f : exp2_fast(top - new_top);
    top = new_top;
    total *= shrink;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      score[s] = top == -INFINITY ? 0.0f : exp2_fast(score[s] - top);
      total += score[s];
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= n_heads) break;
      const float f = __shfl_sync(0xffffffffu, shrink, kLanesOfHead * h);
#pragma unroll
      for (int i = 0; i < kPer; ++i) acc[h][i] *= f;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const float w = __shfl_sync(0xffffffffu, score[s], kLanesOfHead * h);
#pragma unroll
        for (int i = 0; i < kPer; ++i) acc[h][i] = fmaf(w, v[s][i], acc[h][i]);
      }
    }
  }

  // Merge the warps.
  if (lane % kLanesOfHead == 0) {
    tops[warp][lane / kLanesOfHead] = top;
    totals[warp][lane / kLanesOfHead] = total;
  }
  for (int i = threadIdx.x; i < kHeads * kDim; i += 32 * kWarps) sums[i / kDim][i % kDim] = 0.0f;
  __syncthreads();
  float all_top[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    all_top[h] = tops[0][h];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) all_top[h] = fmaxf(all_top[h], tops[w][h]);
  }
  for (int w = 0; w < kWarps; ++w) {  // in turn: one order of sums
    if (warp == w)
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= n_heads) break;
        const float f = tops[w][h] == -INFINITY ? 0.0f : exp2_fast(tops[w][h] - all_top[h]);
#pragma unroll
        for (int i = 0; i < kPer; ++i) sums[h][lane * kPer + i] += f * acc[h][i];
      }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < n_heads * (kDim + 2); i += 32 * kWarps) {
    const int h = i / (kDim + 2), d = i % (kDim + 2);
    float x;
    if (d < kDim) {
      x = sums[h][d];
    } else {
      float t = tops[0][h], l = 0.0f;
      for (int w = 1; w < kWarps; ++w) t = fmaxf(t, tops[w][h]);
      for (int w = 0; w < kWarps; ++w)
        l += tops[w][h] == -INFINITY ? 0.0f : totals[w][h] * exp2_fast(tops[w][h] - t);
      x = d == kDim ? t : l;
    }
    if (d < kDim)
      part_sums(a, row, first_head + h, part)[d] = x;
    else
      reinterpret_cast<float*>(part_stats(a, row, first_head + h, part))[d - kDim] = x;
  }
}

// ---- attend with small heads ----

// A warp for each (row, head): a lane takes every 32nd slot, and the warp merges its lanes. No model of use
// has such heads; small ones made for tests do.
template <int kDim>
__global__ void __launch_bounds__(128)
    attend_small_heads_kernel(const __grid_constant__ DeviceAttentionArgs a) {
  allow_next();
  wait_for_inputs();
  const int head = blockIdx.x * 4 + threadIdx.x / 32, row = blockIdx.y, lane = threadIdx.x % 32;
  const int group = a.rows.group[row];
  if (group < 0 || head >= a.n_head) return;
  const RowView view = view_of(a, row, 1);
  const int sequence = a.rows.group_sequence[group], kv_head = head / (a.n_head / a.n_head_kv);
  const PagedHead keys = paged_head(a.kv, false, sequence, a.n_head_kv, kv_head, kDim),
                  values = paged_head(a.kv, true, sequence, a.n_head_kv, kv_head, kDim);
  const auto element = [](KvType type, const std::byte* at, int d) {
    return type == KvType::F32    ? reinterpret_cast<const float*>(at)[d]
           : type == KvType::BF16 ? bf16_value(reinterpret_cast<const uint16_t*>(at)[d])
                                  : __half2float(reinterpret_cast<const half*>(at)[d]);
  };
  const float* const q = a.q + (static_cast<int64_t>(row) * a.n_head + head) * kDim;
  float sums[kDim] = {}, top = -INFINITY, total = 0.0f;
  for (int position = view.lo / 32 * 32 + lane; position < view.hi; position += 32) {
    if (position < view.lo) continue;
    const int slot = position < view.tail ? position : view.slot_of(position);
    const std::byte *const k = keys.at(slot), *const v = values.at(slot);
    float score = 0.0f;
#pragma unroll
    for (int d = 0; d < kDim; ++d) score = fmaf(q[d] * a.scale * kLog2E, element(a.kv.k_type, k, d), score);
    const float now = fmaxf(top, score), shrink = exp2_fast(top - now), weight = exp2_fast(score - now);
    top = now;
    total = total * shrink + weight;
#pragma unroll
    for (int d = 0; d < kDim; ++d) sums[d] = fmaf(weight, element(a.kv.v_type, v, d), sums[d] * shrink);
  }
  float all_top = top;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2)
    all_top = fmaxf(all_top, __shfl_xor_sync(0xffffffffu, all_top, mask));
  const float f = top == -INFINITY ? 0.0f : exp2_fast(top - all_top);
  const float all = warp_sum(total * f), scale = all > 0.0f ? f / all : 0.0f;
#pragma unroll
  for (int d = 0; d < kDim; d += 4) {
    const float4 x = {warp_sum(sums[d] * scale), warp_sum(sums[d + 1] * scale), warp_sum(sums[d + 2] * scale),
                      warp_sum(sums[d + 3] * scale)};
    if (lane == d / 4) put_gated(a, row, head, d, x, load_gate(a, row, head, d));
  }
}

// ---- finish ----

constexpr int kFinishThreads = 128;

// A block per (row, head): dim / 4 threads add up every n-th part of four elements each. `chunk`: positions
// that a part gets at a time; 0: parts of a larger step.
__global__ void __launch_bounds__(kFinishThreads)
    finish_heads_kernel(const __grid_constant__ DeviceAttentionArgs a, AttentionTiling tiling, int chunk) {
  __shared__ float weight[64];
  __shared__ float4 sums[kFinishThreads];
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.y, head = blockIdx.x, dim = a.head_dim;
  PartRange parts_in_use(0);
  if (a.rows.group[row] >= 0) {
    if (chunk > 0) {
      const RowView view = view_of(a, row, 1);
      parts_in_use = PartRange(view.lo, view.hi, chunk, a.n_splits);
    } else {
      parts_in_use = PartRange(segment_of(a, tiling, row).n_parts);
    }
  }
  const int lanes = dim / 4, lane = threadIdx.x % lanes, first = threadIdx.x / lanes;
  // Every warp looks at the numbers of all parts: a lane has two of them.
  const float2* const stats = part_stats(a, row, head, 0);
  const int p0 = threadIdx.x % 32, p1 = p0 + 32;
  static_assert(kMaxAttentionSplits <= 64);
  const float2 none{-INFINITY, 0.0f}, s0 = parts_in_use.has(p0) ? stats[p0] : none,
                                      s1 = parts_in_use.has(p1) ? stats[p1] : none;
  float f0, f1;
  const float total = weigh_parts(s0, s1, f0, f1);
  if (threadIdx.x < 32) weight[p0] = f0, weight[p1] = f1;
  __syncthreads();
  float4 x{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
  for (int p = first; p < parts_in_use.end(); p += part_turns(dim)) {
    float4 y{0.0f, 0.0f, 0.0f, 0.0f};
    if (parts_in_use.has(p)) y = reinterpret_cast<const float4*>(part_sums(a, row, head, p))[lane];
    const float f = weight[p];
    x.x = fmaf(f, y.x, x.x), x.y = fmaf(f, y.y, x.y), x.z = fmaf(f, y.z, x.z), x.w = fmaf(f, y.w, x.w);
  }
  sums[threadIdx.x] = x;
  __syncthreads();
  if (first != 0) return;
  const float4 gate = load_gate(a, row, head, 4 * lane);
  for (int i = 1; i < part_turns(dim); ++i) {
    const float4 y = sums[i * lanes + lane];
    x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
  }
  const float scale = total > 0.0f ? 1.0f / total : 0.0f;
  put_gated(a, row, head, 4 * lane, {x.x * scale, x.y * scale, x.z * scale, x.w * scale}, gate);
}

// How a step is attended.
enum class Way { Floats, Few, Many };
struct Plan {
  Way way;
  AttentionTiling tiling;
};

constexpr int kMaxFewQueries = 16;

template <int kDim>
Plan plan_of(const DeviceAttentionArgs& a) {
  const int per_kv = a.n_head / a.n_head_kv;
  const bool floats = a.kv.k_type == KvType::F32 || a.kv.v_type == KvType::F32;
  if (!floats && a.n_rows > kMaxOneArithmeticRows && per_kv <= kManyQueries &&
      kManySharedBytes<kDim> <= device_in_use().max_shared_bytes)
    return {Way::Many, {kManyQueries / per_kv, kManySlots}};
  if (floats || per_kv > kMaxFewQueries) return {Way::Floats, {1, 16}};
  return {Way::Few, {a.singles ? 1 : std::min(a.n_rows, kMaxFewQueries / per_kv), 16}};
}

// Warps of a block: the same for all steps, as their number shows in the bits.
template <int kDim>
int few_warps() {
  static const int n_warps = [] {
    constexpr size_t kMost = kFewWarpBytes<kDim, 2>;
    size_t n = kMaxFewWarps;
    while (n > 1 && n * kMost > device_in_use().max_shared_bytes) n /= 2;
    return static_cast<int>(n);
  }();
  return n_warps;
}

template <int kDim, int kTiles>
void launch_few(const DeviceAttentionArgs& a, const AttentionTiling& tiling, StreamView stream) {
  static const size_t shared_bytes = [] {
    const size_t bytes = static_cast<size_t>(few_warps<kDim>()) * kFewWarpBytes<kDim, kTiles>;
    allow_shared(attend_few_kernel<kDim, kTiles>, bytes);
    return bytes;
  }();
  // Enough blocks for the card, which share the parts evenly.
  const int tiles = ceil_div(a.n_rows, tiling.rows) * a.n_head_kv;
  const int wanted = std::min(a.n_splits, ceil_div(2 * device_in_use().n_multiprocessors, tiles));
  const int blocks = ceil_div(a.n_splits, ceil_div(a.n_splits, wanted));
  launch(attend_few_kernel<kDim, kTiles>, dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(blocks)),
         static_cast<unsigned>(32 * few_warps<kDim>()), shared_bytes, stream, a, tiling);
}

template <int kDim>
void launch_attend(const DeviceAttentionArgs& a, StreamView stream) {
  const Plan plan = plan_of<kDim>(a);
  const int per_kv = a.n_head / a.n_head_kv;
  const unsigned splits = static_cast<unsigned>(a.n_splits), rows = static_cast<unsigned>(a.n_rows);
  int chunk = 0;
  switch (plan.way) {
    case Way::Floats: {
      // Few rows: short code and many blocks. Many rows: each byte of the cache read by as few blocks as
      // registers allow.
      const int heads = a.n_rows > 32 ? kManyHeads : kFewHeads;
      launch(
          heads == kFewHeads ? attend_floats_kernel<kDim, kFewHeads> : attend_floats_kernel<kDim, kManyHeads>,
          dim3(static_cast<unsigned>(a.n_head_kv * ceil_div(per_kv, heads)), splits, rows), 32 * kWarps, 0,
          stream, a);
      chunk = kFloatChunk;
      break;
    }
    case Way::Few:
      if (plan.tiling.rows * per_kv <= 8)
        launch_few<kDim, 1>(a, plan.tiling, stream);
      else
        launch_few<kDim, 2>(a, plan.tiling, stream);
      chunk = few_warps<kDim>() * kFewSlots;
      break;
    case Way::Many: {
      static const bool ready = [] {
        allow_shared(attend_many_kernel<kDim>, kManySharedBytes<kDim>);
        return true;
      }();
      static_cast<void>(ready);
      launch(attend_many_kernel<kDim>,
             dim3(static_cast<unsigned>(ceil_div(a.n_rows, plan.tiling.rows) * a.n_head_kv), splits),
             kManyThreads, kManySharedBytes<kDim>, stream, a, plan.tiling);
      if (a.n_splits == 1) return;
      break;
    }
  }
  launch(finish_heads_kernel, dim3(static_cast<unsigned>(a.n_head), rows), kFinishThreads, 0, stream, a,
         plan.tiling, chunk);
}

}  // namespace

int attention_splits(int n_rows, int n_head, int n_head_kv, int n_multiprocessors) noexcept {
  // A part for each multiprocessor, or with many rows two blocks.
  const int tiles = ceil_div(n_rows * (n_head / n_head_kv), kManyQueries);
  const int splits = n_rows <= kMaxOneArithmeticRows ? n_multiprocessors / n_head_kv
                                                     : 2 * n_multiprocessors / (tiles * n_head_kv);
  return std::clamp(splits, 1, kMaxAttentionSplits);
}

size_t attention_tagged_bytes(int n_rows, int n_head, int n_splits, int head_dim) noexcept {
  return sizeof(uint2) * static_cast<size_t>(n_rows * n_head * n_splits * row_part_entries(head_dim));
}

namespace {

// False: not possible.
template <int kDim, int kRows>
bool launch_rows(const DeviceAttentionArgs& a, StreamView stream) {
  constexpr size_t kBytes = sizeof(RowShared<kDim, kRows>);
  static_assert(kBytes <= 160 * 1024);
  const int n_multiprocessors = device_in_use().n_multiprocessors;
  if (!attends_in_one<kDim, kRows>(a) || kBytes > device_in_use().max_shared_bytes ||
      a.n_head_kv * a.n_splits > n_multiprocessors)
    return false;
  static const bool ready = [] { return allow_shared(attend_row_kernel<kDim, kRows>, kBytes), true; }();
  static_cast<void>(ready);
  launch(attend_row_kernel<kDim, kRows>,
         dim3(static_cast<unsigned>(a.n_head_kv), static_cast<unsigned>(a.n_splits)), 32 * kRowWarps, kBytes,
         stream, a);
  return true;
}

template <int kDim>
bool launch_in_one(const DeviceAttentionArgs& a, StreamView stream) {
  static_assert(kMaxTaggedRows == 2);
  return a.n_rows == 1 ? launch_rows<kDim, 1>(a, stream) : launch_rows<kDim, 2>(a, stream);
}

}  // namespace

void attention_cuda(const DeviceAttentionArgs& a, StreamView stream) noexcept {
  if (a.head_dim == 128 && launch_in_one<128>(a, stream)) return;
  if (a.head_dim == 256 && launch_in_one<256>(a, stream)) return;
  launch(
      prepare_heads_kernel,
      dim3(static_cast<unsigned>(ceil_div(a.n_head + 2 * a.n_head_kv, 4)), static_cast<unsigned>(a.n_rows)),
      128, 0, stream, a);
  switch (a.head_dim) {
    case 16:
      return launch(attend_small_heads_kernel<16>,
                    dim3(static_cast<unsigned>(ceil_div(a.n_head, 4)), static_cast<unsigned>(a.n_rows)), 128,
                    0, stream, a);
    case 32:
      return launch_attend<32>(a, stream);
    case 64:
      return launch_attend<64>(a, stream);
    case 128:
      return launch_attend<128>(a, stream);
    case 256:
      return launch_attend<256>(a, stream);
    default:
      THERMO_CHECK(false, "head_dim was checked at load");
  }
}

}  // namespace thermo
