// Blocks that run together and write to each other's shared memory: cards of compute capability 9.0 and
// later.
#pragma once

#include "device/launch.cuh"

namespace thermo {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
// Where the same variable of block `rank` lies.
__device__ __forceinline__ uint32_t in_block(const void* variable, int rank) {
  uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(variable))), "r"(rank));
#endif
  return address;
}
// Writes to the same variable of block `rank`.
__device__ __forceinline__ void put_in_block(const float* variable, int rank, float x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(in_block(variable, rank)), "f"(x) : "memory");
#endif
}
__device__ __forceinline__ void put_in_block(const float4* variable, int rank, const float4& x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(in_block(variable, rank)), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
#endif
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

inline bool has_clusters() {
  return device_in_use().compute_capability >= 90;
}

// launch() with neighbouring blocks in clusters of n.
template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), int n, dim3 grid, dim3 block, size_t shared_bytes,
                     StreamView stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.handle;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(n), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = dependent_launch() ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace thermo
