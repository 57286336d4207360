#include "experts/host_tier.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/host_buffer.h"
#include "base/mapped_file.h"
#include "base/thread_pool.h"
#include "experts/testing/random_experts.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

using testing::LayerShape;
using testing::RandomExperts;

constexpr int kEmbd = 64;

// Two sizes of experts and a dense layer between them.
std::vector<LayerShape> shapes() {
  return {{DType::F32, DType::F32, 24, 16},
          {},
          {DType::Q8_0, DType::F32, 24, 32},
          {DType::F32, DType::F32, 24, 16},
          {DType::Q8_0, DType::F32, 24, 32}};
}

// What an expert looks like packed.
std::vector<std::byte> packed(const ExpertCatalog& catalog, int layer, int expert) {
  const ExpertLayer& l = catalog.layers[static_cast<size_t>(layer)];
  const Ffn& ffn = l.experts[static_cast<size_t>(expert)];
  std::vector<std::byte> bytes;
  for (const Matrix* m : {&ffn.gate, &ffn.up, &ffn.down}) {
    const size_t panel = panel_bytes(m->dtype, m->n_cols);
    const size_t at = bytes.size();
    bytes.resize(at + static_cast<size_t>(n_panels(m->n_rows)) * panel);
    HostBuffer out(panel);
    for (int p = 0; p < n_panels(m->n_rows); ++p) {
      pack_panel(m->dtype, m->rows, m->n_rows, m->n_cols, p, out.data());
      std::memcpy(bytes.data() + at + static_cast<size_t>(p) * panel, out.data(), panel);
    }
  }
  return bytes;
}

bool same(const ExpertCatalog& catalog, int layer, int expert, const Ffn& got) {
  const std::vector<std::byte> want = packed(catalog, layer, expert);
  size_t at = 0;
  for (const Matrix* m : {&got.gate, &got.up, &got.down}) {
    const size_t bytes = packed_matrix_bytes(m->dtype, m->n_rows, m->n_cols);
    if (std::memcmp(m->panels, want.data() + at, bytes) != 0) return false;
    at += bytes;
  }
  return true;
}

struct Tier {
  HostBuffer arena;
  HostTier host;
  Tier(const ExpertCatalog& catalog, uint64_t bytes, int n_readers = 2,
       std::vector<const MappedFile*> files = {})
      : arena(bytes),
        host(catalog, {.arena = {arena.data(), bytes}, .n_readers = n_readers, .files = std::move(files)}) {}
};

TEST(HostTier, HoldsEveryExpertForEverWhenAllFit) {
  const RandomExperts experts(shapes(), kEmbd, 2);
  ThreadPool pool({.n_threads = 2});
  Tier tier(experts.catalog, HostTier::bytes_for_all(experts.catalog));
  EXPECT_FALSE(tier.host.complete());
  uint64_t last = 0, total = 0;
  tier.host.load(pool, {}, [&](uint64_t done, uint64_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  });
  EXPECT_TRUE(tier.host.complete());
  EXPECT_EQ(last, total);
  EXPECT_EQ(total, experts.catalog.total_bytes());
  for (const int layer : {0, 2, 3, 4})
    for (int e = 0; e < 24; ++e) {
      const Ffn ffn = tier.host.acquire(layer, e);
      EXPECT_EQ(ffn.gate.panels, tier.host.address(layer, e));
      EXPECT_TRUE(same(experts.catalog, layer, e, ffn)) << layer << " " << e;
      tier.host.release(layer, e);
    }
  EXPECT_EQ(tier.host.stats().misses, 0u);
}

TEST(HostTier, RefusesAnArenaThatCannotServeOneLayer) {
  const RandomExperts experts(shapes(), kEmbd, 2);
  const uint64_t least = HostTier::min_bytes(experts.catalog);
  EXPECT_LT(least, HostTier::bytes_for_all(experts.catalog));
  EXPECT_NO_THROW(Tier(experts.catalog, least));
  try {
    Tier(experts.catalog, least - 4096);
    FAIL() << "must be refused";
  } catch (const MemoryError& error) {
    EXPECT_EQ(error.remedy(), Remedy::MoreExpertMemory) << error.what();
  }
}

TEST(HostTier, ServesEveryExpertFromAnArenaThatHoldsFewerOfThem) {
  const RandomExperts experts(shapes(), kEmbd, 2);
  ThreadPool pool({.n_threads = 2});
  for (const bool loaded : {false, true}) {
    Tier tier(experts.catalog, HostTier::min_bytes(experts.catalog));
    if (loaded) tier.host.load(pool, {}, {});
    EXPECT_FALSE(tier.host.complete());
    std::mt19937 random(3);
    for (int round = 0; round < 300; ++round) {
      const int layer = std::array{0, 2, 3, 4}[random() % 4];
      std::set<int32_t> wanted;
      while (wanted.size() < 1 + random() % 24) wanted.insert(static_cast<int32_t>(random() % 24));
      const std::vector<int32_t> list(wanted.begin(), wanted.end());
      if (random() % 2) tier.host.want(layer, list);
      std::vector<Ffn> held;
      for (const int32_t e : list) held.push_back(tier.host.acquire(layer, e));
      for (size_t i = 0; i < list.size(); ++i)
        ASSERT_TRUE(same(experts.catalog, layer, list[i], held[i])) << round;
      for (const int32_t e : list) tier.host.release(layer, e);
    }
    const HostTierStats stats = tier.host.stats();
    EXPECT_GT(stats.hits, 0u);
    EXPECT_GT(stats.misses, 0u);
    EXPECT_GT(stats.bytes_read, 0u);
    EXPECT_TRUE(tier.host.fault().empty());
  }
}

