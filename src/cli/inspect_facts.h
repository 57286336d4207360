// What `inspect` says about a model file, gathered in one place for the table and the JSON. Loads no weights.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "model/model_config.h"
#include "tensor/dtype.h"

namespace thermo {

class GgufFile;

// What a tensor is for. In the order of the table.
enum class TensorKind {
  Embedding,
  Attention,
  DeltaNet,
  Router,
  Experts,
  SharedExpert,
  DenseFfn,
  Norms,
  Output,
  Nextn,
  Other,
};
const char* tensor_kind_name(TensorKind kind);

struct KindFacts {
  TensorKind kind{};
  size_t n_tensors = 0;
  uint64_t n_params = 0;
  uint64_t n_bytes = 0;
  std::map<DType, uint64_t> bytes_by_type;
};

struct SpecialToken {
  std::string role;  // "eos"
  int64_t id;
  std::string text;  // empty when the list of tokens has no such id
};

struct TokenizerFacts {
  std::string model;  // "gpt2", "none"
  std::string pre;
  uint64_t n_tokens = 0;
  uint64_t n_merges = 0;
  std::optional<bool> add_bos;
  std::vector<SpecialToken> special;
};

struct ModelFacts {
  std::string architecture, name, description;
  std::string file_type;  // "Q4_K_M"
  uint64_t n_params = 0;
  uint64_t file_bytes = 0;  // all parts
  uint64_t tensor_bytes = 0;
  int n_parts = 1;
  std::vector<KindFacts> kinds;       // only those that occur
  std::optional<ModelConfig> config;  // nullopt: not a model that this program runs
  std::optional<TokenizerFacts> tokenizer;
  std::optional<std::string> chat_template;
  std::optional<MemoryPlan> plan;
  std::vector<std::string> warnings;                            // one sentence each
  std::map<std::string, TensorKind, std::less<>> tensor_kinds;  // of the network's tensors, by name

  TensorKind kind_of(std::string_view tensor) const {
    const auto kind = tensor_kinds.find(tensor);
    return kind == tensor_kinds.end() ? TensorKind::Other : kind->second;
  }
};

// `inputs.available_bytes` may be 0: what the machine has now is used.
ModelFacts gather_facts(const GgufFile& file, const EngineOptions& options);

// Of all parameters, those that one token is computed with.
uint64_t active_params(const GgufFile& file, const ModelConfig& config);

// "34.74 M".
std::string format_params(uint64_t n);

// "Q4_K_M" as general.file_type says; empty when the file does not.
std::string quantisation_name(const GgufFile& file);

// Name and value of each hyper-parameter, for people.
std::vector<std::pair<std::string, std::string>> describe_config(const ModelConfig& config);

}  // namespace thermo
