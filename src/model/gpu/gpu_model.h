// A model whose weights, memory and arithmetic are on a GPU. The same step as model/model.h, see step.h for
// what a step is.
//
// Steps of up to 64 rows replay a recorded graph, one per row bucket; larger ones queue their kernels. The
// host writes a step's rows to page-locked memory, starts it, and waits once for the logits. One thread at a
// time may call a GpuModel.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "model/backend.h"
#include "model/gpu/gpu_experts.h"
#include "model/gpu/gpu_memory.h"
#include "model/model_config.h"
#include "model/step.h"
#include "model/weights.h"

namespace thermo {

class GpuModel final : public Backend {
 public:
  // `weights` may be bound without repacking: panels are then packed while they are uploaded and no host copy
  // is kept. Nothing of it is needed afterwards, unless experts are split: then its file must outlive this.
  // Throws CudaError, MemoryError, and LoadError for a shape of which refusal() says why not.
  // `target`: nullptr, or the model that this one drafts for and that outlives it. Matrices that both have
  // are there once, and both queue their work in one stream, so that hidden states go from one to the other
  // without a wait.
  GpuModel(ModelConfig config, const Weights& weights, const ModelOptions& options, ThreadPool& pool,
           const LoadProgressFn& progress, const GpuModel* target = nullptr);
  ~GpuModel() override;
  GpuModel(const GpuModel&) = delete;
  GpuModel& operator=(const GpuModel&) = delete;

  // Which part of a network's shape has no kernel here; empty: all have one.
  static std::string refusal(const ModelConfig& config);

  // Every byte of GPU memory that the constructor takes: arithmetic only. The device is known by its number
  // of multiprocessors.
  static std::vector<GpuMemoryItem> plan(const ModelConfig& config, const Weights& weights,
                                         const ModelOptions& options, int n_multiprocessors);
  // All of it for a model that drafts for `target`.
  static uint64_t drafter_bytes(const ModelConfig& config, const Weights& weights,
                                const ModelOptions& options, int n_multiprocessors, const ModelConfig& target,
                                const Weights& target_weights);
  // Uncommitted rows of a sequence that the device in use has the shared memory for.
  static int max_draft_rows(const ModelConfig& config) noexcept;

  const ModelConfig& config() const override;
  bool is_gpu() const noexcept override { return true; }
  std::span<const int> step_sizes() const noexcept override;
  // When less than all logits of a row is needed they stay on the device, until they are fetched.
  StepOutput step(const StepBatch& batch) noexcept override;
  std::span<const float> fetch_logits(int i) noexcept override;
  // Done when the sequence is needed: the paths of all sequences in one go.
  void commit(int sequence, std::span<const int32_t> path) noexcept override;
  StateRows states() const noexcept override;
  std::unique_ptr<StateBuffer> make_states(int n_rows, int n_taps) override;
  std::unique_ptr<HostMemory> make_host_memory(size_t n_bytes) override;
  void append_features(int sequence, const StateRows& features) noexcept override;
  std::string_view fault() const noexcept override;
  // Milliseconds the device spent on the last step.
  float last_step_ms() const noexcept;

  int n_past(int sequence) const noexcept override;
  void clear(int sequence) noexcept override;
  // In page-locked memory, as blocks are.
  std::unique_ptr<Checkpoint> checkpoint(int sequence, bool with_kv,
                                         std::unique_ptr<Checkpoint> reuse = nullptr) override;
  bool restore(int sequence, const Checkpoint& checkpoint) noexcept override;
  void truncate(int sequence, int n) noexcept override;
  void share(int from, int to, int n) noexcept override;
  std::unique_ptr<KvPin> pin_kv(int sequence) override;
  void save_kv(const KvPin& pin, const KvRange& range, std::byte* block) noexcept override;
  bool load_kv(int sequence, const KvRange& range, const std::byte* block) noexcept override;
  void finish_copies() noexcept override;
  std::span<const std::byte> bytes_of(const Checkpoint& checkpoint) const noexcept override;
  std::unique_ptr<Checkpoint> make_checkpoint(int n_past, std::span<const std::byte> bytes) override;

  // All zero and nullptr unless experts are split.
  const HeatMap* heat() const noexcept override;
  void set_heat(const HeatMap& heat) override;
  ExpertTelemetry expert_telemetry() const noexcept override;
  void expert_places(std::span<ExpertPlace> out) const noexcept override;
  std::span<const LayerUses> layer_uses() const noexcept override;
  bool reset_experts() override;
  GpuExperts* experts() noexcept;

 private:
  const SequenceLayout& layout() const noexcept override;
  KvPages& pages() const noexcept override;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
