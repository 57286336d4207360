// The encoders: floats to blocks. Each block (or sub-block) starts from its extremes and, where the format
// has room to gain, takes two least-squares steps: round with the current scale, then the scale that best
// fits those integers. No search over scales, so files come out a little worse than a quantiser's best and
// fast (over 50 M elements a second on one core). Scales are rounded to what the block can store before the
// elements are, so the decoder and the encoder agree on them. Any input gives a valid block: a scale is
// clamped to the finite halves, and a NaN element becomes the lowest code.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "kernels/dequantize/block_tables.h"
#include "kernels/dequantize/dequantize.h"

namespace thermo {
namespace {

// The nearest integer of v within lo..hi (|lo|, |hi| < 2^22), halves to even; lo for a NaN.
int nearest(float v, int lo, int hi) {
  v = std::max(static_cast<float>(lo), v);
  v = std::min(static_cast<float>(hi), v);
  const float shifted = v + 0x1.8p23f;  // pushes the fraction out of the mantissa
  return (std::bit_cast<int32_t>(shifted) & 0x007FFFFF) - 0x00400000;
}

float inverse(float v) {
  return v != 0.0f ? 1.0f / v : 0.0f;
}

// Stores v as a half at b and returns what the decoder will read.
float store_half(float v, uint8_t* b) {
  const uint16_t bits = f32_to_f16(std::min(65504.0f, std::max(-65504.0f, v)));
  std::memcpy(b, &bits, sizeof(bits));
  return f16_to_f32(bits);
}

// The element of largest magnitude, with its sign.
float signed_max(const float* x, int n) {
  float best = 0.0f, magnitude = 0.0f;
  for (int i = 0; i < n; ++i) {
    if (std::fabs(x[i]) > magnitude) {
      magnitude = std::fabs(x[i]);
      best = x[i];
    }
  }
  return best;
}

struct Affine {
  float scale, min;  // x is about scale * q + min
};

// Scale and min of n elements for codes 0..top. With `min_not_positive` the min is at most 0, as the K
// formats store its negative without a sign.
Affine fit_affine(const float* x, int n, int top, bool min_not_positive) {
  float lo = x[0], hi = x[0];
  for (int i = 1; i < n; ++i) {
    lo = std::min(lo, x[i]);
    hi = std::max(hi, x[i]);
  }
  if (min_not_positive) lo = std::min(lo, 0.0f);
  Affine fit{(hi - lo) / static_cast<float>(top), lo};
  if (!(fit.scale > 0.0f)) return {0.0f, lo};
  for (int step = 0; step < 2; ++step) {
    const float to_code = inverse(fit.scale);
    float sum_q = 0, sum_qq = 0, sum_x = 0, sum_xq = 0;
    for (int i = 0; i < n; ++i) {
      const auto q = static_cast<float>(nearest((x[i] - fit.min) * to_code, 0, top));
      sum_q += q;
      sum_qq += q * q;
      sum_x += x[i];
      sum_xq += q * x[i];
    }
    const float count = static_cast<float>(n), determinant = count * sum_qq - sum_q * sum_q;
    if (!(determinant > 0.0f)) break;
    Affine next{(count * sum_xq - sum_q * sum_x) / determinant,
                (sum_qq * sum_x - sum_q * sum_xq) / determinant};
    if (min_not_positive && next.min > 0.0f) next = {sum_xq / sum_qq, 0.0f};
    if (!(next.scale > 0.0f)) break;
    fit = next;
  }
  return fit;
}

// The scale of n elements for codes -half..half-1: the extreme takes code -half, whichever its sign.
float fit_symmetric(const float* x, int n, int half) {
  float scale = signed_max(x, n) / static_cast<float>(-half);
  for (int step = 0; step < 2; ++step) {
    const float to_code = inverse(scale);
    float sum_qq = 0, sum_xq = 0;
    for (int i = 0; i < n; ++i) {
      const auto q = static_cast<float>(nearest(x[i] * to_code, -half, half - 1));
      sum_qq += q * q;
      sum_xq += q * x[i];
    }
    if (!(sum_qq > 0.0f)) break;
    scale = sum_xq / sum_qq;
  }
  return scale;
}

void encode_q4_0(const float* x, uint8_t* b) {
  const float to_code = inverse(store_half(signed_max(x, 32) / -8.0f, b));
  for (int l = 0; l < 16; ++l) {
    const int low = nearest(x[l] * to_code, -8, 7) + 8, high = nearest(x[l + 16] * to_code, -8, 7) + 8;
    b[2 + l] = static_cast<uint8_t>(low | high << 4);
  }
}

void encode_q4_1(const float* x, uint8_t* b) {
  const Affine fit = fit_affine(x, 32, 15, false);
  const float to_code = inverse(store_half(fit.scale, b)), min = store_half(fit.min, b + 2);
  for (int l = 0; l < 16; ++l) {
    const int low = nearest((x[l] - min) * to_code, 0, 15),
              high = nearest((x[l + 16] - min) * to_code, 0, 15);
    b[4 + l] = static_cast<uint8_t>(low | high << 4);
  }
}

// Five-bit codes of one block: the fifth bits in a word at `bits`, the nibbles after it.
void pack_five_bits(const int* q, uint8_t* bits, uint8_t* nibbles) {
  uint32_t high = 0;
  for (int i = 0; i < 32; ++i) high |= static_cast<uint32_t>(q[i] >> 4) << i;
  std::memcpy(bits, &high, sizeof(high));
  for (int l = 0; l < 16; ++l) nibbles[l] = static_cast<uint8_t>((q[l] & 15) | (q[l + 16] & 15) << 4);
}

void encode_q5_0(const float* x, uint8_t* b) {
  const float to_code = inverse(store_half(signed_max(x, 32) / -16.0f, b));
  int q[32];
  for (int i = 0; i < 32; ++i) q[i] = nearest(x[i] * to_code, -16, 15) + 16;
  pack_five_bits(q, b + 2, b + 6);
}

void encode_q5_1(const float* x, uint8_t* b) {
  const Affine fit = fit_affine(x, 32, 31, false);
  const float to_code = inverse(store_half(fit.scale, b)), min = store_half(fit.min, b + 2);
  int q[32];
  for (int i = 0; i < 32; ++i) q[i] = nearest((x[i] - min) * to_code, 0, 31);
  pack_five_bits(q, b + 4, b + 8);
}

void encode_q8_0(const float* x, uint8_t* b) {
  const float to_code = inverse(store_half(std::fabs(signed_max(x, 32)) / 127.0f, b));
  for (int i = 0; i < 32; ++i) b[2 + i] = static_cast<uint8_t>(nearest(x[i] * to_code, -127, 127));
}

// For every integer -128..127 the nibble whose value in kIq4Values is nearest.
constexpr std::array<uint8_t, 256> kIq4Nearest = [] {
  std::array<uint8_t, 256> table{};
  for (int v = -128; v < 128; ++v) {
    int best = 0;
    for (int k = 1; k < 16; ++k) {
      const int to_best = v - kIq4Values[best], to_k = v - kIq4Values[k];
      if (to_k * to_k < to_best * to_best) best = k;
    }
    table[static_cast<size_t>(v + 128)] = static_cast<uint8_t>(best);
  }
  return table;
}();

int iq4_code(float v) {
  return kIq4Nearest[static_cast<size_t>(nearest(v, -128, 127) + 128)];
}

// The scale of 32 elements for the IQ4 table, whose extreme is -127.
float fit_iq4(const float* x) {
  float scale = signed_max(x, 32) / -127.0f;
  for (int step = 0; step < 2; ++step) {
    const float to_code = inverse(scale);
    float sum_qq = 0, sum_xq = 0;
    for (int i = 0; i < 32; ++i) {
      const auto q = static_cast<float>(kIq4Values[iq4_code(x[i] * to_code)]);
      sum_qq += q * q;
      sum_xq += q * x[i];
    }
    scale = sum_xq / sum_qq;  // no table value is 0, so sum_qq is not
  }
  return scale;
}

void pack_iq4(const float* x, float to_code, uint8_t* nibbles) {
  for (int l = 0; l < 16; ++l)
    nibbles[l] = static_cast<uint8_t>(iq4_code(x[l] * to_code) | iq4_code(x[l + 16] * to_code) << 4);
}

void encode_iq4_nl(const float* x, uint8_t* b) {
  pack_iq4(x, inverse(store_half(fit_iq4(x), b)), b + 2);
}

void encode_iq4_xs(const float* x, uint8_t* b) {
  float scales[8];
  for (int s = 0; s < 8; ++s) scales[s] = fit_iq4(x + 32 * s);
  const float d = store_half(signed_max(scales, 8) / -32.0f, b), to_scale = inverse(d);
  std::memset(b + 2, 0, 6);
  for (int s = 0; s < 8; ++s) {
    const int scale = nearest(scales[s] * to_scale, -32, 31), stored = scale + 32;
    b[2 + s / 4] = static_cast<uint8_t>(b[2 + s / 4] | stored >> 4 << (2 * (s % 4)));
    b[4 + s / 2] = static_cast<uint8_t>(b[4 + s / 2] | (stored & 15) << (4 * (s & 1)));
    pack_iq4(x + 32 * s, inverse(d * static_cast<float>(scale)), b + 8 + 16 * s);
  }
}

int mxfp4_code(float v) {
  const float m = std::fabs(v);
  const int code = (m > 0.5f) + (m > 1.5f) + (m > 2.5f) + (m > 3.5f) + (m > 5.0f) + (m > 7.0f) + (m > 10.0f);
  return code | (v < 0.0f ? 8 : 0);
}

void encode_mxfp4(const float* x, uint8_t* b) {
  const float extreme = std::fabs(signed_max(x, 32));
  const int exponent = std::isfinite(extreme) && extreme > 0.0f ? std::ilogb(extreme) : -1000;
  // The largest code is 12 = 1.5 * 2^3: the lower exponent clips the top quarter of an octave, the higher one
  // does not but is twice as coarse. Both are tried.
  float best_error = INFINITY;
  for (int e = exponent + 125; e <= exponent + 126; ++e) {
    const int stored = std::clamp(e, 0, 254);
    const float scale = std::ldexp(1.0f, stored - 128),
                to_code = std::ldexp(1.0f, std::min(127, 128 - stored));
    uint8_t nibbles[16];
    float error = 0;
    for (int l = 0; l < 16; ++l) {
      const int low = mxfp4_code(x[l] * to_code), high = mxfp4_code(x[l + 16] * to_code);
      const float low_error = x[l] - scale * static_cast<float>(kMxfp4Values[low]);
      const float high_error = x[l + 16] - scale * static_cast<float>(kMxfp4Values[high]);
      error += low_error * low_error + high_error * high_error;
      nibbles[l] = static_cast<uint8_t>(low | high << 4);
    }
    if (e == exponent + 125 || error < best_error) {
      best_error = error;
      b[0] = static_cast<uint8_t>(stored);
      std::memcpy(b + 1, nibbles, sizeof(nibbles));
    }
  }
}

void encode_q2_k(const float* x, uint8_t* b) {
  Affine fits[16];
  float top_scale = 0, top_min = 0;
  for (int k = 0; k < 16; ++k) {
    fits[k] = fit_affine(x + 16 * k, 16, 3, true);
    top_scale = std::max(top_scale, fits[k].scale);
    top_min = std::max(top_min, -fits[k].min);
  }
  const float d = store_half(top_scale / 15.0f, b + 80), dmin = store_half(top_min / 15.0f, b + 82);
  const float to_scale = inverse(d), to_min = inverse(dmin);
  std::memset(b + 16, 0, 64);
  for (int k = 0; k < 16; ++k) {
    const int sc = nearest(fits[k].scale * to_scale, 0, 15), mn = nearest(-fits[k].min * to_min, 0, 15);
    b[k] = static_cast<uint8_t>(sc | mn << 4);
    const float to_code = inverse(d * static_cast<float>(sc)), min = dmin * static_cast<float>(mn);
    uint8_t* quants = b + 16 + 32 * (k / 8) + 16 * (k & 1);
    const int shift = 2 * (k % 8 / 2);
    for (int l = 0; l < 16; ++l) {
      const int q = nearest((x[16 * k + l] + min) * to_code, 0, 3);
      quants[l] = static_cast<uint8_t>(quants[l] | q << shift);
    }
  }
}

void encode_q3_k(const float* x, uint8_t* b) {
  float scales[16];
  for (int k = 0; k < 16; ++k) scales[k] = fit_symmetric(x + 16 * k, 16, 4);
  const float d = store_half(signed_max(scales, 16) / -32.0f, b + 108), to_scale = inverse(d);
  std::memset(b, 0, 108);
  for (int k = 0; k < 16; ++k) {
    const int n = k / 8, j = k % 8 / 2;
    const int scale = nearest(scales[k] * to_scale, -32, 31), stored = scale + 32;
    b[96 + k % 8] = static_cast<uint8_t>(b[96 + k % 8] | (stored & 15) << (4 * n));
    b[104 + k % 4] = static_cast<uint8_t>(b[104 + k % 4] | stored >> 4 << (2 * (k / 4)));
    const float to_code = inverse(d * static_cast<float>(scale));
    uint8_t* quants = b + 32 + 32 * n + 16 * (k & 1);
    uint8_t* mask = b + 16 * (k & 1);
    for (int l = 0; l < 16; ++l) {
      const int q = nearest(x[16 * k + l] * to_code, -4, 3) + 4;
      quants[l] = static_cast<uint8_t>(quants[l] | (q & 3) << (2 * j));
      mask[l] = static_cast<uint8_t>(mask[l] | q >> 2 << (4 * n + j));
    }
  }
}

// Q4_K and Q5_K share all but the number of bits: halves d and dmin, then 12 bytes of 6-bit pairs. Writes
// those 16 bytes at b and the 256 codes 0..top at q.
void encode_pairs(const float* x, int top, uint8_t* b, uint8_t* q) {
  Affine fits[8];
  float top_scale = 0, top_min = 0;
  for (int s = 0; s < 8; ++s) {
    fits[s] = fit_affine(x + 32 * s, 32, top, true);
    top_scale = std::max(top_scale, fits[s].scale);
    top_min = std::max(top_min, -fits[s].min);
  }
  const float d = store_half(top_scale / 63.0f, b), dmin = store_half(top_min / 63.0f, b + 2);
  const float to_scale = inverse(d), to_min = inverse(dmin);
  uint8_t* packed = b + 4;
  for (int s = 0; s < 8; ++s) {
    const int sc = nearest(fits[s].scale * to_scale, 0, 63), mn = nearest(-fits[s].min * to_min, 0, 63);
    if (s < 4) {
      packed[s] = static_cast<uint8_t>(sc);
      packed[s + 4] = static_cast<uint8_t>(mn);
    } else {
      packed[s + 4] = static_cast<uint8_t>((sc & 15) | (mn & 15) << 4);
      packed[s - 4] = static_cast<uint8_t>(packed[s - 4] | sc >> 4 << 6);
      packed[s] = static_cast<uint8_t>(packed[s] | mn >> 4 << 6);
    }
    const float to_code = inverse(d * static_cast<float>(sc)), min = dmin * static_cast<float>(mn);
    for (int l = 32 * s; l < 32 * s + 32; ++l)
      q[l] = static_cast<uint8_t>(nearest((x[l] + min) * to_code, 0, top));
  }
}

void encode_q4_k(const float* x, uint8_t* b) {
  uint8_t q[256];
  encode_pairs(x, 15, b, q);
  for (int pair = 0; pair < 4; ++pair)
    for (int l = 0; l < 32; ++l)
      b[16 + 32 * pair + l] = static_cast<uint8_t>(q[64 * pair + l] | q[64 * pair + 32 + l] << 4);
}

void encode_q5_k(const float* x, uint8_t* b) {
  uint8_t q[256];
  encode_pairs(x, 31, b, q);
  std::memset(b + 16, 0, 32);
  for (int pair = 0; pair < 4; ++pair) {
    for (int l = 0; l < 32; ++l) {
      const int low = q[64 * pair + l], high = q[64 * pair + 32 + l];
      b[16 + l] = static_cast<uint8_t>(b[16 + l] | (low >> 4) << (2 * pair) | (high >> 4) << (2 * pair + 1));
      b[48 + 32 * pair + l] = static_cast<uint8_t>((low & 15) | (high & 15) << 4);
    }
  }
}

void encode_q6_k(const float* x, uint8_t* b) {
  float scales[16];
  for (int k = 0; k < 16; ++k) scales[k] = fit_symmetric(x + 16 * k, 16, 32);
  const float d = store_half(signed_max(scales, 16) / -128.0f, b + 208), to_scale = inverse(d);
  std::memset(b, 0, 192);
  for (int k = 0; k < 16; ++k) {
    const int n = k / 8, j = k % 8 / 2, half = 16 * (k & 1);
    const int scale = nearest(scales[k] * to_scale, -128, 127);
    b[192 + k] = static_cast<uint8_t>(scale);
    const float to_code = inverse(d * static_cast<float>(scale));
    uint8_t* low = b + 64 * n + 32 * (j & 1) + half;
    uint8_t* high = b + 128 + 32 * n + half;
    for (int l = 0; l < 16; ++l) {
      const int q = nearest(x[16 * k + l] * to_code, -32, 31) + 32;
      low[l] = static_cast<uint8_t>(low[l] | (q & 15) << (4 * (j / 2)));
      high[l] = static_cast<uint8_t>(high[l] | q >> 4 << (2 * j));
    }
  }
}

template <int kElements, int kBytes, void (*kEncode)(const float*, uint8_t*)>
void encode_row(const float* x, int64_t n, uint8_t* b) {
  for (int64_t i = 0; i < n; i += kElements, b += kBytes) kEncode(x + i, b);
}

template <uint16_t (*kConvert)(float) noexcept>
void convert_row(const float* x, int64_t n, uint8_t* b) {
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t bits = kConvert(x[i]);
    std::memcpy(b + 2 * i, &bits, sizeof(bits));
  }
}

}  // namespace

