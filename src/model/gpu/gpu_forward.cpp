// The step on the GPU: runs the blocks of the network in turn, as model/forward.cpp does, each a few launches
// over all rows.
//
//   [project] [DeltaNet or attention] [project] [add, norm] [router] [choose] [gate, up] [down] [add, norm]
//   ... [head]
//
// What a block leaves is added to the residual stream by the launch that makes the norm of the next one.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "kernels/expert_ffn/expert_ffn_cuda.h"
#include "kernels/linear/linear_wide_cuda.h"
#include "kernels/route_topk/route_topk_cuda.h"
#include "kernels/row_ops/state_rows_cuda.h"
#include "model/gpu/gpu_model_impl.h"

namespace thermo {

struct GpuModel::Impl::Pass {
  int n_rows;
  StepKind kind;
  bool fused;  // one row or two: output projections and FFNs add to the residual stream themselves
  int n_logits;
  const StepInputs& from;
  DeviceRows rows;
  ResidualNormArgs norm;               // with what the block before left to add
  const Block* pending_tap = nullptr;  // waits for the residual stream to be complete
};

void GpuModel::Impl::linear(std::initializer_list<DeviceLinearJob> jobs, const DeviceActs& x, int n_acts,
                            const int32_t* row_index, const DeviceNormIn& norm,
                            const DeviceAhead& ahead) noexcept {
  DeviceLinearArgs args;
  for (const DeviceLinearJob& job : jobs)
    if (job.w.n_rows > 0) args.jobs[args.n_jobs++] = job;
  args.x = x;
  args.norm = norm;
  args.ahead = ahead;
  args.row_index = row_index;
  args.n_acts = n_acts;
  args.room = act.room;
  args.room_bytes = act.room_bytes;
  linear_cuda(args, stream.view());
}

// With a norm: straight from the residual stream. Output projections then add to it.
void GpuModel::Impl::project_in(std::initializer_list<DeviceLinearJob> jobs, const DeviceNormIn& norm,
                                int n_rows, const DeviceAhead& ahead) noexcept {
  linear(jobs, normed(n_rows).read(), n_rows, nullptr, norm, ahead);
}

// Rows as a product with `w` reads them: few are rounded first.
DeviceActs GpuModel::Impl::round_few(const DeviceMatrix& w, const DeviceActsOut& rows, int n_rows) noexcept {
  DeviceActs x = rows.read();
  x.blocks256 = x.blocks32 = nullptr;
  if (!rounds(w, n_rows)) return x;
  const DeviceActsOut rounded = rounded_for(w, rows);
  round_rows_cuda(x, n_rows, w.n_cols, rounded, stream.view());
  return rounded.read();
}

// Where attention and DeltaNet leave the rows that an output projection reads.
DeviceActsOut GpuModel::Impl::mixed_for(const DeviceMatrix& output) const noexcept {
  DeviceActsOut out = act.mixed;
  out.f16_stride = static_cast<int64_t>(f16_columns(output.n_cols));
  out.f32_stride = output.n_cols;
  if (is_float_type(output.dtype))
    out.f16 = nullptr;
  else
    out.f32 = nullptr;
  return out;
}

// Output projections have few panels and many columns: their sums are cut into parts, added up by the norm
// that follows.
void GpuModel::Impl::project_out(const DeviceMatrix& w, const DeviceActsOut& out, const DeviceNormIn& norm,
                                 int n_rows) noexcept {
  if (norm.x != nullptr) {
    linear({{.w = w, .y = act.x, .y_stride = config.n_embd, .add = true}}, out.read(), n_rows);
    return;
  }
  const DeviceLinearJob job{.w = w,
                            .y = act.parts,
                            .y_stride = config.n_embd,
                            .k_parts = out_parts(w, n_rows),
                            .part_stride = static_cast<int64_t>(n_rows) * config.n_embd};
  if (n_rows == 1 && linear_rounds_row(w)) return round_and_multiply(job, out.read());
  linear({job}, round_few(w, out, n_rows), n_rows);
}

// One row, by one launch.
void GpuModel::Impl::round_and_multiply(const DeviceLinearJob& job, const DeviceActs& x, const float* gate,
                                        const float* up) noexcept {
  DeviceLinearArgs args;
  args.jobs[0] = job;
  args.x = x;
  args.rounds = true;
  args.gate = gate;
  args.up = up;
  args.n_jobs = args.n_acts = 1;
  linear_cuda(args, stream.view());
}

// All but what the row of a fused step needs, and where the result goes.
DeviceAttentionArgs GpuModel::Impl::attention_args(const DeviceRows& rows, int n_rows, int il,
                                                   const Block& block, const GpuBlockWeights& w) noexcept {
  const Rope& rope = ropes[static_cast<size_t>(block.rope)];
  return {.rows = rows,
          .kv = kv_of(il),
          .n_rows = n_rows,
          .n_head = block.n_head,
          .n_head_kv = config.n_head_kv,
          .head_dim = config.head_dim,
          .scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim)),
          .window = block.window,
          .both_ways = block.both_ways,
          .singles = false,
          .eps = config.norm_eps,
          .q_full = act.q_full,
          .k = act.k,
          .v = act.v,
          .gate = act.gate,
          .head_gate = block.gate,
          .q_norm = w.floats(Role::QNorm),
          .k_norm = w.floats(Role::KNorm),
          .inv_freq = rope.inv_freq,
          .n_rot = rope.n_rot,
          .rope_magnitude = rope.magnitude,
          .q = act.q,
          .partial = act.partial,
          .n_splits = attention_splits(n_rows, block.n_head, config.n_head_kv, device.n_multiprocessors),
          .out = {}};
}

