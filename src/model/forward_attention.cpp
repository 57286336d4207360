// Attention on the processor.
#include <algorithm>
#include <cmath>

#include "model/forward.h"

namespace thermo {

void Forward::attention(int il, const Block& block, const BlockWeights& w) noexcept {
  project_heads(il, block, w);
  const int q_dim = block.n_head * config_.head_dim;
  act_.mixed.set_cols(q_dim);
  act_.attention.clear();
  for (const RowGroup& group : groups_) {
    const size_t row = static_cast<size_t>(group.row_begin);
    act_.attention.push_back({.q = act_.q + row * static_cast<size_t>(q_dim),
                              .kv = group.sequence->kv(il),
                              .out = act_.mixed.packed_row(group.row_begin),
                              .positions = positions_.data() + row,
                              .n_rows = group.n_rows,
                              .n_past = group.sequence->n_past(),
                              .n_head = block.n_head,
                              .n_head_kv = config_.n_head_kv,
                              .head_dim = config_.head_dim,
                              .scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim)),
                              .window = block.window,
                              .ancestors = block.both_ways ? AncestorBits{} : group.ancestors,
                              .both_ways = block.both_ways});
  }
  attention_cpu(act_.attention, kernels_.attention, pool_, act_.attention_scratch);
  act_.mixed.spread_packed_rows(n_rows());
  add_output(w[Role::Output], [&](int r) { gate_heads(block, r); });
}

// Queries, keys and values of all rows; keys and values go to the cache.
void Forward::project_heads(int il, const Block& block, const BlockWeights& w) noexcept {
  constexpr Role kProjected[4] = {Role::Q, Role::K, Role::V, Role::Gate};
  float* const outputs[4] = {act_.q_full, act_.k, act_.v, act_.gate};
  ActFormats formats;
  bool by_rows = true;
  for (const Role role : kProjected) {
    formats.add(w[role]);
    by_rows = by_rows && goes_by_rows(w[role]);
  }
  if (by_rows) {
    act_.h.set_cols(config_.n_embd);
    for_row_blocks([&](int first, int n, int thread) {
      for (int r = first; r < first + n; ++r) norm_row(w, formats, r);
      for (size_t i = 0; i < 4; ++i)
        multiply_rows(w[kProjected[i]], act_.h, first, n, outputs[i], w[kProjected[i]].n_rows, thread);
      for (int r = first; r < first + n; ++r) prepare_heads(block, w, r);
      append_keys(il, first, n);
    });
    return;
  }
  norm(w, formats);
  LinearJob jobs[4];
  for (size_t i = 0; i < 4; ++i)
    jobs[i] = {.w = &w[kProjected[i]],
               .x = &act_.h,
               .y = outputs[i],
               .y_stride = w[kProjected[i]].n_rows,
               .add = false};
  linear_cpu({jobs, w[Role::Gate].empty() ? 3u : 4u}, n_rows(), nullptr, linear_);
  for_rows([&](int r) { prepare_heads(block, w, r); });
  append_keys(il, 0, n_rows());
}

// Keys and values of rows [first, first + n), whichever sequences they are of.
void Forward::append_keys(int il, int first, int n) noexcept {
  for (const RowGroup& group : groups_) {
    const int begin = std::max(first, group.row_begin);
    const int end = std::min(first + n, group.row_begin + group.n_rows);
    if (begin >= end) continue;
    const size_t at = static_cast<size_t>(begin) * static_cast<size_t>(config_.n_kv_dim());
    kernels_.attention.kv_append({.k = act_.k + at,
                                  .v = act_.v + at,
                                  .kv = group.sequence->kv(il),
                                  .first_slot = group.sequence->n_past() + begin - group.row_begin,
                                  .n_rows = end - begin,
                                  .n_head_kv = config_.n_head_kv,
                                  .head_dim = config_.head_dim});
  }
}

