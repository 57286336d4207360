// The gated delta rule over the Vf of the simd_*.h included before. Anonymous namespace: see simd_avx512.h.
//
// One arithmetic for every step: the recurrence, row after row along each branch (delta_net.h). A block of
// 32 rows of the state, 16 KiB at dim 128, stays in the first-level cache while all rows pass over it. Both
// products of a row are taken of its parent's state, o = e^g S q + dl (k.q), so a row that nobody
// continues leaves the state alone; and the update that a parent makes is fused with the products of its
// child: one load, one store and four arithmetic operations per register and row. Bound for one row: 8 bytes
// of state traffic per element.
//
// Lanes are key dims, so each product ends in a sum across lanes, kWidth of them at a time, and what the next
// row does to these state rows waits for it. A block has several such parts, so that the other parts fill
// that time: a quarter faster. Adding across lanes by fours as soon as four rows are through, instead of
// keeping all sums until the end: 41 us a row instead of 55 (AVX-512, 32 heads of 128). Tried: two rows
// of the state at a time on AVX2, where four do not leave every operand a register; 20 % slower, more loads.
//
// Not tried: a transposed state, whose lanes are value dims. It has no sums across lanes but needs the state
// turned around in every call.
//
// Dropped: the chunked form (the rows of a chunk as five matrix products over decay-weighted Gram matrices).
// It rounds differently for every way of cutting a prompt, and takes as long: 40 us a row.
#pragma once

#include "kernels/delta_net/delta_net.h"
#include "kernels/simd/math_impl.h"

namespace thermo {
namespace {

// Rows of the state that share the loads of k and q, and whose sums across lanes begin together. dim is a
// multiple of it.
constexpr int kStateRows = 4;
constexpr int kBlockRows = kDeltaBlockRows;
static_assert(kBlockRows % Vf::kWidth == 0);

// One value head of a step.
struct DeltaHead {
  const DeltaNetArgs* args;
  int head;
  int64_t key_offset;
  DeltaHead(const DeltaNetArgs& a, int h) : args(&a), head(h), key_offset(int64_t{h % a.n_head_k} * a.dim) {}
  const float* q(int r) const { return args->q + r * args->q_stride + key_offset; }
  const float* k(int r) const { return args->k + r * args->k_stride + key_offset; }
  const float* v(int r) const { return args->v + r * args->v_stride + int64_t{head} * args->dim; }
  float g(int r) const { return args->g[int64_t{r} * args->n_head_v + head]; }
  float beta(int r) const { return args->beta[int64_t{r} * args->n_head_v + head]; }
  int64_t out_offset(int r) const { return (int64_t{r} * args->n_head_v + head) * args->dim; }
  float* state() const { return args->state + int64_t{head} * args->dim * args->dim; }
};

// What a row does to the state: S <- decay S + delta (x) k. Every path below uses this one expression.
inline Vf updated(Vf s, Vf decay, Vf delta, Vf k) {
  return vfma(delta, k, decay * s);
}

struct StateUpdate {
  const float* k;
  const float* delta;  // of the block's rows
  float decay;
};

// ---- rows
// ------------------------------------------------------------------------------------------------------

// Up to kDeltaChunk rows of a step and kBlockRows rows of the state, from value dim j on.
class DeltaBlock {
 public:
  DeltaBlock(const DeltaHead& head, int first, int n) : head_(head), first_(first) {
    constexpr int W = Vf::kWidth;
    for (int r = 0; r < n; ++r) {
      decay_[r] = head.g(first + r);
      key_query_[r] = dot_floats(head.k(first + r), head.q(first + r), head.args->dim);
    }
    for (int r = n; r < round_up(n, W); ++r) decay_[r] = 0.0f;
    for (int r = 0; r < n; r += W) vstore(decay_ + r, vexp(vload(decay_ + r)));
  }

  void move_to(int j) {
    j_ = j;
    n_ = min_int(kBlockRows, head_.args->dim - j);
  }

