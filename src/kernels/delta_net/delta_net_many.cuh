// Decoded rows of many sequences: bound by the bytes of their states, 64 KiB in and 64 KiB out for a head
// and sequence. A block has a whole head, a thread a row of each quarter of it, so that all of the state is
// asked for at once and blocks need not wait for each other. Convolved rows lie in a.mixed. The sums are
// those of the cluster of delta_net_fused.cuh, whose blocks have a quarter each: the same bits.
//
// 64 sequences of 35B-A3B on an H200, 268 MB a layer, 64 us at the bandwidth: clusters of four blocks took
// 108 us and spent most of their time waiting for the first bytes and for each other. With this kernel and
// one row to a tile in attention a step of 64 sequences after 640 tokens takes 11.96 ms instead of 12.52, one
// of 16 sequences 5.50 instead of 5.70.
//
// Rejected: a block to a multiprocessor that stays, with the copy engine bringing the next states meanwhile:
// 112 us. From dot to norm a head takes 7 us there, whatever waits in shared memory.
#pragma once

#include "kernels/delta_net/delta_net_parts.cuh"
#include "kernels/linear/copy_async.cuh"

namespace thermo {

inline constexpr int kManyThreads = 256, kManyRows = 4;  // rows of a group, at most

template <int kDim>
__global__ void __launch_bounds__(kManyThreads, 2)
    delta_net_many_kernel(const __grid_constant__ DeviceDeltaNetArgs a, int max_rows) {
  using Tile = StateTile<kDim>;
  constexpr int kTiles = kRuleThreads<kDim> / kManyThreads, kJ = kDim / kTiles;
  static_assert(kTiles == 4 && kJ == 32);
  __shared__ __align__(16) float q[kManyRows][kDim], k[kManyRows][kDim], v[kManyRows][kDim];
  __shared__ float o[kManyRows][kDim], gates[kManyRows][2];
  const int head = blockIdx.x, group = blockIdx.y, key_head = head % a.n_head_k;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int value_j = threadIdx.x / Tile::kLanes, part = threadIdx.x % Tile::kLanes;
  const int begin = a.rows.group_begin[group], n = a.rows.group_rows[group];
  const bool used = group < *a.rows.n_groups && !a.rows.is_uncommitted(group) && n <= max_rows;
  const int sequence = used ? a.rows.group_sequence[group] : 0;
  float* const state =
      a.state + sequence * a.sequence_stride + static_cast<int64_t>(head) * kDim * kDim + value_j * kDim;
  Tile tiles[kTiles];
  if (used)
#pragma unroll
    for (int b = 0; b < kTiles; ++b) tiles[b].load(state + b * kJ * kDim, part);
  allow_next();
  wait_for_inputs();
  if (!used) return;
  HeadSlice<kJ> slices[kTiles];  // of row `warp`
  if (warp < n)
#pragma unroll
    for (int b = 0; b < kTiles; ++b) slices[b].load_gate(a, begin + warp, head, b * kJ, lane);
  constexpr int kPieces = 3 * kDim / 4;
  for (int i = threadIdx.x; i < n * kPieces; i += kManyThreads) {
    const int r = i / kPieces, d = i % kPieces * 4;
    const float* const from = a.mixed + static_cast<int64_t>(begin + r) * a.n_channels();
    if (d < kDim)
      copy16(&q[r][d], from + key_head * kDim + d, true);
    else if (d < 2 * kDim)
      copy16(&k[r][d - kDim], from + a.n_head_k * kDim + key_head * kDim + d - kDim, true);
    else
      copy16(&v[r][d - 2 * kDim], from + (2 * a.n_head_k + head) * kDim + d - 2 * kDim, true);
  }
  copy_commit();
  if (const int r = kManyThreads - 1 - static_cast<int>(threadIdx.x); r < n) {
    const int64_t at = static_cast<int64_t>(begin + r) * a.n_head_v + head;
    gates[r][0] = expf(a.a[head] * softplus_device(a.alpha[at] + a.dt_bias[head]));
    gates[r][1] = sigmoid_device(a.beta[at]);
  }
  copy_wait<0>();
  __syncthreads();
  for (int r = 0; r < n; ++r) {
    const float decay = gates[r][0], beta = gates[r][1];
    float4 x[4];
    float sum[kTiles];
    Tile::load_vector(k[r], part, x);
#pragma unroll
    for (int b = 0; b < kTiles; ++b) sum[b] = tiles[b].share(x);
    Tile::add_shares(sum[0], sum[1]);
    Tile::add_shares(sum[2], sum[3]);
#pragma unroll
    for (int b = 0; b < kTiles; ++b)
      tiles[b].update(decay, beta * fmaf(-decay, sum[b], v[r][b * kJ + value_j]), x);
    Tile::load_vector(q[r], part, x);
#pragma unroll
    for (int b = 0; b < kTiles; ++b) sum[b] = tiles[b].share(x);
    Tile::add_shares(sum[0], sum[1]);
    Tile::add_shares(sum[2], sum[3]);
#pragma unroll
    for (int b = 0; b < kTiles; ++b)
      if (part == b) o[r][b * kJ + value_j] = sum[b];
  }
#pragma unroll
  for (int b = 0; b < kTiles; ++b) tiles[b].store(state + b * kJ * kDim, part);
  __syncthreads();
  if (warp >= n) return;
  float square = slices[0].load(o[warp], lane);
#pragma unroll
  for (int b = 1; b < kTiles; ++b) square += slices[b].load(o[warp] + b * kJ, lane);
#pragma unroll
  for (int b = 0; b < kTiles; ++b) slices[b].put(a, begin + warp, head, b * kJ, square, lane);
}

}  // namespace thermo
