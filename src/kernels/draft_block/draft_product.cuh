// A group of panels times up to 16 rows of f16, by a cluster of blocks that cut the columns among them.
//
// The 8 warps of each block have some columns each, the same for all panels of the group. Their weights are
// asked for at once, before the wait for the kernel before, and lie whole in shared memory: while one kernel
// computes, the next one's weights arrive. A warp reads its columns of the rows into registers, once,
// straight from L2, multiplies one panel after the other on tensor cores, and leaves the sums where the
// panel's weights lay. The block adds up its warps and hands each block of the cluster the sums of that
// block's rows; so every row ends in one place with all columns of the group, and a warp finishes it.
//
// The order of sums is fixed: columns of a warp, warps, blocks.
//
// Most of the code runs once in a warp, so instructions that are fetched count: loops, no divisions.
#pragma once

#include "device/cluster.cuh"
#include "kernels/draft_block/draft_block_cuda.h"
#include "kernels/linear/bulk_copy.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

inline constexpr int kDraftWarps = 8, kDraftThreads = 32 * kDraftWarps;
inline constexpr int kDraftUnitBytes = kPanelFormat<DType::Q8_0>.unit_bytes();  // 64 columns of a panel
inline constexpr int kMaxDraftUnits = 5;                                        // of a warp
static_assert(kDraftUnitBytes == 64 + 2 * 512 && kDraftUnitBytes >= 16 * 16 * 4);

struct DraftShape {
  DraftRows in;
  int n_rows, n_cols;
  int n_panels;    // of a group, an even number
  int ranks_log2;  // blocks of a cluster: 2, 4 or 8, so that no warp finishes two rows
  int panel_bytes;
};

// Shared memory: weights or sums of every (panel, warp), their barriers, sums that came from the cluster.
constexpr int draft_shared_bytes(int n_panels, int units) {
  return n_panels * kDraftWarps * (units * kDraftUnitBytes + 8) + n_panels * 16 * kMaxDraftRows * 4;
}

// Where rows 4 r .. 4 r + 3 of a panel and an activation row lie among its sums: lanes of a store fall into
// different banks.
__device__ __forceinline__ int draft_sum_place(int act, int r) {
  return act * 4 + (r ^ (act >> 1 & 3));
}

// A row's sums over the blocks of the cluster.
struct DraftSums {
  float* first;  // of rank 0; a row that its warp may write over, column by column
  int stride, ranks_log2;
  float factor;

  __device__ __forceinline__ float operator()(int column) const {
    float y = first[column] + first[stride + column];
#pragma unroll 2
    for (int r = 2; r < 1 << ranks_log2; ++r) y += first[r * stride + column];
    return y * factor;
  }
};

// panel_at(p): the bytes of panel p of the group, nullptr if the matrix ends before. End:
//   before(act)        what it reads that was there before the kernel in front
//   after(act)         what else it reads
//   finish(act, sums)
// all by the warp of row `act`; before() also by warps that have none, with -1.
template <int kUnits, class PanelAt, class End>
__device__ __forceinline__ void draft_product(const DraftShape& s, const PanelAt& panel_at, End& end) {
  extern __shared__ __align__(128) std::byte draft_shared[];
  constexpr int kSlot = kUnits * kDraftUnitBytes, kSubs = 2 * kUnits;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = cluster_rank(), per_rank_log2 = 4 - s.ranks_log2, width = s.n_panels * 16;
  static_assert(kMaxDraftRows == 1 << 4 && kDraftWarps >= kMaxDraftRows / 2);
  const auto slot = [&](int panel, int w) { return draft_shared + (panel * kDraftWarps + w) * kSlot; };
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(slot(s.n_panels, 0));
  float* const gathered = reinterpret_cast<float*>(barriers + s.n_panels * kDraftWarps);
  const int first_unit = (rank * kDraftWarps + warp) * kUnits, first_column = first_unit * 64;
  const int bytes = min(kSlot, s.panel_bytes - first_unit * kDraftUnitBytes);  // a last unit may be short

  const bool asks = lane < s.n_panels && bytes > 0;
  uint64_t* const barrier = barriers + lane * kDraftWarps + warp;
  if (asks) bulk_init(barrier);
  __syncwarp();
  if (asks) {
    if (const uint8_t* const panel = panel_at(lane); panel != nullptr) {
      bulk_expect(barrier, static_cast<uint32_t>(bytes));
      bulk_copy(slot(lane, warp), panel + first_unit * kDraftUnitBytes, static_cast<uint32_t>(bytes),
                barrier);
    }
  }
  __syncwarp();
  allow_next();
  cluster_arrive();  // this block runs
  int act = (rank << per_rank_log2) + warp;
  if (warp >= 1 << per_rank_log2 || act >= s.n_rows) act = -1;
  end.before(act);
  wait_for_inputs();

  uint4 x[kSubs][2];  // columns 4t.. and 16 + 4t.. of 32, of rows g and g + 8
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const half* const from = static_cast<const half*>(s.in.f16) + min(8 * n + g, s.n_rows - 1) * s.in.stride +
                             first_column + 8 * t;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      x[sub][n] = uint4{0, 0, 0, 0};
      if (first_column + 32 * sub < s.n_cols) x[sub][n] = *reinterpret_cast<const uint4*>(from + 32 * sub);
    }
  }
  float square = 0.0f;
  if (act >= 0) {
    if (s.in.squares != nullptr)
#pragma unroll 1
      for (int k = lane; k < s.in.n_squares; k += 32) square += s.in.squares[k * kMaxDraftRows + act];
    end.after(act);
  }

  // Two panels at a time: a warp has too few others beside it to hide latencies.
