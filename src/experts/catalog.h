// Which experts a model has: how many in each layer, how large, and where the file holds them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/linear/matrix.h"

namespace thermo {

// The experts of one layer. They all have the same shapes and types, so they have the same size.
struct ExpertLayer {
  std::vector<Ffn> experts;   // views of the file; empty: a dense layer
  uint64_t expert_bytes = 0;  // packed: gate, up, down one after another, each aligned to kExpertAlign
  uint64_t up_offset = 0;     // from the expert's address
  uint64_t down_offset = 0;

  int n_expert() const { return static_cast<int>(experts.size()); }
};

inline constexpr uint64_t kExpertAlign = 256;

struct ExpertCatalog {
  std::vector<ExpertLayer> layers;  // of the main stack, in order; dense layers included
  int n_expert = 0;                 // of a layer that has any
  int n_active = 0;                 // chosen for each row
  int n_embd = 0;

  // `layers[l]`: the experts of layer l as views of the file, empty for a dense layer.
  static ExpertCatalog of(std::vector<std::vector<Ffn>> layers, int n_active, int n_embd);

  uint64_t total_bytes() const;  // of all experts, packed
  uint64_t max_expert_bytes() const;
  int n_moe_layers() const;
  // The expert packed at `address`: the view's shapes with panels there.
  Ffn packed_at(int layer, int expert, const std::byte* address) const;
};

}  // namespace thermo
