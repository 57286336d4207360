// How all our kernels are started: with dependent launch where the card has it, so that a kernel's start
// overlaps the end of the previous one. In exchange each kernel calls wait_for_inputs() before it touches
// anything that another kernel wrote. All of its threads do, even those without work, because the next kernel
// relies on that for everything earlier.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/device_info.h"
#include "device/stream.h"

namespace thermo {

__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start; it still waits for this one's end before it reads.
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Reads every line of a kernel's parameters. They come from memory at first use, and a kernel that waits for
// another has time to read them before. Not measured alone.
template <class Params>
__device__ __forceinline__ void touch_params(const Params& params) {
#pragma unroll
  for (size_t i = 0; i < sizeof(Params); i += 64)
    asm volatile("" ::"r"(*reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(&params) + i)));
}

// The clock that all multiprocessors share.
__device__ __forceinline__ uint64_t device_clock_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, StreamView stream,
            const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.handle;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent_launch() ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel,
                     static_cast<Params>(args)...);  // errors are sticky and seen at the end of the step
}

// More than 48 KiB of shared memory must be requested once per kernel. Requesting more than the card has,
// together with what the kernel declares itself, would be an error of the step. The request is limited to the
// rest, which is enough for the launches that fit.
template <class Kernel>
void allow_shared(Kernel* kernel, size_t bytes) {
  cudaFuncAttributes own{};
  cudaFuncGetAttributes(&own, kernel);
  const size_t most = device_in_use().max_shared_bytes - own.sharedSizeBytes;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(bytes < most ? bytes : most));
}

}  // namespace thermo
