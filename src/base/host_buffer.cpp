#include "base/host_buffer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <utility>

#include "base/error.h"
#include "base/units.h"

namespace thermo {

HostBuffer::HostBuffer(size_t n_bytes) : size_(align_up<size_t>(n_bytes, kPageBytes)) {
  if (size_ == 0) return;
  void* address =
      ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED)
    throw MemoryError(
        fmt::format(
            "the system refused {} of memory; use a smaller context, or weights that stay in the file",
            format_bytes(size_)),
        Remedy::LessMemory);
  data_ = static_cast<std::byte*>(address);
  if (size_ >= 4 * MiB) ::madvise(address, size_, MADV_HUGEPAGE);
}

HostBuffer::~HostBuffer() {
  if (data_) ::munmap(data_, size_);
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void HostBuffer::reset(size_t n_bytes) noexcept {
  if (data_ && n_bytes > 0) ::madvise(data_, n_bytes < size_ ? n_bytes : size_, MADV_DONTNEED);
}

void touch_pages(std::byte* data, size_t n_bytes) noexcept {
  for (size_t at = 0; at < n_bytes; at += HostBuffer::kPageBytes) {
    volatile std::byte& byte = data[at];
    byte = byte;
  }
}

}  // namespace thermo
