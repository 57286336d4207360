#include "model/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

// Bounds that no published model comes near; past them a file is damaged or hostile.
constexpr uint64_t kMaxLayers = 512;
constexpr uint64_t kMaxWidth = 1u << 20;
constexpr uint64_t kMaxHeads = 4096;
constexpr uint64_t kMaxContext = 1u << 24;
constexpr uint64_t kMaxExperts = 1024;

// Reads keys under the architecture's prefix, with the file's path in every message.
class Keys {
 public:
  Keys(const GgufFile& file, std::string prefix) : file_(file), prefix_(std::move(prefix)) {}

  std::string key(std::string_view name) const { return fmt::format("{}.{}", prefix_, name); }

  int positive(std::string_view name, uint64_t max) const {
    return in_range(name, file_.require_uint(key(name)), max);
  }
  int positive_or(std::string_view name, uint64_t max, int fallback) const {
    const auto value = file_.find_uint(key(name));
    return value ? in_range(name, *value, max) : fallback;
  }
  int count_or(std::string_view name, uint64_t max, int fallback) const {
    const auto value = file_.find_uint(key(name));
    if (!value) return fallback;
    if (*value > max) fail(name, fmt::format("is {}, expected at most {}", *value, max));
    return static_cast<int>(*value);
  }
  double number(std::string_view name) const { return finite(name, file_.require_float(key(name))); }
  double number_or(std::string_view name, double fallback) const {
    const auto value = file_.find_float(key(name));
    return value ? finite(name, *value) : fallback;
  }
  std::vector<int> positive_each(std::string_view name, size_t n, uint64_t max) const {
    std::vector<int> values;
    for (uint64_t value : file_.require_uint_each(key(name), n)) values.push_back(in_range(name, value, max));
    return values;
  }
  const GgufFile& file() const { return file_; }

  [[noreturn]] void fail(std::string_view name, const std::string& what) const {
    throw LoadError(
        fmt::format("{}: {} {}; was this file made by another converter?", file_.path(), key(name), what));
  }

 private:
  int in_range(std::string_view name, uint64_t value, uint64_t max) const {
    if (value < 1 || value > max) fail(name, fmt::format("is {}, expected 1 to {}", value, max));
    return static_cast<int>(value);
  }
  double finite(std::string_view name, double value) const {
    if (!std::isfinite(value)) fail(name, "is not a finite number");
    return value;
  }

  const GgufFile& file_;
  std::string prefix_;
};

double positive_base(const Keys& keys, std::string_view name, double value) {
  if (value <= 0.0) keys.fail(name, fmt::format("is {}, expected more than 0", value));
  return value;
}

int rope_dims(const Keys& keys, std::string_view name, int dims, int head_dim) {
  if (dims % 2 != 0 || dims > head_dim)
    keys.fail(name, fmt::format("is {}, expected an even number up to the head's {}", dims, head_dim));
  return dims;
}

void read_yarn(const Keys& keys, RopeConfig& rope) {
  const auto type = keys.file().find_string(keys.key("rope.scaling.type"));
  if (!type || *type == "none") return;
  if (*type != "yarn") keys.fail("rope.scaling.type", fmt::format("is '{}', expected yarn or none", *type));
  rope.yarn = true;
  rope.factor = keys.number("rope.scaling.factor");
  if (rope.factor < 0.0)
    keys.fail("rope.scaling.factor", fmt::format("is {}, expected 0 or more", rope.factor));
  rope.original_context = keys.positive("rope.scaling.original_context_length", kMaxContext);
  rope.beta_fast = keys.number_or("rope.scaling.yarn_beta_fast", 32.0);
  rope.beta_slow = keys.number_or("rope.scaling.yarn_beta_slow", 1.0);
  // rope.scaling.yarn_attn_factor is ignored: converters disagree about its meaning, the magnitude is 1 + 0.1
  // ln s.
}

