#include "model/gpu/gpu_experts.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"
#include "base/error.h"
#include "base/host_buffer.h"
#include "base/log.h"
#include "base/pause.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "device/buffer.h"
#include "device/cuda_check.h"
#include "experts/courier.h"
#include "experts/cpu_lane.h"
#include "experts/expert_store.h"
#include "experts/lane_split.h"
#include "experts/placement.h"
#include "experts/read_ahead.h"
#include "experts/trace.h"
#include "model/gpu/cuda_slots.h"

namespace thermo {
namespace {

constexpr int kMaxBatchExperts = 16;  // streamed together
constexpr int kBatches = 8;           // of lent memory: what is copied while others are computed
constexpr int kStreamAllRows = 256;   // from here on nearly every expert of a layer is chosen
constexpr int kMaxCpuPairs = 512;     // of a layer of a larger step
constexpr int kMovesAfterPrompt = 64;

// Times of a larger step's lanes, to deal experts of few rows: copying one expert, and computing one on the
// processor.
constexpr float kCopyUs = 42.0f, kCpuExpertUs = 18.0f, kCpuRowUs = 4.0f;

// A small model lends a small part of itself.
int batch_experts_of(const ExpertCatalog& catalog) {
  return std::clamp(catalog.n_expert * catalog.n_moe_layers() / (16 * kBatches), 1, kMaxBatchExperts);
}

uint64_t guest_bytes(const ExpertCatalog& catalog) {
  return static_cast<uint64_t>(kBatches * batch_experts_of(catalog)) *
         align_up<uint64_t>(catalog.max_expert_bytes(), kExpertAlign);
}

Placement place(const ExpertCatalog& catalog, const HeatMap& heat, const SplitOptions& options) {
  return place_experts({.catalog = &catalog,
                        .heat = &heat,
                        .budget_bytes = options.budget_bytes,
                        .floor = 0,
                        .pin_layers = options.pin_layers});
}

uint64_t parcel_bytes(const ExpertCatalog& catalog) {
  return Courier::kPlaces * Courier::place_bytes(catalog);
}

}  // namespace

struct GpuExperts::Impl {
  ExpertCatalog catalog;
  SplitOptions options;
  ThreadPool& pool;
  int n_layer, n_expert, n_used, n_embd, n_batch;
  int batch_experts;

  HostBuffer arena;
  PageLock arena_lock;
  HostTier host;
  HeatMap heat;
  LaneSplit split{kMaxFetchTable};

