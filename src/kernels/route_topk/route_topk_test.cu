// The lists of the GPU router against the choice by definition: every kind of gating, odd numbers of experts,
// padding rows, all rows to the same experts. And what becomes of cold experts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "device/buffer.h"
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
  bool drafts = false;  // the last two thirds of the rows are uncommitted
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
  // Two sequences with layers of one row more than there are; the drafted one is number 1.
  const int n_text = c.drafts ? c.n_valid / 3 : c.n_valid;
  const size_t layer_ids = (rows + 1) * static_cast<size_t>(c.n_used);
  std::vector<int32_t> group(rows, -1);
  for (int r = 0; r < c.n_valid; ++r) group[static_cast<size_t>(r)] = r >= n_text;
  DeviceBuffer drafted = to_device(std::vector<int16_t>(2 * layer_ids, -1)), device_group = to_device(group),
               group_begin = to_device(std::vector<int32_t>{0, n_text}),
               group_sequence = to_device(std::vector<int32_t>{0, 1}),
               group_uncommitted = to_device(std::vector<int32_t>{0, 1});
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
  args.out = {n_slots.as<int32_t>(),
              slot_memory.as<DeviceSlot>(),
              pair_row.as<int32_t>(),
              pair_of.as<int32_t>(),
              pair_weight.as<float>(),
              counts.as<int32_t>(),
              first.as<int32_t>(),
              slot_of.as<int32_t>(),
              chosen.as<int32_t>(),
              rank.as<int32_t>(),
              partial.as<float>(),
              counter.as<uint32_t>(),
              {.counts = uses.as<uint32_t>()}};
  if (c.drafts)
    args.out.uses = {.counts = uses.as<uint32_t>(),
                     .drafted = drafted.as<int16_t>(),
                     .sequence_stride = static_cast<int64_t>(layer_ids),
                     .n_valid = n_valid.as<int32_t>(),
                     .group = device_group.as<int32_t>(),
                     .group_begin = group_begin.as<int32_t>(),
                     .group_sequence = group_sequence.as<int32_t>(),
                     .group_uncommitted = group_uncommitted.as<int32_t>()};
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
  std::vector<std::vector<int32_t>> drafted_ids;  // of each uncommitted row
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
    if (r >= n_text)
      drafted_ids.push_back(ids);
    else
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
  if (!c.drafts) return;

  // What drafted rows chose waits, and counts once for those that are accepted: every other one.
  std::vector<int16_t> want_drafted(2 * layer_ids, -1);
  CountDraftedArgs count{.drafted = drafted.as<int16_t>() + layer_ids,
                         .layer_stride = static_cast<int64_t>(layer_ids),
                         .counts = uses.as<uint32_t>(),
                         .n_layer = 1,
                         .n_expert = c.n_expert,
                         .n_used = c.n_used};
  for (size_t r = 0; r < drafted_ids.size(); ++r) {
    std::copy(drafted_ids[r].begin(), drafted_ids[r].end(),
              want_drafted.begin() + static_cast<ptrdiff_t>(layer_ids + r * static_cast<size_t>(c.n_used)));
    if (r % 2 != 0 || count.n_rows == kMaxListRows) continue;
    count.rows[count.n_rows++] = static_cast<int32_t>(r);
    for (const int32_t id : drafted_ids[r]) ++want_uses[static_cast<size_t>(id)];
  }
  EXPECT_EQ(to_host(drafted.as<int16_t>(), 2 * layer_ids), want_drafted);
  count_drafted_cuda(count, {});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(to_host(uses.as<uint32_t>(), experts), want_uses);
}

// Layers lie behind each other; rows of dense ones chose nothing.
TEST(RouteCuda, CountsAcceptedRowsOfEveryLayer) {
  SKIP_WITHOUT_GPU();
  constexpr int kLayers = 5, kExperts = 37, kUsed = 3, kRows = 64;
  std::mt19937 random(3);
  std::vector<int16_t> drafted(kLayers * kRows * kUsed, -1);
  for (size_t i = 0; i < drafted.size(); ++i)
    if (i / (kRows * kUsed) != 2) drafted[i] = static_cast<int16_t>(random() % kExperts);
  std::vector<uint32_t> want(kLayers * kExperts, 7);
  DeviceBuffer device = to_device(drafted), counts = to_device(want);
  CountDraftedArgs args{.drafted = device.as<int16_t>(),
                        .layer_stride = kRows * kUsed,
                        .counts = counts.as<uint32_t>(),
                        .n_layer = kLayers,
                        .n_expert = kExperts,
                        .n_used = kUsed};
  for (const int n : {0, 1, 17, kRows}) {
    args.n_rows = n;
    for (int i = 0; i < n; ++i) args.rows[i] = kRows - n + i;
    count_drafted_cuda(args, {});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (int l = 0; l < kLayers; ++l)
      for (int i = 0; i < n * kUsed; ++i) {
        const int id = drafted[static_cast<size_t>((l * kRows + args.rows[i / kUsed]) * kUsed + i % kUsed)];
        if (id >= 0) ++want[static_cast<size_t>(l * kExperts + id)];
      }
    EXPECT_EQ(to_host(counts.as<uint32_t>(), want.size()), want) << n;
  }
}

