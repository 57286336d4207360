// Where an expert is now, for displays and counters.
#pragma once

#include <cstdint>

namespace thermo {

enum class ExpertTier : uint8_t { File, Host, Device, Moving };  // moving: on its way to the device

struct ExpertPlace {
  ExpertTier tier = ExpertTier::Host;
  int64_t promoted_ns =
      0;  // of now_ns(), when it last came to the device; 0: it never did, or it began there
};

// Uses of the routed experts of one layer, and how many of them found the expert hot.
struct LayerUses {
  uint64_t hot = 0, all = 0;
};

}  // namespace thermo
