#include "engine/speculation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 8;    // candidates of a position: more lose nothing measurable
constexpr int kTrusted = 3;  // tokens after which it is known how often a drafter is right

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

Speculation::Speculation(std::unique_ptr<Drafter> drafter, Backend& target, const SpeculationOptions& options)
    : drafter_(std::move(drafter)),
      target_(target),
      options_(options),
      sequences_(static_cast<size_t>(options.n_sequences)),
      times_(target.step_sizes()) {
  if (!drafter_->states().empty())
    for (Sequence& s : sequences_)
      s.aside = target.make_states(options.max_rows, static_cast<int>(drafter_->states().size()));
  for (Sequence& s : sequences_) s.planner = DraftPlanner(options.cautious);
  telemetry_.drafter = drafter_->name();
}

DraftTelemetry Speculation::telemetry() const {
  DraftTelemetry telemetry = telemetry_;
  telemetry.state =
      last_planned_ < 0 ? "on" : sequences_[static_cast<size_t>(last_planned_)].planner.reason();
  return telemetry;
}

void Speculation::warm_up() {
  const DraftRequest request{.sequence = 0, .root = 0, .n_depths = drafter_->max_depth(), .n_ranks = kRanks};
  Draft draft;
  for (int i = 0; i < 2; ++i) {
    const Clock::time_point start = Clock::now();
    drafter_->draft({&request, 1}, {&draft, 1});
    if (i > 0) draft_time_.add(seconds_since(start));
    drafter_->truncate(0, 0);
  }
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
  if (std::all_of(batch.groups.begin(), batch.groups.end(), decodes))
    times_.add(batch.n_rows(), seconds);
  else if (batch.groups.size() == 1)
    times_.add_prompt(batch.n_rows(), seconds);
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

namespace {

// Positions of a drafter's keys and values for tokens [begin, end). The first tokens may have none.
KvRange kv_range(const Drafter& drafter, int begin, int end) {
  const int first = std::max(begin, drafter.kv_lag());
  return {.position = first - drafter.kv_lag(),
          .slot = first % SequenceLayout::kBlockTokens,
          .n = std::max(0, end - first)};
}

}  // namespace

size_t Speculation::block_bytes() const {
  return drafter_->kv_model() == nullptr ? 0 : drafter_->kv_model()->block_bytes();
}

std::unique_ptr<KvPin> Speculation::pin_kv(int sequence) {
  if (drafter_->kv_model() == nullptr) return nullptr;
  drafter_->flush(sequence);
  return drafter_->kv_model()->pin_kv(sequence);
}

void Speculation::save_kv(const KvPin& pin, int begin, int end, std::byte* block) {
  drafter_->kv_model()->save_kv(pin, kv_range(*drafter_, begin, end), block);
}

void Speculation::begin_load(int sequence, int n) {
  drafter_->truncate(sequence, n);
  drafter_->flush(sequence);
}

bool Speculation::load_kv(int sequence, int begin, int end, const std::byte* block) {
  return drafter_->kv_model() == nullptr ||
         drafter_->kv_model()->load_kv(sequence, kv_range(*drafter_, begin, end), block);
}

void Speculation::resume(int sequence, std::span<const TokenId> tokens, std::span<const float> snapshot) {
  drafter_->resume(sequence, tokens, snapshot);
}

// The text that it was compared with does not go on.
void Speculation::drop_guess(Sequence& s) {
  if (s.n_guessed >= 0) s.planner.finish_guess(0, costs(s));
  s.n_guessed = -1;
}

void Speculation::begin_request(int sequence) {
  drop_guess(at(sequence));
}

RoundCosts Speculation::costs(const Sequence& s) const {
  return {.times = times_, .draft_seconds = draft_time_.seconds() / s.n_asks, .n_other = s.n_asks - 1};
}

// A fixed budget drafts in every round anyway.
bool Speculation::is_trusted() const {
  return calibration_.n_observed() >= kTrusted;
}

void Speculation::draft(std::span<const DraftAsk> asks) {
  const bool planned = options_.budget == 0;
  requests_.clear();
  // Whether it pays is known when it is known what plain steps take.
  const bool may_plan = times_.is_known(static_cast<int>(asks.size()));
  for (const DraftAsk& ask : asks) {
    Sequence& s = at(ask.sequence);
    s.tree.clear();
    s.n_asks = static_cast<int>(asks.size());
    s.planned = planned && may_plan && ask.max_nodes > 0;
    int n = std::min(ask.max_nodes, options_.max_rows - 1);
    if (!planned) n = std::min(n, options_.budget);
    if (n <= 0 || (planned && !(s.planned && s.planner.wants_draft(costs(s))))) continue;
    int depths = std::min(n, drafter_->max_depth());
    if (options_.max_depth > 0) depths = std::min(depths, options_.max_depth);
    const int ranks = options_.max_candidates > 0 ? std::min(kRanks, options_.max_candidates) : kRanks;
    requests_.push_back(
        {.sequence = ask.sequence, .root = ask.root, .n_depths = depths, .n_ranks = std::min(n, ranks)});
  }
  if (requests_.empty()) return;
  const Clock::time_point start = Clock::now();
  const int64_t begin_ns = now_ns();
  drafts_.resize(std::max(drafts_.size(), requests_.size()));
  drafter_->draft(requests_, std::span(drafts_).first(requests_.size()));
  const double seconds = seconds_since(start);
  draft_time_.add(seconds, times_.at(static_cast<int>(asks.size())));
  telemetry_.draft_seconds += seconds;
  int64_t n_nodes = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    const auto ask = std::find_if(asks.begin(), asks.end(),
                                  [&](const DraftAsk& a) { return a.sequence == requests_[i].sequence; });
    Sequence& s = at(requests_[i].sequence);
    std::swap(s.draft, drafts_[i]);
    if (s.draft.n_ranks > 1) couple(s.draft, ask->choice);
    make_tree(s, *ask);
    n_nodes += static_cast<int64_t>(s.tree.size());
  }
  if (options_.trace)
    options_.trace->add(
        {.lane = TraceLane::Step,
         .name = "draft",
         .category = "draft",
         .begin_ns = begin_ns,
         .duration_ns = now_ns() - begin_ns,
         .args = {{{"sequences", static_cast<int64_t>(requests_.size())}, {"nodes", n_nodes}}}});
}

