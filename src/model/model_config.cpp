#include "model/model_config.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "gguf/gguf_file.h"
#include "model/arch/architecture.h"

namespace thermo {
namespace {

int read_vocabulary(const Keys& keys) {
  const GgufFile& file = keys.file();
  if (!file.find_tensor("token_embd.weight") && keys.has_tensor("token_embd.weight"))
    return keys.positive("vocab_size", 1u << 24);
  const GgufTensor& embedding = file.require_tensor("token_embd.weight");
  if (embedding.dims[1] > (1u << 24))
    throw LoadError(fmt::format("{}: token_embd.weight has {} rows", file.path(), embedding.dims[1]));
  if (const auto declared = file.find_uint(keys.key("vocab_size")); declared && *declared > embedding.dims[1])
    keys.fail("vocab_size",
              fmt::format("is {}, but token_embd.weight has {} rows", *declared, embedding.dims[1]));
  return static_cast<int>(embedding.dims[1]);
}

// One number for the model. Some files have one for each layer, with 0 for those that do not attend.
int read_key_heads(const Keys& keys, int n_block, int n_head) {
  constexpr std::string_view kKey = "attention.head_count_kv";
  const auto counts = keys.file().find_uint_each(keys.key(kKey), static_cast<size_t>(n_block),
                                                 static_cast<uint64_t>(kMaxHeads));
  if (!counts) return n_head;
  const uint64_t most = *std::max_element(counts->begin(), counts->end());
  if (most == 0) keys.fail(kKey, fmt::format("is 0, expected 1 to {}", kMaxHeads));
  for (const uint64_t count : *counts)
    if (count != 0 && count != most)
      keys.fail(kKey, fmt::format("is {} in one layer and {} in another, expected one number", count, most));
  return static_cast<int>(most);
}

// What every architecture has.
void read_common(const Keys& keys, ModelConfig& config) {
  config.name = keys.file().find_string("general.name").value_or("");
  const int n_block = keys.positive("block_count", kMaxLayers);
  config.n_nextn = keys.count_or("nextn_predict_layers", kMaxLayers, 0);
  if (config.n_nextn >= n_block)
    keys.fail("nextn_predict_layers",
              fmt::format("is {}, expected less than the {} blocks", config.n_nextn, n_block));
  if (config.n_nextn > 1)
    keys.fail("nextn_predict_layers", fmt::format("is {}, expected 0 or 1", config.n_nextn));
  config.n_layer = n_block - config.n_nextn;
  config.n_embd = keys.positive("embedding_length", kMaxWidth);
  config.n_ctx_train = keys.positive("context_length", kMaxContext);
  config.norm_eps = static_cast<float>(keys.number("attention.layer_norm_rms_epsilon"));
  if (config.norm_eps < 0.0f) keys.fail("attention.layer_norm_rms_epsilon", "is negative");
  // Where the file does not say: as llama.cpp takes it.
  const int n_head = keys.positive_each("attention.head_count", static_cast<size_t>(n_block), kMaxHeads)[0];
  const int usual_dim = std::max(1, config.n_embd / n_head);
  constexpr std::string_view kKey = "attention.key_length", kValue = "attention.value_length";
  constexpr int kMaxHeadDim = 1024;
  config.head_dim = keys.positive_or(kKey, kMaxHeadDim, usual_dim);
  const int value_dim = keys.positive_or(kValue, kMaxHeadDim, usual_dim);
  const auto check_given = [&](std::string_view name, std::string_view other, int other_dim) {
    if (keys.file().find(keys.key(name)) == nullptr)
      keys.fail(name,
                fmt::format("is missing and was taken as {} (embedding_length / head_count), but {} is {}",
                            usual_dim, other, other_dim));
  };
  if (value_dim != config.head_dim) {
    check_given(kKey, kValue, value_dim);
    check_given(kValue, kKey, config.head_dim);
    keys.not_supported(kValue,
                       fmt::format("is {} and {} is {}: two sizes", value_dim, kKey, config.head_dim));
  }
  if (config.head_dim > kMaxHeadDim)
    keys.not_supported(
        kKey, fmt::format("is missing and was taken as {} (embedding_length / head_count), more than {}",
                          usual_dim, kMaxHeadDim));
  if (config.head_dim % kHeadMultiple != 0)
    keys.not_supported(kKey, fmt::format("is {}, not a multiple of {}", config.head_dim, kHeadMultiple));
  config.n_head_kv = read_key_heads(keys, n_block, n_head);
  config.n_vocab = read_vocabulary(keys);
}

int count_layers(const ModelConfig& config, bool (Layer::*is)() const) {
  const auto& layers = config.network.layers;
  return static_cast<int>(std::count_if(layers.begin(), layers.begin() + config.n_layer,
                                        [&](const Layer& layer) { return (layer.*is)(); }));
}

[[noreturn]] void refuse(const GgufFile& file, std::string_view arch) {
  if (arch == "dflash" || arch == "qwen35-dflash-draft" || arch == "dflash-draft")
    throw LoadError(
        fmt::format("{}: this is a drafter ({}), which cannot run alone; give the model it drafts for",
                    file.path(), arch));
  std::vector<std::string_view> names;
  for (const Architecture* architecture : architectures()) names.push_back(architecture->name);
  throw LoadError(
      fmt::format("{}: unknown architecture '{}', expected one of {}; give a model of one of these families",
                  file.path(), escape_text(arch), fmt::join(names, ", ")));
}

}  // namespace

int ModelConfig::n_recurrent_layers() const {
  return count_layers(*this, &Layer::recurrent);
}
int ModelConfig::n_attention_layers() const {
  return n_layer - n_recurrent_layers();
}
int ModelConfig::n_routed_layers() const {
  return count_layers(*this, &Layer::routed);
}

int ModelConfig::max_n_ff() const {
  int most = 0;
  for (size_t l = 0; l < static_cast<size_t>(n_layer); ++l)
    for (const Block& block : network.layers[l].blocks)
      for (const Role role : {Role::FfnGate, Role::ExpertGate})
        if (const TensorSpec* tensor = block.find(role)) most = std::max(most, rows_of(*tensor));
  return most;
}

std::string ModelConfig::describe(uint64_t n_params) const {
  const auto size = [](double n) {
    if (n >= 10e9) return fmt::format("{:.0f}B", n / 1e9);
    if (n >= 1e9) return fmt::format("{:.1f}B", n / 1e9);
    return fmt::format("{:.0f}M", n / 1e6);
  };
  std::string text = fmt::format("{} {}", arch_name, size(static_cast<double>(n_params)));
  if (is_moe()) {
    const double per_expert = 3.0 * n_embd * n_ff_expert;
    const double n_moe = static_cast<double>(std::count_if(
        network.layers.begin(), network.layers.end(), [](const Layer& layer) { return layer.routed(); }));
    const double idle = n_moe * (route.n_expert - route.n_expert_used) * per_expert;
    text += fmt::format(".A{}", size(std::max(0.0, static_cast<double>(n_params) - idle)));
  }
  return text;
}

ModelConfig read_model_config(const GgufFile& file, std::span<const std::string_view> assumed) {
  ModelConfig config;
  config.arch_name = std::string(file.require_string("general.architecture"));
  const Architecture* const architecture = find_architecture(config.arch_name);
  if (architecture == nullptr) refuse(file, config.arch_name);
  const Keys keys(file, config.arch_name, assumed);
  read_common(keys, config);
  if (config.n_nextn > 0 && !architecture->nextn)
    keys.fail("nextn_predict_layers",
              fmt::format("is set, but {} has no next-token block", architecture->name));
  architecture->describe(keys, config);
  return config;
}

}  // namespace thermo
