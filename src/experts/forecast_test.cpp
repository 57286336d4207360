#include "experts/forecast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "base/thread_pool.h"

namespace thermo {
namespace {

constexpr int kExperts = 40, kUsed = 4;

// Routers of random weights after norms of random weights.
struct Routers {
  explicit Routers(int n_layer, int width, Gating gating = Gating::Softmax) : n_embd(width) {
    route = {.gating = gating, .n_expert = kExperts, .n_expert_used = kUsed};
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (int l = 0; l < n_layer; ++l) {
      auto& w = weights.emplace_back(static_cast<size_t>(kExperts * n_embd));
      for (float& x : w) x = normal(random);
      auto& n = norms.emplace_back(static_cast<size_t>(n_embd));
      for (float& x : n) x = 0.5f + std::abs(normal(random));
      auto& b = biases.emplace_back(static_cast<size_t>(gating == Gating::Sigmoid ? kExperts : 0));
      for (float& x : b) x = 0.3f * normal(random);
    }
    for (size_t l = 0; l < weights.size(); ++l)
      views.push_back({.router = {.dtype = DType::F32,
                                  .n_rows = kExperts,
                                  .n_cols = n_embd,
                                  .rows = reinterpret_cast<const std::byte*>(weights[l].data())},
                       .bias = biases[l],
                       .norm = norms[l]});
  }

  // What layer l chooses for the normalised row h.
  std::vector<int32_t> choice(size_t l, const std::vector<float>& h) const {
    std::vector<float> logits(kExperts, 0.0f), out(kUsed);
    std::vector<int32_t> ids(kUsed);
    for (size_t e = 0; e < logits.size(); ++e)
      for (size_t c = 0; c < h.size(); ++c)
        logits[e] +=
            weights[l][e * h.size() + c] * h[c] * norms[l][c] / std::sqrt(static_cast<float>(n_embd));
    route_topk(route, logits.data(), biases[l].empty() ? nullptr : biases[l].data(), ids.data(), out.data());
    return ids;
  }

  int n_embd;
  RouteConfig route;
  std::vector<std::vector<float>> weights, norms, biases;
  std::vector<RouterView> views;
};

// The share of the experts chosen by layer l that is among as many guesses, if the layers between have
// changed nothing.
double recall(const Routers& routers, size_t l, int n_guesses, int distance = 1) {
  ThreadPool pool({.n_threads = 2, .spin_us = 0});
  const ExpertForecast forecast(routers.route, routers.views, distance, best_isa(), pool);
  EXPECT_TRUE(forecast.has(static_cast<int>(l)));
  EXPECT_EQ(forecast.distance(), distance);
  ActBuffer x(1, routers.n_embd);
  ActFormats formats;
  forecast.add_format(formats);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> h(static_cast<size_t>(routers.n_embd));
  std::vector<float> scores(static_cast<size_t>(forecast.n_panels() * kPanelRows));
  std::vector<int32_t> guesses(static_cast<size_t>(n_guesses));
  int found = 0;
  constexpr int kRows = 50;
  for (int row = 0; row < kRows; ++row) {
    for (size_t c = 0; c < h.size(); ++c) {
      h[c] = normal(random);
      // The forecast does not know the scale of the router's output; sigmoids with a bias need it.
      x.row(0)[c] = h[c] * routers.norms[l - static_cast<size_t>(distance)][c] /
                    std::sqrt(static_cast<float>(routers.n_embd));
    }
    x.quantize(0, routers.n_embd, formats, quant_matmul_kernels(best_isa()));
    for (int p = 0; p < forecast.n_panels(); ++p) forecast.score(static_cast<int>(l), x, 0, p, scores.data());
    forecast.choose(static_cast<int>(l), scores.data(), guesses);
    for (const int32_t expert : routers.choice(l, h))
      found += std::find(guesses.begin(), guesses.end(), expert) != guesses.end();
  }
  return static_cast<double>(found) / (kRows * kUsed);
}

TEST(ExpertForecast, NamesTheNextChoiceBehindAnotherNorm) {
  EXPECT_GT(recall(Routers(3, 512), 2, kUsed), 0.85);
  EXPECT_GT(recall(Routers(3, 512), 1, 2 * kUsed), 0.99);
  EXPECT_GT(recall(Routers(3, 512), 2, kUsed, 2), 0.85);
}

TEST(ExpertForecast, TakesSigmoidsWithABiasAndRowsOfAnyBlocks) {
  EXPECT_GT(recall(Routers(2, 512, Gating::Sigmoid), 1, kUsed), 0.85);
  EXPECT_GT(recall(Routers(2, 96), 1, kUsed), 0.95);  // eight bits
}

TEST(ExpertForecast, GuessesOnlyBehindARoutedLayer) {
  Routers routers(4, 256);
  routers.views[1].router = {};
  ThreadPool pool({.n_threads = 1});
  const ExpertForecast forecast(routers.route, routers.views, 1, best_isa(), pool);
  EXPECT_FALSE(forecast.has(0));
  EXPECT_FALSE(forecast.has(1));
  EXPECT_FALSE(forecast.has(2));
  EXPECT_TRUE(forecast.has(3));
  EXPECT_FALSE(forecast.has(4));
  const ExpertForecast far(routers.route, routers.views, 2, best_isa(), pool);
  EXPECT_FALSE(far.has(1));
  EXPECT_TRUE(far.has(2));
  EXPECT_FALSE(far.has(3));
  const ExpertForecast none({}, {}, 1, best_isa(), pool);
  EXPECT_EQ(none.n_layers(), 0);
}

TEST(ExpertForecast, TakesWhatWasPlanned) {
  // 40 routers of 256 x 2048 in four bits: 4.5 bits for a weight.
  const Matrix in{.dtype = DType::Q4_K, .n_rows = 512, .n_cols = 2048};
  const Matrix out{.dtype = DType::Q4_K, .n_rows = 2048, .n_cols = 512};
  const ExpertCatalog catalog =
      ExpertCatalog::of(std::vector(40, std::vector<Ffn>(256, {.gate = in, .up = in, .down = out})), 8, 2048);
  EXPECT_EQ(ExpertForecast::planned_bytes(catalog), 40ull * 256 * 2048 * 9 / 16);
}

TEST(ExpertForecast, LivesWithANormThatClosesAColumn) {
  Routers routers(2, 512);
  for (size_t c = 0; c < 512; c += 8) routers.norms[0][c] = 0.0f;
  // An eighth of what the router reads is missing; without the guard all of it would be NaN.
  EXPECT_GT(recall(routers, 1, 2 * kUsed), 0.8);
}

}  // namespace
}  // namespace thermo
