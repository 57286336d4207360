// Buffers with a known pattern before and after them, to catch a kernel that writes past its output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace thermo::testing {

// n elements; `misalign` elements off a 64-byte boundary. The contents start as a NaN pattern (for floats),
// so an element that is never written shows up in the comparison.
template <class T>
class GuardedBuffer {
 public:
  explicit GuardedBuffer(size_t n, size_t misalign = 0) : n_(n), bytes_(2 * kBand + n * sizeof(T) + 64 + 64) {
    std::memset(bytes_.data(), kPattern, bytes_.size());
    const uintptr_t base = reinterpret_cast<uintptr_t>(bytes_.data()) + kBand;
    offset_ = (base + 63) / 64 * 64 - (base - kBand) + misalign * sizeof(T);
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  T* data() { return reinterpret_cast<T*>(bytes_.data() + offset_); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data() + offset_); }
  size_t size() const { return n_; }
  std::span<T> span() { return {data(), n_}; }
  std::span<const T> span() const { return {data(), n_}; }
  T& operator[](size_t i) { return data()[i]; }

  // Whether nothing was written outside the elements.
  bool intact() const {
    const size_t end = offset_ + n_ * sizeof(T);
    for (size_t i = 0; i < bytes_.size(); ++i)
      if ((i < offset_ || i >= end) && bytes_[i] != kPattern) return false;
    return true;
  }

 private:
  static constexpr size_t kBand = 256;
  static constexpr unsigned char kPattern = 0xff;  // NaN as a float, -1 as an integer

  size_t n_;
  std::vector<unsigned char> bytes_;
  size_t offset_ = 0;
};

}  // namespace thermo::testing
