#include "experts/host_tier.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

void pack_matrix(const Matrix& m, std::byte* out) {
  const size_t bytes = panel_bytes(m.dtype, m.n_cols);
  for (int p = 0; p < n_panels(m.n_rows); ++p)
    pack_panel(m.dtype, m.rows, m.n_rows, m.n_cols, p, out + static_cast<size_t>(p) * bytes);
}

}  // namespace

struct HostTier::Impl {
  const ExpertCatalog& catalog;
  std::span<std::byte> arena;
  bool complete = false;
  std::vector<uint64_t> first;  // of each layer in the arena

  Impl(const ExpertCatalog& c, const HostTierOptions& o) : catalog(c), arena(o.arena) {
    uint64_t at = 0;
    for (const ExpertLayer& layer : c.layers) {
      first.push_back(at);
      at += static_cast<uint64_t>(layer.n_expert()) * layer.expert_bytes;
    }
    if (at > arena.size())
      throw MemoryError(
          fmt::format("all experts take {}, the arena has {}", format_bytes(at), format_bytes(arena.size())));
  }

  std::byte* at(int layer, int expert) const noexcept {
    return arena.data() + first[static_cast<size_t>(layer)] +
           static_cast<uint64_t>(expert) * catalog.layers[static_cast<size_t>(layer)].expert_bytes;
  }
};

HostTier::HostTier(const ExpertCatalog& catalog, const HostTierOptions& options)
    : impl_(std::make_unique<Impl>(catalog, options)) {}
HostTier::~HostTier() = default;

uint64_t HostTier::bytes_for_all(const ExpertCatalog& catalog) {
  return catalog.total_bytes();
}
uint64_t HostTier::min_bytes(const ExpertCatalog& catalog) {
  return catalog.total_bytes();
}

void HostTier::load(ThreadPool& pool, std::span<const std::pair<int, int>>,
                    const std::function<void(uint64_t done, uint64_t total)>& progress) {
  const uint64_t total = impl_->catalog.total_bytes();
  uint64_t done = 0;
  if (progress) progress(0, total);
  for (size_t l = 0; l < impl_->catalog.layers.size(); ++l) {
    const ExpertLayer& layer = impl_->catalog.layers[l];
    pool.run(layer.n_expert(), [&](int e, int) {
      const Ffn& ffn = layer.experts[static_cast<size_t>(e)];
      std::byte* const to = impl_->at(static_cast<int>(l), e);
      pack_matrix(ffn.gate, to);
      pack_matrix(ffn.up, to + layer.up_offset);
      pack_matrix(ffn.down, to + layer.down_offset);
    });
    done += static_cast<uint64_t>(layer.n_expert()) * layer.expert_bytes;
    if (progress) progress(done, total);
  }
  impl_->complete = true;
}

bool HostTier::complete() const noexcept {
  return impl_->complete;
}
const std::byte* HostTier::address(int layer, int expert) const noexcept {
  return impl_->complete ? impl_->at(layer, expert) : nullptr;
}
void HostTier::want(int, std::span<const int32_t>) noexcept {}
Ffn HostTier::acquire(int layer, int expert) noexcept {
  return impl_->catalog.packed_at(layer, expert, impl_->at(layer, expert));
}
void HostTier::release(int, int) noexcept {}
HostTierStats HostTier::stats() const noexcept {
  return {};
}

}  // namespace thermo
