// Split experts on a GPU: loading them.
#include <algorithm>

#include "base/log.h"
#include "device/copy_in.h"
#include "device/cuda_check.h"
#include "model/gpu/gpu_experts_impl.h"

namespace thermo {
namespace {

// A cache too small for one layer's step is enlarged: the plan has counted what is needed.
SplitOptions with_enough_memory(SplitOptions options, const ExpertCatalog& catalog) {
  if (options.host_bytes > 0) options.host_bytes = std::max(options.host_bytes, HostTier::min_bytes(catalog));
  return options;
}

ExpertCore::Progress stage(const LoadProgressFn& progress, const char* name) {
  return [&progress, name](uint64_t done, uint64_t total) {
    if (progress) progress({name, done, total});
  };
}

// Parts of a dense FFN are all used, so there is nothing to guess and to send ahead.
uint64_t parcel_bytes(const ModelConfig& config, const ExpertCatalog& catalog) {
  return config.is_moe() ? Courier::places_bytes(catalog) : 0;
}

}  // namespace

int batch_experts_of(const ExpertCatalog& catalog) {
  return std::clamp(catalog.n_expert * catalog.n_moe_layers() / (16 * kBatches), 1, kMaxBatchExperts);
}

uint64_t lent_bytes(const ExpertCatalog& catalog) {
  return static_cast<uint64_t>(kBatches * batch_experts_of(catalog)) *
         align_up<uint64_t>(catalog.max_expert_bytes(), kExpertAlign);
}

GpuExperts::Impl::Impl(const ExpertCatalog& experts, const ModelConfig& config, const Weights& weights,
                       const ModelOptions& o, ThreadPool& p, const LoadProgressFn& progress)
    : core(experts, o.experts.heat != nullptr ? *o.experts.heat : HeatMap(experts),
           with_enough_memory(o.experts, experts), o.isa, p, stage(progress, "repack")),
      catalog(core.catalog()),
      options(core.options()),
      host(core.host()),
      heat(core.heat()),
      count(core.counts()),
      pool(p),
      n_layer(config.n_layer),
      n_expert(config.route.n_expert),
      n_used(config.route.n_expert_used),
      n_embd(config.n_embd),
      n_batch(o.n_batch),
      batch_experts(batch_experts_of(catalog)),
      arena_lock(core.arena().data(), core.arena().size()),
      control_host(n_cold_at() + static_cast<size_t>(n_layer) * sizeof(int32_t)),
      control(control_host.size()),
      host_table(table_bytes()),
      n_pairs(2 * static_cast<size_t>(n_layer) * sizeof(int32_t)),
      parcels(parcel_bytes(config, catalog)),
      announced(n_words() * sizeof(uint64_t)),
      came(n_words() * sizeof(CameParcel)),
      limit(o.experts.link_limit),
      device(control_host.as<const uint8_t*>(), reinterpret_cast<int32_t*>(control_host.data() + n_cold_at()),
             n_expert, limit, o.experts.trace),
      link(announced.as<uint64_t>(), control_host.as<const uint8_t*>() + n_layer * n_expert, device.dirty,
           limit, o.experts.trace) {
  for (int il = 0; il < n_layer; ++il)
    reinterpret_cast<int32_t*>(control_host.data() + n_cold_at())[il] =
        catalog.layers[static_cast<size_t>(il)].n_expert();
  if (!arena_lock.locked())
    log_warning("experts",
                "{} of experts in main memory could not be page-locked; copies to the GPU are slower and "
                "kernels cannot read them (is there a limit on locked memory, ulimit -l?)",
                format_bytes(core.arena().size()));
  upload_host_table();
  attach(config, weights, progress);
  take_mail();
  lane = std::make_unique<CpuLane>(
      catalog, host, pool, CpuLaneOptions{.max_rows = kMaxMailRows, .isa = o.isa, .ahead = core.ahead()});
  take_large_step(o.isa);
  answer_begin.resize(static_cast<size_t>(n_layer));
  draft_uses.reserve(o.n_sequences, n_layer, o.sequence.max_draft_rows, n_used);
  large_drafted =
      PinnedBuffer(static_cast<size_t>(DraftedExperts(config, o).sequence_stride()) * sizeof(int16_t));
  n_drafted.resize(static_cast<size_t>(n_layer) * static_cast<size_t>(n_expert));
}

GpuExperts::Impl::~Impl() {
  lane.reset();
  core.detach();
}

void GpuExperts::Impl::attach(const ModelConfig& config, const Weights& weights,
                              const LoadProgressFn& progress) {
  const Placement placement = place_by_heat(catalog, heat, options, 0);
  slots = DeviceBuffer(ExpertStore::slot_bytes(catalog, placement));
  lent = DeviceBuffer(lent_bytes(catalog));
  const bool guesses = config.is_moe() && options.read_ahead && options.cpu && host.complete();
  const bool carries = guesses && options.fetch && arena_lock.locked() && Stream::can_write();
  // Options that give experts no memory give them none between prompts either.
  const bool lends = options.budget_bytes > 0;
  core.attach({.slots = device,
               .slot_memory = {slots.data(), slots.size()},
               .lent_memory = lends ? std::span(lent.data(), lent.size()) : std::span<std::byte>(),
               .link = carries ? &link : nullptr,
               .parcel_memory = parcels.data()},
              placement,
              {.route = config.route,
               .routers = guesses ? router_views(config, weights) : std::vector<RouterView>{},
               .pool = &pool,
               .cold_address =
                   [this](int layer, int expert) {
                     return core.store().hot(layer, expert) ? nullptr : host.address(layer, expert);
                   }},
              stage(progress, "upload experts"));
}

void GpuExperts::Impl::take_mail() {
  const size_t mail_rows = static_cast<size_t>(kMaxMailRows) * static_cast<size_t>(n_embd) * sizeof(float);
  mail_memory = PinnedBuffer(sizeof(ColdMail));
  x = PinnedBuffer(mail_rows);
  y = PinnedBuffer(static_cast<size_t>(kMaxMailRows) * static_cast<size_t>(n_embd) * sizeof(StampedSum));
  records = PinnedBuffer(static_cast<size_t>(n_layer) * sizeof(ColdRecord));
  chosen = PinnedBuffer(static_cast<size_t>(n_layer) * chosen_of_layer() * sizeof(int16_t));
}

void GpuExperts::Impl::take_large_step(Isa isa) {
  const size_t most_batches =
      static_cast<size_t>(catalog.n_moe_layers()) * static_cast<size_t>(ceil_div(n_expert, batch_experts));
  batch_tables_host = PinnedBuffer(most_batches * static_cast<size_t>(n_expert) * sizeof(const uint8_t*));
  batch_tables = DeviceBuffer(kBatches * static_cast<size_t>(n_expert) * sizeof(const uint8_t*));
  batches.reserve(most_batches);
  wanted = std::vector<Event>(most_batches);
  arrived = std::vector<Event>(most_batches);
  layer_first_batch.resize(static_cast<size_t>(n_layer) + 1);
  counts = PinnedBuffer(static_cast<size_t>(n_layer) * (static_cast<size_t>(n_expert) + 1) * sizeof(int32_t));
  const int large_rows_max = std::min(n_batch, kStreamAllRows);
  large_x = PinnedBuffer(static_cast<size_t>(large_rows_max) * static_cast<size_t>(n_embd) * sizeof(float));
  large_rows = PinnedBuffer(static_cast<size_t>(large_rows_max * (n_used + 1)) * sizeof(int32_t));
  const size_t pair_floats = static_cast<size_t>(kMaxCpuPairs) * static_cast<size_t>(n_embd);
  large_y = PinnedBuffer(pair_floats * sizeof(float));
  gathered = HostBuffer(pair_floats * sizeof(float));
  large_lane = std::make_unique<CpuLane>(
      catalog, host, pool, CpuLaneOptions{.max_rows = kMaxCpuPairs, .max_pairs = kMaxCpuPairs, .isa = isa});
  large_pairs.reserve(kMaxCpuPairs);
}

void GpuExperts::Impl::upload_host_table() {
  std::vector<const std::byte*> addresses(static_cast<size_t>(n_layer) * static_cast<size_t>(n_expert));
  if (can_read_host())
    for (int il = 0; il < n_layer; ++il)
      for (int e = 0; e < catalog.layers[static_cast<size_t>(il)].n_expert(); ++e)
        addresses[static_cast<size_t>(il * n_expert + e)] = host.address(il, e);
  cuda_check(cudaMemcpy(host_table.data(), addresses.data(), host_table.size(), cudaMemcpyHostToDevice),
             "uploading the table of cold experts");
}

void GpuExperts::Impl::upload_control(StreamView stream) noexcept {
  if (!device.dirty) return;
  device.dirty = false;
  copy_in_cuda(control.data(), control_host.data(), control.size(), stream);
}

void GpuExperts::Impl::check_file() noexcept {
  if (fault != nullptr || core.fault().empty()) return;
  file_fault = core.fault();
  fault = file_fault.c_str();
}

GpuExperts::GpuExperts(const ModelConfig& config, const Weights& weights, const ModelOptions& options,
                       ThreadPool& pool, const LoadProgressFn& progress)
    : impl_(std::make_unique<Impl>(expert_catalog(config, weights), config, weights, options, pool,
                                   progress)) {}
GpuExperts::~GpuExperts() = default;

std::vector<GpuMemoryItem> GpuExperts::plan(const ModelConfig& config, const Weights& weights,
                                            const SplitOptions& options) {
  const ExpertCatalog catalog = expert_catalog(config, weights);
  const HeatMap heat = options.heat != nullptr ? *options.heat : HeatMap(catalog);
  const uint64_t n_layer = static_cast<uint64_t>(config.n_layer),
                 n_expert = static_cast<uint64_t>(config.route.n_expert);
  const bool in_parts = config.has_parts();
  return {
      {in_parts ? "FFN parts" : "hot experts",
       ExpertStore::slot_bytes(catalog, place_by_heat(catalog, heat, options, 0))},
      {in_parts ? "FFN streaming" : "expert streaming", lent_bytes(catalog) + parcel_bytes(config, catalog)},
      {in_parts ? "FFN tables" : "expert tables",
       ((2 * n_layer + kBatches) * n_expert + Courier::place_sizes(catalog).size()) * sizeof(const uint8_t*) +
           3 * n_layer * sizeof(int32_t) + n_layer * kMaxParcels * (sizeof(uint64_t) + sizeof(CameParcel))}};
}

}  // namespace thermo
