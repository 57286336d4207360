// What a model on the GPU has; shared by gpu_model.cpp (life, steps, sequences) and gpu_forward.cpp (what a
// step launches).
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/host_buffer.h"
#include "base/units.h"
#include "device/buffer.h"
#include "device/cuda_check.h"
#include "device/device_info.h"
#include "device/graph.h"
#include "device/stream.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/delta_net/delta_net_cuda.h"
#include "kernels/expert_ffn/decode_ffn_cuda.h"
#include "kernels/linear/linear_cuda.h"
#include "kernels/row_ops/row_ops_cuda.h"
#include "kernels/sample/sample_cuda.h"
#include "model/gpu/gpu_model.h"
#include "model/gpu/gpu_weights.h"
#include "model/gpu/gpu_workspace.h"

namespace thermo {

struct GpuModel::Impl {
  ModelConfig config;
  GpuModelOptions options;
  DeviceInfo device;
  Stream stream;                        // destroyed last
  std::unique_ptr<GpuExperts> experts;  // nullptr: they are with the other weights
  GpuWeights weights;
  GpuSequenceLayout layout;
  DeviceBuffer kv, recurrent, tape;  // all sequences
  DeviceBuffer workspace_memory;     // graphs hold addresses in all of these
  DeviceBuffer input_memory, rope_memory;
  PinnedBuffer input_pinned, logits_pinned, tops_pinned;
  PinnedBuffer hidden_pinned;  // of a small step with split experts, taken when first asked for
  HostBuffer logits_host;      // when more than kLogitRows rows are asked for
  GpuWorkspace act;
  StepInputs small, small_host, large, large_host;
  int32_t *path, *path_host;  // [0]: length, then rows
  float *rope_full, *rope_window;
  float magnitude_full, magnitude_window;
  std::vector<GpuSequence> sequences;
  std::vector<RowLogits> row_logits;  // of the last step
  Event step_begin, step_end;
  // [kind][bucket]; steps with committed and uncommitted groups queue their kernels. Destroyed first.
  CapturedGraph graphs[2][std::size(kBuckets)];
  std::string fault;
  float step_ms = 0.0f;
  bool fused_decode = false;  // one row runs without launches for norms

  // Says no before anything is loaded.
  static DeviceInfo device_for(const ModelConfig& c, const GpuModelOptions& o) {
    const DeviceInfo info = use_device(o.device);
    const int most = c.ssm_dim > 0 ? max_uncommitted_delta_rows(c.ssm_dim) : kMaxDeltaRows;
    if (o.sequence.max_draft_rows > most)
      throw ConfigError(fmt::format(
          "{} has the shared memory for {} drafted rows in a step of this model, {} were asked for; "
          "draft fewer, or use --device cpu",
          info.name, most, o.sequence.max_draft_rows));
    return info;
  }

  Impl(ModelConfig c, const Weights& w, const GpuModelOptions& o, ThreadPool& pool,
       const LoadProgressFn& progress)
      : config(std::move(c)),
        options(o),
        device(device_for(config, o)),
        experts(o.experts.split && config.route.n_expert > 0
                    ? std::make_unique<GpuExperts>(config, w, o.experts, o.n_batch, o.isa, pool, progress)
                    : nullptr),
        weights(config, w, experts.get(), pool, progress),
        layout(config, o.sequence) {
    const size_t n_sequences = static_cast<size_t>(o.n_sequences);
    kv = DeviceBuffer(n_sequences * layout.kv_bytes());
    recurrent = DeviceBuffer(n_sequences * layout.recurrent_bytes());
    tape = DeviceBuffer(n_sequences * layout.tape_bytes());
    const bool float_ffn = any_float_ffn(config, w), float_mixed = any_float_output(config, w);
    GpuCarver count(nullptr);
    act.carve(count, config, o.n_batch, float_ffn, float_mixed, device.n_multiprocessors);
    workspace_memory = DeviceBuffer(count.used());
    GpuCarver carver(workspace_memory.data());
    act.carve(carver, config, o.n_batch, float_ffn, float_mixed, device.n_multiprocessors);

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
    sequences.resize(n_sequences);
    row_logits.reserve(static_cast<size_t>(o.n_batch));
    if (o.graphs) record_graphs();
    if (!stream.synchronize())
      throw CudaError(ExitCode::Device, "the GPU failed while the model was prepared");
  }

