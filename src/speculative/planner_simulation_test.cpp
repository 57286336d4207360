// Whole texts written with the planner's help, on machines whose costs are known and with drafters that are
// right as often as one wants: what `bench --draft --oracle` does, without a model and without a clock.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "speculative/planner.h"

namespace thermo {
namespace {

// Times are in plain tokens. They lie between the given ones, or are those of the next larger size where
// steps are recorded for these sizes only.
struct Machine {
  std::string name;
  std::vector<double> rows;  // what steps of 2, 4, 8, ... rows take
  double draft = 0.0;
  bool recorded = false;
  int n_depths = 15;
  double noise = 0.03;

  double step(int n_rows) const {
    double before = 1.0;
    for (int size = 1, i = -1;; size *= 2, ++i) {
      const double now = i < 0 ? 1.0 : rows[static_cast<size_t>(i)];
      if (n_rows <= size)
        return recorded || size == 1 ? now : now - (now - before) * (size - n_rows) / (size / 2.0);
      before = now;
    }
  }
};

// 35B-A3B, all experts on an H200; the draft of 15 tokens took 0.92 ms.
const Machine kSparse{.name = "SparseOnALargeCard",
                      .rows = {1.57, 2.02, 2.58, 3.54, 4.97, 6.98},
                      .draft = 0.64,
                      .recorded = true};
const Machine kSparseFastDraft{
    .name = "SparseWithFasterDrafts", .rows = kSparse.rows, .draft = 0.38, .recorded = true};
const Machine kLocal{
    .name = "SparseWithLocality", .rows = {1.35, 1.65, 2.3, 3.5, 4.8, 6.5}, .draft = 0.38, .recorded = true};
// 27B there.
const Machine kDense{.name = "DenseOnALargeCard",
                     .rows = {1.08, 1.13, 1.21, 1.56, 1.86, 3.02},
                     .draft = 0.32,
                     .recorded = true};
const Machine kSplit{.name = "SplitExperts",
                     .rows = {1.85, 3.5, 6.7, 13.0, 25.0, 49.0},
                     .draft = 0.25,
                     .recorded = true,
                     .noise = 0.1};
// 35B-A3B on a processor: the bytes of the experts of all rows.
const Machine kCores{
    .name = "SixteenCores", .rows = {1.3, 1.9, 2.9, 4.6, 7.0, 9.3}, .draft = 0.45, .noise = 0.08};
const Machine kPlankton{.name = "SmallOnTwoCores",
                        .rows = {1.4, 2.0, 3.4, 6.4, 12.4, 24.4},
                        .draft = 1.3,
                        .n_depths = 7,
                        .noise = 0.08};
// Plankton with its drafter, measured: where two cores exchange a cache line in 0.1 us, and in 0.5.
const Machine kPlanktonNear{.name = "SmallOnTwoNearCores",
                            .rows = {1.42, 2.08, 3.62, 6.7, 13.0, 25.0},
                            .draft = 1.45,
                            .n_depths = 7,
                            .noise = 0.08};
const Machine kPlanktonFar{.name = "SmallOnTwoDistantCores",
                           .rows = {1.48, 1.86, 3.08, 5.41, 10.4, 20.4},
                           .draft = 1.15,
                           .n_depths = 7,
                           .noise = 0.08};

// Says `claim` of each token, and is right with `truth`.
struct Guesses {
  double claim = 0.0, truth = 0.0;
};

// The speed of 512 tokens over that of plain steps, after 32 of the same tokens, as `bench` does.
class Writer {
 public:
  Writer(const Machine& machine, Guesses guesses, uint32_t seed, bool cautious = false)
      : machine_(machine), guesses_(guesses), random_(seed), planner_(cautious) {
    constexpr int kSizes[] = {1, 2, 4, 8, 16, 32, 64};
    if (machine.recorded) times_ = StepTimes(kSizes);
    for (size_t i = 0; i < 1024; ++i) right_.push_back(uniform() < guesses.truth);
    draft_time_.add(machine.draft * noise());
  }

  double speed(int n_tokens) {
    write(std::min(32, n_tokens));
    const double before = time_;
    const int written = write(n_tokens);
    return written / (time_ - before);
  }
  // That of a first answer, after a warm-up, and after a draft that was made when its prompt was read.
  double speed_of_first(int n_tokens) {
    for (int i = 0; i < 2; ++i)
      for (const int rows : {1, 8}) times_.add(rows, machine_.step(rows) * noise());
    draft_time_.add(machine_.draft * noise());
    const int written = write(n_tokens, true);
    return written / time_;
  }

 private:
  double uniform() { return static_cast<double>(random_()) / 4294967296.0; }
  // What is measured of a time of 1: other programs disturb a step in fifty. What counts in the end is the
  // time without that, since plain steps are disturbed, too.
  double noise() {
    const double some = 1.0 + machine_.noise * uniform();
    return uniform() < 0.02 ? 2.0 * some : some;
  }
  RoundCosts costs() const { return {times_, draft_time_.seconds(), 0}; }
  bool trusted() const { return calibration_.n_observed() >= kTrusted; }

  std::vector<DraftNode> draft(int most) {
    time_ += machine_.draft;
    draft_time_.add(machine_.draft * noise(), times_.at(1));
    std::vector<DraftNode> nodes;
    float score = 0.0f;
    for (int depth = 1; depth <= std::min(most, machine_.n_depths); ++depth) {
      std::vector<float> adjusted = said_;
      calibration_.adjust(depth, adjusted);
      score += adjusted[0];
      nodes.push_back({.token = 1, .parent = depth - 1, .depth = depth, .rank = 0, .score = score});
    }
    return nodes;
  }

