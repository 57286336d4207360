#include "cli/device_list.h"

#include <fmt/format.h>

#include "base/cpu_info.h"
#include "base/error.h"
#include "engine/gpu_backend.h"

namespace thermo {

std::string device_list() {
  constexpr int kMostGpus = 16;
  const auto line = [](const std::string& id, const std::string& name, uint64_t total, uint64_t free) {
    return fmt::format("  {}: {} ({} MiB, {} MiB free)\n", id, name, total >> 20, free >> 20);
  };
  std::string out = "Available devices:\n";
  for (int i = 0; i < kMostGpus; ++i) {
    try {
      std::string note;
      const auto gpu = choose_gpu({.kind = DeviceChoice::Kind::Gpu, .gpu = i}, note);
      out += line(fmt::format("cuda:{}", i), gpu->name, gpu->total_bytes, gpu->free_bytes);
    } catch (const ThermoError&) {
      break;  // there is no such card, or none at all
    }
  }
  return out + line("cpu", cpu_info().name, cpu_info().memory_bytes, available_memory_bytes());
}

}  // namespace thermo