  void upload_rope() {
    const RopeTable full = make_rope_table(config.rope_full), window = make_rope_table(config.rope_window);
    rope_memory = DeviceBuffer(rope_bytes(config));
    rope_full = rope_memory.as<float>();
    rope_window = rope_full + full.inv_freq.size();
    magnitude_full = full.magnitude;
    magnitude_window = window.magnitude;
    if (!full.inv_freq.empty())
      cuda_check(cudaMemcpy(rope_full, full.inv_freq.data(), full.inv_freq.size() * sizeof(float),
                            cudaMemcpyHostToDevice),
                 "uploading tables");
    if (!window.inv_freq.empty())
      cuda_check(cudaMemcpy(rope_window, window.inv_freq.data(), window.inv_freq.size() * sizeof(float),
                            cudaMemcpyHostToDevice),
                 "uploading tables");
  }

  void record_graphs();
  void lay_out(const StepBatch& batch, StepInputs& to, int n_rows) noexcept;
  void replay(const StepBatch& batch, CapturedGraph& graph, int n_rows) noexcept;
  void queue(const StepBatch& batch, StepKind kind) noexcept;
  void copy_logits(const StepInputs& wanted, int n) noexcept;
  void compute_more_logits(int n_logits, int n_rows) noexcept;
  void enqueue(int n_rows, StepKind kind, int n_logits, const StepInputs& from, float* hidden,
               int n_valid) noexcept;
  void attention(int il, int n_rows, const DeviceRows& rows, const DeviceNormIn& norm) noexcept;
  void delta_net(int il, int n_rows, StepKind kind, const DeviceRows& rows,
                 const DeviceNormIn& norm) noexcept;
  void feed_forward(int il, int n_rows, const DeviceRows& rows, const DeviceCold& cold) noexcept;
  DecodeFfnArgs decode_ffn_args(int il) noexcept;
  bool can_fuse_decode() noexcept;
  void project_in(std::initializer_list<DeviceLinearJob> jobs, const DeviceNormIn& norm, int n_rows) noexcept;
  void project_out(const DeviceMatrix& w, const DeviceActs& x, const DeviceNormIn& norm, int n_rows) noexcept;
  void head(int n_logits, const int32_t* rows, int n_rows) noexcept;
  void top_of_head(int n_logits, const StepInputs& from) noexcept;
  void linear(std::initializer_list<DeviceLinearJob> jobs, const DeviceActs& x, int n_acts,
              const int32_t* row_index = nullptr, const DeviceNormIn& norm = {}) noexcept;
  // Normed rows as a step of n_rows has them.
  DeviceActsOut normed(int n_rows) const {
    DeviceActsOut h = act.h;
    if (n_rows > kMaxSmallActs) h.i8 = nullptr;
    return h;
  }
  bool check(const char* what) noexcept;
  float* small_hidden() {
    if (hidden_pinned.size() == 0)
      hidden_pinned = PinnedBuffer(static_cast<size_t>(config.n_layer + 1) * kMaxMailRows *
                                   static_cast<size_t>(config.n_embd) * sizeof(float));
    return hidden_pinned.as<float>();
  }
  void begin_split(int n_rows, StepInputs& inputs) noexcept {
    experts->begin(n_rows, *inputs.ticket, {inputs.fetch_of, kMaxFetchTable + 1}, stream.view());
  }

  float* delta_state(int il, int sequence) {
    return recurrent.as<float>() +
           (static_cast<size_t>(sequence * layout.n_recurrent + layout.index[static_cast<size_t>(il)])) *
               layout.recurrent_floats;
  }
  DeviceTape tape_of(int il, int sequence) {
    float* const base = tape.as<float>() + static_cast<size_t>(sequence * layout.n_recurrent +
                                                               layout.index[static_cast<size_t>(il)]) *
                                               layout.tape_floats;
    return {.conv_input = base,
            .k = base + layout.tape_conv,
            .g = base + layout.tape_conv + layout.tape_k,
            .delta = base + layout.tape_conv + layout.tape_k + layout.tape_g,
            .sequence_stride =
                static_cast<int64_t>(static_cast<size_t>(layout.n_recurrent) * layout.tape_floats)};
  }
  DeviceKv kv_of(int il, int sequence) {
    std::byte* const base = kv.data() + static_cast<size_t>(sequence) * layout.kv_bytes() +
                            static_cast<size_t>(layout.index[static_cast<size_t>(il)]) * layout.kv_layer;
    return {.k_type = options.sequence.k_type,
            .v_type = options.sequence.v_type,
            .k = base,
            .v = base + layout.k_bytes,
            .sequence_bytes = static_cast<int64_t>(layout.kv_bytes())};
  }
};

}  // namespace thermo
