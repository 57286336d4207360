#include "experts/read_ahead.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <random>
#include <thread>
#include <vector>

#include "base/thread_pool.h"
#include "experts/courier.h"

namespace thermo {
namespace {

constexpr int kLayers = 4, kExperts = 24, kUsed = 4, kEmbd = 256, kFf = 64, kRows = 5;

struct Fixture {
  Fixture() {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const Matrix in{.dtype = DType::Q8_0, .n_rows = kFf, .n_cols = kEmbd};
    const Matrix out{.dtype = DType::Q8_0, .n_rows = kEmbd, .n_cols = kFf};
    const Ffn expert{.gate = in, .up = in, .down = out};
    catalog = ExpertCatalog::of(std::vector(kLayers, std::vector<Ffn>(kExperts, expert)), kUsed, kEmbd);
    memory = HostBuffer(catalog.total_bytes());
    router.resize(kExperts * kEmbd);
    for (float& w : router) w = normal(random);
    norm.assign(kEmbd, 1.0f);
    for (int l = 0; l < kLayers; ++l)
      views.push_back({.router = {.dtype = DType::F32,
                                  .n_rows = kExperts,
                                  .n_cols = kEmbd,
                                  .rows = reinterpret_cast<const std::byte*>(router.data())},
                       .bias = {},
                       .norm = norm});
    x = ActBuffer(kRows, kEmbd);
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kEmbd; ++c) x.row(r)[c] = normal(random);
  }
  const std::byte* address(int layer, int expert) const {
    return memory.data() + static_cast<uint64_t>(layer * kExperts + expert) * catalog.max_expert_bytes();
  }
  // The expert whose router row is the sum of rows of x: every layer prefers it for these.
  void prefer(int expert, std::initializer_list<int> rows = {0}) {
    for (int c = 0; c < kEmbd; ++c) {
      float& w = router[static_cast<size_t>(expert * kEmbd + c)] = 0.0f;
      for (const int r : rows) w += x.row(r)[c];
    }
  }