  int write(int n_tokens, bool is_free = false) {
    int written = 0, guess = -1;
    planner_.finish_guess(0, costs());
    while (written < n_tokens) {
      int n = 0;
      if (is_free || (times_.is_known(1) && planner_.wants_draft(costs()))) {
        const std::vector<DraftNode> nodes = draft(n_tokens - written);
        if (is_free) time_ -= machine_.draft;
        n = planner_.choose({nodes, trusted(), calibration_.doubt(), n_tokens - written < machine_.n_depths,
                             std::exchange(is_free, false)},
                            costs());
        guess = n == 0 ? 0 : -1;
      }
      int accepted = 0;
      while (accepted < n && right_[static_cast<size_t>(written + accepted)]) ++accepted;
      for (int depth = 1; depth <= std::min(n, accepted + 1); ++depth)
        calibration_.observe(depth, said_, depth <= accepted ? 0 : -1);
      time_ += machine_.step(1 + n);
      times_.add(1 + n, machine_.step(1 + n) * noise());
      const bool came_true = right_[static_cast<size_t>(written)];
      written += 1 + accepted;
      planner_.finish_round(n, accepted, costs());
      if (guess < 0) continue;
      calibration_.observe(guess + 1, said_, came_true ? 0 : -1);
      guess += came_true;
      if (came_true && guess < machine_.n_depths && (trusted() || guess < kTrusted)) continue;
      planner_.finish_guess(guess, costs());
      guess = -1;
    }
    return written;
  }

  static constexpr int kTrusted = 3;
  const Machine& machine_;
  Guesses guesses_;
  std::mt19937 random_;
  std::vector<bool> right_;
  std::vector<float> said_{static_cast<float>(std::log(guesses_.claim))};
  StepTimes times_;
  SteadyTime draft_time_;
  Calibration calibration_;
  DraftPlanner planner_;
  double time_ = 0.0;
};

struct Speeds {
  double worst = 0.0, median = 0.0;
};

Speeds speeds(const Machine& machine, Guesses guesses) {
  constexpr uint32_t kTexts = 40;
  std::vector<double> all;
  for (uint32_t seed = 1; seed <= kTexts; ++seed) all.push_back(Writer(machine, guesses, seed).speed(512));
  std::sort(all.begin(), all.end());
  return {.worst = all.front(), .median = all[all.size() / 2]};
}

// The least median for drafters that are right with 0.9, 0.8 and 0.5, and say so.
struct Asked {
  Machine machine;
  double at_90 = 0.97, at_80 = 0.97, at_50 = 0.97;
};

class Simulation : public testing::TestWithParam<Asked> {};

TEST_P(Simulation, GainsWithGoodDraftersAndLosesLittleWithOthers) {
  const Asked& asked = GetParam();
  const auto expect = [&](Guesses guesses, double median) {
    const Speeds got = speeds(asked.machine, guesses);
    EXPECT_GE(got.worst, 0.97) << guesses.claim << " said, " << guesses.truth << " right";
    EXPECT_GE(got.median, median) << guesses.claim << " said, " << guesses.truth << " right";
  };
  expect({.claim = 0.9, .truth = 0.9}, asked.at_90);
  expect({.claim = 0.8, .truth = 0.8}, asked.at_80);
  expect({.claim = 0.7, .truth = 0.7}, asked.at_50);
  expect({.claim = 0.5, .truth = 0.5}, asked.at_50);
  expect({.claim = 0.05, .truth = 0.05}, 0.97);
  expect({.claim = 0.9, .truth = 0.05}, 0.97);
}

INSTANTIATE_TEST_SUITE_P(Machines, Simulation,
                         testing::Values(Asked{.machine = kSparse, .at_90 = 1.5, .at_80 = 1.1},
                                         Asked{.machine = kSparseFastDraft, .at_90 = 1.6, .at_80 = 1.2},
                                         Asked{.machine = kLocal, .at_90 = 1.8, .at_80 = 1.35},
                                         Asked{.machine = kDense, .at_90 = 3.2, .at_80 = 2.3, .at_50 = 1.1},
                                         Asked{.machine = kSplit},
                                         Asked{.machine = kCores, .at_90 = 1.4, .at_80 = 1.1},
                                         Asked{.machine = kPlankton, .at_90 = 1.1},
                                         Asked{.machine = kPlanktonNear, .at_90 = 1.05},
                                         Asked{.machine = kPlanktonFar, .at_90 = 1.25}),
                         [](const auto& test) { return test.param.machine.name; });

// Answers as short as 24 tokens have no time for drafts in vain: of all of them together 3 percent may be
// lost.
TEST(SimulationOfFirstAnswers, LosesLittleAndGainsWithGoodDrafters) {
  constexpr uint32_t kTexts = 200;
  for (const Machine& machine : {kPlanktonNear, kPlanktonFar})
    for (const bool cautious : {false, true})
      for (const int n_tokens : {24, 48, 132}) {
        const auto speed = [&](Guesses guesses) {
          double time = 0.0;
          for (uint32_t seed = 1; seed <= kTexts; ++seed)
            time += n_tokens / Writer(machine, guesses, seed, cautious).speed_of_first(n_tokens);
          return kTexts * n_tokens / time;
        };
        const std::string where = machine.name + ", " + std::to_string(n_tokens);
        EXPECT_GE(speed({.claim = 0.99, .truth = 0.99}), 1.4) << where;
        for (const double truth : {0.9, 0.8, 0.7, 0.5, 0.05})
          EXPECT_GE(speed({.claim = truth, .truth = truth}), 0.97) << where << ": " << truth;
        EXPECT_GE(speed({.claim = 0.9, .truth = 0.05}), n_tokens == 24 ? 0.95 : 0.97) << where;
      }
}

}  // namespace
}  // namespace thermo
