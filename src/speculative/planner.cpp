#include "speculative/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace thermo {

void SteadyTime::add(double seconds, double most) {
  if (!(seconds > 0.0)) return;
  if (n_added_++ == 0)
    seconds_ = most > 0.0 ? std::min(seconds, most) : seconds;
  else if (seconds < seconds_)
    seconds_ += 0.4 * (seconds - seconds_);
  else
    seconds_ += 0.1 * (std::min(seconds, 2.0 * seconds_) - seconds_);
}

void StepTimes::add(int n_rows, double seconds) {
  if (n_rows < 1 || n_rows > kMaxRows) return;
  times_[static_cast<size_t>(n_rows)].add(seconds, 2.0 * at(n_rows));
}

void StepTimes::add_prompt(int n_rows, double seconds) {
  if (n_rows < kPromptRows) return;
  const double row = seconds / n_rows;
  if (prompt_row_ == 0.0 || row < prompt_row_) prompt_row_ = row;
}

bool StepTimes::is_known(int n_rows) const {
  return n_rows <= kMaxRows && times_[static_cast<size_t>(n_rows)].n_added() > 1;
}

double StepTimes::beyond(int last) const {
  const auto known = [&](int rows) { return times_[static_cast<size_t>(rows)].seconds(); };
  int before = last - 1;
  while (before > 0 && known(before) == 0.0) --before;
  if (before > 0) return std::max(0.0, known(last) - known(before)) / (last - before);
  const double share = prompt_row_ > 0.0 ? prompt_row_ : kUnknownRow * known(last) / last;
  return std::min(share, kMostUnknown * known(last) / last);
}

double StepTimes::at(int n_rows) const {
  const int n = std::clamp(n_rows, 1, kMaxRows);
  int below = n, above = n;
  const auto known = [&](int rows) { return times_[static_cast<size_t>(rows)].seconds(); };
  while (below > 0 && known(below) == 0.0) --below;
  while (above <= kMaxRows && known(above) == 0.0) ++above;
  if (below == 0) return above > kMaxRows ? 0.0 : known(above);
  if (above <= kMaxRows) {
    if (above == below) return known(n);
    const double share = static_cast<double>(n - below) / (above - below);
    return known(below) + share * (known(above) - known(below));
  }
  return known(below) + (n - below) * beyond(below);
}

namespace {

// What a drafter does not name, together.
double rest_of(std::span<const float> logprobs) {
  double sum = 0.0;
  for (const float value : logprobs) sum += std::exp(static_cast<double>(value));
  return std::log(std::clamp(1.0 - sum, 1e-4, 1.0));
}

}  // namespace

void Calibration::adjust(int depth, std::span<float> logprobs) const {
  constexpr double kPrior = 6.0;
  const double kMost = std::log(0.98);
  double sum = std::exp(sharpness_ * rest_of(logprobs));
  for (const float value : logprobs) sum += std::exp(sharpness_ * static_cast<double>(value));
  const Depth& d = depth_at(depth);
  const double more = std::log((d.right + kPrior) / (d.predicted + kPrior)) - std::log(sum);
  for (float& value : logprobs)
    value = static_cast<float>(std::min(sharpness_ * static_cast<double>(value) + more, kMost));
}

void Calibration::observe(int depth, std::span<const float> logprobs, int rank) {
  constexpr double kFade = 0.97, kRate = 0.03;
  ++n_observed_;
  // One step of Newton's method towards the exponent that makes what happened most likely.
  const double rest = rest_of(logprobs);
  double sum = 0.0, mean = 0.0, square = 0.0, best = 0.0;
  const auto add = [&](double value) {
    const double weight = std::exp(sharpness_ * value);
    sum += weight;
    mean += weight * value;
    square += weight * value * value;
  };
  add(rest);
  for (const float value : logprobs)
    if (std::isfinite(value)) add(static_cast<double>(value));
  mean /= sum;
  const double happened = rank < 0 ? rest : static_cast<double>(logprobs[static_cast<size_t>(rank)]);
  best = std::exp(sharpness_ * static_cast<double>(logprobs[0])) / sum;
  sharpness_ += kRate * (happened - mean) / (square / sum - mean * mean + 1.0);
  sharpness_ = std::clamp(sharpness_, 0.3, 1.3);
  Depth& d = depths_[static_cast<size_t>(std::min(depth, kMaxDraftNodes))];
  d.predicted = kFade * d.predicted + best;
  d.right = kFade * d.right + (rank == 0 ? 1.0 : 0.0);
}