TEST(HostTier, KeepsWhatIsHeldWhileOthersComeAndGo) {
  const RandomExperts experts(shapes(), kEmbd, 2);
  Tier tier(experts.catalog, HostTier::min_bytes(experts.catalog));
  const Ffn first = tier.host.acquire(0, 5), again = tier.host.acquire(0, 5);
  EXPECT_EQ(first.gate.panels, again.gate.panels);
  tier.host.release(0, 5);  // still held once
  for (int round = 0; round < 3; ++round)
    for (const int layer : {0, 3})
      for (int e = 0; e < 24; ++e) {
        tier.host.acquire(layer, e);
        tier.host.release(layer, e);
      }
  EXPECT_EQ(tier.host.address(0, 5), first.gate.panels);
  EXPECT_TRUE(same(experts.catalog, 0, 5, first));
  tier.host.release(0, 5);
}

TEST(HostTier, LetsTheLongestUnusedGoFirst) {
  const RandomExperts experts({{DType::F32, DType::F32, 40, 16}, {DType::F32, DType::F32, 40, 16}}, kEmbd, 1);
  Tier tier(experts.catalog, HostTier::min_bytes(experts.catalog), 1);
  const int n = tier.host.n_slots();
  ASSERT_EQ(n, 56);
  const auto use = [&](int layer, int e) {
    tier.host.acquire(layer, e);
    tier.host.release(layer, e);
  };
  for (int e = 0; e < 40; ++e) use(0, e);
  for (int e = 0; e < n - 40; ++e) use(1, e);
  EXPECT_EQ(tier.host.stats().misses, static_cast<uint64_t>(n));
  use(0, 0);   // no longer the oldest
  use(1, 39);  // pushes out (0, 1)
  EXPECT_NE(tier.host.address(0, 0), nullptr);
  EXPECT_EQ(tier.host.address(0, 1), nullptr);
  EXPECT_NE(tier.host.address(0, 2), nullptr);
  EXPECT_FALSE(tier.host.try_acquire(0, 1).has_value());
  ASSERT_TRUE(tier.host.try_acquire(0, 2).has_value());
  use(1, 38);  // (0, 2) is held: (0, 3) goes
  EXPECT_NE(tier.host.address(0, 2), nullptr);
  EXPECT_EQ(tier.host.address(0, 3), nullptr);
  tier.host.release(0, 2);
}

TEST(HostTier, DoesNotLetAPromptPushOutWhatDecodingNeeds) {
  const RandomExperts experts(
      {{DType::F32, DType::F32, 40, 16}, {DType::F32, DType::F32, 40, 16}, {DType::F32, DType::F32, 40, 16}},
      kEmbd, 1);
  Tier tier(experts.catalog, HostTier::min_bytes(experts.catalog), 1);
  const auto use = [&](int layer, int e) {
    tier.host.acquire(layer, e);
    tier.host.release(layer, e);
  };
  for (int e = 0; e < 30; ++e) use(0, e);
  for (int e = 0; e < 26; ++e) use(1, e);
  tier.host.set_passing(true);
  for (int e = 0; e < 40; ++e) use(2, e);  // one slot serves them all, one after another
  tier.host.set_passing(false);
  int kept = 0;
  for (int e = 0; e < 40; ++e) kept += tier.host.address(0, e) != nullptr;
  for (int e = 0; e < 40; ++e) kept += tier.host.address(1, e) != nullptr;
  EXPECT_EQ(kept, 55);
}

TEST(HostTier, ServesSeveralThreadsAtOnce) {
  const RandomExperts experts(shapes(), kEmbd, 2);
  Tier tier(experts.catalog, HostTier::min_bytes(experts.catalog), 3);
  std::vector<std::vector<std::vector<std::byte>>> want(5);
  for (const int layer : {0, 2, 3, 4})
    for (int e = 0; e < 24; ++e)
      want[static_cast<size_t>(layer)].push_back(packed(experts.catalog, layer, e));
  std::atomic<int> n_wrong{0};
  std::vector<std::thread> users;
  for (unsigned user = 0; user < 3; ++user)
    users.emplace_back([&, user] {
      std::mt19937 random(user);
      for (int i = 0; i < 400; ++i) {
        const int layer = std::array{0, 2, 3, 4}[random() % 4];
        const int32_t e = static_cast<int32_t>(random() % 24);
        if (random() % 4 == 0) tier.host.want(layer, {&e, 1});
        const Ffn ffn = tier.host.acquire(layer, e);
        const size_t bytes = packed_matrix_bytes(ffn.gate.dtype, ffn.gate.n_rows, ffn.gate.n_cols);
        if (std::memcmp(ffn.gate.panels, want[static_cast<size_t>(layer)][static_cast<size_t>(e)].data(),
                        bytes) != 0)
          ++n_wrong;
        tier.host.release(layer, e);
      }
    });
  for (std::thread& user : users) user.join();
  EXPECT_EQ(n_wrong, 0);
}

