#include "model/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/dequantize/dequantize.h"

namespace thermo {

void Forward::begin(std::span<const RowGroup> groups, std::span<const TokenId> tokens,
                    std::span<const int32_t> positions, std::span<const int32_t> row_numbers) noexcept {
  groups_ = groups;
  tokens_ = tokens;
  positions_ = positions;
  row_numbers_ = row_numbers;
}

// A single row is not worth waking anybody for.
template <class Body>
void Forward::for_rows(const Body& body) noexcept {
  pool_.run(n_rows(), [&](int row, int) { body(row); });
}

void Forward::embed(const Matrix& table) noexcept {
  const size_t bytes = row_bytes(table.dtype, static_cast<uint64_t>(table.n_cols));
  for_rows([&](int r) {
    dequantize_row(table.dtype, table.rows + static_cast<size_t>(tokens_[static_cast<size_t>(r)]) * bytes,
                   table.n_cols, act_.x + static_cast<size_t>(r) * static_cast<size_t>(config_.n_embd));
  });
}

void Forward::angles(const RopeTable& rope, float* out) noexcept {
  for_rows([&](int r) {
    rope_angles(rope, positions_[static_cast<size_t>(r)],
                out + static_cast<size_t>(r) * static_cast<size_t>(rope.n_rot));
  });
}

void Forward::norm(const std::vector<float>& weight, ActFormats formats) noexcept {
  act_.h.set_cols(config_.n_embd);
  for_rows([&](int r) {
    kernels_.rows.rms_norm(act_.x + static_cast<size_t>(r) * static_cast<size_t>(config_.n_embd),
                           weight.data(), config_.n_embd, config_.norm_eps, act_.h.row(r));
    act_.h.quantize(r, config_.n_embd, formats, kernels_.matmul);
  });
}

void Forward::capture(float* out) const noexcept {
  std::memcpy(out, act_.x,
              static_cast<size_t>(n_rows()) * static_cast<size_t>(config_.n_embd) * sizeof(float));
}

void Forward::final_norm(const std::vector<float>& weight, const Matrix& next) noexcept {
  ActFormats formats;
  formats.add(next);
  norm(weight, formats);
}

void Forward::head(const Matrix& output, std::span<const int32_t> rows) noexcept {
  if (rows.empty()) return;
  const LinearJob job{.w = &output, .x = &act_.h, .y = act_.logits, .y_stride = config_.n_vocab};
  linear_cpu({&job, 1}, static_cast<int>(rows.size()), rows.data(), linear_);
}

// ---- attention ----

void Forward::attention(int il, const RopeTable& rope, const float* angles) noexcept {
  const AttentionWeights& w = *weights_.layers[static_cast<size_t>(il)].attention;
  const LayerConfig& layer = config_.layers[static_cast<size_t>(il)];
  const int q_dim = layer.n_head * config_.head_dim;

  ActFormats formats;
  formats.add(w.q);
  formats.add(w.k);
  formats.add(w.v);
  formats.add(w.gate);
  norm(weights_.layers[static_cast<size_t>(il)].attn_norm, formats);

  LinearJob jobs[4] = {{.w = &w.q, .x = &act_.h, .y = act_.q_full, .y_stride = w.q.n_rows},
                       {.w = &w.k, .x = &act_.h, .y = act_.k, .y_stride = w.k.n_rows},
                       {.w = &w.v, .x = &act_.h, .y = act_.v, .y_stride = w.v.n_rows},
                       {.w = &w.gate, .x = &act_.h, .y = act_.gate, .y_stride = w.gate.n_rows}};
  linear_cpu({jobs, w.gate.empty() ? 3u : 4u}, n_rows(), nullptr, linear_);

  prepare_heads(il, rope, angles);
  act_.mixed.set_cols(q_dim);
  for (const RowGroup& group : groups_) {
    const size_t row = static_cast<size_t>(group.row_begin);
    const KvView kv = group.sequence->kv(il);
    kernels_.attention.kv_append({.k = act_.k + row * static_cast<size_t>(config_.n_kv_dim()),
                                  .v = act_.v + row * static_cast<size_t>(config_.n_kv_dim()),
                                  .kv = kv,
                                  .first_slot = group.sequence->n_past(),
                                  .n_rows = group.n_rows,
                                  .n_head_kv = config_.n_head_kv,
                                  .head_dim = config_.head_dim});
    attention_cpu({.q = act_.q + row * static_cast<size_t>(q_dim),
                   .kv = kv,
                   .out = act_.mixed.row(group.row_begin),
                   .positions = positions_.data() + row,
                   .n_rows = group.n_rows,
                   .n_past = group.sequence->n_past(),
                   .n_head = layer.n_head,
                   .n_head_kv = config_.n_head_kv,
                   .head_dim = config_.head_dim,
                   .scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim)),
                   .window = layer.window,
                   .ancestors = group.ancestors},
                  kernels_.attention, pool_, act_.attention_scratch);
  }
  gate_heads(il);

  const LinearJob output{
      .w = &w.output, .x = &act_.mixed, .y = act_.x, .y_stride = config_.n_embd, .add = true};
  linear_cpu({&output, 1}, n_rows(), nullptr, linear_);
}

