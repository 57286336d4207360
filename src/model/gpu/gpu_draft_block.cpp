// What a DFlash drafter has that other networks have not: keys and values from features, and layers for up to
// 16 rows, five launches each, and three for features. These leave what the blocks of gpu_forward.cpp leave:
// keys and values in the cache, and the residual stream, complete.
#include "device/copy_in.h"
#include "kernels/row_ops/state_rows_cuda.h"
#include "model/gpu/gpu_model_impl.h"

namespace thermo {

// Whether the card, the network and its weights are what these kernels are made for.
bool GpuModel::Impl::can_draft_blocks() noexcept {
  const Network& net = config.network;
  if (net.features.empty() || !draft_block_possible() || net.input.size() != 1 ||
      net.input.front().kind != BlockKind::Embedding ||
      !draft_out_possible(weights.features.front()[Role::StateProjection]))
    return false;
  bool good = true;
  for_each_main_block(config, weights, [&](const Block& block, const GpuBlockWeights& w) {
    if (block.kind == BlockKind::Attention) {
      good = good && block.gate == HeadGate::None && draft_out_possible(w[Role::Output]) &&
             draft_attention_possible(block.n_head, config.n_head_kv, config.head_dim,
                                      options.sequence.k_type, options.sequence.v_type);
      for (const Role role : {Role::Q, Role::K, Role::V})
        good = good && draft_heads_possible(w[role], config.head_dim);
    } else {
      good = good && block.kind == BlockKind::FeedForward && !block.routed() &&
             w.floats(Role::SharedWeight) == nullptr && draft_gate_possible(w[Role::FfnGate]) &&
             draft_gate_possible(w[Role::FfnUp]) && draft_out_possible(w[Role::FfnDown]);
    }
  });
  for (const Layer& layer : net.layers)
    good = good && layer.blocks.size() == 2 && layer.blocks.front().kind == BlockKind::Attention;
  return good;
}

DraftStream GpuModel::Impl::draft_stream(const float* norm) const noexcept {
  return {.x = act.x,
          .n_embd = config.n_embd,
          .norm = norm,
          .f16 = act.h.f16,
          .stride = act.h.f16_stride,
          .scale = kHiddenScale,
          .squares = act.parts};
}

// What draft_stream() left for a norm.
DraftRows GpuModel::Impl::draft_normed(int n_squares) const noexcept {
  return {.f16 = act.h.f16,
          .stride = act.h.f16_stride,
          .scale = kHiddenScale,
          .squares = act.parts,
          .n_squares = n_squares,
          .eps = config.norm_eps};
}

// All but the jobs.
DraftHeadsArgs GpuModel::Impl::draft_heads(const DeviceRows& rows, int n_rows, int rope) const noexcept {
  const Rope& turn = ropes[static_cast<size_t>(rope)];
  DraftHeadsArgs args;
  args.in = draft_normed(draft_squares(config.n_embd));
  args.n_rows = n_rows;
  args.rows = rows;
  args.kv = kv_of(0);
  args.n_head_kv = config.n_head_kv;
  args.head_dim = config.head_dim;
  args.eps = config.norm_eps;
  args.inv_freq = turn.inv_freq;
  args.n_rot = turn.n_rot;
  args.rope_magnitude = turn.magnitude;
  return args;
}

void GpuModel::Impl::draft_layers(const DeviceRows& rows, int n_rows) noexcept {
  const auto norm_of = [&](int il, size_t b) {
    const auto layer = static_cast<size_t>(il);
    return il < config.n_layer ? weights.layers[layer].blocks[b].floats(Role::Norm)
                               : weights.output.front().floats(Role::Norm);
  };
  draft_embed_cuda(weights.input.front()[Role::Embedding], rows.token, n_rows, draft_stream(norm_of(0, 0)),
                   stream.view());
  for (int il = 0; il < config.n_layer; ++il) {
    const Layer& layer = config.network.layers[static_cast<size_t>(il)];
    const Block& block = layer.blocks.front();
    const GpuBlockWeights &attention = weights.layers[static_cast<size_t>(il)].blocks[0],
                          &ffn = weights.layers[static_cast<size_t>(il)].blocks[1];
    DraftAttentionArgs attend{attention_args(rows, n_rows, il, block, attention), act.q, act.draft_counters};
    const DeviceActsOut mixed = mixed_for(attention[Role::Output]);
    attend.args.out = mixed;

    DraftHeadsArgs heads = draft_heads(rows, n_rows, block.rope);
    if (il == 0) heads.in.n_squares = 1;  // as the embedding leaves them
    heads.kv = attend.args.kv;
    heads.n_head = block.n_head;
    heads.q = act.q;
    heads.q_scale = draft_query_scale(attend.args.scale);
    heads.jobs[0] = {attention[Role::Q], attention.floats(Role::QNorm), DraftHead::Query, 0};
    heads.jobs[1] = {attention[Role::K], attention.floats(Role::KNorm), DraftHead::Key, 0};
    heads.jobs[2] = {attention[Role::V], nullptr, DraftHead::Value, 0};
    heads.n_jobs = 3;
    draft_heads_cuda(heads, stream.view());
    draft_attention_cuda(attend, stream.view());
    draft_out_cuda({.w = attention[Role::Output],
                    .in = {.f16 = mixed.f16, .stride = mixed.f16_stride, .scale = mixed.scale},
                    .n_rows = n_rows,
                    .stream = draft_stream(norm_of(il, 1))},
                   stream.view());
    draft_gate_cuda({.gate = ffn[Role::FfnGate],
                     .up = ffn[Role::FfnUp],
                     .in = draft_normed(draft_squares(config.n_embd)),
                     .n_rows = n_rows,
                     .f16 = act.hidden.f16,
                     .stride = act.hidden.f16_stride,
                     .scale = act.hidden.scale},
                    stream.view());
    draft_out_cuda({.w = ffn[Role::FfnDown],
                    .in = {.f16 = act.hidden.f16, .stride = act.hidden.f16_stride, .scale = act.hidden.scale},
                    .n_rows = n_rows,
                    .stream = draft_stream(norm_of(il + 1, 0))},
                   stream.view());
  }
}

// As enqueue_features(), of up to 16 rows.
void GpuModel::Impl::draft_features(int n_rows) noexcept {
  const GpuBlockWeights& w = weights.features.front();
  DeviceActsOut joined = act.joined;
  joined.f32 = nullptr;
  join_rows_cuda({.pieces = {{act.states, nullptr}, {}},
                  .n_pieces = 1,
                  .n_cols = w[Role::StateProjection].n_cols,
                  .n_rows = n_rows,
                  .eps = config.norm_eps,
                  .out = joined},
                 stream.view());
  draft_out_cuda({.w = w[Role::StateProjection],
                  .in = {.f16 = joined.f16, .stride = joined.f16_stride, .scale = joined.scale},
                  .n_rows = n_rows,
                  .add = false,
                  .stream = draft_stream(w.floats(Role::Norm))},
                 stream.view());
  DraftHeadsArgs heads = draft_heads(feature.device_rows(StepKind::Committed), n_rows, 0);
  int layer = 0;
  const auto flush = [&] {
    if (heads.n_jobs > 0) draft_heads_cuda(heads, stream.view());
    heads.n_jobs = 0;
  };
  for_each_main_block(config, weights, [&](const Block& block, const GpuBlockWeights& of) {
    if (block.kind != BlockKind::Attention) return;
    const int64_t offset = static_cast<int64_t>(layer++) * static_cast<int64_t>(layout.kv_layer_bytes());
    heads.jobs[heads.n_jobs++] = {of[Role::K], of.floats(Role::KNorm), DraftHead::Key, offset};
    heads.jobs[heads.n_jobs++] = {of[Role::V], nullptr, DraftHead::Value, offset};
    if (heads.n_jobs + 2 > kMaxDraftHeadJobs) flush();
  });
  flush();
}

// Queues what makes keys and values of every layer from act.states. What the host put into `feature` may make
// the last rows padding.
void GpuModel::Impl::enqueue_features(int n_rows) noexcept {
  const GpuBlockWeights& w = weights.features.front();
  const DeviceMatrix& projection = w[Role::StateProjection];
  copy_in_cuda(feature.ancestors, feature_host.ancestors, feature.bytes, stream.view());
  if (drafts_blocks && n_rows <= kMaxDraftRows) return draft_features(n_rows);
  join_rows_cuda({.pieces = {{act.states, nullptr}, {}},
                  .n_pieces = 1,
                  .n_cols = projection.n_cols,
                  .n_rows = n_rows,
                  .eps = config.norm_eps,
                  .out = act.joined},
                 stream.view());
  project_states(projection, n_rows);
  residual_norm_cuda({.x = act.x,
                      .norm = w.floats(Role::Norm),
                      .eps = config.norm_eps,
                      .h = normed(n_rows),
                      .factor_last = is_few(n_rows),
                      .n_rows = n_rows,
                      .n_embd = config.n_embd,
                      .conv = {},
                      .cold_in = {},
                      .cold_out = {}},
                     stream.view());
  // All layers' keys and values first, as many products in a launch as it takes.
  const int64_t size = static_cast<int64_t>(options.n_batch) * config.n_kv_dim();
  const Rope& rope = ropes.front();
  DeviceKvAppendArgs append{.rows = feature.device_rows(StepKind::Committed),
                            .kv = kv_of(0),
                            .layer_bytes = static_cast<int64_t>(layout.kv_layer_bytes()),
                            .n_layers = 0,
                            .n_rows = n_rows,
                            .n_head_kv = config.n_head_kv,
                            .head_dim = config.head_dim,
                            .eps = config.norm_eps,
                            .k = act.feature_kv,
                            .v = act.feature_kv + size,
                            .layer_stride = 2 * size,
                            .k_norm = {},
                            .inv_freq = rope.inv_freq,
                            .n_rot = rope.n_rot,
                            .rope_magnitude = rope.magnitude};
  DeviceLinearArgs products;
  products.x = normed(n_rows).read();
  products.n_acts = n_rows;
  float* to = act.feature_kv;
  for_each_main_block(config, weights, [&](const Block& block, const GpuBlockWeights& layer) {
    if (block.kind != BlockKind::Attention) return;
    append.k_norm[append.n_layers++] = layer.floats(Role::KNorm);
    for (const Role role : {Role::K, Role::V}) {
      products.jobs[products.n_jobs++] = {layer[role], to, config.n_kv_dim()};
      to += size;
    }
    if (products.n_jobs < kMaxLinearJobs) return;
    linear_cuda(products, stream.view());
    products.n_jobs = 0;
  });
  if (products.n_jobs > 0) linear_cuda(products, stream.view());
  kv_append_cuda(append, stream.view());
}

}  // namespace thermo
