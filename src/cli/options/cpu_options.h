// Options of llama.cpp that say which cores threads use, and how urgently.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/options/options.h"

namespace thermo {

struct EngineOptions;

struct CpuFlags {
  bool pin_threads = true;
  std::optional<int> poll;  // how long threads spin before they sleep, 0 to 100; nullopt: as the engine does
  std::string numa;         // distribute, isolate or numactl; empty: not given
};

// --pin-threads, -C --cpu-mask, -Cr --cpu-range, --cpu-strict, --prio, --poll, --numa. Masks and the priority
// take effect at once, --numa before the command runs, for this thread and those it starts; so they must be
// read before any other is started.
void add_cpu_options(OptionSet& set, CpuFlags& flags);
// --numa alone.
Option& add_numa_option(OptionSet& set, std::string& how);

void set_cpu_options(const CpuFlags& flags, EngineOptions& options);
// llama.cpp has no unit for --poll; its default, 50, is our 50 ms.
constexpr uint32_t spin_us_of_poll(int poll) {
  return 1000 * static_cast<uint32_t>(poll);
}

// "0xF0", "f0": cores 4 to 7. "4-7": the same; an end may be left out. Throw ConfigError.
std::vector<int> cores_of_mask(std::string_view text);
std::vector<int> cores_of_range(std::string_view text);

}  // namespace thermo
