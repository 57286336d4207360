#include "experts/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace thermo {
namespace {

struct LayerShape {
  int n_expert = 0;
  uint64_t expert_bytes = 0;
};

ExpertCatalog catalog_of(const std::vector<LayerShape>& shapes, int n_active) {
  ExpertCatalog catalog;
  catalog.n_active = n_active;
  for (const LayerShape& shape : shapes) {
    ExpertLayer layer;
    layer.experts.resize(static_cast<size_t>(shape.n_expert));
    layer.expert_bytes = shape.expert_bytes;
    catalog.layers.push_back(layer);
    catalog.n_expert = std::max(catalog.n_expert, shape.n_expert);
  }
  return catalog;
}

Placement place(const ExpertCatalog& catalog, const HeatMap* heat, uint64_t budget_bytes, int pin_layers = 0,
                int floor = 0) {
  PlacementInputs inputs;
  inputs.catalog = &catalog;
  inputs.heat = heat;
  inputs.budget_bytes = budget_bytes;
  inputs.pin_layers = pin_layers;
  inputs.floor = floor;
  return place_experts(inputs);
}

// A model of random shape, its heat (distinct values, spiky) and a budget between nothing and more than all.
struct Case {
  ExpertCatalog catalog;
  HeatMap heat;
  uint64_t budget = 0;
  int pin_layers = 0;

  explicit Case(uint32_t seed) {
    std::mt19937 random(seed);
    const auto upto = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n + 1)); };
    std::vector<LayerShape> shapes;
    const int n_layers = 1 + upto(9);
    for (int l = 0; l < n_layers; ++l) {
      if (upto(5) == 0) {
        shapes.push_back({});  // dense
      } else {
        shapes.push_back({4 + upto(28), 256ull * static_cast<uint64_t>(2 + upto(3))});
      }
    }
    catalog = catalog_of(shapes, 1 + upto(3));
    heat = HeatMap(catalog);
    std::vector<int> rank;
    for (int l = 0; l < heat.n_layers(); ++l)
      for (int e = 0; e < heat.n_expert(l); ++e) rank.push_back(static_cast<int>(rank.size()));
    std::shuffle(rank.begin(), rank.end(), random);
    size_t i = 0;
    for (int l = 0; l < heat.n_layers(); ++l) {
      for (int e = 0; e < heat.n_expert(l); ++e) {
        const auto r = static_cast<float>(rank[i++] + 1);
        heat.use(l, e, r * r * r);
      }
    }
    const uint64_t total = catalog.total_bytes();
    budget = total == 0 ? 0 : random() % (total + total / 4 + 1);
    pin_layers = upto(3) == 0 ? upto(n_layers) : 0;
  }
};

TEST(Placement, NeverExceedsTheByteBudgetAndNamesEachExpertOnce) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    const Case c(seed);
    const Placement p = place(c.catalog, &c.heat, c.budget, c.pin_layers);
    uint64_t bytes = 0;
    int n_hot = 0;
    ASSERT_EQ(p.hot.size(), c.catalog.layers.size());
    for (size_t l = 0; l < p.hot.size(); ++l) {
      std::vector<int32_t> sorted = p.hot[l];
      std::sort(sorted.begin(), sorted.end());
      ASSERT_EQ(std::adjacent_find(sorted.begin(), sorted.end()), sorted.end()) << seed;
      if (!sorted.empty()) {
        ASSERT_GE(sorted.front(), 0);
        ASSERT_LT(sorted.back(), c.catalog.layers[l].n_expert());
      }
      bytes += sorted.size() * c.catalog.layers[l].expert_bytes;
      n_hot += static_cast<int>(sorted.size());
    }
    ASSERT_EQ(p.bytes, bytes) << seed;
    ASSERT_EQ(p.n_hot, n_hot) << seed;
    ASSERT_LE(p.bytes, c.budget) << seed;
    // Less than one expert stays unused, unless everything is hot.
    if (p.bytes < c.catalog.total_bytes()) {
      ASSERT_LT(c.budget - p.bytes, c.catalog.max_expert_bytes()) << seed;
    }
  }
}

