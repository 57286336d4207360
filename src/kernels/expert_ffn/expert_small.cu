// Up to 255 rows, in slots of up to 8 pairs, for what expert_few.cu does not take: float weights, gate and up
// that read their rows in different forms, cards with little shared memory. Quantised types have the bits of
// the processor's kernels (panel_exact.cuh).
//
// One and two rows: a block takes 16 rows of gate and the same 16 of up of one slot, a warp per 512 columns
// of each, so that all bytes of the chosen experts are in flight at once; then the same for down. More rows:
// a warp has a panel and streams it. Hidden rows are handed over as floats, and each block of down rounds
// them again: the group of columns that shares a step is made by many blocks.
#include <initializer_list>

#include "base/units.h"
#include "kernels/expert_ffn/expert_slots.cuh"
#include "kernels/expert_ffn/slot_product.cuh"

namespace thermo {
namespace {

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

// The warp's share of a slot: to `values` where the panel is shared, else to sums[act * 16 + row].
// `acts_of.operator()<T>(chunk, a)`: of 8 rows.
template <class RowOf, class ActsOf, class Stage>
__device__ __forceinline__ void slot_product(const DeviceMatrix& w, const SmallTile& tile, bool few,
                                             const DeviceActs& x, const RowOf& row_of, int n_acts,
                                             int stage_chunks, const ActsOf& acts_of, const Stage& stage,
                                             const PanelValues& values, float* sums) {
  if (is_float_type(w.dtype)) {
    stage.template operator()<0>(0, 0);
    if (tile.bytes == nullptr) return;
    float_product(w, tile.bytes, tile.chunk, tile.step, x, row_of, n_acts, tile.lane,
                  few ? values.values + tile.chunk * n_acts * 16 : sums);
    if (few && tile.lane < n_acts) values.steps[tile.chunk * n_acts + tile.lane] = 1.0f;
    return;
  }
  for_quant_type(w.dtype, [&]<DType T>() {
    const auto acts = [&](int chunk, int a) -> const BlockActs& {
      return acts_of.template operator()<kPanelFormat<T>.block_cols>(chunk, min(a, n_acts - 1));
    };
    const auto prepare = [&](int begin, int end) {
      stage.template operator()<kPanelFormat<T>.block_cols>(begin, end);
    };
    if (few)
      value_slot<T>(w, tile.bytes, tile.chunk, tile.step, stage_chunks, acts, prepare, tile.lane, values);
    else
      sum_slot<T>(w, tile.bytes, stage_chunks, acts, prepare, tile.lane, sums);
  });
}

// Rows that need no staging.
struct NoStage {
  template <int kCols>
  __device__ __forceinline__ void operator()(int, int) const {}
};

constexpr int kSmallBlocks = 2;  // to a multiprocessor

// The values of the warp's panel, in the part of shared memory that belongs to its matrix.
__device__ __forceinline__ PanelValues panel_values(const DeviceMatrix& w, const SmallTile& tile, int n_acts,
                                                    std::byte* memory) {
  const int n_blocks = value_blocks(w, tile.step);
  float* const values =
      reinterpret_cast<float*>(memory + (tile.warp >> tile.split) * value_bytes(n_blocks, n_acts));
  return {values, values + n_blocks * n_acts * 16, n_blocks, n_acts};
}

__global__ void __launch_bounds__(64 * kInWarps, kSmallBlocks)
    expert_in_small_kernel(const __grid_constant__ DeviceExpertArgs a) {
  __shared__ __align__(16) float part[2 * kInWarps][kPartFloats];
  extern __shared__ __align__(16) std::byte shared_values[];
  wait_for_inputs();
  allow_next();  // after the wait: the next kernel reads the slots before its own
  // From the last on: those of the shared expert have the most rows.
  const int at = *a.routes.n_slots - 1 - static_cast<int>(blockIdx.y);
  if (at < 0) return;
  const DeviceSlot& slot = a.routes.slots[at];
  const int first = slot.first, n_acts = slot.count;
  const uint8_t* base;
  if (!resolve(a, slot, base)) return;
  const bool few = a.few;
  const int warp = threadIdx.x / 32;
  const DeviceMatrix& gate = base == nullptr ? a.shared_gate : a.gate;
  const DeviceMatrix& up = base == nullptr ? a.shared_up : a.up;
  const DeviceMatrix& w = warp < kInWarps ? gate : up;
  const SmallTile tile(w, base, warp % kInWarps, kInWarps, few);
  std::byte* const memory = shared_values + (warp < kInWarps ? 0 : a.value_bytes);
  const auto row_of = [&](int p) { return slot.rows[p]; };
  const auto acts_of = [&]<int kCols>(int chunk, int act) -> const BlockActs& {
    return static_cast<const BlockActs*>(
        kCols == 256 ? a.x.blocks256 : a.x.blocks32)[slot.rows[act] * a.x.blocks_stride + chunk];
  };
  slot_product(w, tile, few, a.x, row_of, n_acts, 1 << 24, acts_of, NoStage{},
               panel_values(w, tile, n_acts, memory), part[warp]);
  __syncthreads();
  const ActsOut hidden = acts_out(a.hidden);
  for (int i = threadIdx.x; i < tile.panels_here * 16 * n_acts; i += 64 * kInWarps) {
    const int r = i & 15, p = (i >> 4) & (tile.panels_here - 1), act = (i >> 4) / tile.panels_here;
    const int row = (tile.first_panel + p) * 16 + r;
    if (row >= w.n_rows) continue;
    const auto sum_of = [&](const DeviceMatrix& m, int which) {
      if (!few) return part[which * kInWarps + p][act * 16 + r];
      SmallTile first_warp = tile;
      first_warp.warp = p << tile.split;
      return panel_values(m, first_warp, n_acts, shared_values + which * a.value_bytes).sum(act, r);
    };
    hidden.put(first + act, row, swiglu_exact(sum_of(gate, 0), sum_of(up, 1)));
  }
}

__global__ void __launch_bounds__(32 * kOutWarps, kSmallBlocks)
    expert_out_small_kernel(const __grid_constant__ DeviceExpertArgs a) {
  constexpr int kStageActs = kExpertSmallTile, kStageChunks = 8;
  __shared__ __align__(16) float part[kOutWarps][kPartFloats];
  // Neighbours lie 8 banks apart: a tensor-core lane reads one of eight rows.
  struct Staged {
    BlockActs acts;
    uint32_t apart[8];
  };
  __shared__ Staged staged[kStageChunks * kStageActs];
  extern __shared__ __align__(16) std::byte shared_values[];
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
  const bool few = a.few;
  const int warp = threadIdx.x / 32;
  const DeviceMatrix& w = base == nullptr ? a.shared_down : a.down;
  const SmallTile tile(w, base, warp, kOutWarps, few);
  const DeviceActs x = a.hidden.read();
  const auto row_of = [&](int p) { return first + p; };
  int stage_begin = 0;
  // Hidden rows come as floats, because a group of their columns is made by many blocks.
  const auto stage = [&]<int kCols>(int begin, int end) {
    if (begin == 0)
      wait_for_inputs();
    else
      __syncthreads();
    stage_begin = begin;
    if constexpr (kCols > 0) {
      for (int i = warp; i < (end - begin) * n_acts; i += kOutWarps) {
        const int act = i % n_acts, chunk = i / n_acts;
        ActPiece piece;
        piece.load(x.f32 + (first + act) * x.f32_stride, begin + chunk, w.n_cols, tile.lane);
        put_block_acts<kCols>(piece.low, piece.high, tile.lane, staged[chunk * kStageActs + act].acts);
      }
      __syncthreads();
    }
  };
  const auto acts_of = [&]<int kCols>(int chunk, int act) -> const BlockActs& {
    return staged[(chunk - stage_begin) * kStageActs + act].acts;
  };
  slot_product(w, tile, few, x, row_of, n_acts, kStageChunks, acts_of, stage,
               panel_values(w, tile, n_acts, shared_values), part[warp]);
  __syncthreads();
  for (int i = threadIdx.x; i < tile.panels_here * 16 * n_acts; i += 32 * kOutWarps) {
    const int r = i & 15, p = (i >> 4) & (tile.panels_here - 1), act = (i >> 4) / tile.panels_here;
    const int row = (tile.first_panel + p) * 16 + r;
    if (row >= w.n_rows) continue;
    SmallTile first_warp = tile;
    first_warp.warp = p << tile.split;
    const float sum =
        few ? panel_values(w, first_warp, n_acts, shared_values).sum(act, r) : part[p][act * 16 + r];
    a.y[static_cast<int64_t>(first + act) * a.n_embd + row] = sum;
  }
}

unsigned small_blocks(const DeviceMatrix& a, const DeviceMatrix& b, int n_warps, bool few) {
  const auto blocks = [n_warps, few](const DeviceMatrix& m) {
    return m.n_rows == 0
               ? 0
               : ceil_div(ceil_div(m.n_rows, 16), n_warps >> expert_split_log2(m.n_cols, n_warps, few));
  };
  return static_cast<unsigned>(blocks(a) > blocks(b) ? blocks(a) : blocks(b));
}

}  // namespace

void expert_ffn_small_cuda(const DeviceExpertArgs& args, StreamView stream) noexcept {
  static const bool ready = [] {
    const size_t most = device_in_use().max_shared_bytes;
    allow_shared(expert_in_small_kernel, most);
    allow_shared(expert_out_small_kernel, most);
    return true;
  }();
  static_cast<void>(ready);
  using Matrices = std::initializer_list<const DeviceMatrix*>;
  const Matrices in_matrices = {&args.gate, &args.up, &args.shared_gate, &args.shared_up},
                 out_matrices = {&args.down, &args.shared_down};
  // Shared memory for the values of one matrix's panels in a block, where they are shared.
  const auto bytes_of = [&](Matrices matrices, int n_warps) {
    int bytes = 0;
    for (const DeviceMatrix* m : matrices) {
      if (m->n_rows == 0) continue;
      const int split = expert_split_log2(m->n_cols, n_warps, true);
      const int needed = (n_warps >> split) * value_bytes(value_blocks(*m, 1 << split), args.max_slot_rows);
      if (needed > bytes) bytes = needed;
    }
    return bytes;
  };
  const unsigned slots = static_cast<unsigned>(args.max_slots);
  const int in_bytes = bytes_of(in_matrices, kInWarps), out_bytes = bytes_of(out_matrices, kOutWarps);
  constexpr int kOwn = 32 * 1024;  // more than the kernels declare themselves
  const bool few =
      args.max_slot_rows <= kFewRows && (2 * in_bytes > out_bytes ? 2 * in_bytes : out_bytes) + kOwn <=
                                            static_cast<int>(device_in_use().max_shared_bytes);
  DeviceExpertArgs in = args;
  in.few = few;
  in.hidden.f16 = nullptr;
  DeviceExpertArgs out = in;
  in.value_bytes = few ? in_bytes : 0;
  out.value_bytes = few ? out_bytes : 0;
  launch(expert_in_small_kernel, dim3(small_blocks(args.gate, args.shared_gate, kInWarps, few), slots),
         64 * kInWarps, 2 * static_cast<size_t>(in.value_bytes), stream, in);
  launch(expert_out_small_kernel, dim3(small_blocks(args.down, args.shared_down, kOutWarps, few), slots),
         32 * kOutWarps, static_cast<size_t>(out.value_bytes), stream, out);
}

}  // namespace thermo
