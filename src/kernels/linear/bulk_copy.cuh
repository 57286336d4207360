// Long copies from global to shared memory by the copy engine, one instruction each (compute capability 9.0).
// A barrier counts the bytes that have come.
#pragma once

#include <cstdint>

namespace thermo {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// One thread, before any other looks at the barrier. It waits for `arrivals`, and for bytes.
__device__ __forceinline__ void bulk_init(uint64_t* barrier, int arrivals = 1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// How many bytes the barrier waits for, and one arrival: one thread, once for a turn of it, before the
// copies.
__device__ __forceinline__ void bulk_expect(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
#endif
}
// Addresses and bytes: multiples of 16.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}
// The same to the same places of all blocks of `mask` in the cluster, and for their barriers.
__device__ __forceinline__ void bulk_copy_to_blocks(void* shared, const void* global, uint32_t bytes,
                                                    uint64_t* barrier, uint16_t mask) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(mask)
      : "memory");
#endif
}
// Arrives at the barrier of a block of the cluster; see in_block(). What this thread wrote is not ordered
// before it for other blocks: that would be a fence of the whole card, which took a fifth of a product.
__device__ __forceinline__ void bulk_arrive(uint32_t barrier_in_block) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_in_block) : "memory");
#endif
}
// From shared to global memory; bulk_copy_out_wait() by the same thread before it uses the memory again.
__device__ __forceinline__ void bulk_copy_out(void* global, const void* shared, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
__device__ __forceinline__ void bulk_copy_out_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
// Before copies to memory that the block has read, after the barrier that says so.
__device__ __forceinline__ void bulk_reuse() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// `turn`: 0, 1, 0, ...; before its first use a barrier lets through who waits for turn 1.
__device__ __forceinline__ void bulk_wait(uint64_t* barrier, uint32_t turn = 0) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(turn)
      : "memory");
#endif
}

}  // namespace thermo
