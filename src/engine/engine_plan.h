// Decides where a model runs and what memory it takes there, before any is taken.
#pragma once

#include <optional>

#include "engine/draft_plan.h"
#include "engine/engine.h"
#include "engine/gpu_backend.h"
#include "engine/memory_plan.h"
#include "model/backend.h"

namespace thermo {

struct EnginePlan {
  std::optional<GpuChoice> gpu;  // nullopt: the processor
  ModelOptions model;
  MemoryPlan memory;  // ffn_parts: the network is to be cut so (cut_dense())
  DraftPlan draft;
};

// Throws ConfigError for a value out of range.
void check_options(const EngineOptions& options);

// The network of the file, with the taps that the options ask for. Throws LoadError.
ModelConfig describe_model(const GgufFile& file, const EngineOptions& options);

// Throws ConfigError, MemoryError, and LoadError for a file whose tensors are not as described. `imagine`:
// where there is no card but an amount of GPU memory was given, the plan is for a card that has it.
EnginePlan plan_engine(const ModelConfig& config, const GgufFile& file, const EngineOptions& options,
                       bool imagine = false);

}  // namespace thermo
