#include "cli/heat_view.h"

#include <gtest/gtest.h>

#include <numeric>

namespace thermo {
namespace {

TEST(HeatView, SeesEqualUseAsEqual) {
  const std::vector<float> heat(40, 2.5f);
  const LayerSpread spread = spread_of(heat);
  EXPECT_DOUBLE_EQ(spread.total, 100.0);
  EXPECT_EQ(spread.n_used, 40);
  EXPECT_NEAR(spread.top10, 0.10, 1e-12);
  EXPECT_NEAR(spread.top25, 0.25, 1e-12);
  EXPECT_NEAR(spread.top50, 0.50, 1e-12);
  EXPECT_NEAR(spread.entropy, 1.0, 1e-12);
}

TEST(HeatView, SeesOneExpertAsNoEntropy) {
  std::vector<float> heat(16, 0.0f);
  heat[11] = 3.0f;
  const LayerSpread spread = spread_of(heat);
  EXPECT_EQ(spread.n_used, 1);
  EXPECT_DOUBLE_EQ(spread.top10, 1.0);
  EXPECT_NEAR(spread.entropy, 0.0, 1e-12);
  EXPECT_EQ(by_heat(heat).front(), 11);
}

TEST(HeatView, HasNoSpreadWithoutUse) {
  for (const size_t n : {0u, 1u, 8u}) {
    const LayerSpread spread = spread_of(std::vector<float>(n, 0.0f));
    EXPECT_EQ(spread.total, 0.0);
    EXPECT_EQ(spread.top50, 0.0);
    EXPECT_EQ(spread.entropy, 0.0);
  }
}

TEST(HeatView, OrdersByHeatThenNumber) {
  const std::vector<float> heat = {1.0f, 3.0f, 0.0f, 3.0f, 2.0f};
  EXPECT_EQ(by_heat(heat), (std::vector<int32_t>{1, 3, 4, 0, 2}));
}

TEST(HeatView, ShadesByTheAverage) {
  Terminal terminal;
  // The average is 1.
  const std::vector<float> heat = {0.0f, 0.1f, 0.3f, 0.9f, 1.6f, 3.1f};
  EXPECT_EQ(heat_bar(heat, 80, terminal), "  .:*#");
  terminal.unicode = true;
  EXPECT_EQ(heat_bar(heat, 80, terminal), "  ░▒▓█");
  EXPECT_EQ(heat_bar(std::vector<float>(5, 0.0f), 80, terminal), "     ");
  EXPECT_EQ(heat_bar({}, 80, terminal), "");
  terminal.color_stdout = true;
  EXPECT_NE(heat_bar(heat, 80, terminal).find("\x1b[31m█\x1b[0m"), std::string::npos);
}

TEST(HeatView, GroupsNeighboursWhenThereIsNoRoom) {
  Terminal terminal;
  std::vector<float> heat(100, 0.0f);
  std::fill(heat.begin() + 50, heat.end(), 1.0f);
  EXPECT_EQ(heat_bar(heat, 10, terminal), "     *****");
  // Every expert is in exactly one cell, whatever the sizes.
  for (int n_cells = 1; n_cells < 120; ++n_cells)
    EXPECT_EQ(heat_bar(heat, n_cells, terminal).size(), static_cast<size_t>(std::min(n_cells, 100)));
}

}  // namespace
}  // namespace thermo
