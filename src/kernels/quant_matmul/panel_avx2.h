// Codes and small scales of panels in 32-byte vectors, 8 rows at a time: what quant_matmul_avx2.cpp
// multiplies with. Anonymous namespace: see simd_avx512.h.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "kernels/quant_matmul/panel_layout.h"
#include "kernels/quant_matmul/quant_matmul_impl.h"

namespace thermo {
namespace {

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
THERMO_INLINE __m256 half8(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}

// ---- codes ----

template <DType T>
constexpr bool kSignedCodes = kPanelFormat<T>.bits == 8 || kPanelFormat<T>.table == CodeTable::Iq4;

// How many VPMADDUBSW results fit into 16 bits.
template <DType T>
constexpr int kChain = kPanelFormat<T>.table == CodeTable::Mxfp4 || kPanelFormat<T>.bits == 5 ? 4
                       : kPanelFormat<T>.bits == 6                                            ? 2
                                                                                              : 8;

template <DType T>
struct alignas(32) CodeBytes {
  int8_t byte[32];
  consteval CodeBytes() : byte{} {
    for (int i = 0; i < 32; ++i)
      byte[i] = static_cast<int8_t>(kPanelFormat<T>.table == CodeTable::Iq4 ? kIq4Values[i % 16]
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
    return _mm256_xor_si256(load(sub + 64 * G), bytes(0x80));
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

// sum[c] += (codes First..First+N-1 . activations of column c) * scale. `scale` has the scale in both 16-bit
// halves of a row's lane; `at` is the activation column of code vector 0.
template <DType T, int First, int N, int NC>
THERMO_INLINE void dot(__m256i* sum, const uint8_t* sub, const int8_t* const* codes, int at, __m256i scale) {
  if constexpr (kSignedCodes<T>) {
    unroll<N>([&](auto j) THERMO_LAMBDA {
      constexpr int g = First + j;
      const __m256i v = code_vector<T, g>(sub);
      const __m256i size = _mm256_abs_epi8(v);
      unroll<NC>([&](auto c) THERMO_LAMBDA {
        const __m256i pairs =
            _mm256_maddubs_epi16(size, _mm256_sign_epi8(broadcast32(codes[c] + at + 4 * g), v));
        sum[c] = _mm256_add_epi32(sum[c], _mm256_madd_epi16(pairs, scale));
        asm("" : "+x"(sum[c]));
      });
    });
  } else {
    constexpr int kLength = kChain<T> < N ? kChain<T> : N;
    unroll<N / kLength>([&](auto i) THERMO_LAMBDA {
      __m256i pairs[NC];
      unroll<kLength>([&](auto j) THERMO_LAMBDA {
        constexpr int g = First + kLength * i + j;
        const __m256i v = code_vector<T, g>(sub);
        unroll<NC>([&](auto c) THERMO_LAMBDA {
          const __m256i product = _mm256_maddubs_epi16(v, broadcast32(codes[c] + at + 4 * g));
          pairs[c] = j == 0 ? product : _mm256_add_epi16(pairs[c], product);
          // Here the sum is a register: else GCC turns the additions into a tree and spills its leaves.
          asm("" : "+x"(pairs[c]));
        });
      });
      unroll<NC>([&](auto c) THERMO_LAMBDA {
        sum[c] = _mm256_add_epi32(sum[c], _mm256_madd_epi16(pairs[c], scale));
      });
    });
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

template <DType T>
struct Scales256 {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr bool kUnsigned = f.scales == ScaleKind::SixMin || f.scales == ScaleKind::Nibble;
  // What multiplies the sums of activations: minima, or scales where the codes carry an offset.
  static constexpr bool kOffset = !f.has_min() && !kSignedCodes<T>;
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

  // The scale of a group in both 16-bit halves of a row's lane.
  template <int Group>
  THERMO_INLINE __m256i scale() const {
    constexpr int i = Group % 4;
    constexpr int low = kUnsigned ? i : 0x80, high = kUnsigned ? 0x80 : i;  // 0x80 gives zero
    constexpr int step = 4;
    const __m256i places = _mm256_setr_epi8(
        static_cast<char>(low), static_cast<char>(high), static_cast<char>(low), static_cast<char>(high),
        static_cast<char>(low + step), static_cast<char>(high + step), static_cast<char>(low + step),
        static_cast<char>(high + step), static_cast<char>(low + 2 * step), static_cast<char>(high + 2 * step),
        static_cast<char>(low + 2 * step), static_cast<char>(high + 2 * step),
        static_cast<char>(low + 3 * step), static_cast<char>(high + 3 * step),
        static_cast<char>(low + 3 * step), static_cast<char>(high + 3 * step), static_cast<char>(low),
        static_cast<char>(high), static_cast<char>(low), static_cast<char>(high),
        static_cast<char>(low + step), static_cast<char>(high + step), static_cast<char>(low + step),
        static_cast<char>(high + step), static_cast<char>(low + 2 * step), static_cast<char>(high + 2 * step),
        static_cast<char>(low + 2 * step), static_cast<char>(high + 2 * step),
        static_cast<char>(low + 3 * step), static_cast<char>(high + 3 * step),
        static_cast<char>(low + 3 * step), static_cast<char>(high + 3 * step));
    const __m256i words = _mm256_shuffle_epi8(t[Group / 4], places);
    return kUnsigned ? words : _mm256_srai_epi16(words, 8);
  }

  // sum over groups of (min or scale) * (sum of the activation codes)
  THERMO_INLINE __m256i sum_dot(const ActMeta256& meta) const {
    const int16_t* sums = f.group_cols == 16 ? meta.sum16 : meta.sum32;
    __m256i result = _mm256_setzero_si256();
    unroll<kSumVectors>([&](auto j) THERMO_LAMBDA {
      __m256i even, odd;
      if constexpr (kOffset) {
        even = _mm256_srai_epi16(_mm256_slli_epi16(t[j], 8), 8);
        odd = _mm256_srai_epi16(t[j], 8);
      } else {
        even = _mm256_and_si256(mins[j], _mm256_set1_epi32(0x00ff00ff));
        odd = _mm256_srli_epi16(mins[j], 8);
      }
      result = _mm256_add_epi32(result, _mm256_madd_epi16(even, broadcast32(sums + 4 * j)));
      result = _mm256_add_epi32(result, _mm256_madd_epi16(odd, broadcast32(sums + 4 * j + 2)));
    });
    return result;
  }
};

}  // namespace
}  // namespace thermo
