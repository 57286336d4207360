// Decode: a block takes 16 rows of gate and the same 16 of up of one slot, one warp per 256 columns of each
// (16 warps), so that all bytes of the chosen experts are in flight at once; then the same for down. 35B-A3B,
// one row: 288 blocks each, 0.5 MB of gate and up and 0.6 MB of down per expert. Prefill: tile_product.cuh, a
// block per (slot of 64 pairs, 128 rows).
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/expert_ffn/expert_ffn_cuda.h"
#include "kernels/linear/tile_product.cuh"
#include "kernels/linear/warp_product.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {
namespace {

__device__ __forceinline__ DeviceMatrix matrix_of(const DeviceExpertArgs& a, int expert,
                                                  const DeviceMatrix& routed, const DeviceMatrix& shared) {
  if (expert == a.n_expert) return shared;
  DeviceMatrix m = routed;
  m.panels = a.base[expert] + reinterpret_cast<size_t>(routed.panels);
  return m;
}

__device__ __forceinline__ ActsOut acts_out(const DeviceActsOut& o) {
  return {static_cast<half*>(o.f16), o.f32, o.f16_stride, o.f32_stride, o.scale};
}

__global__ void __launch_bounds__(512) expert_in_small_kernel(const __grid_constant__ DeviceExpertArgs a) {
  __shared__ float part[16][kPartFloats];
  allow_next();
  wait_for_inputs();
  const int slot = blockIdx.y;
  if (slot >= *a.routes.n_slots) return;
  const int expert = a.routes.slot_expert[slot], first = a.routes.slot_first[slot],
            n_acts = a.routes.slot_count[slot];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const DeviceMatrix w =
      warp < 8 ? matrix_of(a, expert, a.gate, a.shared_gate) : matrix_of(a, expert, a.up, a.shared_up);
  const int split = split_warps(w.n_cols), panels_here = 8 / split;
  const int first_panel = blockIdx.x * panels_here;
  const int panel = first_panel + warp % 8 / split;
  if (panel * 16 < w.n_rows)
    warp_product<1>(
        w.dtype, w.panels + panel * w.panel_bytes, w.n_cols, warp % split, split, a.x,
        [&](int p) { return a.routes.pair_row[first + p]; }, n_acts, lane, part[warp]);
  __syncthreads();
  const ActsOut hidden = acts_out(a.hidden);
  for (int i = threadIdx.x; i < panels_here * 16 * n_acts; i += 512) {
    const int r = i % 16, p = i / 16 % panels_here, act = i / 16 / panels_here;
    const int row = (first_panel + p) * 16 + r;
    if (row >= w.n_rows) continue;
    float gate = 0.0f, up = 0.0f;
    for (int s = 0; s < split; ++s) {
      gate += part[p * split + s][act * 16 + r];
      up += part[8 + p * split + s][act * 16 + r];
    }
    hidden.put(first + act, row, silu(gate) * up);
  }
}

__global__ void __launch_bounds__(256) expert_out_small_kernel(const __grid_constant__ DeviceExpertArgs a) {
  __shared__ float part[8][kPartFloats];
  allow_next();
  wait_for_inputs();
  const int slot = blockIdx.y;
  if (slot >= *a.routes.n_slots) return;
  const int expert = a.routes.slot_expert[slot], first = a.routes.slot_first[slot],
            n_acts = a.routes.slot_count[slot];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const DeviceMatrix w = matrix_of(a, expert, a.down, a.shared_down);
  const int split = split_warps(w.n_cols), panels_here = 8 / split;
  const int first_panel = blockIdx.x * panels_here;
  const int panel = first_panel + warp / split;
  const DeviceActs x{a.hidden.f16, a.hidden.f32, a.hidden.f16_stride, a.hidden.f32_stride, a.hidden.scale};
  if (panel * 16 < w.n_rows)
    warp_product<1>(
        w.dtype, w.panels + panel * w.panel_bytes, w.n_cols, warp % split, split, x,
        [&](int p) { return first + p; }, n_acts, lane, part[warp]);
  __syncthreads();
  for (int i = threadIdx.x; i < panels_here * 16 * n_acts; i += 256) {
    const int r = i % 16, p = i / 16 % panels_here, act = i / 16 / panels_here;
    const int row = (first_panel + p) * 16 + r;
    if (row >= w.n_rows) continue;
    float sum = 0.0f;
    for (int s = 0; s < split; ++s) sum += part[p * split + s][act * 16 + r];
    a.y[static_cast<int64_t>(first + act) * a.n_embd + row] = sum;
  }
}

// Slots of the routed experts or of the shared one: they may differ in type, so each has its launch.
template <DType T, bool kShared>
__global__ void __launch_bounds__(kTileThreads)
    expert_in_tile_kernel(const __grid_constant__ DeviceExpertArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  int* const rows = reinterpret_cast<int*>(shared + 2 * kTileStageBytes);
  allow_next();
  wait_for_inputs();
  const int slot = blockIdx.y;
  if (slot >= *a.routes.n_slots) return;
  const int expert = a.routes.slot_expert[slot], first = a.routes.slot_first[slot],
            n_acts = a.routes.slot_count[slot];
  if ((expert == a.n_expert) != kShared) return;
  const DeviceMatrix gate = matrix_of(a, expert, a.gate, a.shared_gate),
                     up = matrix_of(a, expert, a.up, a.shared_up);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int panel = blockIdx.x * 8 + warp;
  for (int i = threadIdx.x; i < kTileActs; i += kTileThreads)
    rows[i] = i < n_acts ? a.routes.pair_row[first + i] : -1;
  __syncthreads();

  float acc[2][kTileActs / 8][4] = {};
  const bool here = panel * 16 < gate.n_rows;
  const uint8_t* const panels[2] = {here ? gate.panels + panel * gate.panel_bytes : nullptr,
                                    here ? up.panels + panel * up.panel_bytes : nullptr};
  tile_product<T, 2>(panels, gate.n_cols, a.x, shared, rows, n_acts, acc);
  if (!here) return;
  const ActsOut hidden = acts_out(a.hidden);
#pragma unroll
  for (int n = 0; n < kTileActs / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int act = 8 * n + 2 * t + i % 2, row = panel * 16 + 2 * g + i / 2;
      if (act < n_acts && row < gate.n_rows)
        hidden.put(first + act, row, silu(acc[0][n][i] * a.x.scale) * (acc[1][n][i] * a.x.scale));
    }
}

template <DType T, bool kShared>
__global__ void __launch_bounds__(kTileThreads)
    expert_out_tile_kernel(const __grid_constant__ DeviceExpertArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  int* const rows = reinterpret_cast<int*>(shared + 2 * kTileStageBytes);
  allow_next();
  wait_for_inputs();
  const int slot = blockIdx.y;
  if (slot >= *a.routes.n_slots) return;
  const int expert = a.routes.slot_expert[slot], first = a.routes.slot_first[slot],
            n_acts = a.routes.slot_count[slot];
  if ((expert == a.n_expert) != kShared) return;
  const DeviceMatrix w = matrix_of(a, expert, a.down, a.shared_down);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int panel = blockIdx.x * 8 + warp;
  for (int i = threadIdx.x; i < kTileActs; i += kTileThreads) rows[i] = i < n_acts ? first + i : -1;
  __syncthreads();

  float acc[1][kTileActs / 8][4] = {};
  const uint8_t* const panels[1] = {panel * 16 < w.n_rows ? w.panels + panel * w.panel_bytes : nullptr};
  const DeviceActs x{a.hidden.f16, a.hidden.f32, a.hidden.f16_stride, a.hidden.f32_stride, a.hidden.scale};
  tile_product<T, 1>(panels, w.n_cols, x, shared, rows, n_acts, acc);
  const int row = panel * 16 + 2 * g;
  if (row >= w.n_rows) return;
  const bool pair = row + 1 < w.n_rows;
#pragma unroll
  for (int n = 0; n < kTileActs / 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int act = 8 * n + 2 * t + i;
      if (act >= n_acts) continue;
      float* const y = a.y + static_cast<int64_t>(first + act) * a.n_embd + row;
      y[0] = acc[0][n][i] * x.scale;
      if (pair) y[1] = acc[0][n][i + 2] * x.scale;
    }
}

template <DType T, bool kShared>
void launch_in_tiles(const DeviceExpertArgs& args, int n_rows, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(expert_in_tile_kernel<T, kShared>, kTileSharedBytes), true;
  }();
  static_cast<void>(ready);
  launch(expert_in_tile_kernel<T, kShared>,
         dim3(static_cast<unsigned>(ceil_div(n_rows, 128)), static_cast<unsigned>(args.max_slots)),
         kTileThreads, kTileSharedBytes, stream, args);
}

