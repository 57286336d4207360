// Decides which drafter runs and what memory that takes, before any is taken.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/gpu_backend.h"
#include "model/backend.h"
#include "model/weights.h"
#include "speculative/drafter.h"

namespace thermo {

class ThreadPool;

struct DraftPlan {
  DraftOptions::Kind kind = DraftOptions::Kind::None;  // never Auto
  std::vector<int> states;  // hidden states of the model that the drafter reads, see insert_taps()
  int max_rows = 0;         // of a round's uncommitted step
  // On the processor.
  uint64_t fixed_bytes = 0;      // of the drafter's network
  uint64_t token_bytes = 0;      // of its cache or index, for each token of a sequence
  int block = 0;                 // uncommitted rows of its own in it
  uint64_t untouched_bytes = 0;  // Model::untouched_bytes()
};

// Throws ConfigError (the model has no next-token block, or the guesses that are asked for are longer than
// the drafter's) and LoadError (the drafter's file is damaged or was made for another model). `unpacked`: the
// model's weights, if they are multiplied without being repacked.
DraftPlan plan_draft(const DraftOptions& options, const ModelConfig& config, int n_threads,
                     const Weights* unpacked = nullptr);

// Of the model's states that wait for the drafter, for each sequence: those of queued rows and of uncommitted
// ones.
uint64_t draft_state_bytes(const DraftPlan& plan, const ModelConfig& config, int n_queued,
                           int max_draft_rows);

// Memory of a GPU that a drafter takes beside `model`, which was planned for `gpu`. `weights`: the target's.
uint64_t gpu_draft_bytes(const DraftPlan& plan, const DraftOptions& options, const ModelConfig& config,
                         const Weights& weights, const ModelOptions& model, const GpuChoice& gpu);

// `target`, its weights (on a GPU: until the drafter is made) and the drafter's file must outlive the result.
std::unique_ptr<Drafter> make_drafter(const DraftPlan& plan, const DraftOptions& options,
                                      const Backend& target, const Weights& weights,
                                      const ModelOptions& model, ThreadPool& pool);

}  // namespace thermo
