// How the positions of a model are stretched if not as its file says; named as llama.cpp names it (rope
// scaling, YaRN).
#pragma once

#include <cstdint>
#include <optional>

namespace thermo {

struct ModelConfig;

struct RopeOverride {
  enum class Kind : uint8_t { File, None, Linear, Yarn };
  Kind kind = Kind::File;
  std::optional<double> factor = {};  // nullopt: the file's
  // Of YaRN.
  int original_context = 0;  // 0: the file's, else the training length
  // nullopt: the file's, else the usual ones.
  std::optional<double> extrapolation = {}, attention = {}, beta_fast = {}, beta_slow = {};

  bool has_yarn_numbers() const {
    return original_context > 0 || extrapolation || attention || beta_fast || beta_slow;
  }
  bool operator==(const RopeOverride&) const = default;
};

// Puts it into the rotation of full attention, and a longer training length where that follows from it.
// Layers with a window look no further than before and stay as they are. A factor alone is linear scaling, as
// in llama.cpp. Throws ConfigError: values out of range, or that need others which neither it nor the file
// has.
void override_rope(const RopeOverride& rope, ModelConfig& config);

}  // namespace thermo
