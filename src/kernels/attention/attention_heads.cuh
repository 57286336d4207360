// A head on its way from its projection to the cache: norm, rotation, and how the cache stores it. A warp
// does one head, with the bits of attention_row.cuh.
#pragma once

#include <cuda_fp16.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

__device__ __forceinline__ void load_head(float* x, const float* from, int dim, int lane) {
  for (int d = lane; d < dim; d += 32) x[d] = from[d];
}

struct HeadTurn {
  const float* inv_freq;
  int n_rot;
  float magnitude;
  int position;
};

// x = the head normed and rotated. `x`: shared memory of the warp.
__device__ __forceinline__ void turn_head(float* x, const float* from, const float* norm, int dim, float eps,
                                          const HeadTurn& turn, int lane) {
  const int per = dim < 32 ? 1 : dim / 32;
  float square = 0.0f;
  for (int d = lane * per; d < min(dim, (lane + 1) * per); ++d) square = fmaf(from[d], from[d], square);
  const float scale = rsqrtf(warp_sum(square) / static_cast<float>(dim) + eps);
  for (int d = lane; d < dim; d += 32) x[d] = from[d] * (scale * norm[d]);
  __syncwarp();
  const int half_rot = turn.n_rot / 2;
  for (int i = lane; i < half_rot; i += 32) {
    float s, c;
    sincosf(static_cast<float>(turn.position) * turn.inv_freq[i], &s, &c);
    s *= turn.magnitude;
    c *= turn.magnitude;
    const float u = x[i], v = x[half_rot + i];
    x[i] = fmaf(u, c, -(v * s));
    x[half_rot + i] = fmaf(v, c, u * s);
  }
}

// To nearest even; NaN stays NaN.
__device__ __forceinline__ uint16_t bf16_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
__device__ __forceinline__ float bf16_value(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// Of a q4_0 block whose elements reach from low <= 0 to high >= 0: the farthest one becomes code 0.
__device__ __forceinline__ float q4_scale(float low, float high) {
  return (high >= -low ? high : low) / -8.0f;
}
__device__ __forceinline__ float q4_inverse(float scale) {
  return scale != 0.0f ? 1.0f / scale : 0.0f;
}
// 0 .. 15, for (code - 8) * scale. As the CPU rounds, to the bit.
__device__ __forceinline__ int q4_code(float x, float inverse) {
  return min(max(__float2int_rn(x * inverse), -8), 7) + 8;
}

inline __device__ void store_head(KvType type, std::byte* at, const float* x, int dim, int lane) {
  if (type == KvType::F32) {
    for (int d = lane; d < dim; d += 32) reinterpret_cast<float*>(at)[d] = x[d];
  } else if (type == KvType::F16) {
    for (int d = lane; d < dim; d += 32) reinterpret_cast<half*>(at)[d] = __float2half_rn(x[d]);
  } else if (type == KvType::BF16) {
    for (int d = lane; d < dim; d += 32) reinterpret_cast<uint16_t*>(at)[d] = bf16_bits(x[d]);
  } else if (type == KvType::Q4_0) {
    for (int b = 0; b < dim / 32; ++b) {
      const float mine = x[b * 32 + lane];
      float low = fminf(mine, 0.0f), high = fmaxf(mine, 0.0f);
      for (int mask = 16; mask > 0; mask /= 2) {
        low = fminf(low, __shfl_xor_sync(0xffffffffu, low, mask));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, mask));
      }
      const float d = q4_scale(low, high);
      const int code = q4_code(mine, q4_inverse(d)), other = __shfl_xor_sync(0xffffffffu, code, 16);
      if (lane == 0) *reinterpret_cast<half*>(at + b * 18) = __float2half_rn(d);
      if (lane < 16) at[b * 18 + 2 + lane] = static_cast<std::byte>(code | other << 4);
    }
  } else {
    for (int b = 0; b < dim / 32; ++b) {
      float top = fabsf(x[b * 32 + lane]);
      for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
      const float d = top / 127.0f;
      const int q = d > 0.0f ? __float2int_rn(x[b * 32 + lane] / d) : 0;
      if (lane == 0) *reinterpret_cast<half*>(at + b * 34) = __float2half_rn(d);
      *reinterpret_cast<int8_t*>(at + b * 34 + 2 + lane) = static_cast<int8_t>(q);
    }
  }
}

}  // namespace thermo