  ExpertCatalog catalog;
  HostBuffer memory;
  std::vector<float> router, norm;
  std::vector<RouterView> views;
  ActBuffer x;
};

TEST(ReadAhead, ReadsWhatTheNextLayerProbablyWantsAndStopsWhenTold) {
  Fixture f;
  f.prefer(17);
  ThreadPool pool({.n_threads = 3, .pin = false});
  ExpertForecast forecast({.n_expert = kExperts, .n_expert_used = kUsed}, f.views, 1, best_isa(), pool);
  std::atomic<int> n_asked{0};
  int hot = -1;  // changed only after end()
  ReadAhead ahead(f.catalog, forecast, pool,
                  [&](int layer, int expert) {
                    n_asked.fetch_add(1);
                    return expert == hot ? nullptr : f.address(layer, expert);
                  },
                  {});
  ActFormats formats;
  ahead.add_format(formats);
  f.x.quantize(0, kEmbd, formats, quant_matmul_kernels(best_isa()));

  const int32_t wanted[] = {3, 17};
  for (int round = 0; round < 300; ++round) {
    const int layer = round % kLayers;
    while (!pool.everyone_left()) std::this_thread::yield();
    ahead.begin(layer, f.x, ReadAhead::rows_of(1));
    pool.run_threads([](int) {});
    const bool guesses = layer + 1 < kLayers;
    const bool to_the_end = round % 2 == 0;
    const auto never = [] { return false; };
    while (to_the_end && ahead.help(never)) {
    }
    ahead.end();
    EXPECT_FALSE(ahead.help(never));
    const int asked = n_asked.exchange(0);
    if (to_the_end) {
      EXPECT_EQ(asked > 0, guesses);
      EXPECT_EQ(ahead.take_bytes() > 0, guesses);
      EXPECT_EQ(ahead.take_bytes(), 0u);
      EXPECT_EQ(ahead.n_foreseen(layer + 1, wanted) > 0, guesses && hot != 17);
      EXPECT_EQ(ahead.n_foreseen(layer, wanted), 0);
      hot = hot == 17 ? -1 : 17;
    }
    pool.run(16, [](int, int) {});
  }
}

// The pool says so: a worker that is still inside has lost its core.
TEST(ReadAhead, DoesNotBeginWhileAThreadIsStillInsideAndGoesOnBehindIt) {
  Fixture f;
  f.prefer(17);
  ThreadPool pool({.n_threads = 2, .pin = false});
  ExpertForecast forecast({.n_expert = kExperts, .n_expert_used = kUsed}, f.views, 1, best_isa(), pool);
  ReadAhead ahead(f.catalog, forecast, pool, [&](int layer, int expert) { return f.address(layer, expert); },
                  {});
  ActFormats formats;
  ahead.add_format(formats);
  f.x.quantize(0, kEmbd, formats, quant_matmul_kernels(best_isa()));
  const auto never = [] { return false; };
  const int32_t wanted[] = {17};

  struct Stuck {
    std::atomic<bool> inside{false}, go{false};
  } stuck;
  pool.offer(
      [](void* context, int, const std::function<bool()>&) {
        Stuck& s = *static_cast<Stuck*>(context);
        s.inside.store(true);
        while (!s.go.load()) std::this_thread::yield();
        return true;
      },
      &stuck);
  std::atomic<int> n_inside{0};
  pool.run_threads([&](int) {
    n_inside.fetch_add(1);
    while (n_inside.load() < 2) std::this_thread::yield();
  });
  while (!stuck.inside.load()) std::this_thread::yield();
  pool.withdraw();
  ahead.begin(0, f.x, ReadAhead::rows_of(1));
  pool.run(4, [](int, int) {});
  EXPECT_FALSE(ahead.help(never));
  ahead.end();
  EXPECT_EQ(ahead.n_foreseen(1, wanted), 0);
  EXPECT_EQ(ahead.take_bytes(), 0u);

  stuck.go.store(true);
  while (!pool.everyone_left()) std::this_thread::yield();
  ahead.begin(0, f.x, ReadAhead::rows_of(1));
  pool.run_threads([](int) {});
  EXPECT_TRUE(ahead.help(never));
  ahead.end();
  EXPECT_EQ(ahead.n_foreseen(1, wanted), 1);
}

TEST(ReadAhead, TakesFewRowsOfMany) {
  for (const int n : {0, 1, 2, 7, 8, 9, 33, 64}) {
    const ReadAhead::Rows rows = ReadAhead::rows_of(n);
    ASSERT_EQ(rows.n, std::min(n, ReadAhead::kMaxRows));
    for (int i = 0; i < rows.n; ++i) {
      EXPECT_LT(rows.at[i], n);
      EXPECT_EQ(rows.at[i], i * n / rows.n);
      EXPECT_TRUE(i == 0 || rows.at[i] > rows.at[i - 1]);
    }
  }
}

// Of several rows: what any of them probably wants, and first what more of them want.
TEST(ReadAhead, GuessesFromAllRowsTogether) {
  Fixture f;
  f.prefer(3, {2});
  f.prefer(9, {4});
  f.prefer(17, {0, 1});
  f.prefer(21, {3});
  ThreadPool pool({.n_threads = 3, .pin = false});
  const RouteConfig route{.n_expert = kExperts, .n_expert_used = kUsed};
  const ExpertForecast next(route, f.views, 1, best_isa(), pool),
      far(route, f.views, Courier::kDistance, best_isa(), pool);
  struct Link final : ParcelDevice {
    void send(std::byte*, const std::byte*, size_t, int, uint64_t word) noexcept override {
      experts.push_back(parcel_expert(word));
    }
    void publish_place(int, const std::byte*) noexcept override {}
    std::vector<int> experts;
  } link;
  std::vector<std::byte> places(Courier::places_bytes(f.catalog));
  Courier courier(f.catalog, link, places.data(), [](int, int, std::byte*) { return nullptr; });
  int hot = -1;
  ReadAhead ahead(f.catalog, next, pool,
                  [&](int layer, int expert) { return expert == hot ? nullptr : f.address(layer, expert); },
                  {&far, &courier});
  ActFormats formats;
  ahead.add_format(formats);
  for (int r = 0; r < kRows; ++r) f.x.quantize(r, kEmbd, formats, quant_matmul_kernels(best_isa()));
  const auto step = [&](const ReadAhead::Rows& rows) {
    link.experts.clear();
    courier.begin_step(100, rows.n);
    while (!pool.everyone_left()) std::this_thread::yield();
    ahead.begin(0, f.x, rows);
    pool.run_threads([](int) {});
    EXPECT_TRUE(ahead.help([] { return false; }));
    ahead.end();
  };
  const int32_t wanted[] = {3, 9, 17};
  // Rows 0 to 2 and 4; what row 3 alone wants is not guessed first.
  const ReadAhead::Rows rows{.n = 4, .at = {0, 1, 2, 4}};
  for (int round = 0; round < 50; ++round) {
    hot = round % 2 == 0 ? -1 : 17;
    step(rows);
    EXPECT_EQ(ahead.n_foreseen(1, wanted), hot < 0 ? 3 : 2);
    ASSERT_EQ(link.experts.size(), 1u);
    if (hot < 0)
      EXPECT_EQ(link.experts[0], 17);
    else
      EXPECT_TRUE(link.experts[0] == 3 || link.experts[0] == 9) << link.experts[0];
  }
  step({.n = 1, .at = {3}});
  EXPECT_EQ(link.experts, std::vector<int>{21});
}

// What was sent for the next layer is not loaded into the caches.
TEST(ReadAhead, SendsTheLikeliestOfALayerFurtherOn) {
  Fixture f;
  f.prefer(17);
  ThreadPool pool({.n_threads = 3, .pin = false});
  const RouteConfig route{.n_expert = kExperts, .n_expert_used = kUsed};
  const ExpertForecast next(route, f.views, 1, best_isa(), pool),
      far(route, f.views, Courier::kDistance, best_isa(), pool);
  struct Link final : ParcelDevice {
    void send(std::byte*, const std::byte* from, size_t, int index, uint64_t word) noexcept override {
      sent_from = from;
      sent_index = index;
      sent_word = word;
      ++n;
    }
    void publish_place(int, const std::byte*) noexcept override {}
    const std::byte* sent_from = nullptr;
    int sent_index = -1, n = 0;
    uint64_t sent_word = 0;
  } link;
  std::vector<std::byte> places(Courier::places_bytes(f.catalog));
  Courier courier(f.catalog, link, places.data(), [](int, int, std::byte*) { return nullptr; });
  ReadAhead ahead(f.catalog, next, pool, [&](int layer, int expert) { return f.address(layer, expert); },
                  {&far, &courier});
  ActFormats formats;
  ahead.add_format(formats);
  f.x.quantize(0, kEmbd, formats, quant_matmul_kernels(best_isa()));

  const auto region = [&](int layer) {
    while (!pool.everyone_left()) std::this_thread::yield();
    ahead.begin(layer, f.x, ReadAhead::rows_of(1));
    pool.run_threads([](int) {});
    ahead.help([] { return false; });
    ahead.end();
  };
  const int32_t wanted[] = {17};
  courier.begin_step(100, 1);
  region(0);
  EXPECT_EQ(link.n, 1);
  EXPECT_EQ(link.sent_from, f.address(3, 17));
  EXPECT_EQ(link.sent_index, 3 * kMaxParcels);
  EXPECT_EQ(link.sent_word, parcel_word(104, 17, parcel_place(link.sent_word)));
  EXPECT_EQ(ahead.n_foreseen(1, wanted), 1);  // it was not sent
  region(2);
  EXPECT_EQ(link.n, 1);                       // there is no layer 5
  EXPECT_EQ(ahead.n_foreseen(3, wanted), 0);  // on its way
  courier.begin_step(200, 1);
  region(2);
  EXPECT_EQ(ahead.n_foreseen(3, wanted), 1);  // not in this step
}

}  // namespace
}  // namespace thermo
