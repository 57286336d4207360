#include "engine/speculation.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 8;    // candidates of a position: more lose nothing measurable
constexpr int kTrusted = 3;  // tokens after which it is known how often a drafter is right
constexpr int kWarmUpRows = 8;
constexpr double kLongWarmUp = 0.03;  // seconds, for rounds of one size that never agree

// Leaves out candidates that the drafter thinks less likely.
void drop_unlikely(Draft& draft, float min_probability) {
  if (min_probability <= 0.0f) return;
  const float least = std::log(min_probability);
  for (float& logprob : draft.logprobs)
    if (logprob < least) logprob = -std::numeric_limits<float>::infinity();
}

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
      s.aside = target.make_states(options.max_uncommitted, static_cast<int>(drafter_->states().size()));
  telemetry_.drafter = drafter_->name();
  for (Sequence& s : sequences_) {
    s.planner = DraftPlanner(options.cautious);
    s.telemetry.drafter = telemetry_.drafter;
  }
}

DraftTelemetry Speculation::telemetry() const {
  DraftTelemetry telemetry = telemetry_;
  telemetry.state = last_asked_ < 0 ? "waiting: nothing was written yet"
                                    : state_of(sequences_[static_cast<size_t>(last_asked_)]);
  return telemetry;
}

DraftTelemetry Speculation::telemetry(int sequence) const {
  const Sequence& s = sequences_[static_cast<size_t>(sequence)];
  DraftTelemetry telemetry = s.telemetry;
  telemetry.state = state_of(s);
  return telemetry;
}

std::string Speculation::state_of(const Sequence& s) const {
  if (s.is_short) return fmt::format("off: fewer than {} tokens in a row were guessed", options_.min_depth);
  if (options_.budget == 0) return s.planner.reason();
  return s.knows_nothing ? "off: the drafter has no guess" : "on";
}

template <class Count>
void Speculation::count(Sequence& s, const Count& count) {
  count(s.telemetry);
  count(telemetry_);
}

void Speculation::warm_up(bool with_steps) {
  constexpr double kLongStep = 5e-3;  // seconds: where a step takes longer, its first use is no matter
  with_steps = with_steps && warm_up_round(1, true, false) <= kLongStep;
  warm_up_round(std::min({options_.max_rows, 1 + drafter_->max_depth(), kWarmUpRows}), with_steps, true);
}

double Speculation::warm_up_round(int n_rows, bool with_step, bool with_draft) {
  std::vector<Row> rows;
  std::vector<TokenId> tokens;
  for (int r = 0; r < n_rows; ++r) {  // spread over the vocabulary, and so over the experts
    tokens.push_back(static_cast<TokenId>((r + 1) * 7919 % target_.config().n_vocab));
    rows.push_back({.token = tokens.back(), .parent = r - 1, .want_logits = true});
  }
  const SequenceRows group{.sequence = 0, .rows = rows, .uncommitted = true};
  const DraftRequest request{
      .sequence = 0, .root = tokens[0], .n_depths = drafter_->max_depth(), .n_ranks = kRanks};
  Draft draft;
  ShortestTimes steps, drafts;
  const auto is_known = [&] { return (!with_step || steps.agree()) && (!with_draft || drafts.agree()); };
  const Clock::time_point begin = Clock::now();
  // The first round of all also loads what it needs.
  for (int i = 0; i < 3 || (!is_known() && seconds_since(begin) < kLongWarmUp); ++i) {
    with_step = with_step && target_.reserve(0, n_rows) == n_rows;
    if (with_step) {
      const Clock::time_point start = Clock::now();
      target_.step({.groups = {&group, 1}});
      if (i > 0) steps.add(seconds_since(start));
      target_.commit(0, {});
      drafter_->commit(0, tokens, target_.states());
    }
    if (with_draft) {
      const Clock::time_point start = Clock::now();
      drafter_->draft({&request, 1}, {&draft, 1});
      if (i > 0) drafts.add(seconds_since(start));
    }
    drafter_->truncate(0, 0);
  }
  for (const double seconds : {steps.first, steps.second})
    if (std::isfinite(seconds)) times_.add(n_rows, seconds);
  for (const double seconds : {drafts.first, drafts.second})
    if (std::isfinite(seconds)) draft_times_.add(1, seconds);
  // The memory that states wait in: a page that is new costs a token of a small model a twentieth of its
  // time.
  for (int n = 0; with_step && with_draft && n + n_rows <= kDrafterQueueRows; n += n_rows)
    drafter_->commit(0, tokens, target_.states());
  drafter_->truncate(0, 0);
  target_.clear(0);
  return with_step ? steps.first : 0.0;
}