template <DType T, bool kShared>
void launch_out_tiles(const DeviceExpertArgs& args, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(expert_out_tile_kernel<T, kShared>, kTileSharedBytes), true;
  }();
  static_cast<void>(ready);
  launch(expert_out_tile_kernel<T, kShared>,
         dim3(static_cast<unsigned>(ceil_div(args.n_embd, 128)), static_cast<unsigned>(args.max_slots)),
         kTileThreads, kTileSharedBytes, stream, args);
}

unsigned small_blocks(const DeviceMatrix& a, const DeviceMatrix& b) {
  const auto blocks = [](const DeviceMatrix& m) {
    return m.n_rows == 0 ? 0 : ceil_div(ceil_div(m.n_rows, 16), 8 / split_warps(m.n_cols));
  };
  return static_cast<unsigned>(blocks(a) > blocks(b) ? blocks(a) : blocks(b));
}

}  // namespace

bool expert_tiles_possible(const DeviceExpertArgs& a) noexcept {
  const auto good = [](const DeviceMatrix& gate, const DeviceMatrix& up, const DeviceMatrix& down) {
    return gate.n_rows == 0 ||
           (!is_float_type(gate.dtype) && gate.dtype == up.dtype && !is_float_type(down.dtype));
  };
  return good(a.gate, a.up, a.down) && good(a.shared_gate, a.shared_up, a.shared_down);
}

