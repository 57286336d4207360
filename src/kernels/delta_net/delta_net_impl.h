// The gated delta rule over the Vf of the simd_*.h included before. Anonymous namespace: see simd_avx512.h.
//
// A few rows of a chain go one after the other: kWidth rows of the state at a time stay in the first-level
// cache while all steps pass over them, so the state is read (and written) once. Both products of a step are
// taken of the old state, o = e^g S q + dl (k.q), which leaves two passes over S instead of three. Bound for
// one row: 8 bytes of state traffic per element.
//
// Longer runs and trees go in chunks (delta_net.h). All five products are calls of gemm with everything
// row-major [row][dim]; for that the state is kept transposed, [key dim][value dim], for the length of the
// call. Work per chunk of L rows: 3 L dim^2 + 2 L^2 dim multiply-adds.
#pragma once

#include "kernels/delta_net/delta_net.h"
#include "kernels/simd/gemm_impl.h"
#include "kernels/simd/math_impl.h"

namespace thermo {
namespace {

// Up to here one row after the other is as fast as a chunk, measured at dim 128.
constexpr int kSequentialRows = Vf::kWidth == 16 ? 6 : 10;
// Chunks of a chain that updates the state. Shorter than kDeltaChunk: the terms in L^2 grow with the length,
// and 32 rows already amortise the passes over the state.
constexpr int kChainChunk = 32;

struct DeltaScratch {
  float* state;    // [dim][dim] transposed
  float* keys;     // [dim][kDeltaChunk] transposed
  float* key_key;  // [kDeltaChunk][kDeltaChunk]: A of the solve
  float* key_query;
  float* delta;  // [kDeltaChunk][dim]
  float* row;    // [dim + kDeltaChunk] row scales
  DeltaScratch(float* base, int dim) {
    const int64_t d = dim;
    state = base;
    keys = state + d * d;
    key_key = keys + d * kDeltaChunk;
    key_query = key_key + kDeltaChunk * kDeltaChunk;
    delta = key_query + kDeltaChunk * kDeltaChunk;
    row = delta + d * kDeltaChunk;
  }
};

// One value head of a step.
struct DeltaHead {
  const DeltaNetArgs* args;
  int head;
  const float* q(int r) const { return args->q + r * args->q_stride + key_offset(); }
  const float* k(int r) const { return args->k + r * args->k_stride + key_offset(); }
  const float* v(int r) const { return args->v + r * args->v_stride + int64_t{head} * args->dim; }
  float g(int r) const { return args->g[int64_t{r} * args->n_head_v + head]; }
  float beta(int r) const { return args->beta[int64_t{r} * args->n_head_v + head]; }
  int64_t out_offset(int r) const { return (int64_t{r} * args->n_head_v + head) * args->dim; }
  int64_t out_stride() const { return int64_t{args->n_head_v} * args->dim; }
  float* state() const { return args->state + int64_t{head} * args->dim * args->dim; }
  int64_t key_offset() const { return int64_t{head % args->n_head_k} * args->dim; }
};

// ---- rows one after the other
// ----------------------------------------------------------------------------------

// kWidth rows of the state through all steps; `block` holds them, [kWidth][dim], and is left updated.
inline void step_block(const DeltaHead& head, int j, float* block, const float* decay,
                       const float* key_query) {
  constexpr int W = Vf::kWidth;
  const DeltaNetArgs& args = *head.args;
  const int dim = args.dim;
  for (int r = 0; r < args.n_rows; ++r) {
    const float* k = head.k(r);
    const float* q = head.q(r);
    Vf with_k[W], with_q[W];
    // Four state rows at a time: eight accumulators hide the latency and share the loads of k and q.
    for (int u = 0; u < W; u += 4) {
      Vf sk[4] = {vzero(), vzero(), vzero(), vzero()}, sq[4] = {vzero(), vzero(), vzero(), vzero()};
      for (int i = 0; i < dim; i += W) {
        const Vf kv = vload(k + i), qv = vload(q + i);
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t) {
          const Vf s = vload(block + int64_t{u + t} * dim + i);
          sk[t] = vfma(s, kv, sk[t]);
          sq[t] = vfma(s, qv, sq[t]);
        }
      }
      for (int t = 0; t < 4; ++t) {
        with_k[u + t] = sk[t];
        with_q[u + t] = sq[t];
      }
    }
    const Vf e = vset1(decay[r]);
    const Vf delta = vset1(head.beta(r)) * (vload(head.v(r) + j) - e * vsum_each(with_k));
    vstore(args.out + head.out_offset(r) + j, vfma(delta, vset1(key_query[r]), e * vsum_each(with_q)));
    if (args.delta != nullptr) vstore(args.delta + head.out_offset(r) + j, delta);
    if (args.keep_state && r + 1 == args.n_rows) return;
    alignas(64) float dl[W];
    vstore(dl, delta);
    for (int u = 0; u < W; u += 4)
      for (int i = 0; i < dim; i += W) {
        const Vf kv = vload(k + i);
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t) {
          float* s = block + int64_t{u + t} * dim + i;
          vstore(s, vfma(vset1(dl[u + t]), kv, e * vload(s)));
        }
      }
  }
}

