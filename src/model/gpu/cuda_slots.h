// The copy engine of a card as the expert store and the courier use it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/link_limit.h"
#include "device/stream.h"
#include "experts/courier.h"
#include "experts/expert_store.h"

namespace thermo {

class TraceWriter;

// Slots, and the table that names them. Copies wait for no step: they are started between steps.
class CudaSlots final : public SlotDevice {
 public:
  // `table` and `n_cold`: the host's copies; `dirty` says that they changed.
  CudaSlots(const uint8_t** table, int32_t* n_cold, int n_expert, LinkLimit& limit, TraceWriter* trace)
      : table_(table), n_cold_(n_cold), n_expert_(n_expert), limit_(limit), trace_(trace) {}

  uint64_t copy(std::byte* to, const std::byte* from, size_t n_bytes) noexcept override;
  bool done(uint64_t ticket) noexcept override;
  void wait(uint64_t ticket) noexcept override;
  void publish(int layer, int expert, const std::byte* address) noexcept override;
  StreamView stream() const noexcept { return stream_.view(); }
  // Around other copies on stream().
  void begin_copies(size_t n_bytes) noexcept { limit_.begin(kLane, n_bytes, stream()); }
  void end_copies() noexcept { limit_.end(kLane, stream()); }

  bool dirty = true;

 private:
  static constexpr uint64_t kEvents = 64;
  static constexpr int kLane = 0;  // of the link

  void finish(uint64_t ticket) noexcept;

  struct Started {
    int64_t begin_ns = 0;
    size_t n_bytes = 0;
  };
  const uint8_t** table_;
  int32_t* n_cold_;
  int n_expert_;
  LinkLimit& limit_;
  TraceWriter* trace_;
  Started started_[kEvents] = {};
  Stream stream_;
  Event events_[kEvents];
  uint64_t issued_ = 0, finished_ = 0;
};

// A stream of its own: what is sent for a layer does not queue behind swaps.
class CudaParcels final : public ParcelDevice {
 public:
  // `places`: the host's copy of where they are; `dirty` is set when it changed.
  CudaParcels(uint64_t* announced, const uint8_t** places, bool& dirty, LinkLimit& limit, TraceWriter* trace)
      : announced_(announced), places_(places), dirty_(dirty), limit_(limit), trace_(trace) {}

  void send(std::byte* to, const std::byte* from, size_t n_bytes, int index, uint64_t word) noexcept override;
  void publish_place(int index, const std::byte* address) noexcept override;

 private:
  static constexpr int kLane = 1;  // of the link

  uint64_t* announced_;
  const uint8_t** places_;
  bool& dirty_;
  LinkLimit& limit_;
  TraceWriter* trace_;
  Stream stream_;
};

}  // namespace thermo
