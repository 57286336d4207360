#include "model/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/dequantize/dequantize.h"

namespace thermo {

Forward::Forward(const ModelConfig& config, const Weights& weights, Activations& act,
                 const CpuKernels& kernels, ThreadPool& pool)
    : config_(config),
      weights_(weights),
      act_(act),
      kernels_(kernels),
      pool_(pool),
      linear_{kernels.matmul, pool, act.linear_scratch} {
  for (const RopeConfig& rope : config.ropes) {
    ropes_.push_back(make_rope_table(rope));
    max_n_rot_ = std::max(max_n_rot_, rope.n_rot);
  }
}

void Forward::begin(std::span<const RowGroup> groups, std::span<const TokenId> tokens,
                    std::span<const int32_t> positions, std::span<const int32_t> row_numbers,
                    std::span<const int32_t> logit_rows, std::span<const StateRows> states) noexcept {
  groups_ = groups;
  tokens_ = tokens;
  positions_ = positions;
  row_numbers_ = row_numbers;
  logit_rows_ = logit_rows;
  states_ = states;
}

void Forward::run() noexcept {
  const Network& net = config_.network;
  find_angles();
  for (size_t b = 0; b < net.input.size(); ++b) run_block(-1, net.input[b], weights_.input[b]);
  for (int il = 0; il < config_.n_layer; ++il) {
    const std::vector<Block>& blocks = net.layers[static_cast<size_t>(il)].blocks;
    const LayerWeights& layer = weights_.layers[static_cast<size_t>(il)];
    for (size_t b = 0; b < blocks.size(); ++b) run_block(il, blocks[b], layer.blocks[b]);
  }
  for (size_t b = 0; b < net.output.size(); ++b)
    run_block(config_.n_layer, net.output[b], weights_.output[b]);
}

void Forward::run_block(int il, const Block& block, const BlockWeights& w) noexcept {
  switch (block.kind) {
    case BlockKind::Embedding:
      return embed(w);
    case BlockKind::Attention:
      return attention(il, block, w);
    case BlockKind::DeltaNet:
      return delta_net(il, w);
    case BlockKind::FeedForward:
      return feed_forward(il, block, w);
    case BlockKind::Tap:
      return tap(block);
    case BlockKind::Head:
      return head(w);
    case BlockKind::NextnInput:
      return nextn_input(w);
    case BlockKind::Features:
      return;  // not among the blocks of a step
  }
}

// A single row is not worth waking anybody for.
template <class Body>
void Forward::for_rows(const Body& body) noexcept {
  pool_.run(n_rows(), [&](int row, int) { body(row); });
}

void Forward::embed(const BlockWeights& w) noexcept {
  for_rows([&](int r) {
    embed_row(w[Role::Embedding], r, act_.x + static_cast<size_t>(r) * static_cast<size_t>(config_.n_embd));
  });
}

void Forward::embed_row(const Matrix& table, int row, float* out) const noexcept {
  const size_t bytes = row_bytes(table.dtype, static_cast<uint64_t>(table.n_cols));
  const auto token = static_cast<size_t>(tokens_[static_cast<size_t>(row)]);
  dequantize_row(table.dtype, table.rows + token * bytes, table.n_cols, out);
}

// x = projection of [norm(embedding); norm(state)].
void Forward::nextn_input(const BlockWeights& w) noexcept {
  const int width = config_.n_embd;
  const Matrix& projection = w[Role::StateProjection];
  ActFormats formats;
  formats.add(projection);
  act_.h.set_cols(2 * width);
  const auto state_of = [&](int r) {
    size_t piece = 0;
    while (r >= states_[piece].n) r -= states_[piece++].n;
    return states_[piece].at(0, r);
  };
  for_rows([&](int r) {
    float* const both = act_.h.row(r);
    embed_row(w[Role::Embedding], r, both);
    kernels_.rows.rms_norm(both, w.floats(Role::EmbeddingNorm), width, config_.norm_eps, both);
    kernels_.rows.rms_norm(state_of(r), w.floats(Role::StateNorm), width, config_.norm_eps, both + width);
    act_.h.quantize(r, 2 * width, formats, kernels_.matmul);
  });
  const LinearJob job{.w = &projection, .x = &act_.h, .y = act_.x, .y_stride = width};
  linear_cpu({&job, 1}, n_rows(), nullptr, linear_);
}

void Forward::run_features(const StateRows& states) noexcept {
  const BlockWeights& features = weights_.features.front();
  const Matrix& projection = features[Role::StateProjection];
  find_angles();
  ActFormats formats;
  formats.add(projection);
  act_.h.set_cols(projection.n_cols);
  for_rows([&](int r) {
    for (int tap = 0; tap < states.n_taps; ++tap)
      std::copy_n(states.at(tap, r), states.n_embd,
                  act_.h.row(r) + static_cast<int64_t>(tap) * states.n_embd);
    act_.h.quantize(r, projection.n_cols, formats, kernels_.matmul);
  });
  const LinearJob job{.w = &projection, .x = &act_.h, .y = act_.x, .y_stride = config_.n_embd};
  linear_cpu({&job, 1}, n_rows(), nullptr, linear_);

  ActFormats readers;
  const auto for_each_attention = [&](const auto& visit) {
    for (int il = 0; il < config_.n_layer; ++il)
      for (size_t b = 0; b < config_.network.layers[static_cast<size_t>(il)].blocks.size(); ++b) {
        const Block& block = config_.network.layers[static_cast<size_t>(il)].blocks[b];
        if (block.kind == BlockKind::Attention)
          visit(il, block, weights_.layers[static_cast<size_t>(il)].blocks[b]);
      }
  };
  for_each_attention([&](int, const Block&, const BlockWeights& w) {
    readers.add(w[Role::K]);
    readers.add(w[Role::V]);
  });
  norm(features, readers);
  for_each_attention([&](int il, const Block& block, const BlockWeights& w) {
    const LinearJob jobs[2] = {{.w = &w[Role::K], .x = &act_.h, .y = act_.k, .y_stride = w[Role::K].n_rows},
                               {.w = &w[Role::V], .x = &act_.h, .y = act_.v, .y_stride = w[Role::V].n_rows}};
    linear_cpu(jobs, n_rows(), nullptr, linear_);
    for_rows([&](int r) { prepare_keys(block, w, r); });
    for (const RowGroup& group : groups_) append_keys(il, group);
  });
}

void Forward::find_angles() noexcept {
  for_rows([&](int r) {
    for (size_t i = 0; i < ropes_.size(); ++i)
      rope_angles(ropes_[i], positions_[static_cast<size_t>(r)], angles_of(static_cast<int>(i), r));
  });
}

void Forward::norm(const BlockWeights& w, ActFormats formats) noexcept {
  const float* const weight = w.floats(Role::Norm);
  act_.h.set_cols(config_.n_embd);
  for_rows([&](int r) {
    kernels_.rows.rms_norm(act_.x + static_cast<size_t>(r) * static_cast<size_t>(config_.n_embd), weight,
                           config_.n_embd, config_.norm_eps, act_.h.row(r));
    act_.h.quantize(r, config_.n_embd, formats, kernels_.matmul);
  });
}

void Forward::norm(const BlockWeights& w, std::initializer_list<Role> readers) noexcept {
  ActFormats formats;
  for (const Role role : readers) formats.add(w[role]);
  norm(w, formats);
}

void Forward::tap(const Block& block) const noexcept {
  const size_t width = static_cast<size_t>(config_.n_embd), n = tokens_.size();
  float* const out = act_.taps + static_cast<size_t>(block.tap) * n * width;
  for (size_t r = 0; r < n; ++r)
    std::copy_n(block.tap_of == TapOf::Normed ? act_.h.row(static_cast<int>(r)) : act_.x + r * width, width,
                out + r * width);
}

void Forward::head(const BlockWeights& w) noexcept {
  norm(w, {Role::Output});
  if (logit_rows_.empty()) return;
  const LinearJob job{.w = &w[Role::Output], .x = &act_.h, .y = act_.logits, .y_stride = config_.n_vocab};
  linear_cpu({&job, 1}, static_cast<int>(logit_rows_.size()), logit_rows_.data(), linear_);
}

// ---- attention ----

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
  gate_heads(block, w);

