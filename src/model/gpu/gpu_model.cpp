// A model on the GPU: its steps. What a step launches is in gpu_forward.cpp, checkpoints and pages of
// sequences are in gpu_sequences.cpp.
//
// Everything a step depends on (tokens, positions, lengths, ancestors, sequences) is read from one block of
// device memory that the step first copies from page-locked host memory, so one recorded graph per row bucket
// serves every step.
#include "model/gpu/gpu_model.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "device/copy_in.h"
#include "device/cuda_check.h"
#include "model/gpu/gpu_model_impl.h"
#include "model/gpu/gpu_states.h"

namespace thermo {
bool GpuModel::Impl::check(const char* what) noexcept {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return true;
  if (fault.empty()) {
    fault = fmt::format("{}: {}", what, cudaGetErrorString(status));
    log_warning("gpu", "device fault: {}", fault);
  }
  return false;
}

namespace {

// As TopLogitsArgs::n_wanted has it.
int tokens_needed(LogitsNeed need) {
  switch (need) {
    case LogitsNeed::Best:
      return 1;
    case LogitsNeed::Few:
      return kFewTokens;
    case LogitsNeed::Top:
      return kTopTokens;
    case LogitsNeed::Row:
      break;
  }
  return 0;
}

}  // namespace

// Rows, groups, positions, ancestors and what is wanted of the logits; rows up to n_rows are padding.
void GpuModel::Impl::lay_out(const StepBatch& batch, StepInputs& to, int n_rows) noexcept {
  row_logits.clear();
  int n = 0, n_groups = 0;
  for (const SequenceRows& group : batch.groups) {
    const int g = n_groups++, begin = n, past = n_past[static_cast<size_t>(group.sequence)];
    to.group_sequence[g] = group.sequence;
    to.group_begin[g] = begin;
    to.group_past[g] = past;
    to.group_rows[g] = static_cast<int32_t>(group.rows.size());
    to.group_uncommitted[g] = group.uncommitted;
    const int n_top = tokens_needed(group.need);
    for (const Row& row : group.rows) {
      const int r = n++, local = r - begin, parent = row.parent;
      to.token[r] = row.token;
      to.group[r] = g;
      to.parent[r] = parent;
      to.position[r] = parent < 0 ? past : to.position[begin + parent] + 1;
      to.ancestors[r] = (parent < 0 ? 0 : to.ancestors[begin + parent]) | uint64_t{1} << (local % 64);
      if (!row.want_logits) continue;
      to.logit_row[row_logits.size()] = r;
      to.n_top[row_logits.size()] = n_top;
      row_logits.push_back({.row = r});
    }
  }
  *to.n_valid = n;
  *to.n_groups = n_groups;
  *to.n_logits = static_cast<int32_t>(row_logits.size());
  for (int r = n; r < n_rows; ++r) {
    to.token[r] = 0;
    to.group[r] = -1;
    to.position[r] = 0;
    to.parent[r] = -1;
    to.ancestors[r] = 0;
  }
}

// Queues copies of those of the n rows of logits from `first` on that are wanted as a whole. Rows lie at the
// same offsets in both memories.
void GpuModel::Impl::copy_logits(const StepInputs& wanted, int n, int first) noexcept {
  const size_t n_vocab = static_cast<size_t>(config.n_vocab);
  for (int begin = 0; begin < n;) {
    int end = begin;
    while (end < n && wanted.n_top[first + end] == 0) ++end;
    const size_t at = static_cast<size_t>(begin) * n_vocab;
    if (end > begin)
      cudaMemcpyAsync(logits_pinned.as<float>() + at, act.logits + at,
                      static_cast<size_t>(end - begin) * n_vocab * sizeof(float), cudaMemcpyDeviceToHost,
                      stream.view().handle);
    begin = end + 1;
  }
}

namespace {

int bucket_of(int n_rows) {
  for (size_t b = 0; b < std::size(kBuckets); ++b)
    if (n_rows <= kBuckets[b]) return static_cast<int>(b);
  return -1;
}

// A recorded step computes logits for every row. With many rows of which few want them, as in a prompt, that
// takes longer than queuing the kernels.
bool worth_replaying(const StepBatch& batch, int n_rows) {
  if (n_rows <= 32) return true;
  int n_logits = 0;
  for (const SequenceRows& group : batch.groups)
    for (const Row& row : group.rows) n_logits += row.want_logits;
  return 2 * n_logits >= n_rows;
}

}  // namespace

StepKind GpuModel::Impl::kind_of(const StepBatch& batch) const noexcept {
  bool any[2] = {false, false};
  for (const SequenceRows& group : batch.groups) any[group.uncommitted] = true;
  if (any[1]) return any[0] ? StepKind::Mixed : StepKind::Uncommitted;
  const int n = batch.n_rows();
  return n == static_cast<int>(batch.groups.size()) && knows_singles(n) ? StepKind::Singles
                                                                        : StepKind::Committed;
}

std::span<const int> GpuModel::step_sizes() const noexcept {
  return kBuckets;
}

const ModelConfig& GpuModel::config() const {
  return impl_->config;
}
const SequenceLayout& GpuModel::layout() const noexcept {
  return impl_->layout;
}
KvPages& GpuModel::pages() const noexcept {
  return *impl_->pages;
}
int GpuModel::n_past(int sequence) const noexcept {
  return impl_->n_past[static_cast<size_t>(sequence)];
}
std::string_view GpuModel::fault() const noexcept {
  return impl_->fault;
}
float GpuModel::last_step_ms() const noexcept {
  return impl_->step_ms;
}

bool GpuModel::reset_experts() {
  if (impl_->experts == nullptr) return false;
  impl_->experts->reset();
  return true;
}
ExpertTelemetry GpuModel::expert_telemetry() const noexcept {
  return impl_->experts == nullptr ? ExpertTelemetry{} : impl_->experts->telemetry();
}
void GpuModel::expert_places(std::span<ExpertPlace> out) const noexcept {
  if (impl_->experts != nullptr)
    impl_->experts->places(out);
  else
    std::fill(out.begin(), out.end(), ExpertPlace{.tier = ExpertTier::Device});
}
std::span<const LayerUses> GpuModel::layer_uses() const noexcept {
  return impl_->experts == nullptr ? std::span<const LayerUses>() : impl_->experts->layer_uses();
}
const HeatMap* GpuModel::heat() const noexcept {
  if (impl_->experts != nullptr) return &impl_->experts->heat();
  return impl_->uses == nullptr ? nullptr : &impl_->uses->heat();
}
void GpuModel::set_heat(const HeatMap& heat) {
  if (impl_->experts != nullptr)
    impl_->experts->set_heat(heat);
  else
    impl_->uses->set_heat(heat);
}
GpuExperts* GpuModel::experts() noexcept {
  return impl_->experts.get();
}

StepOutput GpuModel::step(const StepBatch& batch) noexcept {
  Impl& m = *impl_;
  if (!m.fault.empty()) return {};
  const int n = batch.n_rows();
  const StepKind kind = m.kind_of(batch);
  const int b = bucket_of(n);
  const bool replay = b >= 0 && !m.graphs[static_cast<size_t>(kind)][b].empty() && worth_replaying(batch, n);
  const StepInputs& inputs = replay ? m.small_host : m.large_host;
  m.n_step_rows = n;
  for (const SequenceRows& group : batch.groups)
    m.reserve(group.sequence, static_cast<int>(group.rows.size()));
  m.flush_tables();
  m.flush_commits();
  m.step_begin.record(m.stream.view());
  float* states = m.act.states;
  for (const StateRows& piece : batch.states) {
    gather_states(piece, states, m.stream.view());
    states += static_cast<int64_t>(piece.n) * piece.width();
  }
  if (replay)
    m.replay(batch, m.graphs[static_cast<size_t>(kind)][b], kBuckets[b]);
  else
    m.queue(batch, kind);
  // After the step: a copy to memory that is not page-locked stops this thread, which had to answer the
  // device.
  if (batch.hidden != nullptr) m.fetch_taps(n, batch.hidden);
  if (m.experts != nullptr && m.fault.empty()) m.fault = m.experts->fault();
  if (!m.check("a step") || !m.fault.empty()) return {};
  m.step_ms = Event::elapsed_ms(m.step_begin, m.step_end);
  int n_committed = 0;
  for (const SequenceRows& group : batch.groups) {
    if (group.uncommitted) continue;
    const int n_rows = static_cast<int>(group.rows.size());
    m.set_past(group.sequence, n_past(group.sequence) + n_rows);
    n_committed += n_rows;
  }
  if (m.uses) m.uses->took_step(n_committed);
  const size_t n_vocab = static_cast<size_t>(m.config.n_vocab), n_logits = m.row_logits.size();
  const float* const logits =
      n_logits > static_cast<size_t>(kLogitRows) ? m.logits_host.as<float>() : m.logits_pinned.as<float>();
  for (size_t i = 0; i < n_logits; ++i) {
    if (inputs.n_top[i] == 0)
      m.row_logits[i].logits = {logits + i * n_vocab, n_vocab};
    else
      m.row_logits[i].top = m.tops_pinned.as<TopLogits>() + i;
  }
  return {m.row_logits};
}

// A step that was recorded for n_rows rows.
void GpuModel::Impl::replay(const StepBatch& batch, CapturedGraph& graph, int n_rows) noexcept {
  if (experts != nullptr) batch.do_meanwhile();  // later this thread answers the device
  lay_out(batch, small_host, n_rows);
  if (experts != nullptr) begin_split(n_rows, small_host);
  const int n_logits = *small_host.n_logits;
  std::fill(small_host.logit_row + n_logits, small_host.logit_row + n_rows, 0);
  graph.replay(stream.view());
  step_end.record(stream.view());
  copy_logits(small_host, n_logits, 0);
  if (experts != nullptr)
    experts->serve(n_rows, batch.n_rows(), step_end);
  else
    batch.do_meanwhile();
  stream.synchronize();
  if (experts != nullptr) experts->finish(batch.groups);
}

void GpuModel::Impl::queue(const StepBatch& batch, StepKind kind) noexcept {
  const int n = batch.n_rows();
  const bool split = experts != nullptr, is_large = n > kMaxMailRows;
  if (split && !is_large) batch.do_meanwhile();
  lay_out(batch, large_host, n);
  if (split && is_large) experts->begin_large(n, stream.view());
  if (split && !is_large) begin_split(n, large_host);
  const int n_logits = *large_host.n_logits;
  copy_in_cuda(large.ancestors, large_host.ancestors, large.bytes, stream.view());
  enqueue(n, kind, std::min(n_logits, kLogitRows), large);
  step_end.record(stream.view());
  copy_logits(large_host, std::min(n_logits, kLogitRows), 0);
  if (split && !is_large)
    experts->serve(n, n, step_end);
  else
    batch.do_meanwhile();
  stream.synchronize();
  if (split && is_large)
    experts->finish_large(batch.groups, DraftedExperts(config, options, act.drafted_experts), stream.view());
  if (split && !is_large) experts->finish(batch.groups);
  if (n_logits > kLogitRows) compute_more_logits(n_logits, n);
}

void GpuModel::Impl::fetch_taps(int n_rows, float* to) noexcept {
  const size_t row = static_cast<size_t>(config.n_embd) * sizeof(float),
               width = static_cast<size_t>(n_rows) * row;
  cudaMemcpy2DAsync(to, width, act.taps, static_cast<size_t>(options.n_batch) * row, width,
                    static_cast<size_t>(config.network.n_taps), cudaMemcpyDeviceToHost, stream.view().handle);
  stream.synchronize();
}

// The first kLogitRows rows of logits are there; the rest is computed as many at a time. What is wanted as a
// whole is put aside.
void GpuModel::Impl::compute_more_logits(int n_logits, int n_rows) noexcept {
  const size_t n_vocab = static_cast<size_t>(config.n_vocab);
  for (int done = 0; done < n_logits; done += kLogitRows) {
    const int now = std::min(kLogitRows, n_logits - done);
    if (done > 0) {
      head(now, large.logit_row + done, n_rows);
      top_of_head(now, large, done);
      copy_logits(large_host, now, done);
      stream.synchronize();
    }
    for (size_t i = 0; i < static_cast<size_t>(now); ++i)
      if (const size_t row = static_cast<size_t>(done) + i; large_host.n_top[row] == 0)
        std::memcpy(logits_host.as<float>() + row * n_vocab, logits_pinned.as<float>() + i * n_vocab,
                    n_vocab * sizeof(float));
  }
}

std::span<const float> GpuModel::fetch_logits(int i) noexcept {
  Impl& m = *impl_;
  if (!m.fault.empty()) return {};
  const RowLogits& wanted = m.row_logits[static_cast<size_t>(i)];
  if (wanted.top == nullptr) return wanted.logits;
  const int n_logits = static_cast<int>(m.row_logits.size()), first = i / kLogitRows * kLogitRows;
  const size_t n_vocab = static_cast<size_t>(m.config.n_vocab);
  const bool many = n_logits > kLogitRows;
  if (many)  // the device has the last of them
    m.head(std::min(kLogitRows, n_logits - first), m.large.logit_row + first, m.n_step_rows);
  float* const row =
      (many ? m.logits_host.as<float>() : m.logits_pinned.as<float>()) + static_cast<size_t>(i) * n_vocab;
  cudaMemcpyAsync(row, m.act.logits + static_cast<size_t>(i - first) * n_vocab, n_vocab * sizeof(float),
                  cudaMemcpyDeviceToHost, m.stream.view().handle);
  m.stream.synchronize();
  if (!m.check("fetching logits")) return {};
  return {row, n_vocab};
}

void GpuModel::commit(int sequence, std::span<const int32_t> path) noexcept {
  Impl& m = *impl_;
  if (!m.fault.empty() || path.empty()) return;
  DevicePath& to = m.paths_host[m.n_paths++];
  to.sequence = sequence;
  to.past = n_past(sequence);
  to.n = static_cast<int32_t>(path.size());
  std::copy(path.begin(), path.end(), to.rows);
  m.set_past(sequence, to.past + to.n);
  if (m.experts != nullptr) m.experts->commit(sequence, path);
  if (m.uses) m.uses->commit(sequence, path);
}

// With split experts the mail says what the rows of smaller steps chose.
DeviceUses GpuModel::Impl::uses_of(int il, const DeviceRows& rows, int n_rows) const noexcept {
  if (uses) return uses->of_layer(il, rows);
  DeviceUses none;
  if (experts != nullptr && rows.any_uncommitted && n_rows > kMaxMailRows)
    DraftedExperts(config, options, act.drafted_experts).take(rows, il, none);
  return none;
}

void GpuModel::Impl::set_past(int sequence, int n) noexcept {
  n_past[static_cast<size_t>(sequence)] = n;
  pages->advance(sequence, n);
}

void GpuModel::Impl::reserve(int sequence, int n) noexcept {
  THERMO_CHECK(pages->reserve(sequence, n_past[static_cast<size_t>(sequence)], n) == n,
               "rows without room for their keys and values");
}

// Once in so many tokens. The entries travel with the launches, so nobody waits for what is queued.
void GpuModel::Impl::flush_tables() noexcept {
  bool waits = true;
  pages->for_each_change([&](size_t first, size_t n) {
    if (std::exchange(waits, false)) wait_for_copies();  // of pages that have another owner now
    for (size_t done = 0; done < n; done += kMaxPageEntries) {
      DevicePageEntries entries{tables.as<int32_t>() + first + done,
                                static_cast<int>(std::min<size_t>(n - done, kMaxPageEntries)),
                                {}};
      std::copy_n(table_entries.data() + first + done, entries.n, entries.pages);
      put_pages_cuda(entries, stream.view());
    }
  });
}

void GpuModel::Impl::finish_commits() noexcept {
  if (n_paths == 0) return;
  flush_tables();
  flush_commits();
  stream.synchronize();
}

// Queues what commit() was told. Whoever calls this waits for the stream before it is told more: the paths'
// memory is used again.
void GpuModel::Impl::flush_commits() noexcept {
  if (n_paths == 0) return;
  const DevicePaths all{paths, n_paths};
  copy_in_cuda(paths, paths_host, static_cast<size_t>(n_paths) * sizeof(DevicePath), stream.view());
  n_paths = 0;
  if (layout.n_recurrent() > 0) {
    const int il = layout.first_recurrent();
    delta_net_commit_cuda(
        {.paths = all,
         .n_layers = layout.n_recurrent(),
         .tape = tape_of(il, 0),
         .tape_layer_stride = static_cast<int64_t>(layout.tape_layer_bytes() / sizeof(float)),
         .state = delta_state(il, 0),
         .conv_state = conv_state(il, 0),
         .sequence_stride = recurrent_stride(),
         .layer_stride = static_cast<int64_t>(layout.recurrent_layer_bytes() / sizeof(float)),
         .n_head_k = config.ssm_n_head_k,
         .n_head_v = config.ssm_n_head_v,
         .dim = config.ssm_dim,
         .taps = config.ssm_taps,
         .n_channels = config.ssm_channels()},
        stream.view());
  }
  for (const KvKind kind : kEachKvKind)
    if (layout.n_layers(kind) > 0)
      kv_move_cuda({.kv = kv_of(layout.first_layer(kind)),
                    .layer_bytes = static_cast<int64_t>(layout.kv_layer_bytes()),
                    .n_layers = layout.n_layers(kind),
                    .paths = all,
                    .n_head_kv = config.n_head_kv,
                    .head_dim = config.head_dim},
                   stream.view());
}

// The sequence becomes another one: what was committed to it does not matter.
void GpuModel::Impl::drop_commits(int sequence) noexcept {
  n_paths = static_cast<int>(std::remove_if(paths_host, paths_host + n_paths,
                                            [&](const DevicePath& p) { return p.sequence == sequence; }) -
                             paths_host);
}

StateRows GpuModel::states() const noexcept {
  const Impl& m = *impl_;
  const int64_t width = m.config.n_embd;
  return {.data = m.act.taps,
          .n_taps = m.config.network.n_taps,
          .n_embd = m.config.n_embd,
          .tap_stride = m.options.n_batch * width,
          .row_stride = width,
          .n = m.n_step_rows};
}

std::unique_ptr<StateBuffer> GpuModel::make_states(int n_rows, int n_taps) {
  return std::make_unique<GpuStates>(impl_->stream_owner, n_rows, n_taps, impl_->config.n_embd);
}

// Nobody waits for it: what reads the keys and values is queued after it.
void GpuModel::append_features(int sequence, const StateRows& features) noexcept {
  Impl& m = *impl_;
  const int n = features.n;
  if (!m.fault.empty() || n == 0) return;
  const int past = n_past(sequence), b = bucket_of(n);
  const bool replay = b >= 0 && !m.feature_graphs[b].empty();
  const int n_rows = replay ? kBuckets[b] : n;
  m.features_end.synchronize();  // the rows of the last ones were read
  m.reserve(sequence, n);
  m.flush_tables();
  const StepInputs& to = m.feature_host;
  *to.n_valid = n;
  *to.n_groups = 1;
  to.group_sequence[0] = sequence;
  to.group_begin[0] = 0;
  to.group_rows[0] = n;
  to.group_past[0] = past;
  to.group_uncommitted[0] = 0;
  for (int r = 0; r < n_rows; ++r) {
    to.group[r] = r < n ? 0 : -1;
    to.position[r] = r < n ? past + r : 0;
  }
  gather_states(features, m.act.states, m.stream.view());
  if (replay)
    m.feature_graphs[b].replay(m.stream.view());
  else
    m.enqueue_features(n_rows);
  m.features_end.record(m.stream.view());
  if (m.check("reading features")) m.set_past(sequence, past + n);
}

}  // namespace thermo
