// What split experts on a GPU have; shared by gpu_experts.cpp (loading, steps that are graphs) and
// gpu_experts_large.cpp (prompts).
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/host_buffer.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "device/buffer.h"
#include "device/copy_in.h"
#include "device/cuda_check.h"
#include "experts/courier.h"
#include "experts/cpu_lane.h"
#include "experts/expert_store.h"
#include "experts/lane_split.h"
#include "experts/placement.h"
#include "experts/read_ahead.h"
#include "experts/trace.h"
#include "model/gpu/cuda_slots.h"
#include "model/gpu/gpu_experts.h"

namespace thermo {

inline constexpr int kMaxBatchExperts = 16;  // streamed together
inline constexpr int kBatches = 8;           // of lent memory: what is copied while others are computed
inline constexpr int kStreamAllRows = 256;   // from here on nearly every expert of a layer is chosen
inline constexpr int kMaxCpuPairs = 512;     // of a layer of a larger step
inline constexpr int kMovesAfterPrompt = 64;

// A small model lends a small part of itself.
inline int batch_experts_of(const ExpertCatalog& catalog) {
  return std::clamp(catalog.n_expert * catalog.n_moe_layers() / (16 * kBatches), 1, kMaxBatchExperts);
}

inline uint64_t guest_bytes(const ExpertCatalog& catalog) {
  return static_cast<uint64_t>(kBatches * batch_experts_of(catalog)) *
         align_up<uint64_t>(catalog.max_expert_bytes(), kExpertAlign);
}

inline Placement place(const ExpertCatalog& catalog, const HeatMap& heat, const SplitOptions& options) {
  return place_experts({.catalog = &catalog,
                        .heat = &heat,
                        .budget_bytes = options.budget_bytes,
                        .floor = 0,
                        .pin_layers = options.pin_layers});
}

struct GpuExperts::Impl {
  ExpertCatalog catalog;
  SplitOptions options;
  ThreadPool& pool;
  int n_layer, n_expert, n_used, n_embd, n_batch;
  int batch_experts;

  HostBuffer arena;
  PageLock arena_lock;
  HostTier host;
  HeatMap heat, first_heat;
  LaneSplit split{kMaxFetchTable};

  // Device memory that steps look at, and its source: the table, the places of parcels, then n_cold.
  PinnedBuffer control_host;
  DeviceBuffer control;
  DeviceBuffer host_table;  // where cold experts lie in host memory
  DeviceBuffer n_pairs;     // [n_layer], and `near` of each layer
  DeviceBuffer slots, guest;
  DeviceBuffer parcels, announced, came;  // places; [n_layer][kMaxParcels] each
  CudaSlots device;
  std::unique_ptr<ExpertStore> store;

  PinnedBuffer mail_memory, x, y, records, chosen;
  std::unique_ptr<ExpertForecast> forecast, far_forecast;
  std::unique_ptr<CudaParcels> link;
  std::unique_ptr<Courier> courier;  // nullptr: nothing is carried
  std::unique_ptr<ReadAhead> ahead;  // nullptr: nothing is read early
  std::unique_ptr<CpuLane> lane;
  uint32_t ticket = 0, last_posted = 0;

  // Larger steps.
  struct Batch {
    int layer = 0;
    int n = 0;
    int32_t experts[kMaxBatchExperts];
  };
  PinnedBuffer batch_tables_host;  // [batches of a step][n_expert]
  DeviceBuffer batch_tables;       // [kBatches][n_expert]
  std::vector<Batch> batches;
  std::vector<size_t> layer_first_batch;  // of a step that streams everything
  size_t n_issued = 0;                    // batches whose copies are queued
  Event copied[kBatches], consumed[kBatches], decided;
  PinnedBuffer counts;      // [n_layer][n_expert + 1] first pair of each expert
  PinnedBuffer large_x;     // [kStreamAllRows][n_embd]
  PinnedBuffer large_rows;  // pair -> row
  PinnedBuffer large_y;     // [kMaxCpuPairs][n_embd]
  std::unique_ptr<CpuLane> large_lane;
  HostBuffer gathered;  // [kMaxCpuPairs][n_embd]
  std::vector<ColdPair> large_pairs;
  int large_rows_now = 0;

  ExpertTelemetry count;
  const char* fault = nullptr;
  std::string file_fault;             // what `fault` points to when the file could not be read
  std::vector<int64_t> answer_begin;  // of each layer in this step; 0: none