void Speculation::before_step() {
  for (Sequence& s : sequences_) {
    if (s.first_row >= 0 && s.aside)
      s.aside->put(0, target_.states().part(s.first_row, static_cast<int>(s.tokens.size())));
    s.first_row = -1;
  }
}

namespace {

void count_experts(const ExpertTelemetry& experts, DraftTelemetry& t) {
  t.n_layers += std::max(experts.routed_layers, experts.layer_steps);
  t.n_experts += experts.distinct_experts;
  t.n_cold_experts += experts.cold_experts;
}

}  // namespace

void Speculation::took_step(const StepBatch& batch, double seconds, const ExpertTelemetry& experts) {
  step_seconds_ = seconds;
  step_experts_ = experts;
  if (std::any_of(batch.groups.begin(), batch.groups.end(), [](const auto& g) { return g.uncommitted; }))
    count_experts(experts, telemetry_);
  n_step_groups_ = static_cast<int>(batch.groups.size());
  n_step_nodes_ = 0;
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
      n_step_nodes_ += n - 1;
      at(group.sequence).tokens = tokens;
      at(group.sequence).first_row = first;
    } else {
      drafter_->commit(group.sequence, tokens, target_.states().part(first, n));
    }
    first += n;
  }
}

void Speculation::committed(int sequence, std::span<const int32_t> path, double seconds) {
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
  seconds += seconds_since(start);
  count(s, [&](DraftTelemetry& t) { t.commit_seconds += seconds; });
}

void Speculation::truncate(int sequence, int n) {
  at(sequence).early_root = -1;
  drafter_->truncate(sequence, n);
}

void Speculation::restore(int sequence, int n, std::span<const float> snapshot) {
  at(sequence).early_root = -1;
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
  truncate(sequence, n);
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
  at(sequence).early_root = -1;
  drop_guess(at(sequence));
}

RoundCosts Speculation::costs(const Sequence& s, int n_drafted) const {
  return {.times = times_,
          .draft_seconds = draft_times_.at(s.n_drafting) / s.n_drafting,
          .n_other = s.n_asks - 1,
          .n_drafting = s.n_drafting,
          .n_drafted = n_drafted};
}

// A fixed budget drafts in every round anyway.
bool Speculation::is_trusted() const {
  return calibration_.n_observed() >= kTrusted;
}

DraftRequest Speculation::request_for(const DraftAsk& ask) const {
  int n = std::min(ask.max_nodes, options_.max_rows - 1);
  if (options_.budget > 0) n = std::min(n, options_.budget);
  int depths = std::min({n, ask.max_depth, drafter_->max_depth()});
  if (options_.max_depth > 0) depths = std::min(depths, options_.max_depth);
  const int ranks = options_.max_candidates > 0 ? std::min(kRanks, options_.max_candidates) : kRanks;
  return {.sequence = ask.sequence, .root = ask.root, .n_depths = depths, .n_ranks = std::min(n, ranks)};
}

void Speculation::run_drafter(std::span<const DraftAsk> asks) {
  const Clock::time_point start = Clock::now();
  drafts_.resize(std::max(drafts_.size(), requests_.size()));
  drafter_->draft(requests_, std::span(drafts_).first(requests_.size()));
  const double seconds = seconds_since(start);
  const int n = static_cast<int>(requests_.size());
  // The first one of all may also load what it needs.
  const double most = draft_times_.most_rows() > 0 ? seconds : times_.at(static_cast<int>(asks.size()));
  draft_times_.add(n, std::min(seconds, most));
  telemetry_.draft_seconds += seconds;
  for (size_t i = 0; i < requests_.size(); ++i) {
    const auto ask = std::find_if(asks.begin(), asks.end(),
                                  [&](const DraftAsk& a) { return a.sequence == requests_[i].sequence; });
    at(requests_[i].sequence).telemetry.draft_seconds += seconds;
    at(requests_[i].sequence).n_drafting = n;
    Draft& draft = at(requests_[i].sequence).draft;
    std::swap(draft, drafts_[i]);
    drop_unlikely(draft, options_.min_probability);
    if (draft.n_ranks > 1) couple(draft, ask->choice);
  }
}

