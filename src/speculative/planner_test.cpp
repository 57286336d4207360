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

TEST(DraftPlanner, TakesTheBestRateOfAll) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    StepTimes times;
    double t = 1.0;
    for (int rows = 1; rows <= 12; ++rows) {
      times.add(rows, t);
      if (random() % 3 == 0) t += static_cast<double>(random() % 100) / 60.0;  // a staircase
    }
    DraftPlanner planner;
    planner.finish_round(8, 1);  // so that eight nodes are allowed
    const std::vector<DraftNode> nodes = chain({0.95, 0.9, 0.9, 0.8, 0.8, 0.7, 0.6, 0.5});
    const double draft = static_cast<double>(random() % 100) / 100.0;
    int want = 0;
    double best = 1.0 / times.at(1) * 1.04, expected = 0.0;
    for (int n = 1; n <= 8; ++n) {
      expected += std::exp(static_cast<double>(nodes[static_cast<size_t>(n) - 1].score));
      if ((1.0 + expected) / (draft + times.at(n + 1)) > best) {
        best = (1.0 + expected) / (draft + times.at(n + 1));
        want = n;
      }
    }
    EXPECT_EQ(planner.choose(nodes, times, draft, 0), want);
  }
}

TEST(DraftPlanner, StopsAskingADrafterThatIsAlwaysWrong) {
  DraftPlanner planner;
  int asked = 0;
  for (int token = 0; token < 1000; ++token) {
    const bool asks = planner.wants_draft();
    asked += asks;
    planner.finish_round(asks ? 4 : 0, 0);
  }
  EXPECT_LE(asked, 10);
  // And comes back when it is right again.
  while (!planner.wants_draft()) planner.finish_round(0, 0);
  planner.finish_round(4, 3);
  EXPECT_EQ(planner.state(), DraftPlanner::State::On);
}

TEST(Calibration, LearnsHowOftenADepthIsAccepted) {
  Calibration calibration;
  EXPECT_NEAR(calibration.adjusted(1, -0.5f), -0.5f, 1e-6);
  for (int i = 0; i < 300; ++i) {
    calibration.observe(1, 0.9, i % 2 == 0);
    calibration.observe(2, 0.5, true);
  }
  EXPECT_NEAR(std::exp(calibration.adjusted(1, std::log(0.9f))), 0.5, 0.05);
  EXPECT_GT(std::exp(calibration.adjusted(2, std::log(0.5f))), 0.9);
}

}  // namespace
}  // namespace thermo
