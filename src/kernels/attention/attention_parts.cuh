// What the attending kernels share: which slots the rows of a block see, how those are cut into parts, and
// where the results of a part lie.
//
// Rows are attended in tiles of `rows` consecutive rows of the step. The rows of a tile that belong to one
// sequence are a segment: they read one cache. A segment's slots are cut into at most n_splits parts; block
// (tile, part) leaves sums of values, the largest score and the sum of weights of every (row, head). Scores
// are in units of log 2.
#pragma once

#include "kernels/attention/attention_cuda.h"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

inline constexpr int kMinPart = 64;  // slots that are worth a block
inline constexpr float kLog2E = 1.4426950408889634f;

struct AttentionTiling {
  int rows;   // of a tile
  int align;  // parts are multiples of this many slots
};

__host__ __device__ constexpr int64_t head_bytes(KvType type, int dim) {
  return type == KvType::F32 ? 4 * dim : type == KvType::F16 ? 2 * dim : dim / 32 * 34;
}

// One kv head of one sequence: keys or values of all its slots.
struct PagedHead {
  std::byte* base;       // of slot 0 of page 0
  const int32_t* pages;  // the sequence's table
  int64_t page_bytes, step;

  __device__ __forceinline__ std::byte* at(int slot) const {
    const unsigned i = static_cast<unsigned>(slot);
    return base + pages[i / kKvPage] * page_bytes + i % kKvPage * step;
  }
};

__device__ __forceinline__ PagedHead paged_head(const DeviceKv& kv, bool is_v, int sequence, int n_head_kv,
                                                int head, int dim) {
  const int64_t bytes = head_bytes(is_v ? kv.v_type : kv.k_type, dim);
  return {(is_v ? kv.v : kv.k) + head * bytes, kv.pages + static_cast<int64_t>(sequence) * kv.table_pages,
          kv.page_bytes, n_head_kv * bytes};
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Segment {
  int row_begin, row_end;  // of the step
  int group, group_begin, past;
  int begin, end;  // slots that some row may see
  int part, n_parts;
  bool uncommitted;  // a row sees its ancestors only
};

// The segment that `row` lies in. REQUIRES: the row is no padding.
__device__ __forceinline__ Segment segment_of(const DeviceAttentionArgs& a, const AttentionTiling& tiling,
                                              int row) {
  Segment s;
  s.group = a.rows.group[row];
  s.group_begin = a.rows.group_begin[s.group];
  s.past = a.rows.group_past[s.group];
  const int tile_begin = row / tiling.rows * tiling.rows;
  s.row_begin = max(tile_begin, s.group_begin);
  s.row_end = min(tile_begin + tiling.rows, s.group_begin + a.rows.group_rows[s.group]);
  s.begin = 0;
  // The first row of a chain has the lowest position; in a tree that is at least `past`.
  s.uncommitted = a.rows.is_uncommitted(s.group) && !a.both_ways;
  if (a.window > 0) {
    s.begin = max(0, (s.uncommitted ? s.past : a.rows.position[s.row_begin]) - a.window + 1);
    s.begin -= s.begin % tiling.align;  // a tile lies in one page
  }
  s.end = s.past + (a.both_ways ? a.rows.group_rows[s.group] : s.row_end - s.group_begin);
  const int n = s.end - s.begin;
  s.part = max(kMinPart, (n + a.n_splits - 1) / a.n_splits);
  s.part = (s.part + tiling.align - 1) / tiling.align * tiling.align;
  s.n_parts = (n + s.part - 1) / s.part;
  return s;
}

// What one query sees of a segment: slots lo .. hi - 1, and of the step's own uncommitted rows its ancestors.
struct QueryReach {
  int lo, hi;
};

// A row outside the segment sees nothing of it.
__device__ __forceinline__ QueryReach reach_of(const DeviceAttentionArgs& a, const Segment& s, int row) {
  if (row < s.row_begin || row >= s.row_end) return {0, 0};
  return {a.window > 0 ? a.rows.position[row] - a.window + 1 : 0,
          a.both_ways ? s.end : s.past + row - s.group_begin + 1};
}

// Of uncommitted rows: whether `row` sees slot past + j of its own step. The slot lies within the row's
// reach.
__device__ __forceinline__ bool sees_branch(const DeviceAttentionArgs& a, const Segment& s, int row, int j) {
  if (!(a.rows.ancestors[row] >> j & 1)) return false;
  return a.window <= 0 || a.rows.position[s.group_begin + j] > a.rows.position[row] - a.window;
}
__device__ __forceinline__ bool sees(const DeviceAttentionArgs& a, const Segment& s, const QueryReach& reach,
                                     int row, int slot) {
  if (slot < reach.lo || slot >= reach.hi) return false;
  return !s.uncommitted || slot < s.past || sees_branch(a, s, row, slot - s.past);
}

// ---- results of parts ----

__device__ __forceinline__ float* part_sums(const DeviceAttentionArgs& a, int row, int head, int part) {
  return a.partial + ((static_cast<int64_t>(row) * a.n_head + head) * a.n_splits + part) * a.head_dim;
}
// The largest score and the sum of weights, after all sums.
__device__ __forceinline__ float2* part_stats(const DeviceAttentionArgs& a, int row, int head, int part) {
  return reinterpret_cast<float2*>(a.partial +
                                   static_cast<int64_t>(a.n_rows) * a.n_head * a.n_splits * a.head_dim) +
         (static_cast<int64_t>(row) * a.n_head + head) * a.n_splits + part;
}

// What elements d .. d + 3 of a head's result are multiplied by, as it lies in memory.
__device__ __forceinline__ float4 load_gate(const DeviceAttentionArgs& a, int row, int head, int d) {
  const int64_t at = static_cast<int64_t>(row) * a.n_head + head;
  if (a.head_gate == HeadGate::None) return {0.0f, 0.0f, 0.0f, 0.0f};
  if (a.head_gate == HeadGate::SigmoidElement)
    return *reinterpret_cast<const float4*>(a.q_full + at * 2 * a.head_dim + a.head_dim + d);
  if (a.head_gate == HeadGate::SoftplusElement)
    return *reinterpret_cast<const float4*>(a.gate + at * a.head_dim + d);
  const float x = a.gate[at];
  return {x, x, x, x};
}

// Gates four elements of the result and hands them over. In the f16 form they lie together (act_place()).
__device__ __forceinline__ void put_gated(const DeviceAttentionArgs& a, int row, int head, int d, float4 x,
                                          float4 gate) {
  const auto factor = [&](float g) {
    return a.head_gate == HeadGate::SigmoidElement ? sigmoid_device(g) : softplus_device(g);
  };
  if (a.head_gate != HeadGate::None)
    x = {x.x * factor(gate.x), x.y * factor(gate.y), x.z * factor(gate.z), x.w * factor(gate.w)};
  const int column = head * a.head_dim + d;
  if (a.out.f16 != nullptr) {
    const auto narrow = [&](float y) { return fminf(fmaxf(y / a.out.scale, -65504.0f), 65504.0f); };
    static_assert(act_place(1) == 2 && act_place(2) == 1 && act_place(3) == 3);
    half* const to = static_cast<half*>(a.out.f16) + row * a.out.f16_stride + act_place(column);
    *reinterpret_cast<uint2*>(to) = {as_bits(__floats2half2_rn(narrow(x.x), narrow(x.z))),
                                     as_bits(__floats2half2_rn(narrow(x.y), narrow(x.w)))};
  }
  if (a.out.f32 != nullptr) *reinterpret_cast<float4*>(a.out.f32 + row * a.out.f32_stride + column) = x;
}

}  // namespace thermo
