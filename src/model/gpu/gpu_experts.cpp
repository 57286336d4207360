#include "model/gpu/gpu_experts.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <bit>

#include "base/pause.h"
#include "model/gpu/gpu_experts_impl.h"

namespace thermo {

const uint8_t* const* GpuExperts::table(int layer) const noexcept {
  return impl_->control.as<const uint8_t*>() + layer * impl_->n_expert;
}

DeviceCold GpuExperts::cold(int layer, const uint32_t* ticket, const int32_t* fetch_of) const noexcept {
  const Impl& m = *impl_;
  return {.mail = m.mail_memory.as<ColdMail>(),
          .host_base = m.host_table.as<const uint8_t*>() + layer * m.n_expert,
          .fetch_of = fetch_of,
          .n_cold = reinterpret_cast<const int32_t*>(m.control.data() + m.n_cold_at()) + layer,
          .ticket = ticket,
          .n_pairs = m.n_pairs.as<int32_t>() + layer,
          .near = m.n_pairs.as<uint32_t>() + m.n_layer + layer,
          .chosen = m.chosen.as<int16_t>() + static_cast<size_t>(layer) * m.chosen_of_layer(),
          .record = m.records.as<ColdRecord>() + layer,
          .announced = m.announced.as<uint64_t>() + layer * kMaxParcels,
          .came = m.came.as<CameParcel>() + layer * kMaxParcels,
          .places = m.control.as<const uint8_t*>() + m.n_layer * m.n_expert,
          .layer = layer,
          .x = m.x.as<float>(),
          .y = m.y.as<StampedSum>()};
}

// ---- steps that are graphs ----

void GpuExperts::begin(int n_rows, uint32_t& ticket, std::span<int32_t> fetch_of,
                       StreamView stream) noexcept {
  Impl& m = *impl_;
  ticket = m.ticket = m.core.begin_step(n_rows, false);
  m.upload_control(stream);
  m.last_posted = m.mail().posted;  // also when the last post of the step before was not looked at any more
  m.core.deal(fetch_of, n_rows, m.can_read_host());
}

void GpuExperts::serve(int n_rows, int n_valid, const Event& end) noexcept {
  Impl& m = *impl_;
  std::atomic_ref<uint32_t> posted(m.mail().posted);
  int64_t idle_since = now_ns();
  for (int polls = 1;; ++polls) {
    const uint32_t now = posted.load(std::memory_order_acquire);
    if (now != m.last_posted) {
      m.last_posted = now;
      m.count.device_wait_ns += static_cast<uint64_t>(now_ns() - idle_since);
      m.answer(now, n_rows, n_valid);
      m.core.store().look();
      idle_since = now_ns();
      polls = 0;
      continue;
    }
    if (polls % 512 == 0 && end.reached()) break;  // asking the driver takes a microsecond
    if (m.core.ahead() != nullptr &&
        m.core.ahead()->help([&] { return posted.load(std::memory_order_relaxed) != now; }))
      continue;
    pause_cpu();
  }
  if (m.core.ahead() != nullptr) m.core.ahead()->end();  // the placement changes between steps
}

void GpuExperts::Impl::answer(uint32_t posted, int n_rows, int n_valid) noexcept {
  const int64_t begin = now_ns();
  ColdMail& box = mail();
  const int layer = static_cast<int>(posted - layer_ticket(ticket, 0));
  const ColdRecord& record = records.as<ColdRecord>()[layer];
  const int n = record.n_pairs;
  // The device has gone on then, and rows may change while they are read: a guess is as good as its rows.
  if (n == 0) {
    lane->look_ahead(layer, x.as<float>(), record.x_scale, n_valid);
    count.ahead_bytes += lane->last_ahead_bytes();
    return;
  }
  lane->answer(
      layer, {box.pairs, static_cast<size_t>(n)}, x.as<float>(), record.x_scale, n_valid,
      {.rows = y.as<StampedSum>(), .stride = n_embd, .n_rows = n_rows, .stamp = posted, .near = &box.near});
  const int64_t took = now_ns() - begin;
  count.cpu_ns += static_cast<uint64_t>(took);
  count.cpu_pairs += static_cast<uint64_t>(n);
  count.cold_experts += static_cast<uint64_t>(lane->last_experts());
  count.ahead_bytes += lane->last_ahead_bytes();
  count.foreseen += static_cast<uint64_t>(lane->last_foreseen());
  count.cpu_bytes +=
      static_cast<uint64_t>(lane->last_experts()) * catalog.layers[static_cast<size_t>(layer)].expert_bytes;
  core.lanes().cpu_took(lane->last_experts(), static_cast<float>(took) * 1e-3f);
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
    add(TraceLane::Device, "hot experts", r.posted_ns, r.ready_ns, il, r.n_cold, std::popcount(r.carried));
    if (r.n_fetched > 0) add(TraceLane::Fetch, "fetched experts", r.posted_ns, r.ready_ns, il, r.n_fetched);
    add(TraceLane::Device, "waiting for the CPU", r.ready_ns, r.went_ns, il, r.n_cold - r.n_fetched);
    answer_begin[static_cast<size_t>(il)] = 0;
  }
}