#pragma unroll 1
  for (int panel = 0; panel < s.n_panels; panel += 2) {
    if (bytes <= 0) break;
    const bool has[2] = {panel_at(panel) != nullptr, panel_at(panel + 1) != nullptr};
#pragma unroll
    for (int p = 0; p < 2; ++p)
      if (has[p]) bulk_wait(barriers + (panel + p) * kDraftWarps + warp);
    float sums[2][2][4] = {};
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      if (first_column + 32 * sub >= s.n_cols) break;
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const std::byte* const unit = slot(panel + p, warp) + sub / 2 * kDraftUnitBytes;
        const std::byte* const codes = unit + 64 + sub % 2 * 512 + 64 * t + 8 * g;
        const uint32_t scales = *reinterpret_cast<const uint32_t*>(unit + sub % 2 * 32 + 4 * g);
        const uint2 low = *reinterpret_cast<const uint2*>(codes),
                    high = *reinterpret_cast<const uint2*>(codes + 256);
        // Four codes of one row to halves, in the order of act_place().
        const half2 base = __half2half2(__ushort_as_half(0x6480)),  // 1024 + 128
            scale[2] = {both(scales, 0), both(scales, 1)};
        const auto widen = [&](uint32_t word, int row, uint32_t& even, uint32_t& odd) {
          even =
              as_bits(__hmul2(__hsub2(as_half2(__byte_perm(word, 0x64646464u, 0x4240)), base), scale[row]));
          odd = as_bits(__hmul2(__hsub2(as_half2(__byte_perm(word, 0x64646464u, 0x4341)), base), scale[row]));
        };
        uint32_t w[2][4];
        widen(low.x, 0, w[0][0], w[0][2]);
        widen(low.y, 1, w[0][1], w[0][3]);
        widen(high.x, 0, w[1][0], w[1][2]);
        widen(high.y, 1, w[1][1], w[1][3]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma_16816(sums[p][n], w[0], x[sub][n].x, x[sub][n].y);
          mma_16816(sums[p][n], w[1], x[sub][n].z, x[sub][n].w);
        }
      }
    }
    __syncwarp();  // all lanes have read the weights
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float2* const to = reinterpret_cast<float2*>(slot(panel + p, warp));
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          to[2 * draft_sum_place(8 * n + 2 * t + i, g / 2) + g % 2] = {sums[p][n][i], sums[p][n][2 + i]};
    }
  }
  float factor = s.in.scale;
  if (s.in.squares != nullptr)
    factor *= rsqrtf(__fdividef(warp_sum(square), static_cast<float>(s.n_cols)) + s.in.eps);
  __syncthreads();
  cluster_wait();  // all blocks run

  const int left = (s.n_cols + 63) / 64 - rank * kDraftWarps * kUnits;
  const int n_busy = min(kDraftWarps, (left + kUnits - 1) / kUnits);  // warps that have columns
#pragma unroll 1
  for (int i = threadIdx.x; i < s.n_panels * 64; i += kDraftThreads) {
    const int panel = i / 64, row = i / 4 % 16, r = i % 4;
    float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
    if (panel_at(panel) != nullptr) {
      const float4* const from = reinterpret_cast<const float4*>(slot(panel, 0)) + draft_sum_place(row, r);
#pragma unroll
      for (int w = 0; w < kDraftWarps; ++w)
        if (w < n_busy) {
          const float4 y = from[w * (kSlot / 16)];
          sum.x += y.x, sum.y += y.y, sum.z += y.z, sum.w += y.w;
        }
    }
    const int place = row & ((1 << per_rank_log2) - 1);
    float* const at = gathered + ((rank << per_rank_log2) + place) * width + panel * 16 + 4 * r;
    put_in_block(reinterpret_cast<float4*>(at), row >> per_rank_log2, sum);
  }
  cluster_arrive();
  cluster_wait();
  if (act >= 0)
    end.finish(act, DraftSums{gathered + warp * width, width << per_rank_log2, s.ranks_log2, factor});
}

// Of what may be large.
__device__ __forceinline__ half draft_half(float x, float inverse_scale) {
  return __float2half_rn(fminf(fmaxf(x * inverse_scale, -65504.0f), 65504.0f));
}

// How the columns of a matrix are cut.
struct DraftCut {
  int ranks_log2 = 0, units = 0;  // 0 units: not possible
};
DraftCut draft_cut(int n_cols, int n_panels, int ranks_log2) noexcept;

// Calls start.template operator()<kUnits>().
template <class Start>
void for_draft_units(int units, const Start& start) {
  switch (units) {
    case 1:
      return start.template operator()<1>();
    case 2:
      return start.template operator()<2>();
    case 3:
      return start.template operator()<3>();
    case 4:
      return start.template operator()<4>();
    default:
      return start.template operator()<kMaxDraftUnits>();
  }
}

}  // namespace thermo
