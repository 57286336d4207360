// GGUF blocks to floats, exactly as the format defines them, and floats to blocks for the tools that write
// files (synth, tests). Decoding is the reference for every kernel that reads quantised weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace thermo {

// Half and brain floats. Round to nearest even; NaN stays NaN.
float f16_to_f32(uint16_t bits) noexcept;
uint16_t f32_to_f16(float value) noexcept;
float bf16_to_f32(uint16_t bits) noexcept;
uint16_t f32_to_bf16(float value) noexcept;

// Decodes n elements (a multiple of the block) of a weight type. `blocks` has no alignment.
void dequantize_row(DType dtype, const std::byte* blocks, int64_t n, float* out) noexcept;

// Encodes n elements (a multiple of the block): F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K
// Q6_K IQ4_NL IQ4_XS MXFP4. Good enough to make test models: simple scale choices, no search.
void quantize_row(DType dtype, const float* x, int64_t n, std::byte* blocks) noexcept;

}  // namespace thermo
