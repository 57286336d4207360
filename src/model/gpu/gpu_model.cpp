// The step on the GPU: the same blocks as model/forward.cpp, each a few launches over all rows.
//
//   [project] [DeltaNet or attention] [project] [add, norm] [router] [choose] [gate, up] [down] [add, norm]
//   ... [head]
//
// Everything a step depends on (tokens, positions, lengths, ancestors, sequences) is read from one block of
// device memory that the step first copies from page-locked host memory, so one recorded graph per row bucket
// serves every step.
#include "model/gpu/gpu_model.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/host_buffer.h"
#include "base/log.h"
#include "base/units.h"
#include "device/buffer.h"
#include "device/cuda_check.h"
#include "device/device_info.h"
#include "device/graph.h"
#include "device/stream.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/delta_net/delta_net_cuda.h"
#include "kernels/expert_ffn/decode_ffn_cuda.h"
#include "kernels/expert_ffn/expert_ffn_cuda.h"
#include "kernels/linear/linear_cuda.h"
#include "kernels/route_topk/route_topk_cuda.h"
#include "kernels/row_ops/row_ops_cuda.h"
#include "kernels/sample/sample_cuda.h"
#include "model/gpu/gpu_weights.h"
#include "model/gpu/gpu_workspace.h"

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
  std::vector<int32_t> logit_rows;
  Event step_begin, step_end;
  CapturedGraph graphs[2][std::size(kBuckets)];  // kept rows; bucket. Destroyed first
  std::string fault;
  float step_ms = 0.0f;
  bool fused_decode = false;  // one row runs without launches for norms

  // Says no before anything is loaded.
  static DeviceInfo device_for(const ModelConfig& c, const GpuModelOptions& o) {
    const DeviceInfo info = use_device(o.device);
    const int most = c.ssm_dim > 0 ? max_kept_delta_rows(c.ssm_dim) : kMaxDeltaRows;
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
    logit_rows.reserve(static_cast<size_t>(o.n_batch));
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
  void enqueue(int n_rows, bool keep, int n_logits, const StepInputs& from, float* hidden,
               int n_valid) noexcept;
  void attention(int il, int n_rows, const DeviceRows& rows, const DeviceNormIn& norm) noexcept;
  void delta_net(int il, int n_rows, bool keep, const DeviceRows& rows, const DeviceNormIn& norm) noexcept;
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

bool GpuModel::Impl::check(const char* what) noexcept {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return true;
  if (fault.empty()) {
    fault = fmt::format("{}: {}", what, cudaGetErrorString(status));
    log_warning("gpu", "device fault: {}", fault);
  }
  return false;
}

void GpuModel::Impl::linear(std::initializer_list<DeviceLinearJob> jobs, const DeviceActs& x, int n_acts,
                            const int32_t* row_index, const DeviceNormIn& norm) noexcept {
  DeviceLinearArgs args;
  for (const DeviceLinearJob& job : jobs)
    if (job.w.n_rows > 0) args.jobs[args.n_jobs++] = job;
  args.x = x;
  args.norm = norm;
  args.row_index = row_index;
  args.n_acts = n_acts;
  linear_cuda(args, stream.view());
}

// With a norm: of one row, straight from the residual stream. Output projections then add to it.
void GpuModel::Impl::project_in(std::initializer_list<DeviceLinearJob> jobs, const DeviceNormIn& norm,
                                int n_rows) noexcept {
  linear(jobs, normed(n_rows).read(), n_rows, nullptr, norm);
}

// Output projections have few panels and many columns: their sums are cut into parts, added up by the norm
// that follows.

void GpuModel::Impl::project_out(const DeviceMatrix& w, const DeviceActs& x, const DeviceNormIn& norm,
                                 int n_rows) noexcept {
  if (norm.x != nullptr) {
    linear({{.w = w, .y = act.x, .y_stride = config.n_embd, .add = true}}, x, n_rows);
    return;
  }
  linear({{.w = w,
           .y = act.parts,
           .y_stride = config.n_embd,
           .k_parts = linear_parts(w, n_rows),
           .part_stride = static_cast<int64_t>(n_rows) * config.n_embd}},
         x, n_rows);
}

void GpuModel::Impl::attention(int il, int n_rows, const DeviceRows& rows,
                               const DeviceNormIn& norm) noexcept {
  const GpuAttentionWeights& w = weights.layers[static_cast<size_t>(il)].attention;
  const LayerConfig& layer = config.layers[static_cast<size_t>(il)];
  const int q_dim = layer.n_head * config.head_dim;
  project_in({{w.q, act.q_full, w.q.n_rows},
              {w.k, act.k, w.k.n_rows},
              {w.v, act.v, w.v.n_rows},
              {w.gate, act.gate, w.gate.n_rows}},
             norm, n_rows);

  const bool windowed = layer.window > 0 && config.arch == Arch::Laguna;
  DeviceActsOut out = act.mixed;
  out.f16_stride = static_cast<int64_t>(f16_columns(q_dim));
  out.f32_stride = q_dim;
  if (is_float_type(w.output.dtype))
    out.f16 = nullptr;
  else
    out.f32 = nullptr;
  attention_cuda(
      {.rows = rows,
       .kv = kv_of(il, 0),
       .n_rows = n_rows,
       .n_head = layer.n_head,
       .n_head_kv = config.n_head_kv,
       .head_dim = config.head_dim,
       .scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim)),
       .window = layer.window,
       .eps = config.norm_eps,
       .q_full = act.q_full,
       .k = act.k,
       .v = act.v,
       .gate = act.gate,
       .head_gate = config.attn_gate == AttnGate::SigmoidElement ? HeadGate::SigmoidElement
                    : config.attn_gate == AttnGate::SoftplusHead ? HeadGate::SoftplusHead
                                                                 : HeadGate::SoftplusElement,
       .q_norm = w.q_norm,
       .k_norm = w.k_norm,
       .inv_freq = windowed ? rope_window : rope_full,
       .n_rot = windowed ? config.rope_window.n_rot : config.rope_full.n_rot,
       .rope_magnitude = windowed ? magnitude_window : magnitude_full,
       .q = act.q,
       .partial = act.partial,
       .n_splits = attention_splits(n_rows, layer.n_head, config.n_head_kv, device.n_multiprocessors),
       .out = out,
       .tagged = norm.x != nullptr ? act.attention_tagged : nullptr,
       .launch = decode_launch_number(act.exchange)},
      stream.view());
  project_out(w.output, out.read(), norm, n_rows);
}

