#include "speculative/planner.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace thermo {
namespace {

std::vector<DraftNode> chain(std::initializer_list<double> probabilities) {
  std::vector<DraftNode> nodes;
  double score = 0.0;
  for (const double p : probabilities) {
    score += std::log(p);
    const int depth = static_cast<int>(nodes.size()) + 1;
    nodes.push_back(
        {.token = 1, .parent = depth - 1, .depth = depth, .rank = 0, .score = static_cast<float>(score)});
  }
  return nodes;
}

// A server adds some in every step, for years.
static_assert(sizeof(SteadyTime().n_added()) == 8 && sizeof(Calibration().n_observed()) == 8);

// A time that is measured twice is believed.
void add_twice(StepTimes& times, int n_rows, double seconds) {
  times.add(n_rows, seconds);
  times.add(n_rows, seconds);
}

// What it says is why: a guess that would have paid was not left out because it costs too much.
TEST(DraftPlanner, SaysWhyNothingIsVerified) {
  StepTimes times;
  add_twice(times, 1, 1.0);
  add_twice(times, 8, 2.0);
  const RoundCosts costs{.times = times, .draft_seconds = 0.1};
  const std::vector<DraftNode> good = chain({0.7, 0.7}), bad = chain({0.05, 0.05});
  DraftPlanner planner;
  EXPECT_EQ(planner.choose({.nodes = good}, costs), 0) << "nobody knows how often it is right";
  planner.finish_guess(1, costs);
  EXPECT_TRUE(planner.reason().starts_with("waiting: ")) << planner.reason();
  EXPECT_EQ(planner.choose({.nodes = bad, .trusted = true}, costs), 0);
  EXPECT_TRUE(planner.reason().starts_with("off: of 2 guesses 0.1 would be right")) << planner.reason();
}

TEST(SteadyTime, FollowsWhatIsUsual) {
  SteadyTime time;
  for (const double seconds : {9.0, 1.1, 1.0, 7.0, 1.2}) time.add(seconds);
  EXPECT_NEAR(time.seconds(), 1.0, 0.03) << "the shortest of the first, little of the others";
  time.add(500.0);
  EXPECT_LT(time.seconds(), 1.06) << "one disturbed step";
  for (int i = 0; i < 60; ++i) time.add(2.0);
  EXPECT_NEAR(time.seconds(), 2.0, 0.1);
}

TEST(StepTimes, LiesBetweenWhatWasMeasured) {
  StepTimes times;
  EXPECT_EQ(times.at(3), 0.0);
  times.add(1, 1.0);
  EXPECT_EQ(times.at(1), 1.0);
  EXPECT_GT(times.at(8), 1.0);
  add_twice(times, 9, 4.0);
  EXPECT_DOUBLE_EQ(times.at(5), 2.5);
}

TEST(StepTimes, ExpectsOfUnknownRowsWhatPromptsTook) {
  StepTimes times;
  times.add(1, 1.0);
  times.add_prompt(10, 1.0);
  EXPECT_DOUBLE_EQ(times.at(5), 1.0 + 4 * 0.15) << "a short prompt says nothing";
  times.add_prompt(100, 40.0);
  EXPECT_DOUBLE_EQ(times.at(5), 1.0 + 4 * 0.2) << "half of a prompt's row: more rows share more";
  EXPECT_DOUBLE_EQ(times.at_most(5), 1.0 + 4 * 0.4);
  StepTimes cold;
  cold.add(1, 1.0);
  cold.add_prompt(100, 300.0);
  EXPECT_DOUBLE_EQ(cold.at_most(5), 1.0 + 4 * 0.5) << "a disturbed prompt does not forbid to try";
  add_twice(times, 5, 2.0);
  EXPECT_DOUBLE_EQ(times.at(9), 2.5) << "half of the last rows that were measured";
  EXPECT_DOUBLE_EQ(times.at_most(9), 3.0);
}

TEST(StepTimes, HalfBelievesWhatItSawOnceOrLongAgo) {
  StepTimes times;
  add_twice(times, 1, 1.0);
  add_twice(times, 4, 2.0);
  times.add(7, 9.5);
  EXPECT_DOUBLE_EQ(times.at(7), 0.5 * 9.5 + 0.5 * 2.5);
  EXPECT_DOUBLE_EQ(times.at_most(7), 9.5);
  times.add(7, 3.0);
  EXPECT_DOUBLE_EQ(times.at(7), 3.0);
  for (int i = 0; i < 200; ++i) times.add(1, 1.0);
  EXPECT_DOUBLE_EQ(times.at(7), 0.5 * 3.0 + 0.5 * 2.5);
}

// One step of four rows took longer than eight rows ever did: no verdict on four rows, and none on nine.
TEST(StepTimes, BelievesNoSmallStepThatTookLongerThanALargeOne) {
  StepTimes times;
  add_twice(times, 1, 1.0);
  add_twice(times, 8, 4.5);
  times.add(4, 40.0);
  EXPECT_DOUBLE_EQ(times.at(4), 0.5 * 2.5 + 0.5 * 4.5);
  EXPECT_DOUBLE_EQ(times.at(9), 4.75);
}

TEST(StepTimes, KnowsTheSizesOfSteps) {
  constexpr int kSizes[] = {1, 2, 4, 8};
  StepTimes times(kSizes);
  add_twice(times, 1, 1.0);
  add_twice(times, 6, 2.0);
  EXPECT_EQ(times.at(5), 2.0);
  EXPECT_EQ(times.at(8), 2.0);
  EXPECT_TRUE(times.is_known(7));
  EXPECT_EQ(times.most_rows(), 8);
}

// Three more rows are in the same recorded step, three more of each of five sequences are not.
TEST(RoundCosts, DivideWhatSeveralTakeTogether) {
  constexpr int kSizes[] = {8, 16, 32};
  StepTimes times(kSizes);
  add_twice(times, 8, 2.0);
  add_twice(times, 16, 3.0);
  add_twice(times, 32, 4.5);
  const RoundCosts alone{.times = times, .n_other = 4}, all{.times = times, .n_other = 4, .n_drafting = 5};
  EXPECT_DOUBLE_EQ(alone.more_rows(3), 0.0);
  EXPECT_DOUBLE_EQ(all.more_rows(3), (4.5 - 2.0) / 5);
  // What they pay is what the step took: one verified seven nodes, another one, and three none.
  const RoundCosts many{.times = times, .n_other = 4, .n_drafted = 1},
      few{.times = times, .n_other = 4, .n_drafted = 7};
  EXPECT_DOUBLE_EQ(many.took(7) + few.took(1), 3.0 - 2.0);
  EXPECT_DOUBLE_EQ(many.took(7), 7 * few.took(1));
}

StepTimes staircase(std::mt19937& random) {
  StepTimes times;
  double t = 1.0;
  for (int rows = 1; rows <= 12; ++rows) {
    add_twice(times, rows, t);
    if (random() % 3 == 0) t += static_cast<double>(random() % 100) / 60.0;
  }
  return times;
}

TEST(DraftPlanner, TakesTheBestRateOfAll) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const StepTimes times = staircase(random);
    DraftPlanner planner;
    const std::vector<DraftNode> nodes = chain({0.95, 0.9, 0.9, 0.8, 0.8, 0.7, 0.6, 0.5});
    const double draft = static_cast<double>(random() % 100) / 100.0;
    const RoundCosts costs{.times = times, .draft_seconds = draft, .n_other = 0};
    int want = 0;
    double best = 0.0, expected = 0.0;
    for (int n = 1; n <= 8; ++n) {
      expected += std::exp(static_cast<double>(nodes[static_cast<size_t>(n) - 1].score));
      const double rate = (1.0 + expected) / (draft + times.at(n + 1)), more = times.at(n + 1) - times.at(1);
      if (expected * times.at(1) <= 1.08 * more || rate <= best) continue;
      // Too much at once for the account.
      if (more - 0.25 * expected * times.at(1) > 2.5 + 0.25 * (4.0 - draft)) continue;
      best = rate;
      want = n;
    }
    EXPECT_EQ(planner.choose({.nodes = nodes, .trusted = true}, costs), want);
  }
}

