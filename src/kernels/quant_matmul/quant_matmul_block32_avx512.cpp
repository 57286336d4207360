// AVX-512: types with blocks of 32 columns.
#if defined(__x86_64__)

#include "kernels/quant_matmul/kernel_avx512.h"

namespace thermo {

void matmul_block32_avx512(const PanelMatmulArgs& a) noexcept {
  switch (a.dtype) {
    case DType::Q4_0:
      return multiply<DType::Q4_0>(a);
    case DType::Q4_1:
      return multiply<DType::Q4_1>(a);
    case DType::Q5_0:
      return multiply<DType::Q5_0>(a);
    case DType::Q5_1:
      return multiply<DType::Q5_1>(a);
    case DType::Q8_0:
      return multiply<DType::Q8_0>(a);
    case DType::IQ4_NL:
      return multiply<DType::IQ4_NL>(a);
    case DType::MXFP4:
      return multiply<DType::MXFP4>(a);
    default:
      break;
  }
}

}  // namespace thermo

#endif
