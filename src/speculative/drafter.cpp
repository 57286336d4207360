#include "speculative/drafter.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/row_ops/row_ops.h"
#include "sampling/noise.h"

namespace thermo {

constexpr float kAbsent = -std::numeric_limits<float>::infinity();

void Draft::reset(int depths, int ranks) {
  n_depths = depths;
  n_ranks = ranks;
  const size_t n = static_cast<size_t>(depths) * static_cast<size_t>(ranks);
  tokens.assign(n, 0);
  logprobs.assign(n, kAbsent);
}

std::span<int32_t> Draft::tokens_at(int depth) {
  const auto n = static_cast<size_t>(n_ranks);
  return std::span(tokens).subspan(static_cast<size_t>(depth - 1) * n, n);
}

std::span<float> Draft::logprobs_at(int depth) {
  const auto n = static_cast<size_t>(n_ranks);
  return std::span(logprobs).subspan(static_cast<size_t>(depth - 1) * n, n);
}

void couple(Draft& draft, const SampledChoice& choice) {
  // The drafter's logits are not the target's: between 0 (sure of the draw) and infinity (no idea).
  constexpr double kDoubt = 0.6;
  if (choice.temperature <= 0.0f) return;
  std::vector<std::pair<double, int32_t>> drawn;
  for (int depth = 1; depth <= draft.n_depths; ++depth) {
    const PositionNoise noise(choice.seed, choice.choice, choice.position + depth - 1);
    const std::span<int32_t> tokens = draft.tokens_at(depth);
    const std::span<float> logprobs = draft.logprobs_at(depth);
    drawn.clear();
    for (size_t k = 0; k < tokens.size() && std::isfinite(logprobs[k]); ++k)
      drawn.push_back({static_cast<double>(logprobs[k]) / static_cast<double>(choice.temperature) +
                           noise.gumbel(tokens[k]),
                       tokens[k]});
    if (drawn.empty()) continue;
    std::sort(drawn.begin(), drawn.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    double sum = 0.0;
    for (const auto& [score, token] : drawn) sum += std::exp((score - drawn.front().first) / kDoubt);
    for (size_t k = 0; k < drawn.size(); ++k) {
      tokens[k] = drawn[k].second;
      logprobs[k] = static_cast<float>((drawn[k].first - drawn.front().first) / kDoubt - std::log(sum));
    }
  }
}

// False as well where there is a NaN. Without branches, for the compiler to use vectors.
static bool all_at_most(std::span<const float> values, float limit) {
  int above = 0;
  for (const float value : values) above |= value <= limit ? 0 : 1;
  return above == 0;
}

void best_candidates(std::span<const float> logits, std::span<int32_t> tokens, std::span<float> logprobs) {
  std::fill(logprobs.begin(), logprobs.end(), kAbsent);
  const size_t n = std::min(tokens.size(), logits.size());
  if (n == 0) return;
  // A short sorted list: almost no logit gets past its end.
  constexpr size_t kBlock = 64;
  size_t found = 0;
  for (size_t begin = 0; begin < logits.size(); begin += kBlock) {
    const auto block = logits.subspan(begin, std::min(kBlock, logits.size() - begin));
    if (found == n && all_at_most(block, logprobs[n - 1])) continue;
    for (size_t i = 0; i < block.size(); ++i) {
      const float value = block[i];
      if (std::isnan(value)) {
        std::fill(logprobs.begin(), logprobs.end(), kAbsent);
        return;
      }
      if (found == n && !(value > logprobs[n - 1])) continue;
      size_t at = found < n ? found++ : n - 1;
      for (; at > 0 && value > logprobs[at - 1]; --at) {
        logprobs[at] = logprobs[at - 1];
        tokens[at] = tokens[at - 1];
      }
      logprobs[at] = value;
      tokens[at] = static_cast<int32_t>(begin + i);
    }
  }
  if (!std::isfinite(logprobs[0])) {
    std::fill(logprobs.begin(), logprobs.end(), kAbsent);
    return;
  }
  const float max = logprobs[0];
  static const RowOpKernels& row_ops = row_op_kernels(best_isa());
  const double log_sum = static_cast<double>(max) +
                         std::log(row_ops.sum_exp(logits.data(), max, static_cast<int>(logits.size())));
  for (float& value : logprobs.first(n)) value = static_cast<float>(static_cast<double>(value) - log_sum);
}

namespace {

void best_candidates(const TopLogits& top, std::span<int32_t> tokens, std::span<float> logprobs) {
  std::fill(logprobs.begin(), logprobs.end(), kAbsent);
  const size_t n = tokens.size();
  if (n == 0 || top.best < 0 || !std::isfinite(top.max) || !(top.sum_exp > 0.0f)) return;
  const float log_sum = top.max + std::log(top.sum_exp);
  tokens[0] = top.best;
  logprobs[0] = top.max - log_sum;
  size_t found = 1;
  for (const TokenLogit& entry : top.list()) {
    if (entry.id == top.best) continue;
    const float value = entry.logit - log_sum;
    // Equal ones by id, as they come in a row.
    const auto before = [&](size_t i) {
      return value > logprobs[i] || (value == logprobs[i] && entry.id < tokens[i]);
    };
    if (found == n && (n == 1 || !before(n - 1))) continue;
    size_t at = found < n ? found++ : n - 1;
    for (; at > 1 && before(at - 1); --at) {
      logprobs[at] = logprobs[at - 1];
      tokens[at] = tokens[at - 1];
    }
    logprobs[at] = value;
    tokens[at] = entry.id;
  }
}

}  // namespace

void best_candidates(const RowLogits& row, std::span<int32_t> tokens, std::span<float> logprobs) {
  if (row.top != nullptr)
    best_candidates(*row.top, tokens, logprobs);
  else
    best_candidates(row.logits, tokens, logprobs);
}

ModelOptions drafter_model_options(const DrafterOptions& options, int max_draft_rows) {
  ModelOptions o;
  o.n_batch = kDrafterBatch;
  o.n_sequences = options.n_sequences;
  o.sequence = {.n_ctx = options.n_ctx,
                .max_draft_rows = max_draft_rows,
                .k_type = options.k_type,
                .v_type = options.v_type,
                .n_pages = 0,  // all that it can need: a drafter never waits
                .keep_windows = true};
  o.isa = options.isa;
  return o;
}

}  // namespace thermo
