// An entry of the list of what is taken on a GPU.
#pragma once

#include <cstdint>
#include <string>

namespace thermo {

struct GpuMemoryItem {
  std::string name;
  uint64_t bytes = 0;
};

}  // namespace thermo
