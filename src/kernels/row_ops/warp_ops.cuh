// Sums over a warp or a block, and the activation functions, as every kernel uses them.
#pragma once

#include <cuda_fp16.h>

#include <climits>

#include "kernels/quant_matmul/panel_mma.cuh"

namespace thermo {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
  for (int mask = 16; mask > 0; mask /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
#endif
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

__device__ __forceinline__ float silu(float x) {
  return x / (1.0f + expf(-x));
}
__device__ __forceinline__ float sigmoid_device(float x) {
  return 1.0f / (1.0f + expf(-x));
}
__device__ __forceinline__ float softplus_device(float x) {
  return x > 20.0f ? x : log1pf(expf(x));
}

// e^x with the bits of the processor's vector kernels (simd/math_impl.h): the same operations, none fused
// that is not fused there.
__device__ __forceinline__ float exp_exact(float x) {
  constexpr float kLowest = -87.336544f;
  const float t = fminf(88.37f, fmaxf(kLowest, x));
  const float n = rintf(__fmul_rn(t, 1.44269504f));
  float r = __fmaf_rn(n, -0.693359375f, t);
  r = __fmaf_rn(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __fmaf_rn(p, r, 1.3981999507e-3f);
  p = __fmaf_rn(p, r, 8.3334519073e-3f);
  p = __fmaf_rn(p, r, 4.1665795894e-2f);
  p = __fmaf_rn(p, r, 1.6666665459e-1f);
  p = __fmaf_rn(p, r, 5.0000001201e-1f);
  p = __fadd_rn(__fmaf_rn(p, __fmul_rn(r, r), r), 1.0f);
  const float power = __int_as_float((__float2int_rn(n) + 127) << 23);
  return isnan(x) ? x : x < kLowest ? 0.0f : __fmul_rn(p, power);
}
// silu(gate) * up, as swiglu of the processor.
__device__ __forceinline__ float swiglu_exact(float gate, float up) {
  return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, exp_exact(-gate))), up);
}

// A sum over experts, exact: terms are integers on a grid of 2^-32, so that neither their order nor who
// computed which of them shows. A term that is no number, or none below 2^31, makes the sum NaN.
struct GridSum {
  long long sum = 0;
  bool lost = false;

  __device__ __forceinline__ void add(float weight, float y) {
    const float term = __fmul_rn(weight, y);
    lost = lost || !(fabsf(term) < 2147483648.0f);
    sum += __float2ll_rn(__fmul_rn(term, 4294967296.0f));
  }
  // The part that another has summed up; the least number means that it is none.
  __device__ __forceinline__ void add_part(long long part) {
    lost = lost || part == LLONG_MIN;
    sum += part;
  }
  __device__ __forceinline__ long long part() const { return lost ? LLONG_MIN : sum; }
  __device__ __forceinline__ float value() const {
    return lost ? __uint_as_float(0x7fc00000u) : __fmul_rn(__ll2float_rn(sum), 1.0f / 4294967296.0f);
  }
};

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