// As where a text repeats itself.
TEST(DraftPlanner, TakesALongDraftThatItIsSureOf) {
  StepTimes times;
  add_twice(times, 1, 1.0);
  DraftPlanner planner;
  std::vector<DraftNode> nodes;
  for (int depth = 1; depth <= 48; ++depth)
    nodes.push_back({.token = 1,
                     .parent = depth - 1,
                     .depth = depth,
                     .rank = 0,
                     .score = -0.01f * static_cast<float>(depth)});
  int n = 0;
  for (int round = 0; round < 8; ++round) {
    const RoundCosts costs{.times = times, .draft_seconds = 0.01, .n_other = 0};
    n = planner.choose({.nodes = nodes, .trusted = true}, costs);
    times.add(1 + n, 1.0 + 0.05 * n);
    planner.finish_round(n, n, costs);
  }
  EXPECT_EQ(n, 48);
}

// A drafter whose chains are right for `right` tokens, and which says 0.9 of each; what it costs, in plain
// tokens, beyond those that were written.
double lost_tokens(int right, double draft, double row, int n_tokens, bool trusted, DraftPlanner& planner) {
  StepTimes times;
  for (int rows = 1; rows <= 16; ++rows) add_twice(times, rows, 1.0 + (rows - 1) * row);
  const RoundCosts costs{.times = times, .draft_seconds = draft, .n_other = 0};
  const std::vector<DraftNode> nodes = chain({0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9});
  double time = 0.0;
  int written = 0, guess = -1, observed = 0;
  while (written < n_tokens) {
    int n = 0;
    if (planner.wants_draft(costs)) {
      time += draft;
      n = planner.choose({.nodes = nodes, .trusted = trusted || observed >= 4}, costs);
      guess = n == 0 ? 0 : -1;
    }
    const int accepted = std::min(n, right);
    time += times.at(1 + n);
    written += 1 + accepted;
    observed += n > 0 ? accepted + 1 : 0;
    planner.finish_round(n, accepted, costs);
    if (guess < 0) continue;
    ++observed;
    if (guess < right && guess < 4) {
      ++guess;
    } else {
      planner.finish_guess(guess, costs);
      guess = -1;
    }
  }
  return time - written;
}

