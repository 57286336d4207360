// AVX-512: the common types with blocks of 256 columns.
#if defined(__x86_64__)

#include "kernels/quant_matmul/kernel_avx512.h"

namespace thermo {

void matmul_block256_avx512(const PanelMatmulArgs& a) noexcept {
  switch (a.dtype) {
    case DType::Q4_K:
      return multiply<DType::Q4_K>(a);
    case DType::Q5_K:
      return multiply<DType::Q5_K>(a);
    case DType::Q6_K:
      return multiply<DType::Q6_K>(a);
    default:
      return matmul_block256_rare_avx512(a);
  }
}

}  // namespace thermo

#endif
