// Whether drafting pays, and how much of it: measured step times by rows, acceptance by depth. Pure but for
// what it was told; it knows no clock.
//
//   rate(n) = (rows that are written anyway + A(n)) / (draft time + step time of those rows and n nodes)
//
// A(n) is the sum of the n largest weights of a round, corrected by what was accepted before (calibration).
// The best n is taken where its rate beats plain decoding by a margin. Where it does not, drafting is off for
// some tokens; then one round probes.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "speculative/ddtree.h"

namespace thermo {

// What something takes that other programs disturb now and then: close to the shorter ones of its times.
class SteadyTime {
 public:
  // `most`: the first time is cut to it; 0: taken as it is.
  void add(double seconds, double most = 0.0);
  double seconds() const { return seconds_; }  // 0: nothing is known
  int n_added() const { return n_added_; }

 private:
  double seconds_ = 0.0;
  int n_added_ = 0;
};

// What a step of so many rows takes.
class StepTimes {
 public:
  void add(int n_rows, double seconds);
  // Measured, or between two measured ones, or with kUnknownRow of a row's time for each row beyond. 0:
  // nothing is known.
  double at(int n_rows) const;
  // Whether a step of so many rows was measured itself, and not only once.
  bool is_known(int n_rows) const;

  static constexpr int kMaxRows = 64;

 private:
  static constexpr double kUnknownRow = 0.15;
  std::array<SteadyTime, kMaxRows + 1> times_{};
};

// Makes a drafter's probabilities those of acceptance, depth by depth.
class Calibration {
 public:
  float adjusted(int depth, float logprob) const;
  // A node's children at `depth` had this probability together, by the drafter; one of them was accepted or
  // none.
  void observe(int depth, double predicted, bool accepted);

 private:
  struct Depth {
    double predicted = 0.0, accepted = 0.0;  // sums that fade
  };
  std::array<Depth, kMaxDraftNodes + 1> depths_{};
};

// Of one sequence.
class DraftPlanner {
 public:
  enum class State : uint8_t { On, Probing, Off };

  void begin_request();
  // Whether to ask the drafter in this round.
  bool wants_draft() const { return state_ != State::Off && n_since_plain_ < kRoundsBetweenPlain; }
  // How many of a tree's nodes are worth verifying; 0: none. `n_other`: rows of other sequences in the step.
  // Remembers the answer.
  int choose(std::span<const DraftNode> nodes, const StepTimes& times, double draft_seconds, int n_other);
  // After a round of `n_nodes` of which `n_accepted` were; 0 nodes: a plain one.
  void finish_round(int n_nodes, int n_accepted);

  State state() const { return state_; }
  // For people: "on", "off: drafting would not be faster".
  std::string_view reason() const;

 private:
  static constexpr double kMargin = 0.04;                   // that drafting must gain
  static constexpr int kShortPause = 32, kLongPause = 512;  // tokens
  static constexpr int kFirstNodes = 4;
  static constexpr int kRoundsBetweenPlain = 100;  // the time of a plain step is measured now and then

  void pause();

  State state_ = State::On;
  int pause_ = kShortPause;  // the next one
  int left_ = 0;             // tokens until a probe
  int misses_ = 0;           // rounds in a row without gain
  int n_since_plain_ = 0;    // rounds since a plain one
  int most_ = kFirstNodes;   // nodes of the next round; grows with success
};

}  // namespace thermo
