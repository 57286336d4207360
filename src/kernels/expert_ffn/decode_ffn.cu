// One row, or two. Bytes are few per launch (35B-A3B: 3 and 14.7 MB), so what counts is the chain of waits:
// every launch asks for its weights before it waits for the one before, norms are made by their readers, and
// sums over experts by the block that has all of them.
//
//   front: blocks 0 .. 63 multiply 16 rows x 512 columns of the router; who needs the choice makes it from
//          their sums. The blocks after them compute the shared expert's gate and up, which depend on no
//          choice, a warp per 256 columns of each, and the last ones shift the convolution's columns of the
//          DeltaNet before and ask for the next layer's projections.
//   experts: everything else in one launch (decode_experts.cuh), where none can be cold and the card and the
//          shape allow it. Else two:
//   in:    a block has 16 rows of gate and of up of one expert, a warp per 256 columns of each: all 256
//          blocks are resident at once, and those that only tell the host about cold experts too.
//   out:   a block has 16 rows of down of all experts, a warp per 256 columns (18 warps, 128 blocks).
//
// Timed inside the step (clocks of all blocks; each reading costs 0.12 us): a launch waits 0.3 us for the one
// before, so it is the serial parts inside that cost. The sum at the end of `out` took 1.6 us of loops that
// load one number at a time, the choice 1.4, norm and rounding of the row 1.1. Tried and lost: down of the
// chosen experts into L2 while gate and up run (1.450 against 1.438 ms a token); all shared memory for every
// kernel (cudaFuncAttributePreferredSharedMemoryCarveout 100: 1.636 against 1.492 ms; loads in flight need
// the L1 that is left); both chunks of the shared expert in registers (they spill). In doubt: 16 instead of 8
// warps to a block of front (1.349 to 1.351 ms against 1.351).
//
// Split, all experts hot: 1.448 ms a token, where two launches take 1.376 without. It was 1.566 while every
// warp of every block asked for the words of the parcels, 1.594 with a stage in shared memory for what is
// read over the link. Made no difference: dealing by each warp instead of one and a barrier; a block of its
// own for the post; the look at the parcels before the wait; the processor's row by warps without other work.
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/expert_ffn/decode_choice.cuh"
#include "kernels/expert_ffn/decode_experts.cuh"
#include "kernels/expert_ffn/decode_ffn_cuda.h"
#include "kernels/linear/linear_few_cuda.h"
#include "kernels/quant_matmul/panel_columns.cuh"
#include "kernels/route_topk/router_sum.cuh"
#include "kernels/row_ops/conv_shift.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {
namespace {

constexpr int kFrontThreads = 32 * kRouterWarps;
constexpr int kInThreads = 512;
constexpr int kMaxOutWarps = 20;

struct FrontPlan {
  DecodeFfnArgs a;
  int router_blocks, shared_blocks, conv_blocks;
  RowBlocks blocks;  // of the shared gate
  InShared at;
  SumCuts cuts;  // of a dense layer
};

constexpr int kPrefetchBlocks = 64;

// Lines of the next matrices, to L2.
__device__ __forceinline__ void prefetch(const DecodeFfnArgs& a, int block) {
  for (const DevicePrefetch& p : a.next) {
    for (size_t at = (static_cast<size_t>(block) * kFrontThreads + threadIdx.x) * 128; at < p.bytes;
         at += static_cast<size_t>(kPrefetchBlocks) * kFrontThreads * 128)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p.from + at));
  }
}

