// The memory nodes of this machine (NUMA): which cores are beside which memory.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace thermo {

struct MemoryNode {
  int id = 0;
  std::vector<int> cores;  // may be empty: memory alone
  bool has_memory = true;

  bool operator==(const MemoryNode&) const = default;
};

// By their numbers; empty where the system does not say. `folder`: where it says so.
std::vector<MemoryNode> memory_nodes(const std::string& folder = "/sys/devices/system/node");

// "0-3,8": the numbers it stands for, as the system writes lists of cores and nodes; empty if it is no list.
std::vector<int> numbers_of_list(std::string_view text);

// These cores in another order: the first of each node, then the second of each. Those of no node come last.
std::vector<int> cores_in_turn(std::span<const int> cores, std::span<const MemoryNode> nodes);

// Those of these cores that are on the same node as `core`; all if that has none.
std::vector<int> cores_beside(int core, std::span<const int> cores, std::span<const MemoryNode> nodes);

// Spreads what this thread, and threads that it starts from now on, allocate over the memory of all nodes,
// page by page. False, with errno set, where the system does not allow it.
bool interleave_memory(std::span<const MemoryNode> nodes);

}  // namespace thermo
