// Compiled for this instruction set by its file name (cmake/thermo.cmake).
#include "kernels/simd/simd_portable.h"

#include "kernels/row_ops/row_ops_impl.h"

namespace thermo {
extern const RowOpKernels row_op_kernels_portable;
const RowOpKernels row_op_kernels_portable = kRowOps;
}  // namespace thermo
