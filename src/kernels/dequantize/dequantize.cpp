// The decoders, written as a description of the formats: byte offsets, bit fields and the order of float
// operations are those of the GGUF block formats. A block is read byte by byte, so it needs no alignment;
// every integer is small enough that its conversion to float is exact.
#include "kernels/dequantize/dequantize.h"

#include <bit>
#include <cstring>

#include "base/check.h"
#include "kernels/dequantize/block_tables.h"

namespace thermo {

float f16_to_f32(uint16_t bits) noexcept {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 31u;
  const uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) {
    const uint32_t quiet = mantissa != 0 ? 0x00400000u : 0u;  // as the F16C instructions do
    return std::bit_cast<float>(sign | 0x7F800000u | quiet | mantissa << 13);
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t f32_to_f16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u;
  } else if (magnitude >= 0x477FF000u) {  // 65520, half way past the largest half, and up
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: the unit in the last place of 0.5f is 2^-24
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {  // ties to even: add just under a half, and one more when the kept bit is odd
    half = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

float bf16_to_f32(uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t f32_to_bf16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

namespace {

float half_at(const uint8_t* b) {
  uint16_t bits;
  std::memcpy(&bits, b, sizeof(bits));
  return f16_to_f32(bits);
}

uint32_t u32_at(const uint8_t* b) {
  uint32_t bits;
  std::memcpy(&bits, b, sizeof(bits));
  return bits;
}

// 2^(e-128), exact also for e = 0 and 1, where it is a subnormal.
float mxfp4_scale(uint8_t e) {
  return std::bit_cast<float>(e < 2 ? 0x00200000u << e : (static_cast<uint32_t>(e) - 1) << 23);
}

void decode_q4_0(const uint8_t* b, float* y) {
  const float d = half_at(b);
  for (int l = 0; l < 16; ++l) {
    y[l] = d * static_cast<float>((b[2 + l] & 15) - 8);
    y[l + 16] = d * static_cast<float>((b[2 + l] >> 4) - 8);
  }
}

void decode_q4_1(const uint8_t* b, float* y) {
  const float d = half_at(b), m = half_at(b + 2);
  for (int l = 0; l < 16; ++l) {
    y[l] = d * static_cast<float>(b[4 + l] & 15) + m;
    y[l + 16] = d * static_cast<float>(b[4 + l] >> 4) + m;
  }
}

void decode_q5_0(const uint8_t* b, float* y) {
  const float d = half_at(b);
  const uint32_t high = u32_at(b + 2);
  for (int l = 0; l < 16; ++l) {
    const int low_bit = static_cast<int>(high >> l & 1), high_bit = static_cast<int>(high >> (l + 16) & 1);
    y[l] = d * static_cast<float>((b[6 + l] & 15) + 16 * low_bit - 16);
    y[l + 16] = d * static_cast<float>((b[6 + l] >> 4) + 16 * high_bit - 16);
  }
}

void decode_q5_1(const uint8_t* b, float* y) {
  const float d = half_at(b), m = half_at(b + 2);
  const uint32_t high = u32_at(b + 4);
  for (int l = 0; l < 16; ++l) {
    const int low_bit = static_cast<int>(high >> l & 1), high_bit = static_cast<int>(high >> (l + 16) & 1);
    y[l] = d * static_cast<float>((b[8 + l] & 15) + 16 * low_bit) + m;
    y[l + 16] = d * static_cast<float>((b[8 + l] >> 4) + 16 * high_bit) + m;
  }
}

void decode_q8_0(const uint8_t* b, float* y) {
  const float d = half_at(b);
  for (int i = 0; i < 32; ++i) y[i] = d * static_cast<float>(static_cast<int8_t>(b[2 + i]));
}

void decode_iq4_nl(const uint8_t* b, float* y) {
  const float d = half_at(b);
  for (int l = 0; l < 16; ++l) {
    y[l] = d * static_cast<float>(kIq4Values[b[2 + l] & 15]);
    y[l + 16] = d * static_cast<float>(kIq4Values[b[2 + l] >> 4]);
  }
}

void decode_mxfp4(const uint8_t* b, float* y) {
  const float d = mxfp4_scale(b[0]);
  for (int l = 0; l < 16; ++l) {
    y[l] = d * static_cast<float>(kMxfp4Values[b[1 + l] & 15]);
    y[l + 16] = d * static_cast<float>(kMxfp4Values[b[1 + l] >> 4]);
  }
}

// In the super-blocks below: n = half of the block, j = quarter of that half, k = run of 16 elements.

void decode_q2_k(const uint8_t* b, float* y) {
  const float d = half_at(b + 80), dmin = half_at(b + 82);
  for (int k = 0; k < 16; ++k) {
    const int n = k / 8, j = k % 8 / 2;
    const float scale = d * static_cast<float>(b[k] & 15), min = dmin * static_cast<float>(b[k] >> 4);
    const uint8_t* quants = b + 16 + 32 * n + 16 * (k & 1);
    for (int l = 0; l < 16; ++l) y[16 * k + l] = scale * static_cast<float>(quants[l] >> (2 * j) & 3) - min;
  }
}

void decode_q3_k(const uint8_t* b, float* y) {
  const float d = half_at(b + 108);
  for (int k = 0; k < 16; ++k) {
    const int n = k / 8, j = k % 8 / 2;
    const int low = k < 8 ? b[96 + k] & 15 : b[96 + k - 8] >> 4;
    const int high = b[104 + k % 4] >> (2 * (k / 4)) & 3;
    const float scale = d * static_cast<float>((low | high << 4) - 32);
    const uint8_t* quants = b + 32 + 32 * n + 16 * (k & 1);
    const uint8_t* mask = b + 16 * (k & 1);
    for (int l = 0; l < 16; ++l) {
      const int set = mask[l] >> (4 * n + j) & 1;
      y[16 * k + l] = scale * static_cast<float>((quants[l] >> (2 * j) & 3) + 4 * set - 4);
    }
  }
}

struct ScaleMin {
  float scale, min;
};

// The 6-bit pair of sub-block s of Q4_K and Q5_K, out of the 12 packed bytes.
ScaleMin scale_min(const uint8_t* packed, int s) {
  if (s < 4) return {static_cast<float>(packed[s] & 63), static_cast<float>(packed[s + 4] & 63)};
  return {static_cast<float>((packed[s + 4] & 15) | (packed[s - 4] >> 6) << 4),
          static_cast<float>((packed[s + 4] >> 4) | (packed[s] >> 6) << 4)};
}

void decode_q4_k(const uint8_t* b, float* y) {
  const float d = half_at(b), dmin = half_at(b + 2);
  for (int s = 0; s < 8; ++s) {
    const ScaleMin pair = scale_min(b + 4, s);
    const float scale = d * pair.scale, min = dmin * pair.min;
    const uint8_t* quants = b + 16 + 32 * (s / 2);
    const int shift = 4 * (s & 1);
    for (int l = 0; l < 32; ++l) y[32 * s + l] = scale * static_cast<float>(quants[l] >> shift & 15) - min;
  }
}

void decode_q5_k(const uint8_t* b, float* y) {
  const float d = half_at(b), dmin = half_at(b + 2);
  for (int s = 0; s < 8; ++s) {
    const ScaleMin pair = scale_min(b + 4, s);
    const float scale = d * pair.scale, min = dmin * pair.min;
    const uint8_t* quants = b + 48 + 32 * (s / 2);
    const int shift = 4 * (s & 1);
    for (int l = 0; l < 32; ++l) {
      const int q = (quants[l] >> shift & 15) + 16 * (b[16 + l] >> s & 1);
      y[32 * s + l] = scale * static_cast<float>(q) - min;
    }
  }
}

void decode_q6_k(const uint8_t* b, float* y) {
  const float d = half_at(b + 208);
  for (int k = 0; k < 16; ++k) {
    const int n = k / 8, j = k % 8 / 2, half = 16 * (k & 1);
    const float scale = d * static_cast<float>(static_cast<int8_t>(b[192 + k]));
    const uint8_t* low = b + 64 * n + 32 * (j & 1) + half;
    const uint8_t* high = b + 128 + 32 * n + half;
    const int shift = 4 * (j / 2);
    for (int l = 0; l < 16; ++l) {
      const int q = (low[l] >> shift & 15) | (high[l] >> (2 * j) & 3) << 4;
      y[16 * k + l] = scale * static_cast<float>(q - 32);
    }
  }
}

void decode_iq4_xs(const uint8_t* b, float* y) {
  const float d = half_at(b);
  const int scales_high = b[2] | b[3] << 8;
  for (int s = 0; s < 8; ++s) {
    const int ls = (b[4 + s / 2] >> (4 * (s & 1)) & 15) | (scales_high >> (2 * s) & 3) << 4;
    const float scale = d * static_cast<float>(ls - 32);
    const uint8_t* quants = b + 8 + 16 * s;
    for (int l = 0; l < 16; ++l) {
      y[32 * s + l] = scale * static_cast<float>(kIq4Values[quants[l] & 15]);
      y[32 * s + l + 16] = scale * static_cast<float>(kIq4Values[quants[l] >> 4]);
    }
  }
}

// Runs one block decoder over a row; the sizes are constants so that the decoder is inlined.
template <int kElements, int kBytes, void (*kDecode)(const uint8_t*, float*)>
void decode_row(const uint8_t* b, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += kElements, b += kBytes) kDecode(b, y + i);
}

template <float (*kConvert)(uint16_t) noexcept>
void convert_row(const uint8_t* b, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, b + 2 * i, sizeof(bits));
    y[i] = kConvert(bits);
  }
}

}  // namespace

void dequantize_row(DType dtype, const std::byte* blocks, int64_t n, float* out) noexcept {
  const auto* b = reinterpret_cast<const uint8_t*>(blocks);
  switch (dtype) {
    case DType::F32:
      if (n > 0) std::memcpy(out, b, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::F16:
      return convert_row<f16_to_f32>(b, n, out);
    case DType::BF16:
      return convert_row<bf16_to_f32>(b, n, out);
    case DType::Q4_0:
      return decode_row<32, 18, decode_q4_0>(b, n, out);
    case DType::Q4_1:
      return decode_row<32, 20, decode_q4_1>(b, n, out);
    case DType::Q5_0:
      return decode_row<32, 22, decode_q5_0>(b, n, out);
    case DType::Q5_1:
      return decode_row<32, 24, decode_q5_1>(b, n, out);
    case DType::Q8_0:
      return decode_row<32, 34, decode_q8_0>(b, n, out);
    case DType::Q2_K:
      return decode_row<256, 84, decode_q2_k>(b, n, out);
    case DType::Q3_K:
      return decode_row<256, 110, decode_q3_k>(b, n, out);
    case DType::Q4_K:
      return decode_row<256, 144, decode_q4_k>(b, n, out);
    case DType::Q5_K:
      return decode_row<256, 176, decode_q5_k>(b, n, out);
    case DType::Q6_K:
      return decode_row<256, 210, decode_q6_k>(b, n, out);
    case DType::IQ4_NL:
      return decode_row<32, 18, decode_iq4_nl>(b, n, out);
    case DType::IQ4_XS:
      return decode_row<256, 136, decode_iq4_xs>(b, n, out);
    case DType::MXFP4:
      return decode_row<32, 17, decode_mxfp4>(b, n, out);
    case DType::I8:
    case DType::I16:
    case DType::I32:
    case DType::I64:
    case DType::F64:
      break;
  }
  check_failed(__FILE__, __LINE__, "dtype", "dequantize_row of a type that is no weight type");
}

}  // namespace thermo
