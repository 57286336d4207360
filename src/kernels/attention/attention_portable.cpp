// Compiled for this instruction set by its file name (cmake/thermo.cmake).
#include "kernels/simd/simd_portable.h"

#include "kernels/attention/attention_impl.h"

namespace thermo {
extern const AttentionKernels attention_kernels_portable;
const AttentionKernels attention_kernels_portable = kAttention;
}  // namespace thermo
