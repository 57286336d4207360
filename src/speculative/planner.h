// Whether drafting pays, and how much of it: measured step times by rows, acceptance by depth. Pure but for
// what it was told; it knows no clock.
//
//   gain(n) = A(n) * time of a plain token - (step time with n nodes - step time without them)
//
// A(n) is the sum of the n largest weights of a round, corrected by what was accepted before (calibration).
// Of the n that gain by a margin the one with the best rate is taken, the time of the draft included.
//
// What drafting loses is bounded by an account of each sequence: drafts cost their time, rounds add what they
// gained or lost. It begins with the time of a few tokens and gets a few more with the first tokens that are
// written, and then very little with each plain token. While drafts are expected to gain, it may be used up:
// an unlucky start is not yet a bad drafter. While only the hope is left (they would gain if the drafter were
// right a little more often, which is not known well enough), a part of it is kept. Otherwise there are
// probes: a draft for a small share of the time, which is compared with what plain steps write, unless it is
// worth verifying. One that was right pays for the next, so that good luck is noticed at once. No round may
// lose much more than the account has.
//
// A drafter that was never seen to be right, and is not sure of its first tokens, only guesses at first.
// A first draft that was made when the prompt was read costs no token anything. Then the account begins
// empty, since it is known what can be hoped for; and so it does where nobody asked for the drafter by name,
// where plain tokens pay for the first draft.
//
// What steps of several rows take is not known before there was one, so it is expected to be little: then the
// first good draft finds it out. What was measured only once, or long ago, is half believed.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "speculative/ddtree.h"

namespace thermo {

// What something takes that other programs disturb now and then: the shortest of the first times, then close
// to the recent ones, of which none counts for much.
class SteadyTime {
 public:
  void add(double seconds);
  double seconds() const { return seconds_; }  // 0: nothing is known
  uint64_t n_added() const { return n_added_; }

 private:
  static constexpr double kRate = 0.2, kMostOff = 0.08;  // share of the difference, which counts up to this
  static constexpr int kFirst = 4;
  double seconds_ = 0.0;
  uint64_t n_added_ = 0;
};

// The two shortest of some times. Other programs only make a step longer: when these two agree, they are what
// it takes.
struct ShortestTimes {
  double first = std::numeric_limits<double>::infinity(), second = first;

  void add(double seconds) {
    second = std::min(second, std::max(first, seconds));
    first = std::min(first, seconds);
  }
  bool agree() const { return second <= 1.1 * first; }
};

// What a step of so many rows takes, or a pass that drafts for so many sequences.
class StepTimes {
 public:
  // `sizes`: the numbers of rows that steps are computed with, in order; others take as long as the next one.
  // Empty: all.
  explicit StepTimes(std::span<const int> sizes = {}) : sizes_(sizes.begin(), sizes.end()) {}

  void add(int n_rows, double seconds);
  // Of a prompt: what a row took in a step of many.
  void add_prompt(int n_rows, double seconds);
  // Measured, or between two measured ones; beyond them each row takes half of what the last ones took, since
  // more rows share more, or a row of a prompt, or kUnknownRow of a step of one; and never more than
  // kMostUnknown of it. A time that was measured once, or not lately, is half believed, and not at all beyond
  // that of a larger step that was measured more often. 0: nothing is known.
  double at(int n_rows) const;
  // The same where all is believed, and further rows take as long as the last ones.
  double at_most(int n_rows) const;
  // Whether a step of so many rows was measured itself, and not only once.
  bool is_known(int n_rows) const;
  int most_rows() const;  // that were measured

  static constexpr int kMaxRows = 64;

 private:
  static constexpr double kUnknownRow = 0.15, kMostUnknown = 0.5, kFurtherRow = 0.5;
  static constexpr int kPromptRows = 64;  // fewer say little: a short prompt is often the first step of all
  static constexpr int kOld = 128;        // steps after which a time is half believed

  int computed(int n_rows) const;
  double known(int n_rows) const { return times_[static_cast<size_t>(n_rows)].seconds(); }
  double last_row(int last) const;       // of those that were measured
  double from_others(int n_rows) const;  // what its neighbours say

  std::vector<int> sizes_;
  std::array<SteadyTime, kMaxRows + 1> times_{};
  std::array<uint64_t, kMaxRows + 1> added_{};  // when: numbers of steps
  uint64_t n_added_ = 0;
  double prompt_row_ = 0.0;
};

// Makes a drafter's probabilities those of acceptance: how sure it is in general, how often it was right in
// general, and at each depth.
class Calibration {
 public:
  // The candidates of a position, best first, in place.
  void adjust(int depth, std::span<float> logprobs) const;
  // The text had candidate `rank` of this position, -1: none. `logprobs` as they were drafted.
  void observe(int depth, std::span<const float> logprobs, int rank);
  uint64_t n_observed() const { return n_observed_; }
  // How far off a probability may be after what was observed: a deviation, as a share of it.
  double doubt() const;

 private:
  // Of the best candidate; they fade.
  struct Sums {
    double n = 0.0, predicted = 0.0, right = 0.0;
    void add(double p, double was_right, double fade);
    // Right over predicted, as if `n_before` had been in this ratio before.
    double ratio(double n_before, double before) const {
      return (right + n_before * before) / (predicted + n_before);
    }
  };
  static constexpr double kPrior = 16.0, kPriorOfAll = 12.0;  // tokens that count for what was expected
  static constexpr double kFade = 0.985, kFadeOfAll = 0.995;
  static constexpr double kDeviation = 0.7;  // of one token, as a share of its probability
  const Sums& depth_at(int depth) const {
    return depths_[static_cast<size_t>(std::min(depth, kMaxDraftNodes))];
  }

