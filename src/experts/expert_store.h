// Which experts are in device slots, and how they get there and leave.
//
// A slot holds one packed expert. The device finds experts through a table (expert -> address) that only
// changes between steps, so a step never sees a half-copied expert: a copy goes to a slot that no step reads,
// and the table names it once the copy has arrived. An expert that leaves is first taken out of the table;
// its slot is written only after every step that could read it has ended. Graphs hold the table's address,
// never an expert's.
//
// Swaps follow use: after each step the hottest experts outside replace the coldest inside, a few per step,
// when they are clearly hotter, and no layer falls below the placement's floor. An expert that was sent to
// the device as a parcel replaces one without a copy (exchange()). "Hot" is judged by expert_value(): how
// often an expert is used in the long run, and that one used just now is likely to be used again. One thread
// at a time calls a store.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "experts/catalog.h"
#include "experts/heat.h"
#include "experts/host_tier.h"
#include "experts/placement.h"

namespace thermo {

// The device's side: memory, a copy engine and the table.
class SlotDevice {
 public:
  virtual ~SlotDevice() = default;
  // Queues a copy into device memory that starts once every step begun so far has ended. Returns a ticket;
  // tickets finish in order.
  virtual uint64_t copy(std::byte* to, const std::byte* from, size_t n_bytes) noexcept = 0;
  virtual bool done(uint64_t ticket) noexcept = 0;
  virtual void wait(uint64_t ticket) noexcept = 0;
  // From the next step on the expert is at `address`; nullptr: cold.
  virtual void publish(int layer, int expert, const std::byte* address) noexcept = 0;
};

struct ExpertStoreOptions {
  std::span<std::byte> slots;  // device memory for the placed experts: slot_bytes(placement)
  std::span<std::byte> guest;  // device memory on loan: holds experts between prefills
  int max_moves = 0;           // copies started per step; 0: one for every four layers, at least two. Each
                               // exchange is one less, down to two
  int max_in_flight = 16;
  float hysteresis = 1.6f;           // how much hotter a newcomer must be
  float exchange_hysteresis = 1.1f;  // the same where nothing is copied
  int pin_layers = 0;                // experts of the first layers never leave
  bool frozen = false;               // no swaps
};

struct ExpertStoreStats {
  uint64_t moved = 0;        // experts that came in after load
  uint64_t exchanged = 0;    // of them, without a copy
  uint64_t moved_bytes = 0;  // of the others
  uint64_t evicted = 0;
  int n_hot = 0;  // published now
  int n_guests = 0;
};

// Expected uses of an expert in the near future: how often a token uses it in the long run (`rate`), over
// some tokens, and a part that fades with the tokens since its last use.
float expert_value(float rate, uint64_t age) noexcept;

class ExpertStore {
 public:
  ExpertStore(const ExpertCatalog& catalog, HostTier& host, SlotDevice& device, const Placement& placement,
              HeatMap& heat, const ExpertStoreOptions& options);
  ~ExpertStore();
  ExpertStore(const ExpertStore&) = delete;
  ExpertStore& operator=(const ExpertStore&) = delete;

  static uint64_t slot_bytes(const ExpertCatalog& catalog, const Placement& placement);

  // Copies the placed experts in and publishes them, and others into the guest memory; returns when all have
  // arrived.
  void fill(const std::function<void(uint64_t done, uint64_t total)>& progress);

  // Between steps: makes hot what fill() made hot, and nothing else; returns when all have arrived.
  void reset();

  // Between steps. begin_step(): publishes what has arrived. end_step(): the heat map holds the step's uses;
  // starts swaps. `n_moves`: most copies to start now (0: the option's number; more after a prompt).
  void begin_step() noexcept;
  void end_step(int n_moves = 0) noexcept;
  // During a step, if there is time: part of the work that end_step() would begin with.
  void look() noexcept;

  // Between steps: the expert is in `memory` of the device, which has its size and which no step reads. If it
  // is worth more than a hot one of its layer, it is hot there from the next step on. Then the memory of the
  // one that leaves is returned; it is the caller's after the steps begun so far. Else nullptr.
  std::byte* exchange(int layer, int expert, std::byte* memory) noexcept;

  // The guest memory is needed (prefill): its experts leave the table at once, and it is the caller's after
  // the steps begun so far. give_back_guest(): it may be filled again.
  void take_guest() noexcept;
  void give_back_guest() noexcept;

  bool hot(int layer, int expert) const noexcept;  // published
  int n_cold(int layer) const noexcept;            // experts of a layer that are not
  bool arriving(int layer, int expert) const noexcept;
  int64_t promoted_ns(int layer, int expert) const noexcept;  // see ExpertPlace
  const std::byte* address(int layer, int expert) const noexcept;
  ExpertStoreStats stats() const noexcept;

  // For tests: makes exactly these experts hot, as far as slots allow, and waits for the copies.
  void force(const std::vector<std::vector<int32_t>>& hot);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
