// A failed CUDA call at load becomes an exception; inside a step it becomes the sticky fault of whoever runs
// it. For .cpp files: not every nvcc compiles fmt.
#pragma once

#include <cuda_runtime.h>
#include <fmt/format.h>

#include "base/error.h"

namespace thermo {

// A device that is missing, too old, or failed.
class CudaError : public ThermoError {
 public:
  using ThermoError::ThermoError;
};

inline void cuda_check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // whoever catches this and goes on must not find it in the next step
  if (status == cudaErrorMemoryAllocation)
    throw MemoryError(
        fmt::format("{}: the GPU has too little memory; use a smaller context or another quantisation", what),
        Remedy::SmallerContext);
  throw CudaError(ExitCode::Device, fmt::format("{}: {}", what, cudaGetErrorString(status)));
}

}  // namespace thermo
