// The step on the GPU: the same blocks as model/forward.cpp, each a few launches over all rows.
//
//   [project] [DeltaNet or attention] [project] [add, norm] [router] [choose] [gate, up] [down] [add, norm]
//   ... [head]
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "kernels/expert_ffn/expert_ffn_cuda.h"
#include "kernels/route_topk/route_topk_cuda.h"
#include "model/gpu/gpu_model_impl.h"

namespace thermo {

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

void GpuModel::Impl::delta_net(int il, int n_rows, StepKind kind, const DeviceRows& rows,
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
                  .max_group_rows = kind == StepKind::Uncommitted ? 0 : n_rows,
                  .max_uncommitted_rows = std::min(n_rows, options.sequence.max_draft_rows),
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
                  .conv_state = conv_state(il, 0),
                  .sequence_stride = recurrent_stride(),
                  .tape = tape_of(il, 0),
                  .mixed = act.conv_output,
                  .gates = act.gates,
                  .rule_out = act.rule_out,
                  .scores = act.chunk_scores,
                  .out = out},
                 stream.view());
  project_out(w.output, out.read(), norm, n_rows);
}

namespace {

// Of the routed experts and the shared one.
template <class Args>
void set_matrices(const GpuFfnWeights& w, Args& args) {
  args.gate = w.gate;
  args.up = w.up;
  args.down = w.down;
  args.shared_gate = w.shared_gate;
  args.shared_up = w.shared_up;
  args.shared_down = w.shared_down;
}

}  // namespace

void GpuModel::Impl::feed_forward(int il, int n_rows, const DeviceRows& rows,
                                  const DeviceCold& cold) noexcept {
  const GpuFfnWeights& w = weights.layers[static_cast<size_t>(il)].ffn;
  DeviceExpertArgs args;
  set_matrices(w, args);
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
  set_matrices(w, args);
  args.shared_weight = w.shared_weight;
  args.routes = act.routes;
  args.hidden = act.hidden.i8;
  args.hidden_stride = act.hidden.i8_stride;
  args.exchange = act.exchange;
  return args;
}

bool GpuModel::Impl::can_fuse_decode() noexcept {
  bool good = act.h.i8 != nullptr && act.hidden.i8 != nullptr;
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
void GpuModel::Impl::enqueue(int n_rows, StepKind kind, int n_logits, const StepInputs& from, float* hidden,
                             int n_valid) noexcept {
  const DeviceRows rows = from.device_rows(kind);
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
      delta_net(il, n_rows, kind, rows, norm_in);
      if (kind != StepKind::Uncommitted)
        norm.conv = {.state = conv_state(il, 0),
                     .sequence_stride = recurrent_stride(),
                     .input = act.conv_input,
                     .n_groups = rows.n_groups,
                     .group_sequence = rows.group_sequence,
                     .group_begin = rows.group_begin,
                     .group_rows = rows.group_rows,
                     .group_uncommitted = rows.any_uncommitted ? rows.group_uncommitted : nullptr,
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

}  // namespace thermo