void Speculation::draft_early(const DraftAsk& ask) {
  if (options_.budget > 0 || !times_.is_known(1)) return;
  requests_.assign(1, request_for(ask));
  if (requests_.front().n_depths <= 0) return;
  const int64_t begin_ns = now_ns();
  run_drafter({&ask, 1});
  at(ask.sequence).early_root = ask.root;
  trace_draft(begin_ns, -1);
}

void Speculation::trace_draft(int64_t begin_ns, int64_t n_nodes) const {
  if (options_.trace)
    options_.trace->add({.lane = TraceLane::Step,
                         .name = n_nodes < 0 ? "early draft" : "draft",
                         .category = "draft",
                         .begin_ns = begin_ns,
                         .duration_ns = now_ns() - begin_ns,
                         .args = {{{"sequences", static_cast<int64_t>(requests_.size())},
                                   {n_nodes < 0 ? nullptr : "nodes", n_nodes}}}});
}

void Speculation::trace_choice(int sequence) const {
  if (options_.trace == nullptr) return;
  const Sequence& s = sequences_[static_cast<size_t>(sequence)];
  const DraftPlanner::State state = s.planner.state();
  const auto percent = [](double share) { return static_cast<int64_t>(std::lround(100.0 * share)); };
  options_.trace->add({.lane = TraceLane::Step,
                       .name = state == DraftPlanner::State::On         ? "verify"
                               : state == DraftPlanner::State::Guessing ? "only compare"
                                                                        : "too expensive",
                       .category = "draft",
                       .begin_ns = now_ns(),
                       .args = {{{"sequence", sequence},
                                 {"nodes", static_cast<int64_t>(s.tree.size())},
                                 {"of", s.planner.n_looked_at()},
                                 {"right_percent", percent(s.planner.expected())},
                                 {"cost_percent", percent(s.planner.cost())}}}});
}

void Speculation::draft(std::span<const DraftAsk> asks) {
  const bool planned = options_.budget == 0;
  requests_.clear();
  // Whether it pays is known when it is known what plain steps take.
  const bool may_plan = times_.is_known(static_cast<int>(asks.size()));
  const int64_t begin_ns = now_ns();
  int64_t n_nodes = 0;
  for (const DraftAsk& ask : asks) {
    Sequence& s = at(ask.sequence);
    s.tree.clear();
    s.n_asks = static_cast<int>(asks.size());
    s.planned = planned && may_plan && ask.max_depth > 0;
    last_asked_ = ask.sequence;
    const bool is_early = std::exchange(s.early_root, -1) == ask.root;
    const DraftRequest request = request_for(ask);
    if (request.n_depths <= 0) continue;
    if (s.planned && is_early)
      make_tree(s, ask, true);
    else if (!planned || (s.planned && s.planner.wants_draft(costs(s))))
      requests_.push_back(request);
  }
  if (requests_.empty()) return;
  run_drafter(asks);
  for (const DraftRequest& request : requests_) {
    const auto ask = std::find_if(asks.begin(), asks.end(),
                                  [&](const DraftAsk& a) { return a.sequence == request.sequence; });
    make_tree(at(request.sequence), *ask, false);
    n_nodes += static_cast<int64_t>(at(request.sequence).tree.size());
  }
  trace_draft(begin_ns, n_nodes);
}

