// What the kernels of few and of many rows share: products of a sub-block, and what a block adds to its
// outputs. Part of kernel_avx2.h.
#pragma once

#include "kernels/quant_matmul/panel_avx2.h"

namespace thermo {
namespace {

template <int NC>
struct Columns {
  const int8_t* codes[NC];
  const std::byte* meta[NC];
};

THERMO_INLINE const ActMeta256& meta256(const std::byte* meta, int b) {
  return reinterpret_cast<const ActMeta256*>(meta)[b];
}
THERMO_INLINE const ActMeta32& meta32(const std::byte* meta, int b) {
  return reinterpret_cast<const ActMeta32*>(meta)[b];
}

// Code vectors of a sub-block for 8 rows or 16, unpacked for each use. Named types and not lambdas: dot() is
// then compiled once for all sub-blocks.
template <DType T>
struct PackedCodes {
  const uint8_t* sub;
  template <int G>
  THERMO_INLINE __m256i get(int half) const {
    return code_vector<T, G>(sub + 32 * half);
  }
};
// The same for 16 rows, as they lie in a strip.
struct StripCodes {
  const uint8_t (*sub)[64];
  template <int G>
  THERMO_INLINE __m256i get(int half) const {
    return load(sub[G] + 32 * half);
  }
};

// Where VPDPBUSD starts for activation row c.
template <DType T>
struct GroupStart {
  const int32_t* const* first;
  int group;
  THERMO_INLINE __m256i get(int c) const {
    return kBiasLog2<T> < 0 ? _mm256_setzero_si256() : broadcast32(first[c] + group);
  }
};
template <DType T>
struct BlockStart {
  const std::byte* const* meta;
  int block;
  THERMO_INLINE __m256i get(int c) const {
    if constexpr (kPanelFormat<T>.offset_log2 >= 0 && !kSignedCodes<T>)
      return _mm256_slli_epi32(_mm256_set1_epi32(meta32(meta[c], block).neg_sum),
                               kPanelFormat<T>.offset_log2);
    else
      return _mm256_setzero_si256();
  }
};

// sum[i][c] += (codes First..First+N-1 . activations of column c) * scale[i], for R times 8 matrix rows. `at`
// is the activation column of code vector 0. Blocks of 32 columns have no small scale; theirs is one, and
// VPDPBUSD's sum is set.
template <DType T, int First, int N, int R, int NC, class Codes, class Start>
THERMO_INLINE void dot(__m256i (&sum)[R][NC], const __m256i (&scale)[R], const Columns<NC>& x, int at,
                       Codes codes, Start start) {
  if constexpr (kVnni) {
    __m256i part[R][NC];
    THERMO_EACH(i, R) THERMO_EACH(c, NC) part[i][c] = start.get(c);
    unroll<N>([&](auto j) THERMO_LAMBDA {
      constexpr int g = First + j;
      __m256i v[R];
      THERMO_EACH(i, R) v[i] = codes.template get<g>(i);
      THERMO_EACH(c, NC) {
        const __m256i a = broadcast32(x.codes[c] + at + 4 * g);
        THERMO_EACH(i, R) {
          part[i][c] = dot_bytes(part[i][c], v[i], a);
          asm("" : "+x"(part[i][c]));
        }
      }
    });
    THERMO_EACH(i, R) THERMO_EACH(c, NC) {
      if constexpr (kPanelFormat<T>.block_cols == 32)
        sum[i][c] = part[i][c];
      else if constexpr (kShortSums<T>)
        sum[i][c] = dot_words(sum[i][c], part[i][c], scale[i]);
      else
        sum[i][c] = dot_words(sum[i][c], _mm256_shuffle_epi8(part[i][c], load(kSplitPlaces.byte)), scale[i]);
    }
  } else if constexpr (kSignedCodes<T>) {
    unroll<N>([&](auto j) THERMO_LAMBDA {
      constexpr int g = First + j;
      __m256i v[R], size[R];
      THERMO_EACH(i, R) {
        v[i] = codes.template get<g>(i);
        size[i] = _mm256_abs_epi8(v[i]);
      }
      THERMO_EACH(c, NC) {
        const __m256i a = broadcast32(x.codes[c] + at + 4 * g);
        THERMO_EACH(i, R) {
          const __m256i pairs = _mm256_maddubs_epi16(size[i], _mm256_sign_epi8(a, v[i]));
          sum[i][c] = _mm256_add_epi32(sum[i][c], _mm256_madd_epi16(pairs, scale[i]));
          asm("" : "+x"(sum[i][c]));
        }
      }
    });
  } else {
    constexpr int kLength = kChain<T> < N ? kChain<T> : N;
    __m256i pairs[R][NC];
    unroll<N>([&](auto j) THERMO_LAMBDA {
      constexpr int g = First + j;
      __m256i v[R];
      THERMO_EACH(i, R) v[i] = codes.template get<g>(i);
      THERMO_EACH(c, NC) {
        const __m256i a = broadcast32(x.codes[c] + at + 4 * g);
        THERMO_EACH(i, R) {
          const __m256i product = _mm256_maddubs_epi16(v[i], a);
          pairs[i][c] = j % kLength == 0 ? product : _mm256_add_epi16(pairs[i][c], product);
          // Here the sum is a register: else GCC turns the additions into a tree and spills its leaves.
          asm("" : "+x"(pairs[i][c]));
        }
      }
      if constexpr (j % kLength == kLength - 1) THERMO_EACH(i, R)
      THERMO_EACH(c, NC) sum[i][c] = _mm256_add_epi32(sum[i][c], _mm256_madd_epi16(pairs[i][c], scale[i]));
    });
  }
}

// What a block of 256 columns adds to 8 outputs.
template <DType T>
THERMO_INLINE __m256 add_block256(__m256 acc, __m256i sum, __m256 d, [[maybe_unused]] __m256 dmin,
                                  [[maybe_unused]] __m256i min_dot, float act_d) {
  __m256 value = _mm256_mul_ps(d, _mm256_cvtepi32_ps(sum));
  if constexpr (kPanelFormat<T>.has_min()) value = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(min_dot), dmin, value);
  return _mm256_fmadd_ps(value, _mm256_set1_ps(act_d), acc);
}
template <DType T>
THERMO_INLINE __m256 add_block32(__m256 acc, __m256i sum, __m256 scale, [[maybe_unused]] __m256 min,
                                 const ActMeta32& meta) {
  __m256 value = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum));
  if constexpr (kPanelFormat<T>.has_min())
    value = _mm256_fnmadd_ps(min, _mm256_cvtepi32_ps(_mm256_set1_epi32(meta.neg_sum)), value);
  return _mm256_fmadd_ps(value, _mm256_set1_ps(meta.d), acc);
}

