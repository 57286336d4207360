// What the attending kernels share: which slots the rows of a block see, how those are cut into parts, and
// where the results of a part lie.
//
// Steps of up to 64 rows have one arithmetic, so that the bits of a row depend on its query and on the keys
// and values it sees, in the order of their positions, and on nothing else:
//   - Positions are cut at multiples of 16 into tiles, and at multiples of a chunk (a tile for each warp of a
//     block) into chunks. Chunk c belongs to part c % n_splits, whatever the length of the context. n_splits
//     depends on model and card only.
//   - The tiles of one warp in one part follow each other in one running softmax: scores by the same
//     products in the same order, the largest score, then weights and sums relative to it.
//   - The warps of a part are added up in order, then the parts: every so many of them by one thread, in
//     order.
//   - A position that a row does not see has weight 0, and a tile, warp or part without any adds 0 with
//     weight 0: no bit changes. So rows can share tiles with others that see more, or less.
//   - Uncommitted rows of a tree lie at slots that are not their positions. From the tile of the first
//     uncommitted position on, a row gathers the slots of its own path into the places of their positions. A
//     row whose ancestors are all rows before it needs no gathering.
//   - Norm and rotation of a head: sums of squares over consecutive elements of a lane, then over the warp.
// Products that are added up are fused by hand: what the compiler fuses can differ from kernel to kernel.
//
// In steps of more rows, rows are attended in tiles of `rows` consecutive rows of the step. The rows of a
// tile that belong to one sequence are a segment: they read one cache. A segment's slots are cut into at most
// n_splits parts; block (tile, part) leaves sums of values, the largest score and the sum of weights of every
// (row, head). Scores are in units of log 2.
#pragma once

#include "kernels/attention/attention_cuda.h"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

inline constexpr int kMaxOneArithmeticRows = 64;  // of a step in which the bits of a row are its own
inline constexpr int kMinPart = 64;               // slots that are worth a block, in larger steps
inline constexpr float kLog2E = 1.4426950408889634f;

struct AttentionTiling {
  int rows;   // of a tile
  int align;  // parts are multiples of this many slots
};

__host__ __device__ constexpr int64_t head_bytes(KvType type, int dim) {
  switch (type) {
    case KvType::F32:
      return 4 * dim;
    case KvType::F16:
    case KvType::BF16:
      return 2 * dim;
    case KvType::Q8_0:
      return dim / 32 * 34;
    case KvType::Q4_0:
      return dim / 32 * 18;
  }
  return 0;
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

// ---- one arithmetic ----

// What a row sees: positions lo .. hi - 1. Those from `tail` on are not at slots of their number but at
// slot_of().
struct RowView {
  int lo, hi, tail;
  int past;
  uint64_t path;  // the row and its ancestors, if there is a tail

  // REQUIRES: tail <= position < hi.
  __device__ __forceinline__ int slot_of(int position) const {
    if (position < past) return position;
    uint64_t rest = path;
    int n = position - past, row = 0;
#pragma unroll
    for (int width = 32; width > 0; width /= 2) {
      const int low = __popcll(rest & ((uint64_t{1} << width) - 1));
      const bool up = n >= low;
      n -= up ? low : 0;
      row += up ? width : 0;
      rest = up ? rest >> width : rest;
    }
    return past + row;
  }
};

// REQUIRES: the row is no padding. `tile`: positions that are gathered together.
__device__ __forceinline__ RowView view_of(const DeviceAttentionArgs& a, int row, int tile) {
  const int group = a.rows.group[row], index = row - a.rows.group_begin[group];
  RowView view;
  view.past = a.rows.group_past[group];
  view.lo = a.window > 0 ? max(0, a.rows.position[row] - a.window + 1) : 0;
  view.hi = view.past + (a.both_ways ? a.rows.group_rows[group] : index + 1);
  view.tail = view.hi;
  view.path = 0;
  if (a.rows.is_uncommitted(group) && !a.both_ways) {
    view.path = a.rows.ancestors[row];
    view.hi = view.past + __popcll(view.path);
    view.tail = (view.path & (view.path + 1)) == 0 ? view.hi : view.past / tile * tile;
  }
  return view;
}

// The parts that positions lo .. hi - 1 belong to: n of them from `first` on, around the end of all.
struct PartRange {
  int first, n, of;

  __device__ __forceinline__ PartRange(int lo, int hi, int chunk, int n_splits)
      : first(lo / chunk % n_splits), n((hi - 1) / chunk - lo / chunk + 1), of(n_splits) {}
  __device__ __forceinline__ explicit PartRange(int n_parts) : first(0), n(n_parts), of(n_parts) {}
  __device__ __forceinline__ bool has(int part) const {
    return part < of && part - first + (part < first ? of : 0) < n;
  }
  __device__ __forceinline__ int end() const { return min(first + n, of); }
};

// The first number from `from` on that is `index` modulo n. REQUIRES: 0 <= index < n.
__device__ __forceinline__ int first_in_turn(int from, int index, int n) {
  const int at = from % n;
  return from + index - at + (index < at ? n : 0);
}

// Scores of two slots of a query to weights: x and y. The other slots of the tile are in the lanes that
// differ from this one in the bits 4, 8 and 16. Returns what earlier sums shrink by.
__device__ __forceinline__ float weigh_tile(float& x, float& y, float& top, float& total) {
  float now = fmaxf(fmaxf(x, y), top);
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, mask));
  const float base = now == -INFINITY ? 0.0f : now, shrink = exp2_fast(top - base);
  top = now;
  x = exp2_fast(x - base);
  y = exp2_fast(y - base);
  total = fmaf(total, shrink, x) + y;
  return shrink;
}

// The same of the lane's two queries and their slots `slot` and slot + 8, from two chains of sums: score[j]
// and score[2 + j] become weights, 0 for slots that query j does not reach.
__device__ __forceinline__ void weigh_scores(float (&score)[4], const float (&other)[4], int slot,
                                             const QueryReach& first, const QueryReach& second,
                                             float (&top)[2], float (&total)[2], float (&shrink)[2]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const QueryReach& reach = j == 0 ? first : second;
    float x = score[j] + other[j], y = score[2 + j] + other[2 + j];
    if (slot < reach.lo || slot >= reach.hi) x = -INFINITY;
    if (slot + 8 < reach.lo || slot + 8 >= reach.hi) y = -INFINITY;
    shrink[j] = weigh_tile(x, y, top[j], total[j]);
    score[j] = x;
    score[2 + j] = y;
  }
}

// Of all parts, of which a lane has two: largest score and sum of weights. f0, f1: factors of the lane's
// parts.
__device__ __forceinline__ float weigh_parts(float2 s0, float2 s1, float& f0, float& f1) {
  float top = fmaxf(s0.x, s1.x);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
  if (top == -INFINITY) top = 0.0f;
  f0 = exp2_fast(s0.x - top);
  f1 = exp2_fast(s1.x - top);
  return warp_sum(fmaf(f0, s0.y, f1 * s1.y));
}
// Threads that add up parts of the same elements: thread i takes part i, i + this many, ..
__host__ __device__ constexpr int part_turns(int dim) {
  return 512 / dim;
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