void GpuModel::Impl::attention(Pass& pass, int il, const Block& block, const GpuBlockWeights& w,
                               const DeviceNormIn& norm) noexcept {
  const int n_rows = pass.n_rows;
  const auto job = [&](Role role, float* y) { return DeviceLinearJob{w[role], y, w[role].n_rows}; };
  project_in({job(Role::Q, act.q_full), job(Role::K, act.k), job(Role::V, act.v), job(Role::Gate, act.gate)},
             norm, n_rows);

  const DeviceActsOut out = mixed_for(w[Role::Output]);
  DeviceAttentionArgs args = attention_args(pass.rows, n_rows, il, block, w);
  args.out = out;
  args.singles = pass.kind == StepKind::Singles;
  args.tagged = n_rows <= kMaxTaggedRows ? act.attention_tagged : nullptr;
  args.launch = decode_launch_number(act.exchange);
  attention_cuda(args, stream.view());
  project_out(w[Role::Output], out, norm, n_rows);
}

// What DeltaNet of one row needs besides its input: not in the first layer, which may start before the rows
// of the step are there.
DeviceAhead GpuModel::Impl::delta_ahead(const Pass& pass, int il, const GpuBlockWeights& w) noexcept {
  const int channels = config.ssm_channels();
  return {.from = {delta_state(il, 0), conv_state(il, 0), w.floats(Role::Conv)},
          .n_floats = {config.ssm_n_head_v * config.ssm_dim * config.ssm_dim,
                       (config.ssm_taps - 1) * channels, config.ssm_taps * channels},
          .sequence_stride = recurrent_stride(),
          .sequence = pass.rows.group_sequence};
}

