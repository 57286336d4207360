#include "model/gpu/gpu_workspace.h"

#include <algorithm>

#include "model/gpu/drafted_experts.h"

namespace thermo {

StepInputs::StepInputs(std::byte* base, int max_rows) {
  GpuCarver carver(base);
  const size_t rows = static_cast<size_t>(max_rows);
  ancestors = carver.take<uint64_t>(rows);
  n_valid = carver.take<int32_t>(1);
  n_groups = carver.take<int32_t>(1);
  ticket = carver.take<uint32_t>(1);
  fetch_of = carver.take<int32_t>(kMaxFetchTable + 1);
  n_logits = carver.take<int32_t>(1);
  for (int32_t** array : {&token, &group, &position, &parent, &logit_row, &n_top, &group_sequence,
                          &group_begin, &group_rows, &group_past, &group_uncommitted})
    *array = carver.take<int32_t>(rows);
  bytes = carver.used();
}

size_t input_bytes(const ModelConfig& c, const ModelOptions& o) {
  const size_t large = StepInputs(nullptr, o.n_batch).bytes;
  return StepInputs(nullptr, kMaxBucket).bytes + large + (c.network.features.empty() ? 0 : large) +
         static_cast<size_t>(o.n_sequences) * sizeof(DevicePath);
}

int states_width(const ModelConfig& c) {
  int most = 0;
  for (const auto* blocks : {&c.network.input, &c.network.features})
    for (const Block& block : *blocks)
      if (const TensorSpec* spec = block.find(Role::StateProjection)) most = std::max(most, spec->shape[0]);
  return most;
}

size_t rope_bytes(const ModelConfig& c) {
  size_t floats = 0;
  for (const RopeConfig& rope : c.ropes) floats += make_rope_table(rope).inv_freq.size();
  return floats * sizeof(float);
}

namespace {

// Or the parts of an output projection: few rows have many.
int max_pairs_of(const ModelConfig& c, int n_rows) {
  return std::max(
      {max_route_pairs(c.route, true, n_rows), 2 * n_rows, kMaxLinearParts * std::min(n_rows, kMaxCutActs)});
}

}  // namespace

void GpuWorkspace::carve(GpuCarver& carver, const ModelConfig& c, const ModelOptions& options, bool small_ffn,
                         bool float_mixed, int n_multiprocessors) {
  const int n_batch = options.n_batch;
  const size_t rows = static_cast<size_t>(n_batch);
  const auto floats = [&](int columns) { return carver.take<float>(rows * static_cast<size_t>(columns)); };
  const auto acts = [&](size_t n, int columns, bool f16, bool f32, float scale) {
    DeviceActsOut out;
    out.f16_stride = static_cast<int64_t>(f16_columns(columns));
    out.f32_stride = columns;
    out.scale = scale;
    if (f16) out.f16 = carver.take<uint16_t>(n * f16_columns(columns));
    if (f32) out.f32 = carver.take<float>(n * static_cast<size_t>(columns));
    return out;
  };
  // Rows rounded in groups of 256 or of 32 columns, whichever the product after it reads.
  const auto blocks = [&](DeviceActsOut& out, int n, int columns) {
    out.blocks_stride = ceil_div(columns, 256);
    out.blocks256 = out.blocks32 = carver.take<std::byte>(
        static_cast<size_t>(n) * static_cast<size_t>(out.blocks_stride) * kDotChunkBytes);
  };
  const int few_rows = std::min(n_batch, kMaxFewActs);
  const int q_dim = c.max_n_head() * c.head_dim;
  const int n_expert = c.route.n_expert, n_used = c.route.n_expert_used;
  const size_t pairs = static_cast<size_t>(max_pairs_of(c, n_batch));

  x = floats(c.n_embd);
  parts = carver.take<float>(pairs * static_cast<size_t>(c.n_embd));
  h = acts(rows, c.n_embd, true, true, 1.0f);
  mixed = acts(rows, std::max(q_dim, c.ssm_inner()), true, float_mixed, 1.0f);
  blocks(mixed, few_rows, std::max(q_dim, c.ssm_inner()));
  norm_factor = carver.take<float>(static_cast<size_t>(few_rows));
  room_bytes = linear_room(n_batch, std::max({c.n_embd, q_dim, c.ssm_inner()}));
  room = carver.take<std::byte>(room_bytes);
  // What experts read in the small form: rows rounded in groups of 256 and of 32, and hidden rows.
  const int expert_rows = small_ffn ? n_batch : std::min(n_batch, max_expert_small_rows(c.route));
  h.blocks_stride = ceil_div(c.n_embd, 256);
  const size_t block_bytes = static_cast<size_t>(expert_rows) * static_cast<size_t>(h.blocks_stride) *
                             static_cast<size_t>(kDotChunkBytes);
  h.blocks256 = carver.take<std::byte>(block_bytes);
  h.blocks32 = carver.take<std::byte>(block_bytes);
  hidden = acts(pairs, c.max_n_ff(), true, false, kHiddenScale);
  hidden.f32 = carver.take<float>(static_cast<size_t>(max_pairs_of(c, expert_rows)) *
                                  static_cast<size_t>(c.max_n_ff()));
  blocks(hidden, few_rows, c.max_n_ff());
  q_full = floats(c.network.widest(Role::Q));
  q = floats(q_dim);
  k = floats(c.n_kv_dim());
  v = floats(c.n_kv_dim());
  gate = floats(c.network.widest(Role::Gate));
  size_t partial_floats = 0;
  for (int n = 1; n <= n_batch; ++n) {
    int last_n_head = 0;  // layers of one kind need the same
    for (const Layer& layer : c.network.layers)
      if (const Block* block = layer.find(BlockKind::Attention); block && block->n_head != last_n_head) {
        last_n_head = block->n_head;
        partial_floats = std::max(
            partial_floats,
            static_cast<size_t>(n) * static_cast<size_t>(block->n_head) *
                static_cast<size_t>(attention_splits(n, block->n_head, c.n_head_kv, n_multiprocessors)) *
                static_cast<size_t>(c.head_dim + 2));
      }
  }
  partial = carver.take<float>(partial_floats);
  size_t tagged_bytes = 0;
  for (const Layer& layer : c.network.layers)
    if (const Block* block = layer.find(BlockKind::Attention))
      tagged_bytes = std::max(
          tagged_bytes, attention_tagged_bytes(
                            std::min(n_batch, kMaxTaggedRows), block->n_head,
                            attention_splits(1, block->n_head, c.n_head_kv, n_multiprocessors), c.head_dim));
  attention_tagged = carver.take<std::byte>(tagged_bytes);
  conv_input = floats(c.ssm_channels());
  conv_output = floats(c.ssm_channels());
  z = floats(c.ssm_inner());
  rule_out = floats(c.ssm_inner());
  chunk_scores = floats(kDeltaChunkRows * c.ssm_n_head_v);
  alpha = floats(c.ssm_n_head_v);
  beta = floats(c.ssm_n_head_v);
  gates = floats(2 * c.ssm_n_head_v);
  router_logits = carver.take<float>(router_logit_rows(n_batch) * static_cast<size_t>(n_expert));
  shared_logit = floats(1);
  const size_t slots =
      static_cast<size_t>(std::max(max_route_slots(c.route, true, n_batch, kExpertSmallTile), 1));
  routes.n_slots = carver.take<int32_t>(1);
  routes.slots = carver.take<DeviceSlot>(slots);
  routes.pair_row = carver.take<int32_t>(pairs);
  routes.pair_of = carver.take<int32_t>(rows * static_cast<size_t>(n_used + 1));
  routes.pair_weight = carver.take<float>(rows * static_cast<size_t>(n_used + 1));
  routes.expert_count = carver.take<int32_t>(static_cast<size_t>(n_expert));
  routes.expert_first = carver.take<int32_t>(static_cast<size_t>(n_expert) + 1);
  routes.expert_slot = carver.take<int32_t>(static_cast<size_t>(n_expert) + 1);
  routes.partial = carver.take<float>(static_cast<size_t>(kRouterParts * kMaxListRows * n_expert));
  routes.counter = carver.take<uint32_t>(1);
  routes.chosen = carver.take<int32_t>(rows * static_cast<size_t>(n_used));
  routes.rank = carver.take<int32_t>(rows * static_cast<size_t>(n_used));
  expert_uses = carver.take<uint32_t>(static_cast<size_t>(c.n_layer) * static_cast<size_t>(n_expert));
  drafted_experts = carver.take<int16_t>(DraftedExperts(c, options).count());
  exchange = carver.take<std::byte>(decode_exchange_bytes(n_used, c.max_n_ff()));
  states = floats(states_width(c));
  joined = acts(rows, states_width(c), true, true, kHiddenScale);
  blocks(joined, few_rows, states_width(c));
  feature_kv = floats(c.network.features.empty() ? 0 : 2 * c.n_layer * c.n_kv_dim());
  draft_counters = carver.take<uint64_t>(c.network.features.empty() ? 0 : static_cast<size_t>(c.n_head_kv));
  taps = floats(c.network.n_taps * c.n_embd);
  logits = carver.take<float>(static_cast<size_t>(kLogitRows) * static_cast<size_t>(c.n_vocab));
  top_scratch = carver.take<float>(static_cast<size_t>(kLogitRows) * top_logits_scratch_floats());
}

bool any_small_ffn(const ModelConfig& c, const Weights& w) {
  const auto small = [](const Matrix& gate, const Matrix& up, const Matrix& down) {
    return !gate.empty() &&
           (is_float_type(gate.dtype) || is_float_type(down.dtype) || gate.dtype != up.dtype);
  };
  bool any = false;
  for_each_main_block(c, w, [&](const Block& block, const BlockWeights& weights) {
    if (block.kind != BlockKind::FeedForward) return;
    if (!weights.experts.empty()) {
      const Ffn& expert = weights.experts.front();
      any = any || small(expert.gate, expert.up, expert.down);
    }
    any = any || small(weights[Role::FfnGate], weights[Role::FfnUp], weights[Role::FfnDown]);
  });
  return any;
}
bool any_float_output(const ModelConfig& c, const Weights& w) {
  bool any = false;
  for_each_main_block(c, w, [&](const Block& block, const BlockWeights& weights) {
    if (block.find(Role::Output) != nullptr) any = any || is_float_type(weights[Role::Output].dtype);
  });
  return any;
}

}  // namespace thermo
