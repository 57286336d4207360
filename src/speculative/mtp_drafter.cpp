#include "speculative/mtp_drafter.h"

#include <algorithm>
#include <cmath>

namespace thermo {

MtpDrafter::MtpDrafter(int state, std::unique_ptr<Backend> model, int n_sequences)
    : state_(state),
      model_(std::move(model)),
      width_(static_cast<size_t>(model_->config().n_embd)),
      sequences_(static_cast<size_t>(n_sequences)) {
  for (Sequence& s : sequences_) s.states = model_->make_states(drafter_queue_rows(*model_) + 1, 1);
}

void MtpDrafter::forget_state(Sequence& s) {
  s.states->write(0, std::vector<float>(width_));
}

// Everything queued is in the cache.
void MtpDrafter::empty_queue(Sequence& s) {
  if (s.n_queued() > 0) s.states->put(0, s.states->rows(s.n_queued(), 1));
  s.queue.clear();
}

void MtpDrafter::commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) {
  Sequence& s = at(sequence);
  const int n = static_cast<int>(tokens.size()), most = drafter_queue_rows(*model_);
  if (n == 0) return;
  const bool is_root = s.has_root && s.queue.empty() && tokens[0] == s.root;
  if (s.has_root && !is_root) drop_root(sequence);
  s.has_root = false;  // if it was that token, its entry is the one that the sequence needs
  if (s.n_queued() + n > most) flush(sequence);
  // No pair waits for the first token: it has none, or the root's is in the cache.
  const bool first_known = is_root || s.n_tokens == 0;
  s.n_tokens += n;
  if (n > most) return append_many(sequence, tokens, states, first_known);
  s.states->put(first_known ? 0 : s.n_queued() + 1, states);
  const auto queued = tokens.subspan(first_known ? 1 : 0);
  s.queue.insert(s.queue.end(), queued.begin(), queued.end());
}

void MtpDrafter::append_many(int sequence, std::span<const TokenId> tokens, const StateRows& states,
                             bool first_known) {
  Sequence& s = at(sequence);
  const int n = static_cast<int>(tokens.size());
  for (int begin = first_known ? 1 : 0; begin < n;) {
    const int end = std::min(n, begin + kDrafterBatch);
    StateRows before[2] = {s.states->rows(0, begin == 0 ? 1 : 0),
                           states.part(std::max(0, begin - 1), end - std::max(1, begin))};
    run(sequence, tokens.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)), before,
        false);
    begin = end;
  }
  s.states->put(0, states.part(n - 1, 1));
}

void MtpDrafter::drop_root(int sequence) {
  Sequence& s = at(sequence);
  if (s.has_root) model_->truncate(sequence, model_->n_past(sequence) - 1);
  s.has_root = false;
}

StepOutput MtpDrafter::run(int sequence, std::span<const TokenId> tokens, std::span<const StateRows> states,
                           bool want_logits) {
  rows_.clear();
  for (size_t i = 0; i < tokens.size(); ++i)
    rows_.push_back({.token = tokens[i], .parent = static_cast<int32_t>(i) - 1, .want_logits = want_logits});
  const SequenceRows group{.sequence = sequence, .rows = rows_};
  return model_->step({.groups = {&group, 1}, .states = states});
}

void MtpDrafter::flush(int sequence) {
  Sequence& s = at(sequence);
  if (s.queue.empty()) return;
  const StateRows before = s.states->rows(0, s.n_queued());
  run(sequence, s.queue, {&before, 1}, false);
  empty_queue(s);
}

