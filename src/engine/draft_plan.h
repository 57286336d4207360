// Decides who drafts and what that takes, before anything is taken.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "model/backend.h"
#include "speculative/drafter.h"

namespace thermo {

class Model;
class ThreadPool;

struct DraftPlan {
  DraftOptions::Kind kind = DraftOptions::Kind::None;  // never Auto
  std::vector<int> states;   // hidden states of the model that the drafter reads, see insert_taps()
  int max_rows = 0;          // of a round's uncommitted step
  uint64_t fixed_bytes = 0;  // of the drafter
  uint64_t token_bytes = 0;  // of its cache, for each token of a sequence
};

// For a model on the processor. Throws ConfigError (the model has no next-token block) and LoadError (the
// drafter's file is damaged or was made for another model).
DraftPlan plan_draft(const DraftOptions& options, const ModelConfig& config, int n_threads);

// `target` and the drafter's file must outlive the result.
std::unique_ptr<Drafter> make_drafter(const DraftPlan& plan, const DraftOptions& options, const Model& target,
                                      const ModelOptions& model, ThreadPool& pool);

}  // namespace thermo