TEST(RouteCuda, ListsAreThoseOfTheReference) {
  SKIP_WITHOUT_GPU();
  for (const int n_rows : {1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 64, 65, 100})
    for (const int tile : {8, 64}) {
      run_case({.n_rows = n_rows, .n_valid = n_rows, .tile = tile});
      run_case({.n_rows = n_rows, .n_valid = n_rows / 2, .tile = tile});
      run_case({.n_rows = n_rows, .n_valid = n_rows, .tile = tile, .drafts = true});
      run_case({.n_expert = 37, .n_rows = n_rows, .n_valid = (n_rows + 1) / 2, .tile = tile, .drafts = true});
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

// A step of several rows whose odd experts are cold. `parcels`: word number -> expert, with the ticket of the
// layer if the number is not kLate.
constexpr int kLate = 2;
void run_cold_case(int n_rows, int n_valid, int n_used, const std::map<int, int>& parcels) {
  SCOPED_TRACE(testing::Message() << "rows " << n_valid << "/" << n_rows << " used " << n_used);
  constexpr int kCols = 256, kExperts = 48, kLayer = 5;
  constexpr uint32_t kTicket = 1000;
  const auto rows = static_cast<size_t>(n_rows), used = static_cast<size_t>(n_used);
  std::mt19937 random(static_cast<unsigned>(n_rows + n_used));
  std::normal_distribution<float> normal(0.0f, 1.0f);
  const HostMatrix router(DType::F32, kExperts, kCols, random, 0.1f);
  std::vector<float> x(rows * kCols);
  for (float& v : x) v = normal(random);
  const RouteConfig config{Gating::Softmax, kExperts, n_used, true, 1.0f};
  const auto address = [](int of) {
    return reinterpret_cast<const uint8_t*>(static_cast<size_t>(of + 1) << 20);
  };
  constexpr int kHost = 1000, kPlaces = 2000;  // other addresses
  std::vector<const uint8_t*> base, host_base, places;
  for (int e = 0; e < kExperts; ++e) {
    base.push_back(e % 2 == 0 ? address(e) : nullptr);
    host_base.push_back(address(kHost + e));
  }
  for (int i = 0; i < 8; ++i) places.push_back(address(kPlaces + i));
  std::vector<uint64_t> announced(kMaxParcels, 0);
  std::map<int, const uint8_t*> came;  // expert -> address
  uint32_t want_came = 0;
  for (const auto& [i, expert] : parcels) {
    const uint32_t ticket = layer_ticket(kTicket, kLayer) - (i == kLate);
    announced[static_cast<size_t>(i)] = parcel_word(ticket, expert, 7 - i);
    if (i == kLate) continue;
    came[expert] = places[static_cast<size_t>(7 - i)];
    want_came |= 1u << i;
  }
  std::vector<int32_t> fetch_of;
  for (int n = 0; n <= kMaxFetchTable; ++n) fetch_of.push_back(n / 3);

  const size_t pairs = static_cast<size_t>(max_route_pairs(config, false, n_rows)),
               slots = static_cast<size_t>(max_route_slots(config, false, n_rows, kSlotRows));
  const auto ints = [](size_t n) { return to_device(std::vector<int32_t>(n, 0)); };
  DeviceBuffer panels = to_device(router.panels), device_x = to_device(x),
               norm = to_device(std::vector<float>(kCols, 1.0f)),
               factor = to_device(std::vector<float>(rows, 1.0f)), device_base = to_device(base),
               device_host = to_device(host_base), device_places = to_device(places),
               device_announced = to_device(announced), device_fetch = to_device(fetch_of),
               valid = to_device(std::vector<int32_t>{n_valid}), n_cold = to_device(std::vector<int32_t>{24}),
               ticket = to_device(std::vector<uint32_t>{kTicket}), n_pairs = ints(1), n_slots = ints(1),
               slot_memory(slots * sizeof(DeviceSlot)), pair_row = ints(pairs),
               pair_of = ints(rows * (used + 1)), pair_weight = ints(rows * (used + 1)),
               chosen = ints(rows * used), counter = ints(1),
               partial = ints(static_cast<size_t>(kRouterParts * kMaxListRows * kExperts));
  PinnedBuffer mail_memory(sizeof(ColdMail)), record_memory(sizeof(ColdRecord)),
      chosen_memory(kMaxMailRows * used * sizeof(int16_t));
  std::memset(mail_memory.data(), 0, mail_memory.size());
  const ColdMail& mail = *mail_memory.as<ColdMail>();
  const ColdRecord& record = *record_memory.as<ColdRecord>();

  DeviceRouteArgs args;
  args.config = config;
  args.router = router.at(reinterpret_cast<size_t>(panels.data()));
  args.stream = device_x.as<float>();
  args.norm = norm.as<float>();
  args.factor = factor.as<float>();
  args.base = device_base.as<const uint8_t*>();
  args.n_rows = n_rows;
  args.n_valid = valid.as<int32_t>();
  args.cold.mail = mail_memory.as<ColdMail>();
  args.cold.host_base = device_host.as<const uint8_t*>();
  args.cold.fetch_of = device_fetch.as<int32_t>();
  args.cold.n_cold = n_cold.as<int32_t>();
  args.cold.ticket = ticket.as<uint32_t>();
  args.cold.n_pairs = n_pairs.as<int32_t>();
  args.cold.chosen = chosen_memory.as<int16_t>();
  args.cold.record = record_memory.as<ColdRecord>();
  args.cold.announced = device_announced.as<uint64_t>();
  args.cold.places = device_places.as<const uint8_t*>();
  args.cold.layer = kLayer;
  args.out.n_slots = n_slots.as<int32_t>();
  args.out.slots = slot_memory.as<DeviceSlot>();
  args.out.pair_row = pair_row.as<int32_t>();
  args.out.pair_of = pair_of.as<int32_t>();
  args.out.pair_weight = pair_weight.as<float>();
  args.out.chosen = chosen.as<int32_t>();
  args.out.partial = partial.as<float>();
  args.out.counter = counter.as<uint32_t>();
  route_topk_cuda(args, {});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  std::map<int, std::set<int>> users;  // expert -> rows
  for (int r = 0; r < n_valid; ++r) {
    std::vector<float> logits = router.times(x.data() + static_cast<size_t>(r) * kCols), weights(used);
    std::vector<int32_t> ids(used);
    route_topk_ref(config, logits.data(), nullptr, ids.data(), weights.data());
    for (const int32_t id : ids) users[id].insert(r);
  }
  // Hot where the table says so or a parcel is here; of the others, in their order, a third is fetched.
  std::map<int, const uint8_t*> want_base;
  std::vector<int> cold;
  uint32_t want_carried = 0;
  for (const auto& [expert, of] : users) {
    if (expert % 2 == 0)
      want_base[expert] = address(expert);
    else if (came.contains(expert))
      want_base[expert] = came[expert];
    else
      cold.push_back(expert);
  }
  for (const auto& [i, expert] : parcels)
    if (i != kLate && users.contains(expert)) want_carried |= 1u << i;
  const size_t n_fetched = cold.size() / 3;
  size_t n_mail = 0;
  for (size_t i = 0; i < cold.size(); ++i) {
    if (i < n_fetched)
      want_base[cold[i]] = address(kHost + cold[i]);
    else
      n_mail += users[cold[i]].size();
  }

  EXPECT_EQ(record.came, want_came);
  EXPECT_EQ(record.carried, want_carried);
  EXPECT_EQ(record.n_cold, static_cast<int32_t>(cold.size()));
  EXPECT_EQ(record.n_fetched, static_cast<int32_t>(n_fetched));
  ASSERT_EQ(record.n_pairs, static_cast<int32_t>(n_mail));
  EXPECT_EQ(to_host(n_pairs.as<int32_t>(), 1)[0], record.n_pairs);
  // A layer that only used parcels tells, too: guesses go on from there.
  EXPECT_EQ(mail.posted, n_mail > 0 || want_carried != 0 ? layer_ticket(kTicket, kLayer) : 0u);
  std::map<int, std::set<int>> got;
  const auto got_slots = to_host(slot_memory.as<DeviceSlot>(), slots);
  const auto got_rows = to_host(pair_row.as<int32_t>(), pairs);
  for (int s = 0; s < to_host(n_slots.as<int32_t>(), 1)[0]; ++s) {
    const DeviceSlot& slot = got_slots[static_cast<size_t>(s)];
    EXPECT_TRUE(want_base.contains(slot.expert) && want_base[slot.expert] == slot.base) << slot.expert;
    for (int i = 0; i < slot.count; ++i)
      got[slot.expert].insert(got_rows[static_cast<size_t>(slot.first + i)]);
  }
  for (size_t i = 0; i < n_mail; ++i) {
    EXPECT_FALSE(want_base.contains(mail.pairs[i].expert)) << mail.pairs[i].expert;
    got[mail.pairs[i].expert].insert(mail.pairs[i].row);
  }
  EXPECT_EQ(got, users);
}

TEST(RouteCuda, TakesParcelsThatCameForHotExperts) {
  SKIP_WITHOUT_GPU();
  for (const auto& [n_rows, n_valid] : {std::pair{1, 1}, {2, 2}, {8, 5}, {16, 16}, {64, 40}})
    for (const int n_used : {1, 4, 8}) {
      run_cold_case(n_rows, n_valid, n_used, {});
      run_cold_case(n_rows, n_valid, n_used, {{0, 1}, {1, 47}, {kLate, 3}, {3, 21}});
      run_cold_case(n_rows, n_valid, n_used, {{3, 33}});
    }
  // Every expert that may be chosen is hot or has come: nothing is posted but that.
  std::map<int, int> all;
  for (const int i : {0, 1, 3}) all[i] = 2 * i + 1;
  for (int first = 0; first < 24; ++first) run_cold_case(2, 2, 1, {{0, 2 * first + 1}});
  run_cold_case(4, 4, 1, all);
}

}  // namespace
}  // namespace thermo