TEST(DraftPlanner, LosesAlmostNothingToADrafterThatIsAlwaysWrong) {
  for (const double draft : {0.0, 0.3, 0.8, 2.0})
    for (const double row : {0.05, 0.3, 0.8})
      for (const bool trusted : {false, true}) {
        DraftPlanner planner;
        EXPECT_LE(lost_tokens(0, draft, row, 1000, trusted, planner), 0.02 * 1000 + draft + 8 * row)
            << draft << " " << row << " " << trusted;
      }
}

TEST(DraftPlanner, LeavesShortAnswersAloneWhereNobodyAskedForIt) {
  for (const int n : {10, 30, 60, 100, 300}) {
    DraftPlanner wrong(true), right(true);
    EXPECT_LE(lost_tokens(0, 1.4, 0.4, n, false, wrong), 0.03 * n + 3 * 0.4);
    EXPECT_LE(lost_tokens(7, 1.4, 0.4, n, false, right), n < 100 ? 0.03 * n : -0.1 * n) << n;
  }
  DraftPlanner planner(true);
  EXPECT_EQ(lost_tokens(7, 1.4, 0.4, 40, false, planner), 0.0);
  EXPECT_EQ(planner.reason(), "waiting: the answer is short");
}

TEST(DraftPlanner, KnowsMoreAfterADraftThatTookNoTime) {
  const std::vector<DraftNode> sure = chain({0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95}),
                               unsure = chain({0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2});
  StepTimes times;
  for (int rows = 1; rows <= 8; ++rows) add_twice(times, rows, 1.0 + (rows - 1) * 0.37);
  const RoundCosts costs{.times = times, .draft_seconds = 1.4, .n_other = 0};
  for (const bool cautious : {false, true}) {
    DraftPlanner right(cautious), wrong(cautious);
    EXPECT_EQ(right.choose({.nodes = sure, .trusted = true, .free = true}, costs), 7);
    right.finish_round(7, 7, costs);
    EXPECT_TRUE(right.wants_draft(costs));
    // Nothing was spent, and nothing is.
    EXPECT_EQ(wrong.choose({.nodes = unsure, .free = true}, costs), 0);
    wrong.finish_guess(0, costs);
    for (int i = 0; i < 40; ++i) {
      EXPECT_FALSE(wrong.wants_draft(costs)) << i;
      wrong.finish_round(0, 0, costs);
    }
  }
}

TEST(DraftPlanner, DraftsWhereItPays) {
  DraftPlanner planner;
  EXPECT_LT(lost_tokens(7, 0.5, 0.2, 200, false, planner), -120.0);
  EXPECT_EQ(planner.state(), DraftPlanner::State::On);
  EXPECT_EQ(planner.reason(), "on");
  // A text that it knows nothing of, and one that it knows again.
  // It may lose six rounds of seven nodes that were paid for by gains, the credit, and two percent.
  EXPECT_LT(lost_tokens(0, 0.5, 0.2, 300, true, planner), 6 * (0.5 + 7 * 0.2) + 2 + 0.02 * 300);
  EXPECT_EQ(planner.state(), DraftPlanner::State::Off);
  EXPECT_LT(lost_tokens(7, 0.5, 0.2, 400, true, planner), -100.0);
}

TEST(Calibration, LearnsHowSureADrafterIs) {
  Calibration calibration;
  std::mt19937 random(1);
  const std::vector<float> said = {std::log(0.9f), std::log(0.05f), std::log(0.02f)};
  for (int i = 0; i < 2000; ++i) {
    const auto draw = random() % 10;
    calibration.observe(1, said, draw < 6 ? 0 : draw < 8 ? 1 : -1);
  }
  std::vector<float> adjusted = said;
  calibration.adjust(1, adjusted);
  EXPECT_NEAR(std::exp(adjusted[0]), 0.6, 0.1);
  EXPECT_GT(std::exp(adjusted[1]), 0.08);
  EXPECT_GT(adjusted[0], adjusted[1]);
  EXPECT_GT(adjusted[1], adjusted[2]);
  EXPECT_EQ(calibration.n_observed(), 2000);
}

TEST(Calibration, LearnsHowOftenADepthIsRight) {
  Calibration calibration;
  const std::vector<float> said = {std::log(0.8f)};
  for (int i = 0; i < 300; ++i) {
    calibration.observe(1, said, 0);
    calibration.observe(2, said, i % 2 == 0 ? 0 : -1);
  }
  std::vector<float> first = said, second = said;
  calibration.adjust(1, first);
  calibration.adjust(2, second);
  EXPECT_GT(std::exp(first[0]), 0.9);
  EXPECT_NEAR(std::exp(second[0]), 0.5, 0.08);
}

}  // namespace
}  // namespace thermo
