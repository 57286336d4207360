// Decode: a block takes 16 rows of gate and the same 16 of up of one slot, one warp per 256 columns of each
// (16 warps), so that all bytes of the chosen experts are in flight at once; then the same for down. 35B-A3B,
// one row: 288 blocks each, 0.5 MB of gate and up and 0.6 MB of down per expert. Prefill: tile_product.cuh, a
// block per (slot of 16 or 64 pairs, 128 rows of gate and up or 256 of down). Slots of 128 pairs, which leave
// room for one block to a multiprocessor, take 4 % longer at 64 pairs an expert.
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/expert_ffn/expert_ffn_cuda.h"
#include "kernels/linear/dot_product.cuh"
#include "kernels/linear/tile_product.cuh"
#include "kernels/linear/warp_product.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {
namespace {

__device__ __forceinline__ DeviceMatrix matrix_of(const uint8_t* base, const DeviceMatrix& routed,
                                                  const DeviceMatrix& shared) {
  if (base == nullptr) return shared;
  DeviceMatrix m = routed;
  m.panels = base + reinterpret_cast<size_t>(routed.panels);
  return m;
}

__device__ __forceinline__ ActsOut acts_out(const DeviceActsOut& o) {
  return {static_cast<half*>(o.f16), o.f32, o.f16_stride, o.f32_stride, o.scale};
}

// Whether the slot is to be computed now, and where its expert lies (nullptr: the shared one).
__device__ __forceinline__ bool resolve(const DeviceExpertArgs& a, const DeviceSlot& slot,
                                        const uint8_t*& base) {
  base = slot.base;
  if (a.table == nullptr) return true;
  const int expert = slot.expert;
  if (expert == a.n_expert) {
    base = nullptr;
    return a.with_shared;
  }
  base = a.table[expert];
  return base != nullptr;
}

// Warps that share a panel, and panels of a block of `n_warps` warps.
constexpr int kInWarps = 4;  // of gate, and as many of up: all blocks of a decoded token are resident at once
constexpr int kOutWarps = 8;
// `few`: slots, so few that every warp is needed; with many a warp has a panel of its own and streams it.
__host__ __device__ constexpr int expert_split_log2(int n_cols, int n_warps, bool few) {
  if (!few) return 0;
  const int n_chunks = (n_cols + 255) / 256;
  const int most = n_chunks >= 8 ? 3 : n_chunks >= 4 ? 2 : n_chunks >= 2 ? 1 : 0;
  const int have = n_warps >= 8 ? 3 : 2;
  return most < have ? most : have;
}

// What a block of a small step works on: some panels of one slot.
struct SmallTile {
  int first_panel, panels_here, split, warp, lane;
  int panel, chunk, step;  // of this warp
  const uint8_t* bytes;    // of its panel; nullptr: none

