// AMX: the choice of the kernel. Tiles multiply 16 activation rows with 16 weight rows (block256_amx.h,
// block32_amx.h). Few activation rows and float weights go to the AVX-512 kernel. Both give the same bits.
#if defined(__x86_64__)

#include "kernels/quant_matmul/block256_amx.h"
#include "kernels/quant_matmul/block32_amx.h"
#include "kernels/quant_matmul/quant_matmul_impl.h"

namespace thermo {
namespace {

// From so many activation rows on tiles are faster. With fewer, one unpacked strip is used too little.
template <DType T>
constexpr int kMinActs = kPanelFormat<T>.scales == ScaleKind::SixMin ? 6 : 8;

template <DType T, class Tiles>
void multiply_amx(const PanelMatmulArgs& a) {
  if (a.n_act < kMinActs<T>)
    kQuantMatmulAvx512.matmul(a);
  else if constexpr (kPanelFormat<T>.block_cols == 256)
    multiply256<T, Tiles>(a);
  else
    multiply32<T, Tiles>(a);
}

template <class Tiles>
void matmul_amx(const PanelMatmulArgs& a) noexcept {
  if (act_format(a.dtype) == ActFormat::F32) return kQuantMatmulAvx512.matmul(a);
#define CASE(t) return multiply_amx<DType::t, Tiles>(a)
  THERMO_FOR_QUANT_TYPE(a.dtype, CASE)
#undef CASE
}

void quantize_row_amx(ActFormat format, const float* x, int n_cols, std::byte* out) noexcept {
  kQuantMatmulAvx512.quantize_row(format, x, n_cols, out);
}

}  // namespace

const QuantMatmulKernels kQuantMatmulAmx = {quantize_row_amx, matmul_amx<HardwareTiles>};
const QuantMatmulKernels kQuantMatmulAmxEmulated = {quantize_row_amx, matmul_amx<EmulatedTiles>};

}  // namespace thermo

#endif