void MtpDrafter::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  int n_levels = 0, n_rows = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    drafts[i].reset(requests[i].n_depths, requests[i].n_ranks);
    n_levels = std::max(n_levels, requests[i].n_depths);
    drop_root(requests[i].sequence);
    n_rows += at(requests[i].sequence).n_queued() + 1;
  }
  // What was committed since the last draft goes first, in the same pass if that holds all of it.
  if (n_rows > kDrafterBatch)
    for (const DraftRequest& request : requests) flush(request.sequence);
  std::vector<TokenId> token(requests.size());  // at the end of each chain
  std::vector<size_t> firsts(requests.size() + 1);
  std::vector<bool> goes_on(requests.size(), true);
  for (int depth = 1; depth <= n_levels; ++depth) {
    rows_.clear();
    groups_.clear();
    states_in_.clear();
    const StateRows own = model_->states();
    for (size_t i = 0; i < requests.size(); ++i) {
      // The row that ended this chain in the pass before is the one before the next chain's first.
      const int last = static_cast<int>(firsts[i + 1]) - 1;
      firsts[i] = rows_.size();
      goes_on[i] = goes_on[i] && depth <= requests[i].n_depths;
      if (!goes_on[i]) continue;
      Sequence& s = at(requests[i].sequence);
      const auto add = [&](TokenId id) {
        rows_.push_back({.token = id, .parent = static_cast<int32_t>(rows_.size() - firsts[i]) - 1});
      };
      if (depth == 1) {
        if (s.n_tokens == 0) forget_state(s);
        for (const TokenId id : s.queue) add(id);
        add(requests[i].root);
        states_in_.push_back(s.states->rows(0, s.n_queued() + 1));
        s.has_root = true;
        s.root = requests[i].root;
      } else {
        add(token[i]);
        states_in_.push_back(own.part(last, 1));
      }
      rows_.back().want_logits = true;
    }
    if (rows_.empty()) break;
    firsts.back() = rows_.size();
    for (size_t i = 0; i < requests.size(); ++i)
      if (goes_on[i])
        groups_.push_back({.sequence = requests[i].sequence,
                           .rows = std::span<const Row>(rows_).subspan(firsts[i], firsts[i + 1] - firsts[i]),
                           .need = LogitsNeed::Few});
    const StepOutput output = model_->step({.groups = groups_, .states = states_in_});
    size_t row = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      if (!goes_on[i]) continue;
      if (depth == 1) empty_queue(at(requests[i].sequence));
      if (row < output.rows.size())
        best_candidates(output.rows[row++], drafts[i].tokens_at(depth), drafts[i].logprobs_at(depth));
      goes_on[i] = std::isfinite(drafts[i].logprobs_at(depth)[0]);
      token[i] = drafts[i].tokens_at(depth)[0];
    }
  }
  // The guesses leave the cache; the root's entry is right and stays.
  for (const DraftRequest& request : requests) {
    const Sequence& s = at(request.sequence);
    const int n = s.n_tokens - (s.n_tokens > 0 ? 1 : 0) + (s.has_root ? 1 : 0);
    if (n < model_->n_past(request.sequence)) model_->truncate(request.sequence, n);
  }
}

void MtpDrafter::truncate(int sequence, int n) {
  drop_root(sequence);
  Sequence& s = at(sequence);
  if (n >= s.n_tokens) return;
  const int n_pairs = std::max(0, n - 1), n_past = model_->n_past(sequence);
  if (n_pairs < n_past) {
    model_->truncate(sequence, n_pairs);
    forget_state(s);
  }
  s.queue.resize(static_cast<size_t>(std::max(0, n_pairs - n_past)));
  s.n_tokens = n;
}

std::vector<float> MtpDrafter::snapshot(int sequence) const {
  const Sequence& s = sequences_[static_cast<size_t>(sequence)];
  if (s.n_tokens == 0) return {};
  std::vector<float> state(width_);
  s.states->read(s.n_queued(), state);
  return state;
}

void MtpDrafter::restore(int sequence, int n, std::span<const float> snapshot) {
  truncate(sequence, n);
  if (!snapshot.empty()) at(sequence).states->write(at(sequence).n_queued(), snapshot);
}

void MtpDrafter::resume(int sequence, std::span<const TokenId> tokens, std::span<const float> snapshot) {
  Sequence& s = at(sequence);
  s.queue.clear();
  s.has_root = false;
  s.n_tokens = static_cast<int>(tokens.size());
  if (snapshot.empty())
    forget_state(s);
  else
    s.states->write(0, snapshot);
}

std::vector<float> MtpDrafter::run_pairs(int sequence, std::span<const TokenId> tokens,
                                         const StateRows& states) {
  std::vector<float> logits;
  for (int at = 0; at < states.n; at += kDrafterBatch) {
    const StateRows part = states.part(at, std::min(kDrafterBatch, states.n - at));
    const auto now = tokens.subspan(static_cast<size_t>(at), static_cast<size_t>(part.n));
    const StepOutput output = run(sequence, now, {&part, 1}, true);
    for (const RowLogits& row : output.rows)
      logits.insert(logits.end(), row.logits.begin(), row.logits.end());
  }
  return logits;
}

}  // namespace thermo