// silu(gate) * up of 16 rows of the matrices, from the values of their n_blocks blocks, by a warp for each of
// the kRows rows of the step. `big`: of 256 columns.
template <int kRows = 1>
__device__ __forceinline__ void store_hidden(const DecodeFfnArgs& a, int n_rows, const float* gate,
                                             const float* up, int n_blocks, bool big, const BlockActs* acts,
                                             float scale, int panel, int slot) {
  const int lane = threadIdx.x % 32, r = lane % 16, act = kRows > 1 ? threadIdx.x / 32 : 0,
            row = panel * 16 + r;
  acts += act * dot_chunks(a.n_embd);
  const float x =
      swiglu_of_halves<16 * kRows>(gate + act * 16, up + act * 16, n_blocks, acts, big, scale, lane);
  if (lane < 16 && row < n_rows)
    a.hidden[(act * (a.config.n_expert_used + 1) + slot) * a.hidden_stride + row] = x;
}
// The same of a dense layer, whose sums are cut.
__device__ __noinline__ void store_hidden_cut(const FrontPlan& plan, const float* gate, const float* up,
                                              const BlockActs* acts, float scale, int panel) {
  const int r = threadIdx.x, row = panel * 16 + r;
  if (r >= 16 || row >= plan.a.shared_gate.n_rows) return;
  const bool big = plan.blocks.chunk_blocks == 1;
  const auto sum = [&](const float* values) {
    return chain_part(values + r, plan.blocks, plan.cuts, 0,
                      [&](int b) { return __fmul_rn(step_of_block(acts, big, b), scale); });
  };
  plan.a.hidden[plan.a.config.n_expert_used * plan.a.hidden_stride + row] = swiglu_exact(sum(gate), sum(up));
}

template <DType T, int kRows>
__device__ __forceinline__ void route(const FrontPlan& plan, float (*part)[kRows * 16], float* squares,
                                      float* dots) {
  constexpr int kLoads = kRouterLoads, kWarps = kRouterWarps;
  const DecodeFfnArgs& a = plan.a;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane & 3;
  const int panel = blockIdx.x / kRouterParts, k_part = blockIdx.x % kRouterParts;
  const int n_cols = a.n_embd, n_expert = a.config.n_expert, n_used = a.config.n_expert_used;
  const RouterShare share(n_cols, k_part, warp);
  const int begin = share.begin, end = a.router.n_rows > 0 ? share.end : share.begin;
  const uint8_t* const weights = a.router.panels + panel * a.router.panel_bytes;
  const bool has_gate = blockIdx.x == 0 && a.shared_weight != nullptr;
  float4 w[kLoads];
  float norm[kLoads];
  const auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int c = from + lane / 4 + 8 * i;
      w[i] = c < end ? load_column<T>(weights, c, q) : float4{0, 0, 0, 0};
      norm[i] = c < end ? __ldg(a.norm.weight + c) : 0.0f;
    }
  };
  load(begin);
  allow_next();
  wait_for_inputs();
  count_launch(a);
  clear_exchange(a, blockIdx.x, plan.router_blocks);

  // All loads first: one trip to L2. Chunks of the second row follow those of the first.
  const int n_chunks = dot_chunks(n_cols);
  const auto row_of = [&](int item) { return kRows > 1 && item >= n_chunks ? 1 : 0; };
  const auto load_own = [&](int item, NormRow& to) {
    const int row = row_of(item);
    to.load(a.norm.x + row * n_cols, item - row * n_chunks, n_cols, lane);
  };
  NormRow own;
  if (warp < kRows * n_chunks) load_own(warp, own);
  float acc[kRows][4] = {};
  for (int from = begin; from < end; from += 8 * kLoads) {
    if (from != begin) load(from);
    float x[kRows][kLoads];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        x[r][i] = a.norm.x[r * n_cols + min(from + lane / 4 + 8 * i, n_cols - 1)];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) add_router_column(w[i], __fmul_rn(x[r][i], norm[i]), acc[r]);
  }
  for (int item = warp; item < kRows * n_chunks; item += kWarps) {
    if (item != warp) {
      own = {};
      load_own(item, own);
    }
    const int row = row_of(item), chunk = item - row * n_chunks;
    const float square = add_lanes(add_squares(add_squares(0.0f, own.low), own.high));
    if (lane == 0) squares[row * kMaxNormChunks + chunk] = square;
    if (!has_gate) continue;
    NormWeights n, g;
    n.load(a.norm.weight, n_cols, chunk, lane);
    g.load(a.shared_weight, n_cols, chunk, lane);
    const float dot =
        add_lanes(add_products(add_products(0.0f, own.low, n.low, g.low), own.high, n.high, g.high));
    if (lane == 0) dots[row * kMaxNormChunks + chunk] = dot;
  }
  // The processor's copy of the row; its factor follows with the pairs.
  if (blockIdx.x == 0 && a.cold.mail != nullptr && *a.cold.n_cold > 0)
    for (int c = threadIdx.x; c < n_cols / 4; c += kFrontThreads) {
      const float4 x = reinterpret_cast<const float4*>(a.norm.x)[c],
                   n = __ldg(reinterpret_cast<const float4*>(a.norm.weight) + c);
      reinterpret_cast<float4*>(a.cold.x)[c] = times(x, n);
    }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    scatter_sums(acc[r], lane);
    if (lane < 16) part[warp][r * 16 + router_row(lane)] = acc[r][0];
  }
  __syncthreads();
  // Which parcels are here: as late as it can be asked, by a warp that has nothing else to do.
  if (warp == 1 && blockIdx.x == 0 && a.cold.mail != nullptr && lane < kMaxParcels)
    a.cold.came[lane] = look_at_parcel(a.cold, lane);
  if (warp != 0 || lane >= 16 * kRows) return;
  const int row = lane / 16, e = panel * 16 + lane % 16;
  const float scale = norm_scale(squares + row * kMaxNormChunks, n_cols, a.norm.eps);
  if (e < n_expert)
    a.routes.partial[(k_part * kRows + row) * n_expert + e] =
        __fmul_rn(add_router_parts(&part[0][lane], kRows * 16), scale);
  if (has_gate && lane % 16 == 0)
    a.routes.pair_weight[row * (n_used + 1) + n_used] =
        sigmoid_device(__fmul_rn(add_chunks(dots + row * kMaxNormChunks, n_chunks), scale));
}

