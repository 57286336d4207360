// What the kernels of wide_product.cuh have around it: the start and end of a block, and their launch.
#pragma once

#include "base/units.h"
#include "device/cluster.cuh"
#include "kernels/linear/wide_product.cuh"

namespace thermo {

inline constexpr int kWideGroups = kWideThreads / 128 - 1;           // that multiply
inline constexpr int kWideRegisters = 232, kWideCopyRegisters = 40;  // of a thread
// Gate and up are exchanged between the warpgroups, half of the sums each; then the tile they make.
constexpr int wide_exchange_bytes(int acts) {
  return 2 * 64 * acts / 2 * static_cast<int>(sizeof(float));
}
constexpr int wide_swiglu_bytes(int acts) {
  return wide_shared_bytes(acts) + wide_exchange_bytes(acts) + wide_stage_bytes(acts);
}

// Bound of threads of a kernel: the host sees from it whether there is a body.
#if THERMO_HAS_WGMMA
#define THERMO_WIDE_BOUND kWideThreads
#else
#define THERMO_WIDE_BOUND 32
#endif
inline constexpr int kWideBound = THERMO_WIDE_BOUND;

#if THERMO_HAS_WGMMA
struct WideBlock {
  WideBarriers& barriers;
  std::byte* const stages;
  const int rank;

  __device__ __forceinline__ explicit WideBlock(std::byte* shared)
      : WideBlock(
            shared + (kWideBarrierBytes - shared_address(shared) % kWideBarrierBytes) % kWideBarrierBytes,
            cluster_rank()) {
    if (threadIdx.x == 0)
      for (int s = 0; s < kWideStages; ++s) {
        bulk_init(&barriers.full[s]);
        bulk_init(&barriers.empty[s], kWideGroups * 4 * kWideCluster);
      }
    cluster_arrive();
    cluster_wait();
  }
  // By the warpgroup that copies.
  template <int kActs>
  __device__ __forceinline__ void copy(const WidePlan& plan) const {
    give_registers<kWideCopyRegisters>();
    wait_for_inputs();
    if (threadIdx.x % 128 == 0) wide_copy<kActs>(plan, barriers, stages, rank);
    __syncwarp();
  }
  // No block leaves while another may still copy to it.
  __device__ __forceinline__ void finish() const {
    cluster_arrive();
    cluster_wait();
  }

 private:
  __device__ __forceinline__ WideBlock(std::byte* aligned, int rank_in)
      : barriers(*reinterpret_cast<WideBarriers*>(aligned)),
        stages(aligned + kWideBarrierBytes),
        rank(rank_in) {}
};
#endif

inline WidePlan wide_plan(const void* tiles, float scale, int n_acts, int n_cols) {
  WidePlan plan{};
  plan.n_acts = n_acts;
  plan.n_act_tiles = ceil_div(n_acts, wide_tile_rows(n_acts));
  plan.n_chunks = ceil_div(n_cols, 256);
  plan.tiles = static_cast<const std::byte*>(tiles);
  plan.scale = scale;
  return plan;
}

inline void launch_wide_blocks(void (*kernel)(WidePlan), const WidePlan& plan, size_t shared_bytes,
                               StreamView stream) {
  const int clusters = device_in_use().n_multiprocessors / kWideCluster, items = plan.first_item[plan.n_jobs];
  launch_clusters(kernel, kWideCluster,
                  static_cast<unsigned>(kWideCluster * (items < clusters ? items : clusters)), kWideThreads,
                  shared_bytes, stream, plan);
}

}  // namespace thermo