// Times a number of Scales256::kFactor.
template <int kFactor>
THERMO_INLINE __m256i times_factor(__m256i v) {
  constexpr int shift = __builtin_ctz(kFactor < 0 ? -kFactor : kFactor);
  const __m256i size = _mm256_slli_epi32(v, shift);
  return kFactor < 0 ? _mm256_sub_epi32(_mm256_setzero_si256(), size) : size;
}

// The scales of a block of 32 columns, 8 rows.
template <DType T>
THERMO_INLINE __m256 block_scale(const uint8_t* header, int half) {
  if constexpr (kPanelFormat<T>.scales == ScaleKind::Exponent) {
    const __m256i e =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(header + 8 * half)));
    // 2^(e - 128); the exponents 0 and 1 are subnormal floats.
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    const __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, tiny));
  } else {
    return half8(header + 16 * half);
  }
}

// sum[i][c] = codes . activations of block b of 32 columns, from column `at` on.
template <DType T, int R, int NC, class Codes>
THERMO_INLINE void dot_block32(__m256i (&sum)[R][NC], const Columns<NC>& x, int b, int at, Codes codes) {
  const BlockStart<T> start{x.meta, b};
  __m256i ones[R];
  THERMO_EACH(i, R) {
    ones[i] = _mm256_set1_epi16(1);
    THERMO_EACH(c, NC) sum[i][c] = start.get(c);
  }
  dot<T, 0, 8>(sum, ones, x, at, codes, start);
}

// 16 outputs of activation row t.
THERMO_INLINE void store_panel(const PanelMatmulArgs& a, int panel, int t, __m256 lower, __m256 upper) {
  float* const y = a.y + t * a.y_stride + 16 * panel;
  const int rows = a.n_rows - 16 * panel;
  if (rows >= 16) {
    _mm256_storeu_ps(y, lower);
    _mm256_storeu_ps(y + 8, upper);
  } else {
    alignas(32) float last[16];
    _mm256_store_ps(last, lower);
    _mm256_store_ps(last + 8, upper);
    std::memcpy(y, last, static_cast<size_t>(rows) * sizeof(float));
  }
}

template <DType T>
Columns<1> column(const PanelMatmulArgs& a, int t) {
  constexpr int pad = kPanelFormat<T>.block_cols == 256 ? 256 : 64;
  const std::byte* row = a.acts + static_cast<size_t>(a.act_index ? a.act_index[t] : t) * a.act_stride;
  return {{reinterpret_cast<const int8_t*>(row)}, {row + (a.n_cols + pad - 1) / pad * pad}};
}

}  // namespace
}  // namespace thermo
