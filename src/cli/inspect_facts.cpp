#include "cli/inspect_facts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/cpu_info.h"
#include "base/error.h"
#include "base/mapped_file.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

std::string_view file_type_label(uint64_t id) {
  constexpr std::pair<uint64_t, std::string_view> kLabels[] = {
      {0, "F32"},     {1, "F16"},     {2, "Q4_0"},    {3, "Q4_1"},    {7, "Q8_0"},
      {8, "Q5_0"},    {9, "Q5_1"},    {10, "Q2_K"},   {11, "Q3_K_S"}, {12, "Q3_K_M"},
      {13, "Q3_K_L"}, {14, "Q4_K_S"}, {15, "Q4_K_M"}, {16, "Q5_K_S"}, {17, "Q5_K_M"},
      {18, "Q6_K"},   {25, "IQ4_NL"}, {30, "IQ4_XS"}, {32, "BF16"},   {38, "MXFP4"},
  };
  for (const auto& [label_id, label] : kLabels)
    if (label_id == id) return label;
  return "";
}

// A key of any type, as text; for facts that are shown and not used.
std::string text_of(const GgufFile& file, std::string_view key) {
  const GgufValue* value = file.find(key);
  if (!value) return "";
  if (value->type != GgufType::String) return describe_value(*value);
  return escape_text(*file.find_string(key), 200);
}

uint64_t count_of(const GgufFile& file, std::string_view key) {
  const GgufValue* value = file.find(key);
  return value && value->is_array() ? value->count : 0;
}

TokenizerFacts tokenizer_facts(const GgufFile& file) {
  TokenizerFacts facts;
  facts.model = text_of(file, "tokenizer.ggml.model");
  facts.pre = text_of(file, "tokenizer.ggml.pre");
  facts.n_tokens = count_of(file, "tokenizer.ggml.tokens");
  facts.n_merges = count_of(file, "tokenizer.ggml.merges");
  facts.add_bos = file.find_bool("tokenizer.ggml.add_bos_token");
  std::vector<std::string_view> tokens;
  if (facts.n_tokens > 0) tokens = file.require_strings("tokenizer.ggml.tokens");
  constexpr const char* kRoles[] = {"bos", "eos", "eot", "eom", "padding", "unknown", "mask"};
  for (const char* role : kRoles) {
    const auto id = file.find_int(fmt::format("tokenizer.ggml.{}_token_id", role));
    if (!id) continue;
    const bool known = *id >= 0 && static_cast<uint64_t>(*id) < tokens.size();
    facts.special.push_back({role, *id, known ? escape_text(tokens[static_cast<size_t>(*id)]) : ""});
  }
  return facts;
}

TensorKind kind_of(const Block& block, const TensorSpec& spec) {
  switch (spec.role) {
    case Role::Embedding:
      return TensorKind::Embedding;
    case Role::Norm:
    case Role::QNorm:
    case Role::KNorm:
      return TensorKind::Norms;
    case Role::Router:
    case Role::RouterBias:
      return TensorKind::Router;
    case Role::FfnGate:
    case Role::FfnUp:
    case Role::FfnDown:
    case Role::SharedWeight:
      return block.routed() ? TensorKind::SharedExpert : TensorKind::DenseFfn;
    default:
      break;
  }
  if (spec.form == TensorForm::Experts) return TensorKind::Experts;
  return block.kind == BlockKind::Head        ? TensorKind::Output
         : block.kind == BlockKind::Attention ? TensorKind::Attention
         : block.kind == BlockKind::DeltaNet  ? TensorKind::DeltaNet
                                              : TensorKind::Other;
}

// What each tensor of the network is for.
void name_tensors(ModelFacts& facts) {
  const auto add = [&](const std::vector<Block>& blocks, bool nextn) {
    for (const Block& block : blocks)
      for (const TensorSpec& spec : block.tensors)
        facts.tensor_kinds.emplace(spec.name, nextn ? TensorKind::Nextn : kind_of(block, spec));
  };
  // First come, first named: the next-token block may have the trunk's head.
  const Network& network = facts.config->network;
  add(network.input, false);
  add(network.output, false);
  for (size_t l = 0; l < network.layers.size(); ++l)
    add(network.layers[l].blocks, l >= static_cast<size_t>(facts.config->n_layer));
}

void add_kinds(const GgufFile& file, ModelFacts& facts) {
  std::map<TensorKind, KindFacts> kinds;
  if (facts.config) name_tensors(facts);
  std::vector<std::string> unknown;
  for (const GgufTensor& tensor : file.tensors()) {
    const TensorKind kind = facts.kind_of(tensor.name);
    KindFacts& k = kinds[kind];
    k.kind = kind;
    ++k.n_tensors;
    k.n_params += tensor.n_elements();
    k.n_bytes += tensor.n_bytes;
    k.bytes_by_type[tensor.dtype] += tensor.n_bytes;
    facts.n_params += tensor.n_elements();
    if (facts.config && kind == TensorKind::Other) unknown.push_back(escape_text(tensor.name));
  }
  for (auto& [kind, k] : kinds) facts.kinds.push_back(std::move(k));
  if (unknown.empty()) return;
  const size_t shown = std::min<size_t>(unknown.size(), 5);
  facts.warnings.push_back(
      fmt::format("{} tensors are not used: {}{}", unknown.size(),
                  fmt::join(unknown.begin(), unknown.begin() + static_cast<ptrdiff_t>(shown), ", "),
                  shown < unknown.size() ? ", ..." : ""));
}

