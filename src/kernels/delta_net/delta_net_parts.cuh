// What the kernels of DeltaNet share: the convolution of a head, and the state in registers.
#pragma once

#include "device/cluster.cuh"
#include "kernels/delta_net/delta_net_cuda.h"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

inline constexpr int kMaxTaps = 8;

// Where the inputs of the taps of row r lie, newest first: the rows of the step back to its first ancestor,
// then the stored columns.
template <int kTaps>
struct TapSources {
  const float* at[kTaps];

  __device__ __forceinline__ TapSources(const DeviceDeltaNetArgs& a, int group_begin, const float* conv_state,
                                        int r) {
    int row = r, column = a.taps - 1;
#pragma unroll
    for (int back = 0; back < kTaps; ++back) {
      if (kTaps == kMaxTaps && back >= a.taps) break;
      if (row >= 0) {
        at[back] = a.u + static_cast<int64_t>(group_begin + row) * a.n_channels();
        row = a.rows.any_uncommitted ? a.rows.parent[group_begin + row] : row - 1;
      } else {
        at[back] = conv_state + static_cast<int64_t>(--column) * a.n_channels();
      }
    }
  }
};

// What follows the convolution of one head of q, k or v by one warp: SiLU; q and k are normalised, q is
// scaled.
template <int kDim, int kPer>
__device__ __forceinline__ void finish_head(float (&x)[kPer], bool norm, float scale, float* out, int lane) {
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    x[i] = lane + 32 * i < kDim ? silu(x[i]) : 0.0f;
    square = fmaf(x[i], x[i], square);
  }
  if (norm) scale *= rsqrtf(warp_sum(square) + 1e-6f);
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    if (lane + 32 * i < kDim) out[lane + 32 * i] = x[i] * (norm ? scale : 1.0f);
}

// One head of a row, by one warp.
template <int kDim, int kTaps>
__device__ __forceinline__ void convolve_taps(const DeviceDeltaNetArgs& a, int group_begin,
                                              const float* conv_state, int r, int first_channel, bool norm,
                                              float scale, float* out, int lane) {
  constexpr int kPer = (kDim + 31) / 32;
  const TapSources<kTaps> sources(a, group_begin, conv_state, r);
  float x[kPer] = {};
#pragma unroll
  for (int back = 0; back < kTaps; ++back) {
    if (kTaps == kMaxTaps && back >= a.taps) break;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int channel = first_channel + min(lane + 32 * i, kDim - 1);
      x[i] =
          fmaf(__ldg(a.conv_weight + channel * a.taps + a.taps - 1 - back), sources.at[back][channel], x[i]);
    }
  }
  finish_head<kDim>(x, norm, scale, out, lane);
}

// A head of the only row of a sequence, by one warp, four taps: everything but that row itself is loaded
// before it is known.
template <int kDim>
struct HeldTaps {
  static constexpr int kPer = (kDim + 31) / 32;
  float4 weight[kPer];
  float old[3][kPer];  // the stored columns, newest first

  static __device__ __forceinline__ int channel_of(int first, int i, int lane) {
    return first + min(lane + 32 * i, kDim - 1);
  }
  __device__ __forceinline__ void load(const DeviceDeltaNetArgs& a, const float* conv_state,
                                       int first_channel, int lane) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int channel = channel_of(first_channel, i, lane);
      weight[i] = __ldg(reinterpret_cast<const float4*>(a.conv_weight) + channel);
#pragma unroll
      for (int back = 0; back < 3; ++back)
        old[back][i] = conv_state[static_cast<int64_t>(2 - back) * a.n_channels() + channel];
    }
  }
  // The sums of convolve_taps(). `row`: of a.u.
  __device__ __forceinline__ void convolve(const float* row, int first_channel, bool norm, float scale,
                                           float* out, int lane) const {
    float x[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      x[i] = fmaf(weight[i].w, row[channel_of(first_channel, i, lane)], 0.0f);
      x[i] = fmaf(weight[i].z, old[0][i], x[i]);
      x[i] = fmaf(weight[i].y, old[1][i], x[i]);
      x[i] = fmaf(weight[i].x, old[2][i], x[i]);
    }
    finish_head<kDim>(x, norm, scale, out, lane);
  }
};

