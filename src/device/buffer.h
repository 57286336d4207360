// Owners of GPU memory and of page-locked host memory. Move-only; the address lives as long as the owner.
#pragma once

#include <cstddef>

namespace thermo {

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t n_bytes);  // zeroed; throws MemoryError, CudaError
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }
  template <class T>
  T* as() const noexcept {
    return reinterpret_cast<T*>(data_);
  }

  // Sizes of all that exist now, to check a memory plan against.
  static size_t total_bytes() noexcept;

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Host memory that the GPU copies from and to directly, and that its kernels read and write.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(size_t n_bytes);  // zeroed
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }
  template <class T>
  T* as() const noexcept {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Page-locks memory that another object owns, for its own lifetime. For memory that is too large to be
// allocated page-locked: locking pages that are already there (large ones) is far faster than allocating
// locked ones.
class PageLock {
 public:
  PageLock() = default;
  // Not locked() when the system refuses: the memory works as before, only slower.
  PageLock(void* data, size_t n_bytes) noexcept;
  ~PageLock();
  PageLock(PageLock&& other) noexcept;
  PageLock& operator=(PageLock&& other) noexcept;
  PageLock(const PageLock&) = delete;
  PageLock& operator=(const PageLock&) = delete;

  bool locked() const noexcept { return data_ != nullptr; }

 private:
  void* data_ = nullptr;
};

}  // namespace thermo
