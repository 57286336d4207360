// Sums over a warp or a block, and the activation functions, as every kernel uses them.
#pragma once

#include <cuda_fp16.h>

#include "kernels/quant_matmul/panel_mma.cuh"

namespace thermo {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

// Sum over the block; every thread gets it. `scratch`: 32 floats of shared memory, free again after the call.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  const int n_warps = (blockDim.x + 31) / 32;
  x = static_cast<int>(threadIdx.x % 32) < n_warps ? scratch[threadIdx.x % 32] : 0.0f;
  return warp_sum(x);
}

// Two sums at once.
__device__ __forceinline__ void block_sums(float& x, float& y, float2* scratch) {
  x = warp_sum(x);
  y = warp_sum(y);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = {x, y};
  __syncthreads();
  const int n_warps = (blockDim.x + 31) / 32;
  const float2 part =
      static_cast<int>(threadIdx.x % 32) < n_warps ? scratch[threadIdx.x % 32] : float2{0.0f, 0.0f};
  x = warp_sum(part.x);
  y = warp_sum(part.y);
}

__device__ __forceinline__ float silu(float x) {
  return x / (1.0f + expf(-x));
}
__device__ __forceinline__ float sigmoid_device(float x) {
  return 1.0f / (1.0f + expf(-x));
}
__device__ __forceinline__ float softplus_device(float x) {
  return x > 20.0f ? x : log1pf(expf(x));
}

// Rows that some kernel writes and a product reads. Either form may be missing.
struct ActsOut {
  half* f16 = nullptr;
  float* f32 = nullptr;
  int64_t f16_stride = 0;
  int64_t f32_stride = 0;
  float scale = 1.0f;

  __device__ __forceinline__ void put(int64_t row, int column, float x) const {
    if (f16 != nullptr)
      f16[row * f16_stride + act_place(column)] =
          __float2half_rn(fminf(fmaxf(x / scale, -65504.0f), 65504.0f));
    if (f32 != nullptr) f32[row * f32_stride + column] = x;
  }
};

}  // namespace thermo
