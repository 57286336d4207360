// Zeroed host memory, page-aligned, with large pages where the system gives them. Pages are taken when first
// touched, so a buffer sized for the worst case costs what is used.
#pragma once

#include <cstddef>

namespace thermo {

class HostBuffer {
 public:
  static constexpr size_t kPageBytes = 4096;  // sizes are rounded up to this

  HostBuffer() = default;
  explicit HostBuffer(size_t n_bytes);  // throws MemoryError
  ~HostBuffer();
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }
  template <class T>
  T* as() const noexcept {
    return reinterpret_cast<T*>(data_);
  }
  // Gives the pages of the first n bytes back; they read as zero afterwards.
  void reset(size_t n_bytes) noexcept;

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Takes the pages of this memory now, instead of when they are first written. They keep what they have.
void touch_pages(std::byte* data, size_t n_bytes) noexcept;

}  // namespace thermo