  // `warp`: among the n_warps of the matrix. `panels` of a routed matrix counts from the expert's address.
  __device__ __forceinline__ SmallTile(const DeviceMatrix& w, const uint8_t* base, int warp_, int n_warps,
                                       bool few)
      : warp(warp_), lane(threadIdx.x % 32) {
    split = expert_split_log2(w.n_cols, n_warps, few);
    panels_here = n_warps >> split;
    first_panel = blockIdx.x * panels_here;
    panel = first_panel + (warp >> split);
    chunk = warp & ((1 << split) - 1);
    step = 1 << split;
    bytes =
        panel * 16 < w.n_rows ? base + reinterpret_cast<size_t>(w.panels) + panel * w.panel_bytes : nullptr;
  }
};

// part = the warp's share for `n_acts` <= 8 activation rows: integer dot products read the weights once for
// every two rows. `row_of(a)`: of x.
template <int kMaxActs, class RowOf, class Ready>
__device__ __forceinline__ void slot_dot(const DeviceMatrix& w, const SmallTile& tile, const DeviceActs& x,
                                         const RowOf& row_of, int n_acts, float* part, const Ready& ready) {
  for_dot_type(w.dtype, [&]<DType T>() {
    const auto run = [&]<int kActs>(int first, const auto& when) {
      const auto row = [&](int a) { return row_of(first + min(a, n_acts - first - 1)); };
      dot_product_of<T, kActs, kMaxActs == 8>(w, tile.bytes, tile.chunk, tile.step, StoredActs{x, row},
                                              tile.lane, part + first * 16, when);
    };
    if (n_acts == 1) return run.template operator()<1>(0, ready);
    if (kMaxActs == 2 || n_acts == 2) return run.template operator()<2>(0, ready);
    if constexpr (kMaxActs > 2) {
      const auto row = [&](int a) { return row_of(min(a, n_acts - 1)); };
      mma_product_of<T>(w, tile.bytes, tile.chunk, tile.step, StoredActs{x, row}, tile.lane, part, ready);
    }
  });
}

// kDotActs: 0: tensor cores; 2, 8: integer dot products, rows of a slot at most.
template <int kDotActs>
__global__ void __launch_bounds__(64 * kInWarps, kDotActs == 0   ? 4
                                                 : kDotActs == 2 ? 3
                                                                 : 2)
    expert_in_small_kernel(const __grid_constant__ DeviceExpertArgs a) {
  __shared__ __align__(16) float part[2 * kInWarps][kPartFloats];
  extern __shared__ __align__(16) std::byte stages[];
  wait_for_inputs();
  allow_next();  // after the wait: the next kernel reads the slots before its own
  // From the last on: those of the shared expert have the most rows.
  const int at = *a.routes.n_slots - 1 - static_cast<int>(blockIdx.y);
  if (at < 0) return;
  const DeviceSlot& slot = a.routes.slots[at];
  const int first = slot.first, n_acts = slot.count;
  const uint8_t* base;
  if (!resolve(a, slot, base)) return;
  const int warp = threadIdx.x / 32;
  const DeviceMatrix& w =
      warp < kInWarps ? (base == nullptr ? a.shared_gate : a.gate) : (base == nullptr ? a.shared_up : a.up);
  const SmallTile tile(w, base, warp % kInWarps, kInWarps, kDotActs != 8);
  const auto row_of = [&](int p) { return slot.rows[p]; };
  if constexpr (kDotActs > 0)
    slot_dot<kDotActs>(w, tile, a.x, row_of, n_acts, part[warp], [] {});
  else
    warp_product<1>(w, tile.bytes, tile.chunk, tile.step, a.x, row_of, n_acts, tile.lane,
                    stages + warp * a.stage_bytes, part[warp], [] {});
  __syncthreads();
  const ActsOut hidden = acts_out(a.hidden);
  for (int i = threadIdx.x; i < tile.panels_here * 16 * n_acts; i += 64 * kInWarps) {
    const int r = i & 15, p = (i >> 4) & (tile.panels_here - 1), act = (i >> 4) / tile.panels_here;
    const int row = (tile.first_panel + p) * 16 + r;
    if (row - r >= w.n_rows) continue;
    float gate = 0.0f, up = 0.0f;
    for (int s = 0; s < tile.step; ++s) {
      gate += part[p * tile.step + s][act * 16 + r];
      up += part[kInWarps + p * tile.step + s][act * 16 + r];
    }
    const float value = row < w.n_rows ? silu(gate) * up : 0.0f;
    if (row < w.n_rows) hidden.put(first + act, row, value);
    if (a.hidden.i8 != nullptr)
      store_dot_act(static_cast<DotActs*>(a.hidden.i8) + (first + act) * a.hidden.i8_stride, row, value);
  }
}

template <int kDotActs>
__global__ void __launch_bounds__(32 * kOutWarps, kDotActs == 0   ? 4
                                                  : kDotActs == 2 ? 3
                                                                  : 2)
    expert_out_small_kernel(const __grid_constant__ DeviceExpertArgs a) {
  __shared__ __align__(16) float part[kOutWarps][kPartFloats];
  extern __shared__ __align__(16) std::byte stages[];
  allow_next();
  const int at = *a.routes.n_slots - 1 - static_cast<int>(blockIdx.y);
  if (at < 0) {
    wait_for_inputs();
    return;
  }
  const DeviceSlot& slot = a.routes.slots[at];
  const int first = slot.first, n_acts = slot.count;
  const uint8_t* base;
  if (!resolve(a, slot, base)) {
    wait_for_inputs();
    return;
  }
  const int warp = threadIdx.x / 32;
  const DeviceMatrix& w = base == nullptr ? a.shared_down : a.down;
  const SmallTile tile(w, base, warp, kOutWarps, kDotActs != 8);
  const DeviceActs x = a.hidden.read();
  const auto row_of = [&](int p) { return first + p; };
  const auto ready = [] { wait_for_inputs(); };
  if constexpr (kDotActs > 0)
    slot_dot<kDotActs>(w, tile, x, row_of, n_acts, part[warp], ready);
  else
    warp_product<1>(w, tile.bytes, tile.chunk, tile.step, x, row_of, n_acts, tile.lane,
                    stages + warp * a.stage_bytes, part[warp], ready);
  __syncthreads();
  for (int i = threadIdx.x; i < tile.panels_here * 16 * n_acts; i += 32 * kOutWarps) {
    const int r = i & 15, p = (i >> 4) & (tile.panels_here - 1), act = (i >> 4) / tile.panels_here;
    const int row = (tile.first_panel + p) * 16 + r;
    if (row >= w.n_rows) continue;
    float sum = 0.0f;
    for (int s = 0; s < tile.step; ++s) sum += part[p * tile.step + s][act * 16 + r];
    a.y[static_cast<int64_t>(first + act) * a.n_embd + row] = sum;
  }
}

// Slots of the routed experts or of the shared one: they may differ in type, so each has its launch.
template <DType T, bool kShared, int kActs>
__global__ void __launch_bounds__(kMaxTileThreads, 2)
    expert_in_tile_kernel(const __grid_constant__ DeviceExpertArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  int* const rows = reinterpret_cast<int*>(shared + 2 * kTileStageBytes<kActs>);
  allow_next();
  wait_for_inputs();
  if (static_cast<int>(blockIdx.y) >= *a.routes.n_slots) return;
  const DeviceSlot& slot = a.routes.slots[blockIdx.y];
  const int first = slot.first, n_acts = slot.count;
  const uint8_t* base;
  if ((slot.expert == a.n_expert) != kShared || !resolve(a, slot, base)) return;
  const DeviceMatrix gate = matrix_of(base, a.gate, a.shared_gate), up = matrix_of(base, a.up, a.shared_up);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int panel = blockIdx.x * 8 + warp;
  for (int i = threadIdx.x; i < kActs; i += kMaxTileThreads)
    rows[i] = i < n_acts ? a.routes.pair_row[first + i] : -1;
  __syncthreads();

  float acc[2][kActs / 8][4] = {};
  const bool here = panel * 16 < gate.n_rows;
  const uint8_t* const panels[2] = {here ? gate.panels + panel * gate.panel_bytes : nullptr,
                                    here ? up.panels + panel * up.panel_bytes : nullptr};
  tile_product<T, kActs>(panels, gate.n_cols, a.x, shared, rows, n_acts, acc);
  if (!here) return;
  const ActsOut hidden = acts_out(a.hidden);
#pragma unroll
  for (int n = 0; n < kActs / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int act = 8 * n + 2 * t + i % 2, row = panel * 16 + 2 * g + i / 2;
      if (act < n_acts && row < gate.n_rows)
        hidden.put(first + act, row, silu(acc[0][n][i] * a.x.scale) * (acc[1][n][i] * a.x.scale));
    }
}

template <DType T, bool kShared, int kActs>
__global__ void __launch_bounds__(kMaxTileThreads, 2)
    expert_out_tile_kernel(const __grid_constant__ DeviceExpertArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  int* const rows = reinterpret_cast<int*>(shared + 2 * kTileStageBytes<kActs>);
  allow_next();
  wait_for_inputs();
  if (static_cast<int>(blockIdx.y) >= *a.routes.n_slots) return;
  const DeviceSlot& slot = a.routes.slots[blockIdx.y];
  const int first = slot.first, n_acts = slot.count;
  const uint8_t* base;
  if ((slot.expert == a.n_expert) != kShared || !resolve(a, slot, base)) return;
  const DeviceMatrix w = matrix_of(base, a.down, a.shared_down);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int panel = (blockIdx.x * 8 + warp) * kTilePanels;
  for (int i = threadIdx.x; i < kActs; i += kMaxTileThreads) rows[i] = i < n_acts ? first + i : -1;
  __syncthreads();

  float acc[kTilePanels][kActs / 8][4] = {};
  const uint8_t* panels[kTilePanels];
#pragma unroll
  for (int p = 0; p < kTilePanels; ++p)  // past the end: the last one again, stored nowhere
    panels[p] =
        panel * 16 >= w.n_rows ? nullptr : w.panels + min(panel + p, (w.n_rows - 1) / 16) * w.panel_bytes;
  const DeviceActs x{a.hidden.f16, a.hidden.f32, a.hidden.f16_stride, a.hidden.f32_stride, a.hidden.scale};
  tile_product<T, kActs>(panels, w.n_cols, x, shared, rows, n_acts, acc);
#pragma unroll
  for (int p = 0; p < kTilePanels; ++p) {
    const int row = (panel + p) * 16 + 2 * g;
    if (row >= w.n_rows) break;
    const bool pair = row + 1 < w.n_rows;
#pragma unroll
    for (int n = 0; n < kActs / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int act = 8 * n + 2 * t + i;
        if (act >= n_acts) continue;
        float* const y = a.y + static_cast<int64_t>(first + act) * a.n_embd + row;
        y[0] = acc[p][n][i] * x.scale;
        if (pair) y[1] = acc[p][n][i + 2] * x.scale;
      }
  }
}

template <DType T, bool kShared, int kActs>
void launch_in_tiles(const DeviceExpertArgs& args, int n_rows, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(expert_in_tile_kernel<T, kShared, kActs>, kTileSharedBytes<kActs>), true;
  }();
  static_cast<void>(ready);
  launch(expert_in_tile_kernel<T, kShared, kActs>,
         dim3(static_cast<unsigned>(ceil_div(n_rows, 128)), static_cast<unsigned>(args.max_slots)),
         kMaxTileThreads, kTileSharedBytes<kActs>, stream, args);
}

