// The hybrid step on the stand-in device. The model's threads compute hot experts from "device memory". A CPU
// lane with a thread of its own computes cold ones: it gets its work through a mailbox, unless LaneSplit lets
// the device read an expert from main memory. Popular cold experts of a prompt stream through borrowed slots,
// and experts move all the time. The parts and their order are those of a GPU; only the speed is not.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "base/host_buffer.h"
#include "experts/cpu_lane.h"
#include "experts/expert_core.h"
#include "experts/expert_runner.h"
#include "experts/sim_device.h"

namespace thermo {

struct SimExpertsOptions {
  SplitOptions split;  // budget_bytes is the "device memory" for experts, guest slots included
  int n_batch = 512;
  int decode_rows = 32;       // more rows are a prompt: popular cold experts are streamed
  int stream_min_pairs = 12;  // rows of a chunk from which on a cold expert is streamed
  int lane_threads = 1;
  Isa isa = Isa::Portable;
  RouteConfig route;                // with `routers`: the lane guesses ahead
  std::vector<RouterView> routers;  // may be empty
};

class SimExperts final : public ExpertRunner {
 public:
  // Loads everything. `pool` is used while loading only. Throws MemoryError and LoadError.
  SimExperts(ExpertCatalog catalog, HeatMap heat, const SimExpertsOptions& options, ThreadPool& pool,
             const ExpertCore::Progress& progress);
  ~SimExperts() override;

  void begin_step(int n_rows) noexcept override;
  void end_step() noexcept override;
  void run(const RoutedLayer& layer) noexcept override;
  bool reset() override;
  HeatMap& heat() noexcept override { return core_.heat(); }
  ExpertTelemetry telemetry() const noexcept override { return core_.telemetry(); }
  void places(std::span<ExpertPlace> out) const noexcept override { core_.places(out); }
  std::span<const LayerUses> layer_uses() const noexcept override { return core_.layer_uses(); }
  std::string_view fault() const noexcept override { return core_.fault(); }

  const ExpertCatalog& catalog() const { return catalog_; }
  const Placement& placement() const { return placement_; }
  ExpertStore& store() { return core_.store(); }

 private:
  // The device writes everything but `answer`, then `post`; the lane sets sums, then `answer`.
  struct Mailbox {
    std::atomic<uint32_t> post{0};
    std::atomic<uint32_t> answer{0};
    int layer = 0;
    int n_rows = 0;
    std::vector<ColdPair> pairs;
    HostBuffer x;  // [rows][n_embd]
    const ExpertSums* sums = nullptr;
    uint64_t compute_ns = 0, wait_ns = 0;
    int n_experts = 0, n_foreseen = 0;
  };

  void lane_loop() noexcept;
  const std::byte* take_parcel(int layer, int expert) noexcept;
  void sort_out(const RoutedLayer& routed) noexcept;
  void fetch_some(const RoutedLayer& routed) noexcept;
  void make_hot(const FfnGroup& group, int layer, int expert, const std::byte* address) noexcept;
  void post_cold(const RoutedLayer& routed) noexcept;
  void add_answer(const RoutedLayer& routed) noexcept;
  void compute(const RoutedLayer& routed, std::span<const FfnGroup> groups, bool fresh) noexcept;
  void stream(const RoutedLayer& routed) noexcept;

  ExpertCore core_;
  const ExpertCatalog& catalog_;
  HostTier& host_;
  ExpertTelemetry& counts_;
  SimExpertsOptions options_;
  uint64_t guest_bytes_ = 0;
  Placement placement_;
  HostBuffer slots_, guest_, parcels_;
  SimDevice device_;

  // Of the layer being computed.
  std::vector<Ffn> ffns_;
  std::vector<FfnGroup> hot_, streamed_, cold_;
  std::vector<int32_t> streamed_experts_;
  int n_fetched_ = 0;

  uint64_t came_[kMaxParcels] = {};  // its parcels that are here
  struct Seen {
    uint32_t came = 0, carried = 0;  // as in ColdRecord
  };
  std::vector<Seen> seen_;         // of each layer of the step
  std::vector<int32_t> fetch_of_;  // of so many cold experts, how many the device reads in main memory
  uint32_t ticket_ = 0;            // of the step
  bool prompt_ = false;            // this step is a prompt

  Mailbox mailbox_;
  ThreadPool lane_pool_;
  std::unique_ptr<CpuLane> lane_;
  std::atomic<bool> stop_{false};
  std::thread lane_thread_;
};

}  // namespace thermo
