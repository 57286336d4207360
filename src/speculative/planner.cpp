#include "speculative/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace thermo {

void SteadyTime::add(double seconds) {
  if (!(seconds > 0.0)) return;
  if (n_added_++ == 0)
    seconds_ = seconds;
  else if (n_added_ <= kFirst)
    seconds_ = std::min(seconds, seconds_);
  else
    seconds_ +=
        kRate * (std::clamp(seconds, (1.0 - kMostOff) * seconds_, (1.0 + kMostOff) * seconds_) - seconds_);
}

int StepTimes::computed(int n_rows) const {
  const auto size = std::lower_bound(sizes_.begin(), sizes_.end(), n_rows);
  return size == sizes_.end() ? n_rows : *size;
}

void StepTimes::add(int n_rows, double seconds) {
  if (n_rows < 1 || n_rows > kMaxRows) return;
  const auto i = static_cast<size_t>(computed(n_rows));
  times_[i].add(seconds);
  added_[i] = ++n_added_;
}

void StepTimes::add_prompt(int n_rows, double seconds) {
  if (n_rows < kPromptRows) return;
  const double row = seconds / n_rows;
  if (prompt_row_ == 0.0 || row < prompt_row_) prompt_row_ = row;
}

int StepTimes::most_rows() const {
  int n = kMaxRows;
  while (n > 0 && known(n) == 0.0) --n;
  return n;
}

bool StepTimes::is_known(int n_rows) const {
  return n_rows <= kMaxRows && times_[static_cast<size_t>(computed(n_rows))].n_added() > 1;
}

double StepTimes::last_row(int last) const {
  const auto measured_before = [&](uint64_t times) {
    int n = last - 1;
    while (n > 0 && times_[static_cast<size_t>(n)].n_added() < times) --n;
    return n;
  };
  int before = measured_before(2);  // beside a smaller step that was disturbed, more rows would seem free
  if (before == 0) before = measured_before(1);
  if (before > 0) return std::max(0.0, known(last) - known(before)) / (last - before);
  const double share = prompt_row_ > 0.0 ? prompt_row_ : kUnknownRow / kFurtherRow * known(last) / last;
  return std::min(share, kMostUnknown * known(last) / last);
}

double StepTimes::from_others(int n) const {
  int below = n - 1, above = n + 1;
  while (below > 0 && known(below) == 0.0) --below;
  while (above <= kMaxRows && known(above) == 0.0) ++above;
  if (below == 0) return above > kMaxRows ? 0.0 : known(above);
  if (above > kMaxRows) return known(below) + (n - below) * kFurtherRow * last_row(below);
  const double share = static_cast<double>(n - below) / (above - below);
  return known(below) + share * (known(above) - known(below));
}

double StepTimes::at(int n_rows) const {
  const int n = computed(std::clamp(n_rows, 1, kMaxRows));
  const auto i = static_cast<size_t>(n);
  if (known(n) == 0.0) return from_others(n);
  const int doubts = (times_[i].n_added() == 1 ? 1 : 0) + (n_added_ - added_[i] > kOld ? 1 : 0);
  if (doubts == 0 || n == 1) return known(n);
  const double expected = from_others(n);
  if (known(n) <= expected) return known(n);
  double most = known(n);
  for (size_t more = i + 1; more < times_.size(); ++more)
    if (times_[more].n_added() > 1) most = std::min(most, times_[more].seconds());
  return expected + std::exp2(-doubts) * std::max(0.0, most - expected);
}

double StepTimes::at_most(int n_rows) const {
  const int n = computed(std::clamp(n_rows, 1, kMaxRows));
  int below = n;
  while (below > 0 && known(below) == 0.0) --below;
  return below == 0 ? at(n) : known(below) + (n - below) * last_row(below);
}

namespace {

// What a drafter does not name, together.
double rest_of(std::span<const float> logprobs) {
  double sum = 0.0;
  for (const float value : logprobs) sum += std::exp(static_cast<double>(value));
  return std::log(std::clamp(1.0 - sum, 1e-4, 1.0));
}

}  // namespace

void Calibration::Sums::add(double p, double was_right, double fade) {
  n = fade * n + 1.0;
  predicted = fade * predicted + p;
  right = fade * right + was_right;
}

void Calibration::adjust(int depth, std::span<float> logprobs) const {
  const double kMost = std::log(0.98);
  double sum = std::exp(sharpness_ * rest_of(logprobs));
  for (const float value : logprobs) sum += std::exp(sharpness_ * static_cast<double>(value));
  const double here = depth_at(depth).ratio(kPrior, all_.ratio(kPriorOfAll, 1.0));
  const double more = std::log(here) - std::log(sum);
  for (float& value : logprobs)
    value = static_cast<float>(std::min(sharpness_ * static_cast<double>(value) + more, kMost));
}

void Calibration::observe(int depth, std::span<const float> logprobs, int rank) {
  constexpr double kRate = 0.01;
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
  const double right = rank == 0 ? 1.0 : 0.0;
  depths_[static_cast<size_t>(std::min(depth, kMaxDraftNodes))].add(best, right, kFade);
  all_.add(best, right, kFadeOfAll);
}

double Calibration::doubt() const {
  return kDeviation / std::sqrt(all_.n + kPriorOfAll);
}

void DraftPlanner::Outlook::add(double seconds) {
  constexpr double kRate = 0.25;
  last_ = seconds;
  mean_ = any_ ? mean_ + kRate * (seconds - mean_) : seconds;
  any_ = true;
}

