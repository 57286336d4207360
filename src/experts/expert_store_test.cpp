#include "experts/expert_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>

#include "base/host_buffer.h"
#include "base/thread_pool.h"
#include "experts/testing/random_experts.h"

namespace thermo {
namespace {

using testing::LayerShape;
using testing::RandomExperts;

using Table = std::map<std::pair<int, int>, const std::byte*>;

// A device whose steps and copies end when the test says so. A step runs with the table it began with; a copy
// waits for the steps begun before it, and must not touch what any running step can read.
class FakeDevice final : public SlotDevice {
 public:
  uint64_t copy(std::byte* to, const std::byte* from, size_t n_bytes) noexcept override {
    copies_.push_back({++last_ticket_, to, from, n_bytes, n_begun_});
    ++n_copies;
    return last_ticket_;
  }
  bool done(uint64_t ticket) noexcept override { return ticket <= done_ticket_; }
  void wait(uint64_t ticket) noexcept override {
    while (!done(ticket)) {
      while (!steps_.empty() && steps_.front().number <= copies_.front().after) end_step();
      ASSERT_TRUE(run_copy());
    }
  }
  void publish(int layer, int expert, const std::byte* address) noexcept override {
    EXPECT_TRUE(between_steps) << "the table changed while a step was being started";
    if (address)
      table[{layer, expert}] = address;
    else
      EXPECT_EQ(table.erase({layer, expert}), 1u) << "taken out twice";
  }

  void begin_step() { steps_.push_back({++n_begun_, table}); }
  void end_step() { steps_.pop_front(); }
  bool run_copy() {
    if (copies_.empty() || (!steps_.empty() && steps_.front().number <= copies_.front().after)) return false;
    const Copy c = copies_.front();
    copies_.pop_front();
    write(c.to, c.from, c.n_bytes);
    done_ticket_ = c.ticket;
    return true;
  }
  void write(std::byte* to, const std::byte* from, size_t n_bytes) {
    for (const Step& step : steps_)
      for (const auto& [expert, address] : step.table)
        EXPECT_TRUE(address + 1 <= to || address >= to + n_bytes) << "a running step reads this slot";
    std::memcpy(to, from, n_bytes);
  }
  size_t n_running() const { return steps_.size(); }
  size_t n_waiting() const { return copies_.size(); }

  Table table;
  bool between_steps = true;
  int n_copies = 0;

 private:
  struct Copy {
    uint64_t ticket;
    std::byte* to;
    const std::byte* from;
    size_t n_bytes;
    uint64_t after;
  };
  struct Step {
    uint64_t number;
    Table table;
  };
  std::deque<Copy> copies_;
  std::deque<Step> steps_;
  uint64_t last_ticket_ = 0, done_ticket_ = 0, n_begun_ = 0;
};

constexpr int kLayers = 4, kExperts = 12, kActive = 2;

// Two sizes and a dense layer.
std::vector<LayerShape> shapes() {
  return {{DType::F32, DType::F32, kExperts, 16},
          {},
          {DType::F32, DType::F32, kExperts, 32},
          {DType::F32, DType::F32, kExperts, 16}};
}

struct StoreUnderTest {
  RandomExperts experts{shapes(), 32, kActive};
  ThreadPool pool{{.n_threads = 1}};
  HostBuffer main_memory;
  HostTier host;
  HeatMap heat;
  FakeDevice device;
  Placement placement;
  HostBuffer slots, guest, places;  // each with 4096 unused bytes after it
  uint64_t guest_bytes;
  std::vector<std::byte*> place_of;  // of each layer, in its size
  ExpertStore store;

  static ExpertStoreOptions with(ExpertStoreOptions o, const HostBuffer& slots, const Placement& placement,
                                 const ExpertCatalog& catalog, const HostBuffer& guest,
                                 uint64_t guest_bytes) {
    o.slots = {slots.data(), ExpertStore::slot_bytes(catalog, placement)};
    o.guest = {guest.data(), guest_bytes};
    return o;
  }

