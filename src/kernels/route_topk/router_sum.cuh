// The order in which the router's products are added up, the same for one row (decode_ffn.cu) and for up to 64
// (route_topk.cu).
//
// A logit is the sum of kRouterParts parts, made by different blocks. A part is the sum over the block's
// kRouterWarps warps, and a warp has neighbouring columns: lane = 4 c + q adds columns c, c + 8, ... of the
// rows 4q..4q+3 of a panel, then the eight lanes of a row are added in pairs. The row is x times the norm's
// weight; its factor multiplies the part.
#pragma once

#include "kernels/quant_matmul/panel_dot.cuh"
#include "kernels/route_topk/route_topk_cuda.h"

namespace thermo {

inline constexpr int kRouterWarps = 16;
inline constexpr int kRouterLoads = 4;  // columns of a lane that are loaded together

struct RouterShare {
  int begin, end;  // columns of a warp

  __device__ __forceinline__ RouterShare(int n_cols, int k_part, int warp) {
    constexpr int kShares = kRouterParts * kRouterWarps;
    const int share = (n_cols + kShares - 1) / kShares;
    begin = (k_part * kRouterWarps + warp) * share;
    end = min(n_cols, begin + share);
  }
};

__device__ __forceinline__ void add_router_column(const float4& w, float x, float (&acc)[4]) {
  acc[0] = __fmaf_rn(w.x, x, acc[0]);
  acc[1] = __fmaf_rn(w.y, x, acc[1]);
  acc[2] = __fmaf_rn(w.z, x, acc[2]);
  acc[3] = __fmaf_rn(w.w, x, acc[3]);
}
// The panel's row whose sum scatter_sums() leaves in a lane of the first sixteen.
__device__ __forceinline__ int router_row(int lane) {
  return 4 * (lane & 3) + 2 * ((lane >> 2) & 1) + ((lane >> 3) & 1);
}
// Of the warps' sums, `stride` floats apart.
__device__ __forceinline__ float add_router_parts(const float* part, int stride) {
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kRouterWarps; ++s) sum = __fadd_rn(sum, part[s * stride]);
  return sum;
}

}  // namespace thermo
