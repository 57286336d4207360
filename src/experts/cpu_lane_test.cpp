#include "experts/cpu_lane.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>

#include "base/host_buffer.h"
#include "base/thread_pool.h"
#include "experts/read_ahead.h"
#include "experts/testing/random_experts.h"
#include "kernels/row_ops/sum_grid.h"
#include "kernels/testing/guard_band.h"

namespace thermo {
namespace {

using testing::GuardedBuffer;
using testing::LayerShape;
using testing::RandomExperts;

// A lane over a host tier that holds everything.
struct Bench {
  const RandomExperts& experts;
  ThreadPool pool;
  HostBuffer arena;
  HostTier host;
  CpuLane lane;

  Bench(const RandomExperts& e, int n_threads, Isa isa, int max_rows)
      : experts(e),
        pool({.n_threads = n_threads}),
        arena(HostTier::bytes_for_all(e.catalog)),
        host(e.catalog, {.arena = {arena.data(), arena.size()}}),
        lane(e.catalog, host, pool, {.max_rows = max_rows, .isa = isa}) {
    host.load(pool, {}, {});
  }

  std::vector<float> run(int layer, const std::vector<ColdPair>& pairs, const std::vector<float>& x,
                         int n_rows) {
    const ExpertSums& sums = lane.compute(layer, pairs, x.data(), n_rows);
    std::vector<float> y;
    for (int r = 0; r < n_rows; ++r)
      for (size_t i = 0; i < x.size() / static_cast<size_t>(n_rows); ++i)
        y.push_back(static_cast<float>(sums.row(r)[i]));
    return y;
  }
};

std::vector<float> random_rows(int n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& value : x) value = normal(random);
  return x;
}

// Every row but each third uses some experts, in no order.
std::vector<ColdPair> random_pairs(int n_rows, int n_expert, int n_active, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<ColdPair> pairs;
  for (int r = 0; r < n_rows; ++r) {
    if (n_rows > 1 && r % 3 == 2) continue;
    std::vector<int> chosen(static_cast<size_t>(n_expert));
    for (int e = 0; e < n_expert; ++e) chosen[static_cast<size_t>(e)] = e;
    std::shuffle(chosen.begin(), chosen.end(), random);
    for (int k = 0; k < n_active; ++k)
      pairs.push_back({.row = static_cast<int16_t>(r),
                       .expert = static_cast<int16_t>(chosen[static_cast<size_t>(k)]),
                       .weight = 0.1f + 0.2f * static_cast<float>(k)});
  }
  std::shuffle(pairs.begin(), pairs.end(), random);
  return pairs;
}

TEST(CpuLane, GivesOutputsOfSinglePairsAsTheyAre) {
  const int n_embd = 256, n_expert = 3, n_rows = 5;
  const RandomExperts experts({{DType::Q4_K, DType::Q6_K, n_expert, 256}}, n_embd, 1);
  const std::vector<float> x = random_rows(n_rows * n_embd, 4);
  Bench bench(experts, 2, available_isas().back(), n_rows);
  std::vector<ColdPair> pairs;
  for (int r = 0; r < n_rows; ++r)
    pairs.push_back(
        {.row = static_cast<int16_t>(r), .expert = static_cast<int16_t>(r % n_expert), .weight = 1.0f});
  const std::vector<float> sums = bench.run(0, pairs, x, n_rows);
  GuardedBuffer<float> y(x.size());
  bench.lane.outputs(0, pairs, x.data(), n_rows, y.data());
  EXPECT_TRUE(y.intact());
  // Sums lie on a grid of 2^-32.
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(y.data()[i], sums[i], 0x1p-32);
}

TEST(CpuLane, SumsTheColdExpertsOfEveryRowAndZeroesTheOthers) {
  const int n_embd = 256, n_expert = 7, n_active = 3;
  const RandomExperts experts({{DType::F32, DType::F32, n_expert, 40},
                               {},
                               {DType::Q4_K, DType::Q6_K, n_expert, 256},
                               {DType::Q8_0, DType::F32, n_expert, 96}},
                              n_embd, n_active);
  for (const Isa isa : available_isas())
    for (const int n_threads : {1, 3}) {
      Bench bench(experts, n_threads, isa, 33);
      for (const int layer : {0, 2, 3})
        for (const int n_rows : {1, 2, 9, 33}) {
          SCOPED_TRACE(::testing::Message() << isa_name(isa) << " threads " << n_threads << " layer " << layer
                                            << " rows " << n_rows);
          const std::vector<float> x = random_rows(n_rows * n_embd, 5);
          const std::vector<ColdPair> pairs = random_pairs(n_rows, n_expert, n_active, 9);
          const std::vector<float> y = bench.run(layer, pairs, x, n_rows);
          std::vector<double> want(y.size());
          for (const ColdPair& pair : pairs) {
            const std::vector<double> out = experts.apply(layer, pair.expert, x.data() + pair.row * n_embd);
            for (size_t i = 0; i < out.size(); ++i)
              want[static_cast<size_t>(pair.row) * out.size() + i] +=
                  static_cast<double>(pair.weight) * out[i];
          }
          double square = 0, error = 0;
          for (size_t i = 0; i < y.size(); ++i) {
            square += want[i] * want[i];
            error += (y[i] - want[i]) * (y[i] - want[i]);
          }
          // Floats: rounding. Quantised: rows to 8 bits, 1/127/sqrt(12) of a block's largest value. That is
          // 3 sigma for x (0.7 % in gate, 0.7 % in up), but 8 for their spiky product (1.8 %): 2.1 %
          // together, half more for the scatter of a few rows.
          EXPECT_LT(std::sqrt(error / square), layer == 0 ? 1e-5 : 0.03);
          for (int r = 2; r < n_rows; r += 3)
            for (int i = 0; i < n_embd; ++i) ASSERT_EQ(y[static_cast<size_t>(r * n_embd + i)], 0.0f);
          const auto distinct = [&] {
            std::vector<bool> seen(n_expert);
            for (const ColdPair& pair : pairs) seen[static_cast<size_t>(pair.expert)] = true;
            return std::count(seen.begin(), seen.end(), true);
          };
          EXPECT_EQ(bench.lane.last_experts(), distinct());
        }
    }
}

TEST(CpuLane, GivesTheSameBitsForEveryOrderOfPairsAndNumberOfThreads) {
  const int n_embd = 512, n_expert = 8, n_rows = 6;
  const RandomExperts experts({{DType::Q4_K, DType::Q6_K, n_expert, 512}}, n_embd, 4);
  const std::vector<float> x = random_rows(n_rows * n_embd, 2);
  std::vector<ColdPair> pairs = random_pairs(n_rows, n_expert, 4, 3);
  Bench one(experts, 1, best_isa(), n_rows);
  const std::vector<float> want = one.run(0, pairs, x, n_rows);
  std::mt19937 random(4);
  for (const int n_threads : {1, 2, 5, 16}) {
    Bench bench(experts, n_threads, best_isa(), n_rows);
    std::shuffle(pairs.begin(), pairs.end(), random);
    EXPECT_EQ(bench.run(0, pairs, x, n_rows), want) << n_threads;
  }
}

// A row alone gives the bits it gives among others: text does not depend on who else is served.
TEST(CpuLane, ComputesARowAloneAsAmongOthers) {
  const int n_embd = 256, n_expert = 6, n_rows = 12;
  const RandomExperts experts({{DType::Q4_K, DType::Q5_K, n_expert, 256}}, n_embd, 3);
  const std::vector<float> x = random_rows(n_rows * n_embd, 2);
  const std::vector<ColdPair> pairs = random_pairs(n_rows, n_expert, 3, 3);
  Bench bench(experts, 2, best_isa(), n_rows);
  const std::vector<float> all = bench.run(0, pairs, x, n_rows);
  for (int r = 0; r < n_rows; ++r) {
    std::vector<ColdPair> own;
    for (ColdPair pair : pairs)
      if (pair.row == r) pair.row = 0, own.push_back(pair);
    const auto begin = static_cast<std::ptrdiff_t>(r) * n_embd;
    EXPECT_EQ(bench.run(0, own, {x.begin() + begin, x.begin() + begin + n_embd}, 1),
              std::vector<float>(all.begin() + begin, all.begin() + begin + n_embd))
        << r;
  }
}

TEST(CpuLane, AnswersWithAStampBesideEveryHalfOfASum) {
  const int n_embd = 288, n_expert = 6;
  const RandomExperts experts({{DType::Q8_0, DType::Q8_0, n_expert, 96}}, n_embd, 3);
  for (const int n_threads : {1, 3})
    for (const int n_rows : {1, 5}) {
      Bench bench(experts, n_threads, best_isa(), n_rows);
      const std::vector<float> x = random_rows(n_rows * n_embd, 6);
      const std::vector<ColdPair> pairs = random_pairs(n_rows, n_expert, 3, 8);
      std::vector<float> scaled = x, factors;
      for (int r = 0; r < n_rows; ++r) {
        factors.push_back(r % 2 == 0 ? 0.25f : 2.0f);
        for (int i = 0; i < n_embd; ++i) scaled[static_cast<size_t>(r * n_embd + i)] *= factors.back();
      }
      const std::vector<float> want = bench.run(0, pairs, scaled, n_rows);
      GuardedBuffer<StampedSum> rows(static_cast<size_t>(n_rows * n_embd));
      uint32_t near = 0;
      bench.lane.answer(
          0, pairs, x.data(), factors.data(), n_rows,
          {.rows = rows.data(), .stride = n_embd, .n_rows = n_rows, .stamp = 77, .near = &near});
      EXPECT_TRUE(rows.intact());
      EXPECT_EQ(near, 77u);
      for (size_t i = 0; i < want.size(); ++i) {
        const StampedSum sum = rows.data()[i];
        ASSERT_EQ(sum.low >> 32, 77u) << i;
        ASSERT_EQ(sum.high >> 32, 77u) << i;
        const int64_t multiple = static_cast<int64_t>(sum.high << 32 | (sum.low & 0xffffffffu));
        ASSERT_EQ(static_cast<float>(static_cast<double>(multiple) * kSumGrid), want[i]) << i;
      }
    }
}

TEST(CpuLane, ReturnsZeroWhenNothingIsCold) {
  const RandomExperts experts({{DType::F32, DType::F32, 2, 16}}, 64, 1);
  Bench bench(experts, 2, best_isa(), 4);
  EXPECT_EQ(bench.run(0, {}, random_rows(4 * 64, 1), 4), std::vector<float>(4 * 64));
  EXPECT_EQ(bench.lane.last_experts(), 0);
}

TEST(CpuLane, LooksAheadFromRowsThatNeedNothingAndNotFromPadding) {
  const int n_embd = 256, n_expert = 8;
  const RandomExperts experts(
      {{DType::Q8_0, DType::Q8_0, n_expert, 64}, {DType::Q8_0, DType::Q8_0, n_expert, 64}}, n_embd, 2);
  Bench plain(experts, 2, best_isa(), 1);
  // Rows that have no column in common.
  std::vector<float> x(3 * n_embd), factors(3, 0.5f);
  for (size_t r = 0; r < 3; ++r) std::fill_n(x.begin() + static_cast<ptrdiff_t>(r * (n_embd + 64)), 64, 1.0f);
  plain.lane.look_ahead(0, x.data(), factors.data(), 1);  // nobody looks: nothing happens
  EXPECT_EQ(plain.lane.last_experts(), 0);

  // The router of layer 1 likes experts 5, 2 and 7 best, which are given by the rows themselves.
  const int32_t best[] = {5, 2, 7};
  std::vector<float> router(n_expert * n_embd), norm(n_embd, 1.0f);
  for (size_t r = 0; r < 3; ++r)
    std::copy_n(x.begin() + static_cast<ptrdiff_t>(r) * n_embd, n_embd, router.begin() + best[r] * n_embd);
  std::vector<RouterView> views(2, {.router = {.dtype = DType::F32,
                                               .n_rows = n_expert,
                                               .n_cols = n_embd,
                                               .rows = reinterpret_cast<const std::byte*>(router.data())},
                                    .bias = {},
                                    .norm = norm});
  ThreadPool& pool = plain.pool;
  const ExpertForecast forecast({.n_expert = n_expert, .n_expert_used = 2}, views, 1, best_isa(), pool);
  ReadAhead ahead(experts.catalog, forecast, pool,
                  [&](int layer, int expert) { return plain.host.address(layer, expert); }, {});
  CpuLane lane(experts.catalog, plain.host, pool, {.max_rows = 3, .isa = best_isa(), .ahead = &ahead});
  const auto finish = [&] {
    while (ahead.help([] { return false; })) {
    }
    ahead.end();
  };
  for (const int n_rows : {1, 2, 3}) {
    lane.look_ahead(0, x.data(), factors.data(), n_rows);
    finish();
    EXPECT_EQ(ahead.n_foreseen(1, {best, static_cast<size_t>(n_rows)}), n_rows);
  }
  // The third row is padding, from which nothing is guessed.
  std::vector<StampedSum> sums(3 * static_cast<size_t>(n_embd));
  uint32_t near = 0;
  const ColdPair pairs[] = {{.row = 1, .expert = 3, .weight = 1.0f}};
  while (!pool.everyone_left()) std::this_thread::yield();
  lane.answer(0, pairs, x.data(), factors.data(), 2,
              {.rows = sums.data(), .stride = n_embd, .n_rows = 3, .stamp = 9, .near = &near});
  finish();
  EXPECT_EQ(ahead.n_foreseen(1, best), 2);
  lane.look_ahead(1, x.data(), factors.data(), 1);  // no layer after it
  EXPECT_GT(lane.last_ahead_bytes(), 0u);
  EXPECT_FALSE(ahead.help([] { return false; }));
}

}  // namespace
}  // namespace thermo
