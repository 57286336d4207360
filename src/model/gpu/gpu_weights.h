// The weights of a model in GPU memory: the host's panels, byte for byte, and the small vectors as floats.
#pragma once

#include <array>
#include <map>
#include <set>
#include <vector>

#include "base/thread_pool.h"
#include "device/buffer.h"
#include "device/stream.h"
#include "kernels/linear/device_matrix.h"
#include "model/weights.h"

namespace thermo {

class GpuExperts;

// As BlockWeights, in GPU memory.
struct GpuBlockWeights {
  // n_rows 0 where the block has none. Those of routed experts: shapes, `panels` counts from the expert's
  // address.
  std::array<DeviceMatrix, kRoles> matrices;
  std::array<const float*, kRoles> vectors{};
  const uint8_t* const* experts = nullptr;  // [n_expert] in device memory: where each one's gate panels lie;
                                            // nullptr: cold

  const DeviceMatrix& operator[](Role role) const { return matrices[static_cast<size_t>(role)]; }
  DeviceMatrix& operator[](Role role) { return matrices[static_cast<size_t>(role)]; }
  const float* floats(Role role) const { return vectors[static_cast<size_t>(role)]; }  // nullptr: none
};

struct GpuLayerWeights {
  std::vector<GpuBlockWeights> blocks;
};

class GpuWeights {
 public:
  // As the network has them; layers of the main stack.
  std::vector<GpuBlockWeights> input, output, features;
  std::vector<GpuLayerWeights> layers;

  GpuWeights() = default;
  // Packs what is not packed on all threads, through page-locked staging memory. Throws MemoryError,
  // CudaError. `experts`: nullptr, or where the routed experts are instead. `target`: nullptr, or weights
  // that outlive these; matrices that are there already are used, not copied.
  GpuWeights(const ModelConfig& config, const Weights& weights, const GpuExperts* experts,
             const GpuWeights* target, ThreadPool& pool, const LoadProgressFn& progress);

  // The matrices that such weights hold, by where they are in their file; experts are not among them.
  using MatrixSet = std::set<const std::byte*>;
  static MatrixSet matrices_of(const ModelConfig& config, const Weights& weights);
  // `shared`: matrices that another model has.
  static uint64_t planned_bytes(const ModelConfig& config, const Weights& weights, bool with_experts,
                                MatrixSet shared = {});
  // The vectors, and the table of experts.
  static uint64_t planned_small_bytes(const ModelConfig& config, const Weights& weights, bool with_experts);

 private:
  DeviceBuffer panels_, vectors_, tables_;
  std::map<const std::byte*, DeviceMatrix> matrices_;  // by where they are in their file
};

}  // namespace thermo
