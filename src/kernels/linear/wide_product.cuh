// Products of more than 64 activation rows on Hopper's tensor cores (wgmma.cuh). A block of two warpgroups
// multiplies 128 weight rows with a tile of 256 activation rows, or 128 where there are no more; a third
// warpgroup copies. Every warp decodes its panel of 16 weight rows from memory into operands, as in
// tile_product.cuh: 32 columns while the tensor cores work on the 32 before. Tiles of activations lie in
// memory as they must in shared memory, so a stage of 64 columns is one copy. Two blocks form a cluster over
// the same tiles; each copies half of a stage for both. Blocks stay and take one item after the other; the
// first codes of the next come while the sums of the last are stored.
//
// Bytes and operations of a block, 256 rows, 64 columns: 32 KiB of activations (16 from L2) and 4.5 KiB of
// Q4_K for 4.2 MFLOP, which are 1024 cycles of the tensor cores. L2 gives about 25 KB in that time. Decoding
// takes about 4 * 60 of 1024 issue slots of a scheduler for Q4_K, 4 * 100 for Q6_K. So the tensor cores are
// the bound: 1070 TFLOP/s at 1.98 GHz, of which a product of f16 matrices reaches 790.
//
// H200, 2048 rows, TFLOP/s: Q4_K 16384 x 5120 693 (304 with tile_product.cuh), Q6_K 10240 x 5120 614, Q4_K
// 5120 x 17408 in two parts 692, gate and up with SwiGLU 637. Of the first: 756 without the stores of y, 799
// without waiting for activations.
// Tried: release.cluster arrivals when a stage is free, which are a fence of the card each: 500. Blocks
// without clusters: 676. Barriers that trap after a time: the compiler then limits registers to those at the
// start, and products wait for each other.
#pragma once

#include "device/cluster.cuh"
#include "kernels/linear/linear_wide_cuda.h"
#include "kernels/linear/tile_product.cuh"
#include "kernels/linear/wgmma.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

inline constexpr int kWideCols = 64, kWideStages = 4;  // of a chunk of 256 columns
inline constexpr int kWideThreads = 384, kWideRows = 128, kWideCluster = 2;
inline constexpr int kWideBarrierBytes = 1024;  // so that stages begin at a multiple of it
// Of tiles of so many activation rows.
constexpr int wide_stage_bytes(int acts) {
  return acts * kWideCols * 2;
}
constexpr int wide_shared_bytes(int acts) {
  return 1024 + kWideBarrierBytes + kWideStages * wide_stage_bytes(acts);
}

// Where 16-byte piece `piece` of row `row` of a tile lies in it.
__host__ __device__ constexpr int wide_piece(int row, int piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}
// Where column c of 64 lies in the row of a tile, in halves, before the pieces change places. Of every 32
// columns the f16 form has 16 words of two halves: four of each lane, one after the other. A tile has the
// first word of all lanes, then the second, ...
__host__ __device__ constexpr int wide_place(int c) {
  const int in = act_place(c & 31), word = in >> 1;
  return (c & 32) + 2 * ((word & 3) * 4 + (word >> 2)) + (in & 1);
}

// Jobs of one weight type. Items of work: (job, pair of weight tiles, part, activation tile).
struct WidePlan {
  DeviceLinearJob jobs[kMaxLinearJobs];
  int first_item[kMaxLinearJobs + 1];
  int n_jobs, n_acts, n_act_tiles, n_chunks;
  const std::byte* tiles;  // [activation tile][step of 64 columns][wide_stage_bytes()]
  float scale;
  std::byte* hidden;  // SwiGLU: tiles of its own
  float hidden_scale;
};

struct WideItem {
  int job, tile, part, act_tile, begin, end;  // weight tile of this block; chunks

  __device__ __forceinline__ WideItem(const WidePlan& plan, int index, int rank) {
    job = 0;
    while (job + 1 < plan.n_jobs && index >= plan.first_item[job + 1]) ++job;
    index -= plan.first_item[job];
    const int parts = plan.jobs[job].k_parts;
    act_tile = index % plan.n_act_tiles;
    index /= plan.n_act_tiles;
    part = index % parts;
    tile = index / parts * kWideCluster + rank;
    begin = plan.n_chunks * part / parts;
    end = plan.n_chunks * (part + 1) / parts;
  }
};

struct WideBarriers {
  uint64_t full[kWideStages], empty[kWideStages];
};

#if THERMO_HAS_WGMMA

