// Metadata under an architecture's prefix, checked while it is read, with the file's path in every message.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/row_ops/row_ops.h"

namespace thermo {

class GgufFile;
struct GgufTensor;

// Bounds that no published model comes near; past them a file is damaged or hostile.
inline constexpr uint64_t kMaxLayers = 512;
inline constexpr uint64_t kMaxWidth = 1u << 20;
inline constexpr uint64_t kMaxHeads = 4096;
inline constexpr uint64_t kMaxContext = 1u << 24;
inline constexpr uint64_t kMaxExperts = 1024;
// What the processor's kernels take as the size of a head. Those of a GPU take fewer sizes and say so.
inline constexpr int kHeadMultiple = 8;

class Keys {
 public:
  // `assumed`: tensors that the file is taken to have.
  Keys(const GgufFile& file, std::string prefix, std::span<const std::string_view> assumed);

  std::string key(std::string_view name) const;
  int positive(std::string_view name, uint64_t max) const;
  int positive_or(std::string_view name, uint64_t max, int fallback) const;
  int count_or(std::string_view name, uint64_t max, int fallback) const;
  double number(std::string_view name) const;
  double number_or(std::string_view name, double fallback) const;
  double positive_number(std::string_view name) const;
  std::vector<int> positive_each(std::string_view name, size_t n, uint64_t max) const;
  // An even number of rotated dims, at most those of the head.
  int rope_dims(std::string_view name, int dims, int head_dim) const;
  // rope.scaling.*: how the rotation is scaled, if it is.
  void read_scaling(RopeConfig& rope) const;

  const GgufFile& file() const { return file_; }
  bool has_tensor(const std::string& name) const;
  const GgufTensor* find_tensor(const std::string& name) const;

  // Throws LoadError: the value makes no sense, or it does, but not to us.
  [[noreturn]] void fail(std::string_view name, const std::string& what) const;
  [[noreturn]] void not_supported(std::string_view name, const std::string& what) const;

 private:
  int in_range(std::string_view name, uint64_t value, uint64_t max) const;
  double finite(std::string_view name, double value) const;

  const GgufFile& file_;
  std::string prefix_;
  std::span<const std::string_view> assumed_;
};

}  // namespace thermo
