// The GPU side of the engine. In a build without CUDA there is no GPU to choose, and the rest is never
// called.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "model/backend.h"
#include "model/weights.h"

namespace thermo {

struct GpuChoice {
  int index = 0;
  std::string name;  // "NVIDIA H200"
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
  int n_multiprocessors = 0;
  int compute_capability = 0;  // 90: 9.0
  std::string bus_id = {};     // see EngineInfo
};

// The GPU that is meant: the one asked for, or ThermoError (exit code 6) when it cannot be used; the first
// that can be where the choice is ours, or nullopt with the reason in `note` when there is a driver but no
// usable card.
std::optional<GpuChoice> choose_gpu(const DeviceChoice& device, std::string& note);

// Bytes of its memory that nobody has taken, as of now.
uint64_t gpu_free_bytes(int index);

// A card of middling size with that much memory, to plan with; nullopt in a build without CUDA.
std::optional<GpuChoice> imagined_gpu(uint64_t bytes);

// Why a model of this shape cannot run on a GPU; empty: it can.
std::string gpu_refusal(const ModelConfig& config);

// Every byte that make_gpu_backend() takes on the device.
std::vector<MemoryPlanItem> plan_gpu_memory(const ModelConfig& config, const Weights& weights,
                                            const GpuChoice& gpu, const ModelOptions& options);

// And make_gpu_drafter().
uint64_t plan_gpu_drafter(const ModelConfig& config, const Weights& weights, const GpuChoice& gpu,
                          const ModelOptions& options, const ModelConfig& target,
                          const Weights& target_weights);
// Uncommitted rows of a sequence that the GPU in use can take.
int max_gpu_draft_rows(const ModelConfig& config);

// Bytes per second that the GPU in use reads from its memory; 0 when it has no memory left to try.
double measure_gpu_read_bandwidth();
// That main memory reaches it with; 0 when it cannot be measured.
double measure_gpu_link_bandwidth();

// `weights` bound without repacking; not needed afterwards, but with split experts its file is.
std::unique_ptr<Backend> make_gpu_backend(ModelConfig config, const Weights& weights,
                                          const ModelOptions& options, ThreadPool& pool,
                                          const LoadProgressFn& progress);

// A drafter's network for `target`, a backend of make_gpu_backend() that must outlive it: matrices that both
// have are there once. nullptr: on its own, to be verified.
std::unique_ptr<Backend> make_gpu_drafter(ModelConfig config, const Weights& weights,
                                          const ModelOptions& options, const Backend* target,
                                          ThreadPool& pool);

}  // namespace thermo