void GpuModel::Impl::delta_net(Pass& pass, int il, const GpuBlockWeights& w,
                               const DeviceNormIn& norm) noexcept {
  const int n_rows = pass.n_rows;
  project_in({{w[Role::Qkv], act.conv_input, config.ssm_channels()},
              {w[Role::Z], act.z, config.ssm_inner()},
              {w[Role::Alpha], act.alpha, config.ssm_n_head_v},
              {w[Role::Beta], act.beta, config.ssm_n_head_v}},
             norm, n_rows,
             norm.x != nullptr && n_rows == 1 && il > 0 ? delta_ahead(pass, il, w) : DeviceAhead{});
  const DeviceActsOut out = mixed_for(w[Role::Output]);
  delta_net_cuda({.rows = pass.rows,
                  .n_rows = n_rows,
                  .max_groups = std::min(n_rows, options.n_sequences),
                  .max_group_rows = pass.kind == StepKind::Uncommitted ? 0
                                    : pass.kind == StepKind::Singles   ? 1
                                                                       : n_rows,
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
                  .conv_weight = w.floats(Role::Conv),
                  .a = w.floats(Role::Decay),
                  .dt_bias = w.floats(Role::TimeStep),
                  .norm = w.floats(Role::InnerNorm),
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
  project_out(w[Role::Output], out, norm, n_rows);
}

namespace {

// Of the routed experts and of the FFN that every row takes.
template <class Args>
void set_matrices(const GpuBlockWeights& w, Args& args) {
  args.gate = w[Role::ExpertGate];
  args.up = w[Role::ExpertUp];
  args.down = w[Role::ExpertDown];
  args.shared_gate = w[Role::FfnGate];
  args.shared_up = w[Role::FfnUp];
  args.shared_down = w[Role::FfnDown];
}

}  // namespace

// Where the norm before the experts leaves its rows: as they read them, and as the router does.
DeviceActsOut GpuModel::Impl::expert_input(const RouteConfig& route, const GpuBlockWeights& w,
                                           int n_rows) const noexcept {
  DeviceActsOut h = act.h;
  h.blocks256 = h.blocks32 = nullptr;
  DeviceExpertArgs args;
  set_matrices(w, args);
  if (expert_form_is_large(args, route, n_rows)) return h;
  for (const DeviceMatrix* m : {&args.gate, &args.up, &args.shared_gate, &args.shared_up}) {
    if (m->n_rows == 0 || is_float_type(m->dtype)) continue;
    if (act_format(m->dtype) == ActFormat::Q8x256)
      h.blocks256 = act.h.blocks256;
    else
      h.blocks32 = act.h.blocks32;
  }
  return h;
}

void GpuModel::Impl::run_experts(Pass& pass, int il, const Block& block, const GpuBlockWeights& w,
                                 const DeviceCold& cold) noexcept {
  const int n_rows = pass.n_rows;
  DeviceExpertArgs args;
  set_matrices(w, args);
  args.n_expert = block.route.n_expert;
  args.routes = act.routes;
  args.x = act.h.read();
  args.hidden = act.hidden;
  args.y = act.parts;
  args.n_embd = config.n_embd;
  args.large = expert_form_is_large(args, block.route, n_rows);
  if (args.large) args.hidden.f32 = nullptr;
  args.tile = expert_slot_rows(args, block.route, n_rows);

  DeviceRouteArgs route;
  route.config = block.route;
  route.router = w[Role::Router];
  route.x = act.h.read();
  route.stream = act.x;
  route.norm = w.floats(Role::Norm);
  route.factor = act.norm_factor;
  route.base = w.experts;
  route.cold = cold;
  route.logits = act.router_logits;
  route.bias = w.floats(Role::RouterBias);
  route.shared = args.shared_gate.n_rows > 0;
  route.shared_logit = w.floats(Role::SharedWeight) != nullptr ? act.shared_logit : nullptr;
  route.n_rows = n_rows;
  route.n_valid = pass.rows.n_valid;
  route.tile = args.tile;
  route.out = act.routes;
  if (block.routed()) route.out.uses = uses_of(il, pass.rows, n_rows);
  route_topk_cuda(route, stream.view());
  args.max_slots = max_route_slots(route.config, route.shared, n_rows, route.tile);
  args.max_slot_rows = std::min(n_rows, args.tile);
  if (experts != nullptr && block.routed() && n_rows > kMaxMailRows)
    experts->run_large(il, args, n_rows, stream.view());
  else
    expert_ffn_cuda(args, stream.view());
}

DecodeFfnArgs GpuModel::Impl::decode_ffn_args(const Block& block, const GpuBlockWeights& w,
                                              int n_rows) noexcept {
  DecodeFfnArgs args;
  args.norm = {act.x, w.floats(Role::Norm), config.norm_eps};
  args.x = act.x;
  args.n_embd = config.n_embd;
  args.n_rows = n_rows;
  args.config = block.route;
  args.router = w[Role::Router];
  args.bias = w.floats(Role::RouterBias);
  args.base = w.experts;
  set_matrices(w, args);
  args.shared_weight = w.floats(Role::SharedWeight);
  args.routes = act.routes;
  args.hidden = act.hidden.f32;
  args.hidden_stride = act.hidden.f32_stride;
  args.exchange = act.exchange;
  return args;
}

void GpuModel::Impl::head(int n_logits, const int32_t* rows, int n_rows) noexcept {
  linear({{weights.output.front()[Role::Output], act.logits, config.n_vocab}}, normed(n_rows).read(),
         n_logits, rows);
}

void GpuModel::Impl::top_of_head(int n_logits, const StepInputs& from, int first) noexcept {
  top_logits_cuda({.logits = act.logits,
                   .n_vocab = config.n_vocab,
                   .max_rows = n_logits,
                   .n_rows = from.n_logits,
                   .n_wanted = from.n_top + first,
                   .scratch = act.top_scratch,
                   .out = tops_pinned.as<TopLogits>() + first},
                  stream.view());
}

// Completes the residual stream and makes h, the norm of this block's input. Norms that a fused step needs
// are made by their readers.
void GpuModel::Impl::begin_block(Pass& pass, const GpuBlockWeights& w) noexcept {
  pass.norm.norm = w.floats(Role::Norm);
  if (!pass.fused) {
    residual_norm_cuda(pass.norm, stream.view());
    pass.norm.conv = {};
    pass.norm.cold_in = {};
  }
  if (pass.pending_tap != nullptr) tap(*pass.pending_tap, act.x, pass.n_rows);
  pass.pending_tap = nullptr;
}

void GpuModel::Impl::tap(const Block& block, const float* from, int n_rows) noexcept {
  const size_t width = static_cast<size_t>(config.n_embd);
  copy_floats_cuda(from,
                   act.taps + static_cast<size_t>(block.tap) * static_cast<size_t>(options.n_batch) * width,
                   static_cast<size_t>(n_rows) * width, stream.view());
}

// Attention or DeltaNet.
void GpuModel::Impl::mix(Pass& pass, int il, const Block& block, const GpuBlockWeights& w) noexcept {
  begin_block(pass, w);
  const DeviceNormIn norm_in{pass.fused ? act.x : nullptr, w.floats(Role::Norm), config.norm_eps};
  if (block.kind == BlockKind::Attention)
    attention(pass, il, block, w, norm_in);
  else
    delta_net(pass, il, w, norm_in);
  if (block.kind == BlockKind::DeltaNet && pass.kind != StepKind::Uncommitted)
    pass.norm.conv = {.state = conv_state(il, 0),
                      .sequence_stride = recurrent_stride(),
                      .input = act.conv_input,
                      .n_groups = pass.rows.n_groups,
                      .group_sequence = pass.rows.group_sequence,
                      .group_begin = pass.rows.group_begin,
                      .group_rows = pass.rows.group_rows,
                      .group_uncommitted = pass.rows.any_uncommitted ? pass.rows.group_uncommitted : nullptr,
                      .max_groups = std::min(pass.n_rows, options.n_sequences),
                      .n_channels = config.ssm_channels(),
                      .taps = config.ssm_taps};
  if (pass.fused) return;
  pass.norm.parts = act.parts;
  pass.norm.pair_of = nullptr;
  pass.norm.on_grid = false;
  pass.norm.n_parts = out_parts(w[Role::Output], pass.n_rows);
}

// The input projections of the next block: asked into L2 while the router keeps the memory idle.
void GpuModel::Impl::prefetch_next(int il, size_t b, DecodeFfnArgs& ffn) noexcept {
  for (++b; il < config.n_layer; ++il, b = 0) {
    const std::vector<Block>& blocks = config.network.layers[static_cast<size_t>(il)].blocks;
    while (b < blocks.size() && blocks[b].kind == BlockKind::Tap) ++b;
    if (b == blocks.size()) continue;
    const GpuBlockWeights& next = weights.layers[static_cast<size_t>(il)].blocks[b];
    size_t n = 0;
    for (const TensorSpec& spec : blocks[b].tensors)
      if (spec.form == TensorForm::Matrix && spec.role != Role::Output && n < std::size(ffn.next)) {
        const DeviceMatrix& m = next[spec.role];
        ffn.next[n++] = {m.panels, m.panel_bytes * static_cast<size_t>(ceil_div(m.n_rows, 16))};
      }
    return;
  }
}

void GpuModel::Impl::feed_forward(Pass& pass, int il, size_t b, const Block& block,
                                  const GpuBlockWeights& w) noexcept {
  const DeviceCold cold = experts != nullptr && block.routed() && pass.n_rows <= kMaxMailRows
                              ? experts->cold(il, pass.from.ticket, pass.from.fetch_of)
                              : DeviceCold{};
  ResidualNormArgs& norm = pass.norm;
  norm.shared_gate = w.floats(Role::SharedWeight);
  norm.shared_logit = act.shared_logit;
  norm.cold_out = cold;
  norm.h = expert_input(block.route, w, pass.n_rows);
  if (dense_is_many(block, w, pass.n_rows)) norm.h.f32 = nullptr;
  norm.factor = is_few(pass.n_rows) ? act.norm_factor : nullptr;
  begin_block(pass, w);
  norm.factor = nullptr;
  norm.h = normed(pass.n_rows);
  norm.shared_gate = nullptr;
  norm.cold_out = {};
  if (pass.fused) {
    DecodeFfnArgs ffn = decode_ffn_args(block, w, pass.n_rows);
    ffn.cold = cold;
    if (block.routed()) ffn.routes.uses = uses_of(il, pass.rows, pass.n_rows);
    ffn.conv = norm.conv;
    prefetch_next(il, b, ffn);
    norm.conv = {};
    decode_ffn_cuda(ffn, stream.view());
    return;
  }
  norm.parts = act.parts;
  norm.on_grid = true;
  if (dense_is_few(block, w, pass.n_rows)) return dense_ffn(pass, w);
  if (dense_is_many(block, w, pass.n_rows)) return dense_many_ffn(pass, w);
  run_experts(pass, il, block, w, cold);
  norm.cold_in = cold;
  norm.pair_of = act.routes.pair_of;
  norm.pair_weight = act.routes.pair_weight;
  norm.n_parts = block.route.n_expert_used + 1;
}

// The FFN that every row takes, of few rows.
bool GpuModel::Impl::dense_is_few(const Block& block, const GpuBlockWeights& w, int n_rows) const noexcept {
  return !block.routed() && w.floats(Role::SharedWeight) == nullptr && rounds(w[Role::FfnGate], n_rows) &&
         rounds(w[Role::FfnUp], n_rows) && rounds(w[Role::FfnDown], n_rows);
}

void GpuModel::Impl::dense_ffn(Pass& pass, const GpuBlockWeights& w) noexcept {
  const int n_rows = pass.n_rows, n_ff = w[Role::FfnGate].n_rows;
  float* const gate = act.hidden.f32;
  float* const up = gate + static_cast<size_t>(n_rows) * static_cast<size_t>(n_ff);
  linear({{w[Role::FfnGate], gate, n_ff}, {w[Role::FfnUp], up, n_ff}}, expert_input({}, w, n_rows).read(),
         n_rows);
  const DeviceLinearJob down{.w = w[Role::FfnDown],
                             .y = act.parts,
                             .y_stride = config.n_embd,
                             .k_parts = linear_few_parts(w[Role::FfnDown]),
                             .part_stride = static_cast<int64_t>(n_rows) * config.n_embd};
  if (n_rows == 1 && linear_rounds_row(down.w)) {
    round_and_multiply(down, {}, gate, up);
  } else {
    const DeviceActsOut hidden = rounded_for(down.w, act.hidden);
    swiglu_rows_cuda(gate, up, n_rows, n_ff, hidden, stream.view());
    linear({down}, hidden.read(), n_rows);
  }
  pass.norm.pair_of = nullptr;
  pass.norm.n_parts = down.k_parts;
}

// The same of more rows, on cards that have it.
bool GpuModel::Impl::dense_is_many(const Block& block, const GpuBlockWeights& w, int n_rows) const noexcept {
  return !block.routed() && w.floats(Role::SharedWeight) == nullptr &&
         wide_swiglu_preferred(w[Role::FfnGate], w[Role::FfnUp], n_rows) &&
         wide_possible(w[Role::FfnDown], n_rows);
}

void GpuModel::Impl::dense_many_ffn(Pass& pass, const GpuBlockWeights& w) noexcept {
  const int n_rows = pass.n_rows;
  const DeviceActs h = expert_input({}, w, n_rows).read();
  wide_tiles_cuda(h, nullptr, n_rows, config.n_embd, act.room, stream.view());
  wide_swiglu_cuda({.gate = w[Role::FfnGate],
                    .up = w[Role::FfnUp],
                    .tiles = act.room,
                    .scale = h.scale,
                    .n_acts = n_rows,
                    .hidden = act.hidden.f16,
                    .hidden_scale = act.hidden.scale},
                   stream.view());
  DeviceLinearArgs down;
  down.jobs[0] = {.w = w[Role::FfnDown],
                  .y = act.parts,
                  .y_stride = config.n_embd,
                  .k_parts = wide_parts(w[Role::FfnDown], n_rows),
                  .part_stride = static_cast<int64_t>(n_rows) * config.n_embd};
  down.n_jobs = 1;
  down.n_acts = n_rows;
  down.x.scale = act.hidden.scale;
  linear_wide_cuda(down, act.hidden.f16, stream.view());
  pass.norm.pair_of = nullptr;
  pass.norm.on_grid = false;
  pass.norm.n_parts = down.jobs[0].k_parts;
}

void GpuModel::Impl::head_block(Pass& pass, const GpuBlockWeights& w) noexcept {
  pass.fused = false;  // this norm is a launch of its own; nothing was left to add
  begin_block(pass, w);
  if (pass.n_logits == 0) return;
  head(pass.n_logits, pass.from.logit_row, pass.n_rows);
  top_of_head(pass.n_logits, pass.from, 0);
}

void GpuModel::Impl::run_block(Pass& pass, int il, size_t b, const Block& block,
                               const GpuBlockWeights& w) noexcept {
  switch (block.kind) {
    case BlockKind::Embedding:
      embed_cuda(w[Role::Embedding], pass.rows.token, pass.n_rows, act.x, config.n_embd, stream.view());
      break;
    case BlockKind::Attention:
    case BlockKind::DeltaNet:
      mix(pass, il, block, w);
      break;
    case BlockKind::FeedForward:
      feed_forward(pass, il, b, block, w);
      break;
    case BlockKind::Tap:
      if (block.tap_of == TapOf::Stream)
        pass.pending_tap = &block;
      else
        tap(block, act.h.f32, pass.n_rows);
      break;
    case BlockKind::Head:
      head_block(pass, w);
      break;
    case BlockKind::NextnInput:
      nextn_input(pass, w);
      break;
    case BlockKind::Features:
      break;  // not among the blocks of a step
  }
}

// x = act.joined projected.
void GpuModel::Impl::project_states(const DeviceMatrix& w, int n_rows) noexcept {
  linear({{w, act.x, config.n_embd}}, round_few(w, act.joined, n_rows), n_rows);
}

// x = projection of [norm(embedding); norm(state)].
void GpuModel::Impl::nextn_input(Pass& pass, const GpuBlockWeights& w) noexcept {
  embed_cuda(w[Role::Embedding], pass.rows.token, pass.n_rows, act.x, config.n_embd, stream.view());
  join_rows_cuda({.pieces = {{act.x, w.floats(Role::EmbeddingNorm)}, {act.states, w.floats(Role::StateNorm)}},
                  .n_pieces = 2,
                  .n_cols = config.n_embd,
                  .n_rows = pass.n_rows,
                  .eps = config.norm_eps,
                  .out = act.joined},
                 stream.view());
  project_states(w[Role::StateProjection], pass.n_rows);
}

// Queues a whole step of n_rows rows; what the host put into `from` may make the last of them padding.
void GpuModel::Impl::enqueue(int n_rows, StepKind kind, int n_logits, const StepInputs& from) noexcept {
  Pass pass{.n_rows = n_rows,
            .kind = kind,
            .fused = n_rows <= most_fused_rows,
            .n_logits = n_logits,
            .from = from,
            .rows = from.device_rows(kind),
            .norm = {.x = act.x,
                     .norm = nullptr,
                     .eps = config.norm_eps,
                     .h = normed(n_rows),
                     .factor_last = is_few(n_rows),
                     .n_rows = n_rows,
                     .n_embd = config.n_embd,
                     .count = n_rows <= kMaxTaggedRows ? decode_launch_number(act.exchange) : nullptr,
                     .conv = {},
                     .cold_in = {},
                     .cold_out = {}}};
  const Network& net = config.network;
  if (drafts_blocks && n_rows <= kMaxDraftRows && kind == StepKind::Uncommitted) {
    pass.fused = false;
    draft_layers(pass.rows, n_rows);
  } else {
    for (size_t b = 0; b < net.input.size(); ++b) run_block(pass, -1, b, net.input[b], weights.input[b]);
    for (int il = 0; il < config.n_layer; ++il) {
      const std::vector<Block>& blocks = net.layers[static_cast<size_t>(il)].blocks;
      const GpuLayerWeights& layer = weights.layers[static_cast<size_t>(il)];
      for (size_t b = 0; b < blocks.size(); ++b) run_block(pass, il, b, blocks[b], layer.blocks[b]);
    }
  }
  for (size_t b = 0; b < net.output.size(); ++b)
    run_block(pass, config.n_layer, b, net.output[b], weights.output[b]);
}

}  // namespace thermo
