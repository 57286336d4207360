// Few rows, and uncommitted rows (a draft tree): everything from the raw projection to the gated norm in one
// launch, one block to a head and sequence, or a cluster of blocks.
//
// Of uncommitted rows the state stays as it is. With G the decay summed along the path and e(r, c) = exp(G_r
// - G_c) over the ancestors c,
//   dl_r = beta_r (v_r - e^G_r S k_r - sum_c e(r,c) (k_c.k_r) dl_c)
//   o_r = e^G_r S q_r + sum_{c or r} e(r,c) (k_c.q_r) dl_c
#pragma once

#include "kernels/delta_net/delta_net_chunk.cuh"
#include "kernels/delta_net/delta_net_parts.cuh"

namespace thermo {

inline constexpr int kMaxSplitRows =
    4;  // of a step whose heads are shared by blocks, if its rows are committed
inline constexpr int kMaxPlainRows = 8;  // uncommitted rows for which tensor cores are not worth it

// Offsets in shared memory. Of uncommitted rows, lanes that read one column of many rows fall into different
// banks: rows are 4 floats longer than a multiple of 32.
template <int kDim, bool kUncommitted, int kSplit>
struct FusedShape {
  static constexpr int kJ = kDim / kSplit;                                     // rows of the state in a block
  static constexpr int kRow = kUncommitted ? kDim + 4 : kDim;                  // queries and keys
  static constexpr int kValue = !kUncommitted || kSplit == 1 ? kDim : kJ + 4;  // values, then results; deltas
  static constexpr int kGates = kUncommitted ? 3 : 2;                          // g, beta, G
  static constexpr int kState = kUncommitted && kSplit > 1 ? kJ* kRow : 0;     // lies where the scores come
  static constexpr size_t floats(int n_rows) {
    const size_t rows = static_cast<size_t>(n_rows), state = kState;
    const size_t scores = kUncommitted ? rows * (rows + 4) : 0;
    return rows * static_cast<size_t>(2 * kRow + (kUncommitted ? 2 : 1) * kValue + kGates) +
           (scores > state ? scores : state);
  }
};

// Uncommitted rows of a head and the sums between them, in one matrix: scores[r][c] = e(r, c) k_c.q_r for c
// <= r, scores[c][r] = e(r, c) k_c.k_r for c < r, there times `strength` of r if that is asked for. gates[r]:
// .., beta, G. By the whole block.
template <int kDim, int kGates>
__device__ __forceinline__ void put_scores(const DeviceDeltaNetArgs& a, int begin, int n, const float* q,
                                           const float* k, int row_step, const float* gates, bool strength,
                                           float* scores, int score_step) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
  const auto weight = [&](int r, int c) {
    const bool sees = a.rows.ancestors[begin + r] >> c & 1;
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

// The rule for uncommitted rows on tensor cores, by a block with kJ state rows, which lie where the scores
// come:
//   rhs = beta (V - e^G K S^T),  O = e^G Q S^T;   (I + beta A) dl = rhs;   O += P dl
// with A and P the scores of keys and of queries. The system is solved by substitution: 8 threads have the
// rows of a column, every 8th each, and pass on what is known by shuffles; 64 rows take about 2 us.
template <int kDim, int kGates, int kRow, int kValue, int kJ>
__device__ __forceinline__ void rule_of_uncommitted(const DeviceDeltaNetArgs& a, int begin, int n,
                                                    const float* q, const float* k, float* v, float* delta,
                                                    float* scores, int score_step, const float* gates) {
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
template <int kDim, bool kUncommitted, int kSplit>
__global__ void __launch_bounds__(kFusedThreads<kDim, kSplit>)
    delta_net_fused_kernel(const __grid_constant__ DeviceDeltaNetArgs a, int max_rows, bool prepared) {
  using Tile = StateTile<kDim>;
  using Shape = FusedShape<kDim, kUncommitted, kSplit>;
  constexpr int kJ = Shape::kJ, kRow = Shape::kRow, kValue = Shape::kValue, kGates = Shape::kGates;
  constexpr bool kSlice = kValue != kDim;  // values of this block's state rows only
  extern __shared__ __align__(16) float shared[];
  float* const q = shared;  // [max_rows][kRow] each
  float* const k = q + max_rows * kRow;
  float* const v = k + max_rows * kRow;                                  // [max_rows][kValue], then o
  float* const delta = v + max_rows * kValue;                            // uncommitted rows only
  float* const scores = delta + (kUncommitted ? max_rows * kValue : 0);  // uncommitted rows only
  const int score_step = max_rows + 4;
  float* const gates =
      scores + (kUncommitted ? max(max_rows * score_step, Shape::kState) : 0);  // [max_rows][kGates]

  __shared__ float squares[kSplit][kUncommitted ? kMaxDeltaRows : kMaxSplitRows];
  const int head = blockIdx.x / kSplit, group = blockIdx.y;
  const int rank = kSplit == 1 ? 0 : cluster_rank(), first_j = rank * kJ;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
  const int j = first_j + threadIdx.x / Tile::kLanes, part = threadIdx.x % Tile::kLanes;
  const int value_j = kSlice ? j - first_j : j;  // place of state row j among the values
  const bool has_state = threadIdx.x < kRuleThreads<kDim> / kSplit;
  // The rows of the step and the state were there before the kernels in front of this one started.
  const int begin = a.rows.group_begin[group], n = a.rows.group_rows[group];
  const bool used = group < *a.rows.n_groups && a.rows.is_uncommitted(group) == kUncommitted && n <= max_rows;
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
  if (kUncommitted && prepared) {
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
  if constexpr (kUncommitted) copy_wait<0>();
  __syncthreads();

  if constexpr (!kUncommitted) {
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
      const uint64_t seen = a.rows.ancestors[begin + r];
      float sum = 0.0f;
      for (int c = 0; c <= r; ++c)
        if (seen >> c & 1) sum += gates[kGates * c];
      gates[kGates * r + 2] = sum;
    }
    __syncthreads();
    if constexpr (Shape::kState > 0) {
      if (by_tiles)
        rule_of_uncommitted<kDim, kGates, kRow, kValue, kJ>(a, begin, n, q, k, v, delta, scores, score_step,
                                                            gates);
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
  } else if constexpr (!kUncommitted) {  // at most a row to a warp
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

  if constexpr (kUncommitted) {
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

}  // namespace thermo