void read_common(const Keys& keys, ModelConfig& config) {
  const GgufFile& file = keys.file();
  config.name = file.find_string("general.name").value_or("");
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
  config.head_dim = keys.positive("attention.key_length", 1024);
  const int value_dim = keys.positive("attention.value_length", 1024);
  if (value_dim != config.head_dim)
    keys.fail("attention.value_length",
              fmt::format("is {}, expected the key length {}", value_dim, config.head_dim));
  if (config.head_dim % 16 != 0)
    keys.fail("attention.key_length", fmt::format("is {}, expected a multiple of 16", config.head_dim));
  config.n_head_kv = keys.positive("attention.head_count_kv", kMaxHeads);
  config.layers.resize(static_cast<size_t>(n_block));
  const std::vector<int> heads =
      keys.positive_each("attention.head_count", static_cast<size_t>(n_block), kMaxHeads);
  for (size_t i = 0; i < heads.size(); ++i) {
    if (heads[i] % config.n_head_kv != 0)
      keys.fail("attention.head_count",
                fmt::format("is {} in layer {}, expected a multiple of the {} key heads", heads[i], i,
                            config.n_head_kv));
    config.layers[i].n_head = heads[i];
  }

  const GgufTensor& embedding = file.require_tensor("token_embd.weight");
  if (embedding.dims[1] > (1u << 24))
    throw LoadError(fmt::format("{}: token_embd.weight has {} rows", file.path(), embedding.dims[1]));
  config.n_vocab = static_cast<int>(embedding.dims[1]);
  if (const auto declared = file.find_uint(keys.key("vocab_size")); declared && *declared > embedding.dims[1])
    keys.fail("vocab_size",
              fmt::format("is {}, but token_embd.weight has {} rows", *declared, embedding.dims[1]));
}

void read_experts(const Keys& keys, ModelConfig& config) {
  config.route.n_expert = keys.positive("expert_count", kMaxExperts);
  config.route.n_expert_used = keys.positive("expert_used_count", kMaxExperts);
  if (config.route.n_expert_used > config.route.n_expert)
    keys.fail("expert_used_count", fmt::format("is {}, expected at most the {} experts",
                                               config.route.n_expert_used, config.route.n_expert));
  config.n_ff_expert = keys.positive("expert_feed_forward_length", kMaxWidth);
}

void read_qwen35(const Keys& keys, ModelConfig& config) {
  config.attn_gate = AttnGate::SigmoidElement;
  config.rope_full.freq_base = positive_base(keys, "rope.freq_base", keys.number("rope.freq_base"));
  config.rope_full.n_rot =
      rope_dims(keys, "rope.dimension_count", keys.positive("rope.dimension_count", 1024), config.head_dim);
  read_yarn(keys, config.rope_full);
  if (const auto sections = keys.file().find_uints(keys.key("rope.dimension_sections"))) {
    // Text has equal components, so the sections only have to make sense.
    uint64_t sum = 0;
    for (uint64_t section : *sections) sum += std::min<uint64_t>(section, kMaxWidth);
    if (sum > static_cast<uint64_t>(config.rope_full.n_rot / 2))
      keys.fail("rope.dimension_sections",
                fmt::format("add up to {}, expected at most {}", sum, config.rope_full.n_rot / 2));
  }
  config.rope_window = config.rope_full;

  config.ssm_taps = keys.positive("ssm.conv_kernel", 8);
  config.ssm_dim = keys.positive("ssm.state_size", 1024);
  config.ssm_n_head_k = keys.positive("ssm.group_count", kMaxHeads);
  config.ssm_n_head_v = keys.positive("ssm.time_step_rank", kMaxHeads);
  if (config.ssm_n_head_v % config.ssm_n_head_k != 0)
    keys.fail("ssm.time_step_rank", fmt::format("is {}, expected a multiple of ssm.group_count {}",
                                                config.ssm_n_head_v, config.ssm_n_head_k));
  const int inner = keys.positive("ssm.inner_size", kMaxWidth);
  if (inner != config.ssm_inner())
    keys.fail("ssm.inner_size",
              fmt::format("is {}, expected time_step_rank x state_size = {}", inner, config.ssm_inner()));
  if (config.ssm_dim % 16 != 0)
    keys.fail("ssm.state_size", fmt::format("is {}, expected a multiple of 16", config.ssm_dim));

  const int interval = keys.positive_or("full_attention_interval", kMaxLayers, 4);
  const auto recurrent =
      keys.file().find_bool_each(keys.key("attention.recurrent_layers"), config.layers.size());
  for (int i = 0; i < static_cast<int>(config.layers.size()); ++i) {
    LayerConfig& layer = config.layers[static_cast<size_t>(i)];
    layer.recurrent = recurrent ? (*recurrent)[static_cast<size_t>(i)] : (i + 1) % interval != 0;
    if (i >= config.n_layer) layer.recurrent = false;  // next-token blocks always attend
    layer.moe = config.arch == Arch::Qwen35Moe;
  }

  if (config.arch == Arch::Qwen35Moe) {
    read_experts(keys, config);
    config.route.gating = Gating::Softmax;  // fixed by the architecture, whatever the metadata says
    config.n_ff_shared = keys.positive("expert_shared_feed_forward_length", kMaxWidth);
    config.shared_gate = true;
  } else {
    config.n_ff = keys.positive("feed_forward_length", kMaxWidth);
  }
}

