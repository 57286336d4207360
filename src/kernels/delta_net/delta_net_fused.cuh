// Up to 64 rows, and uncommitted rows (a draft tree): everything from the raw projection to the gated norm in
// one launch, one block to a head and sequence, or a cluster of blocks.
//
// One arithmetic for every row, so that its bits do not depend on its neighbours: the recurrence of plain
// decoding, row after row along the branch,
//   d = beta (v - decay S k),   S = decay S + d k^T,   o = S q
// with the sums of StateTile, convolution and norms of a row by one warp, and the norm's sum of squares over
// the blocks of a head in their order. The walk over a tree goes down to a leaf before it takes the next
// branch. For a row whose parent was not the row before, the stored state is loaded again and the updates of
// the path to it are repeated with the known d: the same operations, so the same bits, without the dots. A
// commit repeats updates in the same way. Products that are added up are fused by hand: what the compiler
// fuses can differ from kernel to kernel.
//
// Rejected: uncommitted rows as sums over their ancestors, on tensor cores beyond 8 rows. Their bits differ
// from those of decoding, which changes a drafted text now and then.
#pragma once

#include "kernels/delta_net/delta_net_parts.cuh"
#include "kernels/linear/copy_async.cuh"

namespace thermo {

inline constexpr int kMaxOwnConvRows = 8;  // of a step whose blocks convolve what they need themselves
inline constexpr int kRoundRows = 32;      // committed rows that lie in shared memory at a time

// Sizes in shared memory.
template <int kDim, bool kUncommitted, int kSplit, bool kPrepared>
struct FusedShape {
  static constexpr int kJ = kDim / kSplit;              // rows of the state in a block
  static constexpr int kValue = kPrepared ? kJ : kDim;  // values: of these rows, or of all
  // Of a row: query, key, value (then result), delta, decay and beta.
  static constexpr int kFloats = 2 * kDim + kValue + (kUncommitted ? kJ : 0) + 2;
  // Rows at a time. Uncommitted rows may be needed again.
  __host__ __device__ static constexpr int round_rows(int max_rows) {
    return kUncommitted || max_rows < kRoundRows ? max_rows : kRoundRows;
  }
  static constexpr size_t bytes(int max_rows) {
    return sizeof(float) * static_cast<size_t>(round_rows(max_rows) * kFloats);
  }
};

// The order in which uncommitted rows are visited.
struct TreeWalk {
  uint64_t path[kMaxDeltaRows];  // of a row: itself and its ancestors
  uint8_t order[kMaxDeltaRows];

