#include "device/copy_in.h"

#include <cstdint>

#include "device/launch.cuh"

namespace thermo {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) copy_in_kernel(uint32_t* to, const uint32_t* from, size_t n) {
  wait_for_inputs();
  const size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) to[i] = __ldcv(from + i);
  __threadfence();  // later kernels read some of it before they wait
}

}  // namespace

void copy_in_cuda(void* to, const void* from, size_t n_bytes, StreamView stream) noexcept {
  const size_t n = n_bytes / sizeof(uint32_t);
  if (n == 0) return;
  launch(copy_in_kernel, static_cast<unsigned>((n + kThreads - 1) / kThreads), kThreads, 0, stream,
         static_cast<uint32_t*>(to), static_cast<const uint32_t*>(from), n);
}

}  // namespace thermo