bool DraftPlanner::wants_draft(const RoundCosts& costs) const {
  if (state_ == State::Guessing || n_since_plain_ >= between_plain_) return false;
  return (!asked_ && !cautious_) || can_pay(costs);
}

bool DraftPlanner::can_pay(const RoundCosts& costs) const {
  if (trusted_ && gain_.is_good() && account_ >= 0.0) return true;
  if (hope_.is_good() && account_ >= kKept * costs.plain_token()) return true;
  return probes_ >= costs.draft_seconds && account_ >= -kOverdraft * costs.plain_token();
}

int DraftPlanner::choose(const DraftView& draft, const RoundCosts& costs) {
  const double token = costs.plain_token();
  if (!asked_ && !cautious_ && !draft.free) {
    account_ += kAdvance * token;
    probes_ += kFirstDrafts * costs.draft_seconds;
  }
  asked_ = true;
  disappointed_ = false;
  trusted_ = draft.trusted;
  if (!draft.free) {
    account_ -= costs.draft_seconds;
    probes_ = std::max(-costs.draft_seconds, probes_ - costs.draft_seconds);
  }
  const int rows = 1 + costs.n_other,
            most = trusted_ ? std::max(kFirstNodes, 2 * costs.times.most_rows() - 1) : kUntrustedNodes,
            n_nodes = std::min(static_cast<int>(draft.nodes.size()), most);
  const double can_lose = kAtRisk * account_ + kOverdraft * token;
  double best = 0.0, expected = 0.0, hoped = 0.0;
  double gain = 0.0, hope = 0.0;  // the most of all n
  int n = 0;
  bool sure = false;
  n_looked_at_ = n_nodes;
  for (int i = 0; i < n_nodes; ++i) {
    const DraftNode& node = draft.nodes[static_cast<size_t>(i)];
    const auto score = static_cast<double>(node.score);
    sure = sure || (node.depth == kConvincing && std::exp(score) >= kSure);
    expected += std::exp(score);
    hoped += std::exp(std::min(score + node.depth * draft.doubt, node.depth * kMostSure));
    const double more = costs.more_rows(i + 1);
    // As if the others that drafted expected as much.
    const double rate = (rows + costs.n_drafting * expected) /
                        (costs.times.at(rows) + costs.n_drafting * (costs.draft_seconds + more));
    const double now = expected * token - (1.0 + kMargin) * more;
    gain = std::max(gain, now);
    hope = std::max(hope, hoped * token - more);
    if (now <= 0.0 || rate <= best || costs.at_most(i + 1) - kUnlucky * expected * token > can_lose) continue;
    best = rate;
    n = i + 1;
  }
  if (!draft.cut) {
    gain_.add(gain - (1.0 + kMargin) * costs.draft_seconds);
    hope_.add(hope - costs.draft_seconds);
  }
  expected_ = expected;
  cost_ = token > 0.0 ? costs.more_rows(n_nodes) / token : 0.0;
  state_ = n == 0 ? State::Off : State::On;
  if (trusted_ || (sure && n > 0) || n_nodes == 0) return n;
  state_ = State::Guessing;
  return 0;
}

void DraftPlanner::finish_round(int n_nodes, int n_accepted, const RoundCosts& costs) {
  const double token = costs.plain_token();
  if (granted_ < kMoreAdvance * token && (asked_ || cautious_)) {
    const double grant = kEarlyShare * (1 + n_accepted) * token;
    granted_ += grant;
    account_ += grant;
  }
  // What was gained before pays for some rounds in vain and no more: a text may change.
  const double most = kReserve * token;
  if (n_nodes == 0) {
    if (n_since_plain_ >= between_plain_) between_plain_ = std::min(2 * between_plain_, kMostBetweenPlain);
    n_since_plain_ = 0;
    account_ = std::max(account_, std::min(most, account_ + kShare * token));
    const bool hopeful = hope_.is_good() && account_ > 0.0;
    const double share = !asked_ ? kEarlyShare : hopeful ? kHopefulShare : kShare;
    probes_ = std::max(probes_, std::min(costs.draft_seconds, probes_ + share * token));
    return;
  }
  ++n_since_plain_;
  const double gained = n_accepted * token - costs.took(n_nodes);
  account_ = std::min(most, account_ + gained);
  probes_ = std::clamp(probes_ + gained, -costs.draft_seconds, costs.draft_seconds);
  // More might have been right than an unknown drafter may try.
  if (!trusted_ && n_accepted == n_nodes && gained > 0.0) probes_ = std::max(probes_, costs.draft_seconds);
  disappointed_ = !can_pay(costs);
  if (disappointed_) state_ = State::Off;
}

void DraftPlanner::finish_guess(int n_right, const RoundCosts& costs) {
  state_ = State::Off;
  // It would have paid for itself and for the next one.
  const bool paid = n_right * costs.plain_token() > costs.more_rows(n_right) + 2.0 * costs.draft_seconds;
  if (n_right > 0 && paid) probes_ = std::max(probes_, costs.draft_seconds);
}

std::string DraftPlanner::reason() const {
  if (state_ == State::On) return "on";
  if (state_ == State::Guessing || (!asked_ && !cautious_)) return "waiting: the drafter was not right yet";
  if (!asked_) return "waiting: the answer is short";
  if (disappointed_) return "off: too few guesses were right";
  if (n_looked_at_ == 0) return "off: the drafter has no guess";
  if (expected_ > (1.0 + kMargin) * cost_) return "waiting: too little is known of the drafter";
  return fmt::format(
      "off: of {} guesses {:.1f} would be right, verifying them takes as long as {:.1f} tokens", n_looked_at_,
      expected_, cost_);
}

}  // namespace thermo