void quantize_row(DType dtype, const float* x, int64_t n, std::byte* blocks) noexcept {
  auto* b = reinterpret_cast<uint8_t*>(blocks);
  switch (dtype) {
    case DType::F32:
      if (n > 0) std::memcpy(b, x, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::F16:
      return convert_row<f32_to_f16>(x, n, b);
    case DType::BF16:
      return convert_row<f32_to_bf16>(x, n, b);
    case DType::Q4_0:
      return encode_row<32, 18, encode_q4_0>(x, n, b);
    case DType::Q4_1:
      return encode_row<32, 20, encode_q4_1>(x, n, b);
    case DType::Q5_0:
      return encode_row<32, 22, encode_q5_0>(x, n, b);
    case DType::Q5_1:
      return encode_row<32, 24, encode_q5_1>(x, n, b);
    case DType::Q8_0:
      return encode_row<32, 34, encode_q8_0>(x, n, b);
    case DType::Q2_K:
      return encode_row<256, 84, encode_q2_k>(x, n, b);
    case DType::Q3_K:
      return encode_row<256, 110, encode_q3_k>(x, n, b);
    case DType::Q4_K:
      return encode_row<256, 144, encode_q4_k>(x, n, b);
    case DType::Q5_K:
      return encode_row<256, 176, encode_q5_k>(x, n, b);
    case DType::Q6_K:
      return encode_row<256, 210, encode_q6_k>(x, n, b);
    case DType::IQ4_NL:
      return encode_row<32, 18, encode_iq4_nl>(x, n, b);
    case DType::IQ4_XS:
      return encode_row<256, 136, encode_iq4_xs>(x, n, b);
    case DType::MXFP4:
      return encode_row<32, 17, encode_mxfp4>(x, n, b);
    case DType::I8:
    case DType::I16:
    case DType::I32:
    case DType::I64:
    case DType::F64:
      break;
  }
  check_failed(__FILE__, __LINE__, "dtype", "quantize_row to a type that is no weight type");
}

}  // namespace thermo
