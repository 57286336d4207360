// The tensors of a model as the kernels want them: matrices repacked into panels (or, without repacking, left
// in the mapping), small vectors as floats. Shapes are checked while binding, so a forward pass trusts them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
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

// The weights of one block of the network, by what they are to it.
class BlockWeights {
  template <class Self>
  static auto& of(Self& self, Role role) {
    switch (role) {
      case Role::FfnGate:
        return self.common.gate;
      case Role::FfnUp:
        return self.common.up;
      case Role::FfnDown:
        return self.common.down;
      default:
        return self.matrices[static_cast<size_t>(role)];
    }
  }

 public:
  std::array<Matrix, kRoles> matrices;  // empty where the block has none
  std::array<std::vector<float>, kRoles> vectors;
  Ffn common;                // FfnGate, FfnUp, FfnDown: what every row takes
  std::vector<Ffn> experts;  // one expert's matrices lie together in memory

  const Matrix& operator[](Role role) const { return of(*this, role); }
  Matrix& operator[](Role role) { return of(*this, role); }
  const std::vector<float>& vector(Role role) const { return vectors[static_cast<size_t>(role)]; }
  // nullptr: the block has none.
  const float* floats(Role role) const { return vector(role).empty() ? nullptr : vector(role).data(); }
};

struct LayerWeights {
  std::vector<BlockWeights> blocks;  // as the layer has them
};

class Weights {
 public:
  // As the network has them.
  std::vector<BlockWeights> input, output, features;
  std::vector<LayerWeights> layers;

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
  // Those of the next-token block as a network of its own (nextn_network()): views of `target`, which must
  // outlive the result.
  static Weights of_nextn(const ModelConfig& config, const Weights& target);
  // Those of a drafter of its own file: what the file lacks of embedding and head is a view of `target`,
  // which must outlive the result, as must the file.
  static Weights of_drafter(const ModelConfig& config, const GgufFile& file, const Weights& target,
                            bool repack, ThreadPool& pool);
  // Bytes that load() will take for panels: arithmetic only.
  static uint64_t planned_packed_bytes(const ModelConfig& config, const GgufFile& file,
                                       bool pack_experts = true);

  // The matrices that are repacked here, with their panels.
  std::vector<Matrix> packed_matrices(const ModelConfig& config) const;
  // The largest panel of any matrix that is packed on the fly; 0 when all are repacked, or kept elsewhere.
  size_t max_unpacked_panel_bytes(const ModelConfig& config) const;

  Weights(Weights&&) noexcept;
  Weights& operator=(Weights&&) noexcept;
  ~Weights();

 private:
  Weights();
  struct Storage;
  std::unique_ptr<Storage> storage_;
};

// Calls visit(block, weights) for the blocks of the main stack's layers, in order. `weights`: Weights, or
// what a back end made of them.
template <class WeightsT, class Visit>
void for_each_main_block(const ModelConfig& config, WeightsT& weights, const Visit& visit) {
  for (size_t l = 0; l < static_cast<size_t>(config.n_layer); ++l)
    for (size_t b = 0; b < config.network.layers[l].blocks.size(); ++b)
      visit(config.network.layers[l].blocks[b], weights.layers[l].blocks[b]);
}

// The routers of the main stack, one for each layer, dense ones included; views of `weights`. Empty: the
// model has none.
std::vector<RouterView> router_views(const ModelConfig& config, const Weights& weights);

// The routed experts of the main stack.
ExpertCatalog expert_catalog(const ModelConfig& config, const Weights& weights);

}  // namespace thermo
