// The weights of a model in GPU memory: the host's panels, byte for byte, and the small vectors as floats.
#pragma once

#include <vector>

#include "base/thread_pool.h"
#include "device/buffer.h"
#include "device/stream.h"
#include "kernels/linear/device_matrix.h"
#include "model/weights.h"

namespace thermo {

class GpuExperts;

struct GpuAttentionWeights {
  DeviceMatrix q, k, v, gate, output;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
};

struct GpuDeltaNetWeights {
  DeviceMatrix qkv, z, alpha, beta, output;
  const float *conv = nullptr, *a = nullptr, *dt_bias = nullptr, *norm = nullptr;
};

// Routed experts (none in a dense layer) and the shared or dense FFN.
struct GpuFfnWeights {
  DeviceMatrix router;
  const float* router_bias = nullptr;
  const uint8_t* const* experts = nullptr;  // [n_expert] in device memory: where each one's gate panels lie;
                                            // nullptr: cold
  DeviceMatrix gate, up, down;              // shapes; `panels` counts from the expert's address
  DeviceMatrix shared_gate, shared_up, shared_down;
  const float* shared_weight = nullptr;
  bool moe = false;
};

struct GpuLayerWeights {
  const float *attn_norm = nullptr, *ffn_norm = nullptr;
  GpuAttentionWeights attention;
  GpuDeltaNetWeights delta_net;
  GpuFfnWeights ffn;
};

class GpuWeights {
 public:
  DeviceMatrix token_embd, output;
  const float* output_norm = nullptr;
  std::vector<GpuLayerWeights> layers;  // main stack

  GpuWeights() = default;
  // Packs what is not packed on all threads, through page-locked staging memory. Throws MemoryError,
  // CudaError. `experts`: nullptr, or where the routed experts are instead.
  GpuWeights(const ModelConfig& config, const Weights& weights, const GpuExperts* experts, ThreadPool& pool,
             const LoadProgressFn& progress);

  static uint64_t planned_bytes(const ModelConfig& config, const Weights& weights, bool with_experts);
  // The vectors, and the table of experts.
  static uint64_t planned_small_bytes(const ModelConfig& config, const Weights& weights, bool with_experts);

 private:
  DeviceBuffer panels_, vectors_, tables_;
};

}  // namespace thermo
