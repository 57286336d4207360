// The monotonic clock in nanoseconds: what spans of time and the events of traces are measured with.
#pragma once

#include <chrono>
#include <cstdint>

namespace thermo {

inline int64_t now_ns() noexcept {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace thermo
