// The shift of the convolution's stored inputs, by blocks that run beside another kernel.
#pragma once

#include "kernels/row_ops/row_ops_cuda.h"

namespace thermo {

inline constexpr int kMaxShiftColumns = 7;  // stored columns of a channel

// `block` counts from the first block that shifts.
__device__ __forceinline__ void shift_conv(const ConvShiftArgs& c, int block) {
  const int threads = static_cast<int>(blockDim.x);
  const int blocks_of_group = (c.n_channels + threads - 1) / threads;
  const int group = block / blocks_of_group, channel = block % blocks_of_group * threads + threadIdx.x;
  if (group >= *c.n_groups || channel >= c.n_channels) return;
  if (c.group_uncommitted != nullptr && c.group_uncommitted[group] != 0) return;
  const int rows = c.group_rows[group];
  float* const state = c.state + c.group_sequence[group] * c.sequence_stride + channel;
  const float* const input = c.input + static_cast<int64_t>(c.group_begin[group]) * c.n_channels + channel;
  // All reads first, so that they run together.
  float columns[kMaxShiftColumns];
#pragma unroll
  for (int k = 0; k < kMaxShiftColumns; ++k) {
    if (k >= c.taps - 1) break;
    const int from = rows - (c.taps - 1) + k;  // row of the step, or an older column
    columns[k] =
        from >= 0 ? input[static_cast<int64_t>(from) * c.n_channels] : state[(k + rows) * c.n_channels];
  }
#pragma unroll
  for (int k = 0; k < kMaxShiftColumns; ++k) {
    if (k >= c.taps - 1) break;
    state[k * c.n_channels] = columns[k];
  }
}

inline int shift_conv_blocks(const ConvShiftArgs& c, int threads) {
  return c.state == nullptr ? 0 : c.max_groups * ((c.n_channels + threads - 1) / threads);
}

}  // namespace thermo
