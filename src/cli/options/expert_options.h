// Options that say where experts are; see docs/experts.md.
#pragma once

#include <string>

#include "cli/options/options.h"
#include "cli/terminal.h"
#include "engine/engine.h"
#include "experts/catalog.h"
#include "experts/telemetry.h"
#include "model/model_config.h"

namespace thermo {

struct ExpertFlags {
  std::string cache = "auto";  // of the device; as EngineOptions::expert_cache
  std::string ram = "auto";
  int pin_layers = 0;
  bool swaps = true;
  uint64_t link_limit = 0;  // 0: none
  std::string heat_file, trace_file;
  bool keep_heat = true;  // without a heat file: in the user's cache folder, see cli/kept_heat.h
  bool cpu_moe = false;   // llama.cpp's name for a cache of 0
  int n_cpu_moe = -1;     // and for a share: the experts of this many layers are cold

  bool asks_for_a_cache() const { return cache != "auto" || cpu_moe || n_cpu_moe > 0; }
};

// --expert-cache --expert-ram --pin-layers --expert-swaps --expert-policy --link-limit --heat-file
// --no-heat-file --trace -cmoe -ncmoe.
void add_expert_options(OptionSet& set, ExpertFlags& flags);
// --link-limit alone.
Option& add_link_limit(OptionSet& set, ExpertFlags& flags);
// Refuses what is no budget: for options whose values are read later. Throws ConfigError.
ExpertBudget expert_budget_option(std::string_view text);

// Puts the flags into the options. Throws ConfigError: flags that contradict each other, a trace or a heat
// file that cannot be written.
void set_expert_options(const ExpertFlags& flags, EngineOptions& options);
// What needs the model: -ncmoe N is the share of the experts that the other layers have.
void set_expert_options(const ExpertFlags& flags, const ModelConfig& config, EngineOptions& options);

// Says so when a cache was asked for and the engine has nothing to put into one.
void note_unused_cache(const ExpertFlags& flags, const Engine& engine, const Terminal& terminal);

// The experts of a file; reads its header. No layers with experts: a dense model.
ExpertCatalog expert_catalog(const ModelConfig& config, const GgufFile& file);

// "experts 93.1 % hot, 12 moved, 1.20 MiB/token by the CPU, waited 85 us/token"; empty when no expert
// was anywhere else than where it was computed.
std::string describe(const Engine& engine);

}  // namespace thermo
