// A model on the GPU: its life, its steps and its sequences. What a step launches is in gpu_forward.cpp.
//
// Everything a step depends on (tokens, positions, lengths, ancestors, sequences) is read from one block of
// device memory that the step first copies from page-locked host memory, so one recorded graph per row bucket
// serves every step.
#include "model/gpu/gpu_model.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "device/copy_in.h"
#include "model/gpu/gpu_model_impl.h"

namespace thermo {
namespace {

void check_shapes(const ModelConfig& c) {
  const auto refuse = [](const char* what, int value, const char* expected) {
    throw LoadError(
        fmt::format("{} is {}, the GPU engine has kernels for {}; use --device cpu", what, value, expected));
  };
  if (c.head_dim != 32 && c.head_dim != 64 && c.head_dim != 128 && c.head_dim != 256)
    refuse("the head size", c.head_dim, "32, 64, 128 and 256");
  if (c.n_recurrent_layers() > 0) {
    if (c.ssm_dim != 16 && c.ssm_dim != 32 && c.ssm_dim != 64 && c.ssm_dim != 128)
      refuse("the state size", c.ssm_dim, "16, 32, 64 and 128");
    if (c.ssm_taps > kMaxConvTaps) refuse("the convolution length", c.ssm_taps, "up to 8");
  }
  if (c.route.n_expert > kMaxDeviceExperts) refuse("the number of experts", c.route.n_expert, "up to 512");
  if (c.route.n_expert_used > 32) refuse("the number of used experts", c.route.n_expert_used, "up to 32");
  if (c.n_embd % 4 != 0 || c.n_embd > 8192) refuse("the hidden size", c.n_embd, "multiples of 4 up to 8192");
}

}  // namespace

bool GpuModel::Impl::check(const char* what) noexcept {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return true;
  if (fault.empty()) {
    fault = fmt::format("{}: {}", what, cudaGetErrorString(status));
    log_warning("gpu", "device fault: {}", fault);
  }
  return false;
}

void GpuModel::Impl::record_graphs() {
  for (const bool keep : {false, true}) {
    if (keep && options.sequence.max_draft_rows == 0) continue;
    for (size_t b = 0; b < std::size(kBuckets); ++b) {
      const int n = kBuckets[b];
      if (n > options.n_batch) continue;
      // Once for real, so that kernels are loaded and allowed their shared memory; with no valid row it
      // changes nothing.
      *small_host.n_valid = 0;
      *small_host.n_groups = 0;
      *small_host.n_logits = n;
      *small_host.n_top = kTopTokens;
      std::fill_n(small_host.group, n, -1);
      std::fill_n(small_host.token, n, 0);
      std::fill_n(small_host.logit_row, n, 0);
      const auto work = [&] {
        copy_in_cuda(small.ancestors, small_host.ancestors, small.bytes, stream.view());
        enqueue(n, keep, n, small, nullptr, n);
      };
      work();
      if (!stream.synchronize())
        throw CudaError(ExitCode::Device, fmt::format("the GPU failed in its first step: {}",
                                                      cudaGetErrorString(cudaGetLastError())));
      graphs[keep][b] = CapturedGraph(stream.view(), work);
      cuda_check(cudaGetLastError(), "recording a step");  // kernels take memory when they are first used
    }
  }
}

// Rows, groups, positions and ancestors; rows up to n_rows are padding.
void GpuModel::Impl::lay_out(const StepBatch& batch, StepInputs& to, int n_rows) noexcept {
  const int n = static_cast<int>(batch.rows.size());
  const bool keep = batch.commit == Commit::Later;
  *to.n_valid = n;
  int n_groups = 0;
  logit_rows.clear();
  for (int r = 0; r < n; ++r) {
    const Row& row = batch.rows[static_cast<size_t>(r)];
    if (r == 0 || batch.rows[static_cast<size_t>(r - 1)].sequence != row.sequence) {
      to.group_sequence[n_groups] = row.sequence;
      to.group_begin[n_groups] = r;
      to.group_past[n_groups] = sequences[static_cast<size_t>(row.sequence)].n_past_;
      to.group_rows[n_groups] = 0;
      ++n_groups;
    }
    const int g = n_groups - 1, begin = to.group_begin[g], local = r - begin;
    ++to.group_rows[g];
    to.token[r] = row.token;
    to.group[r] = g;
    const int parent = keep ? row.parent : local == 0 ? -1 : r - 1;
    to.parent[r] = parent < 0 ? -1 : parent - begin;
    to.position[r] = parent < 0 ? to.group_past[g] : to.position[parent] + 1;
    to.ancestors[r] = (parent < 0 ? 0 : to.ancestors[parent]) | uint64_t{1} << (local % 64);
    if (row.want_logits) logit_rows.push_back(r);
  }
  *to.n_groups = n_groups;
  // More rows than the head computes at a time are copied as they come.
  const bool tops = batch.need != LogitsNeed::Row && logit_rows.size() <= static_cast<size_t>(kLogitRows);
  *to.n_logits = static_cast<int32_t>(logit_rows.size());
  *to.n_top = !tops ? 0 : batch.need == LogitsNeed::Best ? 1 : kTopTokens;
  for (int r = n; r < n_rows; ++r) {
    to.token[r] = 0;
    to.group[r] = -1;
    to.position[r] = 0;
    to.parent[r] = -1;
    to.ancestors[r] = 0;
  }
}

namespace {

int bucket_of(int n_rows) {
  for (size_t b = 0; b < std::size(kBuckets); ++b)
    if (n_rows <= kBuckets[b]) return static_cast<int>(b);
  return -1;
}

}  // namespace

GpuModel::GpuModel(ModelConfig config, const Weights& weights, const GpuModelOptions& options,
                   ThreadPool& pool, const LoadProgressFn& progress) {
  check_shapes(config);
  use_device(options.device);
  impl_ = std::make_unique<Impl>(std::move(config), weights, options, pool, progress);
  for (int s = 0; s < options.n_sequences; ++s) {
    GpuSequence& sequence = impl_->sequences[static_cast<size_t>(s)];
    sequence.model_ = this;
    sequence.index_ = s;
    sequence.n_ctx_ = options.sequence.n_ctx;
    sequence.max_draft_rows_ = options.sequence.max_draft_rows;
  }
}
GpuModel::~GpuModel() = default;

const ModelConfig& GpuModel::config() const {
  return impl_->config;
}
GpuSequence& GpuModel::sequence(int index) {
  return impl_->sequences[static_cast<size_t>(index)];
}
const std::string& GpuModel::fault() const noexcept {
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
const HeatMap* GpuModel::heat() const noexcept {
  return impl_->experts == nullptr ? nullptr : &impl_->experts->heat();
}
GpuExperts* GpuModel::experts() noexcept {
  return impl_->experts.get();
}

std::vector<GpuMemoryItem> GpuModel::plan(const ModelConfig& c, const Weights& w, const GpuModelOptions& o,
                                          int n_multiprocessors) {
  const GpuSequenceLayout layout(c, o.sequence);
  const uint64_t n = static_cast<uint64_t>(o.n_sequences);
  GpuCarver count(nullptr);
  GpuWorkspace().carve(count, c, o.n_batch, any_float_ffn(c, w), any_float_output(c, w), n_multiprocessors);
  const bool split = o.experts.split && c.route.n_expert > 0;
  std::vector<GpuMemoryItem> items = {
      {split ? "core weights" : "weights", GpuWeights::planned_bytes(c, w, !split)}};
  if (split)
    for (GpuMemoryItem& item : GpuExperts::plan(c, w, o.experts)) items.push_back(std::move(item));
  for (const GpuMemoryItem& item : std::initializer_list<GpuMemoryItem>{
           {"kv cache", n * layout.kv_bytes()},
           {"recurrent state", n * layout.recurrent_bytes()},
           {"draft tape", n * layout.tape_bytes()},
           {"activations", count.used()},
           {"norms and tables", GpuWeights::planned_small_bytes(c, w, !split) + rope_bytes(c)},
           {"rows of a step", input_bytes(o.n_batch)}})
    items.push_back(item);
  return items;
}

StepOutput GpuModel::step(const StepBatch& batch) noexcept {
  Impl& m = *impl_;
  if (!m.fault.empty()) return {};
  const int n = static_cast<int>(batch.rows.size());
  const bool keep = batch.commit == Commit::Later;
  const int b = bucket_of(n);
  const size_t row_bytes = static_cast<size_t>(m.config.n_vocab) * sizeof(float);
  cudaStream_t const stream = m.stream.view().handle;
  m.step_begin.record(m.stream.view());
  float* logits = m.logits_pinned.as<float>();
  bool tops = false;
  const bool replay = b >= 0 && batch.hidden == nullptr && !m.graphs[keep][b].empty();
  if (replay) {
    m.lay_out(batch, m.small_host, kBuckets[b]);
    if (m.experts != nullptr) m.begin_split(kBuckets[b], m.small_host);
    const size_t n_logits = m.logit_rows.size();
    for (int i = 0; i < kBuckets[b]; ++i)
      m.small_host.logit_row[i] =
          static_cast<size_t>(i) < n_logits ? m.logit_rows[static_cast<size_t>(i)] : 0;
    tops = *m.small_host.n_top > 0;
    m.graphs[keep][b].replay(m.stream.view());
    m.step_end.record(m.stream.view());
    if (n_logits > 0 && !tops)
      cudaMemcpyAsync(logits, m.act.logits, n_logits * row_bytes, cudaMemcpyDeviceToHost, stream);
    if (m.experts != nullptr) m.experts->serve(kBuckets[b], m.step_end);
    m.stream.synchronize();
    if (m.experts != nullptr) m.experts->finish(n);
  } else {
    m.lay_out(batch, m.large_host, n);
    const bool split = m.experts != nullptr, large = n > kMaxMailRows;
    if (split && large) m.experts->begin_large(n, m.stream.view());
    if (split && !large) m.begin_split(n, m.large_host);
    const int n_logits = static_cast<int>(m.logit_rows.size());
    tops = *m.large_host.n_top > 0;
    std::copy(m.logit_rows.begin(), m.logit_rows.end(), m.large_host.logit_row);
    copy_in_cuda(m.large.ancestors, m.large_host.ancestors, m.large.bytes, m.stream.view());
    // Copies to memory that is not page-locked stop this thread, which must answer the device.
    float* hidden = batch.hidden;
    if (hidden != nullptr && split && !large) hidden = m.small_hidden();
    m.enqueue(n, keep, std::min(n_logits, kLogitRows), m.large, hidden, n);
    m.step_end.record(m.stream.view());
    if (n_logits > 0 && !tops)
      cudaMemcpyAsync(logits, m.act.logits, static_cast<size_t>(std::min(n_logits, kLogitRows)) * row_bytes,
                      cudaMemcpyDeviceToHost, stream);
    if (split && !large) m.experts->serve(n, m.step_end);
    m.stream.synchronize();
    if (split && large) m.experts->finish_large();
    if (split && !large) m.experts->finish(n);
    if (hidden != batch.hidden)
      std::copy_n(hidden,
                  static_cast<size_t>(m.config.n_layer + 1) * static_cast<size_t>(n) *
                      static_cast<size_t>(m.config.n_embd),
                  batch.hidden);
    if (n_logits > kLogitRows) {
      float* const all = m.logits_host.as<float>();
      for (int done = 0; done < n_logits; done += kLogitRows) {
        const int now = std::min(kLogitRows, n_logits - done);
        if (done > 0) {
          m.head(now, m.large.logit_row + done, n);
          cudaMemcpyAsync(logits, m.act.logits, static_cast<size_t>(now) * row_bytes, cudaMemcpyDeviceToHost,
                          stream);
          m.stream.synchronize();
        }
        std::memcpy(all + static_cast<size_t>(done) * static_cast<size_t>(m.config.n_vocab), logits,
                    static_cast<size_t>(now) * row_bytes);
      }
      logits = all;
    }
  }
  if (m.experts != nullptr && m.fault.empty()) m.fault = m.experts->fault();
  if (!m.check("a step") || !m.fault.empty()) return {};
  m.step_ms = Event::elapsed_ms(m.step_begin, m.step_end);
  if (!keep)
    for (const Row& row : batch.rows) ++m.sequences[static_cast<size_t>(row.sequence)].n_past_;
  if (tops)
    return {.logits = {},
            .tops = {m.tops_pinned.as<TopLogits>(), m.logit_rows.size()},
            .logit_rows = m.logit_rows};
  return {.logits = {logits, m.logit_rows.size() * static_cast<size_t>(m.config.n_vocab)},
          .tops = {},
          .logit_rows = m.logit_rows};
}

std::span<const float> GpuModel::fetch_logits(int i) noexcept {
  Impl& m = *impl_;
  if (!m.fault.empty()) return {};
  const size_t n_vocab = static_cast<size_t>(m.config.n_vocab);
  float* const row = m.logits_pinned.as<float>();
  cudaMemcpyAsync(row, m.act.logits + static_cast<size_t>(i) * n_vocab, n_vocab * sizeof(float),
                  cudaMemcpyDeviceToHost, m.stream.view().handle);
  m.stream.synchronize();
  if (!m.check("fetching logits")) return {};
  return {row, n_vocab};
}

void GpuModel::commit(int sequence, std::span<const int32_t> path) noexcept {
  Impl& m = *impl_;
  if (!m.fault.empty() || path.empty()) return;
  GpuSequence& state = m.sequences[static_cast<size_t>(sequence)];
  m.path_host[0] = static_cast<int32_t>(path.size());
  std::copy(path.begin(), path.end(), m.path_host + 1);
  copy_in_cuda(m.path, m.path_host, (path.size() + 1) * sizeof(int32_t), m.stream.view());
  for (int il = 0; il < m.config.n_layer; ++il) {
    if (m.config.layers[static_cast<size_t>(il)].recurrent)
      delta_net_commit_cuda({.path = m.path + 1,
                             .n_path = m.path,
                             .tape = m.tape_of(il, sequence),
                             .state = m.delta_state(il, sequence),
                             .conv_state = m.delta_state(il, sequence) + m.layout.delta_floats,
                             .n_head_k = m.config.ssm_n_head_k,
                             .n_head_v = m.config.ssm_n_head_v,
                             .dim = m.config.ssm_dim,
                             .taps = m.config.ssm_taps,
                             .n_channels = m.config.ssm_channels()},
                            m.stream.view());
    else
      kv_move_cuda({.kv = m.kv_of(il, sequence),
                    .path = m.path + 1,
                    .n_path = m.path,
                    .past = state.n_past_,
                    .n_head_kv = m.config.n_head_kv,
                    .head_dim = m.config.head_dim},
                   m.stream.view());
  }
  m.stream.synchronize();  // the path's memory is used again
  if (!m.check("a commit")) return;
  state.n_past_ += static_cast<int>(path.size());
}

void GpuSequence::clear() noexcept {
  GpuModel::Impl& m = *model_->impl_;
  const size_t bytes = m.layout.recurrent_bytes();
  if (bytes > 0)
    cudaMemsetAsync(m.recurrent.data() + static_cast<size_t>(index_) * bytes, 0, bytes,
                    m.stream.view().handle);
  m.stream.synchronize();
  n_past_ = 0;
}

Checkpoint GpuSequence::checkpoint() const {
  GpuModel::Impl& m = *model_->impl_;
  const size_t bytes = m.layout.recurrent_bytes();
  Checkpoint point;
  point.n_past = n_past_;
  point.recurrent.resize(bytes / sizeof(float));
  if (bytes > 0)
    cudaMemcpyAsync(point.recurrent.data(), m.recurrent.data() + static_cast<size_t>(index_) * bytes, bytes,
                    cudaMemcpyDeviceToHost, m.stream.view().handle);
  m.stream.synchronize();
  return point;
}

void GpuSequence::restore(const Checkpoint& point) noexcept {
  GpuModel::Impl& m = *model_->impl_;
  const size_t bytes = m.layout.recurrent_bytes();
  if (bytes > 0)
    cudaMemcpyAsync(m.recurrent.data() + static_cast<size_t>(index_) * bytes, point.recurrent.data(), bytes,
                    cudaMemcpyHostToDevice, m.stream.view().handle);
  m.stream.synchronize();
  n_past_ = point.n_past;
}

void GpuSequence::truncate(int n) noexcept {
  n_past_ = n;
}

}  // namespace thermo
