// The routed experts of one row in one launch: choice, gate and up, down, weighted sum, residual.
//
// A block to a multiprocessor, all of them resident. When a block knows the choice it asks for everything it
// will read of the experts, gate and up first, down behind them, as copies into shared memory: 128 KiB a
// block, so the memory has one long queue to work through instead of two with a launch between. A block makes
// 2 x 16 hidden columns and hands them to all others through L2, each 12 bytes beside the number of the
// launch: who reads finds out by reading that they are there, with no counter and no fence. Then it makes 16
// outputs.
//
// 1.350 against 1.405 ms a token for two launches. Copies of single chunks (64 a block instead of 12)
// lost, 1.452 against 1.428: the copy engine takes 40 ns to begin each. Gate and up straight into
// registers, 1.441 against 1.438. With split experts the launch lost, 160 against 247 tokens/s (with copies
// of single chunks; the reason was not looked for), so they keep two.
#pragma once

#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/expert_ffn/decode_choice.cuh"
#include "kernels/linear/bulk_copy.cuh"
#include "kernels/linear/dot_product.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

// 16 columns of a hidden row on their way to another block. What has come is known by `launch`, of both
// halves.
struct alignas(32) TaggedActs {
  uint32_t codes[3], launch;
  uint32_t last_codes;
  float scale;
  uint32_t unused;
  uint32_t launch_too;
};
static_assert(sizeof(TaggedActs) == 32);

// [0]: number of the launch; TaggedActs from 128 bytes on.
inline constexpr int kExchangeHead = 128;

