#include "experts/catalog.h"

#include <algorithm>

#include "base/units.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

uint64_t bytes_of(const Matrix& m) {
  return align_up<uint64_t>(packed_matrix_bytes(m.dtype, m.n_rows, m.n_cols), kExpertAlign);
}

}  // namespace

ExpertCatalog ExpertCatalog::of(std::vector<std::vector<Ffn>> layers, int n_active, int n_embd) {
  ExpertCatalog catalog;
  catalog.n_active = n_active;
  catalog.n_embd = n_embd;
  for (std::vector<Ffn>& experts : layers) {
    ExpertLayer layer;
    layer.experts = std::move(experts);
    if (!layer.experts.empty()) {
      const Ffn& first = layer.experts.front();
      layer.up_offset = bytes_of(first.gate);
      layer.down_offset = layer.up_offset + bytes_of(first.up);
      layer.expert_bytes = layer.down_offset + bytes_of(first.down);
      catalog.n_expert = std::max(catalog.n_expert, layer.n_expert());
    }
    catalog.layers.push_back(std::move(layer));
  }
  return catalog;
}

uint64_t ExpertCatalog::total_bytes() const {
  uint64_t bytes = 0;
  for (const ExpertLayer& layer : layers)
    bytes += static_cast<uint64_t>(layer.n_expert()) * layer.expert_bytes;
  return bytes;
}

uint64_t ExpertCatalog::max_expert_bytes() const {
  uint64_t most = 0;
  for (const ExpertLayer& layer : layers) most = std::max(most, layer.expert_bytes);
  return most;
}

int ExpertCatalog::n_moe_layers() const {
  return static_cast<int>(
      std::count_if(layers.begin(), layers.end(), [](const ExpertLayer& l) { return l.n_expert() > 0; }));
}

Ffn ExpertCatalog::packed_at(int layer, int expert, const std::byte* address) const {
  const ExpertLayer& from = layers[static_cast<size_t>(layer)];
  Ffn ffn = from.experts[static_cast<size_t>(expert)];
  ffn.gate.panels = address;
  ffn.up.panels = address + from.up_offset;
  ffn.down.panels = address + from.down_offset;
  return ffn;
}

}  // namespace thermo
