// Reading panels with AVX-512: code vectors and scales in registers. Included by the AVX-512 and AMX files
// only.
//
// Everything is in an anonymous namespace: a function with external linkage compiled here could be the copy
// that runs on a machine without AVX-512.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 calls the deliberately undefined operand inside its own AVX-512 intrinsics uninitialised (PR105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "kernels/quant_matmul/panel_layout.h"

namespace thermo {
namespace {

#define THERMO_INLINE [[gnu::always_inline]] inline

// f(0), f(1), ... f(N - 1) with compile-time numbers: shift counts must be constants.
template <class F, int... I>
THERMO_INLINE void unroll_sequence(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
THERMO_INLINE void unroll(F&& f) {
  unroll_sequence(f, std::make_integer_sequence<int, N>{});
}
#define THERMO_LAMBDA __attribute__((always_inline))

THERMO_INLINE __m512i load(const void* p) {
  return _mm512_load_si512(p);
}
THERMO_INLINE __m512i bytes(int b) {
  return _mm512_set1_epi8(static_cast<char>(b));
}
THERMO_INLINE __m512i broadcast32(const void* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof(v));
  return _mm512_set1_epi32(v);
}
// (a & mask) | b
THERMO_INLINE __m512i and_or(__m512i a, __m512i mask, __m512i b) {
  return _mm512_ternarylogic_epi32(a, mask, b, 0xea);
}
// Moves bits left (n > 0) or right; bits cross byte borders, so mask the result.
template <int N>
THERMO_INLINE __m512i shift(__m512i v) {
  if constexpr (N > 0)
    return _mm512_slli_epi16(v, N);
  else if constexpr (N < 0)
    return _mm512_srli_epi16(v, -N);
  else
    return v;
}
THERMO_INLINE __m512 half16(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}

// ---- codes ----

// VPSHUFB looks things up within 16 bytes, so the table is there four times. VPERMB would need no mask for
// the nibble, but it is VBMI, which the first processors with VNNI (Cascade Lake) lack.
template <DType T>
struct alignas(64) CodeBytes {
  uint8_t byte[64];
  consteval CodeBytes() : byte{} {
    constexpr PanelFormat f = kPanelFormat<T>;
    for (int i = 0; i < 64; ++i)
      byte[i] = static_cast<uint8_t>((f.table == CodeTable::Iq4 ? kIq4Values[i % 16] : kMxfp4Values[i % 16]) +
                                     (1 << f.offset_log2));
  }
};
template <DType T>
constexpr CodeBytes<T> kCodeBytes;

// The 8 code vectors of a sub-block, as unsigned bytes.
template <DType T>
THERMO_INLINE void unpack(const uint8_t* sub, __m512i v[8]) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  __m512i x[f.bits];
  unroll<f.bits>([&](auto i) THERMO_LAMBDA { x[i] = load(sub + 64 * i); });
  const auto mask = [](__m512i value, int m) THERMO_LAMBDA { return _mm512_and_si512(value, bytes(m)); };
  if constexpr (f.table != CodeTable::None) {
    const __m512i table = load(kCodeBytes<T>.byte);
    unroll<4>([&](auto g) THERMO_LAMBDA {
      v[g] = _mm512_shuffle_epi8(table, mask(x[g], 15));
      v[g + 4] = _mm512_shuffle_epi8(table, mask(_mm512_srli_epi16(x[g], 4), 15));
    });
  } else if constexpr (f.bits == 8) {
    unroll<8>([&](auto g) THERMO_LAMBDA { v[g] = x[g]; });
  } else if constexpr (f.bits == 4) {
    unroll<8>([&](auto g) THERMO_LAMBDA { v[g] = mask(shift < g < 4 ? 0 : -4 > (x[g % 4]), 15); });
  } else if constexpr (f.bits == 2) {
    unroll<8>([&](auto g) THERMO_LAMBDA { v[g] = mask(shift<-2 * (g % 4)>(x[g / 4]), 3); });
  } else if constexpr (f.bits == 6) {
    unroll<2>([&](auto h) THERMO_LAMBDA {
      unroll<3>([&](auto i) THERMO_LAMBDA { v[4 * h + i] = mask(x[3 * h + i], 63); });
      v[4 * h + 3] = and_or(shift<-2>(x[3 * h + 2]), bytes(48),
                            and_or(shift<-4>(x[3 * h + 1]), bytes(12), mask(shift<-6>(x[3 * h]), 3)));
    });
  } else if constexpr (f.bits == 5) {
    unroll<5>([&](auto g) THERMO_LAMBDA { v[g] = mask(x[g], 31); });
    v[5] = and_or(shift<-3>(x[1]), bytes(24), mask(shift<-5>(x[0]), 7));
    v[6] = and_or(shift<-3>(x[3]), bytes(24), mask(shift<-5>(x[2]), 7));
    v[7] = and_or(shift<-1>(x[3]), bytes(16), and_or(shift<-2>(x[1]), bytes(8), mask(shift<-5>(x[4]), 7)));
  } else {
    static_assert(f.bits == 3);
    unroll<6>([&](auto g) THERMO_LAMBDA { v[g] = mask(shift<-3 * (g % 2)>(x[g / 2]), 7); });
    v[6] = and_or(shift<-4>(x[2]), bytes(4), mask(shift<-6>(x[0]), 3));
    v[7] = and_or(shift<-5>(x[2]), bytes(4), mask(shift<-6>(x[1]), 3));
  }
}

// ---- scales ----

// Byte i of each 32-bit lane.
template <int I>
THERMO_INLINE __m512i unsigned_byte(__m512i t) {
  if constexpr (I == 3) return _mm512_srli_epi32(t, 24);
  return _mm512_and_si512(_mm512_srli_epi32(t, 8 * I), _mm512_set1_epi32(255));
}
template <int I>
THERMO_INLINE __m512i signed_byte(__m512i t) {
  return _mm512_srai_epi32(_mm512_slli_epi32(t, 24 - 8 * I), 24);
}

// Four vectors of six-bit values from three.
THERMO_INLINE void unpack_six(const uint8_t* p, __m512i t[4]) {
  const __m512i v0 = load(p), v1 = load(p + 64), v2 = load(p + 128);
  t[0] = _mm512_and_si512(v0, bytes(63));
  t[1] = _mm512_and_si512(v1, bytes(63));
  t[2] = _mm512_and_si512(v2, bytes(63));
  t[3] = _mm512_and_si512(_mm512_srli_epi16(v0, 6), bytes(3));
  t[3] = and_or(_mm512_srli_epi16(v1, 4), bytes(12), t[3]);
  t[3] = and_or(_mm512_srli_epi16(v2, 2), bytes(48), t[3]);
}

// The scale of a 32-column block.
template <DType T>
THERMO_INLINE __m512 block_scale(const uint8_t* header) {
  if constexpr (kPanelFormat<T>.scales == ScaleKind::Exponent) {
    // 2^(e - 128); the exponents 0 and 1 are subnormal floats.
    const __m512i e = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(header)));
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    const __mmask16 tiny = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, tiny, _mm512_set1_epi32(0x00200000), e));
  } else {
    return half16(header);
  }
}

