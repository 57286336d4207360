// Split experts in steps with more rows than a mailbox holds: prompts, and large draft trees.
#include <cuda_runtime.h>

#include <algorithm>

#include "model/gpu/gpu_experts_impl.h"

namespace thermo {
namespace {

// Times of a larger step's lanes, to deal experts of few rows: copying one expert, and computing one on the
// processor.
constexpr float kCopyUs = 42.0f, kCpuExpertUs = 18.0f, kCpuRowUs = 4.0f;

}  // namespace

void GpuExperts::begin_large(int n_rows, StreamView stream) noexcept {
  Impl& m = *impl_;
  m.core.begin_step(n_rows, true);
  m.upload_control(stream);
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
      if (!core.store().hot(il, e)) cold[n++] = e;
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

// Queues the copies of the batches before `end`.
void GpuExperts::Impl::issue(size_t end) noexcept {
  const uint64_t step = align_up<uint64_t>(catalog.max_expert_bytes(), kExpertAlign);
  for (; n_issued < std::min(end, batches.size()); ++n_issued) {
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
    device.begin_copies(static_cast<size_t>(batch.n) * layer.expert_bytes);
    for (int i = 0; i < batch.n; ++i) {
      const std::byte* const from = host.complete() ? host.address(batch.layer, batch.experts[i])
                                                    : host.acquire(batch.layer, batch.experts[i]).gate.panels;
      std::byte* const to =
          lent.data() + (place * static_cast<size_t>(batch_experts) + static_cast<size_t>(i)) * step;
      cudaMemcpyAsync(to, from, layer.expert_bytes, cudaMemcpyHostToDevice, device.stream().handle);
      table[batch.experts[i]] = reinterpret_cast<const uint8_t*>(to);
    }
    device.end_copies();
    cudaMemcpyAsync(batch_tables.as<const uint8_t*>() + place * static_cast<size_t>(n_expert), table,
                    static_cast<size_t>(n_expert) * sizeof(const uint8_t*), cudaMemcpyHostToDevice,
                    device.stream().handle);
    copied[place].record(device.stream());
    arrived[n_issued].record(device.stream());
    count.streamed_bytes += static_cast<uint64_t>(batch.n) * layer.expert_bytes;
  }
}

void GpuExperts::Impl::compute_batches(size_t begin, size_t end, const DeviceExpertArgs& args,
                                       StreamView stream) noexcept {
  for (size_t b = begin; b < end; ++b) {
    issue(b + 1);
    const size_t place = b % kBatches;
    wanted[b].record(stream);
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
  const bool all_hot = m.core.store().n_cold(layer) == 0;
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
  const int64_t asked = now_ns();
  m.decided.synchronize();
  m.count.device_wait_ns += static_cast<uint64_t>(now_ns() - asked);
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
    if (!core.store().hot(layer, e) && rows_of(e) > 0) cold[n++] = e;
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
  const int64_t start = now_ns();
  // The copies of the layer before read the answer's memory; they ended before this layer was routed.
  large_lane->outputs(layer, large_pairs, gathered.as<float>(), static_cast<int>(large_pairs.size()),
                      large_y.as<float>());
  const int64_t took = now_ns() - start;
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

int GpuExperts::Impl::take_drafted(std::span<const SequenceRows> groups, const DraftedExperts& drafted,
                                   StreamView stream) noexcept {
  int n_rows = 0;
  std::fill(n_drafted.begin(), n_drafted.end(), 0);
  for (const SequenceRows& group : groups) {
    if (!group.uncommitted) continue;
    const int n = static_cast<int>(group.rows.size());
    n_rows += n;
    draft_uses.begin(group.sequence, n);
    cudaMemcpyAsync(large_drafted.data(), drafted.of_sequence(group.sequence), large_drafted.size(),
                    cudaMemcpyDeviceToHost, stream.handle);
    if (cudaStreamSynchronize(stream.handle) != cudaSuccess) return n_rows;  // which the model sees, too
    for (int il = 0; il < n_layer; ++il) {
      if (catalog.layers[static_cast<size_t>(il)].n_expert() == 0) continue;
      const int16_t* const ids = large_drafted.as<int16_t>() + il * drafted.layer_stride();
      for (int i = 0; i < n * n_used; ++i) ++n_drafted[static_cast<size_t>(il * n_expert + ids[i])];
      std::copy_n(ids, n * n_used, draft_uses.of_layer(group.sequence, il));
    }
  }
  return n_rows;
}

void GpuExperts::finish_large(std::span<const SequenceRows> groups, const DraftedExperts& drafted,
                              StreamView stream) noexcept {
  Impl& m = *impl_;
  int n_rows = 0;
  for (const SequenceRows& group : groups) n_rows += static_cast<int>(group.rows.size());
  const int n_uncommitted = m.take_drafted(groups, drafted, stream);
  for (size_t b = 0; b < m.n_issued; ++b)
    if (const float ms = Event::elapsed_ms(m.wanted[b], m.arrived[b]); ms > 0.0f)
      m.count.copy_wait_ns += static_cast<uint64_t>(ms * 1e6f);
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
      const int text = rows - m.n_drafted[static_cast<size_t>(il * m.n_expert + e)];
      if (text > 0) m.heat.use(il, e, static_cast<float>(text));
      const auto n_pairs = static_cast<uint64_t>(rows);
      m.core.count_pairs(il, n_pairs, m.core.store().hot(il, e) ? n_pairs : 0);
    }
    m.count.layer_steps += n_expert > 0;
  }
  m.heat.advance(n_rows - n_uncommitted);
  m.core.end_step();
  m.check_file();
}

}  // namespace thermo
