// Eight floats in an AVX2 register (with FMA and F16C). The names and the reason for the anonymous namespace
// are those of simd_avx512.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace thermo {
namespace {

struct Vf {
  static constexpr int kWidth = 8;
  __m256 v;
};
constexpr int kGemmVecs = 2;  // 12 accumulators of 16 registers
constexpr int kGemmRows = 6;

inline Vf operator+(Vf a, Vf b) {
  return {_mm256_add_ps(a.v, b.v)};
}
inline Vf operator-(Vf a, Vf b) {
  return {_mm256_sub_ps(a.v, b.v)};
}
inline Vf operator*(Vf a, Vf b) {
  return {_mm256_mul_ps(a.v, b.v)};
}
inline Vf operator/(Vf a, Vf b) {
  return {_mm256_div_ps(a.v, b.v)};
}
inline Vf vfma(Vf a, Vf b, Vf c) {
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
inline Vf vmax(Vf a, Vf b) {
  return {_mm256_max_ps(a.v, b.v)};
}
inline Vf vmin(Vf a, Vf b) {
  return {_mm256_min_ps(a.v, b.v)};
}

inline Vf vzero() {
  return {_mm256_setzero_ps()};
}
inline Vf vset1(float x) {
  return {_mm256_set1_ps(x)};
}
inline Vf vload(const float* p) {
  return {_mm256_loadu_ps(p)};
}
inline void vstore(float* p, Vf a) {
  _mm256_storeu_ps(p, a.v);
}
inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vf vload_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n))};
}
inline void vstore_n(float* p, Vf a, int n) {
  _mm256_maskstore_ps(p, first_lanes(n), a.v);
}

inline Vf vload_f16(const void* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
inline void vstore_f16(void* p, Vf a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Vf vload_bf16(const void* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
template <int kShift>
inline Vf vload_u4(const void* p) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(wide, kShift), _mm256_set1_epi32(15)))};
}
inline Vf vload_i8(const void* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))))};
}
inline void vstore_i8(void* p, Vf a) {
  const __m256i i = _mm256_cvtps_epi32(a.v);
  const __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packs_epi16(w, w));
}
inline float f16_value(uint16_t bits) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
inline uint16_t f16_bits(float x) {
  return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
}

inline float vsum(Vf a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float vmax_lanes(Vf a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vf vabs(Vf a) {
  return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)};
}
inline Vf vround(Vf a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vf vscale2(Vf a, Vf n) {
  const __m256i exponent =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
  return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent))};
}
inline Vf vkeep_from(Vf x, Vf limit, Vf a) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}

template <bool kFirst>
inline void vadd_on_grid(double* sum, Vf term, double magic) {
  const __m256d m = _mm256_set1_pd(magic);
  const auto add = [&](double* at, __m128 x) {
    const __m256d on_grid = _mm256_sub_pd(_mm256_add_pd(_mm256_cvtps_pd(x), m), m);
    _mm256_storeu_pd(at, kFirst ? on_grid : _mm256_add_pd(_mm256_loadu_pd(at), on_grid));
  };
  add(sum, _mm256_castps256_ps128(term.v));
  add(sum + 4, _mm256_extractf128_ps(term.v, 1));
}
inline Vf vload_sum(const double* sum) {
  return {_mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(_mm256_loadu_pd(sum))),
                               _mm256_cvtpd_ps(_mm256_loadu_pd(sum + 4)), 1)};
}

inline Vf vsum_four(const Vf (&a)[4]) {
  return {_mm256_hadd_ps(_mm256_hadd_ps(a[0].v, a[1].v), _mm256_hadd_ps(a[2].v, a[3].v))};
}
inline Vf vsum_fours(const Vf (&a)[2]) {
  return {_mm256_add_ps(_mm256_permute2f128_ps(a[0].v, a[1].v, 0x20),
                        _mm256_permute2f128_ps(a[0].v, a[1].v, 0x31))};
}
constexpr int kLaneSumOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};

inline void transpose_square(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(in + i * in_stride);
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int k = 0; k < 4; ++k) {
    _mm256_storeu_ps(out + k * out_stride, _mm256_permute2f128_ps(r[k], r[4 + k], 0x20));
    _mm256_storeu_ps(out + (4 + k) * out_stride, _mm256_permute2f128_ps(r[k], r[4 + k], 0x31));
  }
}

inline void vload_stride4(const float* p, Vf (&out)[4]) {
  __m256 r[4];
  for (int i = 0; i < 4; ++i)
    r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 4 * i)), _mm_loadu_ps(p + 16 + 4 * i),
                                1);
  const __m256 a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
  const __m256 c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
  out[0].v = _mm256_shuffle_ps(a, c, 0x44);
  out[1].v = _mm256_shuffle_ps(a, c, 0xee);
  out[2].v = _mm256_shuffle_ps(b, d, 0x44);
  out[3].v = _mm256_shuffle_ps(b, d, 0xee);
}

}  // namespace
}  // namespace thermo
