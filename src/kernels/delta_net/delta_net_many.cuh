// Decoded rows of many sequences: bound by the bytes of their states, 64 KiB in and 64 KiB out for a head
// and sequence. Two blocks to a multiprocessor stay and take one (head, sequence) after the other, a thread a
// row of each quarter of the state. While a state is updated in registers, the next one comes to shared
// memory; each thread copies what it will read itself, so nobody waits for another's copies. Convolved rows
// lie in a.mixed. The sums are those of the cluster of delta_net_fused.cuh, whose blocks have a quarter each:
// the same bits.
//
// 64 sequences of 35B-A3B on an H200, 268 MB a layer, 64 us at the bandwidth: clusters of four blocks took
// 108 us and spent most of their time waiting for the first bytes and for each other, a block for each head
// and sequence 88, this one 78.
//
// Rejected: one block to a multiprocessor that stays, with the copy engine bringing the next states: 112 us,
// because from dot to norm a head takes 7 us. The state of a later block asked into L2 by
// cp.async.bulk.prefetch: 88 us, and experts in the same way became three times as slow.
#pragma once

#include "kernels/delta_net/delta_net_parts.cuh"
#include "kernels/linear/copy_async.cuh"

namespace thermo {

inline constexpr int kManyThreads = 256, kManyRows = 4;  // rows of a group, at most
inline constexpr int kManyBlocks = 2;                    // to a multiprocessor

// What a block reads of a head and sequence besides the state.
template <int kDim>
struct ManyRows {
  float q[kManyRows][kDim], k[kManyRows][kDim], v[kManyRows][kDim], z[kManyRows][kDim];
};
template <int kDim>
struct ManyShared {
  float4 state[kDim * kDim / 4];  // of the next head, [piece of a thread][thread]
  ManyRows<kDim> rows[2];         // of this head and of the next
  float o[kManyRows][kDim], gates[kManyRows][2];
};

template <int kDim>
__global__ void __launch_bounds__(kManyThreads, kManyBlocks)
    delta_net_many_kernel(const __grid_constant__ DeviceDeltaNetArgs a, int max_rows) {
  using Tile = StateTile<kDim>;
  constexpr int kTiles = kRuleThreads<kDim> / kManyThreads, kJ = kDim / kTiles;
  static_assert(kTiles == 4 && kJ == 32);
  extern __shared__ __align__(16) std::byte memory[];
  ManyShared<kDim>& shared = *reinterpret_cast<ManyShared<kDim>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int value_j = threadIdx.x / Tile::kLanes, part = threadIdx.x % Tile::kLanes;
  const int n_items = *a.rows.n_groups * a.n_head_v;

  struct Item {
    int at, head, begin, n;
    float* state;  // of this thread
  };
  // The first one from `at` on that the block has to compute.
  const auto item_from = [&](int at) {
    for (; at < n_items; at += gridDim.x) {
      const int group = at / a.n_head_v, head = at - group * a.n_head_v, n = a.rows.group_rows[group];
      if (a.rows.is_uncommitted(group) || n > max_rows) continue;
      return Item{at, head, a.rows.group_begin[group], n,
                  a.state + a.rows.group_sequence[group] * a.sequence_stride +
                      static_cast<int64_t>(head) * kDim * kDim + value_j * kDim + 4 * part};
    }
    return Item{n_items, 0, 0, 0, nullptr};
  };
  const auto piece_of = [](float* state, int b, int i) {
    return state + b * kJ * kDim + 4 * Tile::kLanes * i;
  };
  const auto ask_state = [&](const Item& item) {
    if (item.n == 0) return;
#pragma unroll
    for (int b = 0; b < kTiles; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy16(&shared.state[(4 * b + i) * kManyThreads + threadIdx.x], piece_of(item.state, b, i), true);
  };
  const auto ask_rows = [&](const Item& item, ManyRows<kDim>& to) {
    constexpr int kPieces = kDim / 4;
    const int key_head = item.head % a.n_head_k;
    for (int i = threadIdx.x; i < item.n * 4 * kPieces; i += kManyThreads) {
      const int r = i / (4 * kPieces), what = i / kPieces % 4, d = i % kPieces * 4;
      const float* const mixed = a.mixed + static_cast<int64_t>(item.begin + r) * a.n_channels() + d;
      if (what == 0)
        copy16(&to.q[r][d], mixed + key_head * kDim, true);
      else if (what == 1)
        copy16(&to.k[r][d], mixed + (a.n_head_k + key_head) * kDim, true);
      else if (what == 2)
        copy16(&to.v[r][d], mixed + (2 * a.n_head_k + item.head) * kDim, true);
      else
        copy16(&to.z[r][d], a.z_of(item.begin + r, item.head) + d, true);
    }
  };
  // Decay and beta of a row, by one of the last threads.
  const int gate_row = kManyThreads - 1 - static_cast<int>(threadIdx.x);
  const auto gate_inputs = [&](const Item& item) {
    if (gate_row >= item.n) return float2{};
    const int64_t at = static_cast<int64_t>(item.begin + gate_row) * a.n_head_v + item.head;
    return float2{a.alpha[at], a.beta[at]};
  };

  Item item = item_from(static_cast<int>(blockIdx.x));
  ask_state(item);
  Item next = item_from(item.at + static_cast<int>(gridDim.x));
  allow_next();
  wait_for_inputs();
  ask_rows(item, shared.rows[0]);
  copy_commit();
  float2 gate = gate_inputs(item);
  for (int turn = 0; item.n > 0; turn ^= 1) {
    const ManyRows<kDim>& rows = shared.rows[turn];
    if (gate_row < item.n) {
      shared.gates[gate_row][0] = expf(a.a[item.head] * softplus_device(gate.x + a.dt_bias[item.head]));
      shared.gates[gate_row][1] = sigmoid_device(gate.y);
    }
    // The memory is never left without requests: each thread asks again as soon as it has read.
    copy_wait<0>();
    Tile tiles[kTiles];
#pragma unroll
    for (int b = 0; b < kTiles; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) tiles[b].s[i] = shared.state[(4 * b + i) * kManyThreads + threadIdx.x];
    ask_state(next);
    __syncthreads();  // the rows are there, and all are through with those before
    ask_rows(next, shared.rows[turn ^ 1]);
    copy_commit();
    gate = gate_inputs(next);
    const Item after = item_from(next.at + static_cast<int>(gridDim.x));
    for (int r = 0; r < item.n; ++r) {
      const float decay = shared.gates[r][0], beta = shared.gates[r][1];
      float4 x[4];
      float sum[kTiles];
      Tile::load_vector(rows.k[r], part, x);
#pragma unroll
      for (int b = 0; b < kTiles; ++b) sum[b] = tiles[b].share(x);
      Tile::add_shares(sum[0], sum[1]);
      Tile::add_shares(sum[2], sum[3]);
#pragma unroll
      for (int b = 0; b < kTiles; ++b)
        tiles[b].update(decay, beta * fmaf(-decay, sum[b], rows.v[r][b * kJ + value_j]), x);
      Tile::load_vector(rows.q[r], part, x);
#pragma unroll
      for (int b = 0; b < kTiles; ++b) sum[b] = tiles[b].share(x);
      Tile::add_shares(sum[0], sum[1]);
      Tile::add_shares(sum[2], sum[3]);
#pragma unroll
      for (int b = 0; b < kTiles; ++b)
        if (part == b) shared.o[r][b * kJ + value_j] = sum[b];
    }
#pragma unroll
    for (int b = 0; b < kTiles; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) *reinterpret_cast<float4*>(piece_of(item.state, b, i)) = tiles[b].s[i];
    __syncthreads();
    if (warp < item.n) {
      HeadSlice<kJ> slices[kTiles];
      float square = 0.0f;
#pragma unroll
      for (int b = 0; b < kTiles; ++b) {
        slices[b].load_gate(a.norm, rows.z[warp], b * kJ, lane);
        const float here = slices[b].load(shared.o[warp] + b * kJ, lane);
        square = b == 0 ? here : square + here;
      }
#pragma unroll
      for (int b = 0; b < kTiles; ++b) slices[b].put(a, item.begin + warp, item.head, b * kJ, square, lane);
    }
    item = next;
    next = after;
  }
}

}  // namespace thermo