  double sharpness_ = 1.0;  // exponent of probabilities: below 1 it is less sure than it says
  uint64_t n_observed_ = 0;
  Sums all_;
  std::array<Sums, kMaxDraftNodes + 1> depths_{};
};

// What a round of a sequence takes, as it was measured. Of what several sequences take together each has its
// share, so that all of them together lose no more than one may.
struct RoundCosts {
  const StepTimes& times;
  double draft_seconds = 0.0;  // of its draft
  int n_other = 0;             // rows of other sequences in the step, without their nodes
  int n_drafting = 1;          // sequences that were drafted for in this round
  int n_drafted = 0;           // nodes of the others that were verified

  double plain_token() const { return times.at(1 + n_other) / (1 + n_other); }
  // Before the round: if the others that drafted verify as many. Where steps of some sizes are recorded, the
  // next few rows would seem to cost each sequence nothing, and all of them together cost much.
  double more_rows(int n_nodes) const {
    return (times.at(1 + n_other + n_drafting * n_nodes) - times.at(1 + n_other)) / n_drafting;
  }
  double at_most(int n_nodes) const {
    return (times.at_most(1 + n_other + n_drafting * n_nodes) - times.at(1 + n_other)) / n_drafting;
  }
  // After it. REQUIRES: n_nodes > 0.
  double took(int n_nodes) const {
    const int all = n_nodes + n_drafted;
    return (times.at(1 + n_other + all) - times.at(1 + n_other)) * n_nodes / all;
  }
};

// A draft as the planner sees it.
struct DraftView {
  std::span<const DraftNode> nodes;  // the tree, the heaviest first
  bool trusted = false;              // it is known how often the drafter is right
  double doubt = 0.0;                // Calibration::doubt()
  bool cut = false;                  // by the end of the answer: it says nothing of the next ones
  bool free = false;                 // it was made while the prompt was read, whose time it took
};

// Of one sequence.
class DraftPlanner {
 public:
  // `cautious`: the account begins empty, so a short answer is written without any draft.
  explicit DraftPlanner(bool cautious = false) : cautious_(cautious) {}

  // Whether to ask the drafter in this round.
  bool wants_draft(const RoundCosts& costs) const;
  // After it was asked: how many of a tree's nodes are worth verifying; 0: none.
  int choose(const DraftView& draft, const RoundCosts& costs);
  // After a round of `n_nodes` of which `n_accepted` were; 0 nodes: a plain one.
  void finish_round(int n_nodes, int n_accepted, const RoundCosts& costs);
  // A draft that was not verified came true for so many tokens, and then did not or ended.
  void finish_guess(int n_right, const RoundCosts& costs);

  enum class State : uint8_t { On, Guessing, Off };
  State state() const { return state_; }
  // For people: "on", "off: ...".
  std::string reason() const;
  // Of the last choice: the nodes that it was made from, how many of them would be right, and what verifying
  // all of them would cost, in plain tokens.
  int n_looked_at() const { return n_looked_at_; }
  double expected() const { return expected_; }
  double cost() const { return cost_; }

 private:
  // What drafts promised lately, in seconds.
  class Outlook {
   public:
    void add(double seconds);
    bool is_good() const { return std::max(last_, mean_) > 0.0; }

   private:
    double last_ = 0.0, mean_ = 0.0;
    bool any_ = false;
  };
  bool can_pay(const RoundCosts& costs) const;

  static constexpr double kMargin = 0.08;  // that a round must gain, as a share of what it costs
  // Plain tokens that the account begins with, and that come with the first ones that are written.
  static constexpr double kAdvance = 4.0, kMoreAdvance = 4.5;
  static constexpr double kEarlyShare = 0.03;  // of the time, while they come
  // Of the time of plain tokens, for the account, and for probes while there is hope.
  static constexpr double kShare = 0.005, kHopefulShare = 0.02;
  static constexpr double kFirstDrafts = 2.0;  // that need no probe's share
  static constexpr double kKept = 3.0;         // plain tokens that hope does not spend
  static constexpr double kOverdraft = 2.5,
                          kAtRisk = 0.25;   // plain tokens, and share of the account, for a round
  static constexpr double kUnlucky = 0.25;  // of the expected tokens, that such a round has at least
  static constexpr double kReserve = 14.0;  // plain tokens: what earlier gains may pay for
  static constexpr int kFirstNodes = 7, kUntrustedNodes = 3;
  static constexpr int kMostBetweenPlain = 100;  // rounds: the time of a plain step is measured now and then
  static constexpr int kConvincing = 3;          // tokens in a row that a guess was right for
  static constexpr double kSure = 0.6;           // that a draft is right for so many tokens
  static constexpr double kMostSure = -0.02;     // log-probability of a token, with all hope

  bool cautious_;
  State state_ = State::Off;
  double account_ = 0.0;       // seconds
  double granted_ = 0.0;       // of kMoreAdvance
  double probes_ = 0.0;        // seconds that are left for probes
  bool asked_ = false;         // ever
  bool disappointed_ = false;  // by the last round
  bool trusted_ = false;       // at the last choice
  Outlook gain_, hope_;        // the draft included; with all hope
  int n_since_plain_ = 0, between_plain_ = 6;
  // Of the last choice.
  double expected_ = 0.0, cost_ = 0.0;
  int n_looked_at_ = 0;
};

}  // namespace thermo