  // Row r against the state `from`.
  void row(int r, const float* from) { products<false>(r, {}, from, nullptr); }
  // Moves the state `from` past row `parent` into `to`, which may be `from`; then row r against it.
  void row_after(int parent, int r, const float* from, float* to) {
    products<true>(r, update_of(parent), from, to);
  }
  // Moves the state past row r.
  void pass(int r, float* state) const {
    const StateUpdate update = update_of(r);
    const Vf decay = vset1(update.decay);
    const int64_t stride = dim();
    for (int u = 0; u < n_; u += kStateRows) {
      Vf delta[kStateRows];
#pragma GCC unroll 4
      for (int t = 0; t < kStateRows; ++t) delta[t] = vset1(update.delta[u + t]);
      for_each_vec(dim(), [&](int i, int count) {
        const Vf k = vload_part(update.k + i, count);
#pragma GCC unroll 4
        for (int t = 0; t < kStateRows; ++t) {
          float* s = state + (u + t) * stride + i;
          vstore_part(s, updated(vload_part(s, count), decay, delta[t], k), count);
        }
      });
    }
  }

 private:
  int dim() const {
    return head_.args->dim;
  }
  StateUpdate update_of(int r) const {
    return {head_.k(first_ + r), delta_[r], decay_[r]};
  }

  template <bool kUpdate>
  void products(int r, const StateUpdate update, const float* from, float* to) {
    constexpr int W = Vf::kWidth;
    const DeltaNetArgs& args = *head_.args;
    const float* const k = head_.k(first_ + r);
    const float* const q = head_.q(first_ + r);
    const float* const v = head_.v(first_ + r) + j_;
    float* const out = args.out + head_.out_offset(first_ + r) + j_;
    float* const delta_out = args.delta == nullptr ? nullptr : args.delta + head_.out_offset(first_ + r) + j_;
    const Vf beta = vset1(head_.beta(first_ + r)), key_query = vset1(key_query_[r]);
    const Vf decay = vset1(decay_[r]), minus_decay = vset1(-decay_[r]);
    const int64_t state_floats = int64_t{W} * args.dim;
    for (int part = 0; part < n_; part += W, from += state_floats, to += kUpdate ? state_floats : 0) {
      const int n = min_int(W, n_ - part);
      Vf with_k[W / kStateRows], with_q[W / kStateRows];
      state_products<kUpdate>(k, q, n, args.dim, update, part, from, to, with_k, with_q);
      const Vf delta = beta * vfma(minus_decay, vsum_fours(with_k), vload_part(v + part, n));
      vstore(delta_[r] + part, delta);
      vstore_part(out + part, vfma(delta, key_query, decay * vsum_fours(with_q)), n);
      if (delta_out != nullptr) vstore_part(delta_out + part, delta, n);
    }
  }

  // Products of n <= kWidth rows of the state with k and q, summed by vsum_four.
  template <bool kUpdate>
  static void state_products(const float* k, const float* q, int n, int dim, const StateUpdate& update,
                             int part, const float* from, float* to, Vf* with_k, Vf* with_q) {
    const int64_t stride = dim;
    const Vf decay = vset1(kUpdate ? update.decay : 1.0f);
#pragma GCC unroll 4
    for (int u = 0; u < Vf::kWidth; u += kStateRows) {
      Vf sk[kStateRows], sq[kStateRows], delta[kStateRows];
#pragma GCC unroll 4
      for (int t = 0; t < kStateRows; ++t) {
        sk[t] = sq[t] = vzero();
        if constexpr (kUpdate) delta[t] = vset1(update.delta[part + u + t]);
      }
      const float* in = from + u * stride;
      float* out = to + u * stride;
      if (u < n)
        for_each_vec(dim, [&](int i, int count) {
          const Vf kv = vload_part(k + i, count), qv = vload_part(q + i, count);
          const Vf before = kUpdate ? vload_part(update.k + i, count) : vzero();
#pragma GCC unroll 4
          for (int t = 0; t < kStateRows; ++t) {
            Vf s = vload_part(in + t * stride + i, count);
            if constexpr (kUpdate) {
              s = updated(s, decay, delta[t], before);
              vstore_part(out + t * stride + i, s, count);
            }
            sk[t] = vfma(s, kv, sk[t]);
            sq[t] = vfma(s, qv, sq[t]);
          }
        });
      with_k[u / kStateRows] = vsum_four(sk);
      with_q[u / kStateRows] = vsum_four(sq);
    }
  }

