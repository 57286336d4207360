// The lists of the GPU router against the choice by definition: every kind of gating, odd numbers of experts,
// padding rows, all rows to the same experts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/device_info.h"
#include "device/testing/skip_without_gpu.h"
#include "kernels/route_topk/route_topk_cuda.h"
#include "kernels/testing/device_case.h"

namespace thermo {
namespace {

struct RouteCase {
  DType router = DType::F32;
  Gating gating = Gating::Softmax;
  int n_expert = 256, n_used = 8, n_rows = 1, n_valid = 1, tile = 8;
  bool bias = false, shared = true, same_rows = false;
};

constexpr int32_t kGuard = -77777;
constexpr int kGuards = 16;

template <class T>
bool is_guard(const std::vector<T>& values, size_t from) {
  for (size_t i = from; i < values.size(); ++i) {
    int32_t word;
    std::memcpy(&word, &values[i], sizeof(word));
    if (word != kGuard) return false;
  }
  return true;
}

void run_case(const RouteCase& c) {
  SCOPED_TRACE(testing::Message() << "experts " << c.n_expert << " used " << c.n_used << " rows " << c.n_valid
                                  << "/" << c.n_rows << " tile " << c.tile << " gating "
                                  << static_cast<int>(c.gating) << " router " << dtype_name(c.router));
  constexpr int kCols = 544;
  std::mt19937 random(static_cast<unsigned>(c.n_expert * 7 + c.n_rows * 3 + c.n_used));
  std::normal_distribution<float> normal(0.0f, 1.0f);
  const HostMatrix router(c.router, c.n_expert, kCols, random, 0.1f);
  std::vector<float> x(static_cast<size_t>(c.n_rows) * kCols), bias(static_cast<size_t>(c.n_expert)),
      logit(static_cast<size_t>(c.n_rows));
  // x = stream * norm * factor: what float routers of few rows make of the three.
  std::vector<float> stream(x.size()), norm(kCols), factor(static_cast<size_t>(c.n_rows));
  for (float& n : norm) n = 1.0f + 0.2f * normal(random);
  for (float& f : factor) f = c.same_rows ? 0.7f : 1.0f + 0.3f * std::fabs(normal(random));
  for (size_t i = 0; i < x.size(); ++i) {
    stream[i] = c.same_rows && i >= kCols ? stream[i - kCols] : normal(random);
    x[i] = stream[i] * norm[i % kCols] * factor[i / kCols];
  }
  for (float& b : bias) b = normal(random) * 0.1f;
  for (float& l : logit) l = normal(random);
  std::vector<const uint8_t*> base;
  for (int e = 0; e < c.n_expert; ++e)
    base.push_back(reinterpret_cast<const uint8_t*>(static_cast<size_t>(e + 1) << 20));

  const bool every = c.gating == Gating::Every;  // without a router
  const RouteConfig config{c.gating, c.n_expert, c.n_used, !every, every ? 1.0f : 2.5f};
  const size_t pairs = static_cast<size_t>(max_route_pairs(config, c.shared, c.n_rows)),
               slots = static_cast<size_t>(max_route_slots(config, c.shared, c.n_rows, c.tile)),
               entries = static_cast<size_t>(c.n_rows) * static_cast<size_t>(c.n_used + 1),
               experts = static_cast<size_t>(c.n_expert), rows = static_cast<size_t>(c.n_rows);
  const auto guarded = [](size_t words) { return to_device(std::vector<int32_t>(words + kGuards, kGuard)); };
  DeviceBuffer panels = to_device(router.panels), device_x = to_device(x), device_bias = to_device(bias),
               device_logit = to_device(logit), device_stream = to_device(stream),
               device_norm = to_device(norm), device_factor = to_device(factor),
               device_base = to_device(base), n_valid = to_device(std::vector<int32_t>{c.n_valid});
  const size_t logit_rows = router_logit_rows(c.n_rows);
  DeviceBuffer logits = guarded(logit_rows * experts), n_slots = guarded(1),
               slot_memory = guarded(slots * sizeof(DeviceSlot) / 4), pair_row = guarded(pairs),
               pair_of = guarded(entries), pair_weight = guarded(entries),
               counts = to_device(std::vector<int32_t>(experts + 1, 0)), first = guarded(experts + 1),
               slot_of = guarded(experts + 1), chosen = guarded(rows * static_cast<size_t>(c.n_used)),
               rank = guarded(rows * static_cast<size_t>(c.n_used)),
               partial = guarded(static_cast<size_t>(kRouterParts * kMaxListRows) * experts),
               counter = to_device(std::vector<uint32_t>{0}),
               uses = to_device(std::vector<uint32_t>(experts, 5));
  // Quantised routers read the f16 form.
  DeviceRouteArgs args;
  args.config = config;
  if (!every) args.router = router.at(reinterpret_cast<size_t>(panels.data()));
  args.x.f32 = device_x.as<float>();
  args.x.f32_stride = kCols;
  args.stream = device_stream.as<float>();
  args.norm = device_norm.as<float>();
  args.factor = device_factor.as<float>();
  args.logits = logits.as<float>();
  args.bias = c.bias ? device_bias.as<float>() : nullptr;
  args.base = device_base.as<const uint8_t*>();
  args.shared = c.shared;
  args.shared_logit = device_logit.as<float>();
  args.n_rows = c.n_rows;
  args.n_valid = n_valid.as<int32_t>();
  args.tile = c.tile;
  args.out = {n_slots.as<int32_t>(), slot_memory.as<DeviceSlot>(), pair_row.as<int32_t>(),
              pair_of.as<int32_t>(), pair_weight.as<float>(),      counts.as<int32_t>(),
              first.as<int32_t>(),   slot_of.as<int32_t>(),        chosen.as<int32_t>(),
              rank.as<int32_t>(),    partial.as<float>(),          counter.as<uint32_t>(),
              uses.as<uint32_t>()};
  for (int repeat = 0; repeat < 2; ++repeat) {  // counters are left as they were found
    route_topk_cuda(args, {});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  const auto got_slots = to_host(slot_memory.as<DeviceSlot>(), slots);
  const auto got_row = to_host(pair_row.as<int32_t>(), pairs + kGuards);
  const auto got_pair = to_host(pair_of.as<int32_t>(), entries + kGuards);
  const auto got_weight = to_host(pair_weight.as<float>(), entries + kGuards);
  const int got_n_slots = to_host(n_slots.as<int32_t>(), 1)[0];
  EXPECT_TRUE(is_guard(got_row, pairs) && is_guard(got_pair, entries) && is_guard(got_weight, entries));
  EXPECT_TRUE(is_guard(to_host(slot_memory.as<int32_t>(), slots * 16 + kGuards), slots * 16));
  EXPECT_TRUE(is_guard(to_host(logits.as<int32_t>(), logit_rows * experts + kGuards), logit_rows * experts));

  // Slots hold runs of pairs of one expert, each pair once.
  const int n_pairs = c.n_valid * (c.n_used + (c.shared ? 1 : 0));
  std::vector<int> expert_of(static_cast<size_t>(n_pairs), -1);
  ASSERT_LE(got_n_slots, static_cast<int>(slots));
  for (int s = 0; s < got_n_slots; ++s) {
    const DeviceSlot& slot = got_slots[static_cast<size_t>(s)];
    ASSERT_TRUE(slot.count >= 1 && slot.count <= c.tile && slot.first >= 0 &&
                slot.first + slot.count <= n_pairs);
    ASSERT_TRUE(slot.expert >= 0 && slot.expert <= c.n_expert);
    EXPECT_EQ(slot.base, slot.expert == c.n_expert ? nullptr : base[static_cast<size_t>(slot.expert)]);
    for (int i = 0; i < slot.count; ++i) {
      int& expert = expert_of[static_cast<size_t>(slot.first + i)];
      EXPECT_EQ(expert, -1);
      expert = slot.expert;
      if (i < kSlotRows) EXPECT_EQ(slot.rows[i], got_row[static_cast<size_t>(slot.first + i)]);
    }
  }
  for (const int expert : expert_of) EXPECT_NE(expert, -1);

  std::vector<uint32_t> want_uses(experts, 5);
  for (int r = 0; r < c.n_rows; ++r) {
    const size_t at = static_cast<size_t>(r) * static_cast<size_t>(c.n_used + 1);
    if (r >= c.n_valid) {
      for (int k = 0; k <= c.n_used; ++k) EXPECT_EQ(got_pair[at + static_cast<size_t>(k)], -1);
      continue;
    }
    std::vector<float> want_logits = router.times(x.data() + static_cast<size_t>(r) * kCols);
    std::vector<int32_t> ids(static_cast<size_t>(c.n_used));
    std::vector<float> weights(static_cast<size_t>(c.n_used));
    route_topk_ref(config, want_logits.data(), args.bias == nullptr ? nullptr : bias.data(), ids.data(),
                   weights.data());
    for (const int32_t id : ids) want_uses[static_cast<size_t>(id)] += 2;  // it ran twice
    for (int k = 0; k <= c.n_used; ++k) {
      const int pair = got_pair[at + static_cast<size_t>(k)];
      if (k == c.n_used && !c.shared) {
        EXPECT_EQ(pair, -1);
        continue;
      }
      ASSERT_TRUE(pair >= 0 && pair < n_pairs);
      EXPECT_EQ(got_row[static_cast<size_t>(pair)], r);
      const size_t i = static_cast<size_t>(k);
      EXPECT_EQ(expert_of[static_cast<size_t>(pair)], k == c.n_used ? c.n_expert : ids[i]);
      const float want =
          k == c.n_used ? 1.0f / (1.0f + std::exp(-logit[static_cast<size_t>(r)])) : weights[i];
      EXPECT_NEAR(got_weight[at + i], want, 1e-4f);
    }
  }
  EXPECT_EQ(to_host(uses.as<uint32_t>(), experts), want_uses);
}

TEST(RouteCuda, ListsAreThoseOfTheReference) {
  SKIP_WITHOUT_GPU();
  for (const int n_rows : {1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 64, 65, 100})
    for (const int tile : {8, 64}) {
      run_case({.n_rows = n_rows, .n_valid = n_rows, .tile = tile});
      run_case({.n_rows = n_rows, .n_valid = n_rows / 2, .tile = tile});
      run_case({.n_rows = n_rows, .n_valid = n_rows, .tile = tile, .same_rows = true});
      run_case(
          {.n_expert = 37, .n_used = 3, .n_rows = n_rows, .n_valid = n_rows, .tile = tile, .shared = false});
      run_case({.n_expert = 300, .n_used = 31, .n_rows = n_rows, .n_valid = n_rows, .tile = tile});
      run_case({.gating = Gating::Every,
                .n_expert = 17,
                .n_used = 17,
                .n_rows = n_rows,
                .n_valid = n_rows,
                .tile = tile,
                .shared = false});
    }
  for (const Gating gating :
       {Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxSelected, Gating::SqrtSoftplus})
    for (const bool bias : {false, true})
      for (const DType router : {DType::F32, DType::F16, DType::BF16})
        for (const int n_rows : {1, 7, 40})
          run_case({.router = router,
                    .gating = gating,
                    .n_expert = 64,
                    .n_used = 6,
                    .n_rows = n_rows,
                    .n_valid = n_rows,
                    .bias = bias});
}

}  // namespace
}  // namespace thermo