void GpuModel::Impl::delta_net(int il, int n_rows, bool keep, const DeviceRows& rows,
                               const DeviceNormIn& norm) noexcept {
  const GpuDeltaNetWeights& w = weights.layers[static_cast<size_t>(il)].delta_net;
  project_in({{w.qkv, act.conv_input, config.ssm_channels()},
              {w.z, act.z, config.ssm_inner()},
              {w.alpha, act.alpha, config.ssm_n_head_v},
              {w.beta, act.beta, config.ssm_n_head_v}},
             norm, n_rows);
  DeviceActsOut out = act.mixed;
  out.f16_stride = static_cast<int64_t>(f16_columns(config.ssm_inner()));
  out.f32_stride = config.ssm_inner();
  if (is_float_type(w.output.dtype))
    out.f16 = nullptr;
  else
    out.f32 = nullptr;
  delta_net_cuda({.rows = rows,
                  .n_rows = n_rows,
                  .max_groups = std::min(n_rows, options.n_sequences),
                  .max_group_rows = keep ? std::min(n_rows, options.sequence.max_draft_rows) : n_rows,
                  .n_head_k = config.ssm_n_head_k,
                  .n_head_v = config.ssm_n_head_v,
                  .dim = config.ssm_dim,
                  .taps = config.ssm_taps,
                  .eps = config.norm_eps,
                  .u = act.conv_input,
                  .z = act.z,
                  .alpha = act.alpha,
                  .beta = act.beta,
                  .conv_weight = w.conv,
                  .a = w.a,
                  .dt_bias = w.dt_bias,
                  .norm = w.norm,
                  .state = delta_state(il, 0),
                  .conv_state = delta_state(il, 0) + layout.delta_floats,
                  .sequence_stride =
                      static_cast<int64_t>(static_cast<size_t>(layout.n_recurrent) * layout.recurrent_floats),
                  .keep = keep,
                  .tape = tape_of(il, 0),
                  .mixed = act.conv_output,
                  .gates = act.gates,
                  .rule_out = act.rule_out,
                  .scores = act.chunk_scores,
                  .out = out},
                 stream.view());
  project_out(w.output, out.read(), norm, n_rows);
}

