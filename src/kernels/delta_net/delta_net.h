// The gated delta rule: a linear-attention layer whose memory is one matrix per value head.
//
// Per value head n (key head kh = n mod n_head_k), state S[j][i] (j: value dim, i: key dim, contiguous), of
// row r:
//   S <- exp(g_r) S;  dl[j] = beta_r (v_r[j] - S[j].k_r);  S[j] <- S[j] + dl[j] k_r;  o_r[j] = S[j].q_r
//
// Rows may be a chain (prefill, decode) or a tree (draft verification). Committed rows are a chain
// and update the state in place. Uncommitted rows leave the state alone and write `delta`; a commit then
// applies the accepted path.
//
// Every step runs this recurrence row by row along each branch, and a commit repeats the updates of the
// accepted rows. So, for one instruction set, the bits of a row's output and of the state after it depend on
// the rows before it only: not on how a prompt is cut into steps, nor on siblings in a tree, nor on whether
// rows were committed at once or later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/attention/attention.h"  // AncestorBits
#include "kernels/isa.h"

namespace thermo {

inline constexpr int kDeltaChunk = 64;      // uncommitted rows of a sequence
inline constexpr int kDeltaBlockRows = 32;  // of the state that are worked on together
inline constexpr int kMaxConvTaps = 8;

struct DeltaNetArgs {
  // Rows of one sequence. q, k already normalised, q already scaled.
  const float* q;     // [n_rows] rows of q_stride floats, n_head_k heads of dim
  const float* k;     // the same with k_stride
  const float* v;     // n_head_v heads of dim, v_stride
  const float* g;     // [n_rows, n_head_v] log decay, <= 0
  const float* beta;  // [n_rows, n_head_v]
  int64_t q_stride, k_stride, v_stride;
  float* state;  // [n_head_v][dim][dim]
  float* out;    // [n_rows, n_head_v, dim]
  float* delta;  // [n_rows, n_head_v, dim] or nullptr; REQUIRED when uncommitted is true
  int n_rows, n_head_k, n_head_v, dim;
  AncestorBits ancestors;  // a tree is uncommitted
  bool uncommitted;        // true: `state` is read only and n_rows <= kDeltaChunk, chain or tree

  // Rows [begin, end) of them, once the state is that of the rows before.
  DeltaNetArgs rows(int begin, int end) const {
    DeltaNetArgs part = *this;
    part.q += begin * q_stride;
    part.k += begin * k_stride;
    part.v += begin * v_stride;
    part.g += int64_t{begin} * n_head_v;
    part.beta += int64_t{begin} * n_head_v;
    part.out += int64_t{begin} * n_head_v * dim;
    if (delta != nullptr) part.delta += int64_t{begin} * n_head_v * dim;
    part.n_rows = end - begin;
    return part;
  }
};

// Applies rows `path` (increasing, each the parent of the next) of uncommitted rows.
struct DeltaNetCommitArgs {
  const float* k;  // as in the step
  const float* g;
  const float* delta;
  int64_t k_stride;
  float* state;
  std::span<const int32_t> path;
  int n_head_k, n_head_v, dim;
};

// Causal depthwise convolution over the rows of one sequence, then SiLU:
//   out[r, ch] = silu(sum_i w[ch][i] * u_{r - (taps-1) + i}[ch])
// where u_{r-1} is the input of r's parent row, and before the first row the stored columns.
struct ConvArgs {
  const float* u;          // [n_rows] raw inputs, `stride` floats apart
  const float* weight;     // [n_channels][taps]
  const float* state;      // [taps - 1] columns, oldest first, `stride` apart
  const int32_t* parents;  // [n_rows], -1: the committed state; nullptr: a chain
  float* out;              // [n_rows], `stride` apart
  int n_rows, taps;
  int64_t stride;
  int first_row = 0;  // rows before it are inputs only
};

struct DeltaNetKernels {
  // Heads [head_begin, head_end), single-threaded. `scratch`: delta_net_scratch_floats(dim), one per thread,
  // 64-byte aligned. `dim` is a multiple of 8. Parents precede their children. `delta` is written whenever it
  // is not null.
  void (*rows)(const DeltaNetArgs& args, int head_begin, int head_end, float* scratch) noexcept;
  // An empty path leaves the state as it is.
  void (*commit)(const DeltaNetCommitArgs& args, int head_begin, int head_end) noexcept;
  // Channels [channel_begin, channel_end), rows from first_row on. taps is 1 to kMaxConvTaps. Does not touch
  // the state: the caller keeps u and shifts its own columns.
  void (*conv)(const ConvArgs& args, int channel_begin, int channel_end) noexcept;
  // In place: each of n heads of `dim`: x / sqrt(sum x^2 + 1e-6) * scale.
  void (*l2_normalize)(float* x, int n, int dim, float scale) noexcept;
  // o[h] = rms(o[h]; weight, eps) * silu(z[h]) for n heads of dim, in place.
  void (*gated_norm)(float* o, const float* z, const float* weight, int n, int dim, float eps) noexcept;
};
const DeltaNetKernels& delta_net_kernels(Isa isa);
size_t delta_net_scratch_floats(int dim);

void delta_net_ref(const DeltaNetArgs& args);  // row by row, a copy of the state per branch, double
void delta_net_commit_ref(const DeltaNetCommitArgs& args);
void conv_ref(const ConvArgs& args, int n_channels);
void l2_normalize_ref(float* x, int n, int dim, float scale);
void gated_norm_ref(float* o, const float* z, const float* weight, int n, int dim, float eps);

}  // namespace thermo
