#include "server/live_view.h"

#include <gtest/gtest.h>

#include "server/experts_view.h"

namespace thermo {
namespace {

TEST(LiveView, ShowsWhatTheCardTells) {
  EXPECT_EQ(gpu_json(std::nullopt), Json::array());
  GpuReading reading;
  reading.utilization = 0.5;
  reading.memory_used_bytes = 600;
  const Json shown = gpu_json(reading);
  ASSERT_EQ(shown.size(), 1u);
  EXPECT_EQ(shown[0]["util"], 0.5);
  EXPECT_EQ(shown[0]["mem_used"], 600);
  EXPECT_TRUE(shown[0]["power_w"].is_null());  // not 0: nobody knows
}

TEST(ExpertsView, PacksFourTiersIntoAByte) {
  const auto at = [](ExpertTier tier) { return ExpertPlace{.tier = tier}; };
  EXPECT_EQ(tier_bits({}), std::vector<uint8_t>{});
  const ExpertPlace places[] = {at(ExpertTier::Device), at(ExpertTier::Host), at(ExpertTier::File),
                                at(ExpertTier::Moving), at(ExpertTier::Host)};
  EXPECT_EQ(tier_bits(places), (std::vector<uint8_t>{0b11000110, 0b01}));
}

TEST(LoadHistory, KnowsWindowsOfUsesAndLayers) {
  LoadHistory history;
  EXPECT_TRUE(history.stirs(0));
  EXPECT_EQ(history.uses_before(60.0), nullptr);
  EXPECT_TRUE(history.layer_hits(60.0).empty());
  const LoadHistory::Clock::time_point start{};
  for (uint64_t i = 0; i < 10; ++i) {
    LoadHistory::Sample sample;
    sample.time = start + std::chrono::seconds(i);
    sample.n_steps = std::min<uint64_t>(i, 7);
    sample.experts.n_uses = 10 * i;
    sample.experts.hot_uses = 5 * i;
    sample.uses = std::make_shared<const std::vector<uint64_t>>(1, i);
    sample.layers = {{.hot = 3 * i, .all = 4 * i}, {}};
    sample.busy_threads = static_cast<int>(i);
    if (i >= 7) sample.memory_bytes = 1000 * i;
    history.add(sample);
  }
  EXPECT_EQ(history.uses_before(1.0)->front(), 8u);
  EXPECT_EQ(history.uses_before(60.0)->front(), 0u);
  EXPECT_EQ(history.window(5.0).n_uses, 50u);
  EXPECT_EQ(history.window(5.0).hot_ratio, 0.5);
  EXPECT_EQ(history.layer_hits(5.0), (std::vector<std::optional<double>>{0.75, std::nullopt}));
  EXPECT_EQ(history.newest().busy_threads, 9);
  EXPECT_EQ(history.window(1.0).memory_bytes_per_s, 1000.0);
  EXPECT_EQ(history.window(5.0).memory_bytes_per_s, std::nullopt);  // nobody looked at the beginning
  EXPECT_FALSE(history.stirs(7));
  EXPECT_TRUE(history.stirs(8));
}

}  // namespace
}  // namespace thermo
