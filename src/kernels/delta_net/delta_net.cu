// The state of a head is a matrix of dim x dim floats, 64 KiB, held in registers while rows pass: thread (j,
// part) has 16 columns of row j, in float4 pieces part, part + L, part + 2L, part + 3L with L = dim / 16, so
// that a warp reads whole lines.
//
// Few rows: one block per (head, sequence), or a cluster of four for a step of up to 4 rows, does everything
// from the raw projection to the gated norm: 2.1 MB of state in and out per layer of the 35B-A3B. Many rows:
// convolution and norms for all rows at once, then the rule alone in chunks on tensor cores
// (delta_net_chunk.cuh), then the gated norm. Where the card has not the memory or the instructions for
// chunks, the rule runs row by row, a quarter of a head per block and no barrier in the row loop: 0.5 us a
// row and layer instead of 0.15. Kept rows (a draft tree): the state stays as it is, and a head is shared by
// four blocks where the card has clusters. With G the decay summed along the path and e(r, c) = exp(G_r -
// G_c) over the ancestors c,
//   dl_r = beta_r (v_r - e^G_r S k_r - sum_c e(r,c) (k_c.k_r) dl_c),    o_r = e^G_r S q_r + sum_{c or r}
//   e(r,c) (k_c.q_r) dl_c.
#include "kernels/delta_net/delta_net_cuda.h"

#include "base/check.h"
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/delta_net/delta_net_chunk.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {
namespace {

constexpr int kMaxTaps = 8;
constexpr int kHeadBlocks = 4;      // that share a head when rows are few
constexpr int kMaxSplitRows = 4;    // of such a step, if its rows are not kept
constexpr int kMaxPlainRows = 8;    // kept rows for which tensor cores are not worth it
constexpr int kMaxOwnConvRows = 8;  // kept rows that a block convolves itself

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
        row = a.rows.tree ? a.rows.parent[group_begin + row] : row - 1;
      } else {
        at[back] = conv_state + static_cast<int64_t>(--column) * a.n_channels();
      }
    }
  }
};

// One head of q, k or v of a row, by one warp: convolution, SiLU; q and k are normalised, q is scaled.
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
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    x[i] = lane + 32 * i < kDim ? silu(x[i]) : 0.0f;
    square += x[i] * x[i];
  }
  if (norm) scale *= rsqrtf(warp_sum(square) + 1e-6f);
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    if (lane + 32 * i < kDim) out[lane + 32 * i] = x[i] * (norm ? scale : 1.0f);
}

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

  __device__ __forceinline__ void load_gate(const DeviceDeltaNetArgs& a, int64_t row, int head, int first,
                                            int lane) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int d = first + min(lane + 32 * i, kCount - 1);
      gate[i] = __ldg(a.norm + d) * silu(a.z[(row * a.n_head_v + head) * a.dim + d]);
    }
  }
  // Returns the sum of squares.
  __device__ __forceinline__ float load(const float* o, int lane) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      x[i] = lane + 32 * i < kCount ? o[lane + 32 * i] : 0.0f;
      square += x[i] * x[i];
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
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
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
  // Dot with a vector of kDim, the same in all threads of the row.
  __device__ __forceinline__ float dot(const float4 (&x)[4]) const {
    float sum = dot4(s[0], x[0]) + dot4(s[1], x[1]) + dot4(s[2], x[2]) + dot4(s[3], x[3]);
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, mask, kLanes < 2 ? 2 : kLanes);
    return sum;
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
constexpr int kRuleThreads = kDim* StateTile<kDim>::kLanes;
template <int kDim, int kSplit = 1>
constexpr int kFusedThreads = kRuleThreads<kDim> / kSplit < 128 ? 128 : kRuleThreads<kDim> / kSplit;

// A cluster is the blocks of a head.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
// Writes to the same variable of block `rank`.
__device__ __forceinline__ void put_in_block(const float* variable, int rank, float x) {
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(variable))), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
#endif
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Places in shared memory. Of kept rows, lanes that read one column of many rows fall into different banks:
// rows are 4 floats longer than a multiple of 32.
template <int kDim, bool kKeep, int kSplit>
struct FusedShape {
  static constexpr int kJ = kDim / kSplit;                              // rows of the state in a block
  static constexpr int kRow = kKeep ? kDim + 4 : kDim;                  // queries and keys
  static constexpr int kValue = !kKeep || kSplit == 1 ? kDim : kJ + 4;  // values, then results; deltas
  static constexpr int kGates = kKeep ? 3 : 2;                          // g, beta, G
  static constexpr int kState = kKeep && kSplit > 1 ? kJ* kRow : 0;     // lies where the scores come
  static constexpr size_t floats(int n_rows) {
    const size_t rows = static_cast<size_t>(n_rows), state = kState;
    const size_t scores = kKeep ? rows * (rows + 4) : 0;
    return rows * static_cast<size_t>(2 * kRow + (kKeep ? 2 : 1) * kValue + kGates) +
           (scores > state ? scores : state);
  }
};