void GpuExperts::finish(std::span<const SequenceRows> groups) noexcept {
  Impl& m = *impl_;
  int n_rows = 0, n_committed = 0;
  for (const SequenceRows& group : groups) {
    const int n = static_cast<int>(group.rows.size());
    n_rows += n;
    if (group.uncommitted)
      m.draft_uses.begin(group.sequence, n);
    else
      n_committed += n;
  }
  for (int il = 0; il < m.n_layer; ++il) {
    const ExpertLayer& layer = m.catalog.layers[static_cast<size_t>(il)];
    if (layer.n_expert() == 0) continue;
    const ColdRecord& record = m.records.as<ColdRecord>()[il];
    const int16_t* const ids = m.chosen.as<int16_t>() + static_cast<size_t>(il) * m.chosen_of_layer();
    int hot = 0;
    const int n = n_rows * m.n_used;
    for (int i = 0; i < n; ++i) hot += m.core.store().hot(il, ids[i]);
    m.count_uses(il, ids, groups);
    ++m.count.layer_steps;
    m.core.count_pairs(il, static_cast<uint64_t>(n), static_cast<uint64_t>(hot));
    m.count.all_hot += record.n_cold == 0 && record.carried == 0;
    m.count.fetched_pairs += static_cast<uint64_t>(std::max(0, n - hot - record.n_pairs));
    m.count.fetched_bytes += static_cast<uint64_t>(record.n_fetched) * layer.expert_bytes;
    m.count.parcels_used += static_cast<uint64_t>(std::popcount(record.carried));
    m.count.hot_bytes +=
        static_cast<uint64_t>(n_rows == 1 ? hot : std::min(hot, m.n_expert)) * layer.expert_bytes;
    if (record.n_pairs > 0) {
      const uint64_t stall = record.went_ns > record.ready_ns ? record.went_ns - record.ready_ns : 0;
      m.count.stall_ns += stall;
      m.count.max_stall_ns = std::max(m.count.max_stall_ns, stall);
    }
    if (record.n_pairs > 0 || record.n_fetched > 0) {
      if (record.went_ns > record.posted_ns)
        m.core.lanes().layer_took(record.n_cold, record.n_fetched,
                                  static_cast<float>(record.went_ns - record.posted_ns) * 1e-3f);
      if (record.ready_ns > record.posted_ns)
        m.core.lanes().gpu_took(record.n_fetched,
                                static_cast<float>(record.ready_ns - record.posted_ns) * 1e-3f);
    }
  }
  if (m.options.trace != nullptr) m.trace_step();
  if (n_committed > 0) m.heat.advance(n_committed);
  for (int il = 0; il < m.n_layer; ++il) {
    if (m.catalog.layers[static_cast<size_t>(il)].n_expert() == 0) continue;
    const ColdRecord& record = m.records.as<ColdRecord>()[il];
    m.core.settle(il, record.came, record.carried);
  }
  m.core.end_step();
  if (m.mail().gave_up != 0) m.fault = "the CPU did not answer in time";
  m.check_file();
}

// `ids`: [row][n_used] of the whole step.
void GpuExperts::Impl::count_uses(int il, const int16_t* ids, std::span<const SequenceRows> groups) noexcept {
  for (const SequenceRows& group : groups) {
    const size_t n = group.rows.size() * static_cast<size_t>(n_used);
    if (group.uncommitted)
      std::copy_n(ids, n, draft_uses.of_layer(group.sequence, il));
    else
      for (size_t i = 0; i < n; ++i) heat.use(il, ids[i]);
    ids += n;
  }
}

void GpuExperts::commit(int sequence, std::span<const int32_t> path) noexcept {
  impl_->draft_uses.count(sequence, path, impl_->heat);
}

const char* GpuExperts::fault() const noexcept {
  return impl_->fault == nullptr ? "" : impl_->fault;
}
void GpuExperts::reset() {
  impl_->core.reset();
}
ExpertTelemetry GpuExperts::telemetry() const noexcept {
  return impl_->core.telemetry();
}
void GpuExperts::places(std::span<ExpertPlace> out) const noexcept {
  impl_->core.places(out);
}
const std::vector<LayerUses>& GpuExperts::layer_uses() const noexcept {
  return impl_->core.layer_uses();
}
const HeatMap& GpuExperts::heat() const noexcept {
  return impl_->heat;
}
void GpuExperts::set_heat(const HeatMap& heat) {
  impl_->heat = heat;
}
const LaneSplit& GpuExperts::lanes() const noexcept {
  return impl_->core.lanes();
}
ExpertStore& GpuExperts::store() noexcept {
  return impl_->core.store();
}

}  // namespace thermo