void GpuModel::Impl::feed_forward(int il, int n_rows, const DeviceRows& rows,
                                  const DeviceCold& cold) noexcept {
  const GpuFfnWeights& w = weights.layers[static_cast<size_t>(il)].ffn;
  DeviceExpertArgs args;

  args.gate = w.gate;
  args.up = w.up;
  args.down = w.down;
  args.shared_gate = w.shared_gate;
  args.shared_up = w.shared_up;
  args.shared_down = w.shared_down;
  args.n_expert = w.moe ? config.route.n_expert : 0;
  args.routes = act.routes;
  args.x = normed(n_rows).read();
  args.hidden = act.hidden;
  if (n_rows > kMaxSmallActs) args.hidden.i8 = nullptr;
  const bool needs_float = (w.gate.n_rows > 0 && is_float_type(w.down.dtype)) ||
                           (w.shared_gate.n_rows > 0 && is_float_type(w.shared_down.dtype));
  const bool needs_half = (w.gate.n_rows > 0 && !is_float_type(w.down.dtype)) ||
                          (w.shared_gate.n_rows > 0 && !is_float_type(w.shared_down.dtype));
  if (!needs_float) args.hidden.f32 = nullptr;
  if (!needs_half) args.hidden.f16 = nullptr;
  args.y = act.parts;
  args.n_embd = config.n_embd;
  args.large = n_rows > kMaxSmallActs && expert_tiles_possible(args);
  args.tile = expert_tile(n_rows, config.route.n_expert_used, args.n_expert);

  DeviceRouteArgs route;
  if (w.moe) {
    route.config = config.route;
  } else {
    route.config.n_expert = 0;
    route.config.n_expert_used = 0;
  }
  route.router = w.router;
  route.x = act.h.read();
  route.base = w.experts;
  route.cold = cold;
  route.logits = act.router_logits;
  route.bias = w.router_bias;
  route.shared = w.shared_gate.n_rows > 0;
  route.shared_logit = w.shared_weight != nullptr ? act.shared_logit : nullptr;
  route.n_rows = n_rows;
  route.n_valid = rows.n_valid;
  route.tile = args.large ? args.tile : kExpertSmallTile;
  route.out = act.routes;
  route_topk_cuda(route, stream.view());
  args.max_slots = max_route_slots(route.config, route.shared, n_rows, route.tile);
  args.max_slot_rows = std::min(n_rows, kExpertSmallTile);
  if (experts != nullptr && w.moe && n_rows > kMaxMailRows)
    experts->run_large(il, args, n_rows, stream.view());
  else
    expert_ffn_cuda(args, stream.view());
}