// Norm and rotation of query and key heads. qwen35 keeps each head's gate right behind its query.
void Forward::prepare_heads(int il, const RopeTable& rope, const float* angles) noexcept {
  const AttentionWeights& w = *weights_.layers[static_cast<size_t>(il)].attention;
  const int n_head = config_.layers[static_cast<size_t>(il)].n_head;
  const int dim = config_.head_dim;
  const int step = config_.attn_gate == AttnGate::SigmoidElement ? 2 * dim : dim;
  for_rows([&](int r) {
    const float* const q_full = act_.q_full + static_cast<int64_t>(r) * n_head * step;
    float* const q = act_.q + static_cast<int64_t>(r) * n_head * dim;
    float* const k = act_.k + static_cast<int64_t>(r) * config_.n_kv_dim();
    const float* const cos_sin = angles + static_cast<int64_t>(r) * rope.n_rot;
    for (int h = 0; h < n_head; ++h)
      kernels_.rows.rms_norm(q_full + static_cast<int64_t>(h) * step, w.q_norm.data(), dim, config_.norm_eps,
                             q + static_cast<int64_t>(h) * dim);
    for (int h = 0; h < config_.n_head_kv; ++h) {
      float* const head = k + static_cast<int64_t>(h) * dim;
      kernels_.rows.rms_norm(head, w.k_norm.data(), dim, config_.norm_eps, head);
    }
    kernels_.rows.rope(q, n_head, dim, dim, rope.n_rot, cos_sin);
    kernels_.rows.rope(k, config_.n_head_kv, dim, dim, rope.n_rot, cos_sin);
  });
}

void Forward::gate_heads(int il) noexcept {
  const AttentionWeights& w = *weights_.layers[static_cast<size_t>(il)].attention;
  const int n_head = config_.layers[static_cast<size_t>(il)].n_head;
  const int dim = config_.head_dim;
  ActFormats formats;
  formats.add(w.output);
  for_rows([&](int r) {
    float* const out = act_.mixed.row(r);
    for (int h = 0; h < n_head; ++h) {
      float* const head = out + static_cast<int64_t>(h) * dim;
      switch (config_.attn_gate) {
        case AttnGate::SigmoidElement:
          kernels_.rows.mul_sigmoid(
              head, act_.q_full + (static_cast<int64_t>(r) * n_head + h) * 2 * dim + dim, dim);
          break;
        case AttnGate::SoftplusHead: {
          const float gate = softplus(act_.gate[static_cast<int64_t>(r) * n_head + h]);
          for (int d = 0; d < dim; ++d) head[d] *= gate;
          break;
        }
        case AttnGate::SoftplusElement:
          for (int d = 0; d < dim; ++d)
            head[d] *= softplus(act_.gate[(static_cast<int64_t>(r) * n_head + h) * dim + d]);
          break;
      }
    }
    act_.mixed.quantize(r, n_head * dim, formats, kernels_.matmul);
  });
}

// ---- Gated DeltaNet ----

