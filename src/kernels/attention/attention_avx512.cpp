#if defined(__x86_64__)
// Compiled for this instruction set by its file name (cmake/thermo.cmake).
#include "kernels/simd/simd_avx512.h"

#include "kernels/attention/attention_impl.h"

namespace thermo {
extern const AttentionKernels attention_kernels_avx512;
const AttentionKernels attention_kernels_avx512 = kAttention;
}  // namespace thermo
#endif
