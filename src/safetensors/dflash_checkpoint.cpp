#include "safetensors/dflash_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <set>
#include <string_view>

#include "base/error.h"
#include "base/json.h"
#include "base/json_limits.h"
#include "base/units.h"
#include "gguf/gguf_writer.h"
#include "safetensors/safetensors_file.h"

namespace thermo {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfig = "config.json";
constexpr const char* kWhole = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr int64_t kMaxNumber = 1 << 24;
constexpr size_t kMaxJsonBytes = 16 * MiB;

Json read_json(const std::string& path) {
  const MappedFile file(path);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  std::string what;
  if (text.size() > kMaxJsonBytes)
    what = fmt::format("it has {} bytes, expected at most {}", text.size(), kMaxJsonBytes);
  else
    what = beyond_limits(text);
  if (!what.empty()) throw LoadError(fmt::format("{}: {}; fetch the drafter again", path, what));
  Json json = Json::parse(text, nullptr, false);
  if (!json.is_object())
    throw LoadError(fmt::format("{}: it is not a JSON object; fetch the drafter again", path));
  return json;
}

// config.json, read with the path in every message.
class Config {
 public:
  explicit Config(const std::string& path) : path_(path), root_(read_json(path)) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw LoadError(fmt::format("{}: {}; give a DFlash drafter as it was published", path_, what));
  }
  // The first of these objects that has the key; nullptr: none. Null counts as absent.
  const Json* find(std::initializer_list<const Json*> objects, const char* key) const {
    for (const Json* object : objects)
      if (object != nullptr && object->is_object() && object->contains(key) && !(*object)[key].is_null())
        return &(*object)[key];
    return nullptr;
  }
  const Json* find(const char* key) const { return find({&root_}, key); }
  const Json* object(const char* key) const {
    const Json* const value = find(key);
    return value != nullptr && value->is_object() ? value : nullptr;
  }
  uint32_t count(const Json* value, const char* key) const {
    if (value == nullptr) fail(fmt::format("{} is missing", key));
    if (!value->is_number_integer() || value->get<int64_t>() < 0 || value->get<int64_t>() > kMaxNumber)
      fail(fmt::format("{} is not a number from 0 to {}", key, kMaxNumber));
    return static_cast<uint32_t>(value->get<int64_t>());
  }
  uint32_t count(const char* key) const { return count(find(key), key); }
  float number(const Json* value, const char* key) const {
    if (value == nullptr || !value->is_number() || !std::isfinite(value->get<double>()))
      fail(fmt::format("{} is no number", key));
    return value->get<float>();
  }
  const Json& root() const { return root_; }

 private:
  std::string path_;
  Json root_;
};

void set_rope(const Config& config, GgufWriter& out) {
  // Two generations of the library: rope_theta and rope_scaling, or rope_parameters.
  const Json *const all = config.object("rope_parameters"), *const old = config.object("rope_scaling");
  out.set("dflash.rope.freq_base",
          config.number(config.find({all, &config.root()}, "rope_theta"), "rope_theta"));
  if (const Json* share = config.find({all, &config.root()}, "partial_rotary_factor");
      share != nullptr && config.number(share, "partial_rotary_factor") != 1.0f)
    config.fail("it rotates only a part of each head (partial_rotary_factor), which is not supported");
  const Json* const scaling = all != nullptr ? all : old;
  const Json* type = config.find({scaling}, "rope_type");
  if (type == nullptr) type = config.find({scaling}, "type");
  if (type == nullptr || *type == "default") return;
  if (*type != "yarn") config.fail("its rope_scaling is neither yarn nor default");
  const float factor = config.number(config.find({scaling}, "factor"), "rope_scaling.factor");
  if (const Json* magnitude = config.find({scaling}, "attention_factor"))
    out.set("dflash.rope.scaling.attention_factor", config.number(magnitude, "attention_factor"));
  for (const char* key : {"mscale", "mscale_all_dim"})
    if (config.find({scaling}, key) != nullptr)
      config.fail(fmt::format("its rope_scaling has {}, which is not supported", key));
  out.set("dflash.rope.scaling.type", "yarn");
  out.set("dflash.rope.scaling.factor", factor);
  out.set("dflash.rope.scaling.original_context_length",
          config.count(config.find({scaling}, "original_max_position_embeddings"),
                       "rope_scaling.original_max_position_embeddings"));
  const std::pair<const char*, const char*> betas[] = {{"beta_fast", "dflash.rope.scaling.yarn_beta_fast"},
                                                       {"beta_slow", "dflash.rope.scaling.yarn_beta_slow"}};
  for (const auto& [from, to] : betas)
    if (const Json* beta = config.find({scaling}, from)) out.set(to, config.number(beta, from));
}

