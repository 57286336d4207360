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
  bool graphs = true;  // false: queue every kernel, to measure what graphs buy
};

struct GpuMemoryItem {
  std::string name;
  uint64_t bytes = 0;
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
  // is kept. Nothing of it is needed afterwards. Throws CudaError, MemoryError, and LoadError for a shape
  // that has no kernel.
  GpuModel(ModelConfig config, const Weights& weights, const GpuModelOptions& options, ThreadPool& pool,
           const LoadProgressFn& progress);
  ~GpuModel();
  GpuModel(const GpuModel&) = delete;
  GpuModel& operator=(const GpuModel&) = delete;

  // Every byte of GPU memory that the constructor takes: arithmetic only.
  static std::vector<GpuMemoryItem> plan(const ModelConfig& config, const Weights& weights,
                                         const GpuModelOptions& options);

  const ModelConfig& config() const;
  GpuSequence& sequence(int index);

  // As Model::step() and Model::commit(). After a device fault steps return no logits and fault() tells.
  StepOutput step(const StepBatch& batch) noexcept;
  void commit(int sequence, std::span<const int32_t> path) noexcept;
  const std::string& fault() const noexcept;
  // Milliseconds the device spent on the last step.
  float last_step_ms() const noexcept;

 private:
  friend class GpuSequence;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