bool DraftPlanner::wants_draft(const RoundCosts& costs) const {
  if (state_ == State::Guessing || n_since_plain_ >= kRoundsBetweenPlain) return false;
  return (!asked_ && !cautious_) || can_pay(costs);
}

bool DraftPlanner::can_pay(const RoundCosts& costs) const {
  return account_ >= (promises_ ? -kCredit * costs.plain_token() : costs.draft_seconds);
}

int DraftPlanner::choose(std::span<const DraftNode> nodes, const RoundCosts& costs, bool trusted) {
  if (!asked_ && !cautious_) account_ += kAdvance * costs.plain_token();
  asked_ = true;
  disappointed_ = false;
  account_ -= costs.draft_seconds;
  const int rows = 1 + costs.n_other,
            n_nodes = std::min(static_cast<int>(nodes.size()), trusted ? most_ : kUntrustedNodes);
  const double token = costs.plain_token();
  double best = 0.0, expected = 0.0;
  int n = 0;
  bool sure = false;
  promises_ = false;
  n_looked_at_ = n_nodes;
  for (int i = 0; i < n_nodes; ++i) {
    const DraftNode& node = nodes[static_cast<size_t>(i)];
    sure = sure || (node.depth == kConvincing && std::exp(static_cast<double>(node.score)) >= kSure);
    expected += std::exp(static_cast<double>(node.score));
    const double more = costs.more_rows(i + 1);
    const double rate = (rows + expected) / (costs.draft_seconds + costs.times.at(rows) + more);
    if (expected * token <= more * (1.0 + kMargin) || rate <= best) continue;
    best = rate;
    n = i + 1;
    promises_ = trusted && expected * token > more + costs.draft_seconds;
  }
  expected_ = expected;
  cost_ = token > 0.0 ? costs.more_rows(n_nodes) / token : 0.0;
  state_ = n == 0 ? State::Off : State::On;
  if (trusted || (sure && n > 0) || n_nodes == 0) return n;
  state_ = State::Guessing;
  return 0;
}

void DraftPlanner::finish_round(int n_nodes, int n_accepted, const RoundCosts& costs) {
  // What was gained before pays for some rounds in vain and no more: a text may change.
  const double most =
      kReserve * (costs.draft_seconds + std::max(costs.plain_token(), costs.more_rows(n_nodes)));
  n_since_plain_ = n_nodes == 0 ? 0 : n_since_plain_ + 1;
  if (n_nodes == 0) {
    const double share = cautious_ && !asked_ ? kCautiousShare : kShare;
    account_ = std::max(account_, std::min(most, account_ + share * costs.plain_token()));
    return;
  }
  account_ = std::min(most, account_ + n_accepted * costs.plain_token() - costs.more_rows(n_nodes));
  most_ = n_accepted > 0 ? std::min(kMaxDraftNodes, 2 * std::max(most_, n_nodes))
                         : std::max(kFirstNodes, most_ / 2);
  if (n_accepted > 0) n_wrong_ = 0;
  disappointed_ = !can_pay(costs);
  if (disappointed_) state_ = State::Off;
}

void DraftPlanner::finish_guess(int n_right, const RoundCosts& costs) {
  state_ = State::Off;
  n_wrong_ = n_right == 0 ? n_wrong_ + 1 : 0;
  if (n_wrong_ >= kWrongGuesses) account_ = std::min(account_, 0.0);
  if (n_right >= kConvincing) account_ = std::max(account_, costs.draft_seconds);
}

std::string DraftPlanner::reason() const {
  if (state_ == State::On) return "on";
  if (state_ == State::Guessing || (!asked_ && !cautious_)) return "waiting: the drafter was not right yet";
  if (!asked_) return "waiting: the answer is short";
  if (disappointed_) return "off: too few guesses were right";
  if (n_looked_at_ == 0) return "off: the drafter has no guess";
  return fmt::format(
      "off: of {} guesses {:.1f} would be right, verifying them takes as long as {:.1f} tokens", n_looked_at_,
      expected_, cost_);
}

}  // namespace thermo