void set_windows(const Config& config, uint32_t n_layer, GgufWriter& out) {
  const Json* const use = config.find("use_sliding_window");
  const Json* const types = config.find("layer_types");
  if ((use != nullptr && *use == false) || types == nullptr) return;
  if (!types->is_array() || types->size() != n_layer) config.fail("layer_types does not name every layer");
  std::vector<bool> slides;
  for (const Json& type : *types) {
    if (type != "sliding_attention" && type != "full_attention")
      config.fail("layer_types has other layers than sliding_attention and full_attention");
    slides.push_back(type == "sliding_attention");
  }
  if (std::find(slides.begin(), slides.end(), true) == slides.end()) return;
  out.set("dflash.attention.sliding_window", config.count("sliding_window"));
  out.set_array("dflash.attention.sliding_window_pattern", slides);
}

// What a converter writes of config.json.
std::vector<std::byte> metadata_of(const Config& config) {
  const Json* const dflash = config.object("dflash_config");
  if (dflash == nullptr && config.find("block_size") == nullptr)
    config.fail("there is neither dflash_config nor block_size: this is not a DFlash drafter");
  if (const Json* names = config.find("architectures"); names != nullptr && names->is_array())
    for (const Json& name : *names) {
      std::string text = name.is_string() ? name.get<std::string>() : "";
      std::transform(text.begin(), text.end(), text.begin(),
                     [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      if (text.find("dspark") != std::string::npos || text.find("eagle") != std::string::npos)
        config.fail("this is a drafter of a kind that is not supported");
    }
  GgufWriter out;
  out.set("general.architecture", "dflash");
  const uint32_t n_layer = config.count("num_hidden_layers"), n_embd = config.count("hidden_size"),
                 n_head = config.count("num_attention_heads");
  const Json* const head = config.find("head_dim");
  const uint32_t head_dim = head != nullptr ? config.count(head, "head_dim") : n_embd / std::max(1u, n_head);
  const Json* const kv = config.find("num_key_value_heads");
  out.set("dflash.block_count", n_layer);
  out.set("dflash.context_length", config.count("max_position_embeddings"));
  out.set("dflash.embedding_length", n_embd);
  out.set("dflash.feed_forward_length", config.count("intermediate_size"));
  out.set("dflash.attention.head_count", n_head);
  out.set("dflash.attention.head_count_kv", kv != nullptr ? config.count(kv, "num_key_value_heads") : n_head);
  out.set("dflash.attention.key_length", head_dim);
  out.set("dflash.attention.value_length", head_dim);
  out.set("dflash.attention.layer_norm_rms_epsilon",
          config.number(config.find("rms_norm_eps"), "rms_norm_eps"));
  out.set("dflash.vocab_size", config.count("vocab_size"));
  out.set("dflash.block_size",
          config.count(config.find({&config.root(), dflash}, "block_size"), "block_size"));
  out.set("tokenizer.ggml.mask_token_id",
          config.count(config.find({dflash, &config.root()}, "mask_token_id"), "mask_token_id"));
  if (const Json* ids = config.find({dflash, &config.root()}, "target_layer_ids")) {
    if (!ids->is_array() || ids->empty()) config.fail("target_layer_ids is not a list");
    std::vector<int32_t> layers;
    for (const Json& id : *ids)
      layers.push_back(static_cast<int32_t>(config.count(&id, "target_layer_ids")) + 1);
    out.set_array("dflash.target_layers", layers);
  }
  const Json* causal = config.find("is_causal");
  if (causal == nullptr) causal = config.find({dflash}, "causal");
  if (causal != nullptr) {
    if (!causal->is_boolean()) config.fail("causal is neither true nor false");
    out.set("dflash.attention.causal", causal->get<bool>());
  }
  set_rope(config, out);
  set_windows(config, n_layer, out);
  return out.to_bytes();
}

// "layers.3.self_attn.q_proj.weight" as GGUF files have it; what is not known keeps its name, and is refused
// where that matters.
std::string gguf_name(std::string name) {
  constexpr std::pair<std::string_view, std::string_view> kOthers[] = {
      {"fc.weight", "fc.weight"},
      {"hidden_norm.weight", "enc.output_norm.weight"},
      {"norm.weight", "output_norm.weight"},
      {"embed_tokens.weight", "token_embd.weight"},
      {"lm_head.weight", "output.weight"}};
  constexpr std::pair<std::string_view, std::string_view> kOfLayer[] = {
      {"input_layernorm.weight", "attn_norm.weight"},
      {"post_attention_layernorm.weight", "ffn_norm.weight"},
      {"self_attn.q_proj.weight", "attn_q.weight"},
      {"self_attn.k_proj.weight", "attn_k.weight"},
      {"self_attn.v_proj.weight", "attn_v.weight"},
      {"self_attn.o_proj.weight", "attn_output.weight"},
      {"self_attn.q_norm.weight", "attn_q_norm.weight"},
      {"self_attn.k_norm.weight", "attn_k_norm.weight"},
      {"mlp.gate_proj.weight", "ffn_gate.weight"},
      {"mlp.up_proj.weight", "ffn_up.weight"},
      {"mlp.down_proj.weight", "ffn_down.weight"}};
  if (name.starts_with("model.")) name.erase(0, 6);
  for (const auto& [from, to] : kOthers)
    if (name == from) return std::string(to);
  if (!name.starts_with("layers.")) return name;
  const std::string_view rest = std::string_view(name).substr(7);
  const size_t dot = rest.find('.');
  if (dot == std::string_view::npos) return name;
  for (const auto& [from, to] : kOfLayer)
    if (rest.substr(dot + 1) == from) return fmt::format("blk.{}.{}", rest.substr(0, dot), to);
  return name;
}

// What cannot be looked at is not there: whoever opens it says why.
bool is_folder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}
bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

// The files that hold the tensors: the one that was named, or those of the folder.
std::vector<std::string> tensor_files(const fs::path& path, const fs::path& folder) {
  if (!is_folder(path)) return {path.string()};
  if (is_there(folder / kWhole)) return {(folder / kWhole).string()};
  const std::string index_path = (folder / kIndex).string();
  if (!is_there(folder / kIndex))
    throw LoadError(fmt::format("{}: there is neither {} nor {}; fetch the drafter again", folder.string(),
                                kWhole, kIndex));
  const Json index = read_json(index_path);
  std::set<std::string> names;
  if (index.contains("weight_map") && index["weight_map"].is_object())
    for (const auto& [tensor, file] : index["weight_map"].items()) {
      const std::string name = file.is_string() ? file.get<std::string>() : "";
      if (name.empty() || fs::path(name).filename() != name || name == "..")
        throw LoadError(
            fmt::format("{}: a tensor is in no file of this folder; fetch the drafter again", index_path));
      names.insert(name);
    }
  if (names.empty())
    throw LoadError(fmt::format("{}: it names no files; fetch the drafter again", index_path));
  std::vector<std::string> files;
  for (const std::string& name : names) files.push_back((folder / name).string());
  return files;
}

}  // namespace

