// The routed experts of one row in one launch: choice, gate and up, down, weighted sum, residual.
//
// A block to a multiprocessor, all of them resident. When a block knows the choice it asks for everything it
// will read of the experts, gate and up first, down after them, as copies into shared memory: 128 KiB a
// block, so the memory has one long queue to work through instead of two with a launch between. A block makes
// 2 x 16 hidden columns and hands them to all others through L2, as floats: who reads finds out by reading
// that they are there, with no counter and no fence. A reader rounds them itself, because 256 columns of 16
// blocks share a step. Then it makes 16 outputs.
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

// [0]: number of the launch; [n_expert_used][round_up(n_ff, 256)] floats from 128 bytes on.
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
  const int n = a.config.n_expert_used * exchange_stride(a.down.n_cols) / 4;
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

struct ExpertsPlan {
  DecodeFfnArgs a;
  int in_panels;                  // of gate
  int out_chunks, shared_chunks;  // of down
  RowBlocks shared;
};

inline constexpr int kExpertWarps = 16;
inline constexpr size_t kExpertsOwn = 12 * 1024;  // shared memory, more than the kernel declares itself
inline constexpr int kExpertPairs = 2;            // (expert, 16 hidden columns) of a block, at most

// What the launch needs in shared memory: the rounded row, a chunk of a hidden row for each warp, values of
// gate and up, values and steps of down, panels.
struct ExpertsShared {
  size_t acts, part_in, part_out, steps_out, stage_in, stage_out, stage_shared, bytes;
  int in_blocks, out_values;  // of a panel of gate; of all of down, with the shared expert's

  __host__ __device__ ExpertsShared(const ExpertsPlan& p) {
    const size_t n_used = static_cast<size_t>(p.a.config.n_expert_used);
    in_blocks = blocks_of(p.a.gate);
    out_values = p.a.config.n_expert_used * p.out_chunks * chunk_blocks_of(p.a.down) +
                 p.shared_chunks * chunk_blocks_of(p.a.shared_down);
    acts = sizeof(BlockActs) * kExpertWarps;
    part_in = acts + sizeof(BlockActs) * static_cast<size_t>(dot_chunks(p.a.n_embd));
    part_out = part_in + sizeof(float) * 16 * 2 * kExpertPairs * static_cast<size_t>(in_blocks);
    steps_out = part_out + sizeof(float) * 16 * static_cast<size_t>(out_values);
    stage_in = (steps_out + sizeof(float) * static_cast<size_t>(out_values) + 127) / 128 * 128;
    stage_out = stage_in + 2 * kExpertPairs * p.a.gate.panel_bytes;
    stage_shared = stage_out + n_used * p.a.down.panel_bytes;
    bytes = stage_shared + (p.shared_chunks > 0 ? p.a.shared_down.panel_bytes : 0);
  }
};

