// Codes and small scales of panels in 32-byte vectors, 8 rows at a time: what the AVX2 and the AVX-VNNI files
// multiply with. Anonymous namespace: see simd_avx512.h.
//
// The two differ in kVnni. AVX2 multiplies and adds in 16-bit pairs, where only so many products fit, and
// widens the pairs while it multiplies them with the small scale. VPDPBUSD adds four products to 32 bits at
// once. Its codes are always unsigned; those of formats with an offset start their sum at -offset * (sum of
// the activation codes). The sum of a group has at most 24 bits. VPSHUFB cuts it into its low byte and the
// rest, and one VPDPWSSD multiplies the two with scale and 256 * scale: 16-bit numbers, and exact.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "kernels/quant_matmul/panel_layout.h"
#include "kernels/quant_matmul/quant_matmul_impl.h"

namespace thermo {
namespace {

// VEX where there is AVX-VNNI; the AVX-512 encoding lets the same code be tested where there is not.
#if defined(__AVXVNNI__)
#define THERMO_VNNI(name) _mm256_##name##_avx_epi32
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define THERMO_VNNI(name) _mm256_##name##_epi32
#endif
#if defined(THERMO_VNNI)
inline constexpr bool kVnni = true;
#else
inline constexpr bool kVnni = false;
#endif

#define THERMO_INLINE [[gnu::always_inline]] inline
#define THERMO_LAMBDA __attribute__((always_inline))

template <class F, int... I>
THERMO_INLINE void unroll_sequence(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
THERMO_INLINE void unroll(F&& f) {
  unroll_sequence(f, std::make_integer_sequence<int, N>{});
}

// A loop that disappears, where the compiler need not know the number.
#define THERMO_EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); ++i)

THERMO_INLINE __m256i load(const void* p) {
  return _mm256_load_si256(static_cast<const __m256i*>(p));
}
THERMO_INLINE __m256i bytes(int b) {
  return _mm256_set1_epi8(static_cast<char>(b));
}
THERMO_INLINE __m256i broadcast32(const void* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof(v));
  return _mm256_set1_epi32(v);
}
template <int N>
THERMO_INLINE __m256i shift(__m256i v) {
  if constexpr (N > 0)
    return _mm256_slli_epi16(v, N);
  else if constexpr (N < 0)
    return _mm256_srli_epi16(v, -N);
  else
    return v;
}
THERMO_INLINE void store(void* p, __m256i v) {
  _mm256_store_si256(static_cast<__m256i*>(p), v);
}
// sum + a.b of four unsigned and four signed bytes, in every 32-bit lane
THERMO_INLINE __m256i dot_bytes(__m256i sum, __m256i a, __m256i b) {
#if defined(THERMO_VNNI)
  return THERMO_VNNI(dpbusd)(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}
// sum + a.b of two 16-bit numbers, in every 32-bit lane
THERMO_INLINE __m256i dot_words(__m256i sum, __m256i a, __m256i b) {
#if defined(THERMO_VNNI)
  return THERMO_VNNI(dpwssd)(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}
THERMO_INLINE __m256 half8(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}

// ---- codes ----

template <DType T>
constexpr bool kSignedCodes =
    !kVnni && (kPanelFormat<T>.bits == 8 || kPanelFormat<T>.table == CodeTable::Iq4);

// How many VPMADDUBSW results fit into 16 bits.
template <DType T>
constexpr int kChain = kPanelFormat<T>.table == CodeTable::Mxfp4 || kPanelFormat<T>.bits == 5 ? 4
                       : kPanelFormat<T>.bits == 6                                            ? 2
                                                                                              : 8;

// VPDPBUSD starts at -2^kBiasLog2 * (sum of the activation codes); -1: at zero.
template <DType T>
constexpr int kBiasLog2 = kVnni ? kPanelFormat<T>.offset_log2 : -1;

// The sum of a group fits into 16 bits as it is: Q2_K, Q3_K.
template <DType T>
constexpr bool kShortSums = kVnni&& kPanelFormat<T>.group_cols * 127 *
                                (kBiasLog2<T> >= 0 ? 1 << kBiasLog2<T> : (1 << kPanelFormat<T>.bits) - 1) <
                            32768;

// The low byte of each lane of 32 bits, and its other bytes, as two 16-bit numbers.
struct alignas(32) SplitPlaces {
  int8_t byte[32];
  consteval SplitPlaces() : byte{} {
    for (int i = 0; i < 32; ++i)
      byte[i] = static_cast<int8_t>(i % 4 == 0 ? i % 16 : i % 4 == 1 ? -128 : i % 16 - 1);
  }
};
inline constexpr SplitPlaces kSplitPlaces;

template <DType T>
struct alignas(32) CodeBytes {
  int8_t byte[32];
  consteval CodeBytes() : byte{} {
    for (int i = 0; i < 32; ++i)
      byte[i] = static_cast<int8_t>(kPanelFormat<T>.table == CodeTable::Iq4
                                        ? kIq4Values[i % 16] + (kSignedCodes<T> ? 0 : 128)
                                        : kMxfp4Values[i % 16] + 16);
  }
};
template <DType T>
constexpr CodeBytes<T> kCodeBytes;

// Code vector V_G of a sub-block for 8 rows; `sub` points at the lower or upper half of its first vector.
// Signed codes are values, unsigned ones have the offset in them. One at a time: eight would not fit into the
// 16 registers next to the sums.
template <DType T, int G>
THERMO_INLINE __m256i code_vector(const uint8_t* sub) {
  constexpr PanelFormat f = kPanelFormat<T>;
  // Bits From.. of vector I, moved to bit To and masked.
  const auto bits = [&]<int I, int From, int Count, int To>() THERMO_LAMBDA {
    return _mm256_and_si256(shift<To - From>(load(sub + 64 * I)), bytes(((1 << Count) - 1) << To));
  };
  const auto either = [](__m256i a, __m256i b) THERMO_LAMBDA { return _mm256_or_si256(a, b); };
  if constexpr (f.bits == 8) {
    const __m256i v = load(sub + 64 * G);
    return kSignedCodes<T> ? _mm256_xor_si256(v, bytes(0x80)) : v;
  } else if constexpr (f.bits == 4) {
    const __m256i v = bits.template operator() < G % 4, G < 4 ? 0 : 4, 4, 0 > ();
    return f.table == CodeTable::None ? v : _mm256_shuffle_epi8(load(kCodeBytes<T>.byte), v);
  } else if constexpr (f.bits == 2) {
    return bits.template operator()<G / 4, 2 * (G % 4), 2, 0>();
  } else if constexpr (f.bits == 6) {
    constexpr int h = 3 * (G / 4);
    if constexpr (G % 4 < 3) {
      return bits.template operator()<h + G % 4, 0, 6, 0>();
    } else {
      return either(
          bits.template operator()<h, 6, 2, 0>(),
          either(bits.template operator()<h + 1, 6, 2, 2>(), bits.template operator()<h + 2, 6, 2, 4>()));
    }
  } else if constexpr (f.bits == 5) {
    if constexpr (G < 5) {
      return bits.template operator()<G, 0, 5, 0>();
    } else if constexpr (G < 7) {
      constexpr int i = 2 * (G - 5);
      return either(bits.template operator()<i, 5, 3, 0>(), bits.template operator()<i + 1, 6, 2, 3>());
    } else {
      return either(bits.template operator()<4, 5, 3, 0>(),
                    either(bits.template operator()<1, 5, 1, 3>(), bits.template operator()<3, 5, 1, 4>()));
    }
  } else {
    static_assert(f.bits == 3);
    if constexpr (G < 6)
      return bits.template operator()<G / 2, 3 * (G % 2), 3, 0>();
    else
      return either(bits.template operator()<G - 6, 6, 2, 0>(), bits.template operator()<2, G, 1, 2>());
  }
}

// ---- small scales of 256-column blocks, 8 rows ----

THERMO_INLINE void unpack_six(const uint8_t* p, __m256i t[4]) {
  const __m256i v0 = load(p), v1 = load(p + 64), v2 = load(p + 128);
  t[0] = _mm256_and_si256(v0, bytes(63));
  t[1] = _mm256_and_si256(v1, bytes(63));
  t[2] = _mm256_and_si256(v2, bytes(63));
  t[3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(v0, 6), bytes(3)),
                         _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(v1, 4), bytes(12)),
                                         _mm256_and_si256(_mm256_srli_epi16(v2, 2), bytes(48))));
}

// VPSHUFB's places of one byte of every row, in the low or the high byte of both 16-bit halves of a lane; -1
// gives zero.
struct alignas(32) ScalePlaces {
  int8_t byte[32];
  consteval ScalePlaces(int low, int high, int low_of_second, int high_of_second) : byte{} {
    const int places[4] = {low, high, low_of_second, high_of_second};
    for (int i = 0; i < 32; ++i)
      byte[i] = static_cast<int8_t>(places[i % 4] < 0 ? -128 : places[i % 4] + i % 16 / 4 * 4);
  }
};

// The sums of activation codes that meet a type's small scales.
template <DType T>
THERMO_INLINE const int16_t* act_sums(const ActMeta256& meta) {
  return kPanelFormat<T>.group_cols == 16 ? meta.sum16 : meta.sum32;
}

// Where the sums of a block's groups start: -2^kBiasLog2 * (sum of the activation codes).
template <DType T>
struct alignas(32) Starts {
  static constexpr int kGroupCols = kPanelFormat<T>.group_cols;
  static_assert(kBiasLog2<T> < 0 || kGroupCols == 32 || kBiasLog2<T> <= 5);
  // Q6_K finds them ready.
  static constexpr bool kReady = kGroupCols == 16 && kBiasLog2<T> == 5;
  int32_t value[kBiasLog2<T> < 0 || kReady ? 1 : 256 / kGroupCols];

