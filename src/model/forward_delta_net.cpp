// Gated DeltaNet on the processor.
#include <algorithm>
#include <cmath>

#include "model/forward.h"

namespace thermo {

// Small layers go by heads: a thread projects what its heads need and goes on with them, so that no other
// thread waits for it or reads what it wrote. Large ones have their matrices cut finer, for all threads to
// read at once.
void Forward::delta_net(int il, const BlockWeights& w) noexcept {
  norm(w, {Role::Qkv, Role::Z, Role::Alpha, Role::Beta});
  act_.mixed.set_cols(config_.ssm_inner());
  const int n_k = config_.ssm_n_head_k, n_v = config_.ssm_n_head_v;
  if (goes_by_heads(w)) {
    pool_.run(n_k, [&](int kh, int thread) {
      float* const g = act_.linear_scratch.tile(thread, 1);
      float* const beta = g + static_cast<int64_t>(n_rows()) * n_v;
      project_head(w, kh, thread, g, beta);
      for (const RowGroup& group : groups_) delta_net_head(il, w, group, kh, thread, g, beta);
    });
  } else {
    const auto job = [&](Role role, float* y, int stride) {
      return LinearJob{.w = &w[role], .x = &act_.h, .y = y, .y_stride = stride};
    };
    const LinearJob jobs[4] = {job(Role::Qkv, act_.conv_input, config_.ssm_channel_stride()),
                               job(Role::Z, act_.z, config_.ssm_inner()), job(Role::Alpha, act_.alpha, n_v),
                               job(Role::Beta, act_.beta, n_v)};
    linear_cpu(jobs, n_rows(), nullptr, linear_);
    // A thread has the same heads of all sequences.
    const int n_groups = static_cast<int>(groups_.size());
    pool_.run(n_k * n_groups, [&](int task, int thread) {
      delta_net_head(il, w, groups_[static_cast<size_t>(task % n_groups)], task / n_groups, thread,
                     act_.alpha, act_.beta);
    });
  }
  act_.mixed.spread_packed_rows(n_rows());
  add_output(w[Role::Output], [](int) {});
}

bool Forward::goes_by_heads(const BlockWeights& w) const noexcept {
  const int dim = config_.ssm_dim, n_k = config_.ssm_n_head_k, n_v = config_.ssm_n_head_v;
  const int n_threads = pool_.size();
  return n_rows() <= kFewRows && is_small(w[Role::Qkv]) && dim % kPanelRows == 0 &&
         dim <= LinearScratch::kTilePanels * kPanelRows && n_v <= 2 * kPanelRows &&
         (n_k % n_threads == 0 || n_k >= 4 * n_threads);
}

// What a key head and the value heads that read it need: their convolution inputs, gates, decays and betas.
void Forward::project_head(const BlockWeights& w, int kh, int thread, float* g, float* beta) noexcept {
  const int dim = config_.ssm_dim, n_k = config_.ssm_n_head_k, n_v = config_.ssm_n_head_v;
  const auto project = [&](Role role, int first, int n, float* y, int stride) {
    multiply_tile(w[role], first / kPanelRows, n_panels(n), {.x = &act_.h, .n = n_rows()}, y + first, stride,
                  act_.linear_scratch.panels(thread), kernels_.matmul);
  };
  project(Role::Alpha, 0, n_v, g, n_v);
  project(Role::Beta, 0, n_v, beta, n_v);
  const int stride = config_.ssm_channel_stride();
  project(Role::Qkv, kh * dim, dim, act_.conv_input, stride);
  project(Role::Qkv, (n_k + kh) * dim, dim, act_.conv_input, stride);
  for (int head = kh; head < n_v; head += n_k) {
    project(Role::Qkv, (2 * n_k + head) * dim, dim, act_.conv_input, stride);
    project(Role::Z, head * dim, dim, act_.z, config_.ssm_inner());
  }
}

// One key head of a sequence with the value heads that read it: convolution of their channels, norms, the
// delta rule, the gate, and the stored convolution columns. Nothing is shared between heads. Long chains go
// in chunks, from the convolution to the gate, so that what one operation wrote still lies in the cache. `g`,
// `beta`: [rows of the step][n_head_v] as projected.
void Forward::delta_net_head(int il, const BlockWeights& w, const RowGroup& group, int kh, int thread,
                             float* g, float* beta) noexcept {
  const int dim = config_.ssm_dim, n_k = config_.ssm_n_head_k, n_v = config_.ssm_n_head_v;
  const int stride = config_.ssm_channel_stride();
  const int64_t row = group.row_begin;
  const int n = group.n_rows;
  const bool uncommitted = group.uncommitted;
  float* const conv_state = group.sequence->conv_state(il);
  const float* const conv_input = act_.conv_input + row * stride;
  float* const conv_output = act_.conv_output + row * stride;
  float* const out = act_.mixed.packed_row(group.row_begin);
  const SequenceState::Tape tape = uncommitted ? group.sequence->tape(il) : SequenceState::Tape{};
  const size_t scratch_floats = (delta_net_scratch_floats(dim) + 15) / 16 * 16;
  float* const scratch = act_.delta_scratch + static_cast<size_t>(thread) * scratch_floats;
  g += row * n_v;
  beta += row * n_v;

  const ConvArgs conv{.u = conv_input,
                      .weight = w.floats(Role::Conv),
                      .state = conv_state,
                      .parents = group.parents,
                      .out = conv_output,
                      .n_rows = n,
                      .taps = config_.ssm_taps,
                      .stride = stride};
  const DeltaNetArgs rule{.q = conv_output,
                          .k = conv_output + static_cast<int64_t>(n_k) * dim,
                          .v = conv_output + static_cast<int64_t>(2 * n_k) * dim,
                          .g = g,
                          .beta = beta,
                          .q_stride = stride,
                          .k_stride = stride,
                          .v_stride = stride,
                          .state = group.sequence->delta_state(il),
                          .out = out,
                          .delta = tape.delta,
                          .n_rows = n,
                          .n_head_k = n_k,
                          .n_head_v = n_v,
                          .dim = dim,
                          .ancestors = group.ancestors,
                          .uncommitted = uncommitted};
  const float q_scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const float *const decay = w.floats(Role::Decay), *const time_step = w.floats(Role::TimeStep);

  for (int first = 0; first < n; first += kDeltaChunk) {
    const int end = std::min(first + kDeltaChunk, n);
    const auto convolve = [&](int begin) {
      ConvArgs part = conv;
      part.first_row = first;
      part.n_rows = end;
      kernels_.delta_net.conv(part, begin, begin + dim);
      for (int r = first; r < end && uncommitted; ++r)
        std::copy_n(conv_input + static_cast<int64_t>(r) * stride + begin, dim,
                    tape.conv_input + static_cast<int64_t>(r) * stride + begin);
      if (!uncommitted && end == n)
        shift_conv_state(conv_state, conv_input, row_numbers_.first(static_cast<size_t>(n)), config_.ssm_taps,
                         stride, begin, begin + dim);
    };
    convolve(kh * dim);
    convolve((n_k + kh) * dim);
    for (int r = first; r < end; ++r) {
      float* const q = conv_output + static_cast<int64_t>(r) * stride + static_cast<int64_t>(kh) * dim;
      float* const k = q + static_cast<int64_t>(n_k) * dim;
      kernels_.delta_net.l2_normalize(q, 1, dim, q_scale);
      kernels_.delta_net.l2_normalize(k, 1, dim, 1.0f);
      if (uncommitted)
        std::copy_n(k, dim, tape.k + static_cast<int64_t>(r) * n_k * dim + static_cast<int64_t>(kh) * dim);
    }
    for (int head = kh; head < n_v; head += n_k) {
      convolve((2 * n_k + head) * dim);
      for (int r = first; r < end; ++r) {
        const int64_t i = static_cast<int64_t>(r) * n_v + head;
        g[i] = decay[head] * softplus(g[i] + time_step[head]);
        beta[i] = sigmoid(beta[i]);
        if (uncommitted) tape.g[i] = g[i];
      }
      kernels_.delta_net.rows(rule.rows(first, end), head, head + 1, scratch);
      for (int r = first; r < end; ++r) {
        const int64_t at = static_cast<int64_t>(r) * n_v * dim + static_cast<int64_t>(head) * dim;
        kernels_.delta_net.gated_norm(out + at, act_.z + row * n_v * dim + at, w.floats(Role::InnerNorm), 1,
                                      dim, config_.norm_eps);
      }
    }
  }
}

}  // namespace thermo
