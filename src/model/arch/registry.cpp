#include "model/arch/architecture.h"

namespace thermo {
namespace {

constexpr const Architecture* kArchitectures[] = {&kQwen35Moe, &kQwen35, &kLaguna, &kQwen3Moe};

}  // namespace

std::span<const Architecture* const> architectures() {
  return kArchitectures;
}

const Architecture* find_architecture(std::string_view name) {
  for (const Architecture* architecture : kArchitectures)
    if (architecture->name == name) return architecture;
  return nullptr;
}

}  // namespace thermo
