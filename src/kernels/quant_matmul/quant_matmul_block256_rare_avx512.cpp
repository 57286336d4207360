// AVX-512: the other types with blocks of 256 columns.
#if defined(__x86_64__)

#include "kernels/quant_matmul/kernel_avx512.h"

namespace thermo {

void matmul_block256_rare_avx512(const PanelMatmulArgs& a) noexcept {
  switch (a.dtype) {
    case DType::Q2_K:
      return multiply<DType::Q2_K>(a);
    case DType::Q3_K:
      return multiply<DType::Q3_K>(a);
    case DType::IQ4_XS:
      return multiply<DType::IQ4_XS>(a);
    default:
      break;
  }
}

}  // namespace thermo

#endif
