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
  std::vector<Sent> sent;
};

ExpertCatalog catalog_of(int n_layers) {
  const Matrix in{.dtype = DType::Q8_0, .n_rows = 32, .n_cols = 64};
  const Matrix out{.dtype = DType::Q8_0, .n_rows = 64, .n_cols = 32};
  return ExpertCatalog::of(
      std::vector(static_cast<size_t>(n_layers), std::vector<Ffn>(16, {.gate = in, .up = in, .down = out})),
      4, 64);
}

struct Fixture {
  ExpertCatalog catalog = catalog_of(40);
  Recorder device;
  std::vector<std::byte> places = std::vector<std::byte>(Courier::kPlaces * Courier::place_bytes(catalog));
  Courier courier{catalog, device, places.data()};

  // A step of which the link brings the first `arrive` parcels of each layer in time, `useful` of them
  // wanted.
  void step(int arrive, float useful = 1.0f) {
    courier.begin_step(ticket += 41);
    int come = 0;
    for (int layer = 1; layer < 40; ++layer) {
      const int n = courier.allot(kMaxParcels);
      const int32_t experts[kMaxParcels] = {1, 2, 3, 4};
      const std::byte* const addresses[kMaxParcels] = {};
      courier.send(layer, {experts, static_cast<size_t>(n)}, addresses);
      come += std::min(n, arrive);
    }
    wanted += useful * static_cast<float>(come);
    const int used = static_cast<int>(wanted);
    wanted -= static_cast<float>(used);
    courier.end_step(come, std::min(used, come));
  }
  uint32_t ticket = 0;
  float wanted = 0.0f;
};

TEST(Courier, AnnouncesEachParcelForItsLayerAndNeverWritesWhatTheLayersBeforeUse) {
  Fixture f;
  f.courier.begin_step(1000);
  const std::byte source[2] = {};
  const std::byte* const addresses[] = {source, source + 1};
  for (const int layer : {5, 6, 9}) {
    f.device.sent.clear();
    const int32_t experts[] = {7, 3};
    f.courier.send(layer, experts, addresses);
    ASSERT_EQ(f.device.sent.size(), 2u);
    for (int i = 0; i < 2; ++i) {
      const Sent& sent = f.device.sent[static_cast<size_t>(i)];
      EXPECT_EQ(sent.from, source + i);
      EXPECT_EQ(sent.n_bytes, f.catalog.layers[0].expert_bytes);
      EXPECT_EQ(sent.index, layer * kMaxParcels + i);
      EXPECT_EQ(parcel_ticket(sent.word), 1000u + static_cast<uint32_t>(layer) + 1);
      EXPECT_EQ(parcel_expert(sent.word), experts[i]);
      EXPECT_TRUE(f.courier.sent(layer, experts[i]));
      EXPECT_FALSE(f.courier.sent(layer, experts[i] + 1));
      EXPECT_FALSE(f.courier.sent(layer + 1, experts[i]));
      EXPECT_EQ(sent.to, f.places.data() + static_cast<uint64_t>(parcel_place(sent.word)) *
                                               Courier::place_bytes(f.catalog));
    }
  }
  // What is sent for a layer leaves the places of the two layers before alone.
  f.device.sent.clear();
  for (int layer = 10; layer < 30; ++layer) {
    const int32_t expert = layer % 16;
    f.courier.send(layer, {&expert, 1}, addresses);
  }
  for (size_t i = 2; i < f.device.sent.size(); ++i) {
    EXPECT_NE(f.device.sent[i].to, f.device.sent[i - 1].to);
    EXPECT_NE(f.device.sent[i].to, f.device.sent[i - 2].to);
    EXPECT_GE(f.device.sent[i].to, f.places.data());
    EXPECT_LE(f.device.sent[i].to + Courier::place_bytes(f.catalog), f.places.data() + f.places.size());
  }
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

TEST(Courier, CountsNothingWhereNothingWasSent) {
  Fixture f;
  const float before = f.courier.parcels_per_layer();
  for (int i = 0; i < 100; ++i) {
    f.courier.begin_step(1);
    EXPECT_EQ(f.courier.allot(0), 0);
    f.courier.send(3, {}, nullptr);
    f.courier.end_step(0, 0);
  }
  EXPECT_EQ(f.courier.parcels_per_layer(), before);
  EXPECT_EQ(f.courier.sent_bytes(), 0u);
}

}  // namespace
}  // namespace thermo
