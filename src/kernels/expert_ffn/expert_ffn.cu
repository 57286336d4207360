// Beyond the rows of the small form: f16 tensor cores, a block per (slot of 16 or 64 pairs, 128 rows of gate
// and up or 256 of down), in one launch for the shared expert and the others where they are of one type.
// Slots of 16 stage all columns of their pairs at once (low_product): 113 us for gate and up of a layer with
// 64 rows, 129 with a barrier for every 256 columns. Slots of 64 (more than 10 pairs an expert):
// tile_product.cuh. Slots of 128, which leave room for one block to a multiprocessor, take 4 % longer at 64
// pairs an expert.
//
// A step of 128 rows of 35B-A3B takes 13.9 ms with it, 12.3 with slots of 8 pairs (expert_few.cu).
#include "base/units.h"
#include "kernels/expert_ffn/expert_slots.cuh"
#include "kernels/linear/tile_product.cuh"

namespace thermo {
namespace {

__device__ __forceinline__ DeviceMatrix matrix_of(const uint8_t* base, const DeviceMatrix& routed,
                                                  const DeviceMatrix& shared) {
  if (base == nullptr) return shared;
  DeviceMatrix m = routed;
  m.panels = base + reinterpret_cast<size_t>(routed.panels);
  return m;
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

namespace {

// Pairs of an expert, on average.
int mean_pairs(const RouteConfig& route, int n_rows) {
  return n_rows * route.n_expert_used / route.n_expert;
}

}  // namespace

bool expert_form_is_large(const DeviceExpertArgs& args, const RouteConfig& route, int n_rows) noexcept {
  if (!expert_tiles_possible(args)) return false;
  if (args.gate.n_rows == 0) return n_rows > kDenseSmallRows;
  return n_rows > kExpertSmallRows &&
         !(mean_pairs(route, n_rows) <= kWidePairs && expert_few_possible(args, kExpertWideTile));
}

int expert_slot_rows(const DeviceExpertArgs& args, const RouteConfig& route, int n_rows) noexcept {
  if (expert_form_is_large(args, route, n_rows))
    return expert_tile(n_rows, route.n_expert_used, route.n_expert);
  const bool wide = n_rows > kMaxListRows && args.gate.n_rows > 0 &&
                    mean_pairs(route, n_rows) >= kNarrowPairs && expert_few_possible(args, kExpertWideTile);
  return wide ? kExpertWideTile : kExpertSmallTile;
}

bool expert_tiles_possible(const DeviceExpertArgs& a) noexcept {
  const auto good = [](const DeviceMatrix& gate, const DeviceMatrix& up, const DeviceMatrix& down) {
    return gate.n_rows == 0 ||
           (!is_float_type(gate.dtype) && gate.dtype == up.dtype && !is_float_type(down.dtype));
  };
  return good(a.gate, a.up, a.down) && good(a.shared_gate, a.shared_up, a.shared_down);
}

void expert_ffn_cuda(const DeviceExpertArgs& args, StreamView stream) noexcept {
  if (!args.large && expert_few_possible(args, args.max_slot_rows)) return expert_few_cuda(args, stream);
  if (!args.large) return expert_ffn_small_cuda(args, stream);
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
