// Carries experts to the device before they are needed: parcels for the layer after the next travel over the
// link while the device and the processor are at this one and the next. (For the next layer alone they come
// too late: an expert takes 40 us over a good link, a layer little more.)
//
// A parcel is a copy and, behind it, a word that says for which layer of which step it is (cold_mail.h).
// Nobody waits for one: a parcel that is not there when its layer looks was carried for nothing, and the
// expert goes to the processor as if it had not been guessed. So the number that is sent follows what
// arrives, and what of it is used: one that is not takes as much of main memory as it would have saved.
//
// kDistance + 1 sets of places are filled in turn, one for each layer that is sent to. That is enough: when a
// layer posts, all layers before it are done, and with them the one that was sent to kDistance + 1 posts
// earlier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "experts/catalog.h"
#include "kernels/route_topk/cold_mail.h"

namespace thermo {

// The link. Parcels arrive in the order they are sent in.
class ParcelDevice {
 public:
  virtual ~ParcelDevice() = default;
  // Copies, then makes number `index` of the announced words `word`.
  virtual void send(std::byte* to, const std::byte* from, size_t n_bytes, int index,
                    uint64_t word) noexcept = 0;
};

class Courier {
 public:
  static constexpr int kDistance = 2;  // layers between the one that posts and the one that is sent to
  static constexpr int kSets = kDistance + 1;
  static constexpr int kPlaces = kSets * kMaxParcels;
  static uint64_t place_bytes(const ExpertCatalog& catalog);

  // `places`: kPlaces of place_bytes() each, on the device. Both must outlive it.
  Courier(const ExpertCatalog& catalog, ParcelDevice& device, std::byte* places);

  // `ticket`: of the step.
  void begin_step(uint32_t ticket) noexcept;
  // How many of n likely experts of a layer shall be sent. Each call counts as a layer.
  int allot(int n) noexcept;
  // Sends the experts of `layer`, likeliest first, at most kMaxParcels; `addresses` in host memory.
  void send(int layer, std::span<const int32_t> experts, const std::byte* const* addresses) noexcept;
  // Whether the expert is on its way in this step.
  bool sent(int layer, int expert) const noexcept;
  // How many of the parcels of the step were there when their layers looked, and how many of those were used.
  void end_step(int n_come, int n_used) noexcept;

  uint64_t n_sent() const { return n_all_sent_; }
  uint64_t sent_bytes() const { return sent_bytes_; }
  float parcels_per_layer() const { return wanted_; }

 private:
  const ExpertCatalog& catalog_;
  ParcelDevice& device_;
  std::byte* places_;
  uint64_t place_bytes_;
  uint32_t ticket_ = 0;
  int set_ = 0;
  struct Set {
    int layer = -1;  // of this step
    int n = 0;
    int32_t experts[kMaxParcels];
  };
  Set sets_[kSets];
  int n_sent_ = 0;       // in this step
  float wanted_ = 1.0f;  // parcels for a layer, on average
  float due_ = 0.0f;     // what is left of it from the layers before
  float useful_ = 1.0f;  // share of those that came lately
  uint64_t n_all_sent_ = 0, sent_bytes_ = 0;
};

}  // namespace thermo
