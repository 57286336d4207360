// A loaded model and the step that runs it. See step.h for what a step is.
//
// One thread at a time may call a Model; inside a step it uses its pool.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "base/thread_pool.h"
#include "experts/expert_runner.h"
#include "kernels/isa.h"
#include "model/model_config.h"
#include "model/sequence_state.h"
#include "model/step.h"
#include "model/weights.h"

namespace thermo {

struct ModelOptions {
  int n_batch = 512;  // most rows of a step
  int n_sequences = 1;
  SequenceConfig sequence;
  Isa isa = Isa::Portable;
};

class Model {
 public:
  // Everything is taken here; a step allocates nothing. `weights` was loaded for `config`. `experts`:
  // computes the routed experts of the main stack; nullptr: they are in `weights`.
  Model(ModelConfig config, Weights weights, const ModelOptions& options, ThreadPool& pool,
        std::unique_ptr<ExpertRunner> experts = nullptr);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Bytes of activations and scratch for these options.
  static uint64_t workspace_bytes(const ModelConfig& config, const ModelOptions& options, int n_threads,
                                  size_t max_panel_bytes);
  const ModelConfig& config() const;
  const Weights& weights() const;
  SequenceState& sequence(int index);

  // REQUIRES (checked by Engine::step, which refuses instead): groups of different sequences without
  // uncommitted rows, parents before children, a chain unless uncommitted, rows <= n_batch, tokens in the
  // vocabulary, positions inside the context.
  StepOutput step(const StepBatch& batch) noexcept;
  std::span<const float> fetch_logits(int i) noexcept;  // see Backend
  void commit(int sequence, std::span<const int32_t> path) noexcept;

  // How the experts were used; nullptr for a model without any.
  HeatMap* heat() noexcept;
  ExpertTelemetry expert_telemetry() const noexcept;
  bool reset_experts();  // see Engine
  // Why steps can no longer be trusted; empty while they can.
  std::string_view fault() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