  explicit StoreUnderTest(double share, int n_guests = 0, ExpertStoreOptions options = {}, int floor = 1)
      : main_memory(HostTier::bytes_for_all(experts.catalog)),
        host(experts.catalog, {.arena = {main_memory.data(), main_memory.size()}}),
        heat(experts.catalog, 256.0),
        placement(place_experts({.catalog = &experts.catalog,
                                 .budget_bytes = static_cast<uint64_t>(
                                     share * static_cast<double>(experts.catalog.total_bytes())),
                                 .floor = floor,
                                 .pin_layers = options.pin_layers})),
        slots(ExpertStore::slot_bytes(experts.catalog, placement) + 4096),
        guest(static_cast<uint64_t>(n_guests) * experts.catalog.max_expert_bytes() + 4096),
        places(kLayers * experts.catalog.max_expert_bytes() + 4096),
        guest_bytes(static_cast<uint64_t>(n_guests) * experts.catalog.max_expert_bytes()),
        store(experts.catalog, host, device, placement, heat,
              with(options, slots, placement, experts.catalog, guest, guest_bytes)) {
    host.load(pool, {}, {});
    for (uint64_t l = 0; l < kLayers; ++l)
      place_of.push_back(places.data() + l * experts.catalog.max_expert_bytes());
  }

  // Brings an expert to its layer's place and offers it. Returns whether it stays.
  bool carry(int layer, int expert) {
    std::byte*& place = place_of[static_cast<size_t>(layer)];
    device.write(place, host.address(layer, expert),
                 experts.catalog.layers[static_cast<size_t>(layer)].expert_bytes);
    std::byte* const freed = store.exchange(layer, expert, place);
    if (freed != nullptr) place = freed;
    return freed != nullptr;
  }

  // Table and store agree, slots are inside their memory and hold what the table says, no two experts share
  // one.
  void check() const {
    std::map<const std::byte*, size_t> ends;
    int n_hot = 0;
    for (int l = 0; l < kLayers; ++l) {
      const ExpertLayer& layer = experts.catalog.layers[static_cast<size_t>(l)];
      int n_cold = 0;
      for (int e = 0; e < layer.n_expert(); ++e) {
        const auto entry = device.table.find({l, e});
        ASSERT_EQ(store.hot(l, e), entry != device.table.end()) << l << " " << e;
        ASSERT_EQ(store.address(l, e), store.hot(l, e) ? entry->second : nullptr);
        n_cold += !store.hot(l, e);
        if (!store.hot(l, e)) continue;
        ++n_hot;
        const std::byte* const at = entry->second;
        const auto inside = [&](const HostBuffer& memory) {
          return at >= memory.data() && at + layer.expert_bytes <= memory.data() + memory.size() - 4096;
        };
        ASSERT_TRUE(inside(slots) || inside(guest) || inside(places)) << l << " " << e;
        ASSERT_TRUE(std::find(place_of.begin(), place_of.end(), at) == place_of.end())
            << "a place that may be written";
        ASSERT_EQ(std::memcmp(at, host.address(l, e), layer.expert_bytes), 0) << l << " " << e;
        ASSERT_TRUE(ends.emplace(at, layer.expert_bytes).second) << "two experts in one slot";
      }
      ASSERT_EQ(store.n_cold(l), n_cold);
    }
    const std::byte* end = nullptr;
    for (const auto& [begin, bytes] : ends) {
      ASSERT_GE(begin, end);
      end = begin + bytes;
    }
    ASSERT_EQ(store.stats().n_hot, n_hot);
  }

