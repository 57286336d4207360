// Sixteen floats in an AVX-512 register. The three simd_*.h define the same
// names; a thin xxx_<isa>.cpp includes one of them and then the generic xxx_impl.h, which is written once.
//
// Everything is in an anonymous namespace. That is what keeps the paths apart: an inline function with
// external linkage would be merged by the linker across files compiled for different instruction sets, and
// the portable path could end up running the AVX-512 copy.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace thermo {
namespace {

struct Vf {
  static constexpr int kWidth = 16;
  __m512 v;
};
constexpr int kGemmVecs =
    4;  // register tile of gemm_impl.h: kGemmRows x kGemmVecs accumulators of 32 registers
constexpr int kGemmRows = 6;

inline Vf operator+(Vf a, Vf b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline Vf operator-(Vf a, Vf b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline Vf operator*(Vf a, Vf b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline Vf operator/(Vf a, Vf b) {
  return {_mm512_div_ps(a.v, b.v)};
}
// a * b + c
inline Vf vfma(Vf a, Vf b, Vf c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
// The second operand where either is NaN.
inline Vf vmax(Vf a, Vf b) {
  return {_mm512_max_ps(a.v, b.v)};
}
inline Vf vmin(Vf a, Vf b) {
  return {_mm512_min_ps(a.v, b.v)};
}

inline Vf vzero() {
  return {_mm512_setzero_ps()};
}
inline Vf vset1(float x) {
  return {_mm512_set1_ps(x)};
}
inline Vf vload(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline void vstore(float* p, Vf a) {
  _mm512_storeu_ps(p, a.v);
}
inline __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>((1u << n) - 1u);
}
// The first n < kWidth lanes; the others read as zero and are not written.
inline Vf vload_n(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
inline void vstore_n(float* p, Vf a, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), a.v);
}

inline Vf vload_f16(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
inline void vstore_f16(void* p, Vf a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vf vload_bf16(const void* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// The low (kShift 0) or high (4) halves of kWidth bytes.
template <int kShift>
inline Vf vload_u4(const void* p) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return {_mm512_cvtepi32_ps(_mm512_and_epi32(_mm512_srli_epi32(wide, kShift), _mm512_set1_epi32(15)))};
}
inline Vf vload_i8(const void* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))))};
}
// Rounds to nearest even; the values are within int8.
inline void vstore_i8(void* p, Vf a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
inline float f16_value(uint16_t bits) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
inline uint16_t f16_bits(float x) {
  return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
}

inline float vsum(Vf a) {
  return _mm512_reduce_add_ps(a.v);
}
inline float vmax_lanes(Vf a) {
  return _mm512_reduce_max_ps(a.v);
}
inline Vf vabs(Vf a) {
  return {_mm512_abs_ps(a.v)};
}
inline Vf vround(Vf a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for whole n in [-126, 127].
inline Vf vscale2(Vf a, Vf n) {
  return {_mm512_scalef_ps(a.v, n.v)};
}
// a where x >= limit (and where x is NaN), 0 elsewhere.
inline Vf vkeep_from(Vf x, Vf limit, Vf a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}

// sum[i] += term[i], put on the grid of `magic` (sum_grid.h) first. kFirst: sum[i] = term[i].
template <bool kFirst>
inline void vadd_on_grid(double* sum, Vf term, double magic) {
  const __m512d m = _mm512_set1_pd(magic);
  const auto add = [&](double* at, __m256 x) {
    const __m512d on_grid = _mm512_sub_pd(_mm512_add_pd(_mm512_cvtps_pd(x), m), m);
    _mm512_storeu_pd(at, kFirst ? on_grid : _mm512_add_pd(_mm512_loadu_pd(at), on_grid));
  };
  add(sum, _mm512_castps512_ps256(term.v));
  add(sum + 8, _mm512_extractf32x8_ps(term.v, 1));
}
inline Vf vload_sum(const double* sum) {
  return {_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(_mm512_loadu_pd(sum))),
                             _mm512_cvtpd_ps(_mm512_loadu_pd(sum + 8)), 1)};
}

// Sums across lanes, in two steps so that a loop over groups of four need not keep kWidth registers. Each
// adds neighbours and halves the number of registers: 32-bit, 64-bit, then 128-bit lanes.
//
// Four partial sums in each 128 bits: lane 4 q + r holds the sum over quarter q of a[r].
inline Vf vsum_four(const Vf (&a)[4]) {
  __m512d t[2];
  for (int i = 0; i < 2; ++i)
    t[i] = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a[2 * i].v, a[2 * i + 1].v),
                                          _mm512_unpackhi_ps(a[2 * i].v, a[2 * i + 1].v)));
  return {_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(t[0], t[1])),
                        _mm512_castpd_ps(_mm512_unpackhi_pd(t[0], t[1])))};
}
// Lane i of the result is the sum of the lanes of row i, from vsum_four of rows 0..3, 4..7, ...
inline Vf vsum_fours(const Vf (&a)[4]) {
  __m512 t[2];
  for (int i = 0; i < 2; ++i)
    t[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i].v, a[2 * i + 1].v, 0x88),
                         _mm512_shuffle_f32x4(a[2 * i].v, a[2 * i + 1].v, 0xdd));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(t[0], t[1], 0x88), _mm512_shuffle_f32x4(t[0], t[1], 0xdd))};
}
// The sum of lanes is the balanced tree over neighbours of this order. Who sums with lanes for something else
// and wants the same bits follows it.
constexpr int kLaneSumOrder[16] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};

// out[c * out_stride + r] = in[r * in_stride + c] for a square of kWidth.
inline void transpose_square(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  __m512 r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(in + i * in_stride);
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
    const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  // r[4 i + k]: 128-bit lane q holds rows 4 i .. 4 i + 3 of column 4 q + k.
  for (int k = 0; k < 4; ++k) {
    const __m512 a = _mm512_shuffle_f32x4(r[k], r[4 + k], 0x88),
                 b = _mm512_shuffle_f32x4(r[8 + k], r[12 + k], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(r[k], r[4 + k], 0xdd),
                 d = _mm512_shuffle_f32x4(r[8 + k], r[12 + k], 0xdd);
    _mm512_storeu_ps(out + k * out_stride, _mm512_shuffle_f32x4(a, b, 0x88));
    _mm512_storeu_ps(out + (4 + k) * out_stride, _mm512_shuffle_f32x4(c, d, 0x88));
    _mm512_storeu_ps(out + (8 + k) * out_stride, _mm512_shuffle_f32x4(a, b, 0xdd));
    _mm512_storeu_ps(out + (12 + k) * out_stride, _mm512_shuffle_f32x4(c, d, 0xdd));
  }
}

// out[t] = p[4 * lane + t]
inline void vload_stride4(const float* p, Vf (&out)[4]) {
  const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
  const __m512 c = _mm512_loadu_ps(p + 32), d = _mm512_loadu_ps(p + 48);
  const __m512i i01 = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i i23 = _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
  const __m512 ab01 = _mm512_permutex2var_ps(a, i01, b), cd01 = _mm512_permutex2var_ps(c, i01, d);
  const __m512 ab23 = _mm512_permutex2var_ps(a, i23, b), cd23 = _mm512_permutex2var_ps(c, i23, d);
  out[0].v = _mm512_shuffle_f32x4(ab01, cd01, 0x44);
  out[1].v = _mm512_shuffle_f32x4(ab01, cd01, 0xee);
  out[2].v = _mm512_shuffle_f32x4(ab23, cd23, 0x44);
  out[3].v = _mm512_shuffle_f32x4(ab23, cd23, 0xee);
}

}  // namespace
}  // namespace thermo