TEST(Placement, IsTheSameEachTime) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const Case a(seed), b(seed);
    ASSERT_EQ(place(a.catalog, &a.heat, a.budget, a.pin_layers).hot,
              place(b.catalog, &b.heat, b.budget, b.pin_layers).hot);
  }
}

TEST(Placement, KeepsTheHotSetWhenTheBudgetGrows) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    const Case c(seed);
    const Placement small = place(c.catalog, &c.heat, c.budget / 2, c.pin_layers);
    const Placement large = place(c.catalog, &c.heat, c.budget, c.pin_layers);
    for (size_t l = 0; l < small.hot.size(); ++l)
      for (int32_t e : small.hot[l]) ASSERT_TRUE(large.is_hot(static_cast<int>(l), e)) << seed;
    ASSERT_GE(large.expected_hit_rate, small.expected_hit_rate) << seed;
  }
}

TEST(Placement, HonoursTheFloorOrLowersItEvenly) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    const Case c(seed);
    const Placement p = place(c.catalog, &c.heat, c.budget);
    const int wanted = 2 * c.catalog.n_active;
    uint64_t floor_bytes = 0;
    int fewest = wanted, most = 0;
    for (size_t l = 0; l < p.hot.size(); ++l) {
      const ExpertLayer& layer = c.catalog.layers[l];
      if (layer.n_expert() == 0) continue;
      floor_bytes += static_cast<uint64_t>(std::min(wanted, layer.n_expert())) * layer.expert_bytes;
      const auto n = static_cast<int>(p.hot[l].size());
      if (n < layer.n_expert()) fewest = std::min(fewest, n);
      most = std::max(most, n);
    }
    ASSERT_EQ(p.floor, fewest) << seed;
    if (c.budget >= floor_bytes) {
      ASSERT_EQ(p.floor, wanted) << seed;
    } else {
      ASSERT_LE(most - fewest, 1) << seed;
    }
  }
}

TEST(Placement, CannotGainByExchangingOneExpert) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    const Case c(seed);
    const Placement p = place(c.catalog, &c.heat, c.budget, c.pin_layers);
    for (int hl = c.pin_layers; hl < c.heat.n_layers(); ++hl) {
      const auto& hot_layer = c.catalog.layers[static_cast<size_t>(hl)];
      const bool above_floor =
          static_cast<int>(p.hot[static_cast<size_t>(hl)].size()) > 2 * c.catalog.n_active;
      for (int32_t out : p.hot[static_cast<size_t>(hl)]) {
        for (int cl = 0; cl < c.heat.n_layers(); ++cl) {
          const auto& cold_layer = c.catalog.layers[static_cast<size_t>(cl)];
          if (cl != hl && (!above_floor || cold_layer.expert_bytes > hot_layer.expert_bytes)) continue;
          for (int in = 0; in < cold_layer.n_expert(); ++in) {
            if (p.is_hot(cl, in)) continue;
            ASSERT_LE(c.heat.heat(cl, in), c.heat.heat(hl, out)) << seed;
          }
        }
      }
    }
  }
}

TEST(Placement, ListsTheMostValuableOfALayerFirst) {
  const Case c(7);
  const Placement p = place(c.catalog, &c.heat, c.catalog.total_bytes());
  ASSERT_EQ(p.expected_hit_rate, 1.0);
  for (size_t l = 0; l < p.hot.size(); ++l)
    for (size_t i = 1; i < p.hot[l].size(); ++i)
      ASSERT_GT(c.heat.heat(static_cast<int>(l), p.hot[l][i - 1]),
                c.heat.heat(static_cast<int>(l), p.hot[l][i]));
}

