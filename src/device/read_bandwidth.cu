// Every thread keeps eight 16-byte reads in flight; a multiprocessor has two blocks of 512: 128 KiB in
// flight. A sum that no input reaches keeps the reads from being optimised away.
#include "device/read_bandwidth.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace thermo {
namespace {

constexpr size_t kMaxBytes = size_t{2} << 30, kMinBytes = size_t{256} << 20;
constexpr int kThreads = 512, kAhead = 8, kPasses = 12;

__global__ void __launch_bounds__(kThreads, 2) read_kernel(const uint4* data, size_t n, uint32_t* never) {
  const size_t stride = static_cast<size_t>(gridDim.x) * kThreads;
  uint32_t bits = 0;
  for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i + (kAhead - 1) * stride < n;
       i += kAhead * stride) {
    uint4 v[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) v[k] = __ldcs(data + i + k * stride);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) bits |= v[k].x | v[k].y | v[k].z | v[k].w;
  }
  if (bits != 0) *never = bits;  // the memory is zero
}

}  // namespace

double measure_device_read_bandwidth() noexcept {
  size_t free_bytes = 0, total_bytes = 0;
  int device = 0, n_multiprocessors = 0;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess || cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&n_multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return 0.0;
  const size_t stride = static_cast<size_t>(n_multiprocessors) * 2 * kThreads * kAhead * sizeof(uint4);
  const size_t n_bytes = std::min(kMaxBytes, free_bytes / 2) / stride * stride;
  if (n_bytes < kMinBytes) return 0.0;
  void* memory = nullptr;
  if (cudaMalloc(&memory, n_bytes + sizeof(uint32_t)) != cudaSuccess) {
    cudaGetLastError();
    return 0.0;
  }
  cudaEvent_t begin = nullptr, end = nullptr;
  float best_ms = 0.0f;
  if (cudaMemset(memory, 0, n_bytes + sizeof(uint32_t)) == cudaSuccess &&
      cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess) {
    for (int pass = 0; pass < kPasses; ++pass) {
      cudaEventRecord(begin);
      read_kernel<<<static_cast<unsigned>(2 * n_multiprocessors), kThreads>>>(
          static_cast<const uint4*>(memory), n_bytes / sizeof(uint4),
          reinterpret_cast<uint32_t*>(static_cast<char*>(memory) + n_bytes));
      cudaEventRecord(end);
      float ms = 0.0f;
      if (cudaGetLastError() != cudaSuccess || cudaEventSynchronize(end) != cudaSuccess ||
          cudaEventElapsedTime(&ms, begin, end) != cudaSuccess)
        break;
      if (pass > 0 && ms > 0.0f) best_ms = best_ms == 0.0f ? ms : std::min(best_ms, ms);
    }
  }
  if (begin != nullptr) cudaEventDestroy(begin);
  if (end != nullptr) cudaEventDestroy(end);
  cudaFree(memory);
  return best_ms > 0.0f ? static_cast<double>(n_bytes) / best_ms * 1e3 : 0.0;
}

double measure_device_link_bandwidth() noexcept {
  constexpr size_t kBytes = size_t{64} << 20;
  constexpr int kCopies = 8;
  void *device = nullptr, *host = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  float best_ms = 0.0f;
  if (cudaMalloc(&device, kBytes) == cudaSuccess && cudaMallocHost(&host, kBytes) == cudaSuccess &&
      cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess) {
    for (int copy = 0; copy < kCopies; ++copy) {
      float ms = 0.0f;
      cudaEventRecord(begin);
      cudaMemcpyAsync(device, host, kBytes, cudaMemcpyHostToDevice);
      cudaEventRecord(end);
      if (cudaEventSynchronize(end) != cudaSuccess || cudaEventElapsedTime(&ms, begin, end) != cudaSuccess)
        break;
      if (copy > 0 && ms > 0.0f) best_ms = best_ms == 0.0f ? ms : std::min(best_ms, ms);
    }
  }
  cudaGetLastError();
  if (begin != nullptr) cudaEventDestroy(begin);
  if (end != nullptr) cudaEventDestroy(end);
  if (host != nullptr) cudaFreeHost(host);
  if (device != nullptr) cudaFree(device);
  return best_ms > 0.0f ? static_cast<double>(kBytes) / best_ms * 1e3 : 0.0;
}

}  // namespace thermo
