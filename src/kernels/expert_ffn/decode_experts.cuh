// The routed experts of one or two rows in one launch: choice, gate and up, down, weighted sum, residual.
//
// A block to a multiprocessor, all of them resident. When a block knows the choice it asks for everything it
// will read of the experts, gate and up first, down after them, as copies into shared memory: 128 KiB a
// block, so the memory has one long queue to work through instead of two with a launch between. A block makes
// 2 x 16 hidden columns and hands them to all others through L2, as floats: who reads finds out by reading
// that they are there, with no counter and no fence. A reader rounds them itself, because 256 columns of 16
// blocks share a step. Then it makes 16 outputs.
//
// Two rows would need twice the memory. So all four panels of gate and up that a block then has are asked for
// at first, and down takes their places as they were multiplied. Nobody looks whether the rows have experts
// in common: who reads one later finds it in L2. A launch takes 24 us where that of one row takes 16 (ncu).
// With three panels and down of the first row at first it was as long: the fourth queued after down, and all
// blocks wait for it.
//
// 1.350 against 1.405 ms a token for two launches, before experts had the processor's bits. These cost 1.8 %:
// 1.414 against 1.389 ms. It was 8 % while 16 threads walked all experts of their output one after the other,
// the two reads of a lane's columns waited for each other, and sums of codes came by shuffles.
//
// Copies of single chunks (64 a block instead of 12) lost, 1.452 against 1.428: the copy engine takes 40 ns
// to begin each. Gate and up straight into registers, 1.441 against 1.438. With split experts the launch
// lost, 160 against 247 tokens/s (with copies of single chunks; the reason was not looked for), so they keep
// two.
#pragma once

#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/expert_ffn/decode_choice.cuh"
#include "kernels/expert_ffn/decode_values.cuh"
#include "kernels/linear/bulk_copy.cuh"