  DeltaHead head_;
  int first_;
  int j_ = 0, n_ = 0;  // value dims of the block
  alignas(64) float decay_[kDeltaChunk];
  float key_query_[kDeltaChunk];
  alignas(64) float delta_[kDeltaChunk][kBlockRows];
};

// A chain that updates the state in place, or leaves it alone (`scratch`: memory for one block).
inline void run_chain(const DeltaHead& head, float* scratch) {
  const DeltaNetArgs& args = *head.args;
  for (int first = 0; first < args.n_rows; first += kDeltaChunk) {
    const int n = min_int(kDeltaChunk, args.n_rows - first);
    DeltaBlock block(head, first, n);
    for (int j = 0; j < args.dim; j += kBlockRows) {
      block.move_to(j);
      float* const state = head.state() + int64_t{j} * args.dim;
      const float* from = state;
      float* const to = args.uncommitted ? scratch : state;
      block.row(0, from);
      for (int r = 1; r < n; ++r, from = to) block.row_after(r - 1, r, from, to);
      if (!args.uncommitted) block.pass(n - 1, state);
    }
  }
}

// The order in which the rows of a tree are visited, depth first, and the blocks of state they use. A row's
// children share the state that it leaves. The child with most rows below it comes last and may overwrite
// that state; the others have at most half as many rows, so a tree of 64 rows needs five blocks at a time.
class TreePlan {
 public:
  struct Visit {
    int row;
    int parent;    // whose update moves `from` into `to` before the row is taken; -1: none
    int from, to;  // blocks; -1: the committed state
  };

  TreePlan(const AncestorBits& bits, int n_rows) {
    int n_below[kDeltaChunk] = {};
    for (int i = 0; i <= n_rows; ++i) first_child_[i] = last_child_[i] = -1;
    for (int r = n_rows - 1; r >= 0; --r) {
      const uint64_t above = bits.words[int64_t{r} * bits.words_per_row] & ((uint64_t{1} << r) - 1);
      const int parent = above == 0 ? -1 : 63 - __builtin_clzll(above);
      ++n_below[r];
      if (parent >= 0) n_below[parent] += n_below[r];
      // Children in a list with the largest at its end: only that place matters.
      int& first = first_child_[parent + 1];
      int& last = last_child_[parent + 1];
      next_[r] = -1;
      if (first < 0) {
        first = last = r;
      } else if (n_below[r] > n_below[last]) {
        next_[last] = r;
        last = r;
      } else {
        next_[r] = first;
        first = r;
      }
    }
    visit_children(-1, -1, false);
  }

  const Visit* begin() const { return visits_; }
  const Visit* end() const { return visits_ + n_visits_; }

 private:
  // `from`: the state before row `parent`. `owned`: nobody else needs it.
  void visit_children(int parent, int from, bool owned) {
    const int first = first_child_[parent + 1];
    if (first < 0) return;
    const int to = parent < 0 || owned ? from : n_blocks_++;
    for (int child = first; child >= 0; child = next_[child]) {
      if (child == first && parent >= 0)
        visits_[n_visits_++] = {child, parent, from, to};
      else
        visits_[n_visits_++] = {child, -1, to, to};
      visit_children(child, to, parent >= 0 && next_[child] < 0);
    }
    if (parent >= 0 && !owned) --n_blocks_;
  }

