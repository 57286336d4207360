#include "model/arch/architecture.h"

namespace thermo {
namespace {

constexpr Architecture kArchitectures[] = {
    {"qwen35moe", describe_qwen35moe, shapes_qwen35moe, true},
    {"qwen35", describe_qwen35, shapes_qwen35, true},
    {"laguna", describe_laguna, shapes_laguna},
};

}  // namespace

std::span<const Architecture> architectures() {
  return kArchitectures;
}

const Architecture* find_architecture(std::string_view name) {
  for (const Architecture& architecture : kArchitectures)
    if (architecture.name == name) return &architecture;
  return nullptr;
}

}  // namespace thermo