// T: of the router. S: of the shared expert's gate and up; F32: they differ.
template <DType T, DType S, int kRows>
__global__ void __launch_bounds__(kFrontThreads, 2)
    decode_front_kernel(const __grid_constant__ FrontPlan plan) {
  constexpr int kWarps = kFrontThreads / 32;
  __shared__ __align__(16) float part[kWarps][kRows * 16];
  __shared__ float squares[kRows * kMaxNormChunks], dots[kRows * kMaxNormChunks];
  extern __shared__ __align__(16) std::byte stages[];
  const DecodeFfnArgs& a = plan.a;
  const int block = static_cast<int>(blockIdx.x);
  touch_params(plan);
  if (block < plan.router_blocks) return route<T, kRows>(plan, part, squares, dots);
  if (block >= plan.router_blocks + plan.shared_blocks) {
    const int other = block - plan.router_blocks - plan.shared_blocks;
    allow_next();
    if (other >= plan.conv_blocks) prefetch(a, other - plan.conv_blocks);
    wait_for_inputs();
    if (other < plan.conv_blocks) shift_conv(a.conv, other);
    return;
  }
  BlockActs* const acts = reinterpret_cast<BlockActs*>(stages);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int panel = block - plan.router_blocks;
  const bool is_gate = warp < kWarps / 2;
  const DeviceMatrix& w = is_gate ? a.shared_gate : a.shared_up;
  NormWeights norm_weights;
  norm_weights.load(a.norm.weight, a.n_embd, norm_chunk(a.n_embd, warp), lane);
  const uint8_t* const bytes = w.panels + panel * w.panel_bytes;
  const auto ready = [&] {
    allow_next();
    wait_for_inputs();
    count_launch(a);
    make_norm_acts<kRows>(a.norm.x, a.norm.weight, norm_weights, a.n_embd, warp, kWarps, lane, squares,
                          [&](int chunk, float4 low, float4 high) {
                            if (S == DType::F32 ? plan.blocks.chunk_blocks == 1 : act_group_cols(S) == 256)
                              put_block_acts<256, false>(low, high, lane, acts[chunk]);
                            else
                              put_block_acts<32, false>(low, high, lane, acts[chunk]);
                          });
    __syncthreads();
  };
  const int first = warp % (kWarps / 2);
  float* const gate = reinterpret_cast<float*>(stages + plan.at.gate);
  float* const up = reinterpret_cast<float*>(stages + plan.at.up);
  const auto run = [&]<DType W>() {
    in_values<W, kRows>(w, bytes, first, kWarps / 2, acts, lane, is_gate ? gate : up, ready);
  };
  if constexpr (S == DType::F32)
    for_dot_type(w.dtype, run);
  else
    run.template operator()<S>();
  // What is known before the barrier is made before it.
  const bool stores = warp < kRows;
  const float scale = stores ? norm_scale(squares + warp * kMaxNormChunks, a.n_embd, a.norm.eps) : 0.0f;
  __syncthreads();
  if (!stores) return;
  if (kRows == 1 && plan.cuts.any())
    store_hidden_cut(plan, gate, up, acts, scale, panel);
  else
    store_hidden<kRows>(a, a.shared_gate.n_rows, gate, up, plan.blocks.n, plan.blocks.chunk_blocks == 1, acts,
                        scale, panel, a.config.n_expert_used);
}