inline void run_in_sequence(const DeltaHead& head, float* scratch) {
  constexpr int W = Vf::kWidth;
  const DeltaNetArgs& args = *head.args;
  const int dim = args.dim;
  alignas(64) float decay[kDeltaChunk] = {}, key_query[kDeltaChunk];
  for (int r = 0; r < args.n_rows; ++r) {
    decay[r] = head.g(r);
    key_query[r] = dot_floats(head.k(r), head.q(r), dim);
  }
  for (int r = 0; r < args.n_rows; r += W) vstore(decay + r, vexp(vload(decay + r)));
  for (int j = 0; j < dim; j += W) {
    float* block = head.state() + int64_t{j} * dim;
    if (args.keep_state) {
      __builtin_memcpy(scratch, block, sizeof(float) * static_cast<size_t>(W) * static_cast<size_t>(dim));
      block = scratch;
    }
    step_block(head, j, block, decay, key_query);
  }
}

// ---- chunks
// ----------------------------------------------------------------------------------------------------

inline bool is_ancestor(const AncestorBits& bits, int row, int other) {
  if (bits.words == nullptr) return other <= row;
  return (bits.words[int64_t{row} * bits.words_per_row + (other >> 6)] >> (other & 63)) & 1;
}

// Rows [first, first + n) against the transposed state, which is moved on to the last row when update is set.
inline void run_chunk(const DeltaHead& head, int first, int n, bool update, const DeltaScratch& s) {
  constexpr int W = Vf::kWidth;
  constexpr int C = kDeltaChunk;
  const DeltaNetArgs& args = *head.args;
  const int dim = args.dim;

  // Decay summed along each row's path, in f64: differences of long sums lose digits in f32.
  double path_decay[C];
  for (int r = 0; r < n; ++r) {
    int parent = r - 1;
    if (args.ancestors.words != nullptr)
      while (parent >= 0 && !is_ancestor(args.ancestors, r, parent)) --parent;
    path_decay[r] = (parent >= 0 ? path_decay[parent] : 0.0) + static_cast<double>(head.g(first + r));
  }
  alignas(64) float from_start[C] = {};
  for (int r = 0; r < n; ++r) from_start[r] = static_cast<float>(path_decay[r]);
  for (int r = 0; r < n; r += W) vstore(from_start + r, vexp(vload(from_start + r)));

  // k_c.k_r and k_c.q_r. Row r needs columns c <= r only, so later columns are skipped by whole strips.
  transpose(head.k(first), args.k_stride, n, dim, s.keys, C);
  constexpr int kStrip = kGemmVecs * W;
  for (int c = 0; c < n; c += kStrip) {
    const int columns = min_int(kStrip, n - c);
    gemm(n - c, columns, dim, head.k(first + c), args.k_stride, 1, s.keys + c, C, s.key_key + c * C + c, C,
         nullptr);
    gemm(n - c, columns, dim, head.q(first + c), args.q_stride, 1, s.keys + c, C, s.key_query + c * C + c, C,
         nullptr);
  }
  // Weighted by e(r, c), zero for rows that are no ancestors: masked before the exponential, since the
  // exponents of the others are positive and may overflow.
  for (int r = 0; r < n; ++r) {
    alignas(64) float e[C];
    for (int c = 0; c <= r; ++c) e[c] = static_cast<float>(path_decay[r] - path_decay[c]);
    if (args.ancestors.words != nullptr) {
      for (int c = 0; c < r; ++c)
        if (!is_ancestor(args.ancestors, r, c)) e[c] = -__builtin_inff();
    }
    for (int c = r + 1; c < round_up(r + 1, W); ++c) e[c] = -__builtin_inff();
    float* kk = s.key_key + r * C;
    float* kq = s.key_query + r * C;
    const Vf minus_beta = vset1(-head.beta(first + r));
    for (int c = 0; c <= r; c += W) {
      const Vf w = vexp(vload(e + c));
      const int count = min_int(W, r + 1 - c);  // what lies behind was never written
      vstore_part(kk + c, minus_beta * w * vload_part(kk + c, count), count);
      vstore_part(kq + c, w * vload_part(kq + c, count), count);
    }
    // The tiles of the last product read up to the diagonal of their last row.
    for (int c = r + 1; c < min_int(n, r + kGemmRows); ++c) kq[c] = 0.0f;
  }

  // delta = beta (v - e^G S k), then the unit lower-triangular solve.
  gemm(n, dim, dim, head.k(first), args.k_stride, 1, s.state, dim, s.delta, dim, nullptr);
  for (int r = 0; r < n; ++r) {
    float* delta = s.delta + int64_t{r} * dim;
    const float* v = head.v(first + r);
    const Vf beta = vset1(head.beta(first + r)), decay = vset1(-from_start[r] * head.beta(first + r));
    const float* a = s.key_key + r * C;
    constexpr int kVecs = 4;
    int i = 0;
    for (; i + kVecs * W <= dim; i += kVecs * W) {
      Vf acc[kVecs];
#pragma GCC unroll 4
      for (int u = 0; u < kVecs; ++u)
        acc[u] = vfma(beta, vload(v + i + u * W), decay * vload(delta + i + u * W));
      for (int c = 0; c < r; ++c) {
        const Vf w = vset1(a[c]);
#pragma GCC unroll 4
        for (int u = 0; u < kVecs; ++u)
          acc[u] = vfma(w, vload(s.delta + int64_t{c} * dim + i + u * W), acc[u]);
      }
#pragma GCC unroll 4
      for (int u = 0; u < kVecs; ++u) vstore(delta + i + u * W, acc[u]);
    }
    for_each_vec(dim - i, [&](int k, int count) {
      Vf acc = vfma(beta, vload_part(v + i + k, count), decay * vload_part(delta + i + k, count));
      for (int c = 0; c < r; ++c)
        acc = vfma(vset1(a[c]), vload_part(s.delta + int64_t{c} * dim + i + k, count), acc);
      vstore_part(delta + i + k, acc, count);
    });
  }
  if (args.delta != nullptr)
    for (int r = 0; r < n; ++r)
      __builtin_memcpy(args.delta + head.out_offset(first + r), s.delta + int64_t{r} * dim,
                       sizeof(float) * static_cast<size_t>(dim));

  // out = e^G S q + (weighted k.q) delta
  float* out = args.out + head.out_offset(first);
  gemm(n, dim, dim, head.q(first), args.q_stride, 1, s.state, dim, out, head.out_stride(), nullptr);
  gemm_by_depth(
      n, dim, [](int m_end) { return m_end; }, s.key_query, C, 1, s.delta, dim, out, head.out_stride(),
      from_start);

  if (!update) return;
  // S <- e^G_last S + sum_c (e(last, c) k_c) (x) delta_c, transposed: rows are key dims.
  alignas(64) float to_last[C];
  for (int c = 0; c < C; ++c)
    to_last[c] = c < n ? static_cast<float>(path_decay[n - 1] - path_decay[c]) : 0.0f;
  for (int c = 0; c < n; c += W) vstore(to_last + c, vexp(vload(to_last + c)));
  for (int c = 0; c < n; ++c) {
    const Vf w = vset1(to_last[c]);
    float* delta = s.delta + int64_t{c} * dim;
    for_each_vec(dim,
                 [&](int i, int count) { vstore_part(delta + i, w * vload_part(delta + i, count), count); });
  }
  for (int i = 0; i < dim; ++i) s.row[i] = from_start[n - 1];
  gemm(dim, dim, n, head.k(first), 1, args.k_stride, s.delta, dim, s.state, dim, s.row);
}