bool is_checkpoint(const std::string& path) {
  const fs::path folder(path);
  return path.ends_with(".safetensors") || (is_folder(folder) && is_there(folder / kConfig) &&
                                            (is_there(folder / kWhole) || is_there(folder / kIndex)));
}

GgufFile open_dflash_checkpoint(const std::string& path) {
  const fs::path folder = is_folder(path) ? fs::path(path) : fs::path(path).parent_path();
  std::vector<std::byte> metadata = metadata_of(Config((folder / kConfig).string()));
  std::vector<MappedFile> files;
  std::vector<GgufFile::OtherTensor> tensors;
  for (const std::string& name : tensor_files(path, folder)) {
    files.emplace_back(name);
    for (SafetensorsTensor& tensor : read_safetensors(files.back().bytes(), name)) {
      if (!tensor.dtype)
        throw LoadError(
            fmt::format("{}: a tensor has type {}, BF16, F16 or F32 was expected; fetch the drafter in "
                        "one of them",
                        name, tensor.type));
      if (tensor.bytes.empty()) throw LoadError(fmt::format("{}: a tensor is empty; fetch it again", name));
      std::reverse(tensor.shape.begin(), tensor.shape.end());
      tensors.push_back({.name = gguf_name(std::move(tensor.name)),
                         .dtype = *tensor.dtype,
                         .dims = std::move(tensor.shape),
                         .bytes = tensor.bytes,
                         .part = static_cast<int>(files.size()) - 1});
    }
  }
  return GgufFile(path, std::move(metadata), std::move(tensors), std::move(files));
}

}  // namespace thermo
