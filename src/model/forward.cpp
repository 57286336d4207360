#include "model/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/units.h"
#include "kernels/dequantize/dequantize.h"

namespace thermo {

Forward::Forward(const ModelConfig& config, const Weights& weights, Activations& act,
                 const CpuKernels& kernels, ThreadPool& pool)
    : config_(config),
      single_rows_from_(first_block_of_single_rows(config.network, config.n_layer)),
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
  for_rows([&](int r) { find_angles(r); });
  for (size_t b = 0; b < net.input.size(); ++b) run_block(-1, net.input[b], weights_.input[b]);
  for (int il = 0; il < config_.n_layer; ++il) {
    const std::vector<Block>& blocks = net.layers[static_cast<size_t>(il)].blocks;
    const LayerWeights& layer = weights_.layers[static_cast<size_t>(il)];
    for (size_t b = 0; b < blocks.size(); ++b) {
      if (il + 1 == config_.n_layer && b == single_rows_from_ && some_rows_end())
        end_rows(blocks[b], layer.blocks[b]);
      if (n_rows() > 0) run_block(il, blocks[b], layer.blocks[b]);
    }
  }
  if (n_rows() == 0) return;
  for (size_t b = 0; b < net.output.size(); ++b)
    run_block(config_.n_layer, net.output[b], weights_.output[b]);
}

// In a prompt, most rows have done their part once the last layer has their keys and values, or its state has
// seen them: nobody asks for their logits, nor for a hidden state after it.
bool Forward::some_rows_end() const noexcept {
  const auto guesses = [](const RowGroup& group) { return group.uncommitted; };
  return single_rows_from_ && n_rows() > kFewRows && 2 * static_cast<int>(logit_rows_.size()) <= n_rows() &&
         std::none_of(groups_.begin(), groups_.end(), guesses);
}

