#include "speculative/mtp_drafter.h"

#include <algorithm>
#include <cmath>

namespace thermo {
namespace {

constexpr size_t kQueueRows = 64;  // that wait at most

}  // namespace

MtpDrafter::MtpDrafter(const ModelConfig& target, const Weights& weights, const DrafterOptions& options,
                       ThreadPool& pool)
    : config_(nextn_network(target)),
      state_(target.n_layer),
      width_(static_cast<size_t>(target.n_embd)),
      model_(config_, Weights::of_nextn(config_, weights), drafter_model_options(options, 0), pool),
      sequences_(static_cast<size_t>(options.n_sequences)),
      zero_(width_) {}

// Where the state is not known, zeros: the block was not trained for it, but costs no more than a bad guess.
std::span<const float> MtpDrafter::state_before(const Sequence& s) const {
  return s.last_state.empty() ? std::span<const float>(zero_) : std::span<const float>(s.last_state);
}

void MtpDrafter::commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) {
  Sequence& s = at(sequence);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const bool is_root = s.has_root && s.queue.size() == 0 && tokens[i] == s.root;
    if (s.has_root && !is_root) drop_root(sequence);
    s.has_root = false;  // if it was that token, its entry is the one that the sequence needs
    if (s.n_tokens > 0 && !is_root) {
      s.queue.tokens.push_back(tokens[i]);
      s.queue.push_state(state_before(s));
    }
    s.last_state.assign(states.row(0, i), states.row(0, i) + width_);
    ++s.n_tokens;
  }
  if (s.queue.size() > kQueueRows) flush(sequence);
}

void MtpDrafter::drop_root(int sequence) {
  Sequence& s = at(sequence);
  if (s.has_root) model_.truncate(sequence, model_.n_past(sequence) - 1);
  s.has_root = false;
}

void MtpDrafter::flush(int sequence) {
  Sequence& s = at(sequence);
  const auto n_batch = static_cast<size_t>(drafter_model_options({}, 0).n_batch);
  for (size_t begin = 0; begin < s.queue.size(); begin += n_batch) {
    const size_t n = std::min(n_batch, s.queue.size() - begin);
    rows_.clear();
    for (size_t i = 0; i < n; ++i)
      rows_.push_back({.token = s.queue.tokens[begin + i], .parent = static_cast<int32_t>(i) - 1});
    const SequenceRows group{.sequence = sequence, .rows = rows_};
    model_.step({.groups = {&group, 1}, .states = s.queue.states.data() + begin * width_});
  }
  s.queue.resize(0, width_);
}

void MtpDrafter::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  int n_levels = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    drafts[i].reset(requests[i].n_depths, requests[i].n_ranks);
    n_levels = std::max(n_levels, requests[i].n_depths);
    drop_root(requests[i].sequence);
  }
  std::vector<TokenId> token(requests.size());  // at the end of each chain
  std::vector<float> state(requests.size() * width_);
  std::vector<size_t> last(requests.size());  // its row
  std::vector<bool> goes_on(requests.size(), true);
  for (int depth = 1; depth <= n_levels; ++depth) {
    rows_.clear();
    groups_.clear();
    states_in_.clear();
    std::vector<size_t> firsts;
    const auto add = [&](TokenId id, size_t first, std::span<const float> before) {
      rows_.push_back({.token = id, .parent = static_cast<int32_t>(rows_.size() - first) - 1});
      states_in_.insert(states_in_.end(), before.begin(), before.end());
    };
    for (size_t i = 0; i < requests.size(); ++i) {
      goes_on[i] = goes_on[i] && depth <= requests[i].n_depths;
      firsts.push_back(rows_.size());
      if (!goes_on[i]) continue;
      Sequence& s = at(requests[i].sequence);
      if (depth == 1) {
        // What was committed since the last draft goes first, in the same pass.
        for (size_t k = 0; k < s.queue.size(); ++k)
          add(s.queue.tokens[k], firsts[i], std::span(s.queue.states).subspan(k * width_, width_));
        s.queue.resize(0, width_);
        add(requests[i].root, firsts[i], state_before(s));
        s.has_root = true;
        s.root = requests[i].root;
      } else {
        add(token[i], firsts[i], std::span(state).subspan(i * width_, width_));
      }
      last[i] = rows_.size() - 1;
      rows_.back().want_logits = true;
    }
    firsts.push_back(rows_.size());
    for (size_t i = 0; i < requests.size(); ++i)
      if (goes_on[i])
        groups_.push_back(
            {.sequence = requests[i].sequence,
             .rows = std::span<const Row>(rows_).subspan(firsts[i], firsts[i + 1] - firsts[i])});
    if (groups_.empty()) break;
    states_out_.resize(rows_.size() * width_);
    const StepOutput output =
        model_.step({.groups = groups_, .hidden = states_out_.data(), .states = states_in_.data()});
    size_t row = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      if (!goes_on[i]) continue;
      best_candidates(output.rows[row++].logits, drafts[i].tokens_at(depth), drafts[i].logprobs_at(depth));
      goes_on[i] = std::isfinite(drafts[i].logprobs_at(depth)[0]);
      token[i] = drafts[i].tokens_at(depth)[0];
      std::copy_n(states_out_.begin() + static_cast<ptrdiff_t>(last[i] * width_), width_,
                  state.begin() + static_cast<ptrdiff_t>(i * width_));
    }
  }
  // The guesses leave the cache; the root's entry is right and stays.
  for (const DraftRequest& request : requests) {
    const Sequence& s = at(request.sequence);
    const int n = s.n_tokens - (s.n_tokens > 0 ? 1 : 0) + (s.has_root ? 1 : 0);
    if (n < model_.n_past(request.sequence)) model_.truncate(request.sequence, n);
  }
}

void MtpDrafter::truncate(int sequence, int n) {
  drop_root(sequence);
  Sequence& s = at(sequence);
  if (n >= s.n_tokens) return;
  const int n_pairs = std::max(0, n - 1), n_past = model_.n_past(sequence);
  if (n_pairs <= n_past) {
    model_.truncate(sequence, n_pairs);
    s.queue.resize(0, width_);
  } else {
    s.queue.resize(static_cast<size_t>(n_pairs - n_past), width_);
  }
  s.n_tokens = n;
  s.last_state.clear();
}

std::vector<float> MtpDrafter::snapshot(int sequence) const {
  return sequences_[static_cast<size_t>(sequence)].last_state;
}

void MtpDrafter::restore(int sequence, int n, std::span<const float> snapshot) {
  truncate(sequence, n);
  at(sequence).last_state.assign(snapshot.begin(), snapshot.end());
}

StepOutput MtpDrafter::run_pairs(int sequence, std::span<const TokenId> tokens, const float* states) {
  rows_.clear();
  for (size_t i = 0; i < tokens.size(); ++i)
    rows_.push_back({.token = tokens[i], .parent = static_cast<int32_t>(i) - 1, .want_logits = true});
  states_out_.resize(rows_.size() * width_);
  const SequenceRows group{.sequence = sequence, .rows = rows_};
  return model_.step({.groups = {&group, 1}, .hidden = states_out_.data(), .states = states});
}

}  // namespace thermo