namespace thermo {

// Hidden columns on their way to other blocks, as floats. kNotYet is none of them: the launch before writes
// it over all of them, so who reads finds out by reading that a column is there.
inline constexpr uint32_t kNotYet = 0xffffffffu;

// [0]: number of the launch; [rows * n_expert_used][round_up(n_ff, 256)] floats from 128 bytes on.
inline constexpr int kExchangeHead = 128;

__device__ __forceinline__ float* exchange_rows(const DecodeFfnArgs& a) {
  return reinterpret_cast<float*>(static_cast<std::byte*>(a.exchange) + kExchangeHead);
}
__host__ __device__ constexpr int exchange_stride(int n_ff) {
  return 256 * dot_chunks(n_ff);
}

// By all blocks of a layer's first launch that run this, when they have waited.
__device__ __forceinline__ void clear_exchange(const DecodeFfnArgs& a, int block, int n_blocks) {
  if (a.exchange == nullptr || a.cold.mail != nullptr) return;
  const int n = a.n_rows * a.config.n_expert_used * exchange_stride(a.down.n_cols) / 4;
  for (int i = block * blockDim.x + threadIdx.x; i < n; i += n_blocks * blockDim.x)
    reinterpret_cast<uint4*>(exchange_rows(a))[i] = {kNotYet, kNotYet, kNotYet, kNotYet};
}

// By the first block of a layer's first launch, when it has waited.
__device__ __forceinline__ void count_launch(const DecodeFfnArgs& a) {
  if (a.exchange != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *static_cast<uint32_t*>(a.exchange) += 1;
}

__device__ __forceinline__ void hand_over(float* to, float x) {
  const uint32_t bits = isnan(x) ? 0x7fc00000u : __float_as_uint(x);
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
__device__ __forceinline__ uint4 look_at_columns(const float* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
// The lane's columns, from the one at `from` on, once they are there.
__device__ __forceinline__ void take_columns(const float* from, ActPiece& to) {
  const auto is_there = [](const uint4& x) {
    return x.x != kNotYet && x.y != kNotYet && x.z != kNotYet && x.w != kNotYet;
  };
  const auto floats = [](const uint4& x) {
    return float4{__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
  };
  uint4 low, high;
  do {
    low = look_at_columns(from);
    high = look_at_columns(from + 16);
  } while (!is_there(low) || !is_there(high));
  to.low = floats(low);
  to.high = floats(high);
}

inline constexpr int kExpertWarps = 16;
inline constexpr size_t kExpertsOwn = 4 * 1024;  // shared memory, more than the kernel declares itself
inline constexpr int kRowPairs = 2;              // (expert, 16 hidden columns) of a block and row, at most

// What the launch needs in shared memory: the rounded rows, a chunk of a hidden row for each warp, values of
// gate and up, values and steps of down, panels.
struct ExpertsShared {
  int hidden, part_in, part_out, steps_out, stage_in, stage_out, stage_shared;
  int row_values;  // of all of down of a row, with the shared expert's
  size_t bytes;

  ExpertsShared(const DecodeFfnArgs& a, const RowBlocks& gate, const RowBlocks& down,
                const RowBlocks& shared) {
    const size_t n_used = static_cast<size_t>(a.config.n_expert_used), rows = static_cast<size_t>(a.n_rows);
    row_values = a.config.n_expert_used * down.n_chunks * down.chunk_blocks +
                 (a.shared_down.n_rows > 0 ? shared.n_chunks * shared.chunk_blocks : 0);
    const size_t out_values = rows * static_cast<size_t>(row_values);
    const size_t hidden_at = sizeof(BlockActs) * rows * static_cast<size_t>(dot_chunks(a.n_embd));
    // Candidates lie here before hidden rows do, terms of sums after them.
    const size_t of_warps = sizeof(BlockActs) * kExpertWarps, terms = sizeof(long long) * 16 * n_used * rows;
    const size_t in_at = hidden_at + (of_warps > terms ? of_warps : terms);
    const size_t out_at = in_at + sizeof(float) * 16 * 2 * kRowPairs * rows * static_cast<size_t>(gate.n);
    const size_t steps_at = out_at + sizeof(float) * 16 * out_values;
    const size_t end = steps_at + sizeof(float) * out_values,
                 candidates = hidden_at + sizeof(BlockCandidates) * rows;
    const size_t stages = ((end > candidates ? end : candidates) + 127) / 128 * 128;
    const size_t stages_out = stages + 2 * kRowPairs * rows * a.gate.panel_bytes;
    const size_t stages_shared = stages_out + (rows == 1 ? n_used * a.down.panel_bytes : 0);
    bytes = stages_shared + (a.shared_down.n_rows > 0 ? a.shared_down.panel_bytes : 0);
    hidden = static_cast<int>(hidden_at);
    part_in = static_cast<int>(in_at);
    part_out = static_cast<int>(out_at);
    steps_out = static_cast<int>(steps_at);
    stage_in = static_cast<int>(stages);
    stage_out = static_cast<int>(stages_out);
    stage_shared = static_cast<int>(stages_shared);
  }
};

// Everything that follows from shapes is computed by the host: a block had 2.5 us of such instructions and
// others before it could wait for its inputs, now 1.2.
struct ExpertsPlan {
  DecodeFfnArgs a;
  RowBlocks gate, down, shared;
  int in_panels;  // of gate
  int shared_chunks;
  KnownDivisor by_in_panels, by_out_chunks;
  ExpertsShared at;

  explicit ExpertsPlan(const DecodeFfnArgs& args)
      : a(args),
        gate(args.gate),
        down(args.down),
        shared(args.shared_down),
        in_panels(ceil_div(args.gate.n_rows, 16)),
        shared_chunks(args.shared_down.n_rows > 0 ? shared.n_chunks : 0),
        by_in_panels(in_panels),
        by_out_chunks(down.n_chunks),
        at(args, gate, down, shared) {}
};

// T: of gate and up.
template <DType T, int kRows>
__global__ void __maxnreg__(72) decode_experts_kernel(const __grid_constant__ ExpertsPlan plan) {
  constexpr int kHalf = kExpertWarps / 2, kPairs = kRowPairs * kRows;
  static_assert(kRows <= 2 && 32 * kHalf == kBlockExperts);
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ BlockChoice choices[kRows];
  __shared__ float squares[kRows][kHalf];
  static_assert(kHalf <= kMaxNormChunks);
  __shared__ float weights[kRows][32];
  // Panels of gate and up, panels of down of each row, the shared expert's.
  constexpr int kSharedBarrier = 2 * kPairs + 31 * kRows, kExpertBarriers = kSharedBarrier + 1;
  __shared__ __align__(8) uint64_t barriers[kExpertBarriers];
  const auto down_barrier = [&](int row, int slot) { return &barriers[2 * kPairs + 31 * row + slot]; };
  const DecodeFfnArgs& a = plan.a;
  const ExpertsShared& at = plan.at;
  constexpr bool kBig = kPanelFormat<T>.block_cols == 256;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  BlockActs* const acts = reinterpret_cast<BlockActs*>(shared);
  BlockActs* const hidden_acts = reinterpret_cast<BlockActs*>(shared + at.hidden) + warp;
  float* const part_in = reinterpret_cast<float*>(shared + at.part_in);
  float* const part_out = reinterpret_cast<float*>(shared + at.part_out);
  float* const steps_out = reinterpret_cast<float*>(shared + at.steps_out);
  const int n_used = a.config.n_expert_used, out_chunks = plan.down.n_chunks, out_items = n_used * out_chunks,
            in_blocks = plan.gate.n;
  const int out_panel = blockIdx.x, n_chunks = dot_chunks(a.n_embd);

  // What the warp multiplies of gate and up: chunk warp % 8 of the same 16 rows of both.
  const int in_chunk = warp % kHalf, in_subs = min(8, (a.n_embd - in_chunk * 256) / 32);
  int n_pairs = 0, in_slot[kPairs], in_panel[kPairs];  // slots of the second row follow those of the first
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = blockIdx.x + i * gridDim.x;
    if (pair < kRows * n_used * plan.in_panels) ++n_pairs;
    in_slot[i] = plan.by_in_panels.quotient(pair);
    in_panel[i] = pair - in_slot[i] * plan.in_panels;
  }
  // Without addresses that are computed: these stay in registers.
  const auto of_pair = [](const int(&values)[kPairs], int i) {
    int value = values[0];
#pragma unroll
    for (int k = 1; k < kPairs; ++k)
      if (i == k) value = values[k];
    return value;
  };
  const auto row_of = [&](int slot) { return kRows > 1 && slot >= n_used ? 1 : 0; };
  static_assert(kRowPairs == 2);
  touch_params(plan);
  // One row: the first half of the warps chooses, the other half makes the acts. Two: each half does both for
  // one of them.
  const int row_here = kRows > 1 ? warp / kHalf : 0;
  const int acts_chunk = kRows > 1 ? warp % kHalf : (warp + kHalf) % kExpertWarps;
  const int e = kRows > 1 ? static_cast<int>(threadIdx.x) % kBlockExperts : static_cast<int>(threadIdx.x);
  NormWeights norm_weights;
  norm_weights.load(a.norm.weight, a.n_embd, acts_chunk, lane);
  const uint8_t* const mine = base_of(a, e);
  if (threadIdx.x < kExpertBarriers) bulk_init(&barriers[threadIdx.x]);
  if (threadIdx.x == kSharedBarrier && plan.shared_chunks > 0) {
    const uint32_t bytes = static_cast<uint32_t>(a.shared_down.panel_bytes);
    bulk_expect(&barriers[kSharedBarrier], bytes);
    bulk_copy(shared + at.stage_shared, a.shared_down.panels + out_panel * a.shared_down.panel_bytes, bytes,
              &barriers[kSharedBarrier]);
  }
  const int weighs = kExpertWarps - 1 - warp;  // the row whose weights this warp makes
  const bool counts = weighs < kRows && blockIdx.x + 1 == gridDim.x;
  int16_t* const drafted = counts ? drafted_of(a.routes.uses, weighs, n_used) : nullptr;
  wait_for_inputs();
  const float logit = logit_of<kRows>(a, e, row_here);
  // A block without hidden columns must not read x: it may be late, and others write it.
  if (n_pairs > 0 && acts_chunk < kHalf) {
    if (acts_chunk < n_chunks) {
      NormRow row;
      row.load(a.norm.x + row_here * a.n_embd, acts_chunk, a.n_embd, lane);
      const float square = row.make_acts(norm_weights, [&](float4 low, float4 high) {
        put_block_acts<kPanelFormat<T>.block_cols, false>(low, high, lane,
                                                          acts[row_here * n_chunks + acts_chunk]);
      });
      if (lane == 0) squares[row_here][acts_chunk] = square;
    }
  }
  // The first sixteen threads of a row have its sums in the end.
  const int row_threads = 16 * OutputSum::row_groups<kRows>(n_used);
  const int out_act = kRows > 1 && static_cast<int>(threadIdx.x) >= row_threads ? 1 : 0;
  const int out_row = out_panel * 16 + threadIdx.x - out_act * row_threads;
  const bool sums = static_cast<int>(threadIdx.x) < out_act * row_threads + 16 && out_row < a.n_embd;
  float* const x_out = a.x + out_act * a.n_embd + out_row;
  float sum = sums ? *x_out : 0.0f;
  const auto shared_weight_of = [&](int row) {
    return a.shared_weight == nullptr ? 1.0f : a.routes.pair_weight[row * (n_used + 1) + n_used];
  };
  const float shared_weight = shared_weight_of(min(weighs, kRows - 1));
  BlockCandidates& candidates = reinterpret_cast<BlockCandidates*>(shared + at.hidden)[row_here];
  offer_candidate(a.config, e, logit, a.bias, mine, candidates);
  __syncthreads();
  rank_candidates<true>(a.config, e, kRows > 1 ? kBlockExperts : 32 * kExpertWarps, candidates,
                        choices[row_here]);
  __syncthreads();

  // Ask for everything, gate and up first: few long copies, each takes 40 ns to begin.
  const auto ask_down = [&](int row, int slot, std::byte* stage) {
    const uint8_t* const base = choices[row].chosen_base[slot];
    if (base == nullptr) return;
    const uint32_t bytes = static_cast<uint32_t>(a.down.panel_bytes);
    bulk_expect(down_barrier(row, slot), bytes);
    bulk_copy(stage + slot * a.down.panel_bytes,
              base + reinterpret_cast<size_t>(a.down.panels) + out_panel * a.down.panel_bytes, bytes,
              down_barrier(row, slot));
  };
  // Panel p of gate and up: both of a pair lie together.
  const auto stage_of = [&](int p) { return at.stage_in + p * a.gate.panel_bytes; };
  const auto ask_in = [&](int p) {
    const int i = p / 2, slot = of_pair(in_slot, i), row = row_of(slot);
    const DeviceMatrix& w = p % 2 == 0 ? a.gate : a.up;
    const uint8_t* const base = i < n_pairs ? choices[row].chosen_base[slot - row * n_used] : nullptr;
    if (base == nullptr) return;
    const uint32_t bytes = static_cast<uint32_t>(w.panel_bytes);
    bulk_expect(&barriers[p], bytes);
    bulk_copy(shared + stage_of(p),
              base + reinterpret_cast<size_t>(w.panels) + of_pair(in_panel, i) * w.panel_bytes, bytes,
              &barriers[p]);
  };
  if (lane == 0) {
    if (warp < 2 * kPairs)
      ask_in(warp);
    else if (kRows == 1)
      for (int slot = warp - 2 * kPairs; slot < n_used; slot += kExpertWarps - 2 * kPairs)
        ask_down(0, slot, shared + at.stage_out);
  }
  __syncwarp();
  allow_next();
  if (weighs < kRows) {
    const float weight = weight_of_choice(a.config, a.bias, choices[weighs], lane);
    weights[weighs][lane] = lane == n_used ? shared_weight : weight;
    if (counts) count_uses(a, choices[weighs], drafted, lane);
  }
  // Of the pairs that this warp may have to hand over.
  float scales[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k)
    scales[k] =
        norm_scale(squares[row_of(warp % 2 == 0 ? in_slot[kRowPairs * k] : in_slot[kRowPairs * k + 1])],
                   a.n_embd, a.norm.eps);

  // Gate and up, and hidden columns to whoever waits for them.
  const int which = warp / kHalf;
  const auto multiply_pairs = [&](int begin, int end) {
    if (in_subs <= 0) return;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      SubCodes x[1];
      x[0].load_and_sum<T>(acts[row_of(of_pair(in_slot, i)) * n_chunks + in_chunk], lane >> 2);
      const int panel = 2 * i + which;
      bulk_wait(&barriers[panel]);
      DotChunk<T> data;
      data.template load<true>(reinterpret_cast<const uint8_t*>(shared) + stage_of(panel), in_chunk, in_subs,
                               lane);
      dot_values<T, 1>(data, x, in_subs, lane, part_in + (panel * in_blocks + in_chunk * kChunkBlocks<T>)*16);
    }
  };
  float* const exchange = exchange_rows(a);
  const int row_stride = exchange_stride(a.down.n_cols);
  // A pair by a warp.
  const auto hand_over_pair = [&](int i, float scale) {
    if (i >= n_pairs) return;
    const int slot = of_pair(in_slot, i), panel = of_pair(in_panel, i), row = row_of(slot);
    const float* const gate = part_in + 2 * i * in_blocks * 16;
    const float x =
        swiglu_of_halves(gate, gate + in_blocks * 16, in_blocks, acts + row * n_chunks, kBig, scale, lane);
    if (lane < 16 && panel * 16 + lane < a.gate.n_rows)
      hand_over(exchange + slot * row_stride + panel * 16 + lane, x);
    __syncwarp();
  };
  static_assert(kExpertWarps % 2 == 0);
  // Two rows: down of a row takes the places of two pairs.
  const auto down_stage = [&](int row) { return kRows == 1 ? at.stage_out : stage_of(2 * kRowPairs * row); };
  const auto replace_by_down = [&](int row) {
    if (lane == 0) {
      bulk_reuse();
      for (int slot = warp; slot < n_used; slot += kExpertWarps)
        ask_down(row, slot, shared + down_stage(row));
    }
    __syncwarp();
  };
  if constexpr (kRows > 1) {
    multiply_pairs(0, min(n_pairs, kRowPairs));
    __syncthreads();
    replace_by_down(0);
    if (warp >= kExpertWarps - kRowPairs) hand_over_pair(warp % 2, scales[0]);
    multiply_pairs(kRowPairs, n_pairs);
  } else {
    multiply_pairs(0, n_pairs);
  }
  __syncthreads();
  if constexpr (kRows > 1) replace_by_down(1);
  if (warp < kRowPairs) hand_over_pair(kPairs - kRowPairs + warp, scales[kRows - 1]);

  // Down; first the shared expert's, which is known.
  const int out_blocks = plan.down.chunk_blocks, shared_blocks = plan.shared.chunk_blocks;
  bool is_shared = warp < kRows * plan.shared_chunks;
  int item = warp;
#pragma unroll 1
  while (is_shared || item < kRows * out_items) {
    const int row = kRows > 1 && (is_shared ? warp >= plan.shared_chunks : item >= out_items) ? 1 : 0;
    const int here = item - row * out_items;
    const int slot = is_shared ? n_used : plan.by_out_chunks.quotient(here),
              chunk = is_shared ? warp - row * plan.shared_chunks : here - slot * out_chunks;
    const DeviceMatrix& w = is_shared ? a.shared_down : a.down;
    bulk_wait(is_shared ? &barriers[kSharedBarrier] : down_barrier(row, slot));
    const size_t stage = is_shared ? at.stage_shared : down_stage(row) + slot * a.down.panel_bytes;
    const uint8_t* const panel = reinterpret_cast<const uint8_t*>(shared) + stage;
    const int value = row * at.row_values +
                      (is_shared ? out_items * out_blocks + chunk * shared_blocks : here * out_blocks);
    const int n_subs = min(8, (w.n_cols - chunk * 256) / 32);
    for_dot_type(w.dtype, [&]<DType D>() {
      DotChunk<D> data;
      data.template load<true>(panel, chunk, n_subs, lane);
      ActPiece piece;
      if (is_shared) {
        piece.load(a.hidden + (row * (n_used + 1) + n_used) * a.hidden_stride, chunk, w.n_cols, lane);
      } else if (const int column = ActPiece::column(chunk, lane); column < w.n_cols) {
        take_columns(exchange + (row * n_used + slot) * row_stride + column, piece);
      }
      hidden_values<D>(data, piece, n_subs, lane, *hidden_acts, part_out + value * 16, steps_out + value);
    });
    if (is_shared)
      is_shared = false;
    else
      item += kExpertWarps;
  }
  __syncthreads();
  const OutputSum out{.values = part_out,
                      .steps = steps_out,
                      .weights = weights[0],
                      .n_used = n_used,
                      .slot_values = out_chunks * out_blocks,
                      .row_blocks = plan.down.n,
                      .shared = plan.shared,
                      .row_values = at.row_values};
  const GridSum total = out.all<kRows>(reinterpret_cast<long long*>(shared + at.hidden));
  if (sums) *x_out = __fadd_rn(sum, total.value());
}

template <auto* kKernel>
auto* experts_kernel(size_t shared) {
  static const bool ready = [=] { return allow_shared(kKernel, shared - kExpertsOwn), true; }();
  static_cast<void>(ready);
  return kKernel;
}

// Whether the blocks are all resident at once, and have the memory; decided once for each shape by the host.
inline bool experts_possible(const DecodeFfnArgs& a) {
  const DeviceInfo& card = device_in_use();
  if (a.exchange == nullptr || a.config.n_expert == 0 || a.cold.mail != nullptr || !dependent_launch())
    return false;
  const int blocks = ceil_div(a.n_embd, 16);
  const ExpertsPlan plan(a);
  const size_t n_used = static_cast<size_t>(a.config.n_expert_used);
  return blocks <= card.n_multiprocessors && plan.in_panels * a.config.n_expert_used <= kRowPairs * blocks &&
         dot_chunks(a.n_embd) <= kExpertWarps / 2 && a.n_rows * plan.shared_chunks <= kExpertWarps &&
         (a.n_rows == 1 || n_used * a.down.panel_bytes <= 2 * kRowPairs * a.gate.panel_bytes) &&
         plan.at.bytes + kExpertsOwn <= card.max_shared_bytes;
}

// REQUIRES: experts_possible().
inline void launch_experts(const DecodeFfnArgs& a, StreamView stream) {
  const ExpertsPlan plan(a);
  for_dot_type(a.gate.dtype, [&]<DType T>() {
    const size_t most = device_in_use().max_shared_bytes;
    launch(a.n_rows == 1 ? experts_kernel<decode_experts_kernel<T, 1>>(most)
                         : experts_kernel<decode_experts_kernel<T, 2>>(most),
           static_cast<unsigned>(ceil_div(a.n_embd, 16)), 32 * kExpertWarps, plan.at.bytes, stream, plan);
  });
}

}  // namespace thermo
