// The delta rule for many rows of a chain, kC = 32 rows (a chunk) at a time, on tensor cores.
//
// With G_r the decay summed from the chunk's first row to r, e(r, c) = exp(G_r - G_c), S the state before the
// chunk and rows as row vectors:
//   A[r][c] = beta_r e(r,c) k_c.k_r for c < r,    P[r][c] = e(r,c) k_c.q_r for c <= r
//   (I + A) U = beta V,    (I + A) W = beta e^G K
//   dl = U - W S^T,    O = e^G Q S^T + P dl,    S' = e^G_last S + (e(last, c) dl_c)^T K
// Two kernels: the first two lines need no state, so all chunks of all heads are done at once; the last line
// runs along the chunks, a block for every 32 rows of a head's state.
//
// Products are f32 in effect (exact_mma.cuh), also in the solve: the 16 x 16 blocks on the diagonal of I + A
// are inverted (no element of an inverse exceeds 1 but for rounding, as keys have length 1), the rest is
// products. Tried: a column per thread in plain f32: bound by loads of A, 172 us a layer of the 35B-A3B and
// 2048 rows instead of 76. Sums of decays are f64, as differences of long sums lose digits.
//
// In place: U lies where v was, O where U was; W uses rule_out.
#pragma once

#include "device/launch.cuh"
#include "kernels/delta_net/delta_net_cuda.h"
#include "kernels/linear/copy_async.cuh"
#include "kernels/linear/exact_mma.cuh"

namespace thermo {

inline constexpr int kC = kDeltaChunkRows;

// Sizes and places in shared memory. Row lengths put the lanes of a load into different banks: 4 more than a
// multiple of 32 (or the like) where lanes differ by row first, 8 more where by column.
template <int kDim>
struct ChunkShape {
  static constexpr int kRow = kDim + 4, kKey = kDim + 8, kScore = kC + 4;

  // The kernel without state: keys, queries, A.
  static constexpr int kSolveThreads = 4 * kC;  // a warp per 16 rows, of two products at once
  static constexpr int kInverse = 16 * 20;      // a block of 16 x 16
  static constexpr size_t kSolveBytes =
      sizeof(float) * (2 * kC * kRow + kC * kScore + 2 * kC + kC / 16 * kInverse) + sizeof(double) * kC;