// kSplit: experts may be cold. Then there is one more block, which tells the host: it takes microseconds, and
// in a block with weights of its own the layer would wait for it.
template <DType T, bool kSplit>
__global__ void __launch_bounds__(kInThreads, 2) decode_in_kernel(const __grid_constant__ DecodeFfnArgs a) {
  constexpr int kWarps = kInThreads / 32;
  __shared__ float squares[kMaxNormChunks];
  extern __shared__ __align__(16) std::byte stages[];
  constexpr bool kBig = kPanelFormat<T>.block_cols == 256;
  const int n_blocks = a.n_embd / kPanelFormat<T>.block_cols;
  const InShared at(n_blocks, a.n_embd);
  BlockActs* const acts = reinterpret_cast<BlockActs*>(stages);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int panel = blockIdx.x;
  touch_params(a);
  const DeviceMatrix& w = warp < kWarps / 2 ? a.gate : a.up;
  // The first half of the warps chooses, the other half makes the first acts.
  const int acts_warp = (warp + kWarps / 2) % kWarps;
  NormWeights norm_weights;
  norm_weights.load(a.norm.weight, a.n_embd, norm_chunk(a.n_embd, acts_warp), lane);
  __shared__ BlockCandidates candidates;
  __shared__ BlockChoice choice;
  __shared__ BlockCold cold;
  const bool posts = kSplit && blockIdx.x + 1 == gridDim.x;
  const uint8_t* const mine = base_of(a, threadIdx.x);
  const bool counts = !kSplit && blockIdx.x + blockIdx.y == 0 && warp == kWarps - 1;
  int16_t* const drafted = counts ? drafted_of(a.routes.uses, 0, a.config.n_expert_used) : nullptr;
  wait_for_inputs();
  if (posts && blockIdx.y != 0) return;
  allow_next();  // after the wait: the next kernel reads the logits before its own
  const float logit = logit_of(a, threadIdx.x);
  BlockColdPart cold_part;
  if (kSplit && warp == kWarps - 1) cold_part.begin(a.cold, lane);
  make_norm_acts(a.norm.x, a.norm.weight, norm_weights, a.n_embd, acts_warp, kWarps, lane, squares,
                 [&](int chunk, float4 low, float4 high) {
                   put_block_acts<kPanelFormat<T>.block_cols, false>(low, high, lane, acts[chunk]);
                 });
  offer_candidate(a.config, threadIdx.x, logit, a.bias, mine, candidates);
  if (kSplit && warp == kWarps - 1) cold_part.end(cold, lane);
  __syncthreads();
  rank_candidates<true>(a.config, threadIdx.x, blockDim.x, candidates, choice);
  __syncthreads();
  ColdChoice dealt;
  if constexpr (kSplit) dealt = deal_cold(a, choice, cold, lane);
  if (posts) {
    if (warp == 0) post_cold(a, choice, cold, dealt, norm_scale(squares, a.n_embd, a.norm.eps));
    return;
  }
  if (counts) count_uses(a, choice, drafted, lane);
  const uint8_t* const base = chosen_base_of<kSplit>(choice, dealt, blockIdx.y);
  if (kSplit && base == nullptr) return;
  const uint8_t* const bytes = base + reinterpret_cast<size_t>(w.panels) + panel * w.panel_bytes;
  float* const gate = reinterpret_cast<float*>(stages + at.gate);
  float* const up = reinterpret_cast<float*>(stages + at.up);
  in_values<T>(w, bytes, warp % (kWarps / 2), kWarps / 2, acts, lane, warp < kWarps / 2 ? gate : up, [] {});
  const float scale = warp == 0 ? norm_scale(squares, a.n_embd, a.norm.eps) : 0.0f;
  __syncthreads();
  if (warp == 0) store_hidden(a, a.gate.n_rows, gate, up, n_blocks, kBig, acts, scale, panel, blockIdx.y);
}

