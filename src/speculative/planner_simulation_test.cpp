// Whole texts written with the planner's help, on machines with known costs and with drafters that are right
// as often as asked: what `bench --draft --oracle` does, without a model and without a clock.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
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
  double next_draft = 0.3;  // of a draft's time, for each further one in a pass
  // The share of what is measured that other programs disturb, and how much longer that takes at most.
  double disturbed = 0.02, times_longer = 2.0;

  double drafts(int n) const { return draft * (1.0 + next_draft * (n - 1)); }
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

// The speed of 512 tokens over that of plain steps, after 32 of the same tokens, as `bench` does; of several
// texts that are written at once, on average.
class Writer {
 public:
  Writer(const Machine& machine, Guesses guesses, uint32_t seed, bool cautious = false, int n_texts = 1)
      : machine_(machine), guesses_(guesses), random_(seed), texts_(static_cast<size_t>(n_texts)) {
    constexpr int kSizes[] = {1, 2, 4, 8, 16, 32, 64};
    if (machine.recorded) times_ = StepTimes(kSizes);
    for (Text& text : texts_) {
      text.planner = DraftPlanner(cautious);
      for (bool& right : text.right) right = uniform() < guesses.truth;
    }
    draft_times_.add(1, machine.draft * noise());
  }

  double speed(int n_tokens) {
    write(std::min(32, n_tokens));
    const double before = time_;
    const int written = write(n_tokens);
    return plain_time(written) / (time_ - before);
  }
  // That of a first answer, after a warm-up, and after a draft that was made when its prompt was read.
  double speed_of_first(int n_tokens) {
    for (const int rows : {1, 8}) measure(times_, rows, machine_.step(rows));
    measure(draft_times_, 1, machine_.draft);
    const int written = write(n_tokens, true);
    return plain_time(written) / time_;
  }

 private:
  struct Text {
    DraftPlanner planner;
    std::array<bool, 1024> right{};  // guesses
    int written = 0, guess = -1;
    int n_nodes = 0;     // to verify
    int n_drafting = 1;  // texts that were drafted for with it
    bool is_right(int i) const { return right[static_cast<size_t>(i) % right.size()]; }
  };

  double uniform() { return static_cast<double>(random_()) / 4294967296.0; }
  // What is measured of a time of 1. What counts in the end is the time without disturbances, since plain
  // steps are disturbed, too.
  double noise() {
    const double some = 1.0 + machine_.noise * uniform();
    if (uniform() >= machine_.disturbed) return some;
    return some * (machine_.times_longer > 2.0 ? 1.0 + (machine_.times_longer - 1.0) * uniform() : 2.0);
  }
  // As Speculation::warm_up() measures.
  void measure(StepTimes& times, int n, double seconds) {
    ShortestTimes shortest;
    for (int i = 0; i < 2 || (!shortest.agree() && i < kMostInWarmUp); ++i) shortest.add(seconds * noise());
    times.add(n, shortest.first);
    times.add(n, shortest.second);
  }
  int n_texts() const { return static_cast<int>(texts_.size()); }
  double plain_time(int n_tokens) const { return machine_.step(n_texts()) * n_tokens / n_texts(); }
  RoundCosts costs(const Text& text, int n_drafted = 0) const {
    return {.times = times_,
            .draft_seconds = draft_times_.at(text.n_drafting) / text.n_drafting,
            .n_other = n_texts() - 1,
            .n_drafting = text.n_drafting,
            .n_drafted = n_drafted};
  }
  bool trusted() const { return calibration_.n_observed() >= kTrusted; }

