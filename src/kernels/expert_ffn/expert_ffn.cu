// Decode: a block takes 16 rows of gate and the same 16 of up of one slot, one warp per 256 columns of each
// (16 warps), so that all bytes of the chosen experts are in flight at once; then the same for down. 35B-A3B,
// one row: 288 blocks each, 0.5 MB of gate and up and 0.6 MB of down per expert.
//
// Beyond 32 rows: f16 tensor cores, a block per (slot of 16 or 64 pairs, 128 rows of gate and up or 256 of
// down), in one launch for the shared expert and the others where they are of one type. Slots of 16 stage all
// columns of their pairs at once (low_product): 113 us for gate and up of a layer with 64 rows, 129 with a
// barrier for every 256 columns. Slots of 64 (more than 10 pairs an expert): tile_product.cuh. Slots of 128,
// which leave room for one block to a multiprocessor, take 4 % longer at 64 pairs an expert.
//
// Tried: the integer form beyond 32 rows: equal at 64 rows, 18 % slower at 128; tiles at 32 rows: 10 % slower
// (whole steps).
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

// Slots of the routed experts, of the shared one, or of both where they are of one type. From the last on:
// those of the shared expert are full.
enum class Slots { Routed, Shared, All };

__device__ __forceinline__ const DeviceSlot* tile_slot(const DeviceExpertArgs& a, Slots which,
                                                       const uint8_t*& base) {
  const int at = *a.routes.n_slots - 1 - static_cast<int>(blockIdx.y);
  if (at < 0) return nullptr;
  const DeviceSlot& slot = a.routes.slots[at];
  const bool is_shared = slot.expert == a.n_expert;
  if (is_shared ? which == Slots::Routed : which == Slots::Shared) return nullptr;
  return resolve(a, slot, base) ? &slot : nullptr;
}

template <int kActs, bool kWhole>
__host__ __device__ constexpr int tile_stage_bytes(int n_cols) {
  return kWhole ? kLowActs * low_row_bytes(n_cols) : 2 * kTileStageBytes<kActs>;
}
template <int kActs, bool kWhole>
constexpr int tile_bytes(int n_cols) {
  return tile_stage_bytes<kActs, kWhole>(n_cols) + kActs * static_cast<int>(sizeof(uint32_t));
}

// kWhole: all columns of the activations are staged at once.
template <DType T, int kActs, bool kWhole>
__global__ void __launch_bounds__(kMaxTileThreads, 2)
    expert_in_tile_kernel(const __grid_constant__ DeviceExpertArgs a, Slots which) {
  extern __shared__ __align__(16) std::byte shared[];
  wait_for_inputs();
  allow_next();  // after the wait: the next kernel reads the slots before its own
  const uint8_t* base;
  const DeviceSlot* const slot = tile_slot(a, which, base);
  if (slot == nullptr) return;
  const int first = slot->first, n_acts = slot->count;
  const DeviceMatrix gate = matrix_of(base, a.gate, a.shared_gate), up = matrix_of(base, a.up, a.shared_up);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int panel = blockIdx.x * 8 + warp;
  if (blockIdx.x * 8 * 16 >= gate.n_rows) return;

  float acc[2][kActs / 8][4] = {};
  const bool here = panel * 16 < gate.n_rows;
  const uint8_t* const panels[2] = {here ? gate.panels + panel * gate.panel_bytes : nullptr,
                                    here ? up.panels + panel * up.panel_bytes : nullptr};
  uint32_t* const rows = reinterpret_cast<uint32_t*>(shared + tile_stage_bytes<kActs, kWhole>(gate.n_cols));
  const auto ready = [&] {
    for (int i = threadIdx.x; i < kActs; i += kMaxTileThreads)
      rows[i] = i < n_acts ? tile_row(a.x, a.routes.pair_row[first + i]) : kNoTileRow;
    __syncthreads();
  };
  if constexpr (kWhole)
    low_product<T>(panels, gate.n_cols, a.x, shared, rows, n_acts, acc, ready);
  else
    tile_product<T, kActs>(panels, gate.n_cols, a.x, shared, rows, n_acts, acc,
                           TileChunks{0, (gate.n_cols + 255) / 256}, TileThreads::block(), ready);
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

template <DType T, int kActs, bool kWhole>
__global__ void __launch_bounds__(kMaxTileThreads, 2)
    expert_out_tile_kernel(const __grid_constant__ DeviceExpertArgs a, Slots which) {
  extern __shared__ __align__(16) std::byte shared[];
  allow_next();
  const uint8_t* base;
  const DeviceSlot* const slot = tile_slot(a, which, base);
  if (slot == nullptr) {
    wait_for_inputs();
    return;
  }
  const int first = slot->first, n_acts = slot->count;
  const DeviceMatrix w = matrix_of(base, a.down, a.shared_down);
  const int warp = threadIdx.x / 32;
  const int panel = (blockIdx.x * 8 + warp) * kTilePanels;

  float acc[kTilePanels][kActs / 8][4] = {};
  const uint8_t* panels[kTilePanels];
  warp_panels(w, panel, panels);
  const DeviceActs x{a.hidden.f16, a.hidden.f32, a.hidden.f16_stride, a.hidden.f32_stride, a.hidden.scale};
  uint32_t* const rows = reinterpret_cast<uint32_t*>(shared + tile_stage_bytes<kActs, kWhole>(w.n_cols));
  const auto ready = [&] {
    wait_for_inputs();
    for (int i = threadIdx.x; i < kActs; i += kMaxTileThreads)
      rows[i] = i < n_acts ? tile_row(x, first + i) : kNoTileRow;
    __syncthreads();
  };
  if constexpr (kWhole)
    low_product<T>(panels, w.n_cols, x, shared, rows, n_acts, acc, ready);
  else
    tile_product<T, kActs>(panels, w.n_cols, x, shared, rows, n_acts, acc,
                           TileChunks{0, (w.n_cols + 255) / 256}, TileThreads::block(), ready);
  store_warp_tile<kActs>(acc, panel, w.n_rows, n_acts, x.scale,
                         [&](int act) { return a.y + static_cast<int64_t>(first + act) * a.n_embd; });
}

template <DType T, int kActs, bool kWhole>
void launch_in_tiles(const DeviceExpertArgs& args, int n_rows, Slots which, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(expert_in_tile_kernel<T, kActs, kWhole>,
                        kWhole ? device_in_use().max_shared_bytes : tile_bytes<kActs, kWhole>(0)),
           true;
  }();
  static_cast<void>(ready);
  const int n_cols = args.gate.n_rows > 0 ? args.gate.n_cols : args.shared_gate.n_cols;
  launch(expert_in_tile_kernel<T, kActs, kWhole>,
         dim3(static_cast<unsigned>(ceil_div(n_rows, 128)), static_cast<unsigned>(args.max_slots)),
         kMaxTileThreads, static_cast<size_t>(tile_bytes<kActs, kWhole>(n_cols)), stream, args, which);
}