struct OutPlan {
  DecodeFfnArgs a;
  int chunks, shared_chunks;  // of a routed matrix (0: none), of the shared one
  int values;                 // of all of them
  RowBlocks down, shared;
  SumCuts cuts;  // of a dense layer
};
// Shared memory of a block with so many warps: a chunk of a hidden row for each, values, steps.
__host__ __device__ constexpr size_t out_values_at(int n_warps) {
  return sizeof(BlockActs) * static_cast<size_t>(n_warps);
}

// T: the type of all matrices; F32: they differ.
template <DType T, bool kSplit>
__global__ void __maxnreg__(72) decode_out_kernel(const __grid_constant__ OutPlan plan) {
  extern __shared__ __align__(16) std::byte stages[];
  __shared__ BlockCandidates candidates;
  __shared__ BlockChoice choice;
  __shared__ float weights[32];
  __shared__ long long terms[OutputSum::kMaxTerms];
  __shared__ BlockCold cold;
  ColdChoice dealt;
  const DecodeFfnArgs& a = plan.a;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
  const int n_used = a.config.n_expert_used, routed_items = n_used * plan.chunks,
            items = routed_items + plan.shared_chunks;
  const int panel = blockIdx.x;
  touch_params(plan);
  allow_next();
  BlockActs& hidden_acts = reinterpret_cast<BlockActs*>(stages)[warp];
  float* const values = reinterpret_cast<float*>(stages + out_values_at(n_warps));
  float* const steps = values + plan.values * 16;
  const int blocks = plan.down.chunk_blocks, shared_blocks = plan.shared.chunk_blocks;
  const auto run = [&](int item, const auto& ready) {
    const bool routed = item < routed_items;
    const int slot = routed ? item / plan.chunks : n_used;
    const int chunk = routed ? item - slot * plan.chunks : item - routed_items;
    const DeviceMatrix& w = routed ? a.down : a.shared_down;
    const uint8_t* const base = routed ? chosen_base_of<kSplit>(choice, dealt, slot) : nullptr;
    if (kSplit && routed && base == nullptr) return ready();
    const uint8_t* const bytes = base + reinterpret_cast<size_t>(w.panels) + panel * w.panel_bytes;
    const int value = routed ? item * blocks : routed_items * blocks + chunk * shared_blocks;
    const int n_subs = min(8, (w.n_cols - chunk * 256) / 32);
    const auto run_type = [&]<DType D>() {
      DotChunk<D> data;
      data.load(bytes, chunk, n_subs, lane);
      ready();
      ActPiece piece;
      piece.load(a.hidden + slot * a.hidden_stride, chunk, w.n_cols, lane);
      hidden_values<D>(data, piece, n_subs, lane, hidden_acts, values + value * 16, steps + value);
    };
    if constexpr (T == DType::F32)
      for_dot_type(w.dtype, run_type);
    else
      run_type.template operator()<T>();
  };
  if (n_used > 0) {
    BlockColdPart cold_part;
    if (kSplit && warp == n_warps - 1) cold_part.begin(a.cold, lane);
    offer_candidate(a.config, threadIdx.x, logit_of(a, threadIdx.x), a.bias, base_of(a, threadIdx.x),
                    candidates);
    if (kSplit && warp == n_warps - 1) cold_part.end(cold, lane);
    __syncthreads();
    rank_candidates<true>(a.config, threadIdx.x, blockDim.x, candidates, choice);
    __syncthreads();
    if (warp == 0) {
      const float weight = weight_of_choice(a.config, a.bias, choice, lane);
      if (lane < n_used) weights[lane] = weight;
    }
    if constexpr (kSplit) dealt = deal_cold(a, choice, cold, lane);
  }
  if (warp < items)
    run(warp, [] { wait_for_inputs(); });
  else
    wait_for_inputs();
#pragma unroll 1
  for (int item = warp + n_warps; item < items; item += n_warps) run(item, [] {});
  // The sum's latency counts: what it adds to is on its way before the barrier.
  const int row = panel * 16 + threadIdx.x;
  const bool sums = threadIdx.x < 16 && row < a.n_embd;
  const float before = sums ? a.x[row] : 0.0f;
  if (threadIdx.x == 0) weights[n_used] = a.shared_weight != nullptr ? a.routes.pair_weight[n_used] : 1.0f;
  __syncthreads();
  const OutputSum out{.values = values,
                      .steps = steps,
                      .weights = weights,
                      .n_used = n_used,
                      .slot_values = plan.chunks * blocks,
                      .row_blocks = plan.down.n,
                      .shared = plan.shared,
                      .shared_cuts = plan.cuts,
                      .elsewhere = dealt.in_mail};
  GridSum total = out.all(terms);
  const bool answered = kSplit && dealt.in_mail != 0;
  if (answered) wait_until_near(a.cold, panel == 0);
  if (!sums) return;
  if (answered) total.add_part(take_answer(a.cold, row, ticket_of(a.cold)));
  if (kSplit && row == a.n_embd - 1 && (dealt.in_mail | dealt.in_host) != 0) {
    const uint64_t now = device_clock_ns();
    a.cold.record->went_ns = now;
    if (!answered) a.cold.record->ready_ns = now;
  }
  a.x[row] = __fadd_rn(before, total.value());
}

}  // namespace