void Forward::delta_net(int il) noexcept {
  const DeltaNetWeights& w = *weights_.layers[static_cast<size_t>(il)].delta_net;
  ActFormats formats;
  for (const Matrix* m : {&w.qkv, &w.z, &w.alpha, &w.beta}) formats.add(*m);
  norm(weights_.layers[static_cast<size_t>(il)].attn_norm, formats);

  const LinearJob jobs[4] = {
      {.w = &w.qkv, .x = &act_.h, .y = act_.conv_input, .y_stride = config_.ssm_channel_stride()},
      {.w = &w.z, .x = &act_.h, .y = act_.z, .y_stride = config_.ssm_inner()},
      {.w = &w.alpha, .x = &act_.h, .y = act_.alpha, .y_stride = config_.ssm_n_head_v},
      {.w = &w.beta, .x = &act_.h, .y = act_.beta, .y_stride = config_.ssm_n_head_v}};
  linear_cpu(jobs, n_rows(), nullptr, linear_);

  act_.mixed.set_cols(config_.ssm_inner());
  for (const RowGroup& group : groups_) delta_net_group(il, group);

  ActFormats output_formats;
  output_formats.add(w.output);
  for_rows([&](int r) { act_.mixed.quantize(r, config_.ssm_inner(), output_formats, kernels_.matmul); });
  const LinearJob output{
      .w = &w.output, .x = &act_.mixed, .y = act_.x, .y_stride = config_.n_embd, .add = true};
  linear_cpu({&output, 1}, n_rows(), nullptr, linear_);
}

// A task is one key head with the value heads that read it: convolution of their channels, norms, the delta
// rule, the gate, and the stored convolution columns. Nothing is shared between tasks.
void Forward::delta_net_group(int il, const RowGroup& group) noexcept {
  const DeltaNetWeights& w = *weights_.layers[static_cast<size_t>(il)].delta_net;
  const int dim = config_.ssm_dim, n_k = config_.ssm_n_head_k, n_v = config_.ssm_n_head_v;
  const int stride = config_.ssm_channel_stride();
  const int64_t row = group.row_begin;
  const int n = group.n_rows;
  const bool uncommitted = group.uncommitted;
  float* const conv_state = group.sequence->conv_state(il);
  const float* const conv_input = act_.conv_input + row * stride;
  float* const conv_output = act_.conv_output + row * stride;
  float* const g = act_.alpha + row * n_v;
  float* const beta = act_.beta + row * n_v;
  float* const out = act_.mixed.row(group.row_begin);
  const SequenceState::Tape tape = uncommitted ? group.sequence->tape(il) : SequenceState::Tape{};
  const size_t scratch_floats = (delta_net_scratch_floats(dim) + 15) / 16 * 16;

  const ConvArgs conv{.u = conv_input,
                      .weight = w.conv.data(),
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
                          .keep_state = uncommitted};
  const float q_scale = 1.0f / std::sqrt(static_cast<float>(dim));

  if (uncommitted)
    std::memcpy(tape.conv_input, conv_input,
                static_cast<size_t>(n) * static_cast<size_t>(stride) * sizeof(float));
  pool_.run(n_k, [&](int kh, int thread) {
    const auto convolve = [&](int begin) {
      kernels_.delta_net.conv(conv, begin, begin + dim);
      if (!uncommitted)
        shift_conv_state(conv_state, conv_input, row_numbers_.first(static_cast<size_t>(n)), config_.ssm_taps,
                         stride, begin, begin + dim);
    };
    convolve(kh * dim);
    convolve((n_k + kh) * dim);
    for (int r = 0; r < n; ++r) {
      float* const q = conv_output + static_cast<int64_t>(r) * stride + static_cast<int64_t>(kh) * dim;
      float* const k = q + static_cast<int64_t>(n_k) * dim;
      kernels_.delta_net.l2_normalize(q, 1, dim, q_scale);
      kernels_.delta_net.l2_normalize(k, 1, dim, 1.0f);
      if (uncommitted)
        std::copy_n(k, dim, tape.k + static_cast<int64_t>(r) * n_k * dim + static_cast<int64_t>(kh) * dim);
    }
    float* const scratch = act_.delta_scratch + static_cast<size_t>(thread) * scratch_floats;
    for (int head = kh; head < n_v; head += n_k) {
      convolve((2 * n_k + head) * dim);
      for (int r = 0; r < n; ++r) {
        const int64_t i = static_cast<int64_t>(r) * n_v + head;
        g[i] = w.a[static_cast<size_t>(head)] * softplus(g[i] + w.dt_bias[static_cast<size_t>(head)]);
        beta[i] = sigmoid(beta[i]);
        if (uncommitted) tape.g[i] = g[i];
      }
      kernels_.delta_net.rows(rule, head, head + 1, scratch);
      for (int r = 0; r < n; ++r) {
        const int64_t at = static_cast<int64_t>(r) * n_v * dim + static_cast<int64_t>(head) * dim;
        kernels_.delta_net.gated_norm(out + at, act_.z + row * n_v * dim + at, w.norm.data(), 1, dim,
                                      config_.norm_eps);
      }
    }
  });
}

