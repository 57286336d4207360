// The parser of GgufFile: one file (or one part of a split model), from bytes to metadata and directory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf_file.h"

namespace thermo {

struct ParsedGguf {
  uint32_t version = 0;
  std::vector<GgufEntry> metadata;
  std::vector<uint32_t> metadata_by_key;  // positions in `metadata`, sorted by key; keys are unique
  std::vector<GgufTensor> tensors;        // ranges checked; names not yet known to be unique
};

// All results are views of `bytes`. Throws LoadError with `name` as the file's name.
ParsedGguf parse_gguf(std::span<const std::byte> bytes, const std::string& name, int part);

// Positions in `items`, sorted by `name`.
template <class T>
std::vector<uint32_t> sorted_order(const std::vector<T>& items, std::string_view T::*name) {
  std::vector<uint32_t> order(items.size());
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return items[a].*name < items[b].*name; });
  return order;
}

// The item called `wanted`, or nullptr. REQUIRES: order == sorted_order(items, name).
template <class T>
const T* find_sorted(const std::vector<T>& items, const std::vector<uint32_t>& order,
                     std::string_view T::*name, std::string_view wanted) noexcept {
  const auto at = std::lower_bound(order.begin(), order.end(), wanted,
                                   [&](uint32_t i, std::string_view w) { return items[i].*name < w; });
  return at != order.end() && items[*at].*name == wanted ? &items[*at] : nullptr;
}

}  // namespace thermo