  Visit visits_[kDeltaChunk];
  int first_child_[kDeltaChunk + 1];  // of row - 1; [0]: of the committed state
  int last_child_[kDeltaChunk + 1];
  int next_[kDeltaChunk];
  int n_visits_ = 0, n_blocks_ = 0;
};

inline void run_tree(const DeltaHead& head, const TreePlan& plan, float* blocks) {
  const DeltaNetArgs& args = *head.args;
  const int64_t block_floats = int64_t{kBlockRows} * args.dim;
  DeltaBlock block(head, 0, args.n_rows);
  for (int j = 0; j < args.dim; j += kBlockRows) {
    block.move_to(j);
    const float* const state = head.state() + int64_t{j} * args.dim;
    for (const TreePlan::Visit& visit : plan) {
      const float* const from = visit.from < 0 ? state : blocks + visit.from * block_floats;
      if (visit.parent < 0)
        block.row(visit.row, from);
      else
        block.row_after(visit.parent, visit.row, from, blocks + visit.to * block_floats);
    }
  }
}

void delta_rows(const DeltaNetArgs& args, int head_begin, int head_end, float* scratch) noexcept {
  if (args.n_rows <= 0) return;
  if (args.ancestors.words == nullptr) {
    for (int h = head_begin; h < head_end; ++h) run_chain({args, h}, scratch);
    return;
  }
  const TreePlan plan(args.ancestors, args.n_rows);
  for (int h = head_begin; h < head_end; ++h) run_tree({args, h}, plan, scratch);
}

// ---- commit
// ----------------------------------------------------------------------------------------------------

// The updates of n rows, one after the other, to kRows rows of the state and kVecs registers of each, `count`
// lanes of the last. The state stays in registers, which changes nothing about its bits.
template <int kRows, int kVecs>
inline void commit_tile(float* state, int64_t dim, int n, const float* decay, const float* const* delta,
                        const float* const* k, int i, int count) {
  constexpr int W = Vf::kWidth;
  const auto lanes = [&](int v) { return v + 1 < kVecs ? W : count; };
  Vf acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int j = 0; j < kRows; ++j)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) acc[j][v] = vload_part(state + j * dim + i + v * W, lanes(v));
  for (int c = 0; c < n; ++c) {
    const Vf e = vset1(decay[c]);
    Vf key[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) key[v] = vload_part(k[c] + i + v * W, lanes(v));
#pragma GCC unroll 8
    for (int j = 0; j < kRows; ++j) {
      const Vf x = vset1(delta[c][j]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[j][v] = updated(acc[j][v], e, x, key[v]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kRows; ++j)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) vstore_part(state + j * dim + i + v * W, acc[j][v], lanes(v));
}

inline void commit_rows(const DeltaNetCommitArgs& args, int head, const int32_t* path, int n) {
  constexpr int W = Vf::kWidth;
  constexpr int kTileRows = 4;
  const int dim = args.dim;
  alignas(64) float decay[kDeltaChunk] = {};
  const float *delta[kDeltaChunk], *k[kDeltaChunk];
  for (int c = 0; c < n; ++c) {
    decay[c] = args.g[int64_t{path[c]} * args.n_head_v + head];
    k[c] = args.k + path[c] * args.k_stride + int64_t{head % args.n_head_k} * dim;
  }
  for (int c = 0; c < n; c += W) vstore(decay + c, vexp(vload(decay + c)));

  float* state = args.state + int64_t{head} * dim * dim;
  for (int j = 0; j < dim; j += kTileRows) {
    for (int c = 0; c < n; ++c) delta[c] = args.delta + (int64_t{path[c]} * args.n_head_v + head) * dim + j;
    float* rows = state + int64_t{j} * dim;
    int i = 0;
    for (; kGemmVecs == 4 && i + 4 * W <= dim; i += 4 * W)  // enough registers for it
      commit_tile<kTileRows, 4>(rows, dim, n, decay, delta, k, i, W);
    for (; i + 2 * W <= dim; i += 2 * W) commit_tile<kTileRows, 2>(rows, dim, n, decay, delta, k, i, W);
    for (; i < dim; i += W) commit_tile<kTileRows, 1>(rows, dim, n, decay, delta, k, i, min_int(W, dim - i));
  }
}

void delta_commit(const DeltaNetCommitArgs& args, int head_begin, int head_end) noexcept {
  const int32_t* path = args.path.data();
  const int n_path = static_cast<int>(args.path.size());
  for (int h = head_begin; h < head_end; ++h)
    for (int c = 0; c < n_path; c += kDeltaChunk)
      commit_rows(args, h, path + c, min_int(kDeltaChunk, n_path - c));
}

// ---- around the rule
// -------------------------------------------------------------------------------------------

void conv_channels(const ConvArgs& args, int channel_begin, int channel_end) noexcept {
  constexpr int W = Vf::kWidth;
  constexpr int kBlock = 128;  // channels whose weights are kept, transposed
  constexpr int kRowsAhead = 8;
  const int taps = args.taps;
  alignas(64) float weight[kMaxConvTaps][kBlock];
  for (int begin = channel_begin; begin < channel_end; begin += kBlock) {
    const int n = min_int(kBlock, channel_end - begin);
    const float* w = args.weight + int64_t{begin} * taps;
    int c = 0;
    if (taps == 4) {
      for (; c + W <= n; c += W) {
        Vf columns[4];
        vload_stride4(w + 4 * c, columns);
        for (int t = 0; t < 4; ++t) vstore(&weight[t][c], columns[t]);
      }
    }
    for (; c < n; ++c)
      for (int t = 0; t < taps; ++t) weight[t][c] = w[int64_t{c} * taps + t];

    for (int r = args.first_row; r < args.n_rows; ++r) {
      // Rows are far apart: the processor does not foresee the next ones by itself.
      if (r + kRowsAhead < args.n_rows)
        for (int i = 0; i < n; i += 16) {
          __builtin_prefetch(args.u + (r + kRowsAhead) * args.stride + begin + i);
          __builtin_prefetch(args.out + (r + kRowsAhead) * args.stride + begin + i, 1);
        }
      // The inputs under the taps: up the parents, then back through the stored columns.
      const float* input[kMaxConvTaps] = {};
      int row = r;
      int column = taps - 2;
      for (int t = taps - 1; t >= 0; --t) {
        if (row >= 0) {
          input[t] = args.u + row * args.stride + begin;
          row = args.parents == nullptr ? row - 1 : args.parents[row];
        } else {
          input[t] = args.state + column-- * args.stride + begin;
        }
      }
      float* out = args.out + r * args.stride + begin;
      for_each_vec(n, [&](int i, int count) {
        Vf sum = vload_part(&weight[0][i], count) * vload_part(input[0] + i, count);
        for (int t = 1; t < taps; ++t)
          sum = vfma(vload_part(&weight[t][i], count), vload_part(input[t] + i, count), sum);
        vstore_part(out + i, vsilu(sum), count);
      });
    }
  }
}

void l2_normalize_heads(float* x, int n, int dim, float scale) noexcept {
  for (int h = 0; h < n; ++h, x += dim) {
    const Vf s = vset1(scale / __builtin_sqrtf(dot_floats(x, x, dim) + 1e-6f));
    for_each_vec(dim, [&](int i, int count) { vstore_part(x + i, vload_part(x + i, count) * s, count); });
  }
}

void gated_norm_heads(float* o, const float* z, const float* weight, int n, int dim, float eps) noexcept {
  for (int h = 0; h < n; ++h, o += dim, z += dim) {
    const Vf s = vset1(1.0f / __builtin_sqrtf(dot_floats(o, o, dim) / static_cast<float>(dim) + eps));
    for_each_vec(dim, [&](int i, int count) {
      const Vf normed = vload_part(o + i, count) * s * vload_part(weight + i, count);
      vstore_part(o + i, normed * vsilu(vload_part(z + i, count)), count);
    });
  }
}

constexpr DeltaNetKernels kDeltaNet = {
    .rows = delta_rows,
    .commit = delta_commit,
    .conv = conv_channels,
    .l2_normalize = l2_normalize_heads,
    .gated_norm = gated_norm_heads,
};

}  // namespace
}  // namespace thermo