  // The kernel along the chunks: W, queries, keys and P in each stage, then state, dl and dl * e(last, c).
  static constexpr int kScanThreads = 256;
  static constexpr int kJ = kDim < 32 ? kDim : 32;  // rows of the state in a block
  static constexpr int kDelta = kJ + 8;
  static constexpr int kStage = 2 * kC * kRow + kC * kKey + kC * kScore;
  static constexpr size_t scan_bytes(int n_stages) {
    return sizeof(float) * static_cast<size_t>(n_stages * kStage + kJ * kRow + 2 * kC * kDelta);
  }
};

// Copies n of kC rows of kCols floats into shared memory, the others as zeros.
template <int kCols, int kThreads>
__device__ __forceinline__ void stage_rows(float* to, int to_step, const float* from, int64_t from_step,
                                           int n) {
  constexpr int kPieces = kCols / 4;
  static_assert(kC * kPieces % kThreads == 0 || kC * kPieces < kThreads);
#pragma unroll
  for (int i = threadIdx.x; i < kC * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    copy16(to + row * to_step + piece * 4, from + (row < n ? row * from_step + piece * 4 : 0), row < n);
  }
}

struct ChunkPlace {
  int begin;  // first row of the step
  int n;      // rows; 0: there is no such chunk
};

// Chunk number `index` when the chunks of all committed groups of more than short_rows are counted through.
__device__ __forceinline__ ChunkPlace find_chunk(const DeviceRows& rows, int short_rows, int index) {
  const int n_groups = *rows.n_groups;
  for (int g = 0; g < n_groups; ++g) {
    if (rows.is_uncommitted(g) || rows.group_rows[g] <= short_rows) continue;
    const int n = rows.group_rows[g], chunks = (n + kC - 1) / kC;
    if (index < chunks) return {rows.group_begin[g] + index * kC, min(kC, n - index * kC)};
    index -= chunks;
  }
  return {0, 0};
}

// One block per (chunk, head). Leaves U, W, P and, in `gates`, e^G_r and e(last, r).
template <int kDim>
__global__ void __launch_bounds__(ChunkShape<kDim>::kSolveThreads, 4)
    delta_net_solve_kernel(const __grid_constant__ DeviceDeltaNetArgs a) {
  using Shape = ChunkShape<kDim>;
  extern __shared__ __align__(16) float shared[];
  float* const keys = shared;
  float* const queries = keys + kC * Shape::kRow;
  float* const weights = queries + kC * Shape::kRow;  // A
  float* const beta = weights + kC * Shape::kScore;
  float* const start = beta + kC;     // e^G
  float* const inverse = start + kC;  // of the blocks on the diagonal of I + A
  double* const decay = reinterpret_cast<double*>(inverse + kC / 16 * Shape::kInverse);
  const int head = blockIdx.y, key_head = head % a.n_head_k;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  allow_next();
  wait_for_inputs();
  const ChunkPlace chunk = find_chunk(a.rows, a.short_rows, blockIdx.x);
  if (chunk.n == 0) return;
  const int64_t step = a.n_channels();
  float* const rows = a.mixed + chunk.begin * step;
  float2* const gates =
      reinterpret_cast<float2*>(a.gates) + static_cast<int64_t>(chunk.begin) * a.n_head_v + head;
  const auto gate_at = [&](int r) -> float2& { return gates[static_cast<int64_t>(r) * a.n_head_v]; };
  stage_rows<kDim, Shape::kSolveThreads>(keys, Shape::kRow, rows + (a.n_head_k + key_head) * kDim, step,
                                         chunk.n);
  stage_rows<kDim, Shape::kSolveThreads>(queries, Shape::kRow, rows + key_head * kDim, step, chunk.n);
  copy_commit();
  // Values wait in registers until the place of the queries is free.
  constexpr int kPieces = kC * kDim / 4, kLoads = (kPieces + Shape::kSolveThreads - 1) / Shape::kSolveThreads;
  float* const values = rows + (2 * a.n_head_k + head) * kDim;
  float4 v[kLoads];
#pragma unroll
  for (int n = 0; n < kLoads; ++n) {
    const int i = threadIdx.x + n * Shape::kSolveThreads, r = i / (kDim / 4), d = i % (kDim / 4) * 4;
    v[n] = i < kPieces && r < chunk.n ? *reinterpret_cast<const float4*>(values + r * step + d)
                                      : float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
  if (warp == 0) {
    double sum = 0.0;  // of the rows before
    for (int first = 0; first < kC; first += 32) {
      const int r = first + lane;
      const float2 now = r < chunk.n ? gate_at(r) : float2{0.0f, 0.0f};
      double x = now.x;
#pragma unroll
      for (int back = 1; back < 32; back *= 2) {
        const double y = __shfl_up_sync(0xffffffffu, x, back);
        if (lane >= back) x += y;
      }
      x += sum;
      sum = __shfl_sync(0xffffffffu, x, 31);
      decay[r] = x;
      start[r] = expf(static_cast<float>(x));
      beta[r] = now.y;
    }
  }
  copy_wait<0>();
  __syncthreads();

  // k.k and q.k: 16 rows per warp, in strips of 32 columns up to the diagonal.
  const bool is_query = warp >= kC / 16;
  const int first_row = warp % (kC / 16) * 16;
  const float* const left = is_query ? queries : keys;
  float* const scores = a.scores + (static_cast<int64_t>(chunk.begin) * a.n_head_v + head) * kC;
  for (int strip = 0; strip < kC; strip += 32) {
    float acc[1][4][4] = {};
    if (strip <= first_row + 15)
      multiply_exact<1, 4>(
          kDim / 8, lane, [&](int row, int k) { return left[(first_row + row) * Shape::kRow + k]; },
          [&](int k, int column) { return keys[(strip + column) * Shape::kRow + k]; }, acc);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int r = first_row + g + i / 2 * 8, c = strip + 8 * n + 2 * t;
        float2 x;
        const auto weigh = [&](int column, float product) {
          if (column > r || (column == r && !is_query)) return 0.0f;
          return product * expf(static_cast<float>(decay[r] - decay[column])) * (is_query ? 1.0f : beta[r]);
        };
        x.x = weigh(c, acc[0][n][i]);
        x.y = weigh(c + 1, acc[0][n][i + 1]);
        if (!is_query)
          *reinterpret_cast<float2*>(weights + r * Shape::kScore + c) = x;
        else if (r < chunk.n)
          *reinterpret_cast<float2*>(scores + static_cast<int64_t>(r) * a.n_head_v * kC + c) = x;
      }
  }
  // Right sides: beta V takes the place of the queries, beta e^G K that of the keys.
  __syncthreads();
  if (threadIdx.x < chunk.n)
    gate_at(threadIdx.x) = {start[threadIdx.x],
                            expf(static_cast<float>(decay[chunk.n - 1] - decay[threadIdx.x]))};
#pragma unroll
  for (int n = 0; n < kLoads; ++n) {
    const int i = threadIdx.x + n * Shape::kSolveThreads, r = i / (kDim / 4), d = i % (kDim / 4) * 4;
    if (i >= kPieces) break;
    const float b = beta[r], c = b * start[r];
    *reinterpret_cast<float4*>(queries + r * Shape::kRow + d) = {b * v[n].x, b * v[n].y, b * v[n].z,
                                                                 b * v[n].w};
    float4& k = *reinterpret_cast<float4*>(keys + r * Shape::kRow + d);
    k = {c * k.x, c * k.y, c * k.z, c * k.w};
  }
  // The inverse of each 16 x 16 block on the diagonal of I + A, a column per thread.
  if (threadIdx.x < kC) {
    const int block = threadIdx.x / 16, column = threadIdx.x % 16;
    float x[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      x[r] = r == column ? 1.0f : 0.0f;
#pragma unroll
      for (int c = 0; c < r; ++c)
        x[r] = fmaf(-weights[(16 * block + r) * Shape::kScore + 16 * block + c], x[c], x[r]);
      inverse[block * Shape::kInverse + r * 20 + column] = x[r];
    }
  }
  __syncthreads();

  // The solve, 16 rows at a time: take off what the rows before give, multiply by the inverse. A warp reads
  // only the columns that it writes.
  constexpr int kWidth = kDim < 32 ? kDim : 32, kN = kWidth / 8;
  for (int strip = warp * kWidth; strip < 2 * kDim; strip += kWidth * (kC / 8)) {
    const bool is_value = strip < kDim;
    float* const x = (is_value ? queries + strip : keys + strip - kDim);
    float* const to =
        is_value ? values + strip
                 : a.rule_out + (static_cast<int64_t>(chunk.begin) * a.n_head_v + head) * kDim + strip - kDim;
    const int64_t to_step = is_value ? step : static_cast<int64_t>(a.n_head_v) * kDim;
#pragma unroll 1
    for (int block = 0; block < kC / 16; ++block) {
      const int first = 16 * block;
      float acc[1][kN][4] = {};
      multiply_exact<1, kN>(
          2 * block, lane, [&](int row, int k) { return weights[(first + row) * Shape::kScore + k]; },
          [&](int k, int column) { return x[k * Shape::kRow + column]; }, acc);
      const auto each = [&](auto&& f) {
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            f(acc[0][n][2 * h], acc[0][n][2 * h + 1], first + g + 8 * h, 8 * n + 2 * t);
      };
      each([&](float& u, float& v, int r, int column) {
        float2* const at = reinterpret_cast<float2*>(x + r * Shape::kRow + column);
        *at = {at->x - u, at->y - v};
        u = v = 0.0f;
      });
      __syncwarp();
      multiply_exact<1, kN>(
          2, lane, [&](int row, int k) { return inverse[block * Shape::kInverse + row * 20 + k]; },
          [&](int k, int column) { return x[(first + k) * Shape::kRow + column]; }, acc);
      __syncwarp();
      each([&](float& u, float& v, int r, int column) {
        *reinterpret_cast<float2*>(x + r * Shape::kRow + column) = {u, v};
        if (r < chunk.n) *reinterpret_cast<float2*>(to + r * to_step + column) = {u, v};
      });
      __syncwarp();
    }
  }
}

// One block per (kJ rows of the state, head, group), along the chunks. The state lies twice: as sums in
// registers and, for the products with it, in shared memory. The next chunk is copied while this one is
// multiplied, or with one stage half of it.
//
// Bound by the chains of products, not by the copies: with chunks of 64 rows, for which there is room for one
// stage only, 208 us a layer of the 35B-A3B and 2048 rows instead of 234, but then the solve takes longer.
template <int kDim, int kStages>
__global__ void __launch_bounds__(ChunkShape<kDim>::kScanThreads)
    delta_net_chunks_kernel(const __grid_constant__ DeviceDeltaNetArgs a) {
  using Shape = ChunkShape<kDim>;
  constexpr int kWarps = Shape::kScanThreads / 32, kTilesM = Shape::kJ / 16;
  constexpr int kTilesI = (kDim / 8 + kWarps - 1) / kWarps;  // of the state's columns, of a warp
  constexpr int kHalf = Shape::kJ / 2, kTilesJ = kHalf / 8;  // of the state's rows, of a warp
  static_assert(kWarps == 4 * (kC / 16));                    // two products, 16 rows and kHalf columns each
  extern __shared__ __align__(16) float shared[];
  float* const state = shared + kStages * Shape::kStage;  // [kJ][kRow]
  float* const delta = state + Shape::kJ * Shape::kRow;
  float* const aged = delta + kC * Shape::kDelta;  // delta * e(last, c)
  const auto w_at = [&](int turn) { return shared + turn * Shape::kStage; };
  const auto queries_at = [&](int turn) { return w_at(turn) + kC * Shape::kRow; };
  const auto keys_at = [&](int turn) { return queries_at(turn) + kC * Shape::kRow; };
  const auto scores_at = [&](int turn) { return keys_at(turn) + kC * Shape::kKey; };
  allow_next();
  wait_for_inputs();
  const int first_j = blockIdx.x * Shape::kJ, head = blockIdx.y, group = blockIdx.z;
  const int key_head = head % a.n_head_k;
  if (group >= *a.rows.n_groups || a.rows.is_uncommitted(group)) return;
  const int begin = a.rows.group_begin[group], n_rows = a.rows.group_rows[group];
  if (n_rows <= a.short_rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t step = a.n_channels(), value_step = static_cast<int64_t>(a.n_head_v) * kDim;
  float* const rows = a.mixed + begin * step;
  float* const values = rows + (2 * a.n_head_k + head) * kDim + first_j;
  const float* const w_rows = a.rule_out + (static_cast<int64_t>(begin) * a.n_head_v + head) * kDim;
  const float* const score_rows = a.scores + (static_cast<int64_t>(begin) * a.n_head_v + head) * kC;
  const float2* const gates =
      reinterpret_cast<const float2*>(a.gates) + static_cast<int64_t>(begin) * a.n_head_v + head;
  float* const stored = a.state + a.rows.group_sequence[group] * a.sequence_stride +
                        static_cast<int64_t>(head) * kDim * kDim + first_j * kDim;

  const auto stage_first = [&](int first, int turn) {  // W and queries
    const int n = n_rows - first;
    if (n <= 0) return;
    stage_rows<kDim, Shape::kScanThreads>(w_at(turn), Shape::kRow, w_rows + first * value_step, value_step,
                                          n);
    stage_rows<kDim, Shape::kScanThreads>(queries_at(turn), Shape::kRow,
                                          rows + first * step + key_head * kDim, step, n);
  };
  const auto stage_second = [&](int first, int turn) {  // keys and P
    const int n = n_rows - first;
    if (n <= 0) return;
    stage_rows<kDim, Shape::kScanThreads>(keys_at(turn), Shape::kKey,
                                          rows + first * step + (a.n_head_k + key_head) * kDim, step, n);
    stage_rows<kC, Shape::kScanThreads>(scores_at(turn), Shape::kScore,
                                        score_rows + static_cast<int64_t>(first) * a.n_head_v * kC,
                                        static_cast<int64_t>(a.n_head_v) * kC, n);
  };
  // Calls f(m, n, c, j, i) for every pair of the warp's sums c and c + 1: state row j, columns i and i + 1.
  const auto each_pair = [&](auto&& f) {
#pragma unroll
    for (int n = 0; n < kTilesI; ++n) {
      const int tile = warp * kTilesI + n;
      if (tile >= kDim / 8) continue;
#pragma unroll
      for (int m = 0; m < kTilesM; ++m)
#pragma unroll
        for (int c = 0; c < 4; c += 2) f(m, n, c, 16 * m + g + c / 2 * 8, 8 * tile + 2 * t);
    }
  };

  stage_first(0, 0);
  if (kStages == 2) stage_second(0, 0);
  copy_commit();
  float sums[kTilesM][kTilesI][4] = {};
  each_pair([&](int m, int n, int c, int j, int i) {
    const float2 x = *reinterpret_cast<const float2*>(stored + j * kDim + i);
    sums[m][n][c] = x.x, sums[m][n][c + 1] = x.y;
    *reinterpret_cast<float2*>(state + j * Shape::kRow + i) = x;
  });

  const bool is_query = warp >= kWarps / 2;
  const int first_row = warp % (kC / 16) * 16, first_column = warp / (kC / 16) % 2 * kHalf;
  for (int first = 0, turn = 0; first < n_rows; first += kC, turn = (turn + 1) % kStages) {
    const int n = min(kC, n_rows - first);
    const float all_decay = gates[static_cast<int64_t>(first + n - 1) * a.n_head_v].x;
    float2 u[kTilesJ][2];  // the lane's elements of U
    float2 gate[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = first_row + g + 8 * h;
      gate[h] = r < n ? gates[static_cast<int64_t>(first + r) * a.n_head_v] : float2{0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kTilesJ; ++j)
        u[j][h] =
            !is_query && r < n
                ? *reinterpret_cast<const float2*>(values + (first + r) * step + first_column + 8 * j + 2 * t)
                : float2{0.0f, 0.0f};
    }
    copy_wait<0>();
    __syncthreads();  // W, queries and state are there; dl is free, and the other stage or keys and P
    if (kStages == 2) {
      stage_first(first + kC, turn ^ 1);
      stage_second(first + kC, turn ^ 1);
    } else {
      stage_second(first, turn);
    }
    copy_commit();

    float acc[1][kTilesJ][4] = {};
    const float* const left = is_query ? queries_at(turn) : w_at(turn);
    multiply_exact<1, kTilesJ>(
        kDim / 8, lane, [&](int row, int k) { return left[(first_row + row) * Shape::kRow + k]; },
        [&](int k, int column) { return state[(first_column + column) * Shape::kRow + k]; }, acc);
#pragma unroll
    for (int j = 0; j < kTilesJ; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = acc[0][j][2 * h];
        float& y = acc[0][j][2 * h + 1];
        if (is_query) {
          x *= gate[h].x;
          y *= gate[h].x;
        } else {
          const float2 d{u[j][h].x - x, u[j][h].y - y};
          const int at = (first_row + g + 8 * h) * Shape::kDelta + first_column + 8 * j + 2 * t;
          *reinterpret_cast<float2*>(delta + at) = d;
          *reinterpret_cast<float2*>(aged + at) = {d.x * gate[h].y, d.y * gate[h].y};
        }
      }
    if (kStages == 1) copy_wait<0>();
    __syncthreads();  // dl, keys and P are there; W, queries and state are free
    if (kStages == 1) {
      stage_first(first + kC, turn);
      copy_commit();
    }

    each_pair([&](int m, int n_tile, int c, int, int) {
      sums[m][n_tile][c] *= all_decay;
      sums[m][n_tile][c + 1] *= all_decay;
    });
    const float* const keys = keys_at(turn);
    const float* const scores = scores_at(turn);
    if (warp * kTilesI < kDim / 8)
      multiply_exact<kTilesM, kTilesI>(
          kC / 8, lane, [&](int j, int c) { return aged[c * Shape::kDelta + j]; },
          [&](int c, int i) { return keys[c * Shape::kKey + warp * kTilesI * 8 + i]; }, sums);
    each_pair([&](int m, int n_tile, int c, int j, int i) {
      *reinterpret_cast<float2*>(state + j * Shape::kRow + i) = {sums[m][n_tile][c], sums[m][n_tile][c + 1]};
    });
    if (is_query) {
      multiply_exact<1, kTilesJ>(
          first_row / 8 + 2, lane,
          [&](int row, int c) { return scores[(first_row + row) * Shape::kScore + c]; },
          [&](int c, int j) { return delta[c * Shape::kDelta + first_column + j]; }, acc);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = first_row + g + 8 * h;
        if (r >= n) continue;
#pragma unroll
        for (int j = 0; j < kTilesJ; ++j)
          *reinterpret_cast<float2*>(values + (first + r) * step + first_column + 8 * j + 2 * t) = {
              acc[0][j][2 * h], acc[0][j][2 * h + 1]};
      }
    }
  }
  copy_wait<0>();
  each_pair([&](int m, int n, int c, int j, int i) {
    *reinterpret_cast<float2*>(stored + j * kDim + i) = {sums[m][n][c], sums[m][n][c + 1]};
  });
}

}  // namespace thermo
