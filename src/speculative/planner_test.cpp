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

TEST(StepTimes, LiesBetweenWhatWasMeasured) {
  StepTimes times;
  EXPECT_EQ(times.at(3), 0.0);
  times.add(1, 1.0);
  EXPECT_EQ(times.at(1), 1.0);
  EXPECT_GT(times.at(8), 1.0);
  times.add(9, 4.0);
  EXPECT_DOUBLE_EQ(times.at(5), 2.5);
  times.add(9, 500.0);
  EXPECT_LT(times.at(9), 8.0) << "one disturbed step";
}

TEST(StepTimes, ExpectsOfUnknownRowsWhatPromptsTook) {
  StepTimes times;
  times.add(1, 1.0);
  times.add_prompt(10, 1.0);
  EXPECT_DOUBLE_EQ(times.at(5), 1.0 + 4 * 0.15) << "a short prompt says nothing";
  times.add_prompt(100, 40.0);
  EXPECT_DOUBLE_EQ(times.at(5), 1.0 + 4 * 0.4);
  StepTimes cold;
  cold.add(1, 1.0);
  cold.add_prompt(100, 300.0);
  EXPECT_DOUBLE_EQ(cold.at(5), 1.0 + 4 * 0.5) << "a disturbed prompt does not forbid to try";
  times.add(5, 2.0);
  EXPECT_DOUBLE_EQ(times.at(9), 3.0) << "as the last rows that were measured";
}

StepTimes staircase(std::mt19937& random) {
  StepTimes times;
  double t = 1.0;
  for (int rows = 1; rows <= 12; ++rows) {
    times.add(rows, t);
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
      const double rate = (1.0 + expected) / (draft + times.at(n + 1));
      if (expected * times.at(1) <= 1.04 * (times.at(n + 1) - times.at(1)) || rate <= best) continue;
      best = rate;
      want = n;
    }
    EXPECT_EQ(planner.choose(nodes, costs, true), want);
  }
}

// A drafter whose chains are right for `right` tokens, and which says 0.9 of each; what it costs, in plain
// tokens, beyond those that were written.
double lost_tokens(int right, double draft, double row, int n_tokens, bool trusted, DraftPlanner& planner) {
  StepTimes times;
  for (int rows = 1; rows <= 16; ++rows) times.add(rows, 1.0 + (rows - 1) * row);
  const RoundCosts costs{.times = times, .draft_seconds = draft, .n_other = 0};
  const std::vector<DraftNode> nodes = chain({0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9});
  double time = 0.0;
  int written = 0, guess = -1, observed = 0;
  while (written < n_tokens) {
    int n = 0;
    if (planner.wants_draft(costs)) {
      time += draft;
      n = planner.choose(nodes, costs, trusted || observed >= 4);
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

// The speed with a drafter of 15 tokens that is right with probability p for each, and says so, over the
// speed without, at the times of 35B-A3B on a large card (ms): the mean of some texts of 512 tokens. The
// planner learns everything from the first round on.
double speed_with(double p) {
  const auto step_time = [](int rows) {  // steps are recorded for so many rows
    for (const auto& [most, ms] : std::vector<std::pair<int, double>>{
             {1, 1.44}, {2, 2.63}, {4, 2.98}, {8, 3.76}, {16, 5.37}, {32, 7.30}, {64, 10.3}})
      if (rows <= most) return ms;
    return 0.0;
  };
  constexpr int kTexts = 40, kTokens = 512, kDepths = 15;
  constexpr double kDraft = 1.1;
  const std::vector<float> said = {static_cast<float>(std::log(p))};
  std::mt19937 random(7);
  double time = 0.0;
  int all = 0;
  for (int text = 0; text < kTexts; ++text) {
    std::vector<bool> right;
    for (int i = 0; i < kTokens + 64; ++i) right.push_back(static_cast<double>(random() % 10000) < p * 10000);
    StepTimes times;
    SteadyTime draft;
    Calibration calibration;
    DraftPlanner planner;
    const auto trusted = [&] { return calibration.n_observed() >= 4; };
    int written = 0, guess = -1;
    while (written < kTokens) {
      int n = 0;
      const auto costs = [&] { return RoundCosts{times, draft.seconds(), 0}; };
      if (times.is_known(1) && planner.wants_draft(costs())) {
        time += kDraft;
        draft.add(kDraft, times.at(1));
        std::vector<DraftNode> nodes;
        float score = 0.0f;
        for (int depth = 1; depth <= kDepths; ++depth) {
          std::vector<float> adjusted = said;
          calibration.adjust(depth, adjusted);
          score += adjusted[0];
          nodes.push_back({.token = 1, .parent = depth - 1, .depth = depth, .rank = 0, .score = score});
        }
        n = planner.choose(nodes, costs(), trusted());
        guess = n == 0 ? 0 : -1;
      }
      int accepted = 0;
      while (accepted < n && right[static_cast<size_t>(written + accepted)]) ++accepted;
      for (int depth = 1; depth <= std::min(n, accepted + 1); ++depth)
        calibration.observe(depth, said, depth <= accepted ? 0 : -1);
      time += step_time(1 + n);
      times.add(1 + n, step_time(1 + n));
      const bool came_true = right[static_cast<size_t>(written)];
      written += 1 + accepted;
      planner.finish_round(n, accepted, costs());
      if (guess < 0) continue;
      calibration.observe(guess + 1, said, came_true ? 0 : -1);
      guess += came_true;
      if (came_true && guess < kDepths && (trusted() || guess < 4)) continue;
      planner.finish_guess(guess, costs());
      guess = -1;
    }
    all += written;
  }
  return all * step_time(1) / time;
}

TEST(DraftPlanner, FindsOutSoonWhetherItPays) {
  EXPECT_GT(speed_with(0.9), 1.5);
  EXPECT_GT(speed_with(0.8), 1.1);
  EXPECT_GT(speed_with(0.5), 0.975);
  EXPECT_GT(speed_with(0.01), 0.985);
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