template <DType T, bool kShared, int kActs>
void launch_out_tiles(const DeviceExpertArgs& args, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(expert_out_tile_kernel<T, kShared, kActs>, kTileSharedBytes<kActs>), true;
  }();
  static_cast<void>(ready);
  launch(expert_out_tile_kernel<T, kShared, kActs>,
         dim3(static_cast<unsigned>(ceil_div(args.n_embd, 8 * kTileWarpRows)),
              static_cast<unsigned>(args.max_slots)),
         kMaxTileThreads, kTileSharedBytes<kActs>, stream, args);
}

unsigned small_blocks(const DeviceMatrix& a, const DeviceMatrix& b, int n_warps, bool few) {
  const auto blocks = [n_warps, few](const DeviceMatrix& m) {
    return m.n_rows == 0
               ? 0
               : ceil_div(ceil_div(m.n_rows, 16), n_warps >> expert_split_log2(m.n_cols, n_warps, few));
  };
  return static_cast<unsigned>(blocks(a) > blocks(b) ? blocks(a) : blocks(b));
}

template <int kActs>
void expert_tiles(const DeviceExpertArgs& args, StreamView stream) {
#define CASE(t)                                                            \
  launch_in_tiles<DType::t, false, kActs>(args, args.gate.n_rows, stream); \
  break
  if (args.n_expert > 0) THERMO_FOR_QUANT_TYPE(args.gate.dtype, CASE)
#undef CASE
#define CASE(t)                                                                  \
  launch_in_tiles<DType::t, true, kActs>(args, args.shared_gate.n_rows, stream); \
  break
  const bool shared = args.shared_gate.n_rows > 0 && (args.table == nullptr || args.with_shared);
  if (shared) THERMO_FOR_QUANT_TYPE(args.shared_gate.dtype, CASE)
#undef CASE
#define CASE(t)                                           \
  launch_out_tiles<DType::t, false, kActs>(args, stream); \
  break
  if (args.n_expert > 0) THERMO_FOR_QUANT_TYPE(args.down.dtype, CASE)
#undef CASE
#define CASE(t)                                          \
  launch_out_tiles<DType::t, true, kActs>(args, stream); \
  break
  if (shared) THERMO_FOR_QUANT_TYPE(args.shared_down.dtype, CASE)
#undef CASE
}

}  // namespace

