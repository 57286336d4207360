// What the system knows about this process and its memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace thermo {

uint64_t resident_bytes();
uint64_t virtual_bytes();
double process_cpu_seconds();

// Memory that nobody else shares and that can be written, used or not, without the stacks of threads.
// nullopt: it is not known, as under a sanitizer, which takes memory of its own.
std::optional<uint64_t> private_bytes();

// Threads of this process that run or wait for a core, as of now.
std::optional<int> n_running_threads();

// Bytes that all cores have moved to and from main memory, as the processor's own monitoring counts them.
// nullopt: it has none, or resctrl is not mounted there.
std::optional<uint64_t> memory_traffic_bytes(const std::string& resctrl = "/sys/fs/resctrl");

}  // namespace thermo