void read_laguna(const Keys& keys, ModelConfig& config) {
  const GgufFile& file = keys.file();
  if (config.n_nextn != 0) keys.fail("nextn_predict_layers", "is set, but laguna has no next-token block");
  config.rope_full.freq_base = positive_base(keys, "rope.freq_base", keys.number("rope.freq_base"));
  config.rope_full.n_rot =
      rope_dims(keys, "rope.dimension_count", keys.positive_or("rope.dimension_count", 1024, config.head_dim),
                config.head_dim);
  read_yarn(keys, config.rope_full);
  // Converters spell the keys of the windowed layers in two ways.
  const double base_swa = keys.number_or("rope.freq_base_swa", keys.number_or("rope.swa.freq_base", 10000.0));
  config.rope_window.freq_base = positive_base(keys, "rope.freq_base_swa", base_swa);
  const int dims_swa = keys.positive_or("rope.dimension_count_swa", 1024,
                                        keys.positive_or("rope.swa.dimension_count", 1024, config.head_dim));
  config.rope_window.n_rot = rope_dims(keys, "rope.dimension_count_swa", dims_swa, config.head_dim);

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
  const int period = keys.positive_or("attention.sliding_window_pattern", kMaxLayers, 4);
  for (int i = 0; i < config.n_layer; ++i) {
    LayerConfig& layer = config.layers[static_cast<size_t>(i)];
    layer.window = i % period == 0 ? 0 : window;
    layer.moe = i >= n_dense;
  }

  // One gate value per head, or one per element: the tensor's width says which.
  const GgufTensor& gate = file.require_tensor("blk.0.attn_gate.weight");
  const uint64_t n_head = static_cast<uint64_t>(config.layers[0].n_head);
  if (gate.dims[1] == n_head) {
    config.attn_gate = AttnGate::SoftplusHead;
  } else if (gate.dims[1] == n_head * static_cast<uint64_t>(config.head_dim)) {
    config.attn_gate = AttnGate::SoftplusElement;
  } else {
    throw LoadError(fmt::format(
        "{}: blk.0.attn_gate.weight: shape {}, expected {} outputs (one per head) or {} (one per element)",
        file.path(), describe_shape(gate), n_head, n_head * static_cast<uint64_t>(config.head_dim)));
  }
}

}  // namespace

int ModelConfig::n_recurrent_layers() const {
  return static_cast<int>(std::count_if(layers.begin(), layers.begin() + n_layer,
                                        [](const LayerConfig& l) { return l.recurrent; }));
}
int ModelConfig::n_attention_layers() const {
  return n_layer - n_recurrent_layers();
}

int ModelConfig::max_n_head() const {
  int most = 0;
  for (const LayerConfig& layer : layers) most = std::max(most, layer.n_head);
  return most;
}

int ModelConfig::max_n_ff() const {
  return std::max({n_ff, n_ff_expert, n_ff_shared});
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
    const double n_moe = static_cast<double>(
        std::count_if(layers.begin(), layers.end(), [](const LayerConfig& l) { return l.moe; }));
    const double idle = n_moe * (route.n_expert - route.n_expert_used) * per_expert;
    text += fmt::format(".A{}", size(std::max(0.0, static_cast<double>(n_params) - idle)));
  }
  return text;
}

ModelConfig read_model_config(const GgufFile& file) {
  ModelConfig config;
  const std::string_view arch = file.require_string("general.architecture");
  config.arch_name = std::string(arch);
  if (arch == "qwen35moe") {
    config.arch = Arch::Qwen35Moe;
  } else if (arch == "qwen35") {
    config.arch = Arch::Qwen35;
  } else if (arch == "laguna") {
    config.arch = Arch::Laguna;
  } else if (arch == "dflash" || arch == "qwen35-dflash-draft" || arch == "dflash-draft") {
    throw LoadError(
        fmt::format("{}: this is a drafter ({}), which cannot run alone; give the model it drafts for",
                    file.path(), arch));
  } else {
    throw LoadError(fmt::format("{}: unknown architecture '{}', expected qwen35moe, qwen35 or laguna",
                                file.path(), arch));
  }
  const Keys keys(file, config.arch_name);
  read_common(keys, config);
  if (config.arch == Arch::Laguna)
    read_laguna(keys, config);
  else
    read_qwen35(keys, config);
  return config;
}

}  // namespace thermo