// Kept rows of a head and the sums between them, in one matrix: scores[r][c] = e(r, c) k_c.q_r for c <= r,
// scores[c][r] = e(r, c) k_c.k_r for c < r, there times `strength` of r if that is asked for. gates[r]: ..,
// beta, G. By the whole block.
template <int kDim, int kGates>
__device__ __forceinline__ void put_scores(const DeviceDeltaNetArgs& a, int begin, int n, const float* q,
                                           const float* k, int row_step, const float* gates, bool strength,
                                           float* scores, int score_step) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
  const auto weight = [&](int r, int c) {
    const bool sees = a.rows.tree ? a.rows.ancestors[begin + r] >> c & 1 : c <= r;
    return sees ? expf(gates[r * kGates + 2] - gates[c * kGates + 2]) : 0.0f;
  };
#if __CUDA_ARCH__ >= 800
  if (n > kMaxPlainRows) {
    const int row_tiles = (n + 15) / 16, strips = (n + 31) / 32, g = lane / 4, t = lane % 4;
    for (int i = warp; i < 2 * row_tiles * strips; i += n_warps) {
      const bool is_query = i & 1;
      const int first_row = i / 2 % row_tiles * 16, strip = i / 2 / row_tiles * 32;
      if (strip > first_row + 15) continue;
      const float* const left = is_query ? q : k;
      float acc[1][4][4] = {};
      multiply_exact<1, 4>(
          kDim / 8, lane, [&](int row, int d) { return left[min(first_row + row, n - 1) * row_step + d]; },
          [&](int d, int column) { return k[min(strip + column, n - 1) * row_step + d]; }, acc);
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int r = first_row + g + x / 2 * 8, c = strip + 8 * m + 2 * t + x % 2;
          if (r >= n || c > r || (c == r && !is_query)) continue;
          const float score = acc[0][m][x] * weight(r, c);
          if (is_query)
            scores[r * score_step + c] = score;
          else
            scores[c * score_step + r] = strength ? score * gates[r * kGates + 1] : score;
        }
    }
    return;
  }
#endif
  for (int i = warp; i < n * n; i += n_warps) {
    const int r = i / n, c = i % n;
    if (c > r) continue;
    float x = 0.0f, y = 0.0f;
#pragma unroll
    for (int d = lane; d < kDim; d += 32) {
      x = fmaf(k[c * row_step + d], k[r * row_step + d], x);
      y = fmaf(k[c * row_step + d], q[r * row_step + d], y);
    }
    x = warp_sum(x);
    y = warp_sum(y);
    if (lane == 0) {
      const float e = weight(r, c);
      if (c < r) scores[c * score_step + r] = e * x;
      scores[r * score_step + c] = e * y;
    }
  }
}

// The rule for kept rows on tensor cores, by a block with kJ state rows, which lie where the scores come:
//   rhs = beta (V - e^G K S^T),  O = e^G Q S^T;   (I + beta A) dl = rhs;   O += P dl
// with A and P the scores of keys and of queries. The system is solved by substitution: 8 threads have the
// rows of a column, every 8th each, and pass on what is known by shuffles; 64 rows take about 2 us.
template <int kDim, int kGates, int kRow, int kValue, int kJ>
__device__ __forceinline__ void rule_of_kept(const DeviceDeltaNetArgs& a, int begin, int n, const float* q,
                                             const float* k, float* v, float* delta, float* scores,
                                             int score_step, const float* gates) {
  static_assert(kMaxDeltaRows == 64 && kJ % 16 == 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32, g = lane / 4,
            t = lane % 4;
  const int row_tiles = (n + 15) / 16;
  const float* const state = scores;
  // Calls f(value, r, j) for what a lane has of 16 rows and 16 state rows.
  const auto each = [&](float(&acc)[1][2][4], int first_row, int first_j, auto&& f) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int r = first_row + g + x / 2 * 8;
        if (r < n) f(acc[0][m][x], r, first_j + 8 * m + 2 * t + x % 2);
      }
  };
  for (int i = warp; i < row_tiles * (kJ / 16); i += n_warps) {
    const int first_row = i % row_tiles * 16, first_j = i / row_tiles * 16;
    const auto times_state = [&](const float* rows, float(&acc)[1][2][4]) {
      multiply_exact<1, 2>(
          kDim / 8, lane, [&](int row, int d) { return rows[min(first_row + row, n - 1) * kRow + d]; },
          [&](int d, int column) { return state[(first_j + column) * kRow + d]; }, acc);
    };
    float of_keys[1][2][4] = {}, of_queries[1][2][4] = {};
    times_state(k, of_keys);
    times_state(q, of_queries);
    each(of_keys, first_row, first_j, [&](float x, int r, int j) {
      delta[r * kValue + j] = gates[r * kGates + 1] * (v[r * kValue + j] - expf(gates[r * kGates + 2]) * x);
    });
    each(of_queries, first_row, first_j,
         [&](float x, int r, int j) { v[r * kValue + j] = expf(gates[r * kGates + 2]) * x; });
  }
  __syncthreads();  // the state is no longer needed
  put_scores<kDim, kGates>(a, begin, n, q, k, kRow, gates, true, scores, score_step);
  __syncthreads();
  const int part = threadIdx.x % 8, column = threadIdx.x / 8;
  if (column < kJ) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = part + 8 * i < n ? delta[(part + 8 * i) * kValue + column] : 0.0f;