// Norm and rotation of query and key heads. A gate inside q stands after each head's query.
void Forward::prepare_heads(const Block& block, const BlockWeights& w, int r) noexcept {
  const int n_head = block.n_head, dim = config_.head_dim;
  const int step = block.gate == HeadGate::SigmoidElement ? 2 * dim : dim;
  const RopeTable& rope = ropes_[static_cast<size_t>(block.rope)];
  const float* const q_norm = w.floats(Role::QNorm);
  const float* const q_full = act_.q_full + static_cast<int64_t>(r) * n_head * step;
  float* const q = act_.q + static_cast<int64_t>(r) * n_head * dim;
  for (int h = 0; h < n_head; ++h)
    kernels_.rows.rms_norm(q_full + static_cast<int64_t>(h) * step, q_norm, dim, config_.norm_eps,
                           q + static_cast<int64_t>(h) * dim);
  kernels_.rows.rope(q, n_head, dim, dim, rope.n_rot, angles_of(block.rope, r));
  prepare_keys(block, w, r);
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

// Of every attention block.
template <class Visit>
void Forward::for_each_attention(const Visit& visit) noexcept {
  for (int il = 0; il < config_.n_layer; ++il)
    for (size_t b = 0; b < config_.network.layers[static_cast<size_t>(il)].blocks.size(); ++b) {
      const Block& block = config_.network.layers[static_cast<size_t>(il)].blocks[b];
      if (block.kind == BlockKind::Attention)
        visit(il, block, weights_.layers[static_cast<size_t>(il)].blocks[b]);
    }
}

void Forward::run_features(const StateRows& states) noexcept {
  const BlockWeights& features = weights_.features.front();
  const Matrix& projection = features[Role::StateProjection];
  ActFormats formats, readers;
  formats.add(projection);
  bool by_rows = goes_by_rows(projection);
  for_each_attention([&](int, const Block&, const BlockWeights& w) {
    readers.add(w[Role::K]);
    readers.add(w[Role::V]);
    by_rows = by_rows && goes_by_rows(w[Role::K]) && goes_by_rows(w[Role::V]);
  });
  const auto gather = [&](int r) {
    for (int tap = 0; tap < states.n_taps; ++tap)
      std::copy_n(states.at(tap, r), states.n_embd,
                  act_.mixed.row(r) + static_cast<int64_t>(tap) * states.n_embd);
    act_.mixed.quantize(r, projection.n_cols, formats, kernels_.matmul);
  };
  act_.mixed.set_cols(projection.n_cols);
  act_.h.set_cols(config_.n_embd);
  if (by_rows) {
    for_row_blocks([&](int first, int n, int thread) {
      for (int r = first; r < first + n; ++r) {
        find_angles(r);
        gather(r);
      }
      multiply_rows(projection, act_.mixed, first, n, act_.x, config_.n_embd, thread);
      for (int r = first; r < first + n; ++r) norm_row(features, readers, r);
      for_each_attention([&](int il, const Block& block, const BlockWeights& w) {
        multiply_rows(w[Role::K], act_.h, first, n, act_.k, w[Role::K].n_rows, thread);
        multiply_rows(w[Role::V], act_.h, first, n, act_.v, w[Role::V].n_rows, thread);
        for (int r = first; r < first + n; ++r) prepare_keys(block, w, r);
        append_keys(il, first, n);
      });
    });
    return;
  }
  for_rows([&](int r) {
    find_angles(r);
    gather(r);
  });
  const LinearJob job{.w = &projection, .x = &act_.mixed, .y = act_.x, .y_stride = config_.n_embd};
  linear_cpu({&job, 1}, n_rows(), nullptr, linear_);
  norm(features, readers);
  for_each_attention([&](int il, const Block& block, const BlockWeights& w) {
    const LinearJob jobs[2] = {{.w = &w[Role::K], .x = &act_.h, .y = act_.k, .y_stride = w[Role::K].n_rows},
                               {.w = &w[Role::V], .x = &act_.h, .y = act_.v, .y_stride = w[Role::V].n_rows}};
    linear_cpu(jobs, n_rows(), nullptr, linear_);
    for_rows([&](int r) { prepare_keys(block, w, r); });
    append_keys(il, 0, n_rows());
  });
}

}  // namespace thermo
