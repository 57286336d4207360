// Attention on the processor.
#include <cmath>

#include "model/forward.h"

namespace thermo {

void Forward::attention(int il, const Block& block, const BlockWeights& w) noexcept {
  const int q_dim = block.n_head * config_.head_dim;
  norm(w, {Role::Q, Role::K, Role::V, Role::Gate});

  const auto job = [&](Role role, float* y) {
    return LinearJob{.w = &w[role], .x = &act_.h, .y = y, .y_stride = w[role].n_rows};
  };
  const LinearJob jobs[4] = {job(Role::Q, act_.q_full), job(Role::K, act_.k), job(Role::V, act_.v),
                             job(Role::Gate, act_.gate)};
  linear_cpu({jobs, w[Role::Gate].empty() ? 3u : 4u}, n_rows(), nullptr, linear_);

  prepare_heads(block, w);
  act_.mixed.set_cols(q_dim);
  for (const RowGroup& group : groups_) {
    const size_t row = static_cast<size_t>(group.row_begin);
    append_keys(il, group);
    attention_cpu({.q = act_.q + row * static_cast<size_t>(q_dim),
                   .kv = group.sequence->kv(il),
                   .out = act_.mixed.row(group.row_begin),
                   .positions = positions_.data() + row,
                   .n_rows = group.n_rows,
                   .n_past = group.sequence->n_past(),
                   .n_head = block.n_head,
                   .n_head_kv = config_.n_head_kv,
                   .head_dim = config_.head_dim,
                   .scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim)),
                   .window = block.window,
                   .ancestors = block.both_ways ? AncestorBits{} : group.ancestors,
                   .both_ways = block.both_ways},
                  kernels_.attention, pool_, act_.attention_scratch);
  }
  add_output(w[Role::Output], [&](int r) { gate_heads(block, r); });
}

void Forward::append_keys(int il, const RowGroup& group) noexcept {
  const size_t at = static_cast<size_t>(group.row_begin) * static_cast<size_t>(config_.n_kv_dim());
  kernels_.attention.kv_append({.k = act_.k + at,
                                .v = act_.v + at,
                                .kv = group.sequence->kv(il),
                                .first_slot = group.sequence->n_past(),
                                .n_rows = group.n_rows,
                                .n_head_kv = config_.n_head_kv,
                                .head_dim = config_.head_dim});
}

// Norm and rotation of query and key heads. A gate inside q stands after each head's query.
void Forward::prepare_heads(const Block& block, const BlockWeights& w) noexcept {
  const int n_head = block.n_head, dim = config_.head_dim;
  const int step = block.gate == HeadGate::SigmoidElement ? 2 * dim : dim;
  const RopeTable& rope = ropes_[static_cast<size_t>(block.rope)];
  const float* const q_norm = w.floats(Role::QNorm);
  for_rows([&](int r) {
    const float* const q_full = act_.q_full + static_cast<int64_t>(r) * n_head * step;
    float* const q = act_.q + static_cast<int64_t>(r) * n_head * dim;
    for (int h = 0; h < n_head; ++h)
      kernels_.rows.rms_norm(q_full + static_cast<int64_t>(h) * step, q_norm, dim, config_.norm_eps,
                             q + static_cast<int64_t>(h) * dim);
    kernels_.rows.rope(q, n_head, dim, dim, rope.n_rot, angles_of(block.rope, r));
    prepare_keys(block, w, r);
  });
}

void Forward::prepare_keys(const Block& block, const BlockWeights& w, int r) noexcept {
  const int dim = config_.head_dim;
  const float* const k_norm = w.floats(Role::KNorm);
  float* const k = act_.k + static_cast<int64_t>(r) * config_.n_kv_dim();
  for (int h = 0; h < config_.n_head_kv; ++h) {
    float* const head = k + static_cast<int64_t>(h) * dim;
    kernels_.rows.rms_norm(head, k_norm, dim, config_.norm_eps, head);
  }
  kernels_.rows.rope(k, config_.n_head_kv, dim, dim, ropes_[static_cast<size_t>(block.rope)].n_rot,
                     angles_of(block.rope, r));
}

void Forward::gate_heads(const Block& block, int r) noexcept {
  const int n_head = block.n_head, dim = config_.head_dim;
  float* const out = act_.mixed.row(r);
  for (int h = 0; h < n_head; ++h) {
    float* const head = out + static_cast<int64_t>(h) * dim;
    switch (block.gate) {
      case HeadGate::None:
        break;
      case HeadGate::SigmoidElement:
        kernels_.rows.mul_sigmoid(head, act_.q_full + (static_cast<int64_t>(r) * n_head + h) * 2 * dim + dim,
                                  dim);
        break;
      case HeadGate::SoftplusHead: {
        const float gate = softplus(act_.gate[static_cast<int64_t>(r) * n_head + h]);
        for (int d = 0; d < dim; ++d) head[d] *= gate;
        break;
      }
      case HeadGate::SoftplusElement:
        for (int d = 0; d < dim; ++d)
          head[d] *= softplus(act_.gate[(static_cast<int64_t>(r) * n_head + h) * dim + d]);
        break;
    }
  }
}

}  // namespace thermo
