#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "gguf/gguf_file.h"
#include "model/arch/architecture.h"
#include "model/arch/blocks.h"
#include "model/arch/keys.h"
#include "model/drafter_network.h"

namespace thermo {
namespace {

// Both naming schemes.
constexpr const char* kProjections[] = {"fc.weight", "dflash.fc.weight", "dflash_fc.weight"};
constexpr const char* kFeatureNorms[] = {"enc.output_norm.weight", "dflash.hidden_norm.weight",
                                         "dflash_hidden_norm.weight"};

void tap_last_norm(ModelConfig& config) {
  insert_taps(config.network, config.n_layer, {config.n_layer});
}

void drop_delta_net(ModelConfig& config) {
  config.ssm_taps = config.ssm_dim = config.ssm_n_head_k = config.ssm_n_head_v = 0;
}

// llama.cpp's files say `dflash`; the others put their keys under a second prefix.
bool is_llama_naming(std::string_view arch) {
  return arch == kDflashName;
}

[[noreturn]] void refuse(const GgufFile& file, const std::string& what) {
  throw LoadError(fmt::format("{}: {}; give the drafter that was made for this model", file.path(), what));
}

// round(1 + i * (n_layer - 4) / (n - 1)), halves to even.
std::vector<int> default_layers(int n, int n_layer) {
  if (n == 1) return {n_layer / 2};
  std::vector<int> ids;
  for (int i = 0; i < n; ++i)
    ids.push_back(static_cast<int>(std::nearbyint(1.0 + i * (n_layer - 4.0) / (n - 1.0))));
  return ids;
}

// The layers that the projection's input comes from: listed, or as many as it takes at their usual places.
std::vector<int> read_layers(const Keys& keys, bool llama, const std::string& projection,
                             const ModelConfig& target) {
  std::vector<int> ids;
  const char* const key = llama ? "target_layers" : "dflash.target_layer_ids";
  if (const auto listed = keys.file().find_ints(keys.key(key))) {
    const int64_t first = llama ? 1 : 0;  // number of the first layer
    for (const int64_t id : *listed) {
      if (id < first || id >= first + target.n_layer)
        refuse(keys.file(),
               fmt::format("{} holds {}, expected {} to {} for a model of {} layers", keys.key(key), id,
                           first, first + target.n_layer - 1, target.n_layer));
      ids.push_back(static_cast<int>(id - first));
    }
  } else {
    const GgufTensor& fc = keys.file().require_tensor(projection);
    const auto n_features =
        static_cast<int>(std::min<uint64_t>(fc.dims[0] / static_cast<uint64_t>(target.n_embd), kMaxLayers));
    if (n_features < 1) refuse(keys.file(), fmt::format("{} is {}", projection, describe_shape(fc)));
    ids = default_layers(n_features, target.n_layer);
    if (ids.front() < 0 || ids.back() >= target.n_layer)
      refuse(keys.file(),
             fmt::format("it reads {} layers of a model that has {}", n_features, target.n_layer));
  }
  for (size_t i = 1; i < ids.size(); ++i)
    if (ids[i] <= ids[i - 1]) keys.fail(key, "is not increasing");
  if (ids.empty()) keys.fail(key, "is empty");
  return ids;
}

// Widths and vocabulary of another model.
void check_target(const Keys& keys, const ModelConfig& c, const ModelConfig& target) {
  if (c.n_embd != target.n_embd)
    refuse(keys.file(), fmt::format("it is {} wide, the model {}", c.n_embd, target.n_embd));
  if (const auto n = keys.file().find_uint(keys.key("vocab_size"));
      n && *n != static_cast<uint64_t>(target.n_vocab))
    refuse(keys.file(), fmt::format("it has a vocabulary of {}, the model of {}", *n, target.n_vocab));
  if (const auto tokens = keys.file().find_strings("tokenizer.ggml.tokens")) {
    // The rows of an embedding may be padded.
    const auto n = static_cast<int64_t>(tokens->size());
    if (n > target.n_vocab || n < target.n_vocab - 1024)
      refuse(keys.file(), fmt::format("it has a vocabulary of {}, the model of {}", n, target.n_vocab));
  }
}

RopeConfig read_rope(const Keys& keys, bool llama, const ModelConfig& c, const ModelConfig& target) {
  RopeConfig rope;
  rope.n_rot = keys.rope_dims("attention.key_length", c.head_dim, c.head_dim);
  rope.freq_base = keys.positive_number("rope.freq_base");
  keys.read_scaling(rope);
  if (keys.file().find(keys.key(kRopeMagnitude)) != nullptr)
    rope.attention = keys.positive_number(kRopeMagnitude) / yarn_magnitude(rope.factor);
  if (llama || rope.scaling != RopeScaling::None) return rope;
  // A converter of that naming writes 1e6 whatever the checkpoint has, and no scaling; the one published
  // drafter of this shape was trained with YaRN.
  if (rope.freq_base == 1e6) rope.freq_base = target.ropes.front().freq_base;
  if (c.n_layer == 8 && c.n_embd == 2048) {
    rope.scaling = RopeScaling::Yarn;
    rope.factor = 64.0;
    rope.original_context = 4096.0;
  }
  return rope;
}

void add_layers(const Keys& keys, DflashConfig& d) {
  ModelConfig& c = d.model;
  const auto n = static_cast<size_t>(c.n_layer);
  const std::vector<int> heads = read_heads(keys, c);
  const int window = keys.count_or("attention.sliding_window", kMaxContext, 0);
  const auto pattern = keys.file().find_bool_each(keys.key("attention.sliding_window_pattern"), n);
  const auto causal = keys.file().find_bool(keys.key("attention.causal"));
  for (int il = 0; il < c.n_layer; ++il) {
    const bool slides = window > 0 && pattern && (*pattern)[static_cast<size_t>(il)];
    const bool both_ways = !causal.value_or(slides);
    // Such a window would have an end after the row as well.
    if (slides && both_ways && window < d.block)
      keys.not_supported(
          "attention.sliding_window",
          fmt::format("is {} in a layer that sees both ways, less than a block of {}", window, d.block));
    Layer& layer = c.network.layers.emplace_back();
    layer.blocks.push_back(
        attention_block(c, il, {.n_head = heads[static_cast<size_t>(il)], .window = slides ? window : 0}));
    layer.blocks.back().both_ways = both_ways;
    const bool other_name = !keys.has_tensor(tensor_name(il, "ffn_norm.weight"));
    layer.blocks.push_back(dense_block(c, il, other_name ? "post_attention_norm.weight" : "ffn_norm.weight"));
  }
}

// What it would compute is not what is computed here.
void check_tensors(const Keys& keys) {
  constexpr const char* kLayer[] = {"attn_norm.weight",   "attn_q.weight",      "attn_k.weight",
                                    "attn_v.weight",      "attn_output.weight", "attn_q_norm.weight",
                                    "attn_k_norm.weight", "ffn_norm.weight",    "post_attention_norm.weight",
                                    "ffn_gate.weight",    "ffn_up.weight",      "ffn_down.weight"};
  constexpr const char* kOutside[] = {"token_embd.weight", "output.weight", "output_norm.weight"};
  const auto is_one_of = [](std::string_view name, const auto& names) {
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
  };
  for (const GgufTensor& tensor : keys.file().tensors()) {
    const std::string_view name = tensor.name;
    bool known = is_one_of(name, kOutside) || is_one_of(name, kProjections) ||
                 is_one_of(name, kFeatureNorms) ||
                 name.ends_with("inv_freq");  // of a checkpoint; frequencies are computed here
    if (const std::string_view prefix = "blk."; name.starts_with(prefix)) {
      const size_t dot = name.find('.', prefix.size());
      known = dot != std::string_view::npos && is_one_of(name.substr(dot + 1), kLayer);
    }
    if (!known)
      refuse(keys.file(), fmt::format("its tensor {} belongs to a kind of drafter that is not supported",
                                      escape_text(name)));
  }
}

std::string first_of(const Keys& keys, std::span<const char* const> names) {
  for (const char* const name : names)
    if (keys.has_tensor(name)) return name;
  return names.front();
}

// Embedding and head are the target's unless the file has its own, each by itself; between them the features.
void add_ends_of_drafter(const Keys& keys, const std::string& projection, size_t n_features, ModelConfig& c) {
  add_ends(keys, c);
  for (std::vector<Block>* blocks : {&c.network.input, &c.network.output})
    for (TensorSpec& spec : blocks->front().tensors) {
      if (spec.form == TensorForm::Vector) continue;
      if (spec.role == Role::Output) spec.name = "output.weight";
      spec.of_target = !keys.has_tensor(spec.name);
    }
  c.network.features = {{.kind = BlockKind::Features,
                         .tensors = {{.role = Role::StateProjection,
                                      .form = TensorForm::Matrix,
                                      .name = projection,
                                      .shape = {static_cast<int>(n_features) * c.n_embd, c.n_embd}},
                                     {.role = Role::Norm,
                                      .form = TensorForm::Vector,
                                      .name = first_of(keys, kFeatureNorms),
                                      .shape = {c.n_embd}}}}};
}

}  // namespace

ModelConfig nextn_network(const ModelConfig& target) {
  ModelConfig c = target;
  // As add_nextn() put them: the input, what the layer has, the head.
  const std::vector<Block> blocks = target.network.layers.back().blocks;
  c.network = {};
  c.network.input = {blocks.front()};
  c.network.layers = {{{blocks.begin() + 1, blocks.end() - 1}}};
  c.network.output = {blocks.back()};
  c.n_layer = 1;
  c.n_nextn = 0;
  if (target.has_parts()) c.route = {};  // its own FFN is whole
  drop_delta_net(c);
  tap_last_norm(c);
  return c;
}

bool is_drafter(const GgufFile& file) {
  const std::string_view arch = file.find_string("general.architecture").value_or("");
  return is_llama_naming(arch) || arch == "dflash-draft" || arch == "qwen35-dflash-draft";
}

DflashConfig read_dflash_config(const GgufFile& file, const ModelConfig& target) {
  if (!is_drafter(file))
    refuse(file, fmt::format("this is not a DFlash drafter but '{}'",
                             escape_text(file.find_string("general.architecture").value_or(""))));
  DflashConfig d;
  ModelConfig& c = d.model;
  c.arch_name = std::string(file.require_string("general.architecture"));
  const bool llama = is_llama_naming(c.arch_name);
  const Keys keys(file, c.arch_name, {});
  check_tensors(keys);
  c.name = file.find_string("general.name").value_or("");
  c.n_layer = keys.positive("block_count", kMaxLayers);
  c.n_embd = keys.positive("embedding_length", kMaxWidth);
  c.n_ctx_train = keys.positive("context_length", kMaxContext);
  c.norm_eps = static_cast<float>(keys.positive_number("attention.layer_norm_rms_epsilon"));
  c.head_dim = keys.positive("attention.key_length", 1024);
  c.n_head_kv = keys.positive("attention.head_count_kv", kMaxHeads);
  c.n_ff = keys.positive("feed_forward_length", kMaxWidth);
  c.n_vocab = target.n_vocab;
  if (const int value_dim = keys.positive("attention.value_length", 1024); value_dim != c.head_dim)
    keys.not_supported("attention.value_length",
                       fmt::format("is {} and attention.key_length is {}: two sizes", value_dim, c.head_dim));
  if (c.head_dim % kHeadMultiple != 0)
    keys.not_supported("attention.key_length",
                       fmt::format("is {}, not a multiple of {}", c.head_dim, kHeadMultiple));
  check_target(keys, c, target);
  d.block = keys.positive(llama ? "block_size" : "dflash.block_size", 64);
  if (d.block < 2) keys.fail("block_size", "is 1: nothing is drafted");
  const uint64_t mask =
      file.require_uint(llama ? "tokenizer.ggml.mask_token_id" : keys.key("dflash.mask_token_id"));
  if (mask >= static_cast<uint64_t>(target.n_vocab))
    refuse(file, fmt::format("its mask is token {}, the model has {}", mask, target.n_vocab));
  d.mask = static_cast<int32_t>(mask);
  c.ropes = {read_rope(keys, llama, c, target)};
  const std::string projection = first_of(keys, kProjections);
  d.layers = read_layers(keys, llama, projection, target);
  for (const int layer : d.layers) d.states.push_back(output_state(layer, target.n_layer));
  add_layers(keys, d);
  add_ends_of_drafter(keys, projection, d.layers.size(), c);
  tap_last_norm(c);
  return d;
}

std::vector<ModelShape> dflash_shapes() {
  const auto shape = [](std::string_view name, int n_layer, int n_embd, int n_vocab, int n_head,
                        int n_head_kv, int head_dim, int n_ff, int block, std::vector<int> inputs) {
    return ModelShape{.name = name,
                      .tied = false,
                      .keys = {{"block_count", n_layer},
                               {"context_length", 262144},
                               {"embedding_length", n_embd},
                               {"feed_forward_length", n_ff},
                               {"attention.head_count", n_head},
                               {"attention.head_count_kv", n_head_kv},
                               {"attention.key_length", head_dim},
                               {"attention.value_length", head_dim},
                               {"attention.layer_norm_rms_epsilon", 1e-6F},
                               {"rope.freq_base", 1e7F},
                               {"vocab_size", n_vocab},
                               {"block_size", block},
                               {"target_layers", std::move(inputs)},
                               {"tokenizer.ggml.mask_token_id", std::min(248070, n_vocab - 1)}}};
  };
  std::vector<ModelShape> shapes = {
      shape("dflash-35b-a3b", 8, 2048, 248320, 32, 4, 128, 6144, 16, {2, 11, 20, 29, 38}),
      shape("dflash-27b", 5, 5120, 248320, 32, 8, 128, 17408, 16, {2, 17, 32, 47, 62}),
      shape("dflash-tiny", 2, 256, 512, 4, 2, 64, 512, 8, {2, 3}),  // of the tiny models
  };
  for (const ShapeKey& key : std::initializer_list<ShapeKey>{{"rope.scaling.type", std::string_view("yarn")},
                                                             {"rope.scaling.factor", 64.0F},
                                                             {"rope.scaling.original_context_length", 4096}})
    shapes[0].keys.push_back(key);
  shapes[1].keys.push_back({"attention.sliding_window", 2048});
  shapes[1].keys.push_back(
      {"attention.sliding_window_pattern", std::vector<bool>{true, true, true, true, false}});
  shapes[2].keys.push_back({"attention.sliding_window", 64});
  shapes[2].keys.push_back({"attention.sliding_window_pattern", std::vector<bool>{true, false}});
  return shapes;
}

}  // namespace thermo