// By the first block of a layer's first launch, when it has waited.
__device__ __forceinline__ void count_launch(const DecodeFfnArgs& a) {
  if (a.exchange != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *static_cast<uint32_t*>(a.exchange) += 1;
}

__device__ __forceinline__ void put_tagged(uint4* to, uint4 x) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
__device__ __forceinline__ uint4 look_at_tagged(const uint4* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

struct ExpertsPlan {
  DecodeFfnArgs a;
  int in_panels;                  // of gate
  int out_chunks, shared_chunks;  // of down
};

inline constexpr int kExpertWarps = 16;
inline constexpr int kExpertPairs = 2;  // (expert, 16 hidden columns) of a block, at most

// What the launch needs in shared memory: acts, sums of gate and up, sums of down, panels.
struct ExpertsShared {
  size_t part_in, part_out, stage_in, stage_out, stage_shared, bytes;

  __host__ __device__ ExpertsShared(const ExpertsPlan& p) {
    const size_t n_used = static_cast<size_t>(p.a.config.n_expert_used);
    part_in = sizeof(DotActs) * static_cast<size_t>(dot_chunks(p.a.n_embd));
    part_out = part_in + sizeof(float) * 16 * kExpertPairs * kExpertWarps;
    stage_in =
        part_out + sizeof(float) * 16 *
                       (n_used * static_cast<size_t>(p.out_chunks) + static_cast<size_t>(p.shared_chunks));
    stage_in = (stage_in + 127) / 128 * 128;
    stage_out = stage_in + 2 * kExpertPairs * p.a.gate.panel_bytes;
    stage_shared = stage_out + n_used * p.a.down.panel_bytes;
    bytes = stage_shared + (p.shared_chunks > 0 ? p.a.shared_down.panel_bytes : 0);
  }
};

// silu(gate) * up of 16 rows, rounded, to the other blocks: half a warp each, all 32 lanes here. `codes`: 32
// bytes of shared memory. Who reads adds up the codes.
__device__ __forceinline__ void hand_over(TaggedActs* to, float value, uint32_t launch, bool has,
                                          int8_t* codes) {
  const int lane = threadIdx.x % 32, r = lane & 15;
  float top = fabsf(value);
#pragma unroll
  for (int step = 8; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
  codes[lane] = static_cast<int8_t>(__float2int_rn(value * dot_inverse(top)));
  __syncwarp();
  if (!has || r >= 2) return;
  const uint4 all = *reinterpret_cast<const uint4*>(codes + (lane & 16));
  put_tagged(reinterpret_cast<uint4*>(to) + r,
             r == 0 ? uint4{all.x, all.y, all.z, launch}
                    : uint4{all.w, __float_as_uint(top * (1.0f / 127.0f)), 0, launch});
}

// T: of gate and up.
template <DType T>
__global__ void __maxnreg__(72) decode_experts_kernel(const __grid_constant__ ExpertsPlan plan) {
  constexpr int kHalf = kExpertWarps / 2;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ BlockChoice choice;
  __shared__ float squares[kExpertWarps / 2];
  __shared__ float weights[32];
  // Panels of gate and up, panels of down, the shared expert's.
  constexpr int kSharedBarrier = 2 * kExpertPairs + 31, kExpertBarriers = kSharedBarrier + 1;
  __shared__ __align__(8) uint64_t barriers[kExpertBarriers];
  __shared__ __align__(16) int8_t codes[32];
  const DecodeFfnArgs& a = plan.a;
  const ExpertsShared at(plan);
  DotActs* const acts = reinterpret_cast<DotActs*>(shared);
  float* const part_in = reinterpret_cast<float*>(shared + at.part_in);
  float* const part_out = reinterpret_cast<float*>(shared + at.part_out);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
  const uint32_t launch = *static_cast<const volatile uint32_t*>(a.exchange);
  // A block without hidden columns must not read x: it may be late, and others write it.
  if (n_pairs > 0 && acts_chunk < kHalf) {
    float square = 0.0f;
    if (acts_chunk < dot_chunks(a.n_embd)) {
      NormRow row;
      row.load(a.norm.x, a.n_embd, acts_chunk, lane);
      square = warp_sum(row.make_acts(norm_weights, lane, acts[acts_chunk]));
    }
    if (lane == 0) squares[acts_chunk] = square;
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
  }
  const float scale = norm_scale(squares, kHalf, a.n_embd, a.norm.eps);

  // Gate and up.
  const int s = lane >> 2;
  {
    SubActs x[1];
    x[0].load(acts[min(in_chunk, dot_chunks(a.n_embd) - 1)], s);
    if (s >= in_subs) x[0].meta = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int i = 0; i < n_pairs; ++i) {
      float acc[1][4] = {};
      if (in_subs > 0) {
        const int panel = (warp < kHalf ? 0 : kExpertPairs) + i;
        bulk_wait(&barriers[panel]);
        DotChunk<T> data;
        data.template load<true>(
            reinterpret_cast<const uint8_t*>(shared) + at.stage_in + panel * a.gate.panel_bytes, in_chunk,
            in_subs, lane);
        data.template multiply_sub<1>(x, s, acc);
      }
      store_dot<1>(acc, lane, part_in + (i * kExpertWarps + warp) * 16);
    }
  }
  __syncthreads();
  TaggedActs* const exchange =
      reinterpret_cast<TaggedActs*>(static_cast<std::byte*>(a.exchange) + kExchangeHead);
  const int groups = plan.out_chunks * 16;  // of an expert
  if (warp == 0) {
    const int i = lane / 16, r = lane % 16;
    const int slot = i == 0 ? in_slot[0] : in_slot[1], panel = i == 0 ? in_panel[0] : in_panel[1];
    float value = 0.0f;
    if (i < n_pairs && panel * 16 + r < a.gate.n_rows) {
      float gate[kHalf], up[kHalf];
#pragma unroll
      for (int w = 0; w < kHalf; ++w) {
        gate[w] = part_in[(i * kExpertWarps + w) * 16 + r];
        up[w] = part_in[(i * kExpertWarps + kHalf + w) * 16 + r];
      }
#pragma unroll
      for (int step = kHalf / 2; step > 0; step /= 2)
#pragma unroll
        for (int w = 0; w < step; ++w) gate[w] += gate[w + step], up[w] += up[w + step];
      value = silu(gate[0] * scale) * (up[0] * scale);
    }
    hand_over(exchange + slot * groups + panel, value, launch, i < n_pairs, codes);
  }

  // Down; first the shared expert's, which is known.
  bool is_shared = warp < plan.shared_chunks;
  int item = warp;
#pragma unroll 1
  while (is_shared || item < out_items) {
    const int slot = is_shared ? n_used : item / plan.out_chunks,
              chunk = is_shared ? warp : item - slot * plan.out_chunks;
    const DeviceMatrix& w = is_shared ? a.shared_down : a.down;
    {
      bulk_wait(&barriers[is_shared ? kSharedBarrier : 2 * kExpertPairs + slot]);
      const uint8_t* const panel = reinterpret_cast<const uint8_t*>(shared) +
                                   (is_shared ? at.stage_shared : at.stage_out + slot * a.down.panel_bytes);
      float* const part = part_out + (is_shared ? out_items + chunk : item) * 16;
      for_dot_type(w.dtype, [&]<DType D>() {
        DotChunk<D> data;
        data.template load<true>(panel, chunk, min(8, (w.n_cols - chunk * 256) / 32), lane);
        SubActs x[1] = {};
        if (chunk * 256 + s * 32 < w.n_cols) {
          if (is_shared) {
            x[0].load(static_cast<const DotActs*>(a.hidden)[n_used * a.hidden_stride + chunk], s);
          } else {
            const uint4* const tagged =
                reinterpret_cast<const uint4*>(exchange + slot * groups + chunk * 16 + 2 * s);
            uint4 v[4];
            do {
#pragma unroll
              for (int i = 0; i < 4; ++i) v[i] = look_at_tagged(tagged + i);
            } while (v[0].w != launch || v[1].w != launch || v[2].w != launch || v[3].w != launch);
            x[0].low = {v[0].x, v[2].x, v[0].y, v[2].y};
            x[0].high = {v[0].z, v[2].z, v[1].x, v[3].x};
            const auto sum_of = [](const uint4& u, uint32_t last) {
              int sum = __dp4a(static_cast<int>(u.x), 0x01010101, 0);
              sum = __dp4a(static_cast<int>(u.y), 0x01010101, sum);
              sum = __dp4a(static_cast<int>(u.z), 0x01010101, sum);
              return static_cast<float>(__dp4a(static_cast<int>(last), 0x01010101, sum));
            };
            const float scale0 = __uint_as_float(v[1].y), scale1 = __uint_as_float(v[3].y);
            x[0].meta = {scale0, scale1, scale0 * sum_of(v[0], v[1].x), scale1 * sum_of(v[2], v[3].x)};
          }
        }
        __syncwarp();
        float acc[1][4] = {};
        data.template multiply_sub<1>(x, s, acc);
        const float weight = weights[slot];
#pragma unroll
        for (float& y : acc[0]) y *= weight;
        store_dot<1>(acc, lane, part);
      });
    }
    if (is_shared)
      is_shared = false;
    else
      item += kExpertWarps;
  }
  __syncthreads();
  if (!sums) return;
  const int items = out_items + plan.shared_chunks;
#pragma unroll 6
  for (int i = 0; i < items; ++i) sum += part_out[i * 16 + threadIdx.x];
  a.x[out_row] = sum;
}

template <auto* kKernel>
auto* experts_kernel(size_t shared) {
  static const bool ready = [=] { return allow_shared(kKernel, shared - 8 * 1024), true; }();
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
                         .shared_chunks = a.shared_down.n_rows > 0 ? dot_chunks(a.shared_down.n_cols) : 0};
  const ExpertsShared shared(plan);
  if (blocks > card.n_multiprocessors || plan.in_panels * a.config.n_expert_used > kExpertPairs * blocks ||
      dot_chunks(a.n_embd) > kExpertWarps / 2 || plan.shared_chunks > kExpertWarps ||
      shared.bytes + 8 * 1024 > card.max_shared_bytes)
    return false;
  for_dot_type(a.gate.dtype, [&]<DType T>() {
    launch(experts_kernel<decode_experts_kernel<T>>(card.max_shared_bytes), static_cast<unsigned>(blocks),
           32 * kExpertWarps, shared.bytes, stream, plan);
  });
  return true;
}

}  // namespace thermo