  Impl(const ModelConfig& config, const Weights& weights, const SplitOptions& o, int batch, Isa isa,
       ThreadPool& p, const LoadProgressFn& progress)
      : catalog(expert_catalog(config, weights)),
        options(o),
        pool(p),
        n_layer(config.n_layer),
        n_expert(config.route.n_expert),
        n_used(config.route.n_expert_used),
        n_embd(config.n_embd),
        n_batch(batch),
        batch_experts(batch_experts_of(catalog)),
        arena(host_arena_bytes()),
        host(catalog, {.arena = {arena.data(), arena.size()}, .files = o.files, .trace = o.trace}),
        heat(o.heat != nullptr ? *o.heat : HeatMap(catalog)),
        first_heat(heat),
        control_host(n_cold_at() + static_cast<size_t>(n_layer) * sizeof(int32_t)),
        control(control_host.size()),
        host_table(table_bytes()),
        n_pairs(2 * static_cast<size_t>(n_layer) * sizeof(int32_t)),
        device(control_host.as<const uint8_t*>(),
               reinterpret_cast<int32_t*>(control_host.data() + n_cold_at()), n_expert, o.trace) {
    for (int il = 0; il < n_layer; ++il)
      reinterpret_cast<int32_t*>(control_host.data() + n_cold_at())[il] =
          catalog.layers[static_cast<size_t>(il)].n_expert();
    host.load(pool, {}, [&](uint64_t done, uint64_t total) {
      if (progress) progress({"repack", done, total});
    });
    arena_lock = PageLock(arena.data(), arena.size());
    if (!arena_lock.locked())
      log_warning("experts",
                  "{} of experts in main memory could not be page-locked; copies to the GPU are slower and "
                  "kernels cannot read them (is there a limit on locked memory, ulimit -l?)",
                  format_bytes(arena.size()));
    upload_host_table();

    const Placement placement = place(catalog, heat, options);
    slots = DeviceBuffer(ExpertStore::slot_bytes(catalog, placement));
    guest = DeviceBuffer(guest_bytes(catalog));
    parcels = DeviceBuffer(Courier::places_bytes(catalog));
    announced = DeviceBuffer(n_words() * sizeof(uint64_t));
    came = DeviceBuffer(n_words() * sizeof(CameParcel));
    const bool guesses = options.read_ahead && options.cpu && host.complete();
    const bool carries = guesses && options.fetch && arena_lock.locked() && Stream::can_write();
    store = std::make_unique<ExpertStore>(catalog, host, device, placement, heat,
                                          ExpertStoreOptions{.slots = {slots.data(), slots.size()},
                                                             .guest = lendable(),
                                                             .max_in_flight = kMovesAfterPrompt,
                                                             .pin_layers = options.pin_layers,
                                                             .frozen = !options.swaps});
    store->fill([&](uint64_t done, uint64_t total) {
      if (progress) progress({"upload experts", done, total});
    });
    count.budget_bytes = options.budget_bytes;
    count.hot_expert_bytes = placement.bytes;
    count.total_expert_bytes = catalog.total_bytes();

    const size_t mail_rows = static_cast<size_t>(kMaxMailRows) * static_cast<size_t>(n_embd) * sizeof(float);
    mail_memory = PinnedBuffer(sizeof(ColdMail));
    x = PinnedBuffer(mail_rows);
    y = PinnedBuffer(2 * mail_rows);  // with stamps
    records = PinnedBuffer(static_cast<size_t>(n_layer) * sizeof(ColdRecord));
    chosen = PinnedBuffer(static_cast<size_t>(n_layer) * chosen_of_layer() * sizeof(int16_t));
    if (guesses) {
      const std::vector<RouterView> routers = router_views(config, weights);
      forecast = std::make_unique<ExpertForecast>(config.route, routers, 1, isa, pool);
      if (carries) {
        link = std::make_unique<CudaParcels>(announced.as<uint64_t>(),
                                             control_host.as<const uint8_t*>() + n_layer * n_expert,
                                             device.dirty, options.trace);
        courier = std::make_unique<Courier>(catalog, *link, parcels.data(),
                                            [this](int layer, int expert, std::byte* memory) {
                                              return store->exchange(layer, expert, memory);
                                            });
        far_forecast = std::make_unique<ExpertForecast>(config.route, routers, Courier::kDistance, isa, pool);
      }
      ahead = std::make_unique<ReadAhead>(
          catalog, *forecast, pool,
          [this](int layer, int expert) {
            return store->hot(layer, expert) ? nullptr : host.address(layer, expert);
          },
          ReadAhead::Sending{far_forecast.get(), courier.get()});
    }
    lane = std::make_unique<CpuLane>(
        catalog, host, pool, CpuLaneOptions{.max_rows = kMaxMailRows, .isa = isa, .ahead = ahead.get()});

    const size_t most_batches =
        static_cast<size_t>(catalog.n_moe_layers()) * static_cast<size_t>(ceil_div(n_expert, batch_experts));
    batch_tables_host = PinnedBuffer(most_batches * static_cast<size_t>(n_expert) * sizeof(const uint8_t*));
    batch_tables = DeviceBuffer(kBatches * static_cast<size_t>(n_expert) * sizeof(const uint8_t*));
    batches.reserve(most_batches);
    layer_first_batch.resize(static_cast<size_t>(n_layer) + 1);
    counts =
        PinnedBuffer(static_cast<size_t>(n_layer) * (static_cast<size_t>(n_expert) + 1) * sizeof(int32_t));
    const int large_rows_max = std::min(n_batch, kStreamAllRows);
    large_x = PinnedBuffer(static_cast<size_t>(large_rows_max) * static_cast<size_t>(n_embd) * sizeof(float));
    large_rows = PinnedBuffer(static_cast<size_t>(large_rows_max * (n_used + 1)) * sizeof(int32_t));
    const size_t pair_floats = static_cast<size_t>(kMaxCpuPairs) * static_cast<size_t>(n_embd);
    large_y = PinnedBuffer(pair_floats * sizeof(float));
    gathered = HostBuffer(pair_floats * sizeof(float));
    large_lane = std::make_unique<CpuLane>(
        catalog, host, pool, CpuLaneOptions{.max_rows = kMaxCpuPairs, .max_pairs = kMaxCpuPairs, .isa = isa});
    large_pairs.reserve(kMaxCpuPairs);
    answer_begin.resize(static_cast<size_t>(n_layer));
  }