// T: of gate and up.
template <DType T>
__global__ void __maxnreg__(72) decode_experts_kernel(const __grid_constant__ ExpertsPlan plan) {
  constexpr int kHalf = kExpertWarps / 2;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ BlockChoice choice;
  __shared__ float squares[kExpertWarps / 2];
  static_assert(kExpertWarps / 2 <= kMaxNormChunks);
  __shared__ float weights[32];
  __shared__ long long terms[OutputSum::kMaxTerms];
  // Panels of gate and up, panels of down, the shared expert's.
  constexpr int kSharedBarrier = 2 * kExpertPairs + 31, kExpertBarriers = kSharedBarrier + 1;
  __shared__ __align__(8) uint64_t barriers[kExpertBarriers];
  const DecodeFfnArgs& a = plan.a;
  const ExpertsShared at(plan);
  constexpr bool kBig = kPanelFormat<T>.block_cols == 256;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  BlockActs& hidden_acts = reinterpret_cast<BlockActs*>(shared)[warp];
  BlockActs* const acts = reinterpret_cast<BlockActs*>(shared + at.acts);
  float* const part_in = reinterpret_cast<float*>(shared + at.part_in);
  float* const part_out = reinterpret_cast<float*>(shared + at.part_out);
  float* const steps_out = reinterpret_cast<float*>(shared + at.steps_out);
  const int n_used = a.config.n_expert_used, out_items = n_used * plan.out_chunks;
  const int out_panel = blockIdx.x;

  // What the warp multiplies of gate and up: chunk warp % 8 of the same 16 rows of both.
  const int in_chunk = warp % kHalf, in_subs = min(8, (a.n_embd - in_chunk * 256) / 32);
  int n_pairs = 0, in_slot[kExpertPairs], in_panel[kExpertPairs];
#pragma unroll
  for (int i = 0; i < kExpertPairs; ++i) {
    const int pair = blockIdx.x + i * gridDim.x;
    if (pair < n_used * plan.in_panels) ++n_pairs;
    in_slot[i] = pair / plan.in_panels;
    in_panel[i] = pair - in_slot[i] * plan.in_panels;
  }
  touch_params(plan);
  // The first half of the warps chooses, the other half makes the acts.
  const int acts_chunk = (warp + kHalf) % kExpertWarps;
  NormWeights norm_weights;
  norm_weights.load(a.norm.weight, a.n_embd, acts_chunk, lane);
  const uint8_t* const mine = base_of(a);
  if (threadIdx.x < kExpertBarriers) bulk_init(&barriers[threadIdx.x]);
  if (threadIdx.x == kSharedBarrier && plan.shared_chunks > 0) {
    const uint32_t bytes = static_cast<uint32_t>(a.shared_down.panel_bytes);
    bulk_expect(&barriers[kSharedBarrier], bytes);
    bulk_copy(shared + at.stage_shared, a.shared_down.panels + out_panel * a.shared_down.panel_bytes, bytes,
              &barriers[kSharedBarrier]);
  }
  wait_for_inputs();
  const float logit = logit_of(a);
  // A block without hidden columns must not read x: it may be late, and others write it.
  if (n_pairs > 0 && acts_chunk < kHalf) {
    if (acts_chunk < dot_chunks(a.n_embd)) {
      NormRow row;
      row.load(a.norm.x, acts_chunk, a.n_embd, lane);
      const float square = row.make_acts(norm_weights, [&](float4 low, float4 high) {
        put_block_acts<kPanelFormat<T>.block_cols, false>(low, high, lane, acts[acts_chunk]);
      });
      if (lane == 0) squares[acts_chunk] = square;
    }
  }
  const int out_row = out_panel * 16 + threadIdx.x;
  const bool sums = threadIdx.x < 16 && out_row < a.n_embd;
  float sum = sums ? a.x[out_row] : 0.0f;
  const float shared_weight = a.shared_weight == nullptr ? 1.0f : a.routes.pair_weight[n_used];
  offer_candidate(a.config, logit, a.bias, mine, choice);
  __syncthreads();
  rank_candidates<true>(a.config, choice);
  __syncthreads();

  // Ask for everything, gate and up first: few long copies, each takes 40 ns to begin.
  if (lane == 0) {
    if (warp < 2 * kExpertPairs) {
      const int i = warp % kExpertPairs;
      const DeviceMatrix& w = warp < kExpertPairs ? a.gate : a.up;
      const uint8_t* const base =
          i < n_pairs ? choice.chosen_base[i == 0 ? in_slot[0] : in_slot[1]] : nullptr;
      if (base != nullptr) {
        const uint32_t bytes = static_cast<uint32_t>(w.panel_bytes);
        bulk_expect(&barriers[warp], bytes);
        bulk_copy(
            shared + at.stage_in + warp * w.panel_bytes,
            base + reinterpret_cast<size_t>(w.panels) + (i == 0 ? in_panel[0] : in_panel[1]) * w.panel_bytes,
            bytes, &barriers[warp]);
      }
    } else {
      for (int slot = warp - 2 * kExpertPairs; slot < n_used; slot += kExpertWarps - 2 * kExpertPairs) {
        const uint8_t* const base = choice.chosen_base[slot];
        if (base == nullptr) continue;
        const uint32_t bytes = static_cast<uint32_t>(a.down.panel_bytes);
        uint64_t* const barrier = &barriers[2 * kExpertPairs + slot];
        bulk_expect(barrier, bytes);
        bulk_copy(shared + at.stage_out + slot * a.down.panel_bytes,
                  base + reinterpret_cast<size_t>(a.down.panels) + out_panel * a.down.panel_bytes, bytes,
                  barrier);
      }
    }
  }
  __syncwarp();
  allow_next();
  if (warp == kExpertWarps - 1) {
    const float weight = weight_of_choice(a.config, a.bias, choice, lane);
    weights[lane] = lane == n_used ? shared_weight : weight;
    if (blockIdx.x + 1 == gridDim.x) count_uses(a, choice, lane);
  }
  const float scale = norm_scale(squares, a.n_embd, a.norm.eps);

  // Gate and up.
  if (in_subs > 0) {
    SubCodes x[1];
    x[0].load_and_sum<T>(acts[in_chunk], lane >> 2);
#pragma unroll 1
    for (int i = 0; i < n_pairs; ++i) {
      const int panel = (warp < kHalf ? 0 : kExpertPairs) + i;
      bulk_wait(&barriers[panel]);
      DotChunk<T> data;
      data.template load<true>(
          reinterpret_cast<const uint8_t*>(shared) + at.stage_in + panel * a.gate.panel_bytes, in_chunk,
          in_subs, lane);
      dot_values<T, 1>(data, x, in_subs, lane,
                       part_in + (panel * at.in_blocks + in_chunk * kChunkBlocks<T>)*16);
    }
  }
  __syncthreads();
  float* const exchange = exchange_rows(a);
  const int row_stride = exchange_stride(a.down.n_cols);
  if (warp == 0) {
    const int i = lane / 16, r = lane % 16;
    const int slot = i == 0 ? in_slot[0] : in_slot[1], panel = i == 0 ? in_panel[0] : in_panel[1];
    if (i < n_pairs && panel * 16 + r < a.gate.n_rows) {
      const auto sum_of = [&](int which) {
        return chain_values(part_in + (which * kExpertPairs + i) * at.in_blocks * 16 + r, at.in_blocks, acts,
                            kBig, scale);
      };
      hand_over(exchange + slot * row_stride + panel * 16 + r, swiglu_exact(sum_of(0), sum_of(1)));
    }
    __syncwarp();
  }

  // Down; first the shared expert's, which is known.
  const int out_blocks = chunk_blocks_of(a.down), shared_blocks = chunk_blocks_of(a.shared_down);
  bool is_shared = warp < plan.shared_chunks;
  int item = warp;
#pragma unroll 1
  while (is_shared || item < out_items) {
    const int slot = is_shared ? n_used : item / plan.out_chunks,
              chunk = is_shared ? warp : item - slot * plan.out_chunks;
    const DeviceMatrix& w = is_shared ? a.shared_down : a.down;
    bulk_wait(&barriers[is_shared ? kSharedBarrier : 2 * kExpertPairs + slot]);
    const uint8_t* const panel = reinterpret_cast<const uint8_t*>(shared) +
                                 (is_shared ? at.stage_shared : at.stage_out + slot * a.down.panel_bytes);
    const int value = is_shared ? out_items * out_blocks + chunk * shared_blocks : item * out_blocks;
    const int n_subs = min(8, (w.n_cols - chunk * 256) / 32);
    for_dot_type(w.dtype, [&]<DType D>() {
      DotChunk<D> data;
      data.template load<true>(panel, chunk, n_subs, lane);
      ActPiece piece;
      if (is_shared) {
        piece.load(a.hidden + n_used * a.hidden_stride, chunk, w.n_cols, lane);
      } else if (const int column = ActPiece::column(chunk, lane); column < w.n_cols) {
        take_columns(exchange + slot * row_stride + column, piece);
      }
      hidden_values<D>(data, piece, n_subs, lane, hidden_acts, part_out + value * 16, steps_out + value);
    });
    if (is_shared)
      is_shared = false;
    else
      item += kExpertWarps;
  }
  __syncthreads();
  const OutputSum out{.values = part_out,
                      .steps = steps_out,
                      .weights = weights,
                      .n_used = n_used,
                      .slot_values = plan.out_chunks * out_blocks,
                      .row_blocks = blocks_of(a.down),
                      .shared = plan.shared};
  const GridSum total = out.all(terms);
  if (sums) a.x[out_row] = __fadd_rn(sum, total.value());
}