template <DType T, int kActs, bool kWhole>
void launch_out_tiles(const DeviceExpertArgs& args, Slots which, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(expert_out_tile_kernel<T, kActs, kWhole>,
                        kWhole ? device_in_use().max_shared_bytes : tile_bytes<kActs, kWhole>(0)),
           true;
  }();
  static_cast<void>(ready);
  const int n_cols = args.down.n_cols > args.shared_down.n_cols ? args.down.n_cols : args.shared_down.n_cols;
  launch(expert_out_tile_kernel<T, kActs, kWhole>,
         dim3(static_cast<unsigned>(ceil_div(args.n_embd, 8 * kTileWarpRows)),
              static_cast<unsigned>(args.max_slots)),
         kMaxTileThreads, static_cast<size_t>(tile_bytes<kActs, kWhole>(n_cols)), stream, args, which);
}

unsigned small_blocks(const DeviceMatrix& a, const DeviceMatrix& b, int n_warps, bool few) {
  const auto blocks = [n_warps, few](const DeviceMatrix& m) {
    return m.n_rows == 0
               ? 0
               : ceil_div(ceil_div(m.n_rows, 16), n_warps >> expert_split_log2(m.n_cols, n_warps, few));
  };
  return static_cast<unsigned>(blocks(a) > blocks(b) ? blocks(a) : blocks(b));
}

template <int kActs, bool kWhole>
void expert_tiles(const DeviceExpertArgs& args, StreamView stream) {
  const bool routed = args.n_expert > 0,
             shared = args.shared_gate.n_rows > 0 && (args.table == nullptr || args.with_shared);
  const auto in = [&](DType dtype, int n_rows, Slots which) {
#define CASE(t)                                                          \
  launch_in_tiles<DType::t, kActs, kWhole>(args, n_rows, which, stream); \
  break
    THERMO_FOR_QUANT_TYPE(dtype, CASE)
#undef CASE
  };
  const auto out = [&](DType dtype, Slots which) {
#define CASE(t)                                                   \
  launch_out_tiles<DType::t, kActs, kWhole>(args, which, stream); \
  break
    THERMO_FOR_QUANT_TYPE(dtype, CASE)
#undef CASE
  };
  const int in_rows = args.gate.n_rows, shared_rows = args.shared_gate.n_rows;
  if (routed && shared && args.gate.dtype == args.shared_gate.dtype) {
    in(args.gate.dtype, in_rows > shared_rows ? in_rows : shared_rows, Slots::All);
  } else {
    if (routed) in(args.gate.dtype, in_rows, Slots::Routed);
    if (shared) in(args.shared_gate.dtype, shared_rows, Slots::Shared);
  }
  if (routed && shared && args.down.dtype == args.shared_down.dtype) {
    out(args.down.dtype, Slots::All);
  } else {
    if (routed) out(args.down.dtype, Slots::Routed);
    if (shared) out(args.shared_down.dtype, Slots::Shared);
  }
}

}  // namespace

int expert_tile(int n_rows, int n_used, int n_expert) noexcept {
  const bool has_room = static_cast<int>(device_in_use().max_shared_bytes) >=
                        kTileSharedBytes<kExpertTile>;                   // compute capability 7.5 has not
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
  static_assert(kExpertLowTile == kLowActs);
  // Two blocks to a multiprocessor, or it is not worth it.
  const auto fits = [](const DeviceMatrix& m) {
    return 2 * low_shared_bytes(m.n_cols) <= static_cast<int>(device_in_use().max_shared_bytes);
  };
  const bool whole = fits(args.gate) && fits(args.down) && fits(args.shared_gate) && fits(args.shared_down);
  if (args.tile == kExpertLowTile && whole)
    expert_tiles<kExpertLowTile, true>(args, stream);
  else if (args.tile == kExpertLowTile)
    expert_tiles<kExpertLowTile, false>(args, stream);
  else
    expert_tiles<kExpertTile, false>(args, stream);
}

}  // namespace thermo
