// A stand-in for a GPU, so that everything about hot and cold experts runs and is tested without one: limited
// "device memory", a copy engine (a thread) with two queues like two streams of a card, and the table of
// experts.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "experts/courier.h"
#include "experts/expert_store.h"
#include "experts/trace.h"

namespace thermo {

class SimDevice final : public SlotDevice, public ParcelDevice {
 public:
  // `link_limit`: bytes a second, 0: as fast as memory.
  explicit SimDevice(const ExpertCatalog& catalog, TraceWriter* trace = nullptr, uint64_t link_limit = 0);
  ~SimDevice() override;
  SimDevice(const SimDevice&) = delete;
  SimDevice& operator=(const SimDevice&) = delete;

  // The store's side.
  uint64_t copy(std::byte* to, const std::byte* from, size_t n_bytes) noexcept override;
  bool done(uint64_t ticket) noexcept override;
  void wait(uint64_t ticket) noexcept override;
  void publish(int layer, int expert, const std::byte* address) noexcept override;

  // The courier's.
  void send(std::byte* to, const std::byte* from, size_t n_bytes, int index, uint64_t word) noexcept override;
  void publish_place(int index, const std::byte* address) noexcept override;

  // The step's side; one step at a time.
  void begin_step() noexcept;
  void end_step() noexcept;
  const std::byte* address(int layer, int expert) const noexcept {
    return table_[static_cast<size_t>(first_[static_cast<size_t>(layer)] + expert)];
  }
  // Word `i` of the layer's parcels; what was copied before it has arrived.
  uint64_t announced(int layer, int i) const noexcept {
    return announced_[static_cast<size_t>(layer * kMaxParcels + i)].load(std::memory_order_acquire);
  }
  const std::byte* place(int index) const noexcept { return places_[static_cast<size_t>(index)]; }
  // A copy of the running step's own; starts at once.
  uint64_t stream(std::byte* to, const std::byte* from, size_t n_bytes) noexcept;
  void wait_stream(uint64_t ticket) noexcept;

 private:
  struct Copy {
    uint64_t ticket;
    std::byte* to;
    const std::byte* from;
    size_t n_bytes;
    uint64_t after = 0;  // steps that must have ended
    int index = -1;      // of the word that announces it; -1: none
    uint64_t word = 0;
  };
  void copy_loop() noexcept;

  std::vector<int> first_;
  std::vector<const std::byte*> table_, places_;  // written between steps, read by steps: one thread
  std::vector<std::atomic<uint64_t>> announced_;
  TraceWriter* trace_;
  uint64_t link_limit_;

  std::mutex mutex_;
  std::condition_variable work_, progress_;
  std::deque<Copy> copies_, streams_;
  uint64_t last_copy_ = 0, done_copy_ = 0, last_stream_ = 0, done_stream_ = 0;
  uint64_t n_begun_ = 0, n_ended_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace thermo
