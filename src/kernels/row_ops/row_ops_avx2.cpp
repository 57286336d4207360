#if defined(__x86_64__)
// Compiled for this instruction set by its file name (cmake/thermo.cmake).
#include "kernels/simd/simd_avx2.h"

#include "kernels/row_ops/row_ops_impl.h"

namespace thermo {
extern const RowOpKernels row_op_kernels_avx2;
const RowOpKernels row_op_kernels_avx2 = kRowOps;
}  // namespace thermo
#endif