  size_t table_bytes() const {
    return static_cast<size_t>(n_layer) * static_cast<size_t>(n_expert) * sizeof(const uint8_t*);
  }
  size_t n_cold_at() const {
    return table_bytes() + Courier::place_sizes(catalog).size() * sizeof(const uint8_t*);
  }
  size_t n_words() const { return static_cast<size_t>(n_layer * kMaxParcels); }
  size_t chosen_of_layer() const { return static_cast<size_t>(kMaxMailRows) * static_cast<size_t>(n_used); }
  uint64_t host_arena_bytes() const {
    const uint64_t all = HostTier::bytes_for_all(catalog);
    return options.host_bytes == 0 ? all : std::clamp(options.host_bytes, HostTier::min_bytes(catalog), all);
  }
  // Who gives experts no memory gets none between prompts either.
  std::span<std::byte> lendable() const {
    return options.budget_bytes > 0 ? std::span(guest.data(), guest.size()) : std::span<std::byte>();
  }
  ColdMail& mail() const { return *mail_memory.as<ColdMail>(); }

  void upload_host_table() {
    std::vector<const std::byte*> addresses(static_cast<size_t>(n_layer) * static_cast<size_t>(n_expert));
    if (arena_lock.locked() && host.complete())
      for (int il = 0; il < n_layer; ++il)
        for (int e = 0; e < catalog.layers[static_cast<size_t>(il)].n_expert(); ++e)
          addresses[static_cast<size_t>(il * n_expert + e)] = host.address(il, e);
    cuda_check(cudaMemcpy(host_table.data(), addresses.data(), host_table.size(), cudaMemcpyHostToDevice),
               "uploading the table of cold experts");
  }

  void upload_control(StreamView stream) noexcept {
    if (!device.dirty) return;
    device.dirty = false;
    copy_in_cuda(control.data(), control_host.data(), control.size(), stream);
  }

  void check_file() noexcept {
    if (fault != nullptr || host.fault().empty()) return;
    file_fault = host.fault();
    fault = file_fault.c_str();
  }
  void answer(uint32_t posted, int n_rows) noexcept;
  void trace_step() noexcept;
  void stream_all() noexcept;
  void add_batches(int layer, const int32_t* experts, int n) noexcept;
  void issue(size_t limit) noexcept;
  void compute_batches(size_t begin, size_t end, const DeviceExpertArgs& args, StreamView stream) noexcept;
  void compute_few(int layer, const int32_t* first, const DeviceExpertArgs& args, StreamView stream) noexcept;
};

}  // namespace thermo