template <auto* kKernel>
auto* experts_kernel(size_t shared) {
  static const bool ready = [=] { return allow_shared(kKernel, shared - kExpertsOwn), true; }();
  static_cast<void>(ready);
  return kKernel;
}

// Whether the blocks are all resident at once, and have the memory; decided once for each shape by the host.
inline bool launch_experts(const DecodeFfnArgs& a, StreamView stream) {
  const DeviceInfo& card = device_in_use();
  if (a.exchange == nullptr || a.config.n_expert == 0 || !dependent_launch()) return false;
  const int blocks = ceil_div(a.n_embd, 16);
  const ExpertsPlan plan{.a = a,
                         .in_panels = ceil_div(a.gate.n_rows, 16),
                         .out_chunks = dot_chunks(a.down.n_cols),
                         .shared_chunks = a.shared_down.n_rows > 0 ? dot_chunks(a.shared_down.n_cols) : 0,
                         .shared = a.shared_down};
  const ExpertsShared shared(plan);
  if (blocks > card.n_multiprocessors || plan.in_panels * a.config.n_expert_used > kExpertPairs * blocks ||
      dot_chunks(a.n_embd) > kExpertWarps / 2 || plan.shared_chunks > kExpertWarps ||
      shared.bytes + kExpertsOwn > card.max_shared_bytes)
    return false;
  for_dot_type(a.gate.dtype, [&]<DType T>() {
    launch(experts_kernel<decode_experts_kernel<T>>(card.max_shared_bytes), static_cast<unsigned>(blocks),
           32 * kExpertWarps, shared.bytes, stream, plan);
  });
  return true;
}

}  // namespace thermo
