#include "kernels/route_topk/route_topk.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "kernels/testing/compare.h"
#include "kernels/testing/guard_band.h"
#include "kernels/testing/inputs.h"

namespace thermo {
namespace {

using namespace thermo::testing;

constexpr Gating kGatings[] = {Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxSelected,
                               Gating::SqrtSoftplus};

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed route(const RouteConfig& config, std::vector<float> logits, const float* bias) {
  GuardedBuffer<int32_t> ids(static_cast<size_t>(config.n_expert_used));
  GuardedBuffer<float> weights(static_cast<size_t>(config.n_expert_used));
  route_topk(config, logits.data(), bias, ids.data(), weights.data());
  EXPECT_TRUE(ids.intact());
  EXPECT_TRUE(weights.intact());
  return {{ids.span().begin(), ids.span().end()}, {weights.span().begin(), weights.span().end()}};
}

void expect_in_range_and_distinct(const Routed& routed, int n_expert) {
  std::set<int32_t> seen;
  for (int32_t id : routed.ids) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, n_expert);
    EXPECT_TRUE(seen.insert(id).second) << id;
  }
}

TEST(RouteTopk, AgreesWithTheReference) {
  struct Shape {
    int n, k;
  };
  for (Gating gating : kGatings)
    for (const Shape& shape : {Shape{1, 1}, Shape{4, 2}, Shape{8, 8}, Shape{13, 3}, Shape{64, 6},
                               Shape{256, 8}, Shape{257, 10}, Shape{128, 70}})
      for (bool with_bias : {false, true})
        for (bool normalize : {false, true}) {
          Inputs in(static_cast<uint64_t>(shape.n));
          const auto logits = in.spiky(static_cast<size_t>(shape.n), 2.0f, 4.0f);
          const auto bias = in.normal(static_cast<size_t>(shape.n), 0.3f);
          const RouteConfig config = {.gating = gating,
                                      .n_expert = shape.n,
                                      .n_expert_used = shape.k,
                                      .normalize = normalize,
                                      .weights_scale = 2.5f};
          const Routed got = route(config, logits, with_bias ? bias.data() : nullptr);
          Routed want = got;
          std::vector<float> scratch = logits;
          route_topk_ref(config, scratch.data(), with_bias ? bias.data() : nullptr, want.ids.data(),
                         want.weights.data());
          EXPECT_EQ(got.ids, want.ids);
          // exp of a difference rounded at |x| <= 32, a sum over all experts.
          EXPECT_TRUE(all_close(got.weights, want.weights,
                                {.absolute = 1e-30, .relative = (64.0 + shape.n) * kF32Epsilon}));
          expect_in_range_and_distinct(got, shape.n);
        }
}

TEST(RouteTopk, BreaksTiesByTheLowestIndex) {
  for (Gating gating : kGatings) {
    const RouteConfig config = {.gating = gating, .n_expert = 9, .n_expert_used = 4};
    EXPECT_EQ(route(config, std::vector<float>(9, 0.5f), nullptr).ids, (std::vector<int32_t>{0, 1, 2, 3}));
    EXPECT_EQ(route(config, {0, 1, -0.0f, 1, 0, 1, 0, 0, -1}, nullptr).ids,
              (std::vector<int32_t>{1, 3, 5, 0}));
  }
}

TEST(RouteTopk, TakesEveryExpertWhereThereIsNoRouter) {
  const RouteConfig config = {.gating = Gating::Every, .n_expert = 3, .n_expert_used = 3, .normalize = false};
  const Routed got = route(config, {2.0f, NAN, -1.0f}, nullptr);
  EXPECT_EQ(got.ids, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(got.weights, (std::vector<float>{1.0f, 1.0f, 1.0f}));
}

TEST(RouteTopk, BiasMovesTheChoiceButNotTheWeights) {
  const RouteConfig config = {
      .gating = Gating::Sigmoid, .n_expert = 4, .n_expert_used = 2, .weights_scale = 2.5f};
  const float bias[] = {0.0f, 0.0f, 0.9f, 0.0f};
  const Routed got = route(config, {1.0f, 0.5f, -1.0f, 0.0f}, bias);
  EXPECT_EQ(got.ids, (std::vector<int32_t>{2, 0}));
  const double s2 = 1 / (1 + std::exp(1.0)), s0 = 1 / (1 + std::exp(-1.0));
  EXPECT_NEAR(got.weights[0], 2.5 * s2 / (s2 + s0), 1e-6);
  EXPECT_NEAR(got.weights[1], 2.5 * s0 / (s2 + s0), 1e-6);
}

TEST(RouteTopk, NanLosesToEveryNumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const std::vector<float> bias(6, 0.1f);
  for (Gating gating : kGatings)
    for (bool with_bias : {false, true}) {
      const RouteConfig config = {.gating = gating, .n_expert = 6, .n_expert_used = 3};
      const float* b = with_bias ? bias.data() : nullptr;
      const Routed got = route(config, {nan, -3.0f, nan, 2.0f, nan, -inf}, b);
      EXPECT_EQ(got.ids, (std::vector<int32_t>{3, 1, 5}));
      for (float w : got.weights) EXPECT_TRUE(std::isfinite(w));
      const Routed none = route(config, std::vector<float>(6, nan), b);
      EXPECT_EQ(none.ids, (std::vector<int32_t>{0, 1, 2}));
      for (float w : none.weights) EXPECT_FLOAT_EQ(w, 1.0f / 3.0f);
      const Routed endless = route(config, {0.0f, inf, 1.0f, inf, -inf, nan}, b);
      expect_in_range_and_distinct(endless, 6);
      EXPECT_EQ(endless.ids[0], 1);
      for (float w : endless.weights) EXPECT_TRUE(std::isfinite(w)) << static_cast<int>(gating);
    }
}

TEST(RouteTopk, SurvivesLogitsThatUnderflow) {
  for (Gating gating : kGatings) {
    const RouteConfig config = {.gating = gating, .n_expert = 4, .n_expert_used = 3};
    const Routed got = route(config, {-500.0f, 500.0f, -1000.0f, -200.0f}, nullptr);
    expect_in_range_and_distinct(got, 4);
    EXPECT_EQ(got.ids[0], 1);
    EXPECT_FLOAT_EQ(got.weights[0], 1.0f);
  }
}

}  // namespace
}  // namespace thermo
