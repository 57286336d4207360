#include "experts/lane_split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <random>

namespace thermo {
namespace {

// Two lanes of a machine; gives samples with some noise.
struct Machine {
  float cpu_base, cpu_slope, gpu_base, gpu_slope;
  float noise = 0.1f;
  float outlier_chance = 0.0f;

  float together = 1.0f;  // how much slower both lanes are when both are used

  float cpu(int n) const { return n == 0 ? 0.0f : cpu_base + cpu_slope * static_cast<float>(n); }
  float gpu(int n) const { return gpu_base + gpu_slope * static_cast<float>(n); }
  float step(int n_cold, int f) const {
    return std::max(cpu(n_cold - f), gpu(f)) * (f > 0 && f < n_cold ? together : 1.0f);
  }
  float best(int n_cold) const {
    float us = step(n_cold, 0);
    for (int f = 1; f <= n_cold; ++f) us = std::min(us, step(n_cold, f));
    return us;
  }
};

class Simulation {
 public:
  explicit Simulation(uint32_t seed, int max_cold = 8) : random_(seed), max_cold_(max_cold) {}

  // Runs tokens of 40 layers; returns the time lost against the best possible shares, as a share of that
  // time.
  double run(LaneSplit& split, const Machine& machine, int n_tokens, bool link_busy = false) {
    double took = 0.0, best = 0.0;
    std::array<int32_t, 65> fetch_of{};
    for (int t = 0; t < n_tokens; ++t) {
      split.fill(fetch_of, link_busy);
      for (int layer = 0; layer < 40; ++layer) {
        const int n_cold = static_cast<int>(random_() % static_cast<uint32_t>(max_cold_ + 1));
        const int f = fetch_of[static_cast<size_t>(n_cold)];
        if (n_cold > f) split.cpu_took(n_cold - f, sample(machine.cpu(n_cold - f), machine));
        split.gpu_took(f, sample(machine.gpu(f), machine));
        if (n_cold > 0) split.layer_took(n_cold, f, sample(machine.step(n_cold, f), machine));
        took += machine.step(n_cold, f);
        best += machine.best(n_cold);
      }
    }
    return took / best - 1.0;
  }

 private:
  float sample(float us, const Machine& machine) {
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    if (uniform(random_) < machine.outlier_chance) return 5000.0f;
    return us * (1.0f + machine.noise * (2.0f * uniform(random_) - 1.0f));
  }

