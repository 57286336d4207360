// AVX2: types with blocks of 32 columns.
#if defined(__x86_64__)

#include "kernels/quant_matmul/kernel_avx2.h"

namespace thermo {

void matmul_block32_avx2(const PanelMatmulArgs& a) noexcept {
  multiply_types32(a);
}

}  // namespace thermo

#endif
