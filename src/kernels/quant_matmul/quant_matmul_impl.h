// The tables of functions of each instruction set. Internal to this folder.
#pragma once

#include <atomic>

#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {

extern std::atomic<int> few_rows_ahead;  // set_prefetch_ahead()

extern const QuantMatmulKernels kQuantMatmulPortable;
#if defined(__x86_64__)
extern const QuantMatmulKernels kQuantMatmulAvx2;
extern const QuantMatmulKernels kQuantMatmulAvxVnni;
extern const QuantMatmulKernels kQuantMatmulAvx512;
extern const QuantMatmulKernels kQuantMatmulAmx;
// The AMX kernel with its tile instructions emulated: lets its logic be tested where there is no AMX. Needs
// AVX-512.
extern const QuantMatmulKernels kQuantMatmulAmxEmulated;

// The AVX-VNNI kernel with the instruction's AVX-512 encoding: the same for machines without AVX-VNNI.
extern const QuantMatmulKernels kQuantMatmulVnniEvex;

// Parts of the paths.
void matmul_block32_avx2(const PanelMatmulArgs& args) noexcept;
void matmul_block256_avx2(const PanelMatmulArgs& args) noexcept;
void matmul_block32_avxvnni(const PanelMatmulArgs& args) noexcept;
void matmul_block256_avxvnni(const PanelMatmulArgs& args) noexcept;
void matmul_block32_vnni_evex(const PanelMatmulArgs& args) noexcept;
void matmul_block256_vnni_evex(const PanelMatmulArgs& args) noexcept;
void matmul_block32_avx512(const PanelMatmulArgs& args) noexcept;
void matmul_block256_avx512(const PanelMatmulArgs& args) noexcept;
void matmul_block256_rare_avx512(const PanelMatmulArgs& args) noexcept;
#endif

}  // namespace thermo