// Runs `gather`; what it throws about the file becomes a warning, so that a damaged part does not hide the
// rest.
template <class Gather>
void or_warning(ModelFacts& facts, Gather&& gather) {
  try {
    gather();
  } catch (const ThermoError& error) {
    facts.warnings.emplace_back(error.what());
  }
}

}  // namespace

const char* tensor_kind_name(TensorKind kind) {
  constexpr const char* kNames[] = {"embedding",      "attention",        "DeltaNet",  "router",
                                    "routed experts", "shared expert",    "dense FFN", "norms",
                                    "output",         "next-token block", "other"};
  return kNames[static_cast<size_t>(kind)];
}

uint64_t active_params(const GgufFile& file, const ModelConfig& config) {
  uint64_t n = 0;
  for (const GgufTensor& tensor : file.tensors()) {
    const bool routed = tensor.name.find("_exps.") != std::string_view::npos && config.route.n_expert > 0;
    n += routed ? tensor.n_elements() / static_cast<uint64_t>(config.route.n_expert) *
                      static_cast<uint64_t>(config.route.n_expert_used)
                : tensor.n_elements();
  }
  return n;
}

std::string format_params(uint64_t n) {
  const auto value = static_cast<double>(n);
  if (value >= 1e9) return fmt::format("{:.2f} B", value * 1e-9);
  if (value >= 1e6) return fmt::format("{:.2f} M", value * 1e-6);
  return fmt::format("{:.2f} K", value * 1e-3);
}

std::string quantisation_name(const GgufFile& file) {
  const std::optional<uint64_t> id = file.find_uint("general.file_type");
  if (!id) return "";
  const std::string_view label = file_type_label(*id);
  return label.empty() ? fmt::format("file type {}", *id) : std::string(label);
}

ModelFacts gather_facts(const GgufFile& file, const EngineOptions& options) {
  ModelFacts facts;
  facts.architecture = text_of(file, "general.architecture");
  facts.name = text_of(file, "general.name");
  facts.description = text_of(file, "general.description");
  or_warning(facts, [&] { facts.file_type = quantisation_name(file); });
  facts.tensor_bytes = file.total_tensor_bytes();
  facts.n_parts = std::max(1, file.n_parts());
  for (int i = 0; i < file.n_parts(); ++i)
    if (const MappedFile* part = file.part(i)) facts.file_bytes += part->bytes().size();
  if (facts.file_bytes == 0) facts.file_bytes = facts.tensor_bytes;  // linked into the program

  or_warning(facts, [&] { facts.config = read_model_config(file); });
  if (facts.config) override_rope(options.rope, *facts.config);
  add_kinds(file, facts);
  if (file.find("tokenizer.ggml.model")) or_warning(facts, [&] { facts.tokenizer = tokenizer_facts(file); });
  or_warning(facts, [&] {
    if (const auto text = file.find_string("tokenizer.chat_template"))
      facts.chat_template = std::string(*text);
  });
  if (facts.config) or_warning(facts, [&] { facts.plan = Engine::plan_for(file, options); });
  return facts;
}

std::vector<std::pair<std::string, std::string>> describe_config(const ModelConfig& config) {
  std::vector<std::pair<std::string, std::string>> lines;
  const auto add = [&](std::string name, std::string value) {
    lines.emplace_back(std::move(name), std::move(value));
  };
  const auto rope = [](const RopeConfig& r) {
    std::string text = fmt::format("{} dims, base {:g}", r.n_rot, r.freq_base);
    if (r.scaling == RopeScaling::Yarn)
      text += fmt::format(", YaRN x{:g} from {:g}", r.factor, r.original_context);
    if (r.scaling == RopeScaling::Linear) text += fmt::format(", linear x{:g}", r.factor);
    return text;
  };
  add("layers",
      fmt::format("{}: {} attention, {} DeltaNet{}", config.n_layer, config.n_attention_layers(),
                  config.n_recurrent_layers(), config.n_nextn > 0 ? ", and a next-token block" : ""));
  add("embedding", fmt::format("{}", config.n_embd));
  add("vocabulary", fmt::format("{}", config.n_vocab));
  add("training context", fmt::format("{}", config.n_ctx_train));
  std::vector<int> heads, windows;
  const auto note = [](int value, std::vector<int>& values) {
    if (value > 0 && std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
  };
  for (const Layer& layer : config.network.layers)
    for (const Block& block : layer.blocks) {
      note(block.n_head, heads);
      note(block.window, windows);
    }
  if (!heads.empty()) {
    add("attention", fmt::format("{} heads of {}, {} for keys and values", fmt::join(heads, "/"),
                                 config.head_dim, config.n_head_kv));
    std::vector<std::string> rotations;
    for (const RopeConfig& r : config.ropes) rotations.push_back(rope(r));
    add("rotation", fmt::format("{}", fmt::join(rotations, "; ")));
  }
  if (!windows.empty()) add("windows", fmt::format("{} tokens", fmt::join(windows, "/")));
  if (config.n_recurrent_layers() > 0)
    add("DeltaNet", fmt::format("{} key heads, {} value heads of {}, {} taps", config.ssm_n_head_k,
                                config.ssm_n_head_v, config.ssm_dim, config.ssm_taps));
  if (config.n_ff > 0) add("dense FFN", fmt::format("{} wide", config.n_ff));
  if (config.is_moe()) {
    add("experts", fmt::format("{} of {} used in {} layers, {} wide", config.route.n_expert_used,
                               config.route.n_expert, config.n_routed_layers(), config.n_ff_expert));
    if (config.n_ff_shared > 0) add("shared expert", fmt::format("{} wide", config.n_ff_shared));
  }
  add("norm epsilon", fmt::format("{:g}", config.norm_eps));
  return lines;
}

}  // namespace thermo
