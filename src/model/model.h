// A loaded model on the processor, and the step that runs it. See step.h for what a step is.
//
// One thread at a time may call a Model; inside a step it uses its pool.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "base/thread_pool.h"
#include "experts/expert_runner.h"
#include "model/backend.h"
#include "model/model_config.h"
#include "model/step.h"
#include "model/weights.h"

namespace thermo {

class Model final : public Backend {
 public:
  // Everything is taken here; a step allocates nothing. `weights` was loaded for `config`. `experts`:
  // computes the routed experts of the main stack; nullptr: they are in `weights`.
  Model(ModelConfig config, Weights weights, const ModelOptions& options, ThreadPool& pool,
        std::unique_ptr<ExpertRunner> experts = nullptr);
  ~Model() override;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Bytes of activations and scratch for these options.
  static uint64_t workspace_bytes(const ModelConfig& config, const ModelOptions& options, int n_threads,
                                  size_t max_panel_bytes);
  // Memory beyond them that is taken from the system only if somebody asks for it.
  static uint64_t untouched_bytes(const ModelConfig& config, const ModelOptions& options);
  const Weights& weights() const;
  HeatMap* heat() noexcept;  // nullptr for a model without experts

  const ModelConfig& config() const override;
  bool is_gpu() const noexcept override { return false; }
  StepOutput step(const StepBatch& batch) noexcept override;
  std::span<const float> fetch_logits(int i) noexcept override;
  void commit(int sequence, std::span<const int32_t> path) noexcept override;
  StateRows states() const noexcept override;
  std::unique_ptr<StateBuffer> make_states(int n_rows, int n_taps) override;
  std::unique_ptr<HostMemory> make_host_memory(size_t n_bytes) override;
  void append_features(int sequence, const StateRows& features) noexcept override;
  std::string_view fault() const noexcept override;

  int n_past(int sequence) const noexcept override;
  void clear(int sequence) noexcept override;
  std::unique_ptr<Checkpoint> checkpoint(int sequence, bool with_kv,
                                         std::unique_ptr<Checkpoint> reuse = nullptr) override;
  bool restore(int sequence, const Checkpoint& checkpoint) noexcept override;
  void truncate(int sequence, int n) noexcept override;
  void share(int from, int to, int n) noexcept override;
  std::unique_ptr<KvPin> pin_kv(int sequence) override;
  void save_kv(const KvPin& pin, const KvRange& range, std::byte* block) noexcept override;
  bool load_kv(int sequence, const KvRange& range, const std::byte* block) noexcept override;
  std::span<const std::byte> bytes_of(const Checkpoint& checkpoint) const noexcept override;
  std::unique_ptr<Checkpoint> make_checkpoint(int n_past, std::span<const std::byte> bytes) override;

  const HeatMap* heat() const noexcept override;
  void set_heat(const HeatMap& heat) override;
  ExpertTelemetry expert_telemetry() const noexcept override;
  void expert_places(std::span<ExpertPlace> out) const noexcept override;
  std::span<const LayerUses> layer_uses() const noexcept override;
  bool reset_experts() override;

 private:
  const SequenceLayout& layout() const noexcept override;
  KvPages& pages() const noexcept override;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