namespace {

OutPlan plan_out(const DecodeFfnArgs& args) {
  const bool routed = args.config.n_expert > 0;
  OutPlan out{.a = args,
              .chunks = routed ? dot_chunks(args.down.n_cols) : 0,
              .shared_chunks = args.shared_down.n_rows > 0 ? dot_chunks(args.shared_down.n_cols) : 0,
              .values = 0,
              .down = args.down,
              .shared = args.shared_down,
              .cuts = {}};
  out.values = args.config.n_expert_used * out.chunks * chunk_blocks_of(args.down) +
               out.shared_chunks * chunk_blocks_of(args.shared_down);
  return out;
}
size_t out_shared_bytes(const OutPlan& out, int n_warps) {
  return out_values_at(n_warps) + sizeof(float) * 17 * static_cast<size_t>(out.values);
}

// Blocks of 32 columns have many values: more memory than a kernel may use unasked.
template <class Kernel>
Kernel* with_shared(Kernel* kernel, size_t bytes) {
  if (bytes > 32 * 1024) allow_shared(kernel, bytes);
  return kernel;
}

}  // namespace

namespace {

size_t in_bytes(const DeviceMatrix& w, const DecodeFfnArgs& a, int n_rows) {
  return static_cast<size_t>(InShared(blocks_of(w), a.n_embd, n_rows).bytes);
}

}  // namespace

bool decode_ffn_possible(const DecodeFfnArgs& a) noexcept {
  const auto good = [](const DeviceMatrix& m) { return m.n_rows == 0 || has_dot(m.dtype); };
  constexpr size_t kOwn = 12 * 1024;  // more than the kernels declare themselves
  const auto fits = [](size_t bytes) { return bytes + kOwn <= device_in_use().max_shared_bytes; };
  const auto fits_all = [&] {
    return fits(in_bytes(a.gate, a, 1)) && fits(in_bytes(a.shared_gate, a, a.n_rows)) &&
           fits(out_shared_bytes(plan_out(a), kMaxOutWarps));
  };
  return good(a.gate) && a.gate.dtype == a.up.dtype && good(a.down) && good(a.shared_gate) &&
         good(a.shared_up) && good(a.shared_down) &&
         act_group_cols(a.shared_gate.dtype) == act_group_cols(a.shared_up.dtype) &&
         dot_chunks(a.n_embd) <= kMaxNormChunks &&
         (a.config.n_expert == 0 || (is_float_type(a.router.dtype) && a.config.n_expert <= kBlockExperts &&
                                     a.config.n_expert_used < 32)) &&
         (a.n_rows == 1 || experts_possible(a)) && fits_all();
}

size_t decode_exchange_bytes(int n_used, int n_ff) noexcept {
  return kExchangeHead + sizeof(float) * static_cast<size_t>(kMaxNormActs * n_used * exchange_stride(n_ff));
}

