// Compiled for this instruction set by its file name (cmake/thermo.cmake).
#include "kernels/simd/simd_portable.h"

#include "kernels/delta_net/delta_net_impl.h"

namespace thermo {
extern const DeltaNetKernels delta_net_kernels_portable;
const DeltaNetKernels delta_net_kernels_portable = kDeltaNet;
}  // namespace thermo
