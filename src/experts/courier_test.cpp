#include "experts/courier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace thermo {
namespace {

struct Sent {
  std::byte* to;
  const std::byte* from;
  size_t n_bytes;
  int index;
  uint64_t word;
};

class Recorder final : public ParcelDevice {
 public:
  void send(std::byte* to, const std::byte* from, size_t n_bytes, int index,
            uint64_t word) noexcept override {
    sent.push_back({to, from, n_bytes, index, word});
  }
  void publish_place(int index, const std::byte* address) noexcept override {
    places.resize(std::max(places.size(), static_cast<size_t>(index) + 1));
    places[static_cast<size_t>(index)] = address;
  }
  std::vector<Sent> sent;
  std::vector<const std::byte*> places;
};

// The experts of every fourth layer are larger.
ExpertCatalog catalog_of(int n_layers) {
  const Matrix in{.dtype = DType::Q8_0, .n_rows = 32, .n_cols = 64};
  Matrix out{.dtype = DType::Q8_0, .n_rows = 64, .n_cols = 32};
  std::vector<std::vector<Ffn>> layers;
  for (int l = 0; l < n_layers; ++l) {
    out.dtype = l % 4 == 3 ? DType::F16 : DType::Q8_0;
    layers.emplace_back(64, Ffn{.gate = in, .up = in, .down = out});
  }
  return ExpertCatalog::of(std::move(layers), 4, 64);
}

struct Fixture {
  ExpertCatalog catalog = catalog_of(40);
  Recorder device;
  std::vector<std::byte> places = std::vector<std::byte>(Courier::places_bytes(catalog));
  Courier::KeepFn keep = [](int, int, std::byte*) { return nullptr; };
  Courier courier{catalog, device, places.data(),
                  [this](int layer, int expert, std::byte* memory) { return keep(layer, expert, memory); }};

