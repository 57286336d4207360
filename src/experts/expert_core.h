// What every model with experts in several places shares: the experts packed in main memory, their heat, the
// ones that are hot on a device, the guesses and copies that run ahead, the split of cold experts over lanes,
// and the numbers all of this is judged by.
//
// Users add what differs. TieredExperts: no device, rounds over a cache of the file. SimExperts: a stand-in
// device on threads. GpuExperts: a card, its slots and its mailbox.
//
//   ExpertCore(...)   packs experts into main memory
//   attach(...)       fills the device's slots and starts whatever works ahead; never called without a device
//   begin_step ... end_step around every step; the heat map knows the step's uses before end_step
//
// One thread at a time, except where a part says otherwise.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/host_buffer.h"
#include "experts/catalog.h"
#include "experts/courier.h"
#include "experts/expert_place.h"
#include "experts/expert_store.h"
#include "experts/forecast.h"
#include "experts/heat.h"
#include "experts/host_tier.h"
#include "experts/lane_split.h"
#include "experts/placement.h"
#include "experts/read_ahead.h"
#include "experts/split_options.h"
#include "experts/telemetry.h"
#include "kernels/isa.h"

namespace thermo {

class ThreadPool;

// Experts by heat, for what is loaded first. Experts that were never used are left out.
std::vector<std::pair<int, int>> hottest_first(const ExpertCatalog& catalog, const HeatMap& heat);

// The hot set for these options, of which `lent_bytes` are kept free for prompts.
Placement place_by_heat(const ExpertCatalog& catalog, const HeatMap& heat, const SplitOptions& options,
                        uint64_t lent_bytes);

class ExpertCore {
 public:
  using Progress = std::function<void(uint64_t done, uint64_t total)>;

  // Main memory for experts: options.host_bytes, or all of them when that is 0. `isa`: what the processor
  // computes cold ones with. Throws MemoryError when less than HostTier::min_bytes() is given, LoadError when
  // the file cannot be read.
  ExpertCore(ExpertCatalog catalog, HeatMap heat, const SplitOptions& options, Isa isa, ThreadPool& pool,
             const Progress& progress);
  ~ExpertCore();
  ExpertCore(const ExpertCore&) = delete;
  ExpertCore& operator=(const ExpertCore&) = delete;

  struct Device {
    SlotDevice& slots;
    std::span<std::byte> slot_memory;  // ExpertStore::slot_bytes(placement)
    std::span<std::byte> lent_memory;  // holds experts between prompts; empty: none
    // What carries experts ahead, and its memory (Courier::places_bytes); nullptr: nothing is carried.
    ParcelDevice* link = nullptr;
    std::byte* parcel_memory = nullptr;
  };
  struct Guesses {
    RouteConfig route;
    std::vector<RouterView> routers;  // empty: nothing is guessed
    ThreadPool* pool = nullptr;       // whose threads work ahead: the processor lane's
    // The cold expert in main memory, or nullptr; see ReadAhead.
    ReadAhead::AddressFn cold_address;
  };
  void attach(const Device& device, const Placement& placement, const Guesses& guesses,
              const Progress& progress);
  // Before the device and the pool go: lets go of them.
  void detach() noexcept;

  // `prompt`: a step of many rows. It borrows the lent memory; the memory goes back with the first other
  // step, after which more experts than usual may move: a prompt's routing says more than thousands of single
  // tokens. Returns the step's ticket (cold_mail.h).
  uint32_t begin_step(int n_rows, bool prompt) noexcept;
  // Of n cold experts of a layer, how many the device reads where they lie in main memory instead of leaving
  // them to the processor: fetch_of[n], for this step. `can_read`: whether it can.
  void deal(std::span<int32_t> fetch_of, int n_rows, bool can_read) noexcept;
  // Which parcels of a layer were there in this step, and were used. Before end_step().
  void settle(int layer, uint32_t came, uint32_t carried) noexcept;
  void end_step() noexcept;

  // Between steps: heat and hot experts as they were right after loading.
  void reset();

  const ExpertCatalog& catalog() const noexcept { return catalog_; }
  const SplitOptions& options() const noexcept { return options_; }
  std::span<std::byte> arena() const noexcept { return {arena_.data(), arena_.size()}; }
  HeatMap& heat() noexcept { return heat_; }
  const HeatMap& heat() const noexcept { return heat_; }
  HostTier& host() noexcept { return host_; }
  const HostTier& host() const noexcept { return host_; }
  ExpertStore& store() noexcept { return *store_; }
  // For steps of about as many rows as the one that was begun last: the processor's time grows with them, the
  // link's does not.
  LaneSplit& lanes() noexcept { return lanes_[lanes_now_]; }
  const LaneSplit& lanes() const noexcept { return lanes_[lanes_now_]; }
  ReadAhead* ahead() noexcept { return ahead_.get(); }  // nullptr: nothing is guessed
  bool carries() const noexcept { return courier_ != nullptr; }
  bool lent() const noexcept { return lent_; }  // to prompts, now

  // Counted by whoever computes; telemetry() adds what the parts counted.
  ExpertTelemetry& counts() noexcept { return counts_; }
  // Pairs of a layer, of which so many found their expert hot.
  void count_pairs(int layer, uint64_t n_pairs, uint64_t n_hot) noexcept {
    counts_.pairs += n_pairs;
    counts_.hot_pairs += n_hot;
    layer_uses_[static_cast<size_t>(layer)].all += n_pairs;
    layer_uses_[static_cast<size_t>(layer)].hot += n_hot;
  }
  const std::vector<LayerUses>& layer_uses() const noexcept { return layer_uses_; }
  // Between steps: where every expert is, layer after layer.
  void places(std::span<ExpertPlace> out) const noexcept;
  ExpertTelemetry telemetry() const noexcept;
  // Why results can no longer be trusted; empty while they can.
  std::string_view fault() const noexcept { return host_.fault(); }

 private:
  std::vector<Matrix> in_memory() const;  // of the experts

  ExpertCatalog catalog_;
  HeatMap heat_, first_heat_;
  SplitOptions options_;
  Isa isa_;
  HostBuffer arena_;
  HostTier host_;
  std::vector<LaneSplit> lanes_;
  size_t lanes_now_ = 0;
  std::unique_ptr<ExpertStore> store_;
  std::unique_ptr<ExpertForecast> forecast_, far_forecast_;
  std::unique_ptr<Courier> courier_;
  std::unique_ptr<ReadAhead> ahead_;

  uint32_t ticket_ = 0;
  bool prompt_ = false;  // this step
  bool lent_ = false;
  bool after_prompt_ = false;  // this step is the first after one
  ExpertTelemetry counts_;
  std::vector<LayerUses> layer_uses_;
};

}  // namespace thermo