void Speculation::make_tree(Sequence& s, const DraftAsk& ask) {
  adjusted_ = s.draft;
  const float least = options_.min_probability > 0.0f ? std::log(options_.min_probability)
                                                      : -std::numeric_limits<float>::infinity();
  for (int depth = 1; depth <= adjusted_.n_depths; ++depth) {
    for (float& logprob : adjusted_.logprobs_at(depth))
      if (logprob < least) logprob = -std::numeric_limits<float>::infinity();
    calibration_.adjust(depth, adjusted_.logprobs_at(depth));
  }
  const int budget = options_.budget > 0 ? options_.budget : kMaxDraftNodes;
  builder_.build(adjusted_.candidates(), std::min({ask.max_nodes, options_.max_rows - 1, budget}), s.tree,
                 drafter_->repeat_weight());
  if (s.planned) {
    const DraftView view{
        .nodes = s.tree, .trusted = is_trusted(), .doubt = calibration_.doubt(), .cut = ask.ends};
    s.tree.resize(static_cast<size_t>(s.planner.choose(view, costs(s))));
    s.n_guessed = s.tree.empty() && s.draft.n_depths > 0 ? 0 : -1;
  }
  int deepest = 0;
  for (const DraftNode& node : s.tree) deepest = std::max(deepest, node.depth);
  if (deepest < options_.min_depth) s.tree.clear();
}

std::span<const DraftNode> Speculation::tree(int sequence) const {
  return sequences_[static_cast<size_t>(sequence)].tree;
}

int Speculation::observe(const Sequence& s, int depth, TokenId token) {
  const DraftCandidates candidates = s.draft.candidates();
  if (depth > candidates.n_depths || !std::isfinite(candidates.logprob(depth, 0))) return -1;
  int rank = candidates.n_ranks - 1;
  while (rank >= 0 &&
         (candidates.token(depth, rank) != token || !std::isfinite(candidates.logprob(depth, rank))))
    --rank;
  const auto n = static_cast<size_t>(candidates.n_ranks);
  calibration_.observe(depth, candidates.logprobs.subspan(static_cast<size_t>(depth - 1) * n, n), rank);
  return rank;
}

void Speculation::saw(int sequence, TokenId token) {
  Sequence& s = at(sequence);
  if (s.n_guessed < 0) return;
  const bool right = observe(s, s.n_guessed + 1, token) == 0;
  if (right) ++s.n_guessed;
  if (right && s.n_guessed < s.draft.n_depths && (is_trusted() || s.n_guessed < kTrusted)) return;
  s.planner.finish_guess(s.n_guessed, costs(s));
  last_planned_ = sequence;
  s.n_guessed = -1;
}

void Speculation::finish_round(int sequence, std::span<const int32_t> path, TokenId next) {
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
    if (options_.trace)
      options_.trace->add({.lane = TraceLane::Step,
                           .name = "accepted",
                           .category = "draft",
                           .begin_ns = now_ns(),
                           .args = {{{"sequence", sequence},
                                     {"nodes", static_cast<int64_t>(s.tree.size())},
                                     {"accepted", n_accepted}}}});
  }
  for (int depth = 1; depth <= n_accepted + 1; ++depth) {
    const int32_t parent = path[static_cast<size_t>(depth) - 1];
    const auto is_child = [&](const DraftNode& node) { return node.parent == parent; };
    if (std::none_of(s.tree.begin(), s.tree.end(), is_child)) break;  // nothing was drafted there
    const bool accepted = depth <= n_accepted;
    if (!accepted && next < 0) break;  // the answer ended: nobody knows what would have come
    observe(s, depth,
            accepted ? s.tree[static_cast<size_t>(path[static_cast<size_t>(depth)]) - 1].token : next);
    ++telemetry_.tried[static_cast<size_t>(depth)];
    if (accepted) ++telemetry_.accepted[static_cast<size_t>(depth)];
  }
  if (s.planned) {
    s.planner.finish_round(static_cast<int>(s.tree.size()), n_accepted, costs(s));
    last_planned_ = sequence;
  }
  s.tree.clear();
}

}  // namespace thermo
