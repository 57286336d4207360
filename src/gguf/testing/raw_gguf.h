// Files made byte by byte, and what refusing them says; for the tests of this folder.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/units.h"
#include "gguf/gguf_file.h"

namespace thermo {

// Builds files byte by byte, even those that GgufWriter refuses to write.
class Raw {
 public:
  Raw& text(std::string_view text) {
    for (const char c : text) bytes_.push_back(static_cast<std::byte>(c));
    return *this;
  }
  template <class T>
  Raw& num(T value) {
    for (const std::byte byte : std::bit_cast<std::array<std::byte, sizeof(T)>>(value))
      bytes_.push_back(byte);
    return *this;
  }
  Raw& string(std::string_view value) { return num(static_cast<uint64_t>(value.size())).text(value); }
  Raw& header(uint64_t n_tensors, uint64_t n_entries, uint32_t version = 3) {
    return text("GGUF").num(version).num(n_tensors).num(n_entries);
  }
  Raw& key(std::string_view name, GgufType type) { return string(name).num(static_cast<uint32_t>(type)); }
  Raw& tensor(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset) {
    string(name).num(static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) num(dim);
    return num(type).num(offset);
  }
  // Padding, then n bytes of data.
  Raw& data(size_t n, size_t alignment = 32) {
    bytes_.resize(align_up(bytes_.size(), alignment) + n);
    return *this;
  }
  Raw& zeros(size_t n) {
    bytes_.resize(bytes_.size() + n);
    return *this;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

inline constexpr uint32_t kF32 = 0;
inline constexpr uint32_t kQ4K = 12;

// The message of the LoadError that `action` throws; the test fails when it throws none.
inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const LoadError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a LoadError";
  return {};
}

inline std::string open_error(const std::vector<std::byte>& bytes) {
  return error_of([&] { GgufFile(bytes, "test.gguf"); });
}
inline std::string open_error(const Raw& raw) {
  return open_error(raw.bytes());
}
inline std::string open_error(std::string_view text) {
  return open_error(Raw().text(text));
}
inline std::string path_error(const std::string& path) {
  return error_of([&] { GgufFile file(path); });
}

// Reads everything there is, so that a sanitizer sees a wrong range.
inline size_t walk(const GgufFile& file) {
  size_t sum = 0;
  for (const GgufEntry& entry : file.metadata()) {
    sum += describe_type(entry.value).size() + describe_value(entry.value).size();
    if (entry.value.is_array() && entry.value.element_type == GgufType::String)
      for (const std::string_view text : file.require_strings(entry.key)) sum += text.size();
  }
  for (const GgufTensor& tensor : file.tensors()) {
    EXPECT_EQ(file.find_tensor(tensor.name), &tensor);
    for (uint64_t i = 0; i < tensor.n_bytes; ++i) sum += static_cast<size_t>(tensor.data[i]);
  }
  return sum;
}

inline std::vector<std::byte> filled(size_t n, int seed) {
  std::vector<std::byte> bytes(n);
  for (size_t i = 0; i < n; ++i)
    bytes[i] = static_cast<std::byte>((i * 7 + static_cast<size_t>(seed)) & 0xFF);
  return bytes;
}

}  // namespace thermo