#pragma unroll
    for (int block = 0; block < 8; ++block) {
      if (8 * block >= n) break;
#pragma unroll
      for (int from = 0; from < 8; ++from) {
        const int c = 8 * block + from;
        if (c >= n) break;
        const float known = __shfl_sync(0xffffffffu, x[block], from, 8);
        const float* const weights = scores + c * score_step + part;
#pragma unroll
        for (int i = block; i < 8; ++i)
          if (part + 8 * i > c && part + 8 * i < n) x[i] = fmaf(-weights[8 * i], known, x[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (part + 8 * i < n) delta[(part + 8 * i) * kValue + column] = x[i];
  }
  __syncthreads();
  for (int i = warp; i < row_tiles * (kJ / 16); i += n_warps) {
    const int first_row = i % row_tiles * 16, first_j = i / row_tiles * 16;
    float acc[1][2][4] = {};
    multiply_exact<1, 2>(
        first_row / 8 + 2, lane,
        [&](int row, int c) {
          const int r = first_row + row;
          return r < n && c <= r ? scores[r * score_step + c] : 0.0f;
        },
        [&](int c, int column) { return delta[min(c, n - 1) * kValue + first_j + column]; }, acc);
    each(acc, first_row, first_j, [&](float x, int r, int j) { v[r * kValue + j] += x; });
  }
}

// kSplit blocks share a head, kDim / kSplit rows of the state each. They convolve all of q and k, and meet
// only for the norm. `prepared`: what is convolved lies in a.mixed.
template <int kDim, bool kKeep, int kSplit>
__global__ void __launch_bounds__(kFusedThreads<kDim, kSplit>)
    delta_net_fused_kernel(const __grid_constant__ DeviceDeltaNetArgs a, int max_rows, bool prepared) {
  using Tile = StateTile<kDim>;
  using Shape = FusedShape<kDim, kKeep, kSplit>;
  constexpr int kJ = Shape::kJ, kRow = Shape::kRow, kValue = Shape::kValue, kGates = Shape::kGates;
  constexpr bool kSlice = kValue != kDim;  // values of this block's state rows only
  extern __shared__ __align__(16) float shared[];
  float* const q = shared;  // [max_rows][kRow] each
  float* const k = q + max_rows * kRow;
  float* const v = k + max_rows * kRow;                           // [max_rows][kValue], then o
  float* const delta = v + max_rows * kValue;                     // kept rows only
  float* const scores = delta + (kKeep ? max_rows * kValue : 0);  // kept rows only
  const int score_step = max_rows + 4;
  float* const gates =
      scores + (kKeep ? max(max_rows * score_step, Shape::kState) : 0);  // [max_rows][kGates]

  __shared__ float squares[kSplit][kKeep ? kMaxDeltaRows : kMaxSplitRows];
  const int head = blockIdx.x / kSplit, group = blockIdx.y;
  const int rank = kSplit == 1 ? 0 : cluster_rank(), first_j = rank * kJ;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
  const int j = first_j + threadIdx.x / Tile::kLanes, part = threadIdx.x % Tile::kLanes;
  const int value_j = kSlice ? j - first_j : j;  // place of state row j among the values
  const bool has_state = threadIdx.x < kRuleThreads<kDim> / kSplit;
  // The rows of the step and the state were there before the kernels in front of this one started.
  const bool used = group < *a.rows.n_groups;
  const int begin = a.rows.group_begin[group], n = a.rows.group_rows[group];
  const int sequence = used ? a.rows.group_sequence[group] : 0;
  const int key_head = head % a.n_head_k;
  float* const state =
      a.state + sequence * a.sequence_stride + static_cast<int64_t>(head) * kDim * kDim + j * kDim;
  const float* const conv_state = a.conv_state + sequence * a.sequence_stride;
  Tile tile;
  if (has_state) tile.load(state, part);
  allow_next();
  wait_for_inputs();
  if (!used) return;
  if constexpr (kSplit > 1) cluster_arrive();  // waited for before another block's memory is written
  const bool by_tiles = Shape::kState > 0 && n > kMaxPlainRows;
  if (by_tiles) tile.store(scores + value_j * kRow, part);

  HeadSlice<kJ> slice;  // loaded long before it is needed
  if (warp < n) slice.load_gate(a, begin + warp, head, first_j, lane);
  if (kKeep && prepared) {
    const float* const rows = a.mixed + static_cast<int64_t>(begin) * a.n_channels();
    constexpr int kValues = kSlice ? kJ : kDim, kPieces = (2 * kDim + kValues) / 4;
    for (int i = threadIdx.x; i < n * kPieces; i += blockDim.x) {
      const int r = i / kPieces, d = i % kPieces * 4;
      const float* const from = rows + static_cast<int64_t>(r) * a.n_channels();
      if (d < kDim)
        copy16(q + r * kRow + d, from + key_head * kDim + d, true);
      else if (d < 2 * kDim)
        copy16(k + r * kRow + d - kDim, from + (a.n_head_k + key_head) * kDim + d - kDim, true);
      else
        copy16(v + r * kValue + d - 2 * kDim,
               from + (2 * a.n_head_k + head) * kDim + (kSlice ? first_j : 0) + d - 2 * kDim, true);
    }
    copy_commit();
  } else {
    for (int i = warp; i < 3 * n; i += n_warps) {
      const int r = i / 3, what = i % 3;
      const int first = what == 0   ? key_head * kDim
                        : what == 1 ? (a.n_head_k + key_head) * kDim
                                    : (2 * a.n_head_k + head) * kDim;
      if (kSlice && what == 2) {
        convolve_head<kJ>(a, begin, conv_state, r, first + first_j, false, 1.0f, v + r * kValue, lane);
        continue;
      }
      float* const to = what == 2 ? v + r * kValue : (what == 0 ? q : k) + r * kRow;
      convolve_head<kDim>(a, begin, conv_state, r, first, what < 2,
                          what == 0 ? rsqrtf(static_cast<float>(kDim)) : 1.0f, to, lane);
    }
  }
  // By the last threads: the first ones are busy with the first rows.
  for (int r = blockDim.x - 1 - threadIdx.x; r < n; r += blockDim.x) {
    const int64_t at = static_cast<int64_t>(begin + r) * a.n_head_v + head;
    gates[kGates * r] = a.a[head] * softplus_device(a.alpha[at] + a.dt_bias[head]);
    gates[kGates * r + 1] = sigmoid_device(a.beta[at]);
  }
  if constexpr (kKeep) copy_wait<0>();
  __syncthreads();

  if constexpr (!kKeep) {
    if (has_state) {
      for (int r = 0; r < n; ++r) {
        float4 x[4];
        Tile::load_vector(k + r * kRow, part, x);
        const float decay = expf(gates[kGates * r]);
        const float d = gates[kGates * r + 1] * (v[r * kValue + value_j] - decay * tile.dot(x));
        tile.update(decay, d, x);
        Tile::load_vector(q + r * kRow, part, x);
        const float o = tile.dot(x);
        if constexpr (Tile::kLanes > 1) __syncwarp();  // all of a state row's threads have read v
        if (part == 0) v[r * kValue + value_j] = o;
      }
      tile.store(state, part);
    }
  } else {
    for (int r = threadIdx.x; r < n; r += blockDim.x) {
      const uint64_t seen = a.rows.tree ? a.rows.ancestors[begin + r] : (uint64_t{2} << r) - 1;
      float sum = 0.0f;
      for (int c = 0; c <= r; ++c)
        if (seen >> c & 1) sum += gates[kGates * c];
      gates[kGates * r + 2] = sum;
    }
    __syncthreads();
    if constexpr (Shape::kState > 0) {
      if (by_tiles)
        rule_of_kept<kDim, kGates, kRow, kValue, kJ>(a, begin, n, q, k, v, delta, scores, score_step, gates);
    }
    if (!by_tiles) {
      put_scores<kDim, kGates>(a, begin, n, q, k, kRow, gates, false, scores, score_step);
      __syncthreads();
    }
    if (has_state && !by_tiles) {
      for (int r = 0; r < n; ++r) {
        float4 x[4], y[4];
        Tile::load_vector(k + r * kRow, part, x);
        Tile::load_vector(q + r * kRow, part, y);
        const float start = expf(gates[kGates * r + 2]);
        float from_k = 0.0f, from_q = 0.0f;  // of earlier rows, a share per thread of the state row
        for (int c = part; c < r; c += Tile::kLanes) {
          const float d = delta[c * kValue + value_j];
          from_k = fmaf(scores[c * score_step + r], d, from_k);
          from_q = fmaf(scores[r * score_step + c], d, from_q);
        }
#pragma unroll
        for (int mask = Tile::kLanes / 2; mask > 0; mask /= 2) {
          from_k += __shfl_xor_sync(0xffffffffu, from_k, mask, Tile::kLanes < 2 ? 2 : Tile::kLanes);
          from_q += __shfl_xor_sync(0xffffffffu, from_q, mask, Tile::kLanes < 2 ? 2 : Tile::kLanes);
        }
        const float d = gates[kGates * r + 1] * (v[r * kValue + value_j] - start * tile.dot(x) - from_k);
        const float o = start * tile.dot(y) + from_q + scores[r * score_step + r] * d;
        // A state row's threads share a warp; with one thread to a row there is nobody to wait for.
        if constexpr (Tile::kLanes > 1) __syncwarp();
        if (part == 0) {
          delta[r * kValue + value_j] = d;
          v[r * kValue + value_j] = o;
        }
        if constexpr (Tile::kLanes > 1) __syncwarp();
      }
    }
  }
  __syncthreads();
  if constexpr (kSplit == 1) {
    for (int r = warp; r < n; r += n_warps) {
      if (r != warp) slice.load_gate(a, begin + r, head, 0, lane);
      const float square = slice.load(v + r * kValue, lane);
      slice.put(a, begin + r, head, 0, square, lane);
    }
  } else if constexpr (!kKeep) {  // at most a row to a warp
    cluster_wait();
    if (warp < n) {
      const float square = slice.load(v + warp * kValue + first_j, lane);
      if (lane < kSplit) put_in_block(&squares[rank][warp], lane, square);
    }
    cluster_arrive();
    cluster_wait();
    if (warp < n) {
      float square = squares[0][warp];
#pragma unroll
      for (int i = 1; i < kSplit; ++i) square += squares[i][warp];
      slice.put(a, begin + warp, head, first_j, square, lane);
    }
  } else {
    cluster_wait();
    for (int r = warp; r < n; r += n_warps) {
      const float square = slice.load(v + r * kValue, lane);
      if (lane < kSplit) put_in_block(&squares[rank][r], lane, square);
    }
    cluster_arrive();
    cluster_wait();
    for (int r = warp; r < n; r += n_warps) {
      if (r != warp) slice.load_gate(a, begin + r, head, first_j, lane);
      slice.load(v + r * kValue, lane);
      float square = squares[0][r];
#pragma unroll
      for (int i = 1; i < kSplit; ++i) square += squares[i][r];
      slice.put(a, begin + r, head, first_j, square, lane);
    }
  }

  if constexpr (kKeep) {
    const int64_t sequence_offset = sequence * a.tape.sequence_stride;
    const int n_channels = a.n_channels();
    for (int i = threadIdx.x; i < n * kJ; i += blockDim.x) {
      const int r = i / kJ, d = first_j + i % kJ;
      a.tape.delta[sequence_offset + (static_cast<int64_t>(r) * a.n_head_v + head) * kDim + d] =
          delta[r * kValue + (kSlice ? d - first_j : d)];
      const auto keep_input = [&](int channel) {
        a.tape.conv_input[sequence_offset + static_cast<int64_t>(r) * n_channels + channel] =
            a.u[static_cast<int64_t>(begin + r) * n_channels + channel];
      };
      keep_input((2 * a.n_head_k + head) * kDim + d);
      if (head < a.n_head_k) {
        a.tape.k[sequence_offset + (static_cast<int64_t>(r) * a.n_head_k + head) * kDim + d] =
            k[r * kRow + d];
        keep_input(head * kDim + d);
        keep_input((a.n_head_k + head) * kDim + d);
      }
    }
    for (int r = threadIdx.x; rank == 0 && r < n; r += blockDim.x)
      a.tape.g[sequence_offset + static_cast<int64_t>(r) * a.n_head_v + head] = gates[kGates * r];
  }
}

// ---- many rows ----

template <int kDim>
__global__ void __launch_bounds__(128)
    delta_net_prepare_kernel(const __grid_constant__ DeviceDeltaNetArgs a) {
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.y, head = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = a.rows.group[row];
  if (group < 0) return;
  const int begin = a.rows.group_begin[group];
  if (head < 2 * a.n_head_k + a.n_head_v)
    convolve_head<kDim>(a, begin, a.conv_state + a.rows.group_sequence[group] * a.sequence_stride,
                        row - begin, head * kDim, head < 2 * a.n_head_k,
                        head < a.n_head_k ? rsqrtf(static_cast<float>(kDim)) : 1.0f,
                        a.mixed + static_cast<int64_t>(row) * a.n_channels() + head * kDim, lane);
  if (blockIdx.x == 0)
    for (int n = threadIdx.x; n < a.n_head_v; n += 128) {
      const int64_t at = static_cast<int64_t>(row) * a.n_head_v + n;
      a.gates[2 * at] = a.a[n] * softplus_device(a.alpha[at] + a.dt_bias[n]);
      a.gates[2 * at + 1] = sigmoid_device(a.beta[at]);
    }
}

template <int kDim>
constexpr int kScanThreads = kRuleThreads<kDim> < 128 ? kRuleThreads<kDim> : 128;

template <int kDim>
__global__ void __launch_bounds__(kScanThreads<kDim>)
    delta_net_scan_kernel(const __grid_constant__ DeviceDeltaNetArgs a) {
  using Tile = StateTile<kDim>;
  allow_next();
  wait_for_inputs();
  const int head = blockIdx.y, group = blockIdx.z, key_head = head % a.n_head_k;
  if (group >= *a.rows.n_groups) return;
  const int begin = a.rows.group_begin[group], n = a.rows.group_rows[group];
  const int thread = blockIdx.x * kScanThreads<kDim> + threadIdx.x;
  const int j = thread / Tile::kLanes, part = thread % Tile::kLanes;
  float* const state = a.state + a.rows.group_sequence[group] * a.sequence_stride +
                       static_cast<int64_t>(head) * kDim * kDim + j * kDim;
  const int64_t step = a.n_channels();
  const float* const first = a.mixed + begin * step;
  const float* const q_rows = first + key_head * kDim;
  const float* const k_rows = first + (a.n_head_k + key_head) * kDim;
  const float* const v_rows = first + (2 * a.n_head_k + head) * kDim + j;
  const float* const gate_rows = a.gates + 2 * (static_cast<int64_t>(begin) * a.n_head_v + head);
  float* const out = a.rule_out + (static_cast<int64_t>(begin) * a.n_head_v + head) * kDim + j;
  Tile tile;
  tile.load(state, part);

  // Each row's inputs are loaded while the row before is computed. Tried: batches of 16 rows through shared
  // memory; 35 % slower.
  float4 k[4], q[4];
  float v, decay, beta;
  const auto load = [&](int r) {
    Tile::load_vector(k_rows + r * step, part, k);
    Tile::load_vector(q_rows + r * step, part, q);
    v = v_rows[r * step];
    const float2 g = *reinterpret_cast<const float2*>(gate_rows + static_cast<int64_t>(r) * 2 * a.n_head_v);
    decay = expf(g.x);
    beta = g.y;
  };
  load(0);
  for (int r = 0; r < n; ++r) {
    float4 k_now[4], q_now[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) k_now[i] = k[i], q_now[i] = q[i];
    const float v_now = v, decay_now = decay, beta_now = beta;
    if (r + 1 < n) load(r + 1);
    const float d = beta_now * (v_now - decay_now * tile.dot(k_now));
    tile.update(decay_now, d, k_now);
    const float o = tile.dot(q_now);
    if (part == 0) out[static_cast<int64_t>(r) * a.n_head_v * kDim] = o;
  }
  tile.store(state, part);
}

template <int kDim>
__global__ void __launch_bounds__(128)
    delta_net_norm_kernel(const __grid_constant__ DeviceDeltaNetArgs a, const float* o, int64_t o_step) {
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.y, head = blockIdx.x * 4 + threadIdx.x / 32;
  if (head >= a.n_head_v) return;
  const int lane = threadIdx.x % 32;
  HeadSlice<kDim> slice;
  slice.load_gate(a, row, head, 0, lane);
  const float square = slice.load(o + row * o_step + head * kDim, lane);
  slice.put(a, row, head, 0, square, lane);
}

// ---- commit ----

template <int kDim>
__global__ void __launch_bounds__(kFusedThreads<kDim>)
    delta_net_commit_kernel(const __grid_constant__ DeviceDeltaCommitArgs a) {
  using Tile = StateTile<kDim>;
  allow_next();
  wait_for_inputs();
  const int n = *a.n_path;
  if (n == 0) return;
  const int head = blockIdx.x;
  if (head < a.n_head_v) {
    if (threadIdx.x >= kRuleThreads<kDim>) return;
    const int j = threadIdx.x / Tile::kLanes, part = threadIdx.x % Tile::kLanes;
    float* const state = a.state + static_cast<int64_t>(head) * kDim * kDim + j * kDim;
    Tile tile;
    tile.load(state, part);
    for (int i = 0; i < n; ++i) {
      const int64_t r = a.path[i];
      float4 x[4];
      Tile::load_vector(a.tape.k + (r * a.n_head_k + head % a.n_head_k) * kDim, part, x);
      tile.update(expf(a.tape.g[r * a.n_head_v + head]), a.tape.delta[(r * a.n_head_v + head) * kDim + j], x);
    }
    tile.store(state, part);
    return;
  }
  // The blocks behind the heads shift the convolution columns.
  const int stride = (gridDim.x - a.n_head_v) * blockDim.x;
  for (int channel = (head - a.n_head_v) * blockDim.x + threadIdx.x; channel < a.n_channels;
       channel += stride)
    for (int k = 0; k < a.taps - 1; ++k) {
      const int from = n - (a.taps - 1) + k;
      a.conv_state[k * a.n_channels + channel] =
          from >= 0 ? a.tape.conv_input[static_cast<int64_t>(a.path[from]) * a.n_channels + channel]
                    : a.conv_state[(k + n) * a.n_channels + channel];
    }
}

bool has_clusters() {
  return device_in_use().compute_capability >= 90;
}

// launch() with the blocks of a row in clusters of n.
template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), int n, dim3 grid, dim3 block, size_t shared_bytes,
                     StreamView stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.handle;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(n), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = dependent_launch() ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

template <int kDim, int kStages>
void launch_chunks(const DeviceDeltaNetArgs& a, StreamView stream) {
  using Shape = ChunkShape<kDim>;
  static const bool ready = [] {
    allow_shared(delta_net_solve_kernel<kDim>, Shape::kSolveBytes);
    allow_shared(delta_net_chunks_kernel<kDim, kStages>, Shape::scan_bytes(kStages));
    return true;
  }();
  static_cast<void>(ready);
  const unsigned heads = static_cast<unsigned>(a.n_head_v), groups = static_cast<unsigned>(a.max_groups);
  launch(delta_net_solve_kernel<kDim>, dim3(static_cast<unsigned>(a.n_rows / kC) + groups, heads),
         Shape::kSolveThreads, Shape::kSolveBytes, stream, a);
  launch(delta_net_chunks_kernel<kDim, kStages>, dim3(static_cast<unsigned>(kDim / Shape::kJ), heads, groups),
         Shape::kScanThreads, Shape::scan_bytes(kStages), stream, a);
}

template <int kDim>
void launch_prepare(const DeviceDeltaNetArgs& a, StreamView stream) {
  launch(
      delta_net_prepare_kernel<kDim>,
      dim3(static_cast<unsigned>(ceil_div(2 * a.n_head_k + a.n_head_v, 4)), static_cast<unsigned>(a.n_rows)),
      128, 0, stream, a);
}

template <int kDim>
void launch_large(const DeviceDeltaNetArgs& a, StreamView stream) {
  const unsigned rows = static_cast<unsigned>(a.n_rows), heads = static_cast<unsigned>(a.n_head_v);
  launch_prepare<kDim>(a, stream);
  // Chunks leave their result where v was.
  const float* o = a.mixed + 2 * a.n_head_k * kDim;
  int64_t o_step = a.n_channels();
  const auto fits = [&](int n_stages) {
    return device_in_use().compute_capability >= 80 && n_stages <= a.max_stages &&
           ChunkShape<kDim>::scan_bytes(n_stages) <= device_in_use().max_shared_bytes;
  };
  if (fits(2)) {
    launch_chunks<kDim, 2>(a, stream);
  } else if (fits(1)) {
    launch_chunks<kDim, 1>(a, stream);
  } else {
    launch(delta_net_scan_kernel<kDim>,
           dim3(static_cast<unsigned>(kRuleThreads<kDim> / kScanThreads<kDim>), heads,
                static_cast<unsigned>(a.max_groups)),
           kScanThreads<kDim>, 0, stream, a);
    o = a.rule_out;
    o_step = static_cast<int64_t>(a.n_head_v) * kDim;
  }
  launch(delta_net_norm_kernel<kDim>, dim3(static_cast<unsigned>(ceil_div(a.n_head_v, 4)), rows), 128, 0,
         stream, a, o, o_step);
}

// Kept rows are split over a cluster where there are any.
template <int kDim>
size_t kept_bytes(int n_rows) {
  if constexpr (kDim == 128)
    if (has_clusters()) return FusedShape<kDim, true, kHeadBlocks>::floats(n_rows) * sizeof(float);
  return FusedShape<kDim, true, 1>::floats(n_rows) * sizeof(float);
}

template <int kDim>
int most_kept_rows() {
  constexpr size_t kDeclared = 2048;  // that the kernel declares itself, at most
  int n = kMaxDeltaRows;
  while (n > 0 && kept_bytes<kDim>(n) + kDeclared > device_in_use().max_shared_bytes) --n;
  return n;
}

template <int kDim, bool kKeep>
void launch_fused(const DeviceDeltaNetArgs& a, StreamView stream) {
  constexpr int kMaxRows = kKeep ? kMaxDeltaRows : kMaxFusedDeltaRows;
  constexpr bool kSplits = kDim == 128;
  static const bool ready = [] {
    allow_shared(delta_net_fused_kernel<kDim, kKeep, 1>,
                 FusedShape<kDim, kKeep, 1>::floats(kMaxRows) * sizeof(float));
    if constexpr (kSplits)
      allow_shared(delta_net_fused_kernel<kDim, kKeep, kHeadBlocks>,
                   FusedShape<kDim, kKeep, kHeadBlocks>::floats(kMaxRows) * sizeof(float));
    return true;
  }();
  static_cast<void>(ready);
  const unsigned heads = static_cast<unsigned>(a.n_head_v), groups = static_cast<unsigned>(a.max_groups);
  const bool prepared = kKeep && a.max_group_rows > kMaxOwnConvRows;
  if (prepared) launch_prepare<kDim>(a, stream);
  if constexpr (kSplits) {
    if (has_clusters() && (kKeep || a.max_group_rows <= kMaxSplitRows))
      return launch_clusters(delta_net_fused_kernel<kDim, kKeep, kHeadBlocks>, kHeadBlocks,
                             dim3(kHeadBlocks * heads, groups), kFusedThreads<kDim, kHeadBlocks>,
                             FusedShape<kDim, kKeep, kHeadBlocks>::floats(a.max_group_rows) * sizeof(float),
                             stream, a, a.max_group_rows, prepared);
  }
  launch(delta_net_fused_kernel<kDim, kKeep, 1>, dim3(heads, groups), kFusedThreads<kDim>,
         FusedShape<kDim, kKeep, 1>::floats(a.max_group_rows) * sizeof(float), stream, a, a.max_group_rows,
         prepared);
}

template <int kDim>
void launch_delta_net(const DeviceDeltaNetArgs& a, StreamView stream) {
  if (a.keep) return launch_fused<kDim, true>(a, stream);
  if (a.n_rows <= kMaxFusedDeltaRows) return launch_fused<kDim, false>(a, stream);
  launch_large<kDim>(a, stream);
}

}  // namespace

