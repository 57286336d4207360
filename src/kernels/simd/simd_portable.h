// Four floats through the compiler's generic vectors: SSE2 or NEON registers, whatever the base target has.
// The names and the reason for the anonymous namespace are those of simd_avx512.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace thermo {
namespace {

typedef float V4f __attribute__((vector_size(16)));
typedef int32_t V4i __attribute__((vector_size(16)));

struct Vf {
  static constexpr int kWidth = 4;
  V4f v;
};
constexpr int kGemmVecs = 2;
constexpr int kGemmRows = 6;

inline Vf operator+(Vf a, Vf b) {
  return {a.v + b.v};
}
inline Vf operator-(Vf a, Vf b) {
  return {a.v - b.v};
}
inline Vf operator*(Vf a, Vf b) {
  return {a.v * b.v};
}
inline Vf operator/(Vf a, Vf b) {
  return {a.v / b.v};
}
inline Vf vfma(Vf a, Vf b, Vf c) {
  return {a.v * b.v + c.v};
}
inline V4f choose(V4i mask, V4f a, V4f b) {
  return reinterpret_cast<V4f>((mask & reinterpret_cast<V4i>(a)) | (~mask & reinterpret_cast<V4i>(b)));
}
inline Vf vmax(Vf a, Vf b) {
  return {choose(a.v > b.v, a.v, b.v)};
}
inline Vf vmin(Vf a, Vf b) {
  return {choose(a.v < b.v, a.v, b.v)};
}

inline Vf vzero() {
  return {V4f{0, 0, 0, 0}};
}
inline Vf vset1(float x) {
  return {V4f{x, x, x, x}};
}
inline Vf vload(const float* p) {
  Vf a;
  std::memcpy(&a.v, p, sizeof(a.v));
  return a;
}
inline void vstore(float* p, Vf a) {
  std::memcpy(p, &a.v, sizeof(a.v));
}
inline Vf vload_n(const float* p, int n) {
  Vf a = vzero();
  for (int i = 0; i < n; ++i) a.v[i] = p[i];
  return a;
}
inline void vstore_n(float* p, Vf a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}

inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline float f16_value(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return bits_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));  // infinity, NaN
  // Exponent and mantissa moved in place are the value times 2^-112, subnormals included.
  return bits_float(sign | float_bits(bits_float(rest << 13) * 0x1p112f));
}
inline uint16_t f16_bits(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  uint32_t half;
  if (magnitude < 0x38800000u) {
    // Subnormal: the addition rounds to a multiple of 2^-24, and leaves it in the low bits.
    half = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}
inline Vf vload_f16(const void* p) {  // f16_value, four at a time
  typedef uint16_t V4h __attribute__((vector_size(8)));
  V4h h;
  std::memcpy(&h, p, sizeof(h));
  const V4i bits = __builtin_convertvector(h, V4i);
  const V4i rest = (bits & 0x7fff) << 13;
  const V4i value = reinterpret_cast<V4i>(reinterpret_cast<V4f>(rest) * 0x1p112f);
  return {reinterpret_cast<V4f>(value | ((rest >= 0x0f800000) & 0x7f800000) | ((bits & 0x8000) << 16))};
}
inline void vstore_f16(void* p, Vf a) {
  const uint16_t h[4] = {f16_bits(a.v[0]), f16_bits(a.v[1]), f16_bits(a.v[2]), f16_bits(a.v[3])};
  std::memcpy(p, h, sizeof(h));
}
inline Vf vload_bf16(const void* p) {
  uint16_t h[4];
  std::memcpy(h, p, sizeof(h));
  Vf a;
  for (int i = 0; i < 4; ++i) a.v[i] = bits_float(static_cast<uint32_t>(h[i]) << 16);
  return a;
}
template <int kShift>
inline Vf vload_u4(const void* p) {
  typedef uint8_t V4b __attribute__((vector_size(4)));
  V4b b;
  std::memcpy(&b, p, sizeof(b));
  return {__builtin_convertvector((__builtin_convertvector(b, V4i) >> kShift) & 15, V4f)};
}
inline Vf vload_i8(const void* p) {
  typedef int8_t V4b __attribute__((vector_size(4)));
  V4b b;
  std::memcpy(&b, p, sizeof(b));
  return {__builtin_convertvector(b, V4f)};
}

inline float vsum(Vf a) {
  return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]);
}
inline float vmax_lanes(Vf a) {
  const float lo = a.v[0] > a.v[1] ? a.v[0] : a.v[1];
  const float hi = a.v[2] > a.v[3] ? a.v[2] : a.v[3];
  return lo > hi ? lo : hi;
}
inline Vf vabs(Vf a) {
  return {reinterpret_cast<V4f>(reinterpret_cast<V4i>(a.v) &
                                V4i{0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff})};
}
// To nearest even, for |a| < 2^22 (adding 1.5 * 2^23 leaves no bits below one).
inline Vf vround(Vf a) {
  const Vf magic = vset1(0x1.8p23f);
  const Vf shifted = a + magic;
  return shifted - magic;
}
inline void vstore_i8(void* p, Vf a) {
  const Vf r = vround(a);
  int8_t b[4];
  for (int i = 0; i < 4; ++i) b[i] = static_cast<int8_t>(r.v[i]);
  std::memcpy(p, b, sizeof(b));
}
inline Vf vscale2(Vf a, Vf n) {
  const V4i exponent = (__builtin_convertvector(n.v, V4i) + 127) << 23;
  return {a.v * reinterpret_cast<V4f>(exponent)};
}
inline Vf vkeep_from(Vf x, Vf limit, Vf a) {
  return {reinterpret_cast<V4f>(~(x.v < limit.v) & reinterpret_cast<V4i>(a.v))};
}

template <bool kFirst>
inline void vadd_on_grid(double* sum, Vf term, double magic) {
  for (int i = 0; i < Vf::kWidth; ++i)
    sum[i] = (kFirst ? 0.0 : sum[i]) + ((static_cast<double>(term.v[i]) + magic) - magic);
}
inline Vf vload_sum(const double* sum) {
  Vf a;
  for (int i = 0; i < Vf::kWidth; ++i) a.v[i] = static_cast<float>(sum[i]);
  return a;
}

inline Vf vsum_four(const Vf (&a)[4]) {
  return {V4f{vsum(a[0]), vsum(a[1]), vsum(a[2]), vsum(a[3])}};
}
inline Vf vsum_fours(const Vf (&a)[1]) {
  return a[0];
}
constexpr int kLaneSumOrder[4] = {0, 1, 2, 3};

inline void transpose_square(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) out[c * out_stride + r] = in[r * in_stride + c];
}

inline void vload_stride4(const float* p, Vf (&out)[4]) {
  for (int t = 0; t < 4; ++t) out[t].v = V4f{p[t], p[4 + t], p[8 + t], p[12 + t]};
}

}  // namespace
}  // namespace thermo
