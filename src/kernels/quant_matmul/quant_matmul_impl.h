// The tables of functions of each instruction set. Internal to this folder.
#pragma once

#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {

extern const QuantMatmulKernels kQuantMatmulPortable;
#if defined(__x86_64__)
extern const QuantMatmulKernels kQuantMatmulAvx2;
extern const QuantMatmulKernels kQuantMatmulAvx512;
extern const QuantMatmulKernels kQuantMatmulAmx;
// The AMX kernel with its tile instructions emulated: lets its logic be tested where there is no AMX. Needs
// AVX-512.
extern const QuantMatmulKernels kQuantMatmulAmxEmulated;

// Parts of the AVX-512 path.
void matmul_block32_avx512(const PanelMatmulArgs& args) noexcept;
void matmul_block256_avx512(const PanelMatmulArgs& args) noexcept;
void matmul_block256_rare_avx512(const PanelMatmulArgs& args) noexcept;
#endif

}  // namespace thermo
