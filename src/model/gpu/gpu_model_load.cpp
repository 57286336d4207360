// Takes everything that a model on the GPU needs, records its steps, and plans both.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "base/error.h"
#include "base/units.h"
#include "device/copy_in.h"
#include "device/cuda_check.h"
#include "kernels/delta_net/delta_net.h"
#include "model/gpu/gpu_model.h"
#include "model/gpu/gpu_model_impl.h"

namespace thermo {
namespace {

// States that can be on their way to main memory at once. A prompt step ends several prompts, and with one
// place the next step waited for all but the last: 5 of 67 ms with 64 sequences of 35B-A3B on an H200.
int n_staged_states(const SequenceLayout& layout, int n_sequences) {
  return n_sequences > 1 && layout.recurrent_bytes() > 0 ? std::clamp(n_sequences / 8, 1, 8) : 0;
}

// Says no before anything is loaded.
DeviceInfo device_for(const ModelConfig& c, const ModelOptions& o) {
  const DeviceInfo info = use_device(o.device);
  const int most = GpuModel::max_draft_rows(c);
  if (o.sequence.max_draft_rows > most)
    throw ConfigError(
        fmt::format(
            "{} has the shared memory for {} drafted rows in a step of this model, {} were asked for; "
            "draft fewer, or use the CPU",
            info.name, most, o.sequence.max_draft_rows),
        Remedy::Processor);
  return info;
}

}  // namespace

std::string GpuModel::refusal(const ModelConfig& c) {
  const auto because = [](const char* what, int value, const char* expected) {
    return fmt::format("{} is {}, the GPU engine has kernels for {}", what, value, expected);
  };
  if (c.head_dim != 16 && c.head_dim != 32 && c.head_dim != 64 && c.head_dim != 128 && c.head_dim != 256)
    return because("the head size", c.head_dim, "16, 32, 64, 128 and 256");
  if (c.n_recurrent_layers() > 0) {
    if (c.ssm_dim != 16 && c.ssm_dim != 32 && c.ssm_dim != 64 && c.ssm_dim != 128)
      return because("the state size", c.ssm_dim, "16, 32, 64 and 128");
    if (c.ssm_taps > kMaxConvTaps) return because("the convolution length", c.ssm_taps, "up to 8");
  }
  if (c.route.n_expert > kMaxDeviceExperts)
    return because("the number of experts", c.route.n_expert, "up to 512");
  if (c.route.n_expert_used > 32)
    return because("the number of used experts", c.route.n_expert_used, "up to 32");
  if (!c.network.features.empty() && c.n_layer > kMaxAppendLayers)
    return because("the number of a drafter's layers", c.n_layer, "up to 64");
  if (c.n_embd % 4 != 0 || c.n_embd > 8192)
    return because("the hidden size", c.n_embd, "multiples of 4 up to 8192");
  return "";
}

GpuModel::GpuModel(ModelConfig config, const Weights& weights, const ModelOptions& options, ThreadPool& pool,
                   const LoadProgressFn& progress, const GpuModel* target) {
  if (const std::string why = refusal(config); !why.empty())
    throw LoadError(why + "; use the CPU", Remedy::Processor);
  use_device(options.device);
  impl_ = std::make_unique<Impl>(std::move(config), weights, options, pool, progress,
                                 target == nullptr ? nullptr : target->impl_.get());
}
GpuModel::~GpuModel() = default;

int GpuModel::max_draft_rows(const ModelConfig& config) noexcept {
  return config.ssm_dim > 0 ? max_uncommitted_delta_rows(config.ssm_dim) : kMaxDeltaRows;
}

GpuModel::Impl::Impl(ModelConfig c, const Weights& w, const ModelOptions& o, ThreadPool& pool,
                     const LoadProgressFn& progress, const Impl* target)
    : config(std::move(c)),
      options(o),
      device(device_for(config, o)),
      stream_owner(target == nullptr ? std::make_shared<Stream>() : target->stream_owner),
      stream(*stream_owner),
      experts(o.experts.split && config.route.n_expert > 0
                  ? std::make_unique<GpuExperts>(config, w, o, pool, progress)
                  : nullptr),
      weights(config, w, experts.get(), target == nullptr ? nullptr : &target->weights, pool, progress),
      layout(SequenceLayout::on_gpu(config, o.sequence)) {
  const size_t n_sequences = static_cast<size_t>(o.n_sequences);
  for (const KvKind kind : kEachKvKind)
    kv[static_cast<size_t>(kind)] = DeviceBuffer(layout.pool_bytes(kind, o.n_sequences, o.n_batch));
  table_entries.resize(KvPages::table_ints(layout, o.n_sequences));
  tables = DeviceBuffer(table_entries.size() * sizeof(int32_t));
  pages = std::make_unique<KvPages>(layout, o.n_sequences, o.n_batch, table_entries,
                                    [this](KvKind kind, int from, int to) {
                                      const size_t bytes = layout.page_bytes(kind);
                                      wait_for_copies();
                                      cudaMemcpyAsync(pool_of(kind) + static_cast<size_t>(to) * bytes,
                                                      pool_of(kind) + static_cast<size_t>(from) * bytes,
                                                      bytes, cudaMemcpyDeviceToDevice, stream.view().handle);
                                    });
  cuda_check(cudaMemsetAsync(tables.data(), 0, tables.size(), stream.view().handle), "clearing page tables");
  pages->for_each_change([](size_t, size_t) {});
  THERMO_CHECK(config.network.features.empty() || layout.can_cut(),
               "keys of features go to all layers alike");
  recurrent = DeviceBuffer(n_sequences * layout.recurrent_bytes());
  tape = DeviceBuffer(n_sequences * layout.tape_bytes());
  for (int i = 0; i < n_staged_states(layout, o.n_sequences); ++i)
    staged_states.emplace_back().memory = DeviceBuffer(layout.recurrent_bytes());
  const bool small_ffn = any_small_ffn(config, w), float_mixed = any_float_output(config, w);
  GpuCarver count(nullptr);
  act.carve(count, config, o, small_ffn, float_mixed, device.n_multiprocessors);
  workspace_memory = DeviceBuffer(count.used());
  GpuCarver carver(workspace_memory.data());
  act.carve(carver, config, o, small_ffn, float_mixed, device.n_multiprocessors);

  const size_t small_bytes = StepInputs(nullptr, kMaxBucket).bytes,
               large_bytes = StepInputs(nullptr, o.n_batch).bytes;
  input_memory = DeviceBuffer(input_bytes(config, o));
  input_pinned = PinnedBuffer(input_bytes(config, o));
  small = StepInputs(input_memory.data(), kMaxBucket);
  small_host = StepInputs(input_pinned.data(), kMaxBucket);
  large = StepInputs(input_memory.data() + small_bytes, o.n_batch);
  large_host = StepInputs(input_pinned.data() + small_bytes, o.n_batch);
  size_t used = small_bytes + large_bytes;
  if (!config.network.features.empty()) {
    feature = StepInputs(input_memory.data() + used, o.n_batch);
    feature_host = StepInputs(input_pinned.data() + used, o.n_batch);
    used += large_bytes;
  }
  paths = reinterpret_cast<DevicePath*>(input_memory.data() + used);
  paths_host = reinterpret_cast<DevicePath*>(input_pinned.data() + used);
  logits_pinned =
      PinnedBuffer(static_cast<size_t>(kLogitRows) * static_cast<size_t>(config.n_vocab) * sizeof(float));
  tops_pinned = PinnedBuffer(static_cast<size_t>(std::max(o.n_batch, kLogitRows)) * sizeof(TopLogits));
  logits_host =
      HostBuffer(static_cast<size_t>(o.n_batch) * static_cast<size_t>(config.n_vocab) * sizeof(float));
  upload_rope();

  if (experts == nullptr && target == nullptr && config.is_moe())
    uses = std::make_unique<UseCounts>(
        o.experts.heat != nullptr ? *o.experts.heat : HeatMap(expert_catalog(config, w)), act.expert_uses,
        config.route.n_expert, DraftedExperts(config, o, act.drafted_experts), stream);
  while (most_fused_rows < kMaxNormActs && can_fuse_decode(most_fused_rows + 1)) ++most_fused_rows;
  find_block_forms();
  drafts_blocks = can_draft_blocks();
  n_past.resize(n_sequences);
  row_logits.reserve(static_cast<size_t>(o.n_batch));
  if (o.graphs) record_graphs();
  if (o.graphs && !config.network.features.empty()) record_features();
  if (uses) uses->clear();
  if (const size_t n = DraftedExperts(config, o).count(); n > 0)  // dense layers choose none
    cuda_check(cudaMemsetAsync(act.drafted_experts, 0xff, n * sizeof(int16_t), stream.view().handle),
               "clearing the choices of drafts");
  if (!stream.synchronize()) throw CudaError(ExitCode::Device, "the GPU failed while the model was prepared");
}

void GpuModel::Impl::upload_rope() {
  rope_memory = DeviceBuffer(rope_bytes(config));
  float* to = rope_memory.as<float>();
  for (const RopeConfig& rope : config.ropes) {
    const RopeTable table = make_rope_table(rope);
    ropes.push_back({to, rope.n_rot, table.magnitude});
    cuda_check(
        cudaMemcpy(to, table.inv_freq.data(), table.inv_freq.size() * sizeof(float), cudaMemcpyHostToDevice),
        "uploading tables");
    to += table.inv_freq.size();
  }
}

// Once for real, so that kernels are loaded and allowed their shared memory; with no valid row it changes
// nothing.
void GpuModel::Impl::record(CapturedGraph& graph, const std::function<void()>& work) {
  work();
  if (!stream.synchronize())
    throw CudaError(ExitCode::Device, fmt::format("the GPU failed in its first step: {}",
                                                  cudaGetErrorString(cudaGetLastError())));
  graph = CapturedGraph(stream.view(), work);
  cuda_check(cudaGetLastError(), "recording a step");  // kernels take memory when they are first used
}

void GpuModel::Impl::record_graphs() {
  for (const StepKind kind :
       {StepKind::Committed, StepKind::Singles, StepKind::Uncommitted, StepKind::Mixed}) {
    const bool drafts = kind == StepKind::Uncommitted || kind == StepKind::Mixed;
    if (drafts && options.sequence.max_draft_rows == 0) continue;
    // A drafter with features computes blocks, and those are never committed.
    if (kind != StepKind::Uncommitted && !config.network.features.empty()) continue;
    if (kind == StepKind::Mixed && options.n_sequences == 1) continue;
    for (size_t b = 0; b < std::size(kBuckets); ++b) {
      const int n = kBuckets[b];
      if (n > options.n_batch || (kind == StepKind::Mixed && n == 1)) continue;
      if (kind == StepKind::Singles && !knows_singles(n)) continue;
      *small_host.n_valid = 0;
      *small_host.n_groups = 0;
      *small_host.n_logits = n;
      std::fill_n(small_host.n_top, n, kTopTokens);
      std::fill_n(small_host.group, n, -1);
      std::fill_n(small_host.token, n, 0);
      std::fill_n(small_host.logit_row, n, 0);
      record(graphs[static_cast<size_t>(kind)][b], [&] {
        copy_in_cuda(small.ancestors, small_host.ancestors, small.bytes, stream.view());
        enqueue(n, kind, n, small);
      });
    }
  }
}

void GpuModel::Impl::record_features() {
  *feature_host.n_valid = 0;
  *feature_host.n_groups = 0;
  std::fill_n(feature_host.group, options.n_batch, -1);
  for (size_t b = 0; b < std::size(kBuckets); ++b)
    if (kBuckets[b] <= options.n_batch) record(feature_graphs[b], [&] { enqueue_features(kBuckets[b]); });
}

namespace {

std::vector<GpuMemoryItem> plan_items(const ModelConfig& c, const Weights& w, const ModelOptions& o,
                                      int n_multiprocessors, GpuWeights::MatrixSet shared) {
  const SequenceLayout layout = SequenceLayout::on_gpu(c, o.sequence);
  const uint64_t n = static_cast<uint64_t>(o.n_sequences);
  GpuCarver count(nullptr);
  GpuWorkspace().carve(count, c, o, any_small_ffn(c, w), any_float_output(c, w), n_multiprocessors);
  const bool split = o.experts.split && c.route.n_expert > 0;
  std::vector<GpuMemoryItem> items = {
      {split ? "core weights" : "weights", GpuWeights::planned_bytes(c, w, !split, std::move(shared))}};
  if (split)
    for (GpuMemoryItem& item : GpuExperts::plan(c, w, o.experts)) items.push_back(std::move(item));
  for (const GpuMemoryItem& item : std::initializer_list<GpuMemoryItem>{
           {kv_pool_name(KvKind::Full), layout.pool_bytes(KvKind::Full, o.n_sequences, o.n_batch)},
           {kv_pool_name(KvKind::Sliding), layout.pool_bytes(KvKind::Sliding, o.n_sequences, o.n_batch)},
           {"recurrent state", n * layout.recurrent_bytes()},
           {"draft tape", n * layout.tape_bytes()},
           {"checkpoints on their way",
            static_cast<size_t>(n_staged_states(layout, o.n_sequences)) * layout.recurrent_bytes()},
           {"activations", count.used()},
           {"norms and tables", GpuWeights::planned_small_bytes(c, w, !split) + rope_bytes(c)},
           {"rows of a step",
            input_bytes(c, o) + KvPages::table_ints(layout, o.n_sequences) * sizeof(int32_t)}})
    items.push_back(item);
  return items;
}

}  // namespace

std::vector<GpuMemoryItem> GpuModel::plan(const ModelConfig& c, const Weights& w, const ModelOptions& o,
                                          int n_multiprocessors) {
  return plan_items(c, w, o, n_multiprocessors, {});
}

uint64_t GpuModel::drafter_bytes(const ModelConfig& c, const Weights& w, const ModelOptions& o,
                                 int n_multiprocessors, const ModelConfig& target,
                                 const Weights& target_weights) {
  uint64_t bytes = 0;
  for (const GpuMemoryItem& item :
       plan_items(c, w, o, n_multiprocessors, GpuWeights::matrices_of(target, target_weights)))
    bytes += item.bytes;
  return bytes;
}

// A dense model of this size spends its time on bytes, not on launches. One row has norms as launches of
// their own, as several have: else each block of a product would make the norm again.
bool GpuModel::Impl::is_wide_dense() noexcept {
  constexpr size_t kWide = 16 << 20;
  bool wide = true;
  for_each_main_block(config, weights, [&](const Block& block, const GpuBlockWeights& w) {
    if (block.kind != BlockKind::FeedForward) return;
    const DeviceMatrix& gate = w[Role::FfnGate];
    wide = wide && dense_is_few(block, w, 1) &&
           2 * gate.panel_bytes * static_cast<size_t>(ceil_div(gate.n_rows, 16)) >= kWide;
  });
  return wide;
}

bool GpuModel::Impl::can_fuse_decode(int n_rows) noexcept {
  bool good = config.n_embd % 32 == 0 && act.hidden.f32_stride % 4 == 0 &&
              (n_rows == 1 || experts == nullptr) && !is_wide_dense();
  for_each_main_block(config, weights, [&](const Block& block, const GpuBlockWeights& w) {
    if (block.kind == BlockKind::FeedForward) {
      good = good && decode_ffn_possible(decode_ffn_args(block, w, n_rows));
      return;
    }
    for (const TensorSpec& spec : block.tensors)
      if (spec.form == TensorForm::Matrix) good = good && linear_reads_norm(w[spec.role], n_rows);
  });
  return good;
}

// Which forms of rounded rows the projections and the head read.
void GpuModel::Impl::find_block_forms() noexcept {
  const auto see = [&](const DeviceMatrix& m) {
    if (m.n_rows == 0 || is_float_type(m.dtype)) return;
    (act_format(m.dtype) == ActFormat::Q8x256 ? reads_blocks256 : reads_blocks32) = true;
  };
  for_each_main_block(config, weights, [&](const Block& block, const GpuBlockWeights& w) {
    if (block.kind == BlockKind::FeedForward) return;
    for (const TensorSpec& spec : block.tensors)
      if (spec.form == TensorForm::Matrix) see(w[spec.role]);
  });
  see(weights.output.front()[Role::Output]);
}

}  // namespace thermo