void delta_rows(const DeltaNetArgs& args, int head_begin, int head_end, float* scratch) noexcept {
  const int dim = args.dim;
  if (args.n_rows <= 0) return;
  const DeltaScratch s(scratch, dim);
  for (int h = head_begin; h < head_end; ++h) {
    const DeltaHead head = {&args, h};
    if (args.ancestors.words == nullptr && args.n_rows <= kSequentialRows && dim % Vf::kWidth == 0) {
      run_in_sequence(head, scratch);
      continue;
    }
    transpose(head.state(), dim, dim, dim, s.state, dim);
    const int chunk = args.keep_state ? kDeltaChunk : kChainChunk;
    for (int r = 0; r < args.n_rows; r += chunk) {
      const int n = min_int(chunk, args.n_rows - r);
      run_chunk(head, r, n, !args.keep_state, s);
    }
    if (!args.keep_state) transpose(s.state, dim, dim, dim, head.state(), dim);
  }
}

// ---- commit
// ----------------------------------------------------------------------------------------------------

// S[j][..] <- scale S + sum_c weight[c] delta_c[j] k_c, kRows rows of the state, kVecs registers.
template <int kRows, int kVecs>
inline void commit_tile(float* state, int64_t dim, int n, float scale, const float* weight,
                        const float* const* delta, const float* const* k) {
  constexpr int W = Vf::kWidth;
  Vf acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int j = 0; j < kRows; ++j)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) acc[j][v] = vset1(scale) * vload(state + j * dim + v * W);
  for (int c = 0; c < n; ++c) {
    Vf key[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) key[v] = vset1(weight[c]) * vload(k[c] + v * W);
#pragma GCC unroll 8
    for (int j = 0; j < kRows; ++j) {
      const Vf x = vset1(delta[c][j]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[j][v] = vfma(x, key[v], acc[j][v]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kRows; ++j)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) vstore(state + j * dim + v * W, acc[j][v]);
}

inline void commit_rows(const DeltaNetCommitArgs& args, int head, const int32_t* path, int n) {
  constexpr int W = Vf::kWidth;
  constexpr int kRows = 4;
  const int dim = args.dim;
  double decay[kDeltaChunk];  // from the start to each row
  double sum = 0.0;
  for (int c = 0; c < n; ++c)
    decay[c] = sum += static_cast<double>(args.g[int64_t{path[c]} * args.n_head_v + head]);
  alignas(64) float weight[kDeltaChunk + 16] = {};
  for (int c = 0; c < n; ++c) weight[c] = static_cast<float>(sum - decay[c]);
  weight[n] = static_cast<float>(sum);
  for (int c = 0; c <= n; c += W) vstore(weight + c, vexp(vload(weight + c)));
  const float scale = weight[n];

  float* state = args.state + int64_t{head} * dim * dim;
  const float *delta[kDeltaChunk], *k[kDeltaChunk];
  for (int j = 0; j < dim; j += kRows) {  // dim is a multiple of 8
    for (int c = 0; c < n; ++c) delta[c] = args.delta + (int64_t{path[c]} * args.n_head_v + head) * dim + j;
    const auto keys_at = [&](int i) {
      for (int c = 0; c < n; ++c)
        k[c] = args.k + path[c] * args.k_stride + int64_t{head % args.n_head_k} * dim + i;
    };
    float* rows = state + int64_t{j} * dim;
    int i = 0;
    for (; kGemmVecs == 4 && i + 4 * W <= dim; i += 4 * W) {  // enough registers for it
      keys_at(i);
      commit_tile<kRows, 4>(rows + i, dim, n, scale, weight, delta, k);
    }
    for (; i + 2 * W <= dim; i += 2 * W) {
      keys_at(i);
      commit_tile<kRows, 2>(rows + i, dim, n, scale, weight, delta, k);
    }
    for (; i + W <= dim; i += W) {
      keys_at(i);
      commit_tile<kRows, 1>(rows + i, dim, n, scale, weight, delta, k);
    }
    if (i == dim) continue;
    keys_at(i);
    for (int t = 0; t < kRows; ++t)
      for (int u = 0; u < dim - i; ++u) {
        float& x = rows[int64_t{t} * dim + i + u];
        x *= scale;
        for (int c = 0; c < n; ++c) x += weight[c] * delta[c][t] * k[c][u];
      }
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

    for (int r = 0; r < args.n_rows; ++r) {
      // The inputs under the taps: up the parents, then back through the stored columns.
      const float* input[kMaxConvTaps];
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