void Speculation::make_tree(Sequence& s, const DraftAsk& ask, bool is_early) {
  adjusted_ = s.draft;
  for (int depth = 1; depth <= adjusted_.n_depths; ++depth)
    calibration_.adjust(depth, adjusted_.logprobs_at(depth));
  const int budget = options_.budget > 0 ? options_.budget : kMaxDraftNodes;
  builder_.build(adjusted_.candidates(), std::min({ask.max_nodes, options_.max_rows - 1, budget}), s.tree,
                 drafter_->repeat_weight());
  s.knows_nothing = s.tree.empty();
  if (s.planned) {
    const DraftView view{.nodes = s.tree,
                         .trusted = is_trusted(),
                         .doubt = calibration_.doubt(),
                         .cut = ask.ends,
                         .free = is_early};
    s.tree.resize(static_cast<size_t>(s.planner.choose(view, costs(s))));
    s.n_guessed = s.tree.empty() && s.draft.n_depths > 0 ? 0 : -1;
    trace_choice(ask.sequence);
  }
  int deepest = 0;
  for (const DraftNode& node : s.tree) deepest = std::max(deepest, node.depth);
  s.is_short = deepest > 0 && deepest < options_.min_depth;
  if (s.is_short) s.tree.clear();
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
  last_asked_ = sequence;
  s.n_guessed = -1;
}

void Speculation::finish_round(int sequence, std::span<const int32_t> path, TokenId next) {
  Sequence& s = at(sequence);
  const int n_accepted = static_cast<int>(path.size()) - 1;
  const bool is_plain = s.tree.empty();
  count(s, [&](DraftTelemetry& t) {
    ++(is_plain ? t.n_plain : t.n_rounds);
    t.n_drafted += s.tree.size();
    t.n_accepted += static_cast<uint64_t>(n_accepted);
  });
  const auto step_seconds = is_plain ? &DraftTelemetry::plain_seconds : &DraftTelemetry::verify_seconds;
  s.telemetry.*step_seconds += step_seconds_;
  telemetry_.*step_seconds += step_seconds_ / n_step_groups_;
  if (!is_plain) count_experts(step_experts_, s.telemetry);
  if (!is_plain && options_.trace)
    options_.trace->add({.lane = TraceLane::Step,
                         .name = "accepted",
                         .category = "draft",
                         .begin_ns = now_ns(),
                         .args = {{{"sequence", sequence},
                                   {"nodes", static_cast<int64_t>(s.tree.size())},
                                   {"accepted", n_accepted},
                                   {"experts", static_cast<int64_t>(step_experts_.distinct_experts)},
                                   {"cold", static_cast<int64_t>(step_experts_.cold_experts)}}}});
  s.n_accepted = n_accepted;
  s.n_tried = 0;
  for (int depth = 1; depth <= n_accepted + 1; ++depth) {
    const int32_t parent = path[static_cast<size_t>(depth) - 1];
    const auto is_child = [&](const DraftNode& node) { return node.parent == parent; };
    if (std::none_of(s.tree.begin(), s.tree.end(), is_child)) break;  // nothing was drafted there
    const bool accepted = depth <= n_accepted;
    if (!accepted && next < 0) break;  // the answer ended: nobody knows what would have come
    observe(s, depth,
            accepted ? s.tree[static_cast<size_t>(path[static_cast<size_t>(depth)]) - 1].token : next);
    s.n_tried = depth;
    count(s, [&](DraftTelemetry& t) {
      ++t.tried[static_cast<size_t>(depth)];
      if (accepted) ++t.accepted[static_cast<size_t>(depth)];
    });
  }
  const int n_nodes = static_cast<int>(s.tree.size());
  if (s.planned) s.planner.finish_round(n_nodes, n_accepted, costs(s, n_step_nodes_ - n_nodes));
  s.tree.clear();
}

void Speculation::cut_round(int sequence, int n_accepted) {
  Sequence& s = at(sequence);
  count(s, [&](DraftTelemetry& t) {
    t.n_accepted -= static_cast<uint64_t>(s.n_accepted - n_accepted);
    for (int depth = n_accepted + 1; depth <= s.n_tried; ++depth) {
      --t.tried[static_cast<size_t>(depth)];
      if (depth <= s.n_accepted) --t.accepted[static_cast<size_t>(depth)];
    }
  });
  s.n_accepted = s.n_tried = n_accepted;
}

}  // namespace thermo
