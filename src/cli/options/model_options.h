// Options that several commands share, and what they become.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/options/cpu_options.h"
#include "cli/options/expert_options.h"
#include "cli/options/options.h"
#include "engine/engine.h"
#include "kernels/attention/attention.h"
#include "sampling/sampling_params.h"

namespace thermo {

// MODEL as a positional and -m, --model; see model_source.h for what it may be. Empty: the embedded model.
void add_model_option(OptionSet& set, std::string& model);

// Switches of llama.cpp that ask for what is always so here. add_engine_options() has them.
void add_llama_switches(OptionSet& set);

// -c -b -ub -t -ctk -ctv --rope-scaling --isa --repack --device, those of experts, and their llama.cpp
// spellings.
struct EngineFlags {
  int n_ctx = 0;                           // 0: auto
  bool whole_context = false;              // -c 0: the training length, whether it fits or not
  int n_batch = 0;                         // 0: the engine's default
  int n_ubatch = 0;                        // 0: as n_batch
  int n_threads = 0, n_threads_batch = 0;  // 0: not given
  bool fit = true;
  int fit_ctx = 8192;
  int fit_target_mib = 1024;
  std::string k_type = "auto", v_type = "auto";
  RopeOverride rope;
  std::string isa = "auto";
  std::string device = "auto";
  std::string n_gpu_layers = "auto";
  int main_gpu = 0;
  uint64_t gpu_memory = 0;  // 0: what is free
  bool repack = true;
  CpuFlags cpu;
  bool use_mmap = true;
  bool lock_memory = false;
  bool check_tensors = false;
  bool warm_up = true;         // of a server
  bool context_shift = false;  // of a conversation; engine_options() refuses it
  ExpertFlags experts;
};
void add_engine_options(OptionSet& set, EngineFlags& flags);
// Throws ConfigError (values that make no sense together) or ThermoError with ExitCode::Device.
EngineOptions engine_options(const EngineFlags& flags);
// Says what is unusual about the context and the threads.
void note_unusual(const ModelConfig& config, const EngineOptions& options, const Terminal& terminal);
// What `--device` and `-ngl` together mean for EngineOptions::device. Throws ConfigError.
DeviceChoice device_option(const std::string& name, const std::string& n_gpu_layers);
// "f16" and so on; throws ConfigError.
std::optional<KvType> kv_type_from_name(const std::string& name);  // nullopt: auto. Throws ConfigError
std::vector<std::string> kv_type_choices();
// "kv f16/f16: default": the types that a plan or an engine has, and why.
std::string kv_decision(KvType k, KvType v, const EngineFlags& flags);

class TextModel;

// --temp --top-k ... --seed.
struct SamplingFlags {
  std::optional<float> temperature, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty,
      dry_multiplier, dry_base;
  std::optional<int> top_k, repeat_last_n, dry_allowed_length, dry_penalty_last_n;
  std::optional<uint64_t> seed;           // nullopt (-1 for the user): drawn
  std::vector<std::string> logit_bias;    // "ID+1.5", "ID-100"
  std::vector<std::string> dry_breakers;  // none given: the usual ones; "none": none
  bool ignore_eos = false;
};
void add_sampling_options(OptionSet& set, SamplingFlags& flags);
// What was given, else what the model's card says, else what its file recommends (`general.sampling.*`), else
// the built-in values. Throws ConfigError.
SamplingParams sampling_params(const SamplingFlags& flags, const TextModel& model);
// Texts at which runs end for DRY: those that were given, or the usual ones. Throws ConfigError.
std::vector<std::string> dry_breaker_texts(const SamplingFlags& flags);

}  // namespace thermo