int max_kept_delta_rows(int dim) noexcept {
  switch (dim) {
    case 16:
      return most_kept_rows<16>();
    case 32:
      return most_kept_rows<32>();
    case 64:
      return most_kept_rows<64>();
    case 128:
      return most_kept_rows<128>();
    default:
      return 0;  // refused at load
  }
}

void delta_net_cuda(const DeviceDeltaNetArgs& a, StreamView stream) noexcept {
  switch (a.dim) {
    case 16:
      return launch_delta_net<16>(a, stream);
    case 32:
      return launch_delta_net<32>(a, stream);
    case 64:
      return launch_delta_net<64>(a, stream);
    case 128:
      return launch_delta_net<128>(a, stream);
    default:
      THERMO_CHECK(false, "the state size was checked at load");
  }
}

void delta_net_commit_cuda(const DeviceDeltaCommitArgs& a, StreamView stream) noexcept {
  const dim3 grid(static_cast<unsigned>(a.n_head_v + ceil_div(a.n_channels, 1024)));
  switch (a.dim) {
    case 16:
      return launch(delta_net_commit_kernel<16>, grid, kFusedThreads<16>, 0, stream, a);
    case 32:
      return launch(delta_net_commit_kernel<32>, grid, kFusedThreads<32>, 0, stream, a);
    case 64:
      return launch(delta_net_commit_kernel<64>, grid, kFusedThreads<64>, 0, stream, a);
    case 128:
      return launch(delta_net_commit_kernel<128>, grid, kFusedThreads<128>, 0, stream, a);
    default:
      THERMO_CHECK(false, "the state size was checked at load");
  }
}

}  // namespace thermo