  std::mt19937 random_;
  int max_cold_;
};

TEST(LaneSplit, StartsBetweenTheLanes) {
  const LaneSplit split;
  EXPECT_EQ(split.fetch(0), 0);
  EXPECT_EQ(split.fetch(-1), 0);
  EXPECT_EQ(split.fetch(1), 0);  // 26 us on the processor, 52 on the device
  EXPECT_EQ(split.fetch(8), 2);  // 126 and 92; three would be 132
  EXPECT_FLOAT_EQ(split.cpu_us(0), 0.0f);
  EXPECT_NEAR(split.cpu_us(3), 66.0f, 0.01f);
  EXPECT_NEAR(split.gpu_us(0), 12.0f, 0.01f);
}

TEST(LaneSplit, IsNeverSlowerThanTheBetterLaneByItsEstimates) {
  std::mt19937 random(3);
  LaneSplit split;
  for (int i = 0; i < 2000; ++i) {
    split.cpu_took(static_cast<int>(random() % 20), static_cast<float>(random() % 500));
    split.gpu_took(static_cast<int>(random() % 20), static_cast<float>(random() % 500));
    const int n = static_cast<int>(random() % 65);
    const int f = split.fetch(n);
    ASSERT_GE(f, 0);
    ASSERT_LE(f, n);
    const float chosen = std::max(split.cpu_us(n - f), split.gpu_us(f));
    ASSERT_LE(chosen, std::max(split.cpu_us(n), split.gpu_us(0)));
    ASSERT_LE(chosen, split.gpu_us(n));
  }
}

TEST(LaneSplit, LearnsEveryKindOfMachine) {
  const Machine machines[] = {
      {6, 20, 12, 40},     // as assumed
      {6, 4, 12, 40},      // a fast processor
      {6, 300, 12, 40},    // a slow one: all over the link
      {40, 25, 12, 40},    // a slow hand-off
      {6, 20, 12, 400},    // a slow link: all on the processor
      {6, 20, 150, 40},    // the device is busy with its own experts
      {6, 20, 12, 5},      // a fast link
      {500, 500, 12, 400}  // both slow
  };
  for (size_t i = 0; i < std::size(machines); ++i) {
    for (uint32_t seed = 0; seed < 5; ++seed) {
      LaneSplit split;
      Simulation simulation(seed);
      simulation.run(split, machines[i], 300);
      // One step in 64 tries a neighbour, which may cost a whole expert; the rest is noise.
      EXPECT_LT(simulation.run(split, machines[i], 640), 0.06) << "machine " << i << ", seed " << seed;
    }
  }
}

// Two lanes that take main memory from each other: by their own times they are better together, but they are
// not.
TEST(LaneSplit, SeesWhatTheLanesCostEachOther) {
  Machine machine{6, 20, 12, 40};
  machine.together = 1.8f;
  for (uint32_t seed = 0; seed < 5; ++seed) {
    LaneSplit split;
    Simulation simulation(seed);
    simulation.run(split, machine, 1000);
    EXPECT_LT(simulation.run(split, machine, 640), 0.06) << seed;
    EXPECT_EQ(split.fetch(6), 0);
  }
}

TEST(LaneSplit, FollowsAMachineThatChanges) {
  for (uint32_t seed = 0; seed < 5; ++seed) {
    LaneSplit split;
    Simulation simulation(seed);
    simulation.run(split, {6, 20, 12, 40}, 500);
    const Machine busy{6, 120, 12, 40};  // another program took the cores
    simulation.run(split, busy, 300);
    EXPECT_LT(simulation.run(split, busy, 640), 0.06) << seed;
    const Machine free{6, 10, 12, 40};
    simulation.run(split, free, 600);
    EXPECT_LT(simulation.run(split, free, 640), 0.06) << seed;
  }
}

TEST(LaneSplit, IsNotMovedByOutliers) {
  for (uint32_t seed = 0; seed < 5; ++seed) {
    LaneSplit split;
    Simulation simulation(seed);
    Machine machine{6, 20, 12, 40};
    machine.outlier_chance = 0.02f;
    simulation.run(split, machine, 300);
    EXPECT_LT(simulation.run(split, machine, 640), 0.08) << seed;
  }
  LaneSplit split;
  for (int i = 0; i < 100; ++i) split.cpu_took(4, 86.0f);
  split.cpu_took(4, 1e9f);
  EXPECT_LT(split.cpu_us(4), 100.0f);
}

TEST(LaneSplit, IgnoresTimesThatCannotBe) {
  LaneSplit split;
  const int before = split.fetch(8);
  for (int i = 0; i < 100; ++i) {
    split.cpu_took(3, -5.0f);
    split.cpu_took(0, 1e6f);
    split.cpu_took(-1, 1e6f);
    split.gpu_took(-1, 1e6f);
    split.gpu_took(2, std::numeric_limits<float>::quiet_NaN());
    split.gpu_took(2, std::numeric_limits<float>::infinity());
  }
  EXPECT_EQ(split.fetch(8), before);
}

TEST(LaneSplit, SharesInProportionBeyondItsTable) {
  LaneSplit split(8);
  EXPECT_EQ(split.fetch(8), 2);
  EXPECT_EQ(split.fetch(16), 4);
  EXPECT_EQ(split.fetch(800), 200);
  for (int i = 0; i < 200; ++i) split.cpu_took(80, 10000.0f);
  EXPECT_NEAR(split.cpu_us(8), 1000.0f, 10.0f);
  EXPECT_EQ(split.fetch(8), 6);  // 252 us on the device, 254 on the processor
}

// The processor lost half of its cores for a moment; while everything is fetched, it never shows that they
// are back.
TEST(LaneSplit, FindsOutSoonThatASlowMomentIsOver) {
  for (uint32_t seed = 0; seed < 5; ++seed) {
    LaneSplit split;
    Simulation simulation(seed);
    Machine machine{7, 15, 12, 45};
    machine.together = 1.5f;
    simulation.run(split, machine, 200);
    Machine slow = machine;
    slow.cpu_slope = 60;
    simulation.run(split, slow, 30);
    EXPECT_LT(simulation.run(split, machine, 128), 0.20) << seed;
  }
}

// The time lost here is against shares that a busy link does not allow.
TEST(LaneSplit, LeavesABusyLinkAloneUnlessTheProcessorIsSlowerByFar) {
  LaneSplit split;
  Simulation simulation(4);
  std::array<int32_t, 65> fetch_of{};
  const auto n_fetching = [&] {
    int n = 0;
    for (int i = 0; i < 64; ++i) {
      split.fill(fetch_of, true);
      for (int cold = 1; cold <= 8; ++cold) {
        EXPECT_TRUE(fetch_of[static_cast<size_t>(cold)] == 0 || fetch_of[static_cast<size_t>(cold)] == cold);
        n += fetch_of[static_cast<size_t>(cold)] != 0;
      }
    }
    return n;
  };
  const Machine strong{7, 30, 12, 40}, weak{7, 120, 12, 40};
  simulation.run(split, strong, 100, true);
  EXPECT_EQ(n_fetching(), 0);
  simulation.run(split, weak, 100, true);
  EXPECT_GT(n_fetching(), 0);
  EXPECT_LT(simulation.run(split, weak, 200, true), 0.6);  // the processor alone: 1.7
  simulation.run(split, strong, 100, true);
  EXPECT_EQ(n_fetching(), 0);
}

TEST(LaneSplit, TriesANeighbourNowAndThen) {
  LaneSplit split;
  std::array<int32_t, 65> usual{}, table{};
  split.fill(usual);
  int n_other = 0;
  for (int i = 1; i < 4 * LaneSplit::kExploreEvery; ++i) {
    split.fill(table);
    if (table == usual) continue;
    ++n_other;
    for (size_t n = 0; n < table.size(); ++n) {
      if (table[n] != 0) {  // the processor alone is tried more often
        EXPECT_LE(std::abs(table[n] - usual[n]), 1);
      }
      EXPECT_GE(table[n], 0);
      EXPECT_LE(table[n], static_cast<int32_t>(n));
    }
  }
  EXPECT_EQ(n_other, 4 + 4 * LaneSplit::kExploreEvery / LaneSplit::kAloneEvery);
}

TEST(LaneSplit, IsTheSameForTheSameSamples) {
  LaneSplit a, b;
  Simulation(9).run(a, {20, 30, 40, 50}, 100);
  Simulation(9).run(b, {20, 30, 40, 50}, 100);
  for (int n = 0; n <= 64; ++n) EXPECT_EQ(a.fetch(n), b.fetch(n));
}

}  // namespace
}  // namespace thermo
