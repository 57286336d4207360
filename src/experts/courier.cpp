#include "experts/courier.h"

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace thermo {
namespace {

// More while parcels arrive, fewer when they do not; never none, so that a link that was busy is tried again.
constexpr float kMost = kMaxParcels, kLeast = 0.05f;
constexpr float kMore = 0.02f, kLess = 0.9f;
// How many may be late, and how many of the rest must be used. (Of those that arrive, 70 to 75 % of the
// synthetic 35B-A3B's are used; of Plankton's, a small trained model, about 40 % with 40 % of its experts
// hot.)
constexpr float kLateShare = 0.2f, kUsefulShare = 0.5f;
constexpr float kMemory = 64.0f;  // parcels

// One parcel place for so many experts. A parcel that may stay should not be overwritten within its step.
constexpr int kExpertsPerPlace = 128, kMinPlaces = 16, kMaxPlaces = 64;

}  // namespace

std::vector<uint64_t> Courier::place_sizes(const ExpertCatalog& catalog) {
  std::map<uint64_t, int> n_experts;  // by size
  int n_all = 0;
  for (const ExpertLayer& layer : catalog.layers) {
    if (layer.n_expert() == 0) continue;
    n_experts[layer.expert_bytes] += layer.n_expert();
    n_all += layer.n_expert();
  }
  const int most = std::clamp(n_all / kExpertsPerPlace, kMinPlaces, kMaxPlaces);
  std::vector<uint64_t> sizes;
  for (const auto& [bytes, n] : n_experts)
    sizes.insert(sizes.end(), static_cast<size_t>(std::max(kMaxParcels, most * n / n_all)), bytes);
  return sizes;
}

uint64_t Courier::places_bytes(const ExpertCatalog& catalog) {
  const std::vector<uint64_t> sizes = place_sizes(catalog);
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
}

Courier::Courier(const ExpertCatalog& catalog, ParcelDevice& device, std::byte* places, KeepFn keep)
    : catalog_(catalog), device_(device), keep_(std::move(keep)), layers_(catalog.layers.size()) {
  for (const uint64_t bytes : place_sizes(catalog)) {
    device.publish_place(static_cast<int>(places_.size()), places);
    places_.push_back({.memory = places, .bytes = bytes});
    places += bytes;
  }
}

void Courier::begin_step(uint32_t ticket, int n_rows) noexcept {
  ticket_ = ticket;
  several_rows_ = n_rows > 1;
  for (Place& place : places_) place.layer = -1;
  for (Parcels& parcels : layers_) parcels.n = 0;
}

bool Courier::sent(int layer, int expert) const noexcept {
  const Parcels& parcels = layers_[static_cast<size_t>(layer)];
  return std::find(parcels.experts, parcels.experts + parcels.n, expert) != parcels.experts + parcels.n;
}

int Courier::allot(int n) noexcept {
  Rate& r = rate();
  r.due = std::min(r.due + r.wanted, kMost);
  const int whole = std::min(static_cast<int>(r.due), n);
  r.due -= static_cast<float>(whole);
  return whole;
}

// A place that this step has not filled, else the place of the earliest finished layer; -1: there is none.
int Courier::take_place(int layer) noexcept {
  const uint64_t bytes = catalog_.layers[static_cast<size_t>(layer)].expert_bytes;
  int found = -1, lowest = layer - kDistance;
  for (size_t i = 0; i < places_.size() && lowest >= 0; ++i)
    if (places_[i].bytes == bytes && places_[i].layer < lowest) {
      lowest = places_[i].layer;
      found = static_cast<int>(i);
    }
  if (lowest >= 0 && found >= 0) {
    const Place& place = places_[static_cast<size_t>(found)];
    layers_[static_cast<size_t>(place.layer)].places[place.parcel] = -1;
  }
  return found;
}

void Courier::send(int layer, std::span<const int32_t> experts, const std::byte* const* addresses) noexcept {
  Parcels& parcels = layers_[static_cast<size_t>(layer)];
  THERMO_CHECK(parcels.n == 0 && experts.size() <= kMaxParcels, "more parcels than words for them");
  const uint64_t bytes = catalog_.layers[static_cast<size_t>(layer)].expert_bytes;
  for (size_t i = 0; i < experts.size(); ++i) {
    const int at = take_place(layer);
    if (at < 0) break;
    Place& place = places_[static_cast<size_t>(at)];
    place.layer = layer;
    place.parcel = parcels.n;
    device_.send(place.memory, addresses[i], bytes, layer * kMaxParcels + parcels.n,
                 parcel_word(layer_ticket(ticket_, layer), experts[i], at));
    parcels.experts[parcels.n] = experts[i];
    parcels.places[parcels.n++] = at;
  }
  n_sent_ += parcels.n;
  n_all_sent_ += static_cast<uint64_t>(parcels.n);
  sent_bytes_ += static_cast<uint64_t>(parcels.n) * bytes;
}

void Courier::settle(int layer, uint32_t came, uint32_t carried) noexcept {
  n_came_ += std::popcount(came);
  n_used_ += std::popcount(carried);
  const Parcels& parcels = layers_[static_cast<size_t>(layer)];
  for (int i = 0; i < parcels.n; ++i) {
    if ((carried >> i & 1) == 0 || parcels.places[i] < 0) continue;
    Place& place = places_[static_cast<size_t>(parcels.places[i])];
    std::byte* const freed = keep_(layer, parcels.experts[i], place.memory);
    if (freed == nullptr) continue;
    place.memory = freed;
    device_.publish_place(parcels.places[i], freed);
  }
}

void Courier::end_step() noexcept {
  const int sent = std::exchange(n_sent_, 0), came = std::exchange(n_came_, 0),
            used = std::exchange(n_used_, 0);
  n_all_came_ += static_cast<uint64_t>(came);
  if (sent == 0) return;
  const float late = 1.0f - static_cast<float>(came) / static_cast<float>(sent);
  Rate& r = rate();
  if (came > 0)
    r.useful += std::min(static_cast<float>(came) / kMemory, 1.0f) *
                (static_cast<float>(used) / static_cast<float>(came) - r.useful);
  const bool worth = late <= kLateShare && r.useful >= kUsefulShare;
  r.wanted = std::clamp(worth ? r.wanted + kMore : r.wanted * kLess, kLeast, kMost);
}

}  // namespace thermo