// The rows whose logits are wanted become the rows of the step. The others still choose their experts in the
// `next` block, where uses are counted: heat is that of the whole text.
void Forward::end_rows(const Block& next, const BlockWeights& w) noexcept {
  if (heat_ && next.routed()) {
    ActFormats formats;
    formats.add(w[Role::Router]);
    choose_experts(next.route, w, formats);
    const auto n_used = static_cast<size_t>(next.route.n_expert_used);
    for (size_t r = 0, kept = 0; r < tokens_.size(); ++r) {
      if (kept < logit_rows_.size() && static_cast<size_t>(logit_rows_[kept]) == r)
        ++kept;
      else
        for (size_t i = 0; i < n_used; ++i) heat_->use(config_.n_layer - 1, act_.expert_ids[r * n_used + i]);
    }
  }
  const size_t n = logit_rows_.size(), width = static_cast<size_t>(config_.n_embd);
  for (size_t i = 0; i < n; ++i)
    if (const auto row = static_cast<size_t>(logit_rows_[i]); row != i)
      std::copy_n(act_.x + row * width, width, act_.x + i * width);
  tokens_ = tokens_.first(n);
  logit_rows_ = row_numbers_.first(n);
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

bool Forward::is_small(const Matrix& w) noexcept {
  constexpr size_t kMost = 512 * KiB;
  return panel_bytes(w.dtype, w.n_cols) * static_cast<size_t>(n_panels(w.n_rows)) <= kMost;
}

bool Forward::goes_by_rows(const Matrix& w) const noexcept {
  return n_rows() >= 2 * pool_.size() && n_rows() <= kFewRows && is_small(w);
}

void Forward::multiply_rows(const Matrix& w, const ActBuffer& x, int first, int n, float* y, int64_t stride,
                            int thread) noexcept {
  for (int panel = 0; panel < n_panels(w.n_rows); panel += LinearScratch::kTilePanels)
    multiply_tile(w, panel, std::min(LinearScratch::kTilePanels, n_panels(w.n_rows) - panel),
                  {.x = &x, .first = first, .n = n}, y + first * stride + panel * kPanelRows, stride,
                  act_.linear_scratch.panels(thread), kernels_.matmul);
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

void Forward::find_angles(int r) noexcept {
  for (size_t i = 0; i < ropes_.size(); ++i)
    rope_angles(ropes_[i], positions_[static_cast<size_t>(r)], angles_of(static_cast<int>(i), r));
}

void Forward::norm(const BlockWeights& w, ActFormats formats) noexcept {
  act_.h.set_cols(config_.n_embd);
  for_rows([&](int r) { norm_row(w, formats, r); });
}

void Forward::norm_row(const BlockWeights& w, ActFormats formats, int r) noexcept {
  kernels_.rows.rms_norm(act_.x + static_cast<size_t>(r) * static_cast<size_t>(config_.n_embd),
                         w.floats(Role::Norm), config_.n_embd, config_.norm_eps, act_.h.row(r));
  act_.h.quantize(r, config_.n_embd, formats, kernels_.matmul);
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

// ---- feed-forward ----

void Forward::feed_forward(int il, const Block& block, const BlockWeights& w) noexcept {
  ActFormats formats;
  for (const Ffn* ffn : {&w.common, w.experts.empty() ? nullptr : &w.experts.front()})
    if (ffn != nullptr) {
      formats.add(ffn->gate);
      formats.add(ffn->up);
    }
  formats.add(w[Role::Router]);
  act_.groups.clear();
  if (!block.routed() && act_.whole_experts.suits_rows(w.common, n_rows()) && goes_by_rows(w.common.gate) &&
      goes_by_rows(w.common.up) && goes_by_rows(w.common.down)) {
    act_.h.set_cols(config_.n_embd);
    for_row_blocks([&](int first, int n, int thread) {
      for (int r = first; r < first + n; ++r) norm_row(w, formats, r);
      act_.whole_experts.add_rows(w.common, act_.h, first, n, thread, act_.x, kernels_.rows, linear_);
    });
    return;
  }
  int n_routed = 0;
  if (!block.routed()) {
    norm(w, formats);
  } else {
    choose_experts(block.route, w, formats);
    n_routed = group_pairs(block.route, w);
  }
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

// Norms every row and chooses its experts.
void Forward::choose_experts(const RouteConfig& config, const BlockWeights& w, ActFormats formats) noexcept {
  const int n_expert = config.n_expert, n_used = config.n_expert_used;
  const Matrix& router = w[Role::Router];
  const float *const bias = w.floats(Role::RouterBias), *const shared_weight = w.floats(Role::SharedWeight);
  const auto choose = [&](int r) {
    route_topk(config, act_.router_logits + static_cast<int64_t>(r) * n_expert, bias,
               act_.expert_ids + static_cast<int64_t>(r) * n_used,
               act_.expert_weights + static_cast<int64_t>(r) * n_used);
    if (shared_weight != nullptr)
      act_.shared_weights[r] = sigmoid(kernels_.rows.dot(shared_weight, act_.h.row(r), config_.n_embd));
  };
  if (router.empty() || !goes_by_rows(router)) {
    norm(w, formats);
    const LinearJob job{.w = &router, .x = &act_.h, .y = act_.router_logits, .y_stride = n_expert};
    if (!router.empty()) linear_cpu({&job, 1}, n_rows(), nullptr, linear_);
    for_rows(choose);
    return;
  }
  act_.h.set_cols(config_.n_embd);
  for_row_blocks([&](int first, int n, int thread) {
    for (int r = first; r < first + n; ++r) norm_row(w, formats, r);
    multiply_rows(router, act_.h, first, n, act_.router_logits, n_expert, thread);
    for (int r = first; r < first + n; ++r) choose(r);
  });
}

// Sorts the (row, expert) pairs by expert. Returns the number of groups.
int Forward::group_pairs(const RouteConfig& config, const BlockWeights& w) noexcept {
  const int n_expert = config.n_expert, n_used = config.n_expert_used;
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
