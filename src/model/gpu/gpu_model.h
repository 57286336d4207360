// A model whose weights, memory and arithmetic are on a GPU. The same step as model/model.h, see step.h for
// what a step is.
//
// Steps of up to 32 rows replay a recorded graph, one per row bucket; larger ones queue their kernels. The
// host writes a step's rows to page-locked memory, starts it, and waits once for the logits. One thread at a
// time may call a GpuModel.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "kernels/isa.h"
#include "model/gpu/gpu_experts.h"
#include "model/gpu/gpu_memory.h"
#include "model/model_config.h"
#include "model/sequence_state.h"
#include "model/step.h"
#include "model/weights.h"

namespace thermo {

struct GpuModelOptions {
  int device = 0;
  int n_batch = 2048;  // most rows of a step
  int n_sequences = 1;
  SequenceConfig sequence;
  SplitOptions experts;     // where the routed experts are
  Isa isa = Isa::Portable;  // of the processor's share of them
  bool graphs = true;       // false: queue every kernel, to measure what graphs buy
};

class GpuModel;

// What the model remembers of one sequence; the counterpart of SequenceState.
class GpuSequence {
 public:
  int n_past() const noexcept { return n_past_; }
  int n_ctx() const noexcept { return n_ctx_; }
  int max_draft_rows() const noexcept { return max_draft_rows_; }

  void clear() noexcept;
  Checkpoint checkpoint() const;
  void restore(const Checkpoint& checkpoint) noexcept;
  void truncate(int n) noexcept;

 private:
  friend class GpuModel;
  GpuModel* model_ = nullptr;
  int index_ = 0, n_past_ = 0, n_ctx_ = 0, max_draft_rows_ = 0;
};

class GpuModel {
 public:
  // `weights` may be bound without repacking: panels are then packed while they are uploaded and no host copy
  // is kept. Nothing of it is needed afterwards, unless experts are split: then its file must outlive this.
  // Throws CudaError, MemoryError, and LoadError for a shape that has no kernel.
  GpuModel(ModelConfig config, const Weights& weights, const GpuModelOptions& options, ThreadPool& pool,
           const LoadProgressFn& progress);
  ~GpuModel();
  GpuModel(const GpuModel&) = delete;
  GpuModel& operator=(const GpuModel&) = delete;

  // Every byte of GPU memory that the constructor takes: arithmetic only. The device is known by its number
  // of multiprocessors.
  static std::vector<GpuMemoryItem> plan(const ModelConfig& config, const Weights& weights,
                                         const GpuModelOptions& options, int n_multiprocessors);

  const ModelConfig& config() const;
  GpuSequence& sequence(int index);

  // As Model::step() and Model::commit(). After a device fault steps return no logits and fault() tells. When
  // less than rows of logits is needed they stay on the device, and fetch_logits() copies row i of them.
  StepOutput step(const StepBatch& batch) noexcept;
  std::span<const float> fetch_logits(int i) noexcept;
  void commit(int sequence, std::span<const int32_t> path) noexcept;
  const std::string& fault() const noexcept;
  // Milliseconds the device spent on the last step.
  float last_step_ms() const noexcept;

  // All zero and nullptr unless experts are split.
  ExpertTelemetry expert_telemetry() const noexcept;
  bool reset_experts();  // see Engine
  const HeatMap* heat() const noexcept;
  GpuExperts* experts() noexcept;

 private:
  friend class GpuSequence;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
