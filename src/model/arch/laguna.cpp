// laguna: attention with a sliding window in three of four layers, a softplus gate on its output,
// sigmoid-routed experts after a leading dense layer.
#include <fmt/format.h>

#include "base/error.h"
#include "gguf/gguf_file.h"
#include "model/arch/architecture.h"
#include "model/arch/blocks.h"

namespace thermo {
namespace {

constexpr std::string_view kNorm = "ffn_norm.weight";
enum Rope : int { kFull, kWindow };

void read_ropes(const Keys& keys, ModelConfig& config) {
  RopeConfig full, window;
  full.freq_base = keys.positive_number("rope.freq_base");
  full.n_rot =
      keys.rope_dims("rope.dimension_count", keys.positive_or("rope.dimension_count", 1024, config.head_dim),
                     config.head_dim);
  keys.read_scaling(full);
  // Converters spell the keys of the windowed layers in two ways.
  window.freq_base = keys.number_or("rope.freq_base_swa", keys.number_or("rope.swa.freq_base", 10000.0));
  if (window.freq_base <= 0.0)
    keys.fail("rope.freq_base_swa", fmt::format("is {}, expected more than 0", window.freq_base));
  window.n_rot =
      keys.rope_dims("rope.dimension_count_swa",
                     keys.positive_or("rope.dimension_count_swa", 1024,
                                      keys.positive_or("rope.swa.dimension_count", 1024, config.head_dim)),
                     config.head_dim);
  config.ropes = {full, window};
}

// Files say which layers have a window as a period, whose first layer has none, or one by one.
std::vector<bool> sliding_layers(const Keys& keys, int n_layer) {
  constexpr std::string_view kKey = "attention.sliding_window_pattern";
  const GgufValue* const pattern = keys.file().find(keys.key(kKey));
  if (pattern != nullptr && pattern->is_array())
    return keys.file().require_bool_each(keys.key(kKey), static_cast<size_t>(n_layer));
  const int period = keys.positive_or(kKey, kMaxLayers, 4);
  std::vector<bool> slides;
  for (int il = 0; il < n_layer; ++il) slides.push_back(il % period != 0);
  return slides;
}

// One gate value per head, or one per element: the tensor's width says which.
HeadGate gate_of(const Keys& keys, int head_dim, int first_n_head) {
  const GgufTensor* const gate = keys.find_tensor("blk.0.attn_gate.weight");
  const uint64_t n_head = static_cast<uint64_t>(first_n_head);
  if (gate == nullptr || gate->dims[1] == n_head) return HeadGate::SoftplusHead;
  if (gate->dims[1] == n_head * static_cast<uint64_t>(head_dim)) return HeadGate::SoftplusElement;
  throw LoadError(fmt::format(
      "{}: blk.0.attn_gate.weight: shape {}, expected {} outputs (one per head) or {} (one per element)",
      keys.file().path(), describe_shape(*gate), n_head, n_head * static_cast<uint64_t>(head_dim)));
}

// Of full and windowed layers.
ModelShape shape_of(std::string_view name, int n_layer, int n_embd, int n_vocab, int n_ctx, int n_head,
                    int n_head_window, int n_head_kv, int head_dim, int n_rot, int n_ff, int n_expert,
                    int n_used, int n_ff_expert, int window) {
  std::vector<int> heads;
  for (int il = 0; il < n_layer; ++il) heads.push_back(il % 4 == 0 ? n_head : n_head_window);
  return {name,
          false,
          {{"block_count", n_layer},
           {"context_length", n_ctx},
           {"embedding_length", n_embd},
           {"vocab_size", n_vocab},
           {"feed_forward_length", n_ff},
           {"attention.head_count", heads},
           {"attention.head_count_kv", n_head_kv},
           {"attention.key_length", head_dim},
           {"attention.value_length", head_dim},
           {"attention.layer_norm_rms_epsilon", 1e-6F},
           {"attention.sliding_window", window},
           {"rope.dimension_count", n_rot},
           {"rope.freq_base", 500000.0F},
           {"rope.dimension_count_swa", head_dim},
           {"rope.freq_base_swa", 10000.0F},
           {"rope.scaling.type", "yarn"},
           {"rope.scaling.factor", 32.0F},
           {"rope.scaling.original_context_length", 4096},
           {"rope.scaling.yarn_beta_fast", 64.0F},
           {"rope.scaling.yarn_beta_slow", 1.0F},
           {"expert_count", n_expert},
           {"expert_used_count", n_used},
           {"expert_feed_forward_length", n_ff_expert},
           {"expert_shared_feed_forward_length", n_ff_expert},
           {"expert_gating_func", 2},
           {"expert_weights_norm", true},
           {"expert_weights_scale", 2.5F},
           {"leading_dense_block_count", 1}}};
}

void describe(const Keys& keys, ModelConfig& config) {
  const GgufFile& file = keys.file();
  read_ropes(keys, config);

  read_experts(keys, config);
  const int gating = keys.positive_or("expert_gating_func", 4, static_cast<int>(Gating::Sigmoid));
  config.route.gating = static_cast<Gating>(gating);
  config.route.normalize = file.find_bool(keys.key("expert_weights_norm")).value_or(true);
  config.route.weights_scale = static_cast<float>(keys.number_or("expert_weights_scale", 1.0));
  if (const int shared = keys.count_or("expert_shared_count", 64, 1); shared > 1)
    keys.fail("expert_shared_count", fmt::format("is {}, expected 0 or 1", shared));
  else if (shared == 1)
    config.n_ff_shared = keys.positive("expert_shared_feed_forward_length", kMaxWidth);

  const int n_dense = keys.count_or("leading_dense_block_count", kMaxLayers, 0);
  if (n_dense > 0) config.n_ff = keys.positive("feed_forward_length", kMaxWidth);
  const int window = keys.count_or("attention.sliding_window", kMaxContext, 0);
  const std::vector<bool> slides = sliding_layers(keys, config.n_layer);
  const std::vector<int> heads = read_heads(keys, config);
  const HeadGate gate = gate_of(keys, config.head_dim, heads.front());
  for (int il = 0; il < config.n_layer; ++il) {
    const bool windowed = window > 0 && slides[static_cast<size_t>(il)];
    config.network.layers.push_back(
        {{attention_block(config, il,
                          {.n_head = heads[static_cast<size_t>(il)],
                           .window = windowed ? window : 0,
                           .gate = gate,
                           .rope = windowed ? kWindow : kFull}),
          il >= n_dense ? routed_block(keys, config, il, {.norm = kNorm, .router_bias = true})
                        : dense_block(config, il, kNorm)}});
  }
  add_ends(keys, config);
}

std::vector<ModelShape> shapes() {
  return {
      shape_of("laguna-xs2", 40, 2048, 100352, 131072, 48, 64, 8, 128, 64, 8192, 256, 8, 512, 512),
      shape_of("laguna-tiny", 5, 256, 512, 2048, 4, 8, 2, 64, 32, 512, 16, 4, 256, 32),
  };
}

}  // namespace

constinit const Architecture kLaguna{.name = "laguna", .describe = describe, .shapes = shapes};

}  // namespace thermo