  std::vector<DraftNode> tree(int most) const {
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

  // `n_left`: tokens until the texts end. Returns how many nodes are to be verified.
  int draft(int n_left, bool is_free) {
    std::vector<Text*> asking;
    for (Text& text : texts_) {
      text.n_nodes = 0;
      const bool wants = is_free || (times_.is_known(n_texts()) && text.planner.wants_draft(costs(text)));
      if (wants) asking.push_back(&text);
    }
    if (asking.empty()) return 0;
    const int n = static_cast<int>(asking.size()), most = std::min(n_left, 64 / n_texts() - 1);
    if (!is_free) time_ += machine_.drafts(n);
    draft_times_.add(n, machine_.drafts(n) * noise());
    int n_nodes = 0;
    for (Text* const text : asking) {
      text->n_drafting = n;
      text->n_nodes = text->planner.choose({.nodes = tree(most),
                                            .trusted = trusted(),
                                            .doubt = calibration_.doubt(),
                                            .cut = n_left < machine_.n_depths,
                                            .free = is_free},
                                           costs(*text));
      text->guess = text->n_nodes == 0 ? 0 : -1;
      n_nodes += text->n_nodes;
    }
    return n_nodes;
  }

  // Returns the tokens that it wrote.
  int finish_round(Text& text, int n_step_nodes) {
    int accepted = 0;
    while (accepted < text.n_nodes && text.is_right(text.written + accepted)) ++accepted;
    for (int depth = 1; depth <= std::min(text.n_nodes, accepted + 1); ++depth)
      calibration_.observe(depth, said_, depth <= accepted ? 0 : -1);
    const bool came_true = text.is_right(text.written);
    text.written += 1 + accepted;
    text.planner.finish_round(text.n_nodes, accepted, costs(text, n_step_nodes - text.n_nodes));
    if (text.guess < 0) return 1 + accepted;
    calibration_.observe(text.guess + 1, said_, came_true ? 0 : -1);
    text.guess += came_true;
    if (came_true && text.guess < machine_.n_depths && (trusted() || text.guess < kTrusted)) return 1;
    text.planner.finish_guess(text.guess, costs(text));
    text.guess = -1;
    return 1;
  }

  int write(int n_tokens, bool is_free = false) {
    for (Text& text : texts_) {
      text.written = 0;
      text.guess = -1;
      text.planner.finish_guess(0, costs(text));
    }
    int written = 0;
    while (written < n_tokens * n_texts()) {
      const int n_nodes = draft(n_tokens * n_texts() - written, std::exchange(is_free, false));
      const int n_rows = n_texts() + n_nodes;
      time_ += machine_.step(n_rows);
      times_.add(n_rows, machine_.step(n_rows) * noise());
      for (Text& text : texts_) written += finish_round(text, n_nodes);
    }
    return written;
  }

  static constexpr int kTrusted = 3, kMostInWarmUp = 30;
  const Machine& machine_;
  Guesses guesses_;
  std::mt19937 random_;
  std::vector<Text> texts_;
  std::vector<float> said_{static_cast<float>(std::log(guesses_.claim))};
  StepTimes times_;
  StepTimes draft_times_;
  Calibration calibration_;
  double time_ = 0.0;
};

struct Speeds {
  double worst = 0.0, median = 0.0;
};

Speeds speeds(const Machine& machine, Guesses guesses, int n_texts = 1, uint32_t n_seeds = 40) {
  std::vector<double> all;
  for (uint32_t seed = 1; seed <= n_seeds; ++seed)
    all.push_back(Writer(machine, guesses, seed, false, n_texts).speed(512));
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

// A single step that took ten times as long ended the drafts of an answer in which every guess was right.
TEST(SimulationOfFirstAnswers, GainsOnABusyMachine) {
  constexpr uint32_t kTexts = 200;
  for (Machine machine : {kPlanktonNear, kPlanktonFar}) {
    machine.disturbed = 0.15;
    machine.times_longer = 20.0;
    for (const bool cautious : {false, true}) {
      uint32_t n_slow = 0;
      for (uint32_t seed = 1; seed <= kTexts; ++seed)
        n_slow += Writer(machine, {.claim = 0.99, .truth = 0.995}, seed, cautious).speed_of_first(132) < 1.2;
      EXPECT_LE(n_slow, kTexts / 50) << machine.name << (cautious ? ", cautious" : "");
      double time = 0.0;
      for (uint32_t seed = 1; seed <= kTexts; ++seed)
        time += 132 / Writer(machine, {.claim = 0.9, .truth = 0.05}, seed, cautious).speed_of_first(132);
      EXPECT_GE(kTexts * 132 / time, 0.97) << machine.name << (cautious ? ", cautious" : "");
    }
  }
}

// Each of several sequences believed that the next few rows of a recorded step cost nothing, and that a draft
// made for it alone was made for all: five of them had half the speed with split experts.
TEST(SimulationOfSeveral, LosesLittleAndGainsWithGoodDrafters) {
  constexpr uint32_t kSeeds = 10;
  for (const Machine& machine :
       {kSparse, kSparseFastDraft, kLocal, kDense, kSplit, kCores, kPlankton, kPlanktonNear, kPlanktonFar})
    for (const int n_texts : {2, 5, 16})
      for (const auto& [claim, truth] :
           {std::pair(0.9, 0.9), {0.8, 0.8}, {0.7, 0.7}, {0.5, 0.5}, {0.05, 0.05}, {0.9, 0.05}})
        EXPECT_GE(speeds(machine, {.claim = claim, .truth = truth}, n_texts, kSeeds).worst, 0.96)
            << machine.name << ", " << n_texts << " texts: " << claim << " said, " << truth << " right";
  const auto median_of_five = [](const Machine& machine, double truth) {
    return speeds(machine, {.claim = truth, .truth = truth}, 5, kSeeds).median;
  };
  EXPECT_GE(median_of_five(kSparse, 0.9), 2.0);
  EXPECT_GE(median_of_five(kSparse, 0.8), 1.3);
  EXPECT_GE(median_of_five(kDense, 0.9), 2.1);
  EXPECT_GE(median_of_five(kDense, 0.8), 1.5);
  EXPECT_GE(median_of_five(kCores, 0.9), 1.3);
}

}  // namespace
}  // namespace thermo
