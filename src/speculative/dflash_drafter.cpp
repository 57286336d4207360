#include "speculative/dflash_drafter.h"

#include <algorithm>

namespace thermo {

DflashDrafter::DflashDrafter(DflashConfig config, std::unique_ptr<Backend> model, int n_sequences)
    : config_(std::move(config)), model_(std::move(model)), queues_(static_cast<size_t>(n_sequences)) {
  for (Queue& queue : queues_)
    queue.states = model_->make_states(drafter_queue_rows(*model_), static_cast<int>(config_.states.size()));
  rows_.reserve(kDrafterBatch);
}

void DflashDrafter::commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) {
  const int n = static_cast<int>(tokens.size());
  const int most = drafter_queue_rows(*model_);
  if (queue(sequence).n + n > most) flush(sequence);
  if (n > most) return append(sequence, states);
  queue(sequence).states->put(queue(sequence).n, states);
  queue(sequence).n += n;
}

void DflashDrafter::append(int sequence, const StateRows& states) {
  for (int at = 0; at < states.n; at += kDrafterBatch)
    model_->append_features(sequence, states.part(at, std::min(kDrafterBatch, states.n - at)));
}

void DflashDrafter::flush(int sequence) {
  append(sequence, queue(sequence).states->rows(0, queue(sequence).n));
  queue(sequence).n = 0;
}

void DflashDrafter::truncate(int sequence, int n) {
  const int n_past = model_->n_past(sequence);
  if (n < n_past) model_->truncate(sequence, n);
  queue(sequence).n = std::clamp(n - n_past, 0, queue(sequence).n);
}

void DflashDrafter::add_block(TokenId root, int n_logits, std::vector<Row>& rows) const {
  for (int slot = 0; slot < config_.block; ++slot)
    rows.push_back({.token = slot == 0 ? root : config_.mask,
                    .parent = slot - 1,
                    .want_logits = slot > 0 && slot <= n_logits});
}

void DflashDrafter::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  const auto n_at_once = static_cast<size_t>(std::max(1, kDrafterBatch / config_.block));
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
                         .uncommitted = true,
                         .need = LogitsNeed::Few});
    const StepOutput output = model_->step({.groups = groups_});
    size_t row = 0;
    for (size_t i = 0; i < now.size(); ++i) {
      Draft& draft = drafts[begin + i];
      draft.reset(now[i].n_depths, now[i].n_ranks);
      for (int depth = 1; depth <= now[i].n_depths && row < output.rows.size(); ++depth)
        best_candidates(output.rows[row++], draft.tokens_at(depth), draft.logprobs_at(depth));
    }
  }
}

StepOutput DflashDrafter::run_block(int sequence, TokenId root, float* hidden) {
  flush(sequence);
  rows_.clear();
  add_block(root, config_.block, rows_);
  rows_.front().want_logits = true;
  const SequenceRows group{.sequence = sequence, .rows = rows_, .uncommitted = true};
  return model_->step({.groups = {&group, 1}, .hidden = hidden});
}

}  // namespace thermo
