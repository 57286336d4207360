// The tensors of a model as the kernels want them: matrices repacked into panels (or, without repacking, left
// in the mapping), small vectors as floats. Shapes are checked while binding, so a forward pass trusts them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "experts/catalog.h"
#include "experts/forecast.h"
#include "kernels/linear/matrix.h"
#include "model/load_progress.h"
#include "model/model_config.h"

namespace thermo {

class GgufFile;
class ThreadPool;

struct AttentionWeights {
  Matrix q, k, v, output;
  Matrix gate;  // laguna; qwen35 keeps it inside q
  std::vector<float> q_norm, k_norm;
};

struct DeltaNetWeights {
  Matrix qkv, z, alpha, beta, output;
  std::vector<float> conv;  // [channels][taps]
  std::vector<float> a, dt_bias, norm;
};

struct MoeWeights {
  Matrix router;
  std::vector<float> router_bias;  // laguna, added for the choice only; else empty
  std::vector<Ffn> experts;        // one expert's matrices lie together in memory
  Ffn shared;
  std::vector<float> shared_gate;  // qwen35moe; else empty
};

struct LayerWeights {
  std::vector<float> attn_norm, ffn_norm;
  std::optional<AttentionWeights> attention;
  std::optional<DeltaNetWeights> delta_net;
  std::optional<MoeWeights> moe;
  std::optional<Ffn> ffn;
};

// The next-token block: predicts token p + 1 from the trunk's state at p - 1 and the token at p.
struct NextnWeights {
  Matrix eh_proj;
  std::vector<float> embd_norm, hidden_norm, head_norm;
  Matrix token_embd, output;  // the trunk's where the file has none of its own
};

class Weights {
 public:
  Matrix token_embd;  // rows only: looked up, not multiplied (unless tied to `output`)
  Matrix output;
  std::vector<float> output_norm;
  std::vector<LayerWeights> layers;  // n_layer + n_nextn
  std::optional<NextnWeights> nextn;

  // Bytes of the matrices a plain decode step of one row reads.
  uint64_t bytes_per_token = 0;
  // Bytes held by repacked matrices; 0 without repacking.
  uint64_t packed_bytes = 0;
  uint64_t n_params = 0;

  // Binds: views of the file, shapes checked. Throws LoadError.
  static Weights bind(const ModelConfig& config, const GgufFile& file);
  // Binds and, with `repack`, repacks on all threads of the pool. `file` must outlive the result. Throws
  // LoadError (a tensor missing or of the wrong shape) and MemoryError. Without `pack_experts` the routed
  // experts of the main stack stay views of the file: somebody else (ExpertRunner) keeps them.
  static Weights load(const ModelConfig& config, const GgufFile& file, bool repack, ThreadPool& pool,
                      const LoadProgressFn& progress, bool pack_experts = true);
  // Bytes that load() will take for panels: arithmetic only.
  static uint64_t planned_packed_bytes(const ModelConfig& config, const GgufFile& file,
                                       bool pack_experts = true);

  // The largest panel of any matrix that is packed on the fly; 0 when all are repacked, or kept elsewhere.
  size_t max_unpacked_panel_bytes() const;

  Weights(Weights&&) noexcept;
  Weights& operator=(Weights&&) noexcept;
  ~Weights();

 private:
  Weights();
  struct Storage;
  std::unique_ptr<Storage> storage_;
};

// The routers of the main stack, one for each layer, dense ones included; views of `weights`.
std::vector<RouterView> router_views(const ModelConfig& config, const Weights& weights);

// The routed experts of the main stack.
ExpertCatalog expert_catalog(const ModelConfig& config, const Weights& weights);

}  // namespace thermo
