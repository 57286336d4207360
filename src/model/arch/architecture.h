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

// A published model as metadata: what `synth` writes random weights for. Keys stand without their prefix;
// a list has one value per layer.
struct ShapeKey {
  std::string_view key;
  std::variant<int, float, bool, std::string_view, std::vector<int>> value;
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

std::span<const Architecture> architectures();
const Architecture* find_architecture(std::string_view name);  // nullptr: unknown

// One for each description file.
void describe_qwen35moe(const Keys& keys, ModelConfig& config);
void describe_qwen35(const Keys& keys, ModelConfig& config);
void describe_laguna(const Keys& keys, ModelConfig& config);
std::vector<ModelShape> shapes_qwen35moe();
std::vector<ModelShape> shapes_qwen35();
std::vector<ModelShape> shapes_laguna();

}  // namespace thermo
