#include "engine/speculation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 8;  // candidates of a position: more lose nothing measurable

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

Speculation::Speculation(std::unique_ptr<Drafter> drafter, Backend& target, const SpeculationOptions& options)
    : drafter_(std::move(drafter)),
      target_(target),
      options_(options),
      sequences_(static_cast<size_t>(options.n_sequences)) {
  if (!drafter_->states().empty())
    for (Sequence& s : sequences_)
      s.aside = target.make_states(options.max_rows, static_cast<int>(drafter_->states().size()));
  telemetry_.drafter = drafter_->name();
  telemetry_.state = "on";
}

void Speculation::before_step() {
  for (Sequence& s : sequences_) {
    if (s.first_row >= 0 && s.aside)
      s.aside->put(0, target_.states().part(s.first_row, static_cast<int>(s.tokens.size())));
    s.first_row = -1;
  }
}

void Speculation::took_step(const StepBatch& batch, double seconds) {
  step_seconds_ = seconds;
  const auto decodes = [](const SequenceRows& group) { return group.uncommitted || group.rows.size() == 1; };
  if (std::all_of(batch.groups.begin(), batch.groups.end(), decodes)) times_.add(batch.n_rows(), seconds);
  int first = 0;
  std::vector<TokenId> tokens;
  for (const SequenceRows& group : batch.groups) {
    const int n = static_cast<int>(group.rows.size());
    tokens.clear();
    for (const Row& row : group.rows) tokens.push_back(row.token);
    if (group.uncommitted) {
      at(group.sequence).tokens = tokens;
      at(group.sequence).first_row = first;
    } else {
      drafter_->commit(group.sequence, tokens, target_.states().part(first, n));
    }
    first += n;
  }
}

void Speculation::committed(int sequence, std::span<const int32_t> path) {
  const Clock::time_point start = Clock::now();
  Sequence& s = at(sequence);
  std::vector<TokenId> tokens;
  for (const int32_t row : path) tokens.push_back(s.tokens[static_cast<size_t>(row)]);
  const int n = static_cast<int>(s.tokens.size());
  const StateRows states = s.first_row >= 0 ? target_.states().part(s.first_row, n)
                           : s.aside        ? s.aside->rows(0, n)
                                            : StateRows{};
  drafter_->commit(sequence, tokens, states.pick(path));
  s.first_row = -1;
  telemetry_.commit_seconds += seconds_since(start);
}

void Speculation::truncate(int sequence, int n) {
  drafter_->truncate(sequence, n);
}

void Speculation::restore(int sequence, int n, std::span<const float> snapshot) {
  drafter_->restore(sequence, n, snapshot);
}

void Speculation::begin_request(int sequence) {
  at(sequence).planner.begin_request();
}

void Speculation::draft(std::span<const DraftAsk> asks) {
  const bool planned = options_.budget == 0;
  requests_.clear();
  // Whether it pays is known when it is known what plain steps take.
  const bool may_plan = times_.is_known(static_cast<int>(asks.size()));
  for (const DraftAsk& ask : asks) {
    Sequence& s = at(ask.sequence);
    s.tree.clear();
    s.planned = planned && may_plan && ask.max_nodes > 0;
    int n = std::min(ask.max_nodes, options_.max_rows - 1);
    if (!planned) n = std::min(n, options_.budget);
    if (n <= 0 || (planned && !(s.planned && s.planner.wants_draft()))) continue;
    int depths = std::min(n, drafter_->max_depth());
    if (options_.max_depth > 0) depths = std::min(depths, options_.max_depth);
    requests_.push_back(
        {.sequence = ask.sequence, .root = ask.root, .n_depths = depths, .n_ranks = std::min(n, kRanks)});
  }
  if (requests_.empty()) return;
  const Clock::time_point start = Clock::now();
  drafts_.resize(std::max(drafts_.size(), requests_.size()));
  drafter_->draft(requests_, std::span(drafts_).first(requests_.size()));
  const double seconds = seconds_since(start);
  draft_time_.add(seconds, times_.at(static_cast<int>(asks.size())));
  telemetry_.draft_seconds += seconds;
  for (size_t i = 0; i < requests_.size(); ++i) {
    const auto ask = std::find_if(asks.begin(), asks.end(),
                                  [&](const DraftAsk& a) { return a.sequence == requests_[i].sequence; });
    Sequence& s = at(requests_[i].sequence);
    std::swap(s.draft, drafts_[i]);
    if (s.draft.n_ranks > 1) couple(s.draft, ask->choice);
    make_tree(s, ask->max_nodes, static_cast<int>(asks.size()) - 1);
  }
}

void Speculation::make_tree(Sequence& s, int max_nodes, int n_other) {
  adjusted_ = s.draft;
  const float least = options_.min_probability > 0.0f ? std::log(options_.min_probability)
                                                      : -std::numeric_limits<float>::infinity();
  for (int depth = 1; depth <= adjusted_.n_depths; ++depth)
    for (float& logprob : adjusted_.logprobs_at(depth)) {
      logprob =
          logprob < least ? -std::numeric_limits<float>::infinity() : calibration_.adjusted(depth, logprob);
    }
  const int budget = options_.budget > 0 ? options_.budget : kMaxDraftNodes;
  builder_.build(adjusted_.candidates(), std::min({max_nodes, options_.max_rows - 1, budget}), s.tree);
  if (options_.budget == 0)
    s.tree.resize(static_cast<size_t>(s.planner.choose(s.tree, times_, draft_time_.seconds(), n_other)));
  int deepest = 0;
  for (const DraftNode& node : s.tree) deepest = std::max(deepest, node.depth);
  if (deepest < options_.min_depth) s.tree.clear();
}

std::span<const DraftNode> Speculation::tree(int sequence) const {
  return sequences_[static_cast<size_t>(sequence)].tree;
}

void Speculation::finish_round(int sequence, std::span<const int32_t> path) {
  Sequence& s = at(sequence);
  const int n_accepted = static_cast<int>(path.size()) - 1;
  if (s.tree.empty()) {
    ++telemetry_.n_plain;
    telemetry_.plain_seconds += step_seconds_;
  } else {
    ++telemetry_.n_rounds;
    telemetry_.n_drafted += s.tree.size();
    telemetry_.n_accepted += static_cast<uint64_t>(n_accepted);
    telemetry_.verify_seconds += step_seconds_;
  }
  for (int depth = 1; depth <= n_accepted + 1; ++depth) {
    double predicted = 0.0;
    const int32_t parent = path[static_cast<size_t>(depth) - 1];
    for (const DraftNode& node : s.tree)
      if (node.parent == parent)
        predicted += std::exp(static_cast<double>(s.draft.candidates().logprob(depth, node.rank)));
    if (predicted == 0.0) break;  // nothing was drafted there
    const bool accepted = depth <= n_accepted;
    calibration_.observe(depth, predicted, accepted);
    ++telemetry_.tried[static_cast<size_t>(depth)];
    if (accepted) ++telemetry_.accepted[static_cast<size_t>(depth)];
  }
  if (s.planned) {
    s.planner.finish_round(static_cast<int>(s.tree.size()), n_accepted);
    telemetry_.state = s.planner.reason();
  }
  s.tree.clear();
}

}  // namespace thermo