// The sum of scale * dot over a block of 256 columns is an exact integer for every instruction set and for
// the GPU, so that all of them give the same bits. Products and sums of floats are as exact up to 2^24: over
// so many groups, whatever the codes.
template <DType T>
constexpr int kExactGroups = [] {
  constexpr PanelFormat f = kPanelFormat<T>;
  const bool has_offset = f.offset_log2 >= 0;
  const int power = 1 << (has_offset ? f.offset_log2 : f.bits);
  const int value = f.table == CodeTable::Iq4 ? 127 : has_offset ? power : power - 1;
  const int scale = f.scales == ScaleKind::Byte     ? 128
                    : f.scales == ScaleKind::SixMin ? 63
                    : f.scales == ScaleKind::Nibble ? 15
                                                    : 32;
  return f.block_cols == 256 ? (1 << 24) / (f.group_cols * 127 * value * scale) : 0;
}();

// weight = d * scale(group) * value - dmin * min; the minima only ever meet sums of activations.
template <DType T>
struct Scales256 {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr int kMinVectors = kPanelFormat<T>.has_min() ? f.group_cols == 16 ? 4 : 2 : 1;
  __m512 d, dmin;
  __m512i t[4];  // small scales, byte i of lane r of t[j]: group 4 * j + i
  __m512i mins[kMinVectors];

