// Takes everything that a model on the GPU needs, records its steps, and plans both.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/units.h"
#include "device/copy_in.h"
#include "device/cuda_check.h"
#include "kernels/delta_net/delta_net.h"
#include "model/gpu/gpu_model.h"
#include "model/gpu/gpu_model_impl.h"

namespace thermo {
namespace {

void check_shapes(const ModelConfig& c) {
  const auto refuse = [](const char* what, int value, const char* expected) {
    throw LoadError(
        fmt::format("{} is {}, the GPU engine has kernels for {}; use the processor", what, value, expected),
        Remedy::Processor);
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

// Says no before anything is loaded.
DeviceInfo device_for(const ModelConfig& c, const ModelOptions& o) {
  const DeviceInfo info = use_device(o.device);
  const int most = c.ssm_dim > 0 ? max_uncommitted_delta_rows(c.ssm_dim) : kMaxDeltaRows;
  if (o.sequence.max_draft_rows > most)
    throw ConfigError(
        fmt::format(
            "{} has the shared memory for {} drafted rows in a step of this model, {} were asked for; "
            "draft fewer, or use the processor",
            info.name, most, o.sequence.max_draft_rows),
        Remedy::Processor);
  return info;
}

}  // namespace

GpuModel::GpuModel(ModelConfig config, const Weights& weights, const ModelOptions& options, ThreadPool& pool,
                   const LoadProgressFn& progress) {
  check_shapes(config);
  use_device(options.device);
  impl_ = std::make_unique<Impl>(std::move(config), weights, options, pool, progress);
}
GpuModel::~GpuModel() = default;

GpuModel::Impl::Impl(ModelConfig c, const Weights& w, const ModelOptions& o, ThreadPool& pool,
                     const LoadProgressFn& progress)
    : config(std::move(c)),
      options(o),
      device(device_for(config, o)),
      experts(o.experts.split && config.route.n_expert > 0
                  ? std::make_unique<GpuExperts>(config, w, o.experts, o.n_batch, o.isa, pool, progress)
                  : nullptr),
      weights(config, w, experts.get(), pool, progress),
      layout(SequenceLayout::on_gpu(config, o.sequence)) {
  const size_t n_sequences = static_cast<size_t>(o.n_sequences);
  kv = DeviceBuffer(n_sequences * layout.kv_bytes());
  recurrent = DeviceBuffer(n_sequences * layout.recurrent_bytes());
  tape = DeviceBuffer(n_sequences * layout.tape_bytes());
  const bool small_ffn = any_small_ffn(config, w), float_mixed = any_float_output(config, w);
  GpuCarver count(nullptr);
  act.carve(count, config, o.n_batch, small_ffn, float_mixed, device.n_multiprocessors);
  workspace_memory = DeviceBuffer(count.used());
  GpuCarver carver(workspace_memory.data());
  act.carve(carver, config, o.n_batch, small_ffn, float_mixed, device.n_multiprocessors);

  const size_t small_bytes = StepInputs(nullptr, kMaxBucket).bytes,
               large_bytes = StepInputs(nullptr, o.n_batch).bytes;
  input_memory = DeviceBuffer(input_bytes(o.n_batch));
  input_pinned = PinnedBuffer(input_bytes(o.n_batch));
  small = StepInputs(input_memory.data(), kMaxBucket);
  small_host = StepInputs(input_pinned.data(), kMaxBucket);
  large = StepInputs(input_memory.data() + small_bytes, o.n_batch);
  large_host = StepInputs(input_pinned.data() + small_bytes, o.n_batch);
  path = reinterpret_cast<int32_t*>(input_memory.data() + small_bytes + large_bytes);
  path_host = reinterpret_cast<int32_t*>(input_pinned.data() + small_bytes + large_bytes);
  logits_pinned =
      PinnedBuffer(static_cast<size_t>(kLogitRows) * static_cast<size_t>(config.n_vocab) * sizeof(float));
  tops_pinned = PinnedBuffer(kLogitRows * sizeof(TopLogits));
  logits_host =
      HostBuffer(static_cast<size_t>(o.n_batch) * static_cast<size_t>(config.n_vocab) * sizeof(float));
  upload_rope();

  fused_decode = can_fuse_decode();
  n_past.resize(n_sequences);
  row_logits.reserve(static_cast<size_t>(o.n_batch));
  if (o.graphs) record_graphs();
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

void GpuModel::Impl::record_graphs() {
  for (const StepKind kind : {StepKind::Committed, StepKind::Uncommitted}) {
    if (kind == StepKind::Uncommitted && options.sequence.max_draft_rows == 0) continue;
    for (size_t b = 0; b < std::size(kBuckets); ++b) {
      const int n = kBuckets[b];
      if (n > options.n_batch) continue;
      // Once for real, so that kernels are loaded and allowed their shared memory; with no valid row it
      // changes nothing.
      *small_host.n_valid = 0;
      *small_host.n_groups = 0;
      *small_host.n_logits = n;
      std::fill_n(small_host.n_top, n, kTopTokens);
      std::fill_n(small_host.group, n, -1);
      std::fill_n(small_host.token, n, 0);
      std::fill_n(small_host.logit_row, n, 0);
      const auto work = [&] {
        copy_in_cuda(small.ancestors, small_host.ancestors, small.bytes, stream.view());
        enqueue(n, kind, n, small);
      };
      work();
      if (!stream.synchronize())
        throw CudaError(ExitCode::Device, fmt::format("the GPU failed in its first step: {}",
                                                      cudaGetErrorString(cudaGetLastError())));
      graphs[static_cast<size_t>(kind)][b] = CapturedGraph(stream.view(), work);
      cuda_check(cudaGetLastError(), "recording a step");  // kernels take memory when they are first used
    }
  }
}

std::vector<GpuMemoryItem> GpuModel::plan(const ModelConfig& c, const Weights& w, const ModelOptions& o,
                                          int n_multiprocessors) {
  const SequenceLayout layout = SequenceLayout::on_gpu(c, o.sequence);
  const uint64_t n = static_cast<uint64_t>(o.n_sequences);
  GpuCarver count(nullptr);
  GpuWorkspace().carve(count, c, o.n_batch, any_small_ffn(c, w), any_float_output(c, w), n_multiprocessors);
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

}  // namespace thermo
