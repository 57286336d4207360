// Blocks that run together and reach into each other's shared memory (compute capability 9.0).
#pragma once

#include "device/launch.cuh"

namespace thermo {

// As launch(), with clusters of `cluster` neighbouring blocks. REQUIRES: dependent_launch(), grid.x a multiple.
template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), int cluster, unsigned blocks, unsigned threads,
                     size_t shared_bytes, StreamView stream, const Args&... args) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.handle;
  config.attrs = attributes;
  config.numAttrs = 2;
  cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
// Both by all threads of all blocks of the cluster. What was written before arriving is seen after waiting.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Stores to `at` of this block's shared memory, but in that of block `rank`.
__device__ __forceinline__ void cluster_store(float4* at, int rank, const float4& x) {
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at))), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
#endif
}

}  // namespace thermo
