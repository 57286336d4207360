// Sends experts to the device before they are needed. A parcel is such an expert: parcels for a layer travel
// over the link while the device and the processor work on the kDistance layers before it. (For the next
// layer alone they come too late: an expert takes 40 us over a good link, a layer little more.)
//
// After the copy of a parcel comes a word that says for which layer of which step it is (cold_mail.h). No one
// waits for a parcel: if it has not arrived when its layer looks, it was sent for nothing, and the expert
// goes to the processor as if it had not been guessed. So the number of parcels follows how many arrive and
// how many of these are used: an unused parcel takes as much of main memory's time as a used one saves. Steps
// of one row and of several have numbers of their own: with several rows the device also reads experts in
// main memory, which holds parcels up, and other experts are chosen.
//
// A parcel that was used may stay. If its expert is worth a slot, the parcel place becomes that slot, and the
// memory of the expert that leaves becomes the parcel place (ExpertStore::exchange). This moves experts
// without copying them.
//
// Each parcel place (here: place) has the size of some layers' experts. A step fills each place once. A
// layer's post means that all earlier layers have finished, so their places may be filled again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "experts/catalog.h"
#include "kernels/route_topk/cold_mail.h"

namespace thermo {

// The link. Parcels arrive in the order in which they are sent.
class ParcelDevice {
 public:
  virtual ~ParcelDevice() = default;
  // Copies, then sets number `index` of the announced words to `word`.
  virtual void send(std::byte* to, const std::byte* from, size_t n_bytes, int index,
                    uint64_t word) noexcept = 0;
  // From the next step on place `index` is at `address`.
  virtual void publish_place(int index, const std::byte* address) noexcept = 0;
};

class Courier {
 public:
  static constexpr int kDistance = 3;  // layers between the one that posts and the one that is sent to
  // The places for a model: how large each is.
  static std::vector<uint64_t> place_sizes(const ExpertCatalog& catalog);
  static uint64_t places_bytes(const ExpertCatalog& catalog);

  // Whether an expert in `memory` stays there: returns the memory that becomes the place instead, or nullptr
  // if it does not stay (ExpertStore::exchange).
  using KeepFn = std::function<std::byte*(int layer, int expert, std::byte* memory)>;

  // `places`: places_bytes() on the device. All must outlive it.
  Courier(const ExpertCatalog& catalog, ParcelDevice& device, std::byte* places, KeepFn keep);

  // `ticket`: of the step.
  void begin_step(uint32_t ticket, int n_rows) noexcept;
  // How many of n likely experts of a layer to send. Each call counts as a layer.
  int allot(int n) noexcept;
  // Called by the layer kDistance earlier: sends the experts of `layer`, likeliest first, at most
  // kMaxParcels, while there are places; `addresses` are in host memory.
  void send(int layer, std::span<const int32_t> experts, const std::byte* const* addresses) noexcept;
  // Whether the expert is on its way in this step.
  bool sent(int layer, int expert) const noexcept;
  // After the step, before end_step(): which parcels of a layer had arrived, and which were used
  // (ColdRecord). The heat map already counts the step; a used parcel may stay.
  void settle(int layer, uint32_t came, uint32_t carried) noexcept;
  void end_step() noexcept;

  uint64_t n_sent() const { return n_all_sent_; }
  uint64_t n_came() const { return n_all_came_; }
  uint64_t sent_bytes() const { return sent_bytes_; }
  float parcels_per_layer() const { return rate().wanted; }  // in steps like the one that was begun last

 private:
  struct Place {
    std::byte* memory = nullptr;
    uint64_t bytes = 0;
    int layer = -1;  // of this step: the layer whose parcel it holds
    int parcel = 0;  // which of that layer
  };
  struct Parcels {  // of a layer in this step
    int n = 0;
    int32_t experts[kMaxParcels];
    int places[kMaxParcels];  // -1: filled again since then
  };
  // How many are sent.
  struct Rate {
    float wanted = 1.0f;  // parcels for a layer, on average
    float due = 0.0f;     // the remainder of it from earlier layers
    float useful = 1.0f;  // share of recent arrivals that were used
  };
  Rate& rate() { return rates_[several_rows_]; }
  const Rate& rate() const { return rates_[several_rows_]; }
  int take_place(int layer) noexcept;

  const ExpertCatalog& catalog_;
  ParcelDevice& device_;
  KeepFn keep_;
  std::vector<Place> places_;
  std::vector<Parcels> layers_;
  uint32_t ticket_ = 0;
  int n_sent_ = 0, n_came_ = 0, n_used_ = 0;  // in this step
  Rate rates_[2];
  bool several_rows_ = false;
  uint64_t n_all_sent_ = 0, n_all_came_ = 0, sent_bytes_ = 0;
};

}  // namespace thermo
