// What this machine's processor and memory are, read once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace thermo {

struct CpuInfo {
  std::string name;  // "AMD EPYC 9B14"
  int n_cores = 1;   // cores this process may run on (one for each SMT pair)
  int n_numa_nodes = 1;
  bool avx2 = false;          // with FMA, F16C and BMI2
  bool avx_vnni = false;      // VPDPBUSD on 32-byte vectors
  bool avx512 = false;        // F, BW, DQ, VL and VNNI together: what our kernels need
  bool amx_int8 = false;      // in the processor and granted by the kernel
  uint64_t memory_bytes = 0;  // physical, or the cgroup's limit where that is smaller
  uint64_t l2_bytes = 1u << 20;
  uint64_t l3_bytes = 0;
};

const CpuInfo& cpu_info();

// Cores this process may run on, one per physical core first, SMT siblings after them.
std::vector<int> usable_cores();
// The same without the siblings.
std::vector<int> usable_physical_cores();

// Memory that can be taken now without swapping; changes over time, so it is not cached.
uint64_t available_memory_bytes();

}  // namespace thermo
