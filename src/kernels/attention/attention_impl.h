// Attention over the Vf of the simd_*.h included before. Anonymous namespace: see simd_avx512.h.
//
// All heads of a group read the same keys, so the unit of work is a tile of "queries" = (row, head of the
// group), rows outermost, against blocks of 64 slots, with the usual running maximum and sum. Scores are kept
// transposed, [slot][query]: a register holds different queries of one slot, so the maximum and the sum over
// slots need no shuffles, and the second product reads its weights by broadcast from consecutive floats.
//
// Many queries: the transposed queries [dim][query] are the right-hand matrix and the keys, as stored, the
// left-hand one: two gemm calls per block. K and V blocks that are not f32 are widened into scratch first,
// once per block: about 1 part in 2 * n_queries of the work.
//
// Few queries (one decoded row): K and V are widened in registers and read once. Scores are plain dot
// products, kWidth of them summed across lanes at a time. Bound by memory: K and V of a slot once per group.
//
// Not tried: dot products for many queries too. The sums across lanes would add about 32 operations per
// 24 * head_dim / kWidth multiply-adds: 10 % at head_dim 256 and more below.
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_tiles.h"
#include "kernels/simd/gemm_impl.h"
#include "kernels/simd/math_impl.h"

namespace thermo {
namespace {

constexpr float kUnseen = -__builtin_inff();
// Start of the running maximum: finite, so that a block without visible slots gives exp(-inf - lowest) = 0,
// not NaN.
constexpr float kLowestScore = -1e30f;
constexpr int kFewQueries = Vf::kWidth < 8 ? Vf::kWidth : 8;
constexpr int kQ8Block = 32;
constexpr int kQ8Bytes = 34;

inline int64_t head_bytes(KvType type, int head_dim) {
  switch (type) {
    case KvType::F32:
      return int64_t{4} * head_dim;
    case KvType::F16:
      return int64_t{2} * head_dim;
    case KvType::Q8_0:
      return int64_t{kQ8Bytes} * (head_dim / kQ8Block);
  }
  return 0;
}

// Register i (elements i * kWidth ..) of one stored head.
struct ReadF32 {
  static Vf at(const std::byte* head, int i) {
    return vload(static_cast<const float*>(static_cast<const void*>(head)) + i * Vf::kWidth);
  }
};
struct ReadF16 {
  static Vf at(const std::byte* head, int i) { return vload_f16(head + 2 * i * Vf::kWidth); }
};
struct ReadQ8 {
  static Vf at(const std::byte* head, int i) {
    constexpr int kPerBlock = kQ8Block / Vf::kWidth;
    const std::byte* block = head + (i / kPerBlock) * kQ8Bytes;
    uint16_t scale;
    __builtin_memcpy(&scale, block, sizeof(scale));
    return vload_i8(block + 2 + (i % kPerBlock) * Vf::kWidth) * vset1(f16_value(scale));
  }
};

template <class Body>
inline void with_reader(KvType type, Body body) {
  switch (type) {
    case KvType::F32:
      body(ReadF32{});
      break;
    case KvType::F16:
      body(ReadF16{});
      break;
    case KvType::Q8_0:
      body(ReadQ8{});
      break;
  }
}

struct FloatRows {
  const float* data;
  int64_t stride;
};

// n consecutive slots of one head as f32: in place when they are stored so, else widened into `buffer`.
inline FloatRows widen(KvType type, const std::byte* first, int64_t slot_bytes, int n, int dim,
                       float* buffer) {
  if (type == KvType::F32)
    return {static_cast<const float*>(static_cast<const void*>(first)), slot_bytes / 4};
  with_reader(type, [&](auto reader) {
    const int n_vecs = dim / Vf::kWidth;
    for (int s = 0; s < n; ++s) {
      const std::byte* head = first + s * slot_bytes;
      float* out = buffer + int64_t{s} * dim;
      for (int i = 0; i < n_vecs; ++i) vstore(out + i * Vf::kWidth, reader.at(head, i));
      for (int d = n_vecs * Vf::kWidth; d < dim; ++d) {  // f16 only: q8_0 heads are whole blocks
        uint16_t half;
        __builtin_memcpy(&half, head + 2 * d, sizeof(half));
        out[d] = f16_value(half);
      }
    }
  });
  return {buffer, dim};
}

// One tile of queries against a range of slots.
struct Tile {
  const AttentionArgs* args;
  int head_kv;
  int query_begin;  // of n_rows * group
  int n_queries;
  int stride;      // of the score rows; n_queries rounded up
  float* max;      // [stride] running maximum
  float* sum;      // [stride]
  float* rescale;  // [stride] what the last block multiplied the earlier sums by

