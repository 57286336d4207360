#include "kernels/row_ops/row_ops.h"

#include <cmath>

#include "kernels/choose_by_isa.h"

namespace thermo {

THERMO_CHOOSE_BY_ISA(RowOpKernels, row_op_kernels)

float softplus(float x) noexcept {
  return x > 20.0f ? x : std::log1p(std::exp(x));
}

float sigmoid(float x) noexcept {
  return 1.0f / (1.0f + std::exp(-x));
}

}  // namespace thermo
