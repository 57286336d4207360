#include "speculative/dflash_drafter.h"

#include <algorithm>

namespace thermo {
namespace {

constexpr int kBatch = 256;        // rows of a pass
constexpr size_t kQueueRows = 64;  // that wait at most

}  // namespace

ModelOptions drafter_model_options(const DrafterOptions& options, int block) {
  ModelOptions o;
  o.n_batch = kBatch;
  o.n_sequences = options.n_sequences;
  o.sequence = {
      .n_ctx = options.n_ctx, .max_draft_rows = block, .k_type = options.k_type, .v_type = options.v_type};
  o.isa = options.isa;
  return o;
}

DflashDrafter::DflashDrafter(DflashConfig config, const GgufFile& file, const Weights& target,
                             const DrafterOptions& options, ThreadPool& pool)
    : config_(std::move(config)),
      width_(config_.states.size() * static_cast<size_t>(config_.model.n_embd)),
      model_(config_.model, load_dflash_weights(config_, file, target, options.repack, pool),
             drafter_model_options(options, config_.block), pool),
      queues_(static_cast<size_t>(options.n_sequences)) {
  rows_.reserve(kBatch);
}

void DflashDrafter::commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) {
  StateQueue& queue = queues_[static_cast<size_t>(sequence)];
  for (size_t i = 0; i < tokens.size(); ++i) queue.push(tokens[i], states, i, config_.states.size());
  if (queue.size() > kQueueRows) flush(sequence);
}

void DflashDrafter::flush(int sequence) {
  StateQueue& queue = queues_[static_cast<size_t>(sequence)];
  for (size_t at = 0; at < queue.size(); at += kBatch)
    model_.append_features(sequence, queue.states.data() + at * width_,
                           static_cast<int>(std::min<size_t>(kBatch, queue.size() - at)));
  queue.resize(0, width_);
}

void DflashDrafter::truncate(int sequence, int n) {
  StateQueue& queue = queues_[static_cast<size_t>(sequence)];
  const int n_past = model_.n_past(sequence);
  if (n <= n_past) {
    model_.truncate(sequence, n);
    queue.resize(0, width_);
  } else if (static_cast<size_t>(n - n_past) < queue.size()) {
    queue.resize(static_cast<size_t>(n - n_past), width_);
  }
}

void DflashDrafter::add_block(TokenId root, int n_logits, std::vector<Row>& rows) const {
  for (int slot = 0; slot < config_.block; ++slot)
    rows.push_back({.token = slot == 0 ? root : config_.mask,
                    .parent = slot - 1,
                    .want_logits = slot > 0 && slot <= n_logits});
}

void DflashDrafter::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  const auto n_at_once = static_cast<size_t>(std::max(1, kBatch / config_.block));
  for (size_t begin = 0; begin < requests.size(); begin += n_at_once) {
    const auto now = requests.subspan(begin, std::min(n_at_once, requests.size() - begin));
    rows_.clear();
    groups_.clear();
    for (const DraftRequest& request : now) {
      flush(request.sequence);
      add_block(request.root, request.n_depths, rows_);
    }
    const auto block = static_cast<size_t>(config_.block);
    for (size_t i = 0; i < now.size(); ++i)
      groups_.push_back({.sequence = now[i].sequence,
                         .rows = std::span<const Row>(rows_).subspan(i * block, block),
                         .uncommitted = true});
    const StepOutput output = model_.step({.groups = groups_});
    size_t row = 0;
    for (size_t i = 0; i < now.size(); ++i) {
      Draft& draft = drafts[begin + i];
      draft.reset(now[i].n_depths, now[i].n_ranks);
      for (int depth = 1; depth <= now[i].n_depths; ++depth)
        best_candidates(output.rows[row++].logits, draft.tokens_at(depth), draft.logprobs_at(depth));
    }
  }
}

StepOutput DflashDrafter::run_block(int sequence, TokenId root, float* hidden) {
  flush(sequence);
  rows_.clear();
  add_block(root, config_.block, rows_);
  rows_.front().want_logits = true;
  const SequenceRows group{.sequence = sequence, .rows = rows_, .uncommitted = true};
  return model_.step({.groups = {&group, 1}, .hidden = hidden});
}

}  // namespace thermo