  int group() const { return args->n_head / args->n_head_kv; }
  int row_of(int query) const { return (query_begin + query) / group(); }
  int head_of(int query) const { return head_kv * group() + (query_begin + query) % group(); }
  int64_t offset_of(int query) const {
    return (int64_t{row_of(query)} * args->n_head + head_of(query)) * args->head_dim;
  }
};

inline bool row_sees_row(const AncestorBits& bits, int row, int other) {
  if (bits.words == nullptr) return other <= row;
  return (bits.words[int64_t{row} * bits.words_per_row + (other >> 6)] >> (other & 63)) & 1;
}

inline int first_committed(const AttentionArgs& args, int row) {
  return args.window <= 0 ? 0 : max_int(0, args.positions[row] - args.window + 1);
}

// Slots that any row of [row_begin, row_end] can see lie in [begin, end).
struct SlotRange {
  int begin, end;
};
inline SlotRange visible_slots(const AttentionArgs& args, int row_begin, int row_last) {
  int begin = args.n_past;
  for (int r = row_begin; r <= row_last; ++r) begin = min_int(begin, first_committed(args, r));
  const int n_own = args.ancestors.words == nullptr ? row_last + 1 : args.n_rows;
  return {begin, args.n_past + n_own};
}

// Overwrites the scores of slots a query does not see.
inline void mask_block(const Tile& tile, int slot_begin, int n_slots, float* scores) {
  const AttentionArgs& args = *tile.args;
  const int group = tile.group();
  for (int q = 0; q < tile.n_queries;) {
    const int row = tile.row_of(q);
    const int q_end = min_int(tile.n_queries, (row + 1) * group - tile.query_begin);
    const int position = args.positions[row];
    const int committed = first_committed(args, row);
    for (int s = 0; s < n_slots; ++s) {
      const int slot = slot_begin + s;
      bool seen;
      if (slot < args.n_past) {
        seen = slot >= committed;
      } else {
        const int other = slot - args.n_past;
        seen = row_sees_row(args.ancestors, row, other) &&
               (args.window <= 0 || args.positions[other] > position - args.window);
      }
      if (!seen)
        for (int k = q; k < q_end; ++k) scores[int64_t{s} * tile.stride + k] = kUnseen;
    }
    q = q_end;
  }
}

// Whether every row of the tile sees every slot of the block.
inline bool block_is_open(const Tile& tile, int slot_begin, int n_slots) {
  const AttentionArgs& args = *tile.args;
  const int row_begin = tile.row_of(0), row_last = tile.row_of(tile.n_queries - 1);
  if (slot_begin + n_slots <= args.n_past) {
    if (args.window <= 0) return true;
    for (int r = row_begin; r <= row_last; ++r)
      if (slot_begin < first_committed(args, r)) return false;
    return true;
  }
  return args.window <= 0 && args.ancestors.words == nullptr &&
         slot_begin + n_slots <= args.n_past + row_begin + 1;
}

// Scores to weights relative to the new running maximum. The block is [n_slots][stride]; when stride is below
// the register width a register holds kWidth / stride slots (n_slots is then padded to whole registers with
// kUnseen).
inline void softmax_block(const Tile& tile, int n_slots, float* scores) {
  constexpr int W = Vf::kWidth;
  const int stride = tile.stride;
  if (stride >= W) {
    for (int q = 0; q < stride; q += W) {
      const Vf old_max = vload(tile.max + q);
      Vf top[2] = {old_max, old_max};
      int s = 0;
      for (; s + 2 <= n_slots; s += 2) {
        top[0] = vmax(top[0], vload(scores + int64_t{s} * stride + q));
        top[1] = vmax(top[1], vload(scores + int64_t{s + 1} * stride + q));
      }
      if (s < n_slots) top[0] = vmax(top[0], vload(scores + int64_t{s} * stride + q));
      const Vf new_max = vmax(top[0], top[1]);
      const Vf rescale = vexp(old_max - new_max);
      Vf total = vzero();
      for (s = 0; s < n_slots; ++s) {
        float* p = scores + int64_t{s} * stride + q;
        const Vf w = vexp(vload(p) - new_max);
        vstore(p, w);
        total = total + w;
      }
      vstore(tile.max + q, new_max);
      vstore(tile.rescale + q, rescale);
      vstore(tile.sum + q, vfma(vload(tile.sum + q), rescale, total));
    }
    return;
  }
  alignas(64) float lanes[W];
  const int n = round_up(n_slots * stride, W);
  Vf top = vset1(kLowestScore);
  for (int i = 0; i < n; i += W) top = vmax(top, vload(scores + i));
  vstore(lanes, top);
  alignas(64) float new_max[W] = {};
  for (int q = 0; q < stride; ++q) {
    float best = tile.max[q];
    for (int i = q; i < W; i += stride) best = lanes[i] > best ? lanes[i] : best;
    for (int i = q; i < W; i += stride) new_max[i] = best;
  }
  const Vf shift = vload(new_max);
  Vf total = vzero();
  for (int i = 0; i < n; i += W) {
    const Vf w = vexp(vload(scores + i) - shift);
    vstore(scores + i, w);
    total = total + w;
  }
  alignas(64) float old_max[W] = {};
  for (int q = 0; q < stride; ++q) old_max[q] = tile.max[q];
  alignas(64) float rescale[W];
  vstore(rescale, vexp(vload(old_max) - shift));
  vstore(lanes, total);
  for (int q = 0; q < stride; ++q) {
    float sum = 0.0f;
    for (int i = q; i < W; i += stride) sum += lanes[i];
    tile.sum[q] = tile.sum[q] * rescale[q] + sum;
    tile.max[q] = new_max[q];
    tile.rescale[q] = rescale[q];
  }
}

inline void start_tile(const Tile& tile) {
  for (int q = 0; q < tile.stride; ++q) {
    tile.max[q] = kLowestScore;
    tile.sum[q] = 0.0f;
    tile.rescale[q] = 0.0f;
  }
}

// Many queries: sums [n_queries][dim] unfinished. False: no slot at all.
inline bool walk_many(const Tile& tile, SlotRange slots, float* scratch) {
  const AttentionArgs& args = *tile.args;
  const int dim = args.head_dim;
  const AttentionScratch layout(dim);
  float* queries = scratch + layout.queries();
  float* scores = scratch + layout.scores();
  float* sums = scratch + layout.sums();
  const int64_t k_head = head_bytes(args.kv.k_type, dim), v_head = head_bytes(args.kv.v_type, dim);
  const int64_t k_slot = k_head * args.n_head_kv, v_slot = v_head * args.n_head_kv;

  // Queries, scaled and transposed; `keys` is free until the first block.
  float* staged = scratch + layout.keys();
  static_assert(kAttentionQueries <= kAttentionKeys);
  const Vf scale = vset1(args.scale);
  for (int q = 0; q < tile.n_queries; ++q) {
    const float* from = args.q + tile.offset_of(q);
    float* to = staged + int64_t{q} * dim;
    for_each_vec(dim,
                 [&](int i, int count) { vstore_part(to + i, vload_part(from + i, count) * scale, count); });
  }
  for (int64_t i = int64_t{tile.n_queries} * dim; i < int64_t{tile.stride} * dim; ++i) staged[i] = 0.0f;
  transpose(staged, dim, tile.stride, dim, queries, tile.stride);

  start_tile(tile);
  bool started = false;
  for (int slot = slots.begin; slot < slots.end; slot += kAttentionKeys) {
    const int n = min_int(kAttentionKeys, slots.end - slot);
    const FloatRows k = widen(args.kv.k_type, args.kv.k + slot * k_slot + tile.head_kv * k_head, k_slot, n,
                              dim, scratch + layout.keys());
    gemm(n, tile.stride, dim, k.data, k.stride, 1, queries, tile.stride, scores, tile.stride, nullptr);
    if (!block_is_open(tile, slot, n)) mask_block(tile, slot, n, scores);
    softmax_block(tile, n, scores);
    const FloatRows v = widen(args.kv.v_type, args.kv.v + slot * v_slot + tile.head_kv * v_head, v_slot, n,
                              dim, scratch + layout.values());
    gemm(tile.n_queries, dim, n, scores, 1, tile.stride, v.data, v.stride, sums, dim,
         started ? tile.rescale : nullptr);
    started = true;
  }
  return started;
}

// Few queries: kQueries of them, of which the first kActive are real (the scores of the others are 0), and
// kWidth / kQueries slots per set of accumulators.
template <int kQueries, int kActive, class Reader>
inline void scores_few(const float* queries, const std::byte* keys, int64_t k_slot, int n, int dim,
                       float* scores, int k_bytes, const std::byte* values, int64_t v_slot, int v_bytes) {
  constexpr int W = Vf::kWidth;
  constexpr int kSlots = W / kQueries;
  const int n_vecs = dim / W;
  for (int s = 0; s < n; s += kSlots) {
    const std::byte* heads[kSlots];
    for (int k = 0; k < kSlots; ++k) heads[k] = keys + min_int(s + k, n - 1) * k_slot;
    // A slot is a short run in a long stride, which the hardware does not follow: fetch the values of these
    // slots for the second product, and keys a few slots ahead (past the end of the block: the next block's).
    for (int k = 0; k < kSlots && s + k < n; ++k) {
      for (int i = 0; i < v_bytes; i += 64) __builtin_prefetch(values + (s + k) * v_slot + i);
      for (int i = 0; i < k_bytes; i += 64) __builtin_prefetch(heads[k] + 8 * k_slot + i);
    }
    Vf acc[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) acc[i] = vzero();
    for (int d = 0; d < n_vecs; ++d) {
      Vf key[kSlots];
#pragma GCC unroll 16
      for (int k = 0; k < kSlots; ++k) key[k] = Reader::at(heads[k], d);
#pragma GCC unroll 16
      for (int q = 0; q < kActive; ++q) {
        const Vf x = vload(queries + int64_t{q} * dim + d * W);
#pragma GCC unroll 16
        for (int k = 0; k < kSlots; ++k) acc[k * kQueries + q] = vfma(x, key[k], acc[k * kQueries + q]);
      }
    }
    vstore(scores + s * kQueries, vsum_each(acc));
  }
}

template <int kQueries, int kActive, class Reader>
inline void sums_few(const float* weights, const std::byte* values, int64_t v_slot, int n, int dim,
                     const float* rescale, float* sums) {
  constexpr int W = Vf::kWidth;
  constexpr int kVecs = W == 16 ? 2 : 1;
  const int n_vecs = dim / W;
  const auto strip = [&]<int kStrip>(int first) {
    Vf acc[kActive][kStrip];
#pragma GCC unroll 8
    for (int q = 0; q < kActive; ++q)
#pragma GCC unroll 8
      for (int v = 0; v < kStrip; ++v)
        acc[q][v] = vload(sums + int64_t{q} * dim + (first + v) * W) * vset1(rescale[q]);
    for (int s = 0; s < n; ++s) {
      Vf row[kStrip];
#pragma GCC unroll 8
      for (int v = 0; v < kStrip; ++v) row[v] = Reader::at(values + s * v_slot, first + v);
#pragma GCC unroll 8
      for (int q = 0; q < kActive; ++q) {
        const Vf w = vset1(weights[s * kQueries + q]);
#pragma GCC unroll 8
        for (int v = 0; v < kStrip; ++v) acc[q][v] = vfma(w, row[v], acc[q][v]);
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < kActive; ++q)
#pragma GCC unroll 8
      for (int v = 0; v < kStrip; ++v) vstore(sums + int64_t{q} * dim + (first + v) * W, acc[q][v]);
  };
  int i = 0;
  for (; i + kVecs <= n_vecs; i += kVecs) strip.template operator()<kVecs>(i);
  for (; i < n_vecs; ++i) strip.template operator()<1>(i);
}

template <int kQueries, int kActive>
inline bool walk_few(const Tile& tile, SlotRange slots, float* scratch) {
  constexpr int W = Vf::kWidth;
  const AttentionArgs& args = *tile.args;
  const int dim = args.head_dim;
  const AttentionScratch layout(dim);
  float* queries = scratch + layout.queries();
  float* scores = scratch + layout.scores();
  float* sums = scratch + layout.sums();
  const int64_t k_head = head_bytes(args.kv.k_type, dim), v_head = head_bytes(args.kv.v_type, dim);
  const int64_t k_slot = k_head * args.n_head_kv, v_slot = v_head * args.n_head_kv;

  const Vf scale = vset1(args.scale);
  for (int q = 0; q < kActive; ++q) {
    const float* from = q < tile.n_queries ? args.q + tile.offset_of(q) : nullptr;
    for (int d = 0; d < dim; d += W) {
      vstore(queries + int64_t{q} * dim + d, from == nullptr ? vzero() : vload(from + d) * scale);
      vstore(sums + int64_t{q} * dim + d, vzero());
    }
  }
  start_tile(tile);
  for (int slot = slots.begin; slot < slots.end; slot += kAttentionKeys) {
    const int n = min_int(kAttentionKeys, slots.end - slot);
    const std::byte* k = args.kv.k + slot * k_slot + tile.head_kv * k_head;
    const std::byte* v = args.kv.v + slot * v_slot + tile.head_kv * v_head;
    with_reader(args.kv.k_type, [&](auto reader) {
      scores_few<kQueries, kActive, decltype(reader)>(
          queries, k, k_slot, n, dim, scores, static_cast<int>(k_head), v, v_slot, static_cast<int>(v_head));
    });
    if (!block_is_open(tile, slot, n)) mask_block(tile, slot, n, scores);
    for (int i = n * kQueries; i < round_up(n * kQueries, W); ++i) scores[i] = kUnseen;
    softmax_block(tile, n, scores);
    with_reader(args.kv.v_type, [&](auto reader) {
      sums_few<kQueries, kActive, decltype(reader)>(scores, v, v_slot, n, dim, tile.rescale, sums);
    });
  }
  return slots.begin < slots.end;
}

inline bool walk_few_of(const Tile& tile, SlotRange slots, float* scratch) {
  switch (tile.n_queries) {
    case 1:
      return walk_few<2, 1>(tile, slots, scratch);
    case 2:
      return walk_few<2, 2>(tile, slots, scratch);
    case 3:
      return walk_few<4, 3>(tile, slots, scratch);
    case 4:
      return walk_few<4, 4>(tile, slots, scratch);
    default:
      break;
  }
  if constexpr (kFewQueries == 8) {
    if (tile.n_queries <= 6) return walk_few<8, 6>(tile, slots, scratch);
    return walk_few<8, 8>(tile, slots, scratch);
  }
  return false;
}

// Walks one tile and hands each query's result to finish(query, sums, max, sum).
template <class Finish>
inline void attend_tiles(const AttentionArgs& args, int row_begin, int row_end, int head_kv, int slot_begin,
                         int slot_end, float* scratch, Finish finish) {
  const int dim = args.head_dim;
  const int group = args.n_head / args.n_head_kv;
  const AttentionScratch layout(dim);
  float* stats = scratch + layout.stats();
  for (int begin = row_begin * group; begin < row_end * group; begin += kAttentionQueries) {
    Tile tile = {.args = &args,
                 .head_kv = head_kv,
                 .query_begin = begin,
                 .n_queries = min_int(kAttentionQueries, row_end * group - begin),
                 .stride = 0,
                 .max = stats,
                 .sum = stats + kAttentionQueries,
                 .rescale = stats + 2 * kAttentionQueries};
    SlotRange slots = visible_slots(args, tile.row_of(0), tile.row_of(tile.n_queries - 1));
    slots.begin = max_int(slots.begin, slot_begin);
    slots.end = min_int(slots.end, slot_end);
    bool any;
    if (tile.n_queries <= kFewQueries && dim % Vf::kWidth == 0) {
      tile.stride = tile.n_queries <= 2 ? 2 : tile.n_queries <= 4 ? 4 : kFewQueries;
      any = walk_few_of(tile, slots, scratch);
    } else {
      tile.stride = round_up(tile.n_queries, Vf::kWidth);
      any = walk_many(tile, slots, scratch);
    }
    if (!any) {
      float* sums = scratch + layout.sums();
      for (int i = 0; i < tile.n_queries * dim; ++i) sums[i] = 0.0f;
    }
    for (int q = 0; q < tile.n_queries; ++q)
      finish(tile, q, scratch + layout.sums() + int64_t{q} * dim, tile.max[q], tile.sum[q]);
  }
}

void attend_rows(const AttentionArgs& args, int row_begin, int row_end, int head_kv,
                 float* scratch) noexcept {
  attend_tiles(args, row_begin, row_end, head_kv, 0, args.n_past + args.n_rows, scratch,
               [&](const Tile& tile, int q, const float* sums, float, float sum) {
                 const Vf scale = vset1(sum > 0.0f ? 1.0f / sum : 0.0f);
                 float* out = args.out + tile.offset_of(q);
                 for_each_vec(args.head_dim, [&](int i, int count) {
                   vstore_part(out + i, vload_part(sums + i, count) * scale, count);
                 });
               });
}

void attend_row_slots(const AttentionArgs& args, int row_begin, int row_end, int head_kv, int slot_begin,
                      int slot_end, float* scratch, float* partial) noexcept {
  const int first = row_begin * (args.n_head / args.n_head_kv);
  attend_tiles(args, row_begin, row_end, head_kv, slot_begin, slot_end, scratch,
               [&](const Tile& tile, int q, const float* sums, float max, float sum) {
                 float* out = partial + int64_t{tile.query_begin + q - first} * (args.head_dim + 2);
                 for_each_vec(args.head_dim, [&](int i, int count) {
                   vstore_part(out + i, vload_part(sums + i, count), count);
                 });
                 out[args.head_dim] = max;
                 out[args.head_dim + 1] = sum;
               });
}

inline void store_head(KvType type, const float* x, int dim, std::byte* out) {
  constexpr int W = Vf::kWidth;
  switch (type) {
    case KvType::F32:
      __builtin_memcpy(out, x, static_cast<size_t>(dim) * sizeof(float));
      return;
    case KvType::F16: {
      int i = 0;
      for (; i + W <= dim; i += W) vstore_f16(out + 2 * i, vload(x + i));
      for (; i < dim; ++i) {
        const uint16_t half = f16_bits(x[i]);
        __builtin_memcpy(out + 2 * i, &half, sizeof(half));
      }
      return;
    }
    case KvType::Q8_0:
      for (int b = 0; b < dim / kQ8Block; ++b, x += kQ8Block, out += kQ8Bytes) {
        Vf top = vzero();
        for (int i = 0; i < kQ8Block; i += W) top = vmax(top, vabs(vload(x + i)));
        const float scale = vmax_lanes(top) / 127.0f;
        const uint16_t half = f16_bits(scale);
        __builtin_memcpy(out, &half, sizeof(half));
        // Quantised by the unrounded scale, like every other q8_0 writer.
        const Vf inverse = vset1(scale > 0.0f ? 1.0f / scale : 0.0f);
        for (int i = 0; i < kQ8Block; i += W) vstore_i8(out + 2 + i, vload(x + i) * inverse);
      }
      return;
  }
}

void append_rows(const KvAppendArgs& args) noexcept {
  const int64_t k_head = head_bytes(args.kv.k_type, args.head_dim);
  const int64_t v_head = head_bytes(args.kv.v_type, args.head_dim);
  const int n = args.n_rows * args.n_head_kv;
  std::byte* k = args.kv.k + int64_t{args.first_slot} * args.n_head_kv * k_head;
  std::byte* v = args.kv.v + int64_t{args.first_slot} * args.n_head_kv * v_head;
  for (int i = 0; i < n; ++i) {
    store_head(args.kv.k_type, args.k + int64_t{i} * args.head_dim, args.head_dim, k + i * k_head);
    store_head(args.kv.v_type, args.v + int64_t{i} * args.head_dim, args.head_dim, v + i * v_head);
  }
}

constexpr AttentionKernels kAttention = {
    .attend = attend_rows,
    .attend_slots = attend_row_slots,
    .kv_append = append_rows,
};

}  // namespace
}  // namespace thermo