TEST(Placement, SharesEquallyBetweenLayersWithoutHeat) {
  // The last layer's experts are twice as large; it still gets as many.
  const ExpertCatalog catalog = catalog_of({{16, 1024}, {0, 0}, {16, 1024}, {16, 2048}}, 2);
  const HeatMap empty(catalog);
  for (const HeatMap* heat : {static_cast<const HeatMap*>(nullptr), &empty}) {
    const Placement p = place(catalog, heat, 10 * 4096);
    EXPECT_EQ(p.hot[0].size(), 10u);
    EXPECT_EQ(p.hot[1].size(), 0u);
    EXPECT_EQ(p.hot[2].size(), 10u);
    EXPECT_EQ(p.hot[3].size(), 10u);
    EXPECT_DOUBLE_EQ(p.expected_hit_rate, 30.0 / 48.0);
  }
}

TEST(Placement, PrefersHeatPerByteAboveTheFloor) {
  const ExpertCatalog catalog = catalog_of({{8, 1024}, {8, 2048}}, 1);
  HeatMap heat(catalog);
  for (int e = 0; e < 8; ++e) heat.use(0, e, 10.0f);
  for (int e = 0; e < 8; ++e) heat.use(1, e, 15.0f);  // hotter, but not for its size
  const Placement p = place(catalog, &heat, 2 * 1024 + 2 * 2048 + 5 * 1024);
  EXPECT_EQ(p.floor, 2);
  EXPECT_EQ(p.hot[0].size(), 7u);
  EXPECT_EQ(p.hot[1].size(), 2u);
}

TEST(Placement, PinsTheFirstLayersBeforeTheFloors) {
  const ExpertCatalog catalog = catalog_of({{0, 0}, {8, 1024}, {8, 1024}, {8, 1024}}, 1);
  HeatMap heat(catalog);
  for (int e = 0; e < 8; ++e) heat.use(3, e, 100.0f);
  const Placement p = place(catalog, &heat, 10 * 1024, 2);  // the dense layer and the first routed one
  EXPECT_EQ(p.hot[1].size(), 8u);
  EXPECT_EQ(p.hot[3].size(), 1u);
  EXPECT_EQ(p.hot[2].size(), 1u);
  EXPECT_EQ(p.floor, 1);
}

TEST(Placement, GivesATinyBudgetToTheHottestFirstExperts) {
  const ExpertCatalog catalog = catalog_of({{8, 1024}, {8, 1024}, {8, 1024}}, 2);
  HeatMap heat(catalog);
  heat.use(0, 5, 1.0f);
  heat.use(1, 6, 9.0f);
  heat.use(2, 7, 5.0f);
  const Placement p = place(catalog, &heat, 2 * 1024 + 100);
  EXPECT_EQ(p.floor, 0);
  EXPECT_TRUE(p.is_hot(1, 6));
  EXPECT_TRUE(p.is_hot(2, 7));
  EXPECT_EQ(p.n_hot, 2);
  EXPECT_DOUBLE_EQ(p.expected_hit_rate, 14.0 / 15.0);

  EXPECT_EQ(place(catalog, &heat, 1023).n_hot, 0);
  EXPECT_EQ(place(catalog, &heat, 0).n_hot, 0);
}

TEST(Placement, SpreadsExpertsThatWereNeverUsed) {
  const ExpertCatalog catalog = catalog_of({{16, 1024}, {16, 1024}}, 1);
  HeatMap heat(catalog);
  heat.use(1, 3);
  const Placement p = place(catalog, &heat, 16 * 1024);
  EXPECT_TRUE(p.is_hot(1, 3));
  EXPECT_EQ(p.hot[0].size(), 8u);
  EXPECT_EQ(p.hot[1].size(), 8u);
}

TEST(Placement, HasNothingToPlaceInADenseModel) {
  const ExpertCatalog catalog = catalog_of({{0, 0}, {0, 0}}, 0);
  const Placement p = place(catalog, nullptr, 1 << 30);
  EXPECT_EQ(p.n_hot, 0);
  EXPECT_EQ(p.bytes, 0u);
}

}  // namespace
}  // namespace thermo