  // A step in which the first `arrive` parcels of each layer arrive in time, and `useful` of them are wanted.
  void step(int arrive, float useful = 1.0f, int n_rows = 1) {
    courier.begin_step(ticket += 41, n_rows);
    for (int layer = Courier::kDistance; layer < 40; ++layer) {
      const int n = courier.allot(kMaxParcels);
      const int32_t experts[kMaxParcels] = {1, 2, 3, 4};
      const std::byte* const addresses[kMaxParcels] = {};
      courier.send(layer, {experts, static_cast<size_t>(n)}, addresses);
      const int come = std::min(n, arrive);
      wanted += useful * static_cast<float>(come);
      const int used = std::min(static_cast<int>(wanted), come);
      wanted -= static_cast<float>(used);
      courier.settle(layer, (1u << come) - 1, (1u << used) - 1);
    }
    courier.end_step();
  }
  uint32_t ticket = 0;
  float wanted = 0.0f;
};

TEST(Courier, AnnouncesEachParcelForItsLayer) {
  Fixture f;
  f.courier.begin_step(1000, 1);
  const std::byte source[2] = {};
  const std::byte* const addresses[] = {source, source + 1};
  for (const int layer : {5, 7, 9}) {
    f.device.sent.clear();
    const int32_t experts[] = {7, 3};
    f.courier.send(layer, experts, addresses);
    ASSERT_EQ(f.device.sent.size(), 2u);
    for (int i = 0; i < 2; ++i) {
      const Sent& sent = f.device.sent[static_cast<size_t>(i)];
      EXPECT_EQ(sent.from, source + i);
      EXPECT_EQ(sent.n_bytes, f.catalog.layers[static_cast<size_t>(layer)].expert_bytes);
      EXPECT_EQ(sent.index, layer * kMaxParcels + i);
      EXPECT_EQ(parcel_ticket(sent.word), 1000u + static_cast<uint32_t>(layer) + 1);
      EXPECT_EQ(parcel_expert(sent.word), experts[i]);
      EXPECT_TRUE(f.courier.sent(layer, experts[i]));
      EXPECT_FALSE(f.courier.sent(layer, experts[i] + 1));
      EXPECT_FALSE(f.courier.sent(layer + 1, experts[i]));
      EXPECT_EQ(sent.to, f.device.places[static_cast<size_t>(parcel_place(sent.word))]);
    }
  }
  f.courier.begin_step(2000, 1);
  EXPECT_FALSE(f.courier.sent(5, 7));
}

// Parcels that overlap in memory are for layers so far apart that the first was done when the second was
// sent.
TEST(Courier, NeverWritesWhatALayerMayStillUse) {
  Fixture f;
  f.courier.begin_step(1000, 1);
  const std::byte source[kMaxParcels] = {};
  const std::byte* const addresses[] = {source, source, source, source};
  for (int layer = Courier::kDistance; layer < 40; ++layer) {
    const int32_t experts[] = {7, 3, 9, 60};
    f.courier.send(layer, experts, addresses);
  }
  ASSERT_GT(f.device.sent.size(), 2 * f.device.places.size());
  for (size_t i = 0; i < f.device.sent.size(); ++i) {
    const Sent& later = f.device.sent[i];
    EXPECT_GE(later.to, f.places.data());
    EXPECT_LE(later.to + later.n_bytes, f.places.data() + f.places.size());
    for (size_t j = 0; j < i; ++j) {
      const Sent& before = f.device.sent[j];
      if (before.to + before.n_bytes <= later.to || later.to + later.n_bytes <= before.to) continue;
      EXPECT_LT(before.index / kMaxParcels, later.index / kMaxParcels - Courier::kDistance);
    }
  }
}

// The memory that is given for a kept parcel is the place's from then on; a parcel that was overwritten
// within the step is not offered.
TEST(Courier, ExchangesThePlacesOfParcelsThatStay) {
  Fixture f;
  std::vector<std::byte> others(f.places.size());
  std::vector<std::pair<int, std::byte*>> offered;  // expert, its address
  f.keep = [&](int, int expert, std::byte* memory) {
    offered.emplace_back(expert, memory);
    return expert == 7 ? others.data() : nullptr;
  };
  const std::byte source[kMaxParcels] = {};
  const std::byte* const addresses[] = {source, source, source, source};
  const int32_t experts[] = {3, 7, 9};
  f.courier.begin_step(1000, 1);
  f.courier.send(5, experts, addresses);
  f.courier.settle(5, 0b111, 0b110);  // 3 was not wanted
  f.courier.end_step();
  ASSERT_EQ(offered.size(), 2u);
  EXPECT_EQ(offered[0], std::pair(7, f.device.sent[1].to));
  EXPECT_EQ(offered[1], std::pair(9, f.device.sent[2].to));
  EXPECT_EQ(std::count(f.device.places.begin(), f.device.places.end(), others.data()), 1);
  EXPECT_EQ(std::count(f.device.places.begin(), f.device.places.end(), f.device.sent[1].to), 0);

  offered.clear();
  f.courier.begin_step(2000, 1);
  for (int layer = Courier::kDistance; layer < 40; ++layer) f.courier.send(layer, {experts, 3}, addresses);
  const std::byte* const kept = f.device.sent[1].to;
  EXPECT_TRUE(std::none_of(f.device.sent.begin() + 3, f.device.sent.end(),
                           [&](const Sent& sent) { return sent.to == kept; }));
  for (int layer = Courier::kDistance; layer < 40; ++layer) f.courier.settle(layer, 0b111, 0b111);
  EXPECT_LE(offered.size(), f.device.places.size());
  for (const auto& [expert, memory] : offered)
    EXPECT_EQ(std::count_if(offered.begin(), offered.end(),
                            [memory = memory](const auto& o) { return o.second == memory; }),
              1);
}

TEST(Courier, SendsWhatTheLinkCanCarry) {
  for (const int arrive : {1, 2, 3}) {
    Fixture f;
    for (int i = 0; i < 300; ++i) f.step(arrive);
    float mean = 0.0f;
    for (int i = 0; i < 100; ++i, mean += f.courier.parcels_per_layer() / 100.0f) f.step(arrive);
    // Up to a fifth may be late.
    EXPECT_GT(mean, static_cast<float>(arrive)) << arrive;
    EXPECT_LT(mean, 1.4f * static_cast<float>(arrive)) << arrive;
  }
  Fixture all;
  for (int i = 0; i < 300; ++i) all.step(kMaxParcels);
  EXPECT_EQ(all.courier.parcels_per_layer(), static_cast<float>(kMaxParcels));
}

TEST(Courier, TriesNowAndThenWhenNothingArrivesAndFindsBack) {
  Fixture f;
  for (int i = 0; i < 200; ++i) f.step(0);
  f.device.sent.clear();
  for (int i = 0; i < 10; ++i) f.step(0);
  EXPECT_GT(f.device.sent.size(), 0u);
  EXPECT_LT(f.device.sent.size(), 30u);  // of 1560 that four a layer would be
  for (int i = 0; i < 100; ++i) f.step(2);
  EXPECT_GT(f.courier.parcels_per_layer(), 1.5f);
}

TEST(Courier, SendsNextToNothingWhereGuessesAreWrong) {
  Fixture f;
  for (int i = 0; i < 100; ++i) f.step(kMaxParcels, 0.3f);
  EXPECT_LT(f.courier.parcels_per_layer(), 0.1f);
  for (int i = 0; i < 200; ++i) f.step(kMaxParcels, 0.9f);  // another text
  EXPECT_GT(f.courier.parcels_per_layer(), 2.0f);
}

TEST(Courier, KeepsStepsOfOneRowAndOfSeveralApart) {
  Fixture f;
  for (int i = 0; i < 100; ++i) {
    f.step(kMaxParcels);
    f.step(0, 1.0f, 2 + i % 60);
  }
  EXPECT_LT(f.courier.parcels_per_layer(), 0.1f);
  f.step(kMaxParcels);
  EXPECT_GT(f.courier.parcels_per_layer(), 2.9f);
}

TEST(Courier, CountsNothingWhereNothingWasSent) {
  Fixture f;
  const float before = f.courier.parcels_per_layer();
  for (int i = 0; i < 100; ++i) {
    f.courier.begin_step(1, 1);
    EXPECT_EQ(f.courier.allot(0), 0);
    f.courier.send(3, {}, nullptr);
    f.courier.end_step();
  }
  EXPECT_EQ(f.courier.parcels_per_layer(), before);
  EXPECT_EQ(f.courier.sent_bytes(), 0u);
}

}  // namespace
}  // namespace thermo