// ---- feed-forward ----

void Forward::feed_forward(int il) noexcept {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(il)];
  const Ffn& some = w.moe ? w.moe->experts[0] : *w.ffn;
  ActFormats formats;
  formats.add(some.gate);
  formats.add(some.up);
  if (w.moe) {
    formats.add(w.moe->router);
    formats.add(w.moe->shared.gate);
    formats.add(w.moe->shared.up);
  }
  norm(w.ffn_norm, formats);

  act_.groups.clear();
  int n_routed = 0;
  if (w.moe) {
    n_routed = route(*w.moe);
  } else {
    for (int r = 0; r < n_rows(); ++r) {
      act_.pair_rows[r] = r;
      act_.pair_weights[r] = 1.0f;
    }
    act_.groups.push_back({&*w.ffn, 0, n_rows()});
  }
  const ExpertFfnArgs args{.groups = act_.groups,
                           .pair_rows = act_.pair_rows,
                           .pair_weights = act_.pair_weights,
                           .x = &act_.h,
                           .sums = &act_.expert_sums,
                           .n_rows = n_rows(),
                           .y = act_.x,
                           .y_stride = config_.n_embd,
                           .n_embd = config_.n_embd};
  // Only the main stack's experts are counted and may lie elsewhere.
  const bool main_stack = w.moe && il < config_.n_layer;
  if (main_stack && heat_)
    for (int g = 0; g < n_routed; ++g) {
      const FfnGroup& group = act_.groups[static_cast<size_t>(g)];
      heat_->use(il, static_cast<int>(group.ffn - w.moe->experts.data()), static_cast<float>(group.n_pairs));
    }
  if (main_stack && runner_)
    runner_->run({.layer = il,
                  .experts = w.moe->experts.data(),
                  .n_routed = n_routed,
                  .n_rows = n_rows(),
                  .args = args,
                  .scratch = act_.ffn_scratch,
                  .row_ops = kernels_.rows,
                  .linear = linear_});
  else
    expert_ffn_cpu(args, act_.ffn_scratch, kernels_.rows, linear_);
}

// Chooses experts for every row and sorts the (row, expert) pairs by expert.
int Forward::route(const MoeWeights& moe) noexcept {
  const int n_expert = config_.route.n_expert, n_used = config_.route.n_expert_used;
  const LinearJob router{.w = &moe.router, .x = &act_.h, .y = act_.router_logits, .y_stride = n_expert};
  linear_cpu({&router, 1}, n_rows(), nullptr, linear_);
  for_rows([&](int r) {
    route_topk(config_.route, act_.router_logits + static_cast<int64_t>(r) * n_expert,
               moe.router_bias.empty() ? nullptr : moe.router_bias.data(),
               act_.expert_ids + static_cast<int64_t>(r) * n_used,
               act_.expert_weights + static_cast<int64_t>(r) * n_used);
    act_.shared_weights[r] =
        moe.shared_gate.empty()
            ? 1.0f
            : sigmoid(kernels_.rows.dot(moe.shared_gate.data(), act_.h.row(r), config_.n_embd));
  });

  // Counting sort.
  std::vector<int>& first = act_.expert_first;
  std::fill(first.begin(), first.end(), 0);
  const int n_pairs = n_rows() * n_used;
  for (int p = 0; p < n_pairs; ++p) ++first[static_cast<size_t>(act_.expert_ids[p]) + 1];
  for (int e = 0; e < n_expert; ++e) {
    const int count = first[static_cast<size_t>(e) + 1];
    first[static_cast<size_t>(e) + 1] += first[static_cast<size_t>(e)];
    if (count > 0)
      act_.groups.push_back({&moe.experts[static_cast<size_t>(e)], first[static_cast<size_t>(e)], count});
  }
  for (int p = 0; p < n_pairs; ++p) {
    const int at = first[static_cast<size_t>(act_.expert_ids[p])]++;
    act_.pair_rows[at] = p / n_used;
    act_.pair_weights[at] = act_.expert_weights[p];
  }
  const int n_routed = static_cast<int>(act_.groups.size());
  if (moe.shared.empty()) return n_routed;
  for (int r = 0; r < n_rows(); ++r) {
    act_.pair_rows[n_pairs + r] = r;
    act_.pair_weights[n_pairs + r] = act_.shared_weights[r];
  }
  act_.groups.push_back({&moe.shared, n_pairs, n_rows()});
  return n_routed;
}

}  // namespace thermo
