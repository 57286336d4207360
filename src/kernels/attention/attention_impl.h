// Attention over the Vf of the simd_*.h included before. Anonymous namespace: see simd_avx512.h.
//
// All heads of a group read the same keys, so the unit of work is a tile of "queries" = (row, head of the
// group), rows outermost, against blocks of 64 positions, with the usual running maximum and sum. Scores are
// kept transposed, [position][query]: a register holds different queries of one position, so the maximum and
// the sum over positions need no shuffles, and the second product reads its weights by broadcast from
// consecutive floats.
//
// Every sum has one order, fixed by the position and the head size, whoever takes it:
//   - q.k: kWidth sums over the dims that share a lane, then the tree of vsum_each over them;
//   - the weights of a block: four sums over the positions that are equal modulo 4, then a tree;
//   - the weighted values of a block: one position after the other;
//   - blocks begin at multiples of 64 and spans at multiples of kAttentionSpan, each span from scratch; spans
//     are merged in order.
// A position that a row does not see has weight 0, which changes no bit of these sums. So the bits of a row
// do not depend on its neighbours, on the cut of a prompt, or on threads. The uncommitted rows of a tree lie
// at slots that are not their positions: from the block of n_past on, each row gathers the slots of its own
// path in the order of positions.
//
// Many queries: the transposed queries [dim][query] are the right-hand matrix and the keys, as stored, the
// left-hand one: two products per block. K and V blocks that are not f32 are widened into scratch first, once
// per block: about 1 part in 2 * n_queries of the work. The lanes of q.k are here kWidth
// separate sums per score, which cost about a tenth of the time of a tile at head_dim 128 to 256.
//
// Few queries (one decoded row): K and V are widened in registers and read once. Scores are plain dot
// products, kWidth of them summed across lanes at a time. Bound by memory: K and V of a slot once per group.
//
// Rejected: one sum over all dims for q.k, which costs many queries nothing. Few queries would have to
// transpose their keys: 96 operations per 128 multiply-adds with a group of 8.
#pragma once

#include "kernels/attention/attention_kv.h"
#include "kernels/attention/attention_tiles.h"
#include "kernels/simd/gemm_impl.h"

namespace thermo {
namespace {

constexpr float kUnseen = -__builtin_inff();
// Start of the running maximum: finite, so that a block without visible positions gives exp(-inf - lowest) =
// 0, not NaN.
constexpr float kLowestScore = -1e30f;
constexpr int kFewQueries = Vf::kWidth < 8 ? Vf::kWidth : 8;
constexpr int kSumParts = 4;  // sums over positions that are equal modulo this
static_assert(kAttentionSpan % kAttentionKeys == 0 && kKvPage % kAttentionKeys == 0);

// Positions [begin, end).
struct Positions {
  int begin, end;
};

// Slots of one block: heads of consecutive positions, `k_step` and `v_step` bytes apart.
struct KeyBlock {
  int position;  // of the first
  int n;
  const std::byte* k;
  const std::byte* v;
  int64_t k_step, v_step;
};

// Some query vectors that go over the positions together, and what they have seen so far.
struct Tile {
  const AttentionArgs* args;
  int head_kv;
  int query_begin;  // of n_rows * group
  int n_queries;
  bool few;
  int stride;       // of the score rows; n_queries rounded up
  float* queries;   // scaled; few: [query][dim], many: [dim by lanes][stride]
  SpanState state;  // of this span
  float* rescale;   // [stride] what the last block multiplied the earlier sums by
  float* scores;    // [position][stride]
  float* keys;      // widened
  float* values;