  THERMO_INLINE const int32_t* prepare(const ActMeta256& meta) {
    if constexpr (kReady) {
      return meta.start32;
    } else if constexpr (kBiasLog2<T> >= 0 && kGroupCols == 16) {
      unroll<2>([&](auto i) THERMO_LAMBDA {
        store(value + 8 * i, _mm256_srai_epi32(load(meta.start32 + 8 * i), 5 - kBiasLog2<T>));
      });
    } else if constexpr (kBiasLog2<T> >= 0) {
      const __m256i sums = _mm256_permutevar8x32_epi32(
          _mm256_cvtepi16_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(meta.sum32))),
          _mm256_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7));
      store(value, _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(sums, kBiasLog2<T>)));
    }
    return value;
  }
};

template <DType T>
struct Scales256 {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr bool kUnsigned = f.scales == ScaleKind::SixMin || f.scales == ScaleKind::Nibble;
  // Scales too multiply the sums of activations, with this factor, to take the offset of the codes off.
  static constexpr int kFactor =
      !kVnni && !kPanelFormat<T>.has_min() && !kSignedCodes<T> ? -(1 << f.offset_log2) : 0;
  static constexpr int kSumVectors = f.group_cols == 16 ? 4 : 2;
  __m256i t[4];
  __m256i mins[4];

