// The architectures, one description file each: which keys a file has, which blocks follow from them, and the
// shapes of published models. See docs/add-an-architecture.md.
//
// This folder knows the file format and model/network.h; it includes no kernel, no weights and no back end.
#pragma once

#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "model/arch/keys.h"
#include "model/model_config.h"

namespace thermo {

// A published model as metadata: what `synth` writes random weights for. Keys stand without their prefix,
// those of the tokenizer as they are; a list has one value per layer.
struct ShapeKey {
  std::string_view key;
  std::variant<int, float, bool, std::string_view, std::vector<int>, std::vector<bool>> value;
};
struct ModelShape {
  std::string_view name;
  bool tied;  // token_embd is the output matrix too
  std::vector<ShapeKey> keys;
};

struct Architecture {
  std::string_view name;  // general.architecture, and the prefix of the keys
  // Reads the keys that are not common to all and builds the network. Throws LoadError.
  void (*describe)(const Keys& keys, ModelConfig& config);
  std::vector<ModelShape> (*shapes)();
  bool nextn = false;  // files may have a next-token block
};

std::span<const Architecture* const> architectures();
const Architecture* find_architecture(std::string_view name);  // nullptr: unknown

// Each at the end of its description file.
extern const Architecture kQwen35Moe, kQwen35, kLaguna, kQwen3Moe;

}  // namespace thermo
