// Computes the routed experts of a layer when they are not all packed in main memory. The model calls it once
// per layer; if all experts are at hand there is no runner, and the model multiplies directly.
#pragma once

#include <span>
#include <string_view>

#include "experts/expert_place.h"
#include "experts/heat.h"
#include "experts/telemetry.h"
#include "kernels/expert_ffn/expert_ffn.h"

namespace thermo {

// A layer's routed pairs, sorted by expert, and its shared expert.
struct RoutedLayer {
  int layer = 0;
  const Ffn* experts = nullptr;  // views of the layer's experts; a routed group's number is its index here
  int n_routed = 0;              // groups of args.groups that are routed; one after them is the shared expert
  int n_rows = 0;
  ExpertFfnArgs args;  // adds into y
  ExpertFfnScratch& scratch;
  const RowOpKernels& row_ops;
  const LinearContext& linear;

  int expert_of(const FfnGroup& group) const { return static_cast<int>(group.ffn - experts); }
};

class ExpertRunner {
 public:
  virtual ~ExpertRunner() = default;

  // Around every step of the model. In between, the model counts the heat of the step's uses.
  virtual void begin_step(int n_rows) noexcept = 0;
  virtual void end_step() noexcept = 0;
  // y += the outputs of the shared expert and of every pair's expert.
  virtual void run(const RoutedLayer& layer) noexcept = 0;

  // Between steps: heat and hot experts as they were right after loading. False: it cannot.
  virtual bool reset() = 0;
  virtual HeatMap& heat() noexcept = 0;
  virtual ExpertTelemetry telemetry() const noexcept = 0;
  virtual void places(std::span<ExpertPlace> out) const noexcept = 0;  // see ExpertCore
  virtual std::span<const LayerUses> layer_uses() const noexcept = 0;
  // Why results can no longer be trusted; empty while they can.
  virtual std::string_view fault() const noexcept = 0;
};

}  // namespace thermo