// The experts' rows written to a file one after another, and a catalog whose views point into it.
struct FileExperts {
  std::string path;
  std::unique_ptr<MappedFile> file;
  ExpertCatalog catalog;

  explicit FileExperts(const RandomExperts& from) {
    path = ::testing::TempDir() + "/experts-" + std::to_string(::getpid());
    std::ofstream out(path, std::ios::binary);
    out << "some bytes that are no multiple of a page";
    std::vector<std::vector<Ffn>> layers;
    std::vector<uint64_t> places;
    for (const ExpertLayer& layer : from.catalog.layers) {
      layers.push_back(layer.experts);
      for (const Ffn& ffn : layer.experts)
        for (const Matrix* m : {&ffn.gate, &ffn.up, &ffn.down}) {
          places.push_back(static_cast<uint64_t>(out.tellp()));
          out.write(reinterpret_cast<const char*>(m->rows), static_cast<std::streamsize>(m->n_bytes()));
        }
    }
    out.close();
    file = std::make_unique<MappedFile>(path);
    auto place = places.begin();
    for (std::vector<Ffn>& layer : layers)
      for (Ffn& ffn : layer)
        for (Matrix* m : {&ffn.gate, &ffn.up, &ffn.down}) m->rows = file->bytes().data() + *place++;
    catalog = ExpertCatalog::of(std::move(layers), from.catalog.n_active, from.catalog.n_embd);
  }
  ~FileExperts() { std::remove(path.c_str()); }
};

TEST(HostTier, ReadsExpertsFromTheirFile) {
  const RandomExperts experts(shapes(), kEmbd, 2);
  const FileExperts in_file(experts);
  ThreadPool pool({.n_threads = 2});
  for (const uint64_t bytes :
       {HostTier::min_bytes(in_file.catalog), HostTier::bytes_for_all(in_file.catalog)}) {
    Tier tier(in_file.catalog, bytes, 2, {in_file.file.get()});
    tier.host.load(pool, {}, {});
    for (const int layer : {0, 2, 3, 4})
      for (int e = 0; e < 24; ++e) {
        EXPECT_TRUE(same(experts.catalog, layer, e, tier.host.acquire(layer, e))) << layer << " " << e;
        tier.host.release(layer, e);
      }
    EXPECT_TRUE(tier.host.fault().empty()) << tier.host.fault();
  }
}

// A download that is replaced, a stick that is pulled: an error, never a signal in a compute thread.
TEST(HostTier, ReportsAFileThatBecameShorter) {
  const RandomExperts experts(shapes(), kEmbd, 2);
  const FileExperts in_file(experts);
  ThreadPool pool({.n_threads = 2});
  Tier tier(in_file.catalog, HostTier::min_bytes(in_file.catalog), 2, {in_file.file.get()});
  ASSERT_EQ(::truncate(in_file.path.c_str(), 20000), 0);
  tier.host.acquire(0, 0);  // still in the cache
  tier.host.release(0, 0);
  EXPECT_TRUE(tier.host.fault().empty()) << tier.host.fault();
  const Ffn lost = tier.host.acquire(4, 23);
  EXPECT_NE(tier.host.fault().find("became shorter"), std::string_view::npos) << tier.host.fault();
  EXPECT_NE(tier.host.fault().find(in_file.path), std::string_view::npos);
  EXPECT_EQ(static_cast<int>(lost.gate.panels[0]), 0);
  tier.host.release(4, 23);
  EXPECT_THROW(tier.host.load(pool, {}, {}), LoadError);
}

TEST(HostTier, LoadsTheGivenExpertsFirst) {
  const RandomExperts experts({{DType::F32, DType::F32, 40, 16}, {DType::F32, DType::F32, 40, 16}}, kEmbd, 1);
  ThreadPool pool({.n_threads = 2});
  Tier tier(experts.catalog, HostTier::min_bytes(experts.catalog));
  std::vector<std::pair<int, int>> order;
  for (int e = 39; e >= 0; --e) order.emplace_back(1, e);
  tier.host.load(pool, order, {});
  for (int e = 0; e < 40; ++e) EXPECT_NE(tier.host.address(1, e), nullptr) << e;
  for (int e = 0; e < 16; ++e) EXPECT_NE(tier.host.address(0, e), nullptr) << e;
  EXPECT_EQ(tier.host.address(0, 16), nullptr);
  tier.host.acquire(0, 20);  // the last one loaded leaves
  tier.host.release(0, 20);
  EXPECT_EQ(tier.host.address(0, 15), nullptr);
}

}  // namespace
}  // namespace thermo
