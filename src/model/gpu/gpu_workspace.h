// Where a GPU step keeps its things: the rows it reads, the activations between its kernels, the memory of a
// sequence. Layouts only; GpuModel owns the memory.
#pragma once

#include <algorithm>
#include <vector>

#include "base/units.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/delta_net/delta_net_cuda.h"
#include "kernels/expert_ffn/decode_ffn_cuda.h"
#include "kernels/expert_ffn/expert_ffn_cuda.h"
#include "kernels/linear/linear_cuda.h"
#include "kernels/route_topk/route_topk_cuda.h"
#include "kernels/row_ops/row_ops_cuda.h"
#include "kernels/sample/sample_cuda.h"
#include "model/model_config.h"
#include "model/sequence_state.h"
#include "model/weights.h"

namespace thermo {

inline constexpr int kBuckets[] = {1, 2, 4, 8, 16, 32};
inline constexpr int kMaxBucket = 32;
inline constexpr int kLogitRows = 64;  // computed and copied at a time; as many as a draft has

// What groups a step has, which decides what it launches.
enum class StepKind : uint8_t { Committed, Uncommitted, Mixed };

// Hands out aligned pieces of one buffer; with a null base it only counts.
class GpuCarver {
 public:
  explicit GpuCarver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(size_t n) {
    T* const at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += align_up<size_t>(n * sizeof(T), 256);
    return at;
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

// The rows of a step as DeviceRows wants them, in host or device memory: the same layout in both.
struct StepInputs {
  int32_t *n_valid, *n_groups, *n_logits, *token, *group, *position, *parent;
  int32_t *logit_row, *n_top;  // of each row of logits
  int32_t *group_sequence, *group_begin, *group_rows, *group_past, *group_uncommitted;
  uint64_t* ancestors;
  uint32_t* ticket;   // split experts: of the step
  int32_t* fetch_of;  // [kMaxFetchTable + 1]

  StepInputs() = default;
  StepInputs(std::byte* base, int max_rows) {
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
  size_t bytes = 0;

  DeviceRows device_rows(StepKind kind) const {
    return {n_valid,
            n_groups,
            token,
            group,
            position,
            parent,
            ancestors,
            group_sequence,
            group_begin,
            group_rows,
            group_past,
            group_uncommitted,
            kind != StepKind::Committed};
  }
};

// Of recorded steps, of larger ones, and of a commit's path.
inline size_t input_bytes(int n_batch) {
  return StepInputs(nullptr, kMaxBucket).bytes + StepInputs(nullptr, n_batch).bytes +
         (kMaxDeltaRows + 1) * sizeof(int32_t);
}

inline size_t rope_bytes(const ModelConfig& c) {
  return (make_rope_table(c.rope_full).inv_freq.size() + make_rope_table(c.rope_window).inv_freq.size() + 2) *
         sizeof(float);
}

inline size_t f16_columns(int columns) {
  return align_up<size_t>(static_cast<size_t>(columns), 32);
}

// Or the parts of an output projection: few rows have many.
inline int max_pairs_of(const ModelConfig& c, int n_rows) {
  return std::max(
      {max_route_pairs(c.route, true, n_rows), 2 * n_rows, kMaxLinearParts * std::min(n_rows, kMaxCutActs)});
}

// Activations, sized for n_batch rows.
struct GpuWorkspace {
  float *x, *parts;
  DeviceActsOut h, mixed, hidden;
  float *q_full, *q, *k, *v, *gate, *partial;
  float *conv_input, *conv_output, *z, *alpha, *beta, *gates, *rule_out, *chunk_scores;
  float *router_logits, *shared_logit;
  DeviceRoutes routes;
  std::byte *exchange, *attention_tagged;  // of a decoded row
  float* logits;                           // [kLogitRows][n_vocab]
  float* top_scratch;                      // of each of these rows

  void carve(GpuCarver& carver, const ModelConfig& c, int n_batch, bool float_ffn, bool float_mixed,
             int n_multiprocessors) {
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
    // The int8 form, of small steps only.
    const int small_rows = std::min(n_batch, kMaxSmallActs);
    const auto int8 = [&](DeviceActsOut& out, int n, int columns) {
      if (columns % 32 != 0) return;
      out.i8_stride = ceil_div(columns, 256);
      out.i8 = carver.take<std::byte>(static_cast<size_t>(n) * static_cast<size_t>(out.i8_stride) *
                                      kDotChunkBytes);
    };
    const int q_dim = c.max_n_head() * c.head_dim;
    const int n_expert = c.route.n_expert, n_used = c.route.n_expert_used;
    const size_t pairs = static_cast<size_t>(max_pairs_of(c, n_batch));

    x = floats(c.n_embd);
    parts = carver.take<float>(pairs * static_cast<size_t>(c.n_embd));
    h = acts(rows, c.n_embd, true, true, 1.0f);
    mixed = acts(rows, std::max(q_dim, c.ssm_inner()), true, float_mixed, 1.0f);
    hidden = acts(pairs, c.max_n_ff(), true, float_ffn, kHiddenScale);
    int8(h, small_rows, c.n_embd);
    int8(hidden, max_pairs_of(c, small_rows), c.max_n_ff());
    q_full = floats(2 * q_dim);
    q = floats(q_dim);
    k = floats(c.n_kv_dim());
    v = floats(c.n_kv_dim());
    gate = floats(c.attn_gate == AttnGate::SigmoidElement ? 0 : q_dim);
    size_t partial_floats = 0;
    for (int n = 1; n <= n_batch; ++n) {
      int last_n_head = 0;  // layers of one kind need the same
      for (const LayerConfig& layer : c.layers)
        if (!layer.recurrent && layer.n_head != last_n_head) {
          last_n_head = layer.n_head;
          partial_floats = std::max(
              partial_floats,
              static_cast<size_t>(n) * static_cast<size_t>(layer.n_head) *
                  static_cast<size_t>(attention_splits(n, layer.n_head, c.n_head_kv, n_multiprocessors)) *
                  static_cast<size_t>(c.head_dim + 2));
        }
    }
    partial = carver.take<float>(partial_floats);
    size_t tagged_bytes = 0;
    for (const LayerConfig& layer : c.layers)
      if (!layer.recurrent)
        tagged_bytes = std::max(
            tagged_bytes,
            attention_tagged_bytes(
                layer.n_head, attention_splits(1, layer.n_head, c.n_head_kv, n_multiprocessors), c.head_dim));
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
    routes.partial = carver.take<float>(static_cast<size_t>(kRouterParts * kMaxFusedRouteRows * n_expert));
    routes.counter = carver.take<uint32_t>(1);
    routes.chosen = carver.take<int32_t>(rows * static_cast<size_t>(n_used));
    routes.rank = carver.take<int32_t>(rows * static_cast<size_t>(n_used));
    exchange = carver.take<std::byte>(decode_exchange_bytes(n_used, c.max_n_ff()));
    logits = carver.take<float>(static_cast<size_t>(kLogitRows) * static_cast<size_t>(c.n_vocab));
    top_scratch = carver.take<float>(static_cast<size_t>(kLogitRows) * top_logits_scratch_floats());
  }
};

// Where a sequence's memory lies.
struct GpuSequenceLayout {
  size_t k_row, v_row;       // bytes of a slot
  size_t k_bytes, kv_layer;  // of a layer: keys, keys and values
  int n_attention = 0, n_recurrent = 0;
  size_t delta_floats, recurrent_floats;                      // of a layer
  size_t tape_conv, tape_k, tape_g, tape_delta, tape_floats;  // of a layer, all rows
  std::vector<int> index;                                     // of each layer among its kind

  GpuSequenceLayout(const ModelConfig& c, const SequenceConfig& o) {
    for (int il = 0; il < c.n_layer; ++il)
      index.push_back(c.layers[static_cast<size_t>(il)].recurrent ? n_recurrent++ : n_attention++);
    const size_t slots = static_cast<size_t>(o.n_ctx + o.max_draft_rows);
    k_row = static_cast<size_t>(c.n_head_kv) * kv_head_bytes(o.k_type, c.head_dim);
    v_row = static_cast<size_t>(c.n_head_kv) * kv_head_bytes(o.v_type, c.head_dim);
    k_bytes = align_up<size_t>(slots * k_row, 256);
    kv_layer = k_bytes + align_up<size_t>(slots * v_row, 256);
    const size_t dim = static_cast<size_t>(c.ssm_dim), n_v = static_cast<size_t>(c.ssm_n_head_v),
                 n_k = static_cast<size_t>(c.ssm_n_head_k);
    const size_t channels = static_cast<size_t>(c.ssm_channels());
    delta_floats = n_v * dim * dim;
    recurrent_floats =
        align_up<size_t>(delta_floats + static_cast<size_t>(std::max(c.ssm_taps - 1, 0)) * channels, 16);
    const size_t rows = static_cast<size_t>(o.max_draft_rows);
    tape_conv = rows * channels;
    tape_k = align_up<size_t>(rows * n_k * dim, 4);
    tape_g = align_up<size_t>(rows * n_v, 4);
    tape_delta = rows * n_v * dim;
    tape_floats = align_up<size_t>(tape_conv + tape_k + tape_g + tape_delta, 4);
  }
  size_t kv_bytes() const { return static_cast<size_t>(n_attention) * kv_layer; }
  size_t recurrent_bytes() const {
    return static_cast<size_t>(n_recurrent) * recurrent_floats * sizeof(float);
  }
  size_t tape_bytes() const { return static_cast<size_t>(n_recurrent) * tape_floats * sizeof(float); }
};

inline bool any_float_ffn(const ModelConfig& c, const Weights& w) {
  for (int il = 0; il < c.n_layer; ++il) {
    const LayerWeights& layer = w.layers[static_cast<size_t>(il)];
    if (layer.ffn && is_float_type(layer.ffn->down.dtype)) return true;
    if (layer.moe && (is_float_type(layer.moe->experts[0].down.dtype) ||
                      (!layer.moe->shared.empty() && is_float_type(layer.moe->shared.down.dtype))))
      return true;
  }
  return false;
}
inline bool any_float_output(const ModelConfig& c, const Weights& w) {
  for (int il = 0; il < c.n_layer; ++il) {
    const LayerWeights& layer = w.layers[static_cast<size_t>(il)];
    if (is_float_type(layer.attention ? layer.attention->output.dtype : layer.delta_net->output.dtype))
      return true;
  }
  return false;
}

}  // namespace thermo
