// Experts across GPU memory, main memory and the file: the GPU's side of hot and cold.
//
// Hot experts lie in slots; a table in device memory says where. A step of up to kMaxMailRows rows is one
// recorded graph whatever is hot: the router deals the chosen experts to three lanes,
//   hot      the slot is read like any weight,
//   fetched  the kernel reads the expert where it lies in page-locked host memory,
//   cpu      the pairs go to the mailbox; the thread that started the step answers with the sum,
// and the norm after the experts adds them up. Larger steps are queued layer by layer: hot experts first,
// then the cold ones in batches as a copy stream brings them into lent memory, few-row ones on the processor.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "device/stream.h"
#include "experts/expert_place.h"
#include "experts/heat.h"
#include "experts/split_options.h"
#include "experts/telemetry.h"
#include "kernels/expert_ffn/expert_ffn_cuda.h"
#include "kernels/isa.h"
#include "kernels/route_topk/cold_mail.h"
#include "model/backend.h"
#include "model/gpu/drafted_experts.h"
#include "model/gpu/gpu_memory.h"
#include "model/model_config.h"
#include "model/weights.h"

namespace thermo {

class ExpertStore;
class LaneSplit;
class ThreadPool;

class GpuExperts {
 public:
  // `weights` bound without repacking; its file must outlive this. Throws MemoryError, CudaError.
  GpuExperts(const ModelConfig& config, const Weights& weights, const ModelOptions& options, ThreadPool& pool,
             const LoadProgressFn& progress);
  ~GpuExperts();

  static std::vector<GpuMemoryItem> plan(const ModelConfig& config, const Weights& weights,
                                         const SplitOptions& options);

  // For the kernels of a layer. The addresses never change.
  const uint8_t* const* table(int layer) const noexcept;
  DeviceCold cold(int layer, const uint32_t* ticket, const int32_t* fetch_of) const noexcept;

  // Around a step of up to kMaxMailRows rows, on the thread that starts it: begin(), start the graph, serve()
  // until `end` is reached, finish(). begin() fills in what the step's input block needs. serve() gets the
  // rows of the graph, padding included, and those of the step; finish() counts those of the step. Heat of
  // uncommitted rows is counted by commit(), for those that are kept.
  void begin(int n_rows, uint32_t& ticket, std::span<int32_t> fetch_of, StreamView stream) noexcept;
  void serve(int n_rows, int n_valid, const Event& end) noexcept;
  void finish(std::span<const SequenceRows> groups) noexcept;
  void commit(int sequence, std::span<const int32_t> path) noexcept;

  // A larger step: begin_large(), run_large() for each routed layer, and when the stream has been
  // synchronised finish_large(). What its uncommitted rows chose is in `drafted`.
  void begin_large(int n_rows, StreamView stream) noexcept;
  void run_large(int layer, DeviceExpertArgs args, int n_rows, StreamView stream) noexcept;
  void finish_large(std::span<const SequenceRows> groups, const DraftedExperts& drafted,
                    StreamView stream) noexcept;

  // Why a step is void; empty: it is not.
  const char* fault() const noexcept;

  // Between steps: heat and hot experts as they were right after loading.
  void reset();
  ExpertTelemetry telemetry() const noexcept;
  void places(std::span<ExpertPlace> out) const noexcept;  // see ExpertCore
  const std::vector<LayerUses>& layer_uses() const noexcept;
  const HeatMap& heat() const noexcept;
  void set_heat(const HeatMap& heat);
  const LaneSplit& lanes() const noexcept;
  ExpertStore& store() noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
