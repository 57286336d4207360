#include "experts/courier.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/units.h"

namespace thermo {
namespace {

// More while they arrive, less when they do not; never none, so that a link that was busy is tried again.
constexpr float kMost = kMaxParcels, kLeast = 0.05f;
constexpr float kMore = 0.02f, kLess = 0.9f;
// What may be late, and what must be used of the rest. (Three quarters of the synthetic 35B-A3B's are used,
// nearly all that come; of Plankton's, a small trained model, 42 % with 40 % of its experts hot.)
constexpr float kLateShare = 0.2f, kUsefulShare = 0.5f;
constexpr float kMemory = 64.0f;  // parcels

}  // namespace

uint64_t Courier::place_bytes(const ExpertCatalog& catalog) {
  return align_up<uint64_t>(catalog.max_expert_bytes(), kExpertAlign);
}

Courier::Courier(const ExpertCatalog& catalog, ParcelDevice& device, std::byte* places)
    : catalog_(catalog), device_(device), places_(places), place_bytes_(place_bytes(catalog)) {}

void Courier::begin_step(uint32_t ticket) noexcept {
  ticket_ = ticket;
  for (Set& set : sets_) set.layer = -1;
}

bool Courier::sent(int layer, int expert) const noexcept {
  for (const Set& set : sets_)
    if (set.layer == layer && std::find(set.experts, set.experts + set.n, expert) != set.experts + set.n)
      return true;
  return false;
}

int Courier::allot(int n) noexcept {
  due_ = std::min(due_ + wanted_, kMost);
  const int whole = std::min(static_cast<int>(due_), n);
  due_ -= static_cast<float>(whole);
  return whole;
}

void Courier::send(int layer, std::span<const int32_t> experts, const std::byte* const* addresses) noexcept {
  THERMO_CHECK(experts.size() <= kMaxParcels, "more parcels than places");
  if (experts.empty()) return;
  set_ = (set_ + 1) % kSets;
  Set& set = sets_[set_];
  set.layer = layer;
  set.n = static_cast<int>(experts.size());
  std::copy(experts.begin(), experts.end(), set.experts);
  const uint64_t bytes = catalog_.layers[static_cast<size_t>(layer)].expert_bytes;
  for (size_t i = 0; i < experts.size(); ++i) {
    const int place = set_ * kMaxParcels + static_cast<int>(i);
    device_.send(places_ + static_cast<uint64_t>(place) * place_bytes_, addresses[i], bytes,
                 layer * kMaxParcels + static_cast<int>(i),
                 parcel_word(layer_ticket(ticket_, layer), experts[i], place));
  }
  n_sent_ += static_cast<int>(experts.size());
  n_all_sent_ += experts.size();
  sent_bytes_ += experts.size() * bytes;
}

void Courier::end_step(int n_come, int n_used) noexcept {
  const int sent = std::exchange(n_sent_, 0);
  if (sent == 0) return;
  const auto come = static_cast<float>(n_come);
  const float late = 1.0f - come / static_cast<float>(sent);
  if (n_come > 0) useful_ += std::min(come / kMemory, 1.0f) * (static_cast<float>(n_used) / come - useful_);
  const bool worth = late <= kLateShare && useful_ >= kUsefulShare;
  wanted_ = std::clamp(worth ? wanted_ + kMore : wanted_ * kLess, kLeast, kMost);
}

}  // namespace thermo
