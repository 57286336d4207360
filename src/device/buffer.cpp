#include "device/buffer.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "device/cuda_check.h"

namespace thermo {
namespace {
std::atomic<size_t> g_total_bytes{0};
}  // namespace

DeviceBuffer::DeviceBuffer(size_t n_bytes) : size_(n_bytes) {
  if (n_bytes == 0) return;
  cuda_check(cudaMalloc(reinterpret_cast<void**>(&data_), n_bytes), "taking GPU memory");
  g_total_bytes += n_bytes;
  // Both return before the memory is cleared, and our streams do not wait for the stream that clears it. What
  // they copied there first would be cleared afterwards.
  cuda_check(cudaMemset(data_, 0, n_bytes), "clearing GPU memory");
  cuda_check(cudaStreamSynchronize(cudaStreamLegacy), "clearing GPU memory");
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  g_total_bytes -= size_;
  if (cudaFree(data_) != cudaSuccess) log_warning("device", "GPU memory could not be given back");
}

size_t DeviceBuffer::total_bytes() noexcept {
  return g_total_bytes;
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

PinnedBuffer::PinnedBuffer(size_t n_bytes) : size_(n_bytes) {
  if (n_bytes == 0) return;
  cuda_check(cudaMallocHost(reinterpret_cast<void**>(&data_), n_bytes), "taking page-locked memory");
  std::memset(data_, 0, n_bytes);
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr && cudaFreeHost(data_) != cudaSuccess)
    log_warning("device", "page-locked memory could not be given back");
}

PinnedBuffer::PinnedBuffer(PinnedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

PageLock::PageLock(void* data, size_t n_bytes) noexcept {
  if (n_bytes == 0) return;
  if (cudaHostRegister(data, n_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped) == cudaSuccess)
    data_ = data;
  else
    cudaGetLastError();  // a refusal is not a fault
}
PageLock::~PageLock() {
  if (data_ != nullptr && cudaHostUnregister(data_) != cudaSuccess)
    log_warning("device", "memory could not be unlocked");
}
PageLock::PageLock(PageLock&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
PageLock& PageLock::operator=(PageLock&& other) noexcept {
  std::swap(data_, other.data_);
  return *this;
}

}  // namespace thermo