  THERMO_INLINE void read(const uint8_t* header, const uint8_t* body) {
    d = half16(header);
    if constexpr (kPanelFormat<T>.has_min()) dmin = half16(header + 32);
    if constexpr (f.scales == ScaleKind::SixMin) {
      unpack_six(body, t);
      mins[0] = t[2];
      mins[1] = t[3];
    } else if constexpr (f.scales == ScaleKind::Nibble) {
      unroll<4>([&](auto j) THERMO_LAMBDA {
        const __m512i v = load(body + 64 * j);
        t[j] = _mm512_and_si512(v, bytes(15));
        mins[j] = _mm512_and_si512(_mm512_srli_epi16(v, 4), bytes(15));
      });
    } else if constexpr (f.scales == ScaleKind::SixSigned) {
      unpack_six(body, t);
      unroll<4>([&](auto j) THERMO_LAMBDA { t[j] = _mm512_sub_epi8(t[j], bytes(32)); });
    } else if constexpr (f.scales == ScaleKind::Byte) {
      unroll<4>([&](auto j) THERMO_LAMBDA { t[j] = load(body + 64 * j); });
    } else {
      static_assert(f.scales == ScaleKind::SixSplit);
      const __m512i low = load(body);
      // Lower half of the register: rows 0..7 at bits 0-1 (and 4-5), upper half: rows 8..15 at bits 2-3
      // (6-7).
      const __m256i top = _mm256_load_si256(reinterpret_cast<const __m256i*>(header + 32));
      const __m512i high = _mm512_inserti64x4(_mm512_castsi256_si512(top), _mm256_srli_epi16(top, 2), 1);
      t[0] = and_or(_mm512_slli_epi16(high, 4), bytes(48), _mm512_and_si512(low, bytes(15)));
      t[1] = and_or(high, bytes(48), _mm512_and_si512(_mm512_srli_epi16(low, 4), bytes(15)));
      unroll<2>([&](auto j) THERMO_LAMBDA { t[j] = _mm512_sub_epi8(t[j], bytes(32)); });
    }
  }

  // As integers.
  template <int Group>
  THERMO_INLINE __m512i scale() const {
    if constexpr (f.scales == ScaleKind::SixMin || f.scales == ScaleKind::Nibble)
      return unsigned_byte<Group % 4>(t[Group / 4]);
    else
      return signed_byte<Group % 4>(t[Group / 4]);
  }

  // sum over groups of min * (sum of the activation codes), exact.
  THERMO_INLINE __m512 min_dot(const ActMeta256& meta) const {
    const int16_t* sums = f.group_cols == 16 ? meta.sum16 : meta.sum32;
    __m512i dot = _mm512_setzero_si512();
    unroll<kMinVectors>([&](auto j) THERMO_LAMBDA {
      const __m512i even = _mm512_and_si512(mins[j], _mm512_set1_epi32(0x00ff00ff));
      const __m512i odd = _mm512_srli_epi16(mins[j], 8);
      dot = _mm512_dpwssd_epi32(dot, even, broadcast32(sums + 4 * j));
      dot = _mm512_dpwssd_epi32(dot, odd, broadcast32(sums + 4 * j + 2));
    });
    return _mm512_cvtepi32_ps(dot);
  }
};

}  // namespace
}  // namespace thermo
