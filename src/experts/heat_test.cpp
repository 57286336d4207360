#include "experts/heat.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace thermo {
namespace {

ExpertCatalog catalog_of(const std::vector<int>& n_experts) {
  ExpertCatalog catalog;
  for (int n : n_experts) {
    ExpertLayer layer;
    layer.experts.resize(static_cast<size_t>(n));
    catalog.layers.push_back(layer);
  }
  return catalog;
}

TEST(HeatMap, IsEmptyUntilTheFirstUse) {
  HeatMap none;
  EXPECT_EQ(none.n_layers(), 0);
  EXPECT_TRUE(none.empty());

  HeatMap heat(catalog_of({4, 0, 4}));
  EXPECT_EQ(heat.n_layers(), 3);
  EXPECT_EQ(heat.n_expert(0), 4);
  EXPECT_EQ(heat.n_expert(1), 0);
  EXPECT_TRUE(heat.empty());
  heat.advance(10);
  EXPECT_TRUE(heat.empty());
  heat.use(2, 3);
  EXPECT_FALSE(heat.empty());
}

TEST(HeatMap, CountsAUseAsOneAndAHalfAfterAHalfLife) {
  HeatMap heat(catalog_of({4}), 100.0);
  heat.use(0, 1);
  heat.use(0, 2, 3.0f);
  EXPECT_FLOAT_EQ(heat.heat(0, 1), 1.0f);
  EXPECT_FLOAT_EQ(heat.heat(0, 2), 3.0f);
  EXPECT_EQ(heat.heat(0, 0), 0.0f);
  for (int i = 0; i < 100; ++i) heat.advance(1);
  EXPECT_NEAR(heat.heat(0, 1), 0.5f, 1e-5f);
  EXPECT_NEAR(heat.heat(0, 2), 1.5f, 1e-5f);
  heat.use(0, 1);
  EXPECT_NEAR(heat.heat(0, 1), 1.5f, 1e-5f);
}

TEST(HeatMap, CountsUsesThatDoNotFade) {
  HeatMap heat(catalog_of({2, 0, 1}), 1.0);
  heat.use(0, 1, 3.0f);
  heat.advance(1000);
  heat.use(0, 1);
  heat.use(2, 0);
  EXPECT_EQ(heat.uses(), (std::vector<uint64_t>{0, 4, 1}));
  heat.set({1.0f, 0.0f, 0.0f}, 5);  // what a file says is no use
  EXPECT_EQ(heat.uses(), (std::vector<uint64_t>{0, 4, 1}));
}

// The slow definition: every use remembered with its time.
TEST(HeatMap, AgreesWithTheSumOverAllUsesForAnyNumberOfTokens) {
  HeatMap heat(catalog_of({3}), 7.0);  // 10000 tokens are 1400 half-lives: the unit is brought back often
  double expected[3] = {0, 0, 0};
  for (int t = 0; t < 10000; ++t) {
    const int expert = (t * t) % 3;
    heat.use(0, expert, static_cast<float>(1 + t % 2));
    expected[expert] += 1 + t % 2;
    const int n = 1 + t % 3;
    heat.advance(n);
    for (double& e : expected) e *= std::exp2(-n / 7.0);
    for (int e = 0; e < 3; ++e) ASSERT_NEAR(heat.heat(0, e), expected[e], 1e-3 * expected[e] + 1e-12) << t;
  }
}

TEST(HeatMap, ForgetsEverythingInALongStepWithoutOverflow) {
  HeatMap heat(catalog_of({2}), 1.0);
  heat.use(0, 0, 1000.0f);
  heat.advance(1000000);
  EXPECT_EQ(heat.heat(0, 0), 0.0f);
  heat.use(0, 1);
  EXPECT_FLOAT_EQ(heat.heat(0, 1), 1.0f);
}

TEST(HeatMap, KnowsHowLongAgoAnExpertWasUsed) {
  HeatMap heat(catalog_of({2, 2}));
  EXPECT_EQ(heat.age(0, 0), std::numeric_limits<uint64_t>::max());
  heat.use(0, 0);
  EXPECT_EQ(heat.age(0, 0), 0u);
  heat.advance(5);
  EXPECT_EQ(heat.age(0, 0), 5u);
  heat.use(0, 0);
  heat.advance(1);
  EXPECT_EQ(heat.age(0, 0), 1u);
  EXPECT_EQ(heat.n_tokens(), 6u);
}

TEST(HeatMap, ReturnsToTheSameHeatFromItsValues) {
  HeatMap heat(catalog_of({3, 0, 2}), 50.0);
  heat.use(0, 0, 2.0f);
  heat.use(2, 1);
  heat.advance(77);
  heat.use(0, 2);
  const std::vector<float> values = heat.values();
  ASSERT_EQ(values.size(), 5u);

  HeatMap again(catalog_of({3, 0, 2}), 50.0);
  again.set(values, heat.n_tokens());
  EXPECT_FALSE(again.empty());
  EXPECT_EQ(again.n_tokens(), 77u);
  for (int layer : {0, 2})
    for (int e = 0; e < heat.n_expert(layer); ++e)
      EXPECT_EQ(again.heat(layer, e), heat.heat(layer, e)) << layer << " " << e;
  EXPECT_EQ(again.age(0, 0), 77u);
  EXPECT_EQ(again.age(0, 1), std::numeric_limits<uint64_t>::max());
  again.advance(50);
  EXPECT_NEAR(again.heat(0, 2), 0.5f, 1e-5f);

  again.set(std::vector<float>(5, 0.0f), 0);
  EXPECT_TRUE(again.empty());
}

}  // namespace
}  // namespace thermo
