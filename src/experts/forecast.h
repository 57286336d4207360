// Guesses the experts of a layer from what the experts of an earlier layer read.
//
// A layer adds little to the residual stream. So a layer's router, applied one layer early, already names
// most of the experts it will choose, and applied some layers early it names many. The router reads rms(x) *
// norm, but the rows given here are scaled with the earlier layer's norm weights. So the routers are kept
// with the quotient of both folded in, and in four bits: a guess needs no more. A guess only decides what is
// read early. What is computed is what the router chose.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/host_buffer.h"
#include "experts/catalog.h"
#include "kernels/isa.h"
#include "kernels/linear/linear.h"
#include "kernels/route_topk/route_topk.h"

namespace thermo {

// A layer's router and the norm before it, as in the file. `router` empty: a dense layer.
struct RouterView {
  Matrix router;
  std::span<const float> bias;  // may be empty
  std::span<const float> norm;
};

class ExpertForecast {
 public:
  // From rows of the layer `distance` before. `bias` of the views must outlive it.
  ExpertForecast(const RouteConfig& config, std::span<const RouterView> layers, int distance, Isa isa,
                 ThreadPool& pool);

  // The most memory it takes for a model of these experts.
  static uint64_t planned_bytes(const ExpertCatalog& catalog);

  int distance() const { return distance_; }
  // Whether the experts of `layer` can be guessed: it and the one `distance` before it are routed.
  bool has(int layer) const {
    return layer < n_layers() && !layers_[static_cast<size_t>(layer)].router.empty();
  }
  int n_layers() const { return static_cast<int>(layers_.size()); }
  int n_expert() const { return config_.n_expert; }
  int n_panels() const { return thermo::n_panels(config_.n_expert); }

  // The form of the rows that score() reads.
  void add_format(ActFormats& formats) const;
  // The router's outputs of one panel, scores[16 * panel ...], for a row of x: what the experts of the layer
  // `distance` before read. Panels may be computed on any threads.
  void score(int layer, const ActBuffer& x, int row, int panel, float* scores) const noexcept;
  // What score() reads for these panels.
  std::span<const std::byte> weights(int layer, int begin, int end) const noexcept;
  // The likeliest ids.size() experts, best first. Overwrites the scores.
  void choose(int layer, float* scores, std::span<int32_t> ids) const noexcept;

 private:
  struct Layer {
    Matrix router;
    std::span<const float> bias;
  };
  RouteConfig config_;
  int distance_;
  const QuantMatmulKernels& kernels_;
  std::vector<Layer> layers_;
  HostBuffer memory_;
};

}  // namespace thermo
