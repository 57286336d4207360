#include "speculative/planner.h"

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

bool StepTimes::is_known(int n_rows) const {
  return n_rows <= kMaxRows && times_[static_cast<size_t>(n_rows)].n_added() > 1;
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
  return known(below) * (1.0 + kUnknownRow * (n - below) / below);
}

float Calibration::adjusted(int depth, float logprob) const {
  constexpr double kPrior = 1.0, kMost = 0.98;
  const Depth& d = depths_[static_cast<size_t>(std::min(depth, kMaxDraftNodes))];
  const double factor = (d.accepted + kPrior) / (d.predicted + kPrior);
  return static_cast<float>(std::min(static_cast<double>(logprob) + std::log(factor), std::log(kMost)));
}

void Calibration::observe(int depth, double predicted, bool accepted) {
  constexpr double kFade = 0.97;
  Depth& d = depths_[static_cast<size_t>(std::min(depth, kMaxDraftNodes))];
  d.predicted = kFade * d.predicted + std::min(predicted, 1.0);
  d.accepted = kFade * d.accepted + (accepted ? 1.0 : 0.0);
}

void DraftPlanner::begin_request() {
  // What the text before had is little said of this one: ask again soon.
  pause_ = kShortPause;
  left_ = std::min(left_, kShortPause);
  misses_ = 0;
}

int DraftPlanner::choose(std::span<const DraftNode> nodes, const StepTimes& times, double draft_seconds,
                         int n_other) {
  const int rows = 1 + n_other;
  const double plain_seconds = times.at(rows);
  const int n_nodes = std::min(static_cast<int>(nodes.size()), most_);
  if (plain_seconds == 0.0) return n_nodes;  // nothing is measured yet
  double best = rows / plain_seconds * (1.0 + kMargin), expected = 0.0;
  int n = 0;
  for (int i = 0; i < n_nodes; ++i) {
    expected += std::exp(static_cast<double>(nodes[static_cast<size_t>(i)].score));
    const double rate = (rows + expected) / (draft_seconds + times.at(rows + i + 1));
    if (rate <= best) continue;
    best = rate;
    n = i + 1;
  }
  return n;
}

void DraftPlanner::finish_round(int n_nodes, int n_accepted) {
  const bool due = n_since_plain_ >= kRoundsBetweenPlain;
  n_since_plain_ = n_nodes == 0 ? 0 : n_since_plain_ + 1;
  if (due) return;
  if (state_ == State::Off) {
    if (--left_ <= 0) state_ = State::Probing;
    return;
  }
  if (n_accepted > 0) {
    state_ = State::On;
    misses_ = 0;
    pause_ = kShortPause;
    most_ = std::min(kMaxDraftNodes, 2 * std::max(most_, n_nodes));
    return;
  }
  if (n_nodes > 0) most_ = std::max(kFirstNodes, most_ / 2);
  ++misses_;
  // A drafter that is often right has its bad rounds; a probe has one.
  if (state_ == State::Probing || misses_ >= 4) pause();
}

void DraftPlanner::pause() {
  state_ = State::Off;
  left_ = pause_;
  pause_ = std::min(kLongPause, 2 * pause_);
  misses_ = 0;
}

std::string_view DraftPlanner::reason() const {
  switch (state_) {
    case State::On:
      return "on";
    case State::Probing:
      return "probing";
    case State::Off:
      return "off: drafting would not be faster";
  }
  return "";
}

}  // namespace thermo