  int group() const { return args->n_head / args->n_head_kv; }
  int row_of(int query) const { return (query_begin + query) / group(); }
  int head_of(int query) const { return head_kv * group() + (query_begin + query) % group(); }
  int64_t offset_of(int query) const {
    return (int64_t{row_of(query)} * args->n_head + head_of(query)) * args->head_dim;
  }
  // Of the first query of the next row, at most n_queries.
  int end_of_row(int query) const { return min_int(n_queries, (row_of(query) + 1) * group() - query_begin); }
};

// ---- what a row sees
// -------------------------------------------------------------------------------------------

inline Positions seen_by(const AttentionArgs& args, int row) {
  const int last = args.positions[row];
  return {args.window <= 0 ? 0 : max_int(0, last - args.window + 1),
          args.both_ways ? args.n_past + args.n_rows : last + 1};
}

// What any query of the tile sees, from the start of a block on.
inline Positions seen_by(const Tile& tile) {
  Positions all = seen_by(*tile.args, tile.row_of(0));
  for (int q = tile.end_of_row(0); q < tile.n_queries; q = tile.end_of_row(q)) {
    const Positions row = seen_by(*tile.args, tile.row_of(q));
    all = {min_int(all.begin, row.begin), max_int(all.end, row.end)};
  }
  all.begin = all.begin / kAttentionKeys * kAttentionKeys;
  return all;
}

// Overwrites the scores of positions a query does not see.
inline void mask_block(const Tile& tile, const KeyBlock& block) {
  for (int q = 0, q_end; q < tile.n_queries; q = q_end) {
    q_end = tile.end_of_row(q);
    const Positions seen = seen_by(*tile.args, tile.row_of(q));
    const auto hide = [&](int begin, int end) {
      for (int s = begin; s < end; ++s)
        for (int k = q; k < q_end; ++k) tile.scores[int64_t{s} * tile.stride + k] = kUnseen;
    };
    hide(0, min_int(block.n, seen.begin - block.position));
    hide(max_int(0, seen.end - block.position), block.n);
  }
}

// ---- many queries
// ----------------------------------------------------------------------------------------------

inline void prepare_many(const Tile& tile) {
  const AttentionArgs& args = *tile.args;
  const int dim = args.head_dim;
  float* staged = tile.keys;  // free until the first block
  static_assert(kAttentionQueries <= kAttentionKeys);
  const Vf scale = vset1(args.scale);
  for (int q = 0; q < tile.n_queries; ++q) {
    const float* from = args.q + tile.offset_of(q);
    float* to = staged + int64_t{q} * dim;
    for_each_vec(dim,
                 [&](int i, int count) { vstore_part(to + i, vload_part(from + i, count) * scale, count); });
  }
  for (int64_t i = int64_t{tile.n_queries} * dim; i < int64_t{tile.stride} * dim; ++i) staged[i] = 0.0f;
  transpose_by_lanes(staged, dim, tile.stride, dim, tile.queries, tile.stride);
}

// Scores to weights relative to the new running maximum.
inline void softmax_many(const Tile& tile, int n) {
  constexpr int W = Vf::kWidth;
  const int stride = tile.stride;
  for (int q = 0; q < stride; q += W) {
    const Vf old_max = vload(tile.state.max + q);
    Vf top[2] = {old_max, old_max};
    int s = 0;
    for (; s + 2 <= n; s += 2) {
      top[0] = vmax(top[0], vload(tile.scores + int64_t{s} * stride + q));
      top[1] = vmax(top[1], vload(tile.scores + int64_t{s + 1} * stride + q));
    }
    if (s < n) top[0] = vmax(top[0], vload(tile.scores + int64_t{s} * stride + q));
    const Vf new_max = vmax(top[0], top[1]);
    const Vf rescale = vexp(old_max - new_max);
    Vf total[kSumParts] = {vzero(), vzero(), vzero(), vzero()};
    for (s = 0; s < n; s += kSumParts)
      for (int u = 0; u < kSumParts && s + u < n; ++u) {
        float* p = tile.scores + int64_t{s + u} * stride + q;
        const Vf w = vexp(vload(p) - new_max);
        vstore(p, w);
        total[u] = total[u] + w;
      }
    vstore(tile.state.max + q, new_max);
    vstore(tile.rescale + q, rescale);
    vstore(tile.state.sum + q,
           vfma(vload(tile.state.sum + q), rescale, (total[0] + total[1]) + (total[2] + total[3])));
  }
}

inline void walk_many(const Tile& tile, const KeyBlock& block, bool open) {
  const AttentionArgs& args = *tile.args;
  const int dim = args.head_dim;
  const FloatRows k = widen(args.kv.k_type, block.k, block.k_step, block.n, dim, tile.keys);
  gemm_lanes(block.n, tile.stride, dim, k.data, k.stride, tile.queries, tile.stride, tile.scores,
             tile.stride);
  if (!open) mask_block(tile, block);
  softmax_many(tile, block.n);
  const FloatRows v = widen(args.kv.v_type, block.v, block.v_step, block.n, dim, tile.values);
  gemm(tile.n_queries, dim, block.n, tile.scores, 1, tile.stride, v.data, v.stride, tile.state.sums, dim,
       tile.rescale);
}

// ---- few queries
// -----------------------------------------------------------------------------------------------

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

inline void prepare_few(const Tile& tile) {
  constexpr int W = Vf::kWidth;
  const int dim = tile.args->head_dim;
  const Vf scale = vset1(tile.args->scale);
  for (int q = 0; q < tile.stride; ++q) {
    const float* from = q < tile.n_queries ? tile.args->q + tile.offset_of(q) : nullptr;
    for (int d = 0; d < dim; d += W)
      vstore(tile.queries + int64_t{q} * dim + d, from == nullptr ? vzero() : vload(from + d) * scale);
  }
}

// The scores are [n][kQueries], so a register holds kWidth / kQueries positions or a part of one.
template <int kQueries>
inline void softmax_few(const Tile& tile, int n) {
  constexpr int W = Vf::kWidth;
  constexpr int kPart = kSumParts * kQueries;  // floats of four positions
  float* const scores = tile.scores;
  // Up to whole registers and to a multiple of four positions, with positions that nobody sees.
  const int n_floats = round_up(n * kQueries, kPart < W ? W : kPart);
  for (int i = n * kQueries; i < n_floats; ++i) scores[i] = kUnseen;

  alignas(64) float lanes[W], new_max[W], old_max[W] = {}, rescale[W];
  Vf top = vset1(kLowestScore);
  for (int i = 0; i < n_floats; i += W) top = vmax(top, vload(scores + i));
  vstore(lanes, top);
  for (int q = 0; q < kQueries; ++q) {
    float best = old_max[q] = tile.state.max[q];
    for (int i = q; i < W; i += kQueries) best = lanes[i] > best ? lanes[i] : best;
    for (int i = q; i < W; i += kQueries) new_max[i] = best;
  }
  const Vf shift = vload(new_max);
  vstore(rescale, vexp(vload(old_max) - shift));
  // part[k]: over the positions that are k / kQueries modulo four.
  alignas(64) float part[kPart < W ? W : kPart] = {};
  if constexpr (kPart >= W) {
    Vf sums[kPart / W];
#pragma GCC unroll 8
    for (int k = 0; k < kPart / W; ++k) sums[k] = vzero();
    for (int i = 0; i < n_floats; i += kPart)
#pragma GCC unroll 8
      for (int k = 0; k < kPart / W; ++k) {
        const Vf w = vexp(vload(scores + i + k * W) - shift);
        vstore(scores + i + k * W, w);
        sums[k] = sums[k] + w;
      }
    for (int k = 0; k < kPart / W; ++k) vstore(part + k * W, sums[k]);
  } else {
    for (int i = 0; i < n_floats; i += W) vstore(scores + i, vexp(vload(scores + i) - shift));
    for (int i = 0; i < n_floats; i += kPart)
      for (int k = 0; k < kPart; ++k) part[k] += scores[i + k];
  }
  alignas(64) float total[W] = {};
  for (int q = 0; q < kQueries; ++q)
    total[q] = (part[q] + part[kQueries + q]) + (part[2 * kQueries + q] + part[3 * kQueries + q]);
  // Lanes from kQueries on are nobody's.
  vstore(tile.state.sum, vfma(vload(tile.state.sum), vload(rescale), vload(total)));
  vstore(tile.state.max, shift);
  vstore(tile.rescale, vload(rescale));
}

template <int kQueries, int kActive>
inline void walk_few(const Tile& tile, const KeyBlock& block, bool open) {
  const AttentionArgs& args = *tile.args;
  const int dim = args.head_dim;
  with_reader(args.kv.k_type, [&](auto reader) {
    scores_few<kQueries, kActive, decltype(reader)>(
        tile.queries, block.k, block.k_step, block.n, dim, tile.scores,
        static_cast<int>(head_bytes(args.kv.k_type, dim)), block.v, block.v_step,
        static_cast<int>(head_bytes(args.kv.v_type, dim)));
  });
  if (!open) mask_block(tile, block);
  softmax_few<kQueries>(tile, block.n);
  with_reader(args.kv.v_type, [&](auto reader) {
    sums_few<kQueries, kActive, decltype(reader)>(tile.scores, block.v, block.v_step, block.n, dim,
                                                  tile.rescale, tile.state.sums);
  });
}

inline void walk_few_of(const Tile& tile, const KeyBlock& block, bool open) {
  switch (tile.n_queries) {
    case 1:
      return walk_few<2, 1>(tile, block, open);
    case 2:
      return walk_few<2, 2>(tile, block, open);
    case 3:
      return walk_few<4, 3>(tile, block, open);
    case 4:
      return walk_few<4, 4>(tile, block, open);
    default:
      break;
  }
  if constexpr (kFewQueries == 8) {
    if (tile.n_queries <= 6) return walk_few<8, 6>(tile, block, open);
    return walk_few<8, 8>(tile, block, open);
  }
}

// ---- a span
// ----------------------------------------------------------------------------------------------------

// The queries [first, first + n), ready to walk.
inline Tile make_tile(const AttentionArgs& args, int head_kv, int first, int n, SpanState state, int which,
                      float* scratch) {
  const AttentionScratch layout(args.head_dim);
  float* const own = scratch + layout.tile(which);
  Tile tile = {.args = &args,
               .head_kv = head_kv,
               .query_begin = first,
               .n_queries = n,
               .few = n <= kFewQueries && args.head_dim % Vf::kWidth == 0,
               .stride = 0,
               .queries = own + layout.queries(),
               .state = state,
               .rescale = own + layout.rescale(),
               .scores = scratch + layout.scores(),
               .keys = scratch + layout.keys(),
               .values = scratch + layout.values()};
  if (tile.few) {
    tile.stride = n <= 2 ? 2 : n <= 4 ? 4 : kFewQueries;
    prepare_few(tile);
  } else {
    tile.stride = round_up(n, Vf::kWidth);
    prepare_many(tile);
  }
  return tile;
}

inline void walk_block(const Tile& tile, const KeyBlock& block) {
  bool open = true;
  for (int q = 0; q < tile.n_queries; q = tile.end_of_row(q)) {
    const Positions seen = seen_by(*tile.args, tile.row_of(q));
    open = open && seen.begin <= block.position && block.position + block.n <= seen.end;
  }
  if (tile.few)
    walk_few_of(tile, block, open);
  else
    walk_many(tile, block, open);
}

// n slots of one page from `slot` on, whose positions begin at `position`.
inline KeyBlock block_at(const Tile& tile, int slot, int position, int n) {
  const AttentionArgs& args = *tile.args;
  const int64_t k_head = head_bytes(args.kv.k_type, args.head_dim);
  const int64_t v_head = head_bytes(args.kv.v_type, args.head_dim);
  const int64_t k_step = k_head * args.n_head_kv, v_step = v_head * args.n_head_kv;
  return {.position = position,
          .n = n,
          .k = slot_at(args.kv, args.kv.k, slot, k_step) + tile.head_kv * k_head,
          .v = slot_at(args.kv, args.kv.v, slot, v_step) + tile.head_kv * v_head,
          .k_step = k_step,
          .v_step = v_step};
}

// n positions of the path of a tree row: committed slots, then the row's ancestors.
inline KeyBlock block_of_path(const Tile& tile, int row, int position, int n, float* scratch) {
  const AttentionArgs& args = *tile.args;
  int slots[kAttentionKeys];
  int found = 0;
  for (; found < n && position + found < args.n_past; ++found) slots[found] = position + found;
  const uint64_t* words = args.ancestors.words + int64_t{row} * args.ancestors.words_per_row;
  int at = args.n_past;  // position of the next ancestor
  for (int w = 0; w < args.ancestors.words_per_row; ++w)
    for (uint64_t bits = words[w]; bits != 0; bits &= bits - 1, ++at)
      if (found < n && at == position + found) slots[found++] = args.n_past + 64 * w + __builtin_ctzll(bits);

  KeyBlock block = block_at(tile, slots[0], position, n);
  bool consecutive = slots[0] / kKvPage == slots[n - 1] / kKvPage;
  for (int i = 1; i < n; ++i) consecutive = consecutive && slots[i] == slots[0] + i;
  if (consecutive) return block;
  const AttentionScratch layout(args.head_dim);
  const int64_t k_head = head_bytes(args.kv.k_type, args.head_dim);
  const int64_t v_head = head_bytes(args.kv.v_type, args.head_dim);
  std::byte* const k = static_cast<std::byte*>(static_cast<void*>(scratch + layout.gathered()));
  std::byte* const v = k + kAttentionKeys * k_head;
  for (int i = 0; i < n; ++i) {
    const KeyBlock slot = block_at(tile, slots[i], position + i, 1);
    __builtin_memcpy(k + i * k_head, slot.k, static_cast<size_t>(k_head));
    __builtin_memcpy(v + i * v_head, slot.v, static_cast<size_t>(v_head));
  }
  block.k = k, block.v = v;
  block.k_step = k_head, block.v_step = v_head;
  return block;
}

inline void start_span(const SpanState& state, int n_queries, int dim) {
  for (size_t i = 0; i < SpanState::lanes(n_queries); ++i) {
    state.max[i] = kLowestScore;
    state.sum[i] = 0.0f;
  }
  __builtin_memset(state.sums, 0,
                   sizeof(float) * static_cast<size_t>(n_queries + 1) * static_cast<size_t>(dim));
}

inline void copy_state(const SpanState& from, int from_query, const SpanState& to, int to_query, int n,
                       int dim) {
  __builtin_memcpy(to.max + to_query, from.max + from_query, sizeof(float) * static_cast<size_t>(n));
  __builtin_memcpy(to.sum + to_query, from.sum + from_query, sizeof(float) * static_cast<size_t>(n));
  __builtin_memcpy(to.sums + int64_t{to_query} * dim, from.sums + int64_t{from_query} * dim,
                   sizeof(float) * static_cast<size_t>(n) * static_cast<size_t>(dim));
}

// One row of the tile over the positions of its path.
inline void walk_path(const Tile& tile, int row, Positions positions, float* scratch) {
  const Positions seen = seen_by(*tile.args, row);
  const int end = min_int(positions.end, seen.end);
  for (int p = max_int(positions.begin, seen.begin / kAttentionKeys * kAttentionKeys); p < end;
       p += kAttentionKeys)
    walk_block(tile, block_of_path(tile, row, p, min_int(kAttentionKeys, end - p), scratch));
}

// The positions of one span, from scratch.
inline void walk_span(const Tile& tile, int span, float* scratch) {
  const AttentionArgs& args = *tile.args;
  const int dim = args.head_dim;
  start_span(tile.state, tile.n_queries, dim);
  Positions positions = seen_by(tile);
  positions.begin = max_int(positions.begin, span * kAttentionSpan);
  positions.end = min_int(positions.end, (span + 1) * kAttentionSpan);
  const bool chain = args.ancestors.words == nullptr;
  // Rows of a chain lie at their positions.
  const int shared_end =
      chain ? positions.end : min_int(positions.end, args.n_past / kAttentionKeys * kAttentionKeys);
  int p = positions.begin;
  for (; p < shared_end; p += kAttentionKeys)
    walk_block(tile, block_at(tile, p, p, min_int(kAttentionKeys, shared_end - p)));
  if (chain || p >= positions.end) return;

  if (tile.end_of_row(0) == tile.n_queries)
    return walk_path(tile, tile.row_of(0), {p, positions.end}, scratch);
  const SpanState state(scratch + AttentionScratch(dim).tile(1) + AttentionScratch(dim).state(),
                        kAttentionQueries, dim);
  for (int q = 0, n; q < tile.n_queries; q += n) {
    n = tile.end_of_row(q) - q;
    const Tile own = make_tile(args, tile.head_kv, tile.query_begin + q, n, state, 1, scratch);
    start_span(state, n, dim);  // lanes that are nobody's
    copy_state(tile.state, q, state, 0, n, dim);
    walk_path(own, own.row_of(0), {p, positions.end}, scratch);
    copy_state(state, 0, tile.state, q, n, dim);
  }
}

// ---- spans in order
// --------------------------------------------------------------------------------------------

// merged <- merged and then span. A span without visible positions changes no bit.
inline void merge_span(const SpanState& merged, const SpanState& span, int n_queries, int dim) {
  alignas(64) float keep[kAttentionQueries], add[kAttentionQueries];
  for (int q = 0; q < n_queries; q += Vf::kWidth) {
    const Vf old_max = vload(merged.max + q), span_max = vload(span.max + q);
    const Vf max = vmax(old_max, span_max);
    const Vf a = vexp(old_max - max), b = vexp(span_max - max);
    vstore(keep + q, a);
    vstore(add + q, b);
    vstore(merged.max + q, max);
    vstore(merged.sum + q, vfma(vload(merged.sum + q), a, vload(span.sum + q) * b));
  }
  for (int q = 0; q < n_queries; ++q) {
    const Vf a = vset1(keep[q]), b = vset1(add[q]);
    float* to = merged.sums + int64_t{q} * dim;
    const float* from = span.sums + int64_t{q} * dim;
    for_each_vec(dim, [&](int i, int count) {
      vstore_part(to + i, vfma(vload_part(to + i, count), a, vload_part(from + i, count) * b), count);
    });
  }
}

// Queries [first, first + n) of all rows are done.
inline void finish(const AttentionArgs& args, int head_kv, int first, int n, const SpanState& merged) {
  const int group = args.n_head / args.n_head_kv;
  for (int q = 0; q < n; ++q) {
    const Vf scale = vset1(merged.sum[q] > 0.0f ? 1.0f / merged.sum[q] : 0.0f);
    const int row = (first + q) / group, head = head_kv * group + (first + q) % group;
    float* out = args.out + (int64_t{row} * args.n_head + head) * args.head_dim;
    const float* sums = merged.sums + int64_t{q} * args.head_dim;
    for_each_vec(args.head_dim,
                 [&](int i, int count) { vstore_part(out + i, vload_part(sums + i, count) * scale, count); });
  }
}

void attend_rows(const AttentionArgs& args, int row_begin, int row_end, int head_kv,
                 float* scratch) noexcept {
  const int dim = args.head_dim;
  const int group = args.n_head / args.n_head_kv;
  const AttentionScratch layout(dim);
  const SpanState state(scratch + layout.tile(0) + layout.state(), kAttentionQueries, dim);
  const SpanState merged(scratch + layout.merged(), kAttentionQueries, dim);
  for (int first = row_begin * group; first < row_end * group; first += kAttentionQueries) {
    const int n = min_int(kAttentionQueries, row_end * group - first);
    const Tile tile = make_tile(args, head_kv, first, n, state, 0, scratch);
    start_span(merged, n, dim);
    const Positions seen = seen_by(tile);
    for (int span = seen.begin / kAttentionSpan; span * kAttentionSpan < seen.end; ++span) {
      walk_span(tile, span, scratch);
      merge_span(merged, state, n, dim);
    }
    finish(args, head_kv, first, n, merged);
  }
}

void attend_one_span(const AttentionArgs& args, int row_begin, int row_end, int head_kv, int span,
                     float* scratch, float* partial) noexcept {
  const int group = args.n_head / args.n_head_kv;
  const int n = (row_end - row_begin) * group;
  const SpanState state(partial, n, args.head_dim);
  walk_span(make_tile(args, head_kv, row_begin * group, n, state, 0, scratch), span, scratch);
}

void merge_partials(const AttentionArgs& args, int row_begin, int row_end, int head_kv, SpanRange range,
                    float* partials, float* merged) noexcept {
  const int group = args.n_head / args.n_head_kv;
  const int n = (row_end - row_begin) * group, dim = args.head_dim;
  const SpanState all(merged, n, dim);
  if (range.first) start_span(all, n, dim);
  for (int s = 0; s < range.n_spans; ++s)
    merge_span(all, SpanState(partials + static_cast<size_t>(s) * SpanState::floats(n, dim), n, dim), n, dim);
  if (range.last) finish(args, head_kv, row_begin * group, n, all);
}

constexpr AttentionKernels kAttention = {
    .attend = attend_rows,
    .attend_span = attend_one_span,
    .merge_spans = merge_partials,
    .kv_append = append_rows,
};

}  // namespace
}  // namespace thermo
