// laguna: attention with a sliding window in three of four layers, a softplus gate on its output,
// sigmoid-routed experts after a leading dense layer.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "gguf/gguf_file.h"
#include "model/arch/architecture.h"
#include "model/arch/blocks.h"

namespace thermo {
namespace {

constexpr std::string_view kNorm = "ffn_norm.weight";
constexpr std::string_view kLayerTypes = "attention.layer_types";
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

// Which layers have a window, from the types of all layers: names, or numbers of which 1 is a sliding layer.
std::optional<std::vector<bool>> sliding_types(const Keys& keys, size_t n_layer) {
  const std::string key = keys.key(kLayerTypes);
  const GgufValue* const types = keys.file().find(key);
  if (types == nullptr) return {};
  std::vector<bool> slides;
  if (types->element_type != GgufType::String) {
    for (const uint64_t type : keys.file().require_uint_each(key, n_layer, 1)) slides.push_back(type == 1);
    return slides;
  }
  for (const std::string_view type : keys.file().require_strings(key)) {
    if (type != "full_attention" && type != "global_attention" && type != "sliding_attention")
      keys.fail(kLayerTypes,
                fmt::format("names '{}', expected full_attention or sliding_attention", escape_text(type)));
    slides.push_back(type == "sliding_attention");
  }
  if (slides.size() != n_layer)
    keys.fail(kLayerTypes, fmt::format("names {} layers, expected {}", slides.size(), n_layer));
  return slides;
}

// Files say which layers have a window as a period, whose first layer has none, or one by one, or by the
// types of the layers.
std::vector<bool> sliding_layers(const Keys& keys, int n_layer) {
  constexpr std::string_view kPattern = "attention.sliding_window_pattern";
  const auto n = static_cast<size_t>(n_layer);
  const GgufValue* const pattern = keys.file().find(keys.key(kPattern));
  const std::optional<std::vector<bool>> types = sliding_types(keys, n);
  if (pattern == nullptr && types) return *types;
  std::vector<bool> slides;
  if (pattern != nullptr && pattern->is_array()) {
    slides = keys.file().require_bool_each(keys.key(kPattern), n);
  } else {
    const int period = keys.positive_or(kPattern, kMaxLayers, 4);
    for (int il = 0; il < n_layer; ++il) slides.push_back(il % period != 0);
  }
  if (types && *types != slides)
    keys.fail(kLayerTypes, fmt::format("and {} differ about the layers that have a window", kPattern));
  return slides;
}

// Which layers have a dense FFN: so many at the beginning, or those of a list.
std::vector<bool> dense_layers(const Keys& keys, int n_layer) {
  constexpr std::string_view kCount = "leading_dense_block_count", kList = "dense_layers";
  const auto n = static_cast<size_t>(n_layer);
  const int count = keys.count_or(kCount, kMaxLayers, 0);
  std::vector<bool> leading(n);
  std::fill_n(leading.begin(), std::min(count, n_layer), true);
  const auto list = keys.file().find_uints(keys.key(kList), n - 1);
  if (!list) return leading;
  std::vector<bool> dense(n);
  for (const uint64_t layer : *list) dense[layer] = true;
  if (keys.file().find(keys.key(kCount)) != nullptr && dense != leading)
    keys.fail(kList, fmt::format("and {} differ about the layers that have a dense FFN", kCount));
  return dense;
}

// One gate value per head, or one per element: the tensor's width says which.
HeadGate gate_of(const Keys& keys, int layer, int head_dim, int n_heads) {
  const GgufTensor* const gate = keys.find_tensor(tensor_name(layer, "attn_gate.weight"));
  const uint64_t n_head = static_cast<uint64_t>(n_heads);
  if (gate == nullptr || gate->dims[1] == n_head) return HeadGate::SoftplusHead;
  if (gate->dims[1] == n_head * static_cast<uint64_t>(head_dim)) return HeadGate::SoftplusElement;
  throw LoadError(
      fmt::format("{}: {}: shape {}, expected {} outputs (one per head) or {} (one per element); "
                  "was this file made for another revision?",
                  keys.file().path(), gate->name, describe_shape(*gate), n_head,
                  n_head * static_cast<uint64_t>(head_dim)));
}

// A file may leave out the bias of a router; one whose tensors are yet to be written has it.
bool has_router_bias(const Keys& keys, int layer) {
  return keys.has_tensor(tensor_name(layer, "exp_probs_b.bias")) ||
         !keys.has_tensor(tensor_name(layer, "ffn_gate_inp.weight"));
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
  if (config.route.weights_scale == 0.0f)
    config.route.weights_scale = 1.0f;  // not set, as llama.cpp takes it
  if (const int shared = keys.count_or("expert_shared_count", 64, 1); shared > 1)
    keys.fail("expert_shared_count", fmt::format("is {}, expected 0 or 1", shared));
  else if (shared == 1)
    config.n_ff_shared = keys.positive("expert_shared_feed_forward_length", kMaxWidth);

  const std::vector<bool> dense = dense_layers(keys, config.n_layer);
  if (std::find(dense.begin(), dense.end(), true) != dense.end())
    config.n_ff = keys.positive("feed_forward_length", kMaxWidth);
  const int window = keys.count_or("attention.sliding_window", kMaxContext, 0);
  const std::vector<bool> slides = sliding_layers(keys, config.n_layer);
  const std::vector<int> heads = read_heads(keys, config);
  for (int il = 0; il < config.n_layer; ++il) {
    const auto i = static_cast<size_t>(il);
    const bool windowed = window > 0 && slides[i];
    const RoutedOptions routed{.norm = kNorm, .router_bias = has_router_bias(keys, il)};
    config.network.layers.push_back(
        {{attention_block(config, il,
                          {.n_head = heads[i],
                           .window = windowed ? window : 0,
                           .gate = gate_of(keys, il, config.head_dim, heads[i]),
                           .rope = windowed ? kWindow : kFull}),
          dense[i] ? dense_block(config, il, kNorm) : routed_block(keys, config, il, routed)}});
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