DecodeFfnArgs GpuModel::Impl::decode_ffn_args(int il) noexcept {
  const GpuLayerWeights& layer = weights.layers[static_cast<size_t>(il)];
  const GpuFfnWeights& w = layer.ffn;
  DecodeFfnArgs args;
  args.norm = {act.x, layer.ffn_norm, config.norm_eps};
  args.x = act.x;
  args.n_embd = config.n_embd;
  if (w.moe) args.config = config.route;
  args.router = w.router;
  args.bias = w.router_bias;
  args.base = w.experts;
  args.gate = w.gate;
  args.up = w.up;
  args.down = w.down;
  args.shared_gate = w.shared_gate;
  args.shared_up = w.shared_up;
  args.shared_down = w.shared_down;
  args.shared_weight = w.shared_weight;
  args.routes = act.routes;
  args.hidden = act.hidden.i8;
  args.hidden_stride = act.hidden.i8_stride;
  args.exchange = act.exchange;
  return args;
}

bool GpuModel::Impl::can_fuse_decode() noexcept {
  bool good = act.h.i8 != nullptr && act.hidden.i8 != nullptr &&
              (experts == nullptr || device.max_shared_bytes >= kSplitDecodeSharedBytes);
  for (int il = 0; il < config.n_layer; ++il) {
    const GpuLayerWeights& w = weights.layers[static_cast<size_t>(il)];
    for (const DeviceMatrix* m :
         {&w.attention.q, &w.attention.k, &w.attention.v, &w.attention.gate, &w.attention.output,
          &w.delta_net.qkv, &w.delta_net.z, &w.delta_net.alpha, &w.delta_net.beta, &w.delta_net.output})
      good = good && linear_reads_norm(*m);
    good = good && decode_ffn_possible(decode_ffn_args(il));
  }
  return good;
}

void GpuModel::Impl::head(int n_logits, const int32_t* rows, int n_rows) noexcept {
  linear({{weights.output, act.logits, config.n_vocab}}, normed(n_rows).read(), n_logits, rows);
}

void GpuModel::Impl::top_of_head(int n_logits, const StepInputs& from) noexcept {
  top_logits_cuda({.logits = act.logits,
                   .n_vocab = config.n_vocab,
                   .max_rows = n_logits,
                   .n_rows = from.n_logits,
                   .n_wanted = from.n_top,
                   .scratch = act.top_scratch,
                   .out = tops_pinned.as<TopLogits>()},
                  stream.view());
}