  const LinearJob output{
      .w = &w[Role::Output], .x = &act_.mixed, .y = act_.x, .y_stride = config_.n_embd, .add = true};
  linear_cpu({&output, 1}, n_rows(), nullptr, linear_);
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

void Forward::gate_heads(const Block& block, const BlockWeights& w) noexcept {
  const int n_head = block.n_head, dim = config_.head_dim;
  ActFormats formats;
  formats.add(w[Role::Output]);
  for_rows([&](int r) {
    float* const out = act_.mixed.row(r);
    for (int h = 0; h < n_head; ++h) {
      float* const head = out + static_cast<int64_t>(h) * dim;
      switch (block.gate) {
        case HeadGate::None:
          break;
        case HeadGate::SigmoidElement:
          kernels_.rows.mul_sigmoid(
              head, act_.q_full + (static_cast<int64_t>(r) * n_head + h) * 2 * dim + dim, dim);
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
    act_.mixed.quantize(r, n_head * dim, formats, kernels_.matmul);
  });
}

// ---- Gated DeltaNet ----

void Forward::delta_net(int il, const BlockWeights& w) noexcept {
  norm(w, {Role::Qkv, Role::Z, Role::Alpha, Role::Beta});

  const auto job = [&](Role role, float* y, int stride) {
    return LinearJob{.w = &w[role], .x = &act_.h, .y = y, .y_stride = stride};
  };
  const LinearJob jobs[4] = {job(Role::Qkv, act_.conv_input, config_.ssm_channel_stride()),
                             job(Role::Z, act_.z, config_.ssm_inner()),
                             job(Role::Alpha, act_.alpha, config_.ssm_n_head_v),
                             job(Role::Beta, act_.beta, config_.ssm_n_head_v)};
  linear_cpu(jobs, n_rows(), nullptr, linear_);

  act_.mixed.set_cols(config_.ssm_inner());
  for (const RowGroup& group : groups_) delta_net_group(il, w, group);

  ActFormats output_formats;
  output_formats.add(w[Role::Output]);
  for_rows([&](int r) { act_.mixed.quantize(r, config_.ssm_inner(), output_formats, kernels_.matmul); });
  const LinearJob output{
      .w = &w[Role::Output], .x = &act_.mixed, .y = act_.x, .y_stride = config_.n_embd, .add = true};
  linear_cpu({&output, 1}, n_rows(), nullptr, linear_);
}

// A task is one key head with the value heads that read it: convolution of their channels, norms, the delta
// rule, the gate, and the stored convolution columns. Nothing is shared between tasks. Long chains go in
// chunks, from the convolution to the gate, so that what one operation wrote still lies in the cache.
void Forward::delta_net_group(int il, const BlockWeights& w, const RowGroup& group) noexcept {
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

  if (uncommitted)
    std::memcpy(tape.conv_input, conv_input,
                static_cast<size_t>(n) * static_cast<size_t>(stride) * sizeof(float));
  pool_.run(n_k, [&](int kh, int thread) {
    float* const scratch = act_.delta_scratch + static_cast<size_t>(thread) * scratch_floats;
    for (int first = 0; first < n; first += kDeltaChunk) {
      const int end = std::min(first + kDeltaChunk, n);
      const auto convolve = [&](int begin) {
        ConvArgs part = conv;
        part.first_row = first;
        part.n_rows = end;
        kernels_.delta_net.conv(part, begin, begin + dim);
        if (!uncommitted && end == n)
          shift_conv_state(conv_state, conv_input, row_numbers_.first(static_cast<size_t>(n)),
                           config_.ssm_taps, stride, begin, begin + dim);
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
  });
}

// ---- feed-forward ----

void Forward::feed_forward(int il, const Block& block, const BlockWeights& w) noexcept {
  ActFormats formats;
  for (const Ffn* ffn : {&w.common, w.experts.empty() ? nullptr : &w.experts.front()})
    if (ffn != nullptr) {
      formats.add(ffn->gate);
      formats.add(ffn->up);
    }
  formats.add(w[Role::Router]);
  norm(w, formats);

  act_.groups.clear();
  const int n_routed = block.routed() ? route(block.route, w) : 0;
  if (!w.common.empty()) {
    // What every row takes, after the pairs of the routed ones.
    const int n_pairs = n_rows() * block.route.n_expert_used;
    const float* const weight = w.floats(Role::SharedWeight);
    for (int r = 0; r < n_rows(); ++r) {
      act_.pair_rows[n_pairs + r] = r;
      act_.pair_weights[n_pairs + r] = weight == nullptr ? 1.0f : act_.shared_weights[r];
    }
    act_.groups.push_back({&w.common, n_pairs, n_rows()});
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
  const bool main_stack = block.routed() && il < config_.n_layer;
  if (main_stack) {
    ++n_routed_layers_;
    n_distinct_experts_ += static_cast<uint64_t>(n_routed);
  }
  if (main_stack && heat_) count_uses(il, block, w, n_routed);
  if (main_stack && runner_)
    runner_->run({.layer = il,
                  .experts = w.experts.data(),
                  .n_routed = n_routed,
                  .n_rows = n_rows(),
                  .args = args,
                  .scratch = act_.ffn_scratch,
                  .row_ops = kernels_.rows,
                  .linear = linear_});
  else if (act_.whole_experts.suits(args, pool_.size()))
    act_.whole_experts.run(args, kernels_.rows, linear_);
  else
    expert_ffn_cpu(args, act_.ffn_scratch, kernels_.rows, linear_);
}

// Heat is that of text that was written: guesses count when they are accepted.
void Forward::count_uses(int il, const Block& block, const BlockWeights& w, int n_routed) noexcept {
  const auto guesses = [](const RowGroup& group) { return group.experts != nullptr; };
  if (std::none_of(groups_.begin(), groups_.end(), guesses)) {
    for (int g = 0; g < n_routed; ++g) {
      const FfnGroup& group = act_.groups[static_cast<size_t>(g)];
      heat_->use(il, static_cast<int>(group.ffn - w.experts.data()), static_cast<float>(group.n_pairs));
    }
    return;
  }
  const int64_t n_used = block.route.n_expert_used;
  for (const RowGroup& group : groups_) {
    const int32_t* const ids = act_.expert_ids + group.row_begin * n_used;
    const int64_t n = group.n_rows * n_used;
    if (group.experts != nullptr)
      std::copy_n(ids, n, group.experts + il * n);
    else
      for (int64_t i = 0; i < n; ++i) heat_->use(il, ids[i], 1.0f);
  }
}

// Chooses experts for every row and sorts the (row, expert) pairs by expert.
int Forward::route(const RouteConfig& config, const BlockWeights& w) noexcept {
  const int n_expert = config.n_expert, n_used = config.n_expert_used;
  const float *const bias = w.floats(Role::RouterBias), *const shared_weight = w.floats(Role::SharedWeight);
  const LinearJob router{.w = &w[Role::Router], .x = &act_.h, .y = act_.router_logits, .y_stride = n_expert};
  linear_cpu({&router, 1}, n_rows(), nullptr, linear_);
  for_rows([&](int r) {
    route_topk(config, act_.router_logits + static_cast<int64_t>(r) * n_expert, bias,
               act_.expert_ids + static_cast<int64_t>(r) * n_used,
               act_.expert_weights + static_cast<int64_t>(r) * n_used);
    if (shared_weight != nullptr)
      act_.shared_weights[r] = sigmoid(kernels_.rows.dot(shared_weight, act_.h.row(r), config_.n_embd));
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
      act_.groups.push_back({&w.experts[static_cast<size_t>(e)], first[static_cast<size_t>(e)], count});
  }
  for (int p = 0; p < n_pairs; ++p) {
    const int at = first[static_cast<size_t>(act_.expert_ids[p])]++;
    act_.pair_rows[at] = p / n_used;
    act_.pair_weights[at] = act_.expert_weights[p];
  }
  return static_cast<int>(act_.groups.size());
}

}  // namespace thermo