template <int kDim>
__device__ __noinline__ void convolve_any(const DeviceDeltaNetArgs& a, int group_begin,
                                          const float* conv_state, int r, int first_channel, bool norm,
                                          float scale, float* out, int lane) {
  convolve_taps<kDim, kMaxTaps>(a, group_begin, conv_state, r, first_channel, norm, scale, out, lane);
}

// With the number of taps that models have the loads of all taps are in flight together.
template <int kDim>
__device__ __forceinline__ void convolve_head(const DeviceDeltaNetArgs& a, int group_begin,
                                              const float* conv_state, int r, int first_channel, bool norm,
                                              float scale, float* out, int lane) {
  if (a.taps == 4)
    convolve_taps<kDim, 4>(a, group_begin, conv_state, r, first_channel, norm, scale, out, lane);
  else
    convolve_any<kDim>(a, group_begin, conv_state, r, first_channel, norm, scale, out, lane);
}

// Elements first .. first + kCount - 1 of a head, kPer to a lane of a warp.
template <int kCount>
struct HeadSlice {
  static constexpr int kPer = (kCount + 31) / 32;
  float gate[kPer];  // norm weight * silu(z)
  float x[kPer];     // output of the rule

  // `z`: of the head.
  __device__ __forceinline__ void load_gate(const float* norm, const float* z, int first, int lane) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int d = first + min(lane + 32 * i, kCount - 1);
      gate[i] = __ldg(norm + d) * silu(z[d]);
    }
  }
  // Returns the sum of squares.
  __device__ __forceinline__ float load(const float* o, int lane) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      x[i] = lane + 32 * i < kCount ? o[lane + 32 * i] : 0.0f;
      square = fmaf(x[i], x[i], square);
    }
    return warp_sum(square);
  }
  // rms(o) * norm * silu(z), with the sum of squares of the whole head.
  __device__ __forceinline__ void put(const DeviceDeltaNetArgs& a, int64_t row, int head, int first,
                                      float square, int lane) const {
    const ActsOut out{static_cast<half*>(a.out.f16), a.out.f32, a.out.f16_stride, a.out.f32_stride,
                      a.out.scale};
    const float scale = rsqrtf(square / static_cast<float>(a.dim) + a.eps);
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (lane + 32 * i < kCount) out.put(row, head * a.dim + first + lane + 32 * i, x[i] * scale * gate[i]);
  }
};

__device__ __forceinline__ float dot4(float4 a, float4 b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
}

template <int kDim>
struct StateTile {
  static constexpr int kLanes = kDim / 16;  // threads of a state row
  float4 s[4];

  __device__ __forceinline__ void load(const float* row, int part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = reinterpret_cast<const float4*>(row)[part + kLanes * i];
  }
  __device__ __forceinline__ void store(float* row, int part) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) reinterpret_cast<float4*>(row)[part + kLanes * i] = s[i];
  }
  // This thread's share of the dot with a vector of kDim.
  __device__ __forceinline__ float share(const float4 (&x)[4]) const {
    return dot4(s[0], x[0]) + dot4(s[1], x[1]) + dot4(s[2], x[2]) + dot4(s[3], x[3]);
  }
  // Of two dots at once: shares become the sums, the same in all threads of the row.
  __device__ static __forceinline__ void add_shares(float& x, float& y) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      x += __shfl_xor_sync(0xffffffffu, x, mask, kLanes < 2 ? 2 : kLanes);
      y += __shfl_xor_sync(0xffffffffu, y, mask, kLanes < 2 ? 2 : kLanes);
    }
  }
  // s = decay * s + x * delta
  __device__ __forceinline__ void update(float decay, float delta, const float4 (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i].x = fmaf(delta, x[i].x, decay * s[i].x);
      s[i].y = fmaf(delta, x[i].y, decay * s[i].y);
      s[i].z = fmaf(delta, x[i].z, decay * s[i].z);
      s[i].w = fmaf(delta, x[i].w, decay * s[i].w);
    }
  }
  __device__ static __forceinline__ void load_vector(const float* x, int part, float4 (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = reinterpret_cast<const float4*>(x)[part + kLanes * i];
  }
};

template <int kDim>
inline constexpr int kRuleThreads = kDim* StateTile<kDim>::kLanes;
template <int kDim, int kSplit = 1>
inline constexpr int kFusedThreads = kRuleThreads<kDim> / kSplit < 128 ? 128 : kRuleThreads<kDim> / kSplit;

}  // namespace thermo