  // By the whole block, which must meet before it is used.
  __device__ __forceinline__ void plan(const uint64_t* ancestors, int n) {
    for (int r = threadIdx.x; r < n; r += blockDim.x) path[r] = ancestors[r];
    __syncthreads();
    for (int r = threadIdx.x; r < n; r += blockDim.x) {
      const uint64_t mine = path[r];
      int before = 0;
      for (int c = 0; c < n; ++c) {
        // Ancestors come first; of two branches, the one whose first own row has the lower number.
        const uint64_t here = mine & ~path[c], there = path[c] & ~mine;
        if (c != r && (there == 0 || (here != 0 && __ffsll(there) < __ffsll(here)))) ++before;
      }
      order[before] = static_cast<uint8_t>(r);
    }
  }
};

// kSplit blocks share a head, kDim / kSplit rows of the state each. They convolve all of q and k, and meet
// only for the norm. kPrepared: what is convolved lies in a.mixed; without it there are at most
// kMaxOwnConvRows rows, and what only more of them need is left out of the code: a decoded row spends its
// time on latency. Groups of more than max_rows are left out.
//
// A decoded row asks for its state, its taps and the stored columns before the row is known. Clocks of all
// blocks of a layer (H200, 35B-A3B) had shown 3.4 us from there to the convolved row, of 6 in all. 128
// registers leave room for the output projection beside it; without that limit a token took as long.
template <int kDim, bool kUncommitted, int kSplit, bool kPrepared>
__global__ void __launch_bounds__(kFusedThreads<kDim, kSplit>, kFusedThreads<kDim, kSplit> <= 256 ? 2 : 1)
    delta_net_fused_kernel(const __grid_constant__ DeviceDeltaNetArgs a, int max_rows) {
  using Tile = StateTile<kDim>;
  using Shape = FusedShape<kDim, kUncommitted, kSplit, kPrepared>;
  constexpr int kJ = Shape::kJ, kValue = Shape::kValue;
  extern __shared__ __align__(16) float shared[];
  const int round_rows = Shape::round_rows(max_rows);
  float* const q = shared;  // [round_rows][kDim] each
  float* const k = q + round_rows * kDim;
  float* const values = k + round_rows * kDim;                        // [round_rows][kValue], then o
  float* const delta = values + round_rows * kValue;                  // uncommitted rows only
  float* const gates = delta + (kUncommitted ? round_rows * kJ : 0);  // [round_rows][2]
  __shared__ float squares[kSplit][kMaxDeltaRows];

  const int head = blockIdx.x / kSplit, group = blockIdx.y;
  const int rank = kSplit == 1 ? 0 : cluster_rank(), first_j = rank * kJ;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
  const int value_j = threadIdx.x / Tile::kLanes, part = threadIdx.x % Tile::kLanes;
  const bool has_state = threadIdx.x < kRuleThreads<kDim> / kSplit;
  // The rows of the step and the state were there before the kernels in front of this one started.
  const int begin = a.rows.group_begin[group], n = a.rows.group_rows[group];
  const bool used = group < *a.rows.n_groups && a.rows.is_uncommitted(group) == kUncommitted && n <= max_rows;
  const int sequence = used ? a.rows.group_sequence[group] : 0;
  const int key_head = head % a.n_head_k;
  float* const state = a.state + sequence * a.sequence_stride + static_cast<int64_t>(head) * kDim * kDim +
                       (first_j + value_j) * kDim;
  const float* const conv_state = a.conv_state + sequence * a.sequence_stride;
  float* const v = values + (kPrepared ? 0 : first_j);  // of this block's state rows
  Tile tile;
  if (has_state) tile.load(state, part);
  // Warps 0, 1 and 2 have q, k and v of a single row.
  const auto channel_of = [&](int what) {
    return (what == 2 ? 2 * a.n_head_k + head : what * a.n_head_k + key_head) * kDim;
  };
  const float q_scale = rsqrtf(static_cast<float>(kDim));
  [[maybe_unused]] HeldTaps<kDim> held;
  const bool holds = !kPrepared && used && n == 1 && a.taps == 4;
  if (holds && warp < 3) held.load(a, conv_state, channel_of(warp), lane);
  allow_next();
  [[maybe_unused]] TreeWalk* walk = nullptr;
  if constexpr (kUncommitted) {
    __shared__ TreeWalk of_block;
    walk = &of_block;
    if (used) walk->plan(a.rows.ancestors + begin, n);
  }
  wait_for_inputs();
  if (!used) return;
  if constexpr (kSplit > 1) cluster_arrive();  // waited for before another block's memory is written

  for (int first = 0; first < n; first += round_rows) {
    const int count = min(round_rows, n - first);
    if (first > 0) __syncthreads();
    HeadSlice<kJ> slice;  // of row `warp`, loaded long before it is needed
    if (warp < count) slice.load_gate(a.norm, a.z_of(begin + first + warp, head), first_j, lane);
    if constexpr (kPrepared) {
      const float* const rows = a.mixed + static_cast<int64_t>(begin + first) * a.n_channels();
      constexpr int kPieces = (2 * kDim + kJ) / 4;
      for (int i = threadIdx.x; i < count * kPieces; i += blockDim.x) {
        const int r = i / kPieces, d = i % kPieces * 4;
        const float* const from = rows + static_cast<int64_t>(r) * a.n_channels();
        if (d < kDim)
          copy16(q + r * kDim + d, from + key_head * kDim + d, true);
        else if (d < 2 * kDim)
          copy16(k + r * kDim + d - kDim, from + (a.n_head_k + key_head) * kDim + d - kDim, true);
        else
          copy16(v + r * kJ + d - 2 * kDim, from + (2 * a.n_head_k + head) * kDim + first_j + d - 2 * kDim,
                 true);
      }
      copy_commit();
    } else {
      const auto place_of = [&](int what) { return what == 0 ? q : what == 1 ? k : values; };
      if (holds) {
        if (warp < 3)
          held.convolve(a.u + static_cast<int64_t>(begin) * a.n_channels(), channel_of(warp), warp < 2,
                        warp == 0 ? q_scale : 1.0f, place_of(warp), lane);
      } else {
        for (int i = warp; i < 3 * count; i += n_warps) {
          const int r = i / 3, what = i % 3;
          convolve_head<kDim>(a, begin, conv_state, r, channel_of(what), what < 2, what == 0 ? q_scale : 1.0f,
                              place_of(what) + r * kDim, lane);
        }
      }
    }
    // By the last threads: the first ones are busy with the first rows.
    for (int r = blockDim.x - 1 - threadIdx.x; r < count; r += blockDim.x) {
      const int64_t at = static_cast<int64_t>(begin + first + r) * a.n_head_v + head;
      gates[2 * r] = expf(a.a[head] * softplus_device(a.alpha[at] + a.dt_bias[head]));
      gates[2 * r + 1] = sigmoid_device(a.beta[at]);
    }
    if constexpr (kPrepared) copy_wait<0>();
    __syncthreads();

    if (has_state) {
      // The sum of a row's result over the threads of a state row runs beside the next row's.
      float o = 0.0f;
      int before = -1;
      [[maybe_unused]] uint64_t passed = 0;  // the rows that the state has
      for (int i = 0; i < count; ++i) {
        int r = i;
        if constexpr (kUncommitted) {
          r = walk->order[i];
          const uint64_t self = uint64_t{1} << r, path = walk->path[r] & ~self;
          if (path != passed) {
            tile.load(state, part);
            for (uint64_t rest = path; rest != 0; rest &= rest - 1) {
              const int c = __ffsll(static_cast<long long>(rest)) - 1;
              float4 x[4];
              Tile::load_vector(k + c * kDim, part, x);
              tile.update(gates[2 * c], delta[c * kJ + value_j], x);
            }
          }
          passed = path | self;
        }
        float4 x[4];
        Tile::load_vector(k + r * kDim, part, x);
        const float decay = gates[2 * r];
        float known = tile.share(x);
        Tile::add_shares(known, o);
        if (before >= 0) {
          if constexpr (Tile::kLanes > 1) __syncwarp();  // all of a state row's threads have read v
          if (part == 0) v[before * kValue + value_j] = o;
        }
        const float d = gates[2 * r + 1] * fmaf(-decay, known, v[r * kValue + value_j]);
        tile.update(decay, d, x);
        Tile::load_vector(q + r * kDim, part, x);
        o = tile.share(x);
        before = r;
        if constexpr (kUncommitted) {
          if (part == 0) delta[r * kJ + value_j] = d;
          if constexpr (Tile::kLanes > 1) __syncwarp();
        }
      }
      float none = 0.0f;
      Tile::add_shares(o, none);
      if constexpr (Tile::kLanes > 1) __syncwarp();  // all of a state row's threads have read v
      if (part == 0) v[before * kValue + value_j] = o;
      if (!kUncommitted && first + count == n) tile.store(state, part);
    }
    __syncthreads();

    // The gated norm: a warp has rows warp, warp + n_warps, ..
    const auto sum_squares = [&](const HeadSlice<kJ>& of, int r, float own) {
      float square = own;
      if constexpr (kSplit > 1) {
        square = squares[0][first + r];
#pragma unroll
        for (int b = 1; b < kSplit; ++b) square += squares[b][first + r];
      }
      of.put(a, begin + first + r, head, first_j, square, lane);
    };
    constexpr bool kMore = kPrepared || kFusedThreads<kDim, kSplit> / 32 < kMaxOwnConvRows;
    float own = 0.0f;
    if (warp < count) own = slice.load(v + warp * kValue, lane);
    if constexpr (kSplit > 1) {
      if (first == 0) cluster_wait();
      if (warp < count && lane < kSplit) put_in_block(&squares[rank][first + warp], lane, own);
      for (int r = warp + n_warps; kMore && r < count; r += n_warps) {
        HeadSlice<kJ> other;
        const float square = other.load(v + r * kValue, lane);
        if (lane < kSplit) put_in_block(&squares[rank][first + r], lane, square);
      }
      cluster_arrive();
      cluster_wait();
    }
    if (warp < count) sum_squares(slice, warp, own);
    for (int r = warp + n_warps; kMore && r < count; r += n_warps) {
      HeadSlice<kJ> other;
      other.load_gate(a.norm, a.z_of(begin + first + r, head), first_j, lane);
      sum_squares(other, r, other.load(v + r * kValue, lane));
    }
    if constexpr (!kPrepared) break;  // that was all
  }

  if constexpr (kUncommitted) {
    const int64_t sequence_offset = sequence * a.tape.sequence_stride;
    const int n_channels = a.n_channels();
    for (int i = threadIdx.x; i < n * kJ; i += blockDim.x) {
      const int r = i / kJ, d = first_j + i % kJ;
      a.tape.delta[sequence_offset + (static_cast<int64_t>(r) * a.n_head_v + head) * kDim + d] = delta[i];
      const auto keep_input = [&](int channel) {
        a.tape.conv_input[sequence_offset + static_cast<int64_t>(r) * n_channels + channel] =
            a.u[static_cast<int64_t>(begin + r) * n_channels + channel];
      };
      keep_input((2 * a.n_head_k + head) * kDim + d);
      if (head < a.n_head_k) {
        a.tape.k[sequence_offset + (static_cast<int64_t>(r) * a.n_head_k + head) * kDim + d] =
            k[r * kDim + d];
        keep_input(head * kDim + d);
        keep_input((a.n_head_k + head) * kDim + d);
      }
    }
    for (int r = threadIdx.x; rank == 0 && r < n; r += blockDim.x)
      a.tape.decay[sequence_offset + static_cast<int64_t>(r) * a.n_head_v + head] = gates[2 * r];
  }
}

}  // namespace thermo
