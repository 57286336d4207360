// Whether drafting pays, and how much of it: measured step times by rows, acceptance by depth. Pure but for
// what it was told; it knows no clock.
//
//   gain(n) = A(n) * time of a plain token - (step time with n nodes - step time without them)
//
// A(n) is the sum of the n largest weights of a round, corrected by what was accepted before (calibration).
// Of the n that gain by a margin the one with the best rate is taken, the time of the draft included.
//
// What drafting loses is bounded by an account of each sequence: drafts cost their time, rounds add what they
// gained or lost, and every plain token adds one percent of its time. Where it does not cover a draft,
// nothing is asked, unless the last round promised a gain: then it may be overdrawn a little, since bad luck
// is not yet a bad drafter. It begins with the time of a few tokens. A drafter that was never seen to be
// right, and is not sure of its first tokens, only guesses at first: its draft is compared with what plain
// steps write, which costs no more than the draft. If nothing of two drafts was right, the rest of the
// advance is gone. Where nobody asked for the drafter by name, there is no advance: plain tokens pay for the
// first draft, too.
//
// What steps of several rows take is not known before there was one, so it is expected to be little: then the
// first good draft finds it out, for the price of one round at most.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

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
  // Of a prompt: what a row took in a step of many.
  void add_prompt(int n_rows, double seconds);
  // Measured, or between two measured ones. Beyond them each row takes what the last ones took, or a row of a
  // prompt, or kUnknownRow of a step of one; and never more than kMostUnknown of it. 0: nothing is known.
  double at(int n_rows) const;
  // Whether a step of so many rows was measured itself, and not only once.
  bool is_known(int n_rows) const;

  static constexpr int kMaxRows = 64;

 private:
  static constexpr double kUnknownRow = 0.15, kMostUnknown = 0.5;
  static constexpr int kPromptRows = 64;  // fewer say little: a short prompt is often the first step of all
  double beyond(int last) const;          // of a row

  std::array<SteadyTime, kMaxRows + 1> times_{};
  double prompt_row_ = 0.0;
};

// Makes a drafter's probabilities those of acceptance: how sure it is in general, and a factor of each depth.
class Calibration {
 public:
  // The candidates of a position, best first, in place.
  void adjust(int depth, std::span<float> logprobs) const;
  // The text had candidate `rank` of this position, -1: none. `logprobs` as they were drafted.
  void observe(int depth, std::span<const float> logprobs, int rank);
  int n_observed() const { return n_observed_; }

 private:
  struct Depth {
    double predicted = 0.0, right = 0.0;  // of the best candidate; sums that fade
  };
  const Depth& depth_at(int depth) const {
    return depths_[static_cast<size_t>(std::min(depth, kMaxDraftNodes))];
  }

  double sharpness_ = 1.0;  // exponent of probabilities: below 1 it is less sure than it says
  int n_observed_ = 0;
  std::array<Depth, kMaxDraftNodes + 1> depths_{};
};

// What a round of a sequence takes, as it was measured.
struct RoundCosts {
  const StepTimes& times;
  double draft_seconds = 0.0;  // of its draft
  int n_other = 0;             // rows of other sequences in the step

  double plain_token() const { return times.at(1 + n_other) / (1 + n_other); }
  double more_rows(int n_nodes) const { return times.at(1 + n_other + n_nodes) - times.at(1 + n_other); }
};

// Of one sequence.
class DraftPlanner {
 public:
  // `cautious`: the account begins empty, so a short answer is written without any draft.
  explicit DraftPlanner(bool cautious = false) : cautious_(cautious) {}

  // Whether to ask the drafter in this round.
  bool wants_draft(const RoundCosts& costs) const;
  // After it was asked: how many of a tree's nodes are worth verifying; 0: none. `trusted`: it is known how
  // often the drafter is right.
  int choose(std::span<const DraftNode> nodes, const RoundCosts& costs, bool trusted);
  // After a round of `n_nodes` of which `n_accepted` were; 0 nodes: a plain one.
  void finish_round(int n_nodes, int n_accepted, const RoundCosts& costs);
  // A draft that was not verified came true for so many tokens, and then did not or ended.
  void finish_guess(int n_right, const RoundCosts& costs);

  enum class State : uint8_t { On, Guessing, Off };
  State state() const { return state_; }
  // For people: "on", "off: ...".
  std::string reason() const;

 private:
  bool can_pay(const RoundCosts& costs) const;

  static constexpr double kMargin = 0.04;  // that a round must gain, in plain tokens for each node's cost
  // Of the time of plain tokens, for drafts that may be in vain; the second one for the first draft of one
  // that began with nothing.
  static constexpr double kShare = 0.01, kCautiousShare = 0.025;
  static constexpr double kAdvance = 3.0;  // plain tokens that the account begins with
  static constexpr double kCredit = 2.0;   // plain tokens that it may be overdrawn by
  static constexpr double kReserve = 6.0;  // rounds that earlier gains may pay for
  static constexpr int kWrongGuesses = 2;  // in a row, with nothing right before
  static constexpr int kFirstNodes = 8, kUntrustedNodes = 3;
  static constexpr int kRoundsBetweenPlain = 100;  // the time of a plain step is measured now and then
  static constexpr int kConvincing = 3;            // tokens in a row that a guess was right for
  static constexpr double kSure = 0.6;             // that a draft is right for so many tokens

  bool cautious_;
  State state_ = State::Off;
  double account_ = 0.0;       // seconds
  bool asked_ = false;         // ever
  bool disappointed_ = false;  // by the last round
  bool promises_ = false;      // the last choice: a gain, the draft included
  int n_wrong_ = 0;            // guesses in a row
  int n_since_plain_ = 0;
  int most_ = kFirstNodes;  // nodes of the next round; grows with success
  // Of the last choice, for people.
  double expected_ = 0.0, cost_ = 0.0;
  int n_looked_at_ = 0;
};

}  // namespace thermo
