// What is reported while a model loads.
#pragma once

#include <cstdint>
#include <functional>

namespace thermo {

struct LoadProgress {
  const char* stage;
  uint64_t done_bytes;
  uint64_t total_bytes;
};
using LoadProgressFn = std::function<void(const LoadProgress&)>;

}  // namespace thermo