  // Device memory that steps look at, and its source: the table, then n_cold.
  PinnedBuffer control_host;
  DeviceBuffer control;
  DeviceBuffer host_table;  // where cold experts lie in host memory
  DeviceBuffer n_pairs;     // [n_layer], and `near` of each layer
  DeviceBuffer slots, guest;
  DeviceBuffer parcels, parcel_words;  // announced and come: [n_layer][kMaxParcels] each
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
        control_host(table_bytes() + static_cast<size_t>(n_layer) * sizeof(int32_t)),
        control(control_host.size()),
        host_table(table_bytes()),
        n_pairs(2 * static_cast<size_t>(n_layer) * sizeof(int32_t)),
        device(control_host.as<const uint8_t*>(),
               reinterpret_cast<int32_t*>(control_host.data() + table_bytes()), n_expert, o.trace) {
    for (int il = 0; il < n_layer; ++il)
      reinterpret_cast<int32_t*>(control_host.data() + table_bytes())[il] =
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
    parcels = DeviceBuffer(parcel_bytes(catalog));
    parcel_words = DeviceBuffer(2 * parcel_words_of());
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
    if (options.read_ahead && options.cpu && host.complete()) {
      const std::vector<RouterView> routers = router_views(config, weights);
      forecast = std::make_unique<ExpertForecast>(config.route, routers, 1, isa, pool);
      if (options.fetch && arena_lock.locked() && Stream::can_write()) {
        link = std::make_unique<CudaParcels>(parcel_words.as<uint64_t>(), options.trace);
        courier = std::make_unique<Courier>(catalog, *link, parcels.data());
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
  size_t parcel_words_of() const { return static_cast<size_t>(n_layer * kMaxParcels) * sizeof(uint64_t); }
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
    cudaMemcpyAsync(control.data(), control_host.data(), control.size(), cudaMemcpyHostToDevice,
                    stream.handle);
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

GpuExperts::GpuExperts(const ModelConfig& config, const Weights& weights, const SplitOptions& options,
                       int n_batch, Isa isa, ThreadPool& pool, const LoadProgressFn& progress)
    : impl_(std::make_unique<Impl>(config, weights, options, n_batch, isa, pool, progress)) {}
GpuExperts::~GpuExperts() = default;

std::vector<GpuMemoryItem> GpuExperts::plan(const ModelConfig& config, const Weights& weights,
                                            const SplitOptions& options) {
  const ExpertCatalog catalog = expert_catalog(config, weights);
  const HeatMap heat = options.heat != nullptr ? *options.heat : HeatMap(catalog);
  const uint64_t n_layer = static_cast<uint64_t>(config.n_layer),
                 n_expert = static_cast<uint64_t>(config.route.n_expert);
  return {
      {"hot experts", ExpertStore::slot_bytes(catalog, place(catalog, heat, options))},
      {"expert streaming", guest_bytes(catalog) + parcel_bytes(catalog)},
      {"expert tables", (2 * n_layer + kBatches) * n_expert * sizeof(const uint8_t*) +
                            3 * n_layer * sizeof(int32_t) + 2 * n_layer * kMaxParcels * sizeof(uint64_t)}};
}

const uint8_t* const* GpuExperts::table(int layer) const noexcept {
  return impl_->control.as<const uint8_t*>() + layer * impl_->n_expert;
}

DeviceCold GpuExperts::cold(int layer, const uint32_t* ticket, const int32_t* fetch_of) const noexcept {
  const Impl& m = *impl_;
  return {.mail = m.mail_memory.as<ColdMail>(),
          .host_base = m.host_table.as<const uint8_t*>() + layer * m.n_expert,
          .fetch_of = fetch_of,
          .n_cold = reinterpret_cast<const int32_t*>(m.control.data() + m.table_bytes()) + layer,
          .ticket = ticket,
          .n_pairs = m.n_pairs.as<int32_t>() + layer,
          .near = m.n_pairs.as<uint32_t>() + m.n_layer + layer,
          .chosen = m.chosen.as<int16_t>() + static_cast<size_t>(layer) * m.chosen_of_layer(),
          .record = m.records.as<ColdRecord>() + layer,
          .announced = m.parcel_words.as<uint64_t>() + layer * kMaxParcels,
          .come = m.parcel_words.as<uint64_t>() + (m.n_layer + layer) * kMaxParcels,
          .parcels = m.parcels.as<uint8_t>(),
          .parcel_bytes = Courier::place_bytes(m.catalog),
          .n_places = Courier::kPlaces,
          .layer = layer,
          .x = m.x.as<float>(),
          .y = m.y.as<uint64_t>()};
}

// ---- steps that are graphs ----

void GpuExperts::begin(int n_rows, uint32_t& ticket, std::span<int32_t> fetch_of,
                       StreamView stream) noexcept {
  Impl& m = *impl_;
  m.store->begin_step();
  m.upload_control(stream);
  m.ticket += static_cast<uint32_t>(m.n_layer) + 1;
  ticket = m.ticket;
  m.last_posted = m.mail().posted;  // also when the last post of the step before was not looked at any more
  if (m.courier != nullptr) m.courier->begin_step(ticket);
  const bool can_fetch = m.options.fetch && m.arena_lock.locked() && m.host.complete();
  if (!can_fetch)
    std::fill(fetch_of.begin(), fetch_of.end(), 0);
  else if (!m.options.cpu)
    for (size_t i = 0; i < fetch_of.size(); ++i) fetch_of[i] = static_cast<int32_t>(i);
  else
    m.split.fill(fetch_of, m.courier != nullptr && n_rows == 1);
}

void GpuExperts::serve(int n_rows, const Event& end) noexcept {
  Impl& m = *impl_;
  std::atomic_ref<uint32_t> posted(m.mail().posted);
  for (int polls = 1;; ++polls) {
    const uint32_t now = posted.load(std::memory_order_acquire);
    if (now != m.last_posted) {
      m.last_posted = now;
      m.answer(now, n_rows);
      polls = 0;
      continue;
    }
    if (polls % 512 == 0 && end.reached()) break;  // asking the driver takes a microsecond
    if (m.ahead != nullptr && m.ahead->help([&] { return posted.load(std::memory_order_relaxed) != now; }))
      continue;
    pause_cpu();
  }
  if (m.ahead != nullptr) m.ahead->end();  // the placement changes between steps
}

void GpuExperts::Impl::answer(uint32_t posted, int n_rows) noexcept {
  const int64_t begin = TraceWriter::now_ns();
  ColdMail& box = mail();
  const int layer = static_cast<int>(posted - ticket) - 1;
  const ColdRecord& record = records.as<ColdRecord>()[layer];
  const int n = record.n_pairs;
  if (n ==
      0) {  // the device has gone on; the row may change while it is read, and a guess is as good as its row
    lane->look_ahead(layer, x.as<float>(), record.x_scale);
    count.ahead_bytes += lane->last_ahead_bytes();
    return;
  }
  lane->answer(
      layer, {box.pairs, static_cast<size_t>(n)}, x.as<float>(), record.x_scale,
      {.rows = y.as<uint64_t>(), .stride = n_embd, .n_rows = n_rows, .stamp = posted, .near = &box.near});
  const int64_t took = TraceWriter::now_ns() - begin;
  count.cpu_ns += static_cast<uint64_t>(took);
  count.cpu_pairs += static_cast<uint64_t>(n);
  count.cold_experts += static_cast<uint64_t>(lane->last_experts());
  count.ahead_bytes += lane->last_ahead_bytes();
  count.foreseen += static_cast<uint64_t>(lane->last_foreseen());
  count.cpu_bytes +=
      static_cast<uint64_t>(lane->last_experts()) * catalog.layers[static_cast<size_t>(layer)].expert_bytes;
  split.cpu_took(lane->last_experts(), static_cast<float>(took) * 1e-3f);
  answer_begin[static_cast<size_t>(layer)] = begin;
  if (options.trace != nullptr)
    options.trace->add({.lane = TraceLane::Cpu,
                        .name = "cold experts",
                        .category = "decode",
                        .begin_ns = begin,
                        .duration_ns = took,
                        .args = {{{"layer", layer}, {"experts", lane->last_experts()}, {"pairs", n}}}});
}

// The device's times are on its own clock: a layer was posted just before its answer began.
void GpuExperts::Impl::trace_step() noexcept {
  const ColdRecord* const record = records.as<ColdRecord>();
  int64_t shift = INT64_MAX;
  for (int il = 0; il < n_layer; ++il)
    if (answer_begin[static_cast<size_t>(il)] != 0)
      shift =
          std::min(shift, answer_begin[static_cast<size_t>(il)] - static_cast<int64_t>(record[il].posted_ns));
  const auto add = [&](TraceLane at, const char* name, uint64_t from, uint64_t to, int layer, int n,
                       int n_carried = 0) {
    options.trace->add({.lane = at,
                        .name = name,
                        .category = "decode",
                        .begin_ns = static_cast<int64_t>(from) + shift,
                        .duration_ns = static_cast<int64_t>(to - from),
                        .args = {{{"layer", layer}, {"experts", n}, {"parcels", n_carried}}}});
  };
  for (int il = 0; il < n_layer; ++il) {
    if (answer_begin[static_cast<size_t>(il)] == 0) continue;
    const ColdRecord& r = record[il];
    add(TraceLane::Device, "hot experts", r.posted_ns, r.ready_ns, il, r.n_cold, r.n_carried);
    if (r.n_fetched > 0) add(TraceLane::Fetch, "fetched experts", r.posted_ns, r.ready_ns, il, r.n_fetched);
    add(TraceLane::Device, "waiting for the CPU", r.ready_ns, r.went_ns, il, r.n_cold - r.n_fetched);
    answer_begin[static_cast<size_t>(il)] = 0;
  }
}

void GpuExperts::finish(int n_rows) noexcept {
  Impl& m = *impl_;
  int n_come = 0, n_used = 0;
  for (int il = 0; il < m.n_layer; ++il) {
    const ExpertLayer& layer = m.catalog.layers[static_cast<size_t>(il)];
    if (layer.n_expert() == 0) continue;
    const ColdRecord& record = m.records.as<ColdRecord>()[il];
    const int16_t* const ids = m.chosen.as<int16_t>() + static_cast<size_t>(il) * m.chosen_of_layer();
    int hot = 0;
    const int n = n_rows * m.n_used;
    for (int i = 0; i < n; ++i) {
      m.heat.use(il, ids[i]);
      hot += m.store->hot(il, ids[i]);
    }
    ++m.count.layer_steps;
    m.count.pairs += static_cast<uint64_t>(n);
    m.count.hot_pairs += static_cast<uint64_t>(hot);
    m.count.all_hot += record.n_cold == 0 && record.n_carried == 0;
    m.count.fetched_pairs += static_cast<uint64_t>(std::max(0, n - hot - record.n_pairs));
    m.count.fetched_bytes += static_cast<uint64_t>(record.n_fetched) * layer.expert_bytes;
    m.count.carried_pairs += static_cast<uint64_t>(record.n_carried);
    n_come += record.n_come;
    n_used += record.n_carried;
    m.count.hot_bytes +=
        static_cast<uint64_t>(n_rows == 1 ? hot : std::min(hot, m.n_expert)) * layer.expert_bytes;
    if (record.n_pairs > 0) {
      const uint64_t stall = record.went_ns > record.ready_ns ? record.went_ns - record.ready_ns : 0;
      m.count.stall_ns += stall;
      m.count.max_stall_ns = std::max(m.count.max_stall_ns, stall);
    }
    if (record.n_pairs > 0 || record.n_fetched > 0) {
      if (record.went_ns > record.posted_ns)
        m.split.layer_took(record.n_cold, record.n_fetched,
                           static_cast<float>(record.went_ns - record.posted_ns) * 1e-3f);
      if (record.ready_ns > record.posted_ns)
        m.split.gpu_took(record.n_fetched, static_cast<float>(record.ready_ns - record.posted_ns) * 1e-3f);
    }
  }
  if (m.courier != nullptr) m.courier->end_step(n_come, n_used);
  if (m.options.trace != nullptr) m.trace_step();
  ++m.count.steps;
  m.count.tokens += static_cast<uint64_t>(n_rows);
  m.heat.advance(n_rows);
  m.store->end_step();
  if (m.mail().gave_up != 0) m.fault = "the processor did not answer in time";
  m.check_file();
}

// ---- larger steps ----

void GpuExperts::begin_large(int n_rows, StreamView stream) noexcept {
  Impl& m = *impl_;
  m.store->begin_step();
  m.store->take_guest();
  m.upload_control(stream);
  m.large_rows_now = n_rows;
  m.batches.clear();
  m.n_issued = 0;
  if (n_rows >= kStreamAllRows) m.stream_all();
}

// Which experts a layer will use is not asked for: with this many rows it is nearly all of them. So the
// copies run ahead of the layers.
void GpuExperts::Impl::stream_all() noexcept {
  for (int il = 0; il < n_layer; ++il) {
    layer_first_batch[static_cast<size_t>(il)] = batches.size();
    int32_t cold[kMaxDeviceExperts];
    int n = 0;
    for (int e = 0; e < catalog.layers[static_cast<size_t>(il)].n_expert(); ++e)
      if (!store->hot(il, e)) cold[n++] = e;
    add_batches(il, cold, n);
  }
  layer_first_batch[static_cast<size_t>(n_layer)] = batches.size();
  issue(kBatches);
}

void GpuExperts::Impl::add_batches(int layer, const int32_t* experts, int n) noexcept {
  for (int begin = 0; begin < n; begin += batch_experts) {
    Batch batch;
    batch.layer = layer;
    batch.n = std::min(batch_experts, n - begin);
    std::copy_n(experts + begin, batch.n, batch.experts);
    batches.push_back(batch);
  }
}

// Queues the copies of the batches before `limit`.
void GpuExperts::Impl::issue(size_t limit) noexcept {
  const uint64_t step = align_up<uint64_t>(catalog.max_expert_bytes(), kExpertAlign);
  for (; n_issued < std::min(limit, batches.size()); ++n_issued) {
    const Batch& batch = batches[n_issued];
    const size_t place = n_issued % kBatches;
    const ExpertLayer& layer = catalog.layers[static_cast<size_t>(batch.layer)];
    const uint8_t** const table =
        batch_tables_host.as<const uint8_t*>() + n_issued * static_cast<size_t>(n_expert);
    std::fill_n(table, n_expert, nullptr);
    if (n_issued >= kBatches) {
      consumed[place].hold_back(device.stream());
      if (!host.complete()) {  // what the copies of that batch read may go
        copied[place].synchronize();
        const Batch& old = batches[n_issued - kBatches];
        for (int i = 0; i < old.n; ++i) host.release(old.layer, old.experts[i]);
      }
    }
    if (!host.complete()) host.want(batch.layer, {batch.experts, static_cast<size_t>(batch.n)});
    for (int i = 0; i < batch.n; ++i) {
      const std::byte* const from = host.complete() ? host.address(batch.layer, batch.experts[i])
                                                    : host.acquire(batch.layer, batch.experts[i]).gate.panels;
      std::byte* const to =
          guest.data() + (place * static_cast<size_t>(batch_experts) + static_cast<size_t>(i)) * step;
      cudaMemcpyAsync(to, from, layer.expert_bytes, cudaMemcpyHostToDevice, device.stream().handle);
      table[batch.experts[i]] = reinterpret_cast<const uint8_t*>(to);
    }
    cudaMemcpyAsync(batch_tables.as<const uint8_t*>() + place * static_cast<size_t>(n_expert), table,
                    static_cast<size_t>(n_expert) * sizeof(const uint8_t*), cudaMemcpyHostToDevice,
                    device.stream().handle);
    copied[place].record(device.stream());
    count.streamed_bytes += static_cast<uint64_t>(batch.n) * layer.expert_bytes;
  }
}

void GpuExperts::Impl::compute_batches(size_t begin, size_t end, const DeviceExpertArgs& args,
                                       StreamView stream) noexcept {
  for (size_t b = begin; b < end; ++b) {
    issue(b + 1);
    const size_t place = b % kBatches;
    copied[place].hold_back(stream);
    DeviceExpertArgs part = args;
    part.table = batch_tables.as<const uint8_t*>() + place * static_cast<size_t>(n_expert);
    part.with_shared = false;
    expert_ffn_cuda(part, stream);
    consumed[place].record(stream);
    issue(b + 1 + kBatches);
  }
}

void GpuExperts::run_large(int layer, DeviceExpertArgs args, int n_rows, StreamView stream) noexcept {
  Impl& m = *impl_;
  int32_t* const first =
      m.counts.as<int32_t>() + static_cast<size_t>(layer) * (static_cast<size_t>(m.n_expert) + 1);
  cudaMemcpyAsync(first, args.routes.expert_first, (static_cast<size_t>(m.n_expert) + 1) * sizeof(int32_t),
                  cudaMemcpyDeviceToHost, stream.handle);
  const bool all_hot = m.store->n_cold(layer) == 0;
  const bool ask = !all_hot && n_rows < kStreamAllRows;
  if (ask) {
    cudaMemcpyAsync(m.large_rows.data(), args.routes.pair_row,
                    static_cast<size_t>(n_rows * m.n_used) * sizeof(int32_t), cudaMemcpyDeviceToHost,
                    stream.handle);
    cudaMemcpyAsync(m.large_x.data(), args.x.f32,
                    static_cast<size_t>(n_rows) * static_cast<size_t>(m.n_embd) * sizeof(float),
                    cudaMemcpyDeviceToHost, stream.handle);
    m.decided.record(stream);
  }
  DeviceExpertArgs hot = args;
  hot.table = table(layer);
  expert_ffn_cuda(hot, stream);
  if (all_hot) return;
  if (!ask) {
    m.compute_batches(m.layer_first_batch[static_cast<size_t>(layer)],
                      m.layer_first_batch[static_cast<size_t>(layer) + 1], args, stream);
    return;
  }
  m.decided.synchronize();
  m.compute_few(layer, first, args, stream);
}

// A layer of a step of some rows: popular cold experts are streamed, the others computed by the processor
// meanwhile, so that both take about the same time.
void GpuExperts::Impl::compute_few(int layer, const int32_t* first, const DeviceExpertArgs& args,
                                   StreamView stream) noexcept {
  int32_t cold[kMaxDeviceExperts];
  int n = 0;
  const auto rows_of = [&](int e) { return first[e + 1] - first[e]; };
  for (int e = 0; e < catalog.layers[static_cast<size_t>(layer)].n_expert(); ++e)
    if (!store->hot(layer, e) && rows_of(e) > 0) cold[n++] = e;
  std::sort(cold, cold + n, [&](int32_t a, int32_t b) { return rows_of(a) > rows_of(b); });
  // From the least popular on.
  int n_cpu = 0, cpu_pairs = 0;
  float cpu_us = 0.0f;
  while (options.cpu && n_cpu < n) {
    const int rows = rows_of(cold[n - 1 - n_cpu]);
    const float us = cpu_us + kCpuExpertUs + kCpuRowUs * static_cast<float>(rows);
    if (cpu_pairs + rows > kMaxCpuPairs || us > kCopyUs * static_cast<float>(n - n_cpu)) break;
    cpu_us = us;
    cpu_pairs += rows;
    ++n_cpu;
  }
  const size_t begin = batches.size();
  add_batches(layer, cold, n - n_cpu);
  compute_batches(begin, batches.size(), args, stream);
  if (n_cpu == 0) return;

  const int32_t* const row_of_pair = large_rows.as<int32_t>();
  const size_t width = static_cast<size_t>(n_embd);
  large_pairs.clear();
  for (int i = n - n_cpu; i < n; ++i)
    for (int p = first[cold[i]]; p < first[cold[i] + 1]; ++p) {
      std::copy_n(large_x.as<float>() + static_cast<size_t>(row_of_pair[p]) * width, width,
                  gathered.as<float>() + large_pairs.size() * width);
      large_pairs.push_back({static_cast<int16_t>(large_pairs.size()), static_cast<int16_t>(cold[i]), 1.0f});
    }
  const int64_t start = TraceWriter::now_ns();
  // The copies of the layer before read the answer's memory; they ended before this layer was routed.
  large_lane->compute(layer, large_pairs, gathered.as<float>(), static_cast<int>(large_pairs.size()),
                      large_y.as<float>());
  const int64_t took = TraceWriter::now_ns() - start;
  count.cpu_ns += static_cast<uint64_t>(took);
  if (options.trace != nullptr)
    options.trace->add({.lane = TraceLane::Cpu,
                        .name = "rare experts",
                        .category = "prefill",
                        .begin_ns = start,
                        .duration_ns = took,
                        .args = {{{"layer", layer}, {"experts", n_cpu}, {"pairs", cpu_pairs}}}});
  count.cpu_pairs += large_pairs.size();
  count.cpu_bytes += static_cast<uint64_t>(n_cpu) * catalog.layers[static_cast<size_t>(layer)].expert_bytes;
  size_t done = 0;
  for (int i = n - n_cpu; i < n; ++i) {
    const size_t rows = static_cast<size_t>(rows_of(cold[i]));
    cudaMemcpyAsync(args.y + static_cast<size_t>(first[cold[i]]) * width, large_y.as<float>() + done * width,
                    rows * width * sizeof(float), cudaMemcpyHostToDevice, stream.handle);
    done += rows;
  }
}

void GpuExperts::finish_large() noexcept {
  Impl& m = *impl_;
  if (!m.host.complete())
    for (size_t b = m.n_issued > kBatches ? m.n_issued - kBatches : 0; b < m.n_issued; ++b)
      for (int i = 0; i < m.batches[b].n; ++i) m.host.release(m.batches[b].layer, m.batches[b].experts[i]);
  for (int il = 0; il < m.n_layer; ++il) {
    const int n_expert = m.catalog.layers[static_cast<size_t>(il)].n_expert();
    const int32_t* const first =
        m.counts.as<int32_t>() + static_cast<size_t>(il) * (static_cast<size_t>(m.n_expert) + 1);
    for (int e = 0; e < n_expert; ++e) {
      const int rows = first[e + 1] - first[e];
      if (rows == 0) continue;
      m.heat.use(il, e, static_cast<float>(rows));
      m.count.pairs += static_cast<uint64_t>(rows);
      if (m.store->hot(il, e)) m.count.hot_pairs += static_cast<uint64_t>(rows);
    }
    m.count.layer_steps += n_expert > 0;
  }
  ++m.count.steps;
  m.count.tokens += static_cast<uint64_t>(m.large_rows_now);
  m.heat.advance(m.large_rows_now);
  m.store->give_back_guest();
  m.store->end_step(kMovesAfterPrompt);
  m.check_file();
}

const char* GpuExperts::fault() const noexcept {
  return impl_->fault == nullptr ? "" : impl_->fault;
}
ExpertTelemetry GpuExperts::telemetry() const noexcept {
  ExpertTelemetry t = impl_->count;
  const ExpertStoreStats moved = impl_->store->stats();
  t.moved = moved.moved;
  t.moved_bytes = moved.moved_bytes;
  if (impl_->courier != nullptr) {
    t.parcels = impl_->courier->n_sent();
    t.fetched_bytes += impl_->courier->sent_bytes();
  }
  const HostTierStats disk = impl_->host.stats();
  t.disk_bytes = disk.bytes_read;
  t.disk_wait_ns = disk.wait_ns;
  return t;
}
const HeatMap& GpuExperts::heat() const noexcept {
  return impl_->heat;
}
const LaneSplit& GpuExperts::lanes() const noexcept {
  return impl_->split;
}
ExpertStore& GpuExperts::store() noexcept {
  return *impl_->store;
}

}  // namespace thermo
