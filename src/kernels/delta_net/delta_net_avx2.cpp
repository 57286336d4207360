#if defined(__x86_64__)
// Compiled for this instruction set by its file name (cmake/thermo.cmake).
#include "kernels/simd/simd_avx2.h"

#include "kernels/delta_net/delta_net_impl.h"

namespace thermo {
extern const DeltaNetKernels delta_net_kernels_avx2;
const DeltaNetKernels delta_net_kernels_avx2 = kDeltaNet;
}  // namespace thermo
#endif