  THERMO_INLINE void read(const uint8_t* header, const uint8_t* body, int half) {
    const uint8_t* p = body + 32 * half;
    if constexpr (f.scales == ScaleKind::SixMin) {
      unpack_six(p, t);
      mins[0] = t[2];
      mins[1] = t[3];
    } else if constexpr (f.scales == ScaleKind::Nibble) {
      unroll<4>([&](auto j) THERMO_LAMBDA {
        const __m256i v = load(p + 64 * j);
        t[j] = _mm256_and_si256(v, bytes(15));
        mins[j] = _mm256_and_si256(_mm256_srli_epi16(v, 4), bytes(15));
      });
    } else if constexpr (f.scales == ScaleKind::SixSigned) {
      unpack_six(p, t);
      unroll<4>([&](auto j) THERMO_LAMBDA { t[j] = _mm256_sub_epi8(t[j], bytes(32)); });
    } else if constexpr (f.scales == ScaleKind::Byte) {
      unroll<4>([&](auto j) THERMO_LAMBDA { t[j] = load(p + 64 * j); });
    } else {
      const __m256i low = load(p);
      const __m256i top = _mm256_srl_epi16(load(header + 32), _mm_cvtsi32_si128(2 * half));
      t[0] = _mm256_or_si256(_mm256_and_si256(low, bytes(15)),
                             _mm256_and_si256(_mm256_slli_epi16(top, 4), bytes(48)));
      t[1] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low, 4), bytes(15)),
                             _mm256_and_si256(top, bytes(48)));
      unroll<2>([&](auto j) THERMO_LAMBDA { t[j] = _mm256_sub_epi8(t[j], bytes(32)); });
    }
  }

  // The scale of a group as its sums need it: in both 16-bit halves of a row's lane. With VPDPBUSD the upper
  // one is 256 times the lower one, or zero where the sums are short.
  template <int Group>
  THERMO_INLINE __m256i scale() const {
    constexpr int i = Group % 4;
    static constexpr ScalePlaces low(i, -1, kVnni ? -1 : i, kVnni && !kShortSums<T> ? i : -1);
    static constexpr ScalePlaces high(-1, i, -1, kShortSums<T> ? -1 : i);
    if constexpr (kUnsigned) return _mm256_shuffle_epi8(t[Group / 4], load(low.byte));
    const __m256i upper = _mm256_shuffle_epi8(t[Group / 4], load(high.byte));
    const __m256i both = _mm256_srai_epi16(upper, 8);
    return kVnni && !kShortSums<T> ? _mm256_blend_epi16(both, upper, 0xaa) : both;
  }

  // The bytes of mins[j] or t[j] as 16-bit numbers: groups 0 2 and groups 1 3 of a row.
  template <bool kMins>
  THERMO_INLINE void pairs(int j, __m256i& even, __m256i& odd) const {
    const __m256i v = kMins ? mins[j] : t[j];
    if constexpr (kMins || kUnsigned) {
      even = _mm256_and_si256(v, _mm256_set1_epi32(0x00ff00ff));
      odd = _mm256_srli_epi16(v, 8);
    } else {
      even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8);
      odd = _mm256_srai_epi16(v, 8);
    }
  }

  // sum over groups of (min or scale) * (sum of the activation codes)
  template <bool kMins>
  THERMO_INLINE __m256i sum_dot(const ActMeta256& meta) const {
    const int16_t* sums = act_sums<T>(meta);
    __m256i result = _mm256_setzero_si256();
    unroll<kSumVectors>([&](auto j) THERMO_LAMBDA {
      __m256i even, odd;
      pairs<kMins>(j, even, odd);
      result = dot_words(result, even, broadcast32(sums + 4 * j));
      result = dot_words(result, odd, broadcast32(sums + 4 * j + 2));
    });
    return result;
  }
};

}  // namespace
}  // namespace thermo