int expert_tile(int n_rows, int n_used, int n_expert) noexcept {
  static const bool has_room = [] {  // compute capability 7.5 has not
    int device = 0, bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return bytes >= kTileSharedBytes<kExpertTile>;
  }();
  const int pairs = n_expert > 0 ? n_rows * n_used / n_expert : n_rows;  // of an expert, on average
  return pairs <= 10 || !has_room ? kExpertLowTile : kExpertTile;
}

bool expert_tiles_possible(const DeviceExpertArgs& a) noexcept {
  const auto good = [](const DeviceMatrix& gate, const DeviceMatrix& up, const DeviceMatrix& down) {
    return gate.n_rows == 0 ||
           (!is_float_type(gate.dtype) && gate.dtype == up.dtype && !is_float_type(down.dtype));
  };
  return good(a.gate, a.up, a.down) && good(a.shared_gate, a.shared_up, a.shared_down);
}

void expert_ffn_cuda(const DeviceExpertArgs& args, StreamView stream) noexcept {
  if (!args.large) {
    static const bool ready = [] {
      allow_shared(expert_in_small_kernel<0>, 2 * kInWarps * kMaxWarpStageBytes);
      allow_shared(expert_out_small_kernel<0>, kOutWarps * kMaxWarpStageBytes);
      return true;
    }();
    static_cast<void>(ready);
    const auto all_dot = [&](std::initializer_list<const DeviceMatrix*> matrices) {
      bool dot = true;
      for (const DeviceMatrix* m : matrices) dot = dot && (m->n_rows == 0 || has_dot(m->dtype));
      return dot;
    };
    const auto stage = [&](std::initializer_list<const DeviceMatrix*> matrices, int n_warps, bool dot) {
      int bytes = 0;
      if (dot) return bytes;
      for (const DeviceMatrix* m : matrices) {
        if (m->n_rows == 0) continue;
        const int needed =
            warp_stage_bytes(*m, args.max_slot_rows,
                             chunks_per_warp(m->n_cols, 1 << expert_split_log2(m->n_cols, n_warps, true)));
        if (needed > bytes) bytes = needed;
      }
      return bytes;
    };
    const unsigned slots = static_cast<unsigned>(args.max_slots);
    DeviceExpertArgs in = args, out = args;
    const bool in_dot = args.x.i8 != nullptr &&
                        all_dot({&args.gate, &args.up, &args.shared_gate, &args.shared_up}),
               out_dot = args.hidden.i8 != nullptr && all_dot({&args.down, &args.shared_down});
    if (out_dot) in.hidden.f16 = nullptr, in.hidden.f32 = nullptr;
    if (!out_dot) in.hidden.i8 = nullptr;
    in.stage_bytes = stage({&args.gate, &args.up, &args.shared_gate, &args.shared_up}, kInWarps, in_dot);
    out.stage_bytes = stage({&args.down, &args.shared_down}, kOutWarps, out_dot);
    const bool few = args.max_slot_rows <= 2;
    launch(!in_dot ? expert_in_small_kernel<0>
           : few   ? expert_in_small_kernel<2>
                   : expert_in_small_kernel<8>,
           dim3(small_blocks(args.gate, args.shared_gate, kInWarps, few || !in_dot), slots), 64 * kInWarps,
           2 * kInWarps * static_cast<size_t>(in.stage_bytes), stream, in);
    launch(!out_dot ? expert_out_small_kernel<0>
           : few    ? expert_out_small_kernel<2>
                    : expert_out_small_kernel<8>,
           dim3(small_blocks(args.down, args.shared_down, kOutWarps, few || !out_dot), slots), 32 * kOutWarps,
           kOutWarps * static_cast<size_t>(out.stage_bytes), stream, out);
    return;
  }
  if (args.tile == kExpertLowTile)
    expert_tiles<kExpertLowTile>(args, stream);
  else
    expert_tiles<kExpertTile>(args, stream);
}

}  // namespace thermo