// Queues a whole step of n_rows rows, the last of them padding when n_valid is less. `hidden` (host) gets
// every layer's input and the final norm; only for steps that are not recorded.
void GpuModel::Impl::enqueue(int n_rows, bool keep, int n_logits, const StepInputs& from, float* hidden,
                             int n_valid) noexcept {
  const DeviceRows rows = from.device_rows(keep);
  const size_t row_floats = static_cast<size_t>(n_valid) * static_cast<size_t>(config.n_embd);
  const auto capture = [&](int k, const float* x) {
    if (hidden != nullptr)
      cudaMemcpyAsync(hidden + static_cast<size_t>(k) * row_floats, x, row_floats * sizeof(float),
                      cudaMemcpyDeviceToHost, stream.view().handle);
  };
  embed_cuda(weights.token_embd, rows.token, n_rows, act.x, config.n_embd, stream.view());
  ResidualNormArgs norm{.x = act.x,
                        .norm = nullptr,
                        .eps = config.norm_eps,
                        .h = normed(n_rows),
                        .n_rows = n_rows,
                        .n_embd = config.n_embd,
                        .conv = {},
                        .cold_in = {},
                        .cold_out = {}};
  const bool fused = n_rows == 1 && fused_decode;
  for (int il = 0; il < config.n_layer; ++il) {
    const GpuLayerWeights& w = weights.layers[static_cast<size_t>(il)];
    const DeviceCold cold = experts != nullptr && w.ffn.moe && n_rows <= kMaxMailRows
                                ? experts->cold(il, from.ticket, from.fetch_of)
                                : DeviceCold{};
    // What the layer before left, and the norm before this one.
    norm.norm = w.attn_norm;
    if (!fused) residual_norm_cuda(norm, stream.view());
    capture(il, act.x);
    norm.conv = {};
    const DeviceNormIn norm_in{fused ? act.x : nullptr, w.attn_norm, config.norm_eps};
    if (config.layers[static_cast<size_t>(il)].recurrent) {
      delta_net(il, n_rows, keep, rows, norm_in);
      if (!keep)
        norm.conv = {.state = delta_state(il, 0) + layout.delta_floats,
                     .sequence_stride = static_cast<int64_t>(static_cast<size_t>(layout.n_recurrent) *
                                                             layout.recurrent_floats),
                     .input = act.conv_input,
                     .n_groups = rows.n_groups,
                     .group_sequence = rows.group_sequence,
                     .group_begin = rows.group_begin,
                     .group_rows = rows.group_rows,
                     .max_groups = std::min(n_rows, options.n_sequences),
                     .n_channels = config.ssm_channels(),
                     .taps = config.ssm_taps};
    } else {
      attention(il, n_rows, rows, norm_in);
    }
    if (fused) {
      DecodeFfnArgs ffn = decode_ffn_args(il);
      ffn.cold = cold;
      ffn.conv = norm.conv;
      // The next layer's input projections.
      if (il + 1 < config.n_layer) {
        const GpuLayerWeights& next = weights.layers[static_cast<size_t>(il) + 1];
        const bool is_delta = config.layers[static_cast<size_t>(il) + 1].recurrent;
        const DeviceMatrix* const matrices[] = {is_delta ? &next.delta_net.qkv : &next.attention.q,
                                                is_delta ? &next.delta_net.z : &next.attention.k,
                                                is_delta ? &next.delta_net.alpha : &next.attention.v,
                                                is_delta ? &next.delta_net.beta : &next.attention.gate};
        for (size_t i = 0; i < std::size(matrices); ++i)
          ffn.next[i] = {matrices[i]->panels,
                         matrices[i]->panel_bytes * static_cast<size_t>(ceil_div(matrices[i]->n_rows, 16))};
      }
      norm.conv = {};
      decode_ffn_cuda(ffn, stream.view());
      continue;
    }
    norm.parts = act.parts;
    norm.pair_of = nullptr;
    norm.n_parts = linear_parts(
        config.layers[static_cast<size_t>(il)].recurrent ? w.delta_net.output : w.attention.output, n_rows);
    norm.norm = w.ffn_norm;
    norm.shared_gate = w.ffn.shared_weight;
    norm.shared_logit = act.shared_logit;
    norm.cold_in = {};
    norm.cold_out = cold;
    residual_norm_cuda(norm, stream.view());
    norm.conv = {};
    norm.shared_gate = nullptr;
    norm.cold_in = cold;
    norm.cold_out = {};
    feed_forward(il, n_rows, rows, cold);
    norm.pair_of = act.routes.pair_of;
    norm.pair_weight = act.routes.pair_weight;
    norm.n_parts = (w.ffn.moe ? config.route.n_expert_used : 0) + 1;
  }
  norm.norm = weights.output_norm;
  residual_norm_cuda(norm, stream.view());
  capture(config.n_layer, act.h.f32);
  if (n_logits > 0) {
    head(n_logits, from.logit_row, n_rows);
    top_of_head(n_logits, from);
  }
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
        cudaMemcpyAsync(small.ancestors, small_host.ancestors, small.bytes, cudaMemcpyHostToDevice,
                        stream.view().handle);
        enqueue(n, keep, n, small, nullptr, n);
      };
      work();
      if (!stream.synchronize())
        throw CudaError(ExitCode::Device, fmt::format("the GPU failed in its first step: {}",
                                                      cudaGetErrorString(cudaGetLastError())));
      graphs[keep][b] = CapturedGraph(stream.view(), work);
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
    cudaMemcpyAsync(m.large.ancestors, m.large_host.ancestors, m.large.bytes, cudaMemcpyHostToDevice, stream);
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
  cudaMemcpyAsync(m.path, m.path_host, (path.size() + 1) * sizeof(int32_t), cudaMemcpyHostToDevice,
                  m.stream.view().handle);
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
