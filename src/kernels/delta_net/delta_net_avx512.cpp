#if defined(__x86_64__)
// Compiled for this instruction set by its file name (cmake/thermo.cmake).
#include "kernels/simd/simd_avx512.h"

#include "kernels/delta_net/delta_net_impl.h"

namespace thermo {
extern const DeltaNetKernels delta_net_kernels_avx512;
const DeltaNetKernels delta_net_kernels_avx512 = kDeltaNet;
}  // namespace thermo
#endif