// One thread copies the tiles of all items of the cluster.
template <int kActs>
__device__ __forceinline__ void wide_copy(const WidePlan& plan, WideBarriers& barriers, std::byte* stages,
                                          int rank) {
  constexpr int kStageBytes = wide_stage_bytes(kActs), kShare = kStageBytes / kWideCluster;
  uint32_t turn = 0;
  const int n_items = plan.first_item[plan.n_jobs], n_clusters = gridDim.x / kWideCluster;
  for (int index = blockIdx.x / kWideCluster; index < n_items; index += n_clusters) {
    const WideItem item(plan, index, rank);
    const std::byte* from =
        plan.tiles +
        (static_cast<size_t>(item.act_tile) * plan.n_chunks + item.begin) * (kWideStages * kStageBytes) +
        rank * kShare;
    for (int chunk = item.begin; chunk < item.end; ++chunk, turn ^= 1)
#pragma unroll
      for (int s = 0; s < kWideStages; ++s, from += kStageBytes) {
        bulk_wait(&barriers.empty[s], turn ^ 1);
        bulk_expect(&barriers.full[s], kStageBytes);
        bulk_copy_to_blocks(stages + s * kStageBytes + rank * kShare, from, kShare, &barriers.full[s],
                            (1 << kWideCluster) - 1);
      }
  }
}

// The stage may be overwritten in both blocks.
__device__ __forceinline__ void wide_release(uint64_t* empty, int lane) {
  if (lane < kWideCluster) bulk_arrive(in_block(empty, lane));
}

// One warp of a warpgroup: all items of the cluster. panel_of(item): the warp's panel. end(item, acc): what
// becomes of the sums.
template <DType T, int kActs, class PanelOf, class End>
__device__ __forceinline__ void wide_multiply(const WidePlan& plan, WideBarriers& barriers,
                                              const std::byte* stages, int rank, const PanelOf& panel_of,
                                              const End& end) {
  constexpr int kAhead = 4, kStageBytes = wide_stage_bytes(kActs);
  using Reader = PanelReader<T, kAhead>;
  const int lane = threadIdx.x % 32;
  const int n_items = plan.first_item[plan.n_jobs], n_clusters = gridDim.x / kWideCluster;
  const int n_subs = (plan.jobs[0].w.n_cols + 31) / 32;
  const uint32_t stage_address = shared_address(stages);
  Reader reader;
  BlockScaleReader<T> scales_ahead;
  const auto load = [&](const uint8_t* panel, int chunk, int sub) {
    if (Reader::kBig || chunk * 8 + sub < n_subs) reader.load(panel, chunk, sub, lane);
  };
  int index = blockIdx.x / kWideCluster;
  WideItem item(plan, index, rank);
  const uint8_t* panel = panel_of(item);
  if constexpr (Reader::kBig) Reader::load_scales(scales_ahead, panel, item.begin, lane);
#pragma unroll
  for (int sub = 0; sub < kAhead; ++sub) load(panel, item.begin, sub);
  allow_next();
  wait_for_inputs();

  float acc[kActs / 2];
  uint32_t a[2][8];
#pragma unroll
  for (int i = 0; i < kActs / 2; ++i) acc[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) a[0][i] = a[1][i] = 0;
  uint32_t turn = 0;
  while (true) {
    index += n_clusters;
    const WideItem next(plan, index < n_items ? index : index - n_clusters, rank);
    const uint8_t* const next_panel = panel_of(next);
#pragma unroll 1
    for (int chunk = item.begin; chunk < item.end; ++chunk, turn ^= 1) {
      // What comes after this chunk: the first of the next item after the last.
      const bool last = chunk + 1 == item.end;
      const uint8_t* const panel_ahead = last ? next_panel : panel;
      const int chunk_ahead = last ? next.begin : chunk + 1;
      if constexpr (Reader::kBig) {
        reader.scales[0] = scales_ahead;
        Reader::load_scales(scales_ahead, panel_ahead, chunk_ahead, lane);
      }
#pragma unroll
      for (int sub = 0; sub < 8; ++sub) {
        uint32_t(&now)[8] = a[sub % 2];
        uint32_t a0[4], a1[4];
        reader.operands(sub, lane, a0, a1);
        const bool inside = Reader::kBig || chunk * 8 + sub < n_subs;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          now[i] = inside ? a0[i] : 0;
          now[i + 4] = inside ? a1[i] : 0;
        }
        if (sub + kAhead < 8)
          load(panel, chunk, sub + kAhead);
        else
          load(panel_ahead, chunk_ahead, sub + kAhead - 8);
        if (sub % 2 == 0) bulk_wait(&barriers.full[sub / 2], turn);
        const uint64_t b = wgmma_rows(stage_address + sub / 2 * kStageBytes + sub % 2 * 64);
        wgmma_begin();
        wgmma_16(acc, now, b, sub > 0 || chunk > item.begin);
        wgmma_16(acc, now + 4, b + (32 >> 4), 1);
        wgmma_commit();
        wgmma_wait_last(a[(sub + 1) % 2]);
        // The stage before is read.
        if (sub % 2 == 0 && (sub > 0 || chunk > item.begin))
          wide_release(&barriers.empty[(sub / 2 + 3) % 4], lane);
      }
    }
    wgmma_wait_all(acc);
    wide_release(&barriers.empty[kWideStages - 1], lane);
    end(item, acc);
    if (index >= n_items) break;
    item = next;
    panel = next_panel;
  }
}

#endif

}  // namespace thermo
