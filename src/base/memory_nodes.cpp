#include "base/memory_nodes.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>

namespace thermo {
namespace {

constexpr int kMaxNumber = 1 << 16;      // of a core or a node
constexpr int kInterleave = 3;           // MPOL_INTERLEAVE of linux/mempolicy.h
constexpr int kBits = 8 * sizeof(long);  // the system takes sets of nodes as words

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<int> read_number(std::string_view digits) {
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || value < 0 || value > kMaxNumber)
    return std::nullopt;
  return value;
}

// Index of the node that has the core; nodes.size(): none.
size_t node_of(int core, std::span<const MemoryNode> nodes) {
  size_t node = 0;
  while (node < nodes.size() &&
         std::find(nodes[node].cores.begin(), nodes[node].cores.end(), core) == nodes[node].cores.end())
    ++node;
  return node;
}

}  // namespace

std::vector<int> numbers_of_list(std::string_view text) {
  std::vector<int> numbers;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    const size_t dash = part.find('-');
    const std::optional<int> low = read_number(part.substr(0, dash)),
                             high = dash == std::string_view::npos ? low : read_number(part.substr(dash + 1));
    if (!low || !high || *low > *high) return {};
    for (int number = *low; number <= *high; ++number) numbers.push_back(number);
    text.remove_prefix(std::min(part.size() + 1, text.size()));
  }
  return numbers;
}

std::vector<MemoryNode> memory_nodes(const std::string& folder) {
  const std::vector<int> with_memory = numbers_of_list(read_line(folder + "/has_memory"));
  std::vector<MemoryNode> nodes;
  for (const int id : numbers_of_list(read_line(folder + "/online")))
    nodes.push_back(
        {.id = id,
         .cores = numbers_of_list(read_line(folder + "/node" + std::to_string(id) + "/cpulist")),
         .has_memory = std::find(with_memory.begin(), with_memory.end(), id) != with_memory.end()});
  return nodes;
}

std::vector<int> cores_in_turn(std::span<const int> cores, std::span<const MemoryNode> nodes) {
  std::vector<std::vector<int>> of_node(nodes.size() + 1);
  for (const int core : cores) of_node[node_of(core, nodes)].push_back(core);
  const std::vector<int> others = std::move(of_node.back());
  of_node.pop_back();
  std::vector<int> in_turn;
  for (size_t i = 0; in_turn.size() + others.size() < cores.size(); ++i)
    for (const std::vector<int>& own : of_node)
      if (i < own.size()) in_turn.push_back(own[i]);
  in_turn.insert(in_turn.end(), others.begin(), others.end());
  return in_turn;
}

std::vector<int> cores_beside(int core, std::span<const int> cores, std::span<const MemoryNode> nodes) {
  const size_t node = node_of(core, nodes);
  std::vector<int> beside;
  for (const int other : cores)
    if (node == nodes.size() || node_of(other, nodes) == node) beside.push_back(other);
  return beside;
}

bool interleave_memory(std::span<const MemoryNode> nodes) {
  std::vector<unsigned long> set;
  for (const MemoryNode& node : nodes) {
    if (!node.has_memory) continue;
    const auto word = static_cast<size_t>(node.id / kBits);
    if (word >= set.size()) set.resize(word + 1);
    set[word] |= 1ul << (node.id % kBits);
  }
  // The system counts one bit less than it is told.
  return ::syscall(SYS_set_mempolicy, kInterleave, set.data(), set.size() * kBits + 1) == 0;
}

}  // namespace thermo
