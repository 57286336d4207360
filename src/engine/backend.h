// What the engine needs of a loaded model, wherever it runs: Model on the processor, GpuModel on a GPU. Both
// offer the same functions; this is their common face.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <type_traits>

#include "base/result.h"
#include "experts/heat.h"
#include "experts/telemetry.h"
#include "model/sequence_state.h"
#include "model/step.h"

namespace thermo {

class Model;

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const ModelConfig& config() const = 0;
  virtual StepOutput step(const StepBatch& batch) noexcept = 0;
  // All logits of rows[i] of the last step's output, wherever they are; empty after a fault. Valid until the
  // next step.
  virtual std::span<const float> fetch_logits(int i) noexcept = 0;
  virtual void commit(int sequence, std::span<const int32_t> path) noexcept = 0;
  virtual bool is_gpu() const noexcept = 0;
  // Why it cannot go on; empty while it can.
  virtual std::string_view fault() const noexcept = 0;
  virtual ExpertTelemetry expert_telemetry() const = 0;
  virtual bool reset_experts() = 0;
  virtual const HeatMap* heat() const = 0;

  // The memory of one sequence; see SequenceState.
  virtual int n_past(int sequence) const = 0;
  virtual void clear(int sequence) = 0;
  virtual Checkpoint checkpoint(int sequence) const = 0;
  virtual void restore(int sequence, const Checkpoint& checkpoint) = 0;
  virtual void truncate(int sequence, int n) = 0;
};

// What a caller is told when the device cannot go on.
Error device_fault(const Backend& backend);

template <class ModelT>
class BackendOf final : public Backend {
 public:
  explicit BackendOf(std::unique_ptr<ModelT> model) : model_(std::move(model)) {}

  const ModelConfig& config() const override { return model_->config(); }
  StepOutput step(const StepBatch& batch) noexcept override { return model_->step(batch); }
  std::span<const float> fetch_logits(int i) noexcept override { return model_->fetch_logits(i); }
  void commit(int sequence, std::span<const int32_t> path) noexcept override {
    model_->commit(sequence, path);
  }
  bool is_gpu() const noexcept override { return !std::is_same_v<ModelT, Model>; }
  std::string_view fault() const noexcept override {
    if constexpr (requires { model_->fault(); }) return model_->fault();
    return {};
  }
  ExpertTelemetry expert_telemetry() const override {
    if constexpr (requires { model_->expert_telemetry(); }) return model_->expert_telemetry();
    return {};
  }
  bool reset_experts() override { return model_->reset_experts(); }
  const HeatMap* heat() const override {
    if constexpr (requires { model_->heat(); }) return model_->heat();
    return nullptr;
  }
  int n_past(int sequence) const override { return model_->sequence(sequence).n_past(); }
  void clear(int sequence) override { model_->sequence(sequence).clear(); }
  Checkpoint checkpoint(int sequence) const override { return model_->sequence(sequence).checkpoint(); }
  void restore(int sequence, const Checkpoint& point) override { model_->sequence(sequence).restore(point); }
  void truncate(int sequence, int n) override { model_->sequence(sequence).truncate(n); }

 private:
  std::unique_ptr<ModelT> model_;
};

}  // namespace thermo