namespace {

// A dense layer of several rows goes through linear_cuda(), which cuts its sums.
bool is_cut(const DecodeFfnArgs& args) {
  return args.config.n_expert == 0 && args.shared_weight == nullptr;
}
SumCuts in_cuts(const DecodeFfnArgs& args) {
  DeviceLinearArgs in;
  in.jobs[0].w = args.shared_gate;
  in.jobs[1].w = args.shared_up;
  in.n_jobs = 2;
  return is_cut(args) ? linear_sum_cuts(in) : SumCuts{};
}
SumCuts out_cuts(const DecodeFfnArgs& args) {
  DeviceLinearArgs out;
  out.jobs[0].w = args.shared_down;
  out.jobs[0].k_parts = linear_few_parts(args.shared_down);
  out.n_jobs = 1;
  return is_cut(args) ? linear_sum_cuts(out) : SumCuts{};
}

}  // namespace

void decode_ffn_cuda(const DecodeFfnArgs& args, StreamView stream) noexcept {
  FrontPlan front{.a = args,
                  .router_blocks = 0,
                  .shared_blocks = ceil_div(args.shared_gate.n_rows, 16),
                  .conv_blocks = shift_conv_blocks(args.conv, kFrontThreads),
                  .blocks = args.shared_gate,
                  .at = {blocks_of(args.shared_gate), args.n_embd, args.n_rows},
                  .cuts = in_cuts(args)};
  const bool routed = args.config.n_expert > 0;
  if (routed) front.router_blocks = kRouterParts * ceil_div(args.config.n_expert, 16);
  const unsigned blocks =
      static_cast<unsigned>(front.router_blocks + front.shared_blocks + front.conv_blocks +
                            (args.next[0].bytes > 0 ? kPrefetchBlocks : 0));
  const auto launch_front = [&]<DType S>() {
    const size_t bytes = static_cast<size_t>(front.at.bytes);
    const auto of_type = [&]<DType T>() {
      launch(
          with_shared(args.n_rows == 1 ? decode_front_kernel<T, S, 1> : decode_front_kernel<T, S, 2>, bytes),
          blocks, kFrontThreads, bytes, stream, front);
    };
    if (!routed || args.router.dtype == DType::F32)
      of_type.template operator()<DType::F32>();
    else if (args.router.dtype == DType::F16)
      of_type.template operator()<DType::F16>();
    else
      of_type.template operator()<DType::BF16>();
  };
  if (args.shared_gate.dtype != args.shared_up.dtype)
    launch_front.template operator()<DType::F32>();
  else
    for_dot_type(args.shared_gate.dtype, launch_front);
  const bool split = routed && args.cold.mail != nullptr;
  if (experts_possible(args)) return launch_experts(args, stream);
  if (routed) {
    const dim3 grid(static_cast<unsigned>(ceil_div(args.gate.n_rows, 16) + split),
                    static_cast<unsigned>(args.config.n_expert_used));
    for_dot_type(args.gate.dtype, [&]<DType T>() {
      const size_t bytes = in_bytes(args.gate, args, 1);
      launch(with_shared(split ? decode_in_kernel<T, true> : decode_in_kernel<T, false>, bytes), grid,
             kInThreads, bytes, stream, args);
    });
  }
  OutPlan out = plan_out(args);
  out.cuts = out_cuts(args);
  const int items = args.config.n_expert_used * out.chunks + out.shared_chunks;
  const int rounds = ceil_div(items, kMaxOutWarps), wanted = ceil_div(items, rounds);
  const int n_warps = wanted < kBlockExperts / 32 ? kBlockExperts / 32 : wanted;  // for the choice
  const bool mixed = routed && out.shared_chunks > 0 && args.down.dtype != args.shared_down.dtype;
  const auto launch_out = [&]<DType T>() {
    const size_t bytes = out_shared_bytes(out, n_warps);
    launch(with_shared(split ? decode_out_kernel<T, true> : decode_out_kernel<T, false>, bytes),
           static_cast<unsigned>(ceil_div(args.n_embd, 16)), 32 * static_cast<unsigned>(n_warps), bytes,
           stream, out);
  };
  if (mixed)
    launch_out.template operator()<DType::F32>();
  else
    for_dot_type(routed ? args.down.dtype : args.shared_down.dtype, launch_out);
}

}  // namespace thermo