void expert_ffn_cuda(const DeviceExpertArgs& args, StreamView stream) noexcept {
  if (!args.large) {
    launch(expert_in_small_kernel,
           dim3(small_blocks(args.gate, args.shared_gate), static_cast<unsigned>(args.max_slots)), 512, 0,
           stream, args);
    launch(expert_out_small_kernel,
           dim3(small_blocks(args.down, args.shared_down), static_cast<unsigned>(args.max_slots)), 256, 0,
           stream, args);
    return;
  }
#define CASE(t)                                                     \
  launch_in_tiles<DType::t, false>(args, args.gate.n_rows, stream); \
  break
  if (args.n_expert > 0) THERMO_FOR_QUANT_TYPE(args.gate.dtype, CASE)
#undef CASE
#define CASE(t)                                                           \
  launch_in_tiles<DType::t, true>(args, args.shared_gate.n_rows, stream); \
  break
  if (args.shared_gate.n_rows > 0) THERMO_FOR_QUANT_TYPE(args.shared_gate.dtype, CASE)
#undef CASE
#define CASE(t)                                    \
  launch_out_tiles<DType::t, false>(args, stream); \
  break
  if (args.n_expert > 0) THERMO_FOR_QUANT_TYPE(args.down.dtype, CASE)
#undef CASE
#define CASE(t)                                   \
  launch_out_tiles<DType::t, true>(args, stream); \
  break
  if (args.shared_down.n_rows > 0) THERMO_FOR_QUANT_TYPE(args.shared_down.dtype, CASE)
#undef CASE
}

}  // namespace thermo