  // One step that uses these experts, with nothing left running.
  void step(const std::vector<std::pair<int, int>>& used) {
    store.begin_step();
    device.between_steps = false;
    device.begin_step();
    device.end_step();
    device.between_steps = true;
    for (const auto& [layer, expert] : used) heat.use(layer, expert);
    heat.advance(1);
    store.end_step();
  }
  void run_copies() {
    while (device.run_copy()) continue;
  }
};

TEST(ExpertStore, FillsItsSlotsWithThePlacement) {
  for (const double share : {0.0, 0.02, 0.3, 0.61, 1.0}) {
    StoreUnderTest t(share);
    uint64_t done = 0, total = 1;
    t.store.fill([&](uint64_t d, uint64_t n) { done = d, total = n; });
    EXPECT_EQ(done, total);
    EXPECT_EQ(total, t.placement.bytes);
    t.check();
    EXPECT_EQ(t.store.stats().n_hot, t.placement.n_hot);
    for (int l = 0; l < kLayers; ++l)
      for (const int32_t e : t.placement.hot[static_cast<size_t>(l)]) EXPECT_TRUE(t.store.hot(l, e));
    EXPECT_EQ(t.store.stats().moved, 0u);
  }
}

TEST(ExpertStore, PublishesAnExpertOnlyAfterItsCopyArrived) {
  StoreUnderTest t(0.3);
  t.store.fill({});
  int newcomer = 0;
  while (t.store.hot(0, newcomer)) ++newcomer;
  for (int i = 0; i < 8 && t.device.n_waiting() == 0; ++i) t.step({{0, newcomer}});
  ASSERT_GT(t.device.n_waiting(), 0u);
  EXPECT_FALSE(t.store.hot(0, newcomer));
  t.check();
  t.store.begin_step();  // not arrived
  EXPECT_FALSE(t.store.hot(0, newcomer));
  t.run_copies();
  EXPECT_FALSE(t.store.hot(0, newcomer));  // arrived, but no step has begun since
  t.store.begin_step();
  EXPECT_TRUE(t.store.hot(0, newcomer));
  t.check();
  EXPECT_EQ(t.store.stats().moved, 1u);
  EXPECT_EQ(t.store.stats().evicted, 1u);
}

TEST(ExpertStore, CopiesLessWhereExpertsComeInWithoutACopy) {
  for (const int n_carried : {0, 2, 4}) {
    ExpertStoreOptions options;
    options.max_moves = 5;
    StoreUnderTest t(0.5, 0, options);
    t.store.fill({});
    t.store.begin_step();
    for (const int l : {0, 2, 3})
      for (int e = 0; e < kExperts; ++e)
        if (!t.store.hot(l, e)) t.heat.use(l, e);
    t.heat.advance(1);
    int n_exchanged = 0;
    for (const int l : {0, 2, 3})
      for (int e = 0; e < kExperts && n_exchanged < n_carried; ++e)
        n_exchanged += !t.store.hot(l, e) && t.carry(l, e);
    ASSERT_EQ(n_exchanged, n_carried);
    const int before = t.device.n_copies;
    t.store.end_step();
    EXPECT_EQ(t.device.n_copies - before, std::max(2, 5 - n_carried));
  }
}

// The property that makes swapping while serving safe, over thousands of random interleavings of steps,
// copies, guests and changes of mind.
TEST(ExpertStore, NeverWritesASlotThatARunningStepCanRead) {
  uint64_t n_moved = 0;
  int n_exchanged = 0;
  for (unsigned seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const double share = std::uniform_real_distribution<>(0.0, 1.0)(random);
    ExpertStoreOptions options;
    options.max_moves = 1 + static_cast<int>(random() % 4);
    options.max_in_flight = 1 + static_cast<int>(random() % 6);
    options.pin_layers = static_cast<int>(random() % 2);
    StoreUnderTest t(share, static_cast<int>(random() % 5), options, 1 + static_cast<int>(random() % 3));
    t.store.fill({});
    t.check();
    bool guest_taken = false;
    for (int step = 0; step < 200; ++step) {
      t.store.begin_step();
      t.check();
      if (::testing::Test::HasFatalFailure()) return;
      t.device.between_steps = false;
      t.device.begin_step();
      while (t.device.n_running() > 1 + random() % 3) t.device.end_step();
      for (unsigned i = random() % 4; i > 0; --i) t.device.run_copy();
      t.device.between_steps = true;
      // A working set that moves on.
      for (int k = 0; k < 6; ++k)
        t.heat.use(std::array{0, 2, 3}[random() % 3],
                   (step / 20 + static_cast<int>(random() % 4)) % kExperts);
      t.heat.advance(1);
      const int before = t.device.n_copies, waiting = static_cast<int>(t.device.n_waiting());
      const int asked = random() % 8 == 0 ? 5 : 0;
      t.store.end_step(asked);
      EXPECT_LE(t.device.n_copies - before, asked ? asked : options.max_moves);
      EXPECT_LE(static_cast<int>(t.device.n_waiting()), std::max({options.max_in_flight, asked, waiting}));
      if (random() % 10 == 0) {
        if (!guest_taken) {
          t.store.take_guest();
          EXPECT_EQ(t.store.stats().n_guests, 0);
          for (const auto& [expert, address] : t.device.table)
            EXPECT_TRUE(address < t.guest.data() || address >= t.guest.data() + t.guest.size());
          while (t.device.n_running() > 0) t.device.end_step();
          std::memset(t.guest.data(), 0xee, t.guest.size());  // it is the caller's now
        } else {
          t.store.give_back_guest();
        }
        guest_taken = !guest_taken;
      }
      if (random() % 3 != 0) {
        while (t.device.n_running() > 0) t.device.end_step();
        n_exchanged += t.carry(std::array{0, 2, 3}[random() % 3],
                               (step / 20 + static_cast<int>(random() % 4)) % kExperts);
      }
      for (int l = 0; l < options.pin_layers; ++l)
        for (const int32_t e : t.placement.hot[static_cast<size_t>(l)]) EXPECT_TRUE(t.store.hot(l, e));
    }
    while (t.device.n_running() > 0) t.device.end_step();
    n_moved += t.store.stats().moved;
  }
  EXPECT_GT(n_moved, 300u);
  EXPECT_GT(n_exchanged, 100);
}

TEST(ExpertStore, LeavesACarriedExpertWhereItIsIfItIsWorthMoreThanAHotOne) {
  StoreUnderTest t(0.5);
  t.store.fill({});
  int newcomer = 0, hot = 0;
  while (t.store.hot(2, newcomer)) ++newcomer;
  while (!t.store.hot(2, hot)) ++hot;
  const int copies = t.device.n_copies;
  const std::byte* const carried = t.place_of[2];
  t.store.begin_step();
  t.heat.use(2, newcomer);
  t.heat.advance(1);
  t.store.look();
  EXPECT_FALSE(t.carry(2, hot)) << "it is hot already";
  EXPECT_TRUE(t.carry(2, newcomer));
  EXPECT_EQ(t.store.address(2, newcomer), carried);
  EXPECT_EQ(t.store.stats().exchanged, 1u);
  EXPECT_EQ(t.store.stats().moved, 1u);
  EXPECT_EQ(t.store.stats().moved_bytes, 0u);
  EXPECT_EQ(t.store.stats().evicted, 1u);
  EXPECT_EQ(t.device.n_copies, copies);
  t.check();

  // One that was never used is worth no more than the coldest.
  int unused = 0;
  while (t.store.hot(2, unused)) ++unused;
  EXPECT_FALSE(t.carry(2, unused));
  t.check();
}

TEST(ExpertStore, ExchangesNothingWhenFrozen) {
  ExpertStoreOptions options;
  options.frozen = true;
  StoreUnderTest t(0.5, 0, options);
  t.store.fill({});
  int newcomer = 0;
  while (t.store.hot(2, newcomer)) ++newcomer;
  t.heat.use(2, newcomer, 100.0f);
  t.store.look();
  EXPECT_FALSE(t.carry(2, newcomer));
  t.check();
}

TEST(ExpertStore, SettlesOnTheExpertsThatAreUsed) {
  StoreUnderTest t(0.5);
  t.store.fill({});
  // Every layer uses its last four experts, always.
  const auto uses = [] {
    std::vector<std::pair<int, int>> used;
    for (const int l : {0, 2, 3})
      for (int e = kExperts - 4; e < kExperts; ++e) used.emplace_back(l, e);
    return used;
  }();
  for (int i = 0; i < 60; ++i) {
    t.step(uses);
    t.run_copies();
  }
  t.check();
  for (const auto& [l, e] : uses) EXPECT_TRUE(t.store.hot(l, e)) << l << " " << e;
  const uint64_t moved = t.store.stats().moved;
  for (int i = 0; i < 60; ++i) {
    t.step(uses);
    t.run_copies();
  }
  EXPECT_EQ(t.store.stats().moved, moved) << "nothing clearly hotter is outside";
}

TEST(ExpertStore, GoesBackToWhatItWasFilledWith) {
  StoreUnderTest t(0.4, 3);
  t.store.fill({});
  const Table filled = t.device.table;
  std::mt19937 random(3);
  for (int i = 0; i < 60; ++i) {
    const int layer = std::array{0, 2, 3}[random() % 3], expert = static_cast<int>(random() % kExperts);
    t.step({{layer, expert}, {layer, (expert + 1) % kExperts}});
    if (i % 3 == 0) t.carry(layer, expert);
    if (i % 2 == 0) t.run_copies();
  }
  const auto keys = [](const Table& table) {
    std::set<std::pair<int, int>> hot;
    for (const auto& [expert, address] : table) hot.insert(expert);
    return hot;
  };
  ASSERT_NE(keys(t.device.table), keys(filled));
  const uint64_t moved = t.store.stats().moved;
  t.heat = HeatMap(t.experts.catalog, 256.0);
  t.store.reset();
  EXPECT_EQ(keys(t.device.table), keys(filled));
  EXPECT_GE(t.store.stats().moved, moved);
  t.check();
}

TEST(ExpertStore, KeepsTheFloorOfEveryLayer) {
  StoreUnderTest t(0.5, 0, {}, 3);
  t.store.fill({});
  ASSERT_EQ(t.placement.floor, 3);
  for (int i = 0; i < 200; ++i) {  // only the last layer is ever used
    t.step({{3, i % kExperts}, {3, (i + 1) % kExperts}, {3, (i + 2) % kExperts}});
    t.run_copies();
  }
  t.store.begin_step();
  t.check();
  EXPECT_GE(kExperts - t.store.n_cold(0), 3);
  EXPECT_EQ(t.store.n_cold(0), kExperts - 3) << "the rest went to the layer that is used";
}

TEST(ExpertStore, UsesGuestMemoryBetweenPromptsOnly) {
  StoreUnderTest t(0.3, 4);
  t.store.fill({});
  t.check();
  EXPECT_EQ(t.store.stats().n_guests, 4);
  t.store.take_guest();
  t.check();
  EXPECT_EQ(t.store.stats().n_guests, 0);
  EXPECT_EQ(t.store.stats().n_hot, t.placement.n_hot);
  for (int i = 0; i < 40; ++i) {
    t.step({{2, i % kExperts}, {0, i % kExperts}});
    t.run_copies();
  }
  EXPECT_EQ(t.store.stats().n_guests, 0);
  t.store.give_back_guest();
  for (int i = 0; i < 40; ++i) {
    t.step({{2, i % kExperts}, {0, i % kExperts}});
    t.run_copies();
  }
  t.store.begin_step();
  t.check();
  EXPECT_EQ(t.store.stats().n_guests, 4);
}

TEST(ExpertStore, MakesExactlyTheForcedExpertsHot) {
  ExpertStoreOptions options;
  options.frozen = true;
  StoreUnderTest t(0.6, 2, options);
  t.store.fill({});
  std::mt19937 random(4);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<int32_t>> hot(kLayers);
    for (const int l : {0, 2, 3}) {
      const auto n = random() % (t.placement.hot[static_cast<size_t>(l)].size() + 1);
      std::set<int32_t> chosen;
      while (chosen.size() < n) chosen.insert(static_cast<int32_t>(random() % kExperts));
      hot[static_cast<size_t>(l)].assign(chosen.begin(), chosen.end());
    }
    t.store.force(hot);
    t.check();
    for (int l = 0; l < kLayers; ++l)
      for (int e = 0; e < t.experts.catalog.layers[static_cast<size_t>(l)].n_expert(); ++e)
        EXPECT_EQ(t.store.hot(l, e),
                  std::count(hot[static_cast<size_t>(l)].begin(), hot[static_cast<size_t>(l)].end(), e) == 1);
    const int copies = t.device.n_copies;
    for (int i = 0; i < 8; ++i) t.step({{0, i}, {2, i}});
    EXPECT_EQ(t.device.n_copies, copies) << "frozen";
  }
  t.store.force({});
  EXPECT_EQ(t.store.stats().n_hot, 0);
}

TEST(ExpertStore, MovesManyAtOnceAfterAPrompt) {
  StoreUnderTest t(0.5);
  t.store.fill({});
  for (const int l : {0, 2, 3})
    for (int e = kExperts - 5; e < kExperts; ++e) t.heat.use(l, e, 100.0f);
  t.heat.advance(100);
  t.store.end_step(1000);
  t.run_copies();
  t.store.begin_step();
  t.check();
  for (const int l : {0, 2, 3})
    for (int e = kExperts - 5; e < kExperts; ++e) EXPECT_TRUE(t.store.hot(l, e)) << l << " " << e;
}

TEST(ExpertStore, ReadsFromTheFileWithoutWaitingForIt) {
  const RandomExperts experts({{DType::F32, DType::F32, 40, 16}, {DType::F32, DType::F32, 40, 16}}, 32, 2);
  HostBuffer memory(HostTier::min_bytes(experts.catalog));
  HostTier host(experts.catalog, {.arena = {memory.data(), HostTier::min_bytes(experts.catalog)}});
  HeatMap heat(experts.catalog);
  const Placement placement = place_experts(
      {.catalog = &experts.catalog, .budget_bytes = experts.catalog.total_bytes() / 4, .floor = 1});
  HostBuffer slots(placement.bytes);
  FakeDevice device;
  ExpertStore store(experts.catalog, host, device, placement, heat,
                    {.slots = {slots.data(), placement.bytes}, .guest = {}});
  store.fill({});
  std::mt19937 random(1);
  const auto n_hot = [&] {
    int n = 0;
    for (int e = 0; e < 6; ++e) n += store.hot(0, 30 + e) + store.hot(1, 20 + e);
    return n;
  };
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (n_hot() < 12 && std::chrono::steady_clock::now() < deadline) {
    store.begin_step();
    device.begin_step();
    device.end_step();
    device.run_copy();
    heat.use(0, static_cast<int>(30 + random() % 6));
    heat.use(1, static_cast<int>(20 + random() % 6));
    heat.advance(1);
    store.end_step();
  }
  // Read, copied and published without any wait.
  EXPECT_EQ(n_hot(), 12);
  EXPECT_GE(host.stats().misses, 12u);
  for (int e = 30; e < 36; ++e) {
    host.acquire(0, e);
    EXPECT_EQ(std::memcmp(store.address(0, e), host.address(0, e), experts.catalog.layers[0].expert_bytes),
              0);
    host.release(0, e);
  }
}

TEST(ExpertValue, GrowsWithUseAndFadesWithAge) {
  EXPECT_GT(expert_value(1.6f, 1000), expert_value(0.8f, 1000));
  EXPECT_GT(expert_value(0.8f, 1), expert_value(0.8f, 2));
  EXPECT_GT(expert_value(0.8f, 8), expert_value(0.8f, 100));
  EXPECT_EQ(expert_value(0.0f, ~uint64_t{0}), 0.0f);
  // Twice the long-run use outweighs having been used last.
  EXPECT_GT(expert_value(8.0f * 2 / 256, 1000), expert_value(8.0f * 1 / 256, 1));
}

}  // namespace
}  // namespace thermo
