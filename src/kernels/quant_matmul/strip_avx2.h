// Many rows with 32-byte vectors: up to 256 columns of a panel, a strip, are unpacked once and then
// multiplied with all activation rows. Part of kernel_avx2.h.
#pragma once

#include "kernels/quant_matmul/dot_avx2.h"
#include "kernels/quant_matmul/panel_prefetch.h"

namespace thermo {
namespace {

constexpr int kStripSubs = 8;

template <DType T>
struct alignas(64) Strip {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr bool kLarge = f.block_cols == 256;
  static constexpr int kGroups = kLarge ? 256 / f.group_cols : 1;
  static constexpr int kSums = f.group_cols == 16 ? 4 : 2;
  // Signed codes as 16-bit numbers: VPMADDWD takes two columns at a time, and no sign has to move.
  static constexpr int kVectors = kSignedCodes<T> ? 16 : 8;  // of a sub-block
  uint8_t codes[kStripSubs][kVectors][64];
  // [..][half]; blocks of 256 columns
  __m256i scale[kGroups][2];
  __m256i scale_pairs[kSums][2][2], min_pairs[kSums][2][2];
  // [..][half]: of the block, or of each sub-block
  __m256 d[kLarge ? 1 : kStripSubs][2], dmin[kLarge ? 1 : kStripSubs][2];

  THERMO_INLINE void unpack_sub(const uint8_t* sub, int s) {
    unroll<16>([&](auto i) THERMO_LAMBDA {
      constexpr int g = i / 2, half = i % 2;
      const __m256i v = code_vector<T, g>(sub + 32 * half);
      if constexpr (kSignedCodes<T>) {
        const __m256i lower = _mm256_slli_epi16(v, 8);
        const __m256i bytes02 = _mm256_srai_epi16(lower, 8), bytes13 = _mm256_srai_epi16(v, 8);
        store(codes[s][2 * g] + 32 * half, bytes02);
        store(codes[s][2 * g + 1] + 32 * half, bytes13);
      } else {
        store(codes[s][g] + 32 * half, v);
      }
    });
  }
  THERMO_INLINE void read_header(const uint8_t* header, int s) {
    unroll<2>([&](auto half) THERMO_LAMBDA {
      d[s][half] = block_scale<T>(header, half);
      if constexpr (kPanelFormat<T>.has_min()) dmin[s][half] = half8(header + 32 + 16 * half);
    });
  }
  void unpack256(const uint8_t* header, const uint8_t* body) {
    read_header(header, 0);
    unroll<2>([&](auto half) THERMO_LAMBDA {
      Scales256<T> scales;
      scales.read(header, body, half);
      unroll<kGroups>([&](auto g) THERMO_LAMBDA { scale[g][half] = scales.template scale<g>(); });
      unroll<kSums>([&](auto j) THERMO_LAMBDA {
        if constexpr (kPanelFormat<T>.has_min())
          scales.template pairs<true>(j, min_pairs[j][0][half], min_pairs[j][1][half]);
        if constexpr (Scales256<T>::kFactor != 0)
          scales.template pairs<false>(j, scale_pairs[j][0][half], scale_pairs[j][1][half]);
      });
    });
#pragma GCC unroll 1
    for (int s = 0; s < 8; ++s) unpack_sub(body + f.scale_bytes + s * kPanelFormat<T>.sub_bytes(), s);
  }
};

// sum over groups of number * (sum of the activation codes)
template <DType T>
THERMO_INLINE __m256i sum_dot(const __m256i (&pairs)[Strip<T>::kSums][2][2], int half,
                              const ActMeta256& meta) {
  const int16_t* sums = act_sums<T>(meta);
  __m256i result = _mm256_setzero_si256();
  THERMO_EACH(i, 2 * Strip<T>::kSums)
  result = dot_words(result, pairs[i / 2][i % 2][half], broadcast32(sums + 2 * i));
  return result;
}

// Activation codes as 16-bit numbers, in the order of a strip's signed codes: 0 2 1 3.
template <int NC>
struct alignas(32) WideColumns {
  int16_t codes[NC][32 * kStripSubs];

  THERMO_INLINE void read(const Columns<NC>& x, int at, int n) {
    for (int c = 0; c < NC; ++c)
      for (int k = 0; k < n; k += 32) {
        const __m256i v = load(x.codes[c] + at + k);
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), odd = _mm256_srai_epi16(v, 8);
        // Lanes of 32 bits: columns 4g, 4g + 2 and columns 4g + 1, 4g + 3, one after the other.
        const __m256i low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
        store(codes[c] + k, _mm256_permute2x128_si256(low, high, 0x20));
        store(codes[c] + k + 16, _mm256_permute2x128_si256(low, high, 0x31));
      }
  }
};

// sum[i][c] = signed codes . activations of 32 columns from `at` on.
template <int NC>
THERMO_INLINE void dot_wide(__m256i (&sum)[2][NC], const uint8_t (*codes)[64], const WideColumns<NC>& x,
                            int at) {
  THERMO_EACH(j, 16) {
    const __m256i v[2] = {load(codes[j]), load(codes[j] + 32)};
    THERMO_EACH(c, NC) {
      const __m256i a = broadcast32(x.codes[c] + at + 2 * j);
      THERMO_EACH(i, 2) {
        const __m256i product = _mm256_madd_epi16(v[i], a);
        sum[i][c] = j == 0 ? product : _mm256_add_epi32(sum[i][c], product);
        asm("" : "+x"(sum[i][c]));
      }
    }
  }
}

// A strip of n_subs sub-blocks times NC activation rows. `acc` has 16 floats a row.
template <DType T, int NC>
[[gnu::noinline]] void multiply_strip(const Strip<T>& w, int n_subs, int first_sub, const Columns<NC>& x,
                                      float* acc) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  [[maybe_unused]] WideColumns<kSignedCodes<T> ? NC : 1> wide;
  if constexpr (kSignedCodes<T>) wide.read(x, first_sub * 32, n_subs * 32);
  if constexpr (f.block_cols == 256) {
    const int b = first_sub / 8;
    Starts<T> starts[NC];
    const int32_t* first[NC];
    alignas(32) __m256i sum[2][NC];
    THERMO_EACH(c, NC) {
      const ActMeta256& meta = meta256(x.meta[c], b);
      first[c] = starts[c].prepare(meta);
      THERMO_EACH(i, 2) {
        sum[i][c] = _mm256_setzero_si256();
        if constexpr (Scales256<T>::kFactor != 0)
          sum[i][c] = times_factor<Scales256<T>::kFactor>(sum_dot<T>(w.scale_pairs, i, meta));
      }
    }
#pragma GCC unroll 1
    for (int s = 0; s < 8; ++s) {
      // The sums stay in memory: the registers belong to the products.
      asm volatile("" ::"r"(sum) : "memory");
      constexpr int groups = 32 / f.group_cols;
      if constexpr (kSignedCodes<T>) {
        static_assert(groups == 1);
        __m256i part[2][NC];
        dot_wide(part, w.codes[s], wide, 32 * s);
        THERMO_EACH(i, 2) {
          const __m256i scale = _mm256_srai_epi32(w.scale[s][i], 16);
          THERMO_EACH(c, NC)
          sum[i][c] = _mm256_add_epi32(sum[i][c], _mm256_mullo_epi32(part[i][c], scale));
        }
      } else {
        unroll<groups>([&](auto k) THERMO_LAMBDA {
          const __m256i(&scale)[2] = w.scale[groups * s + k];
          dot<T, 8 / groups * k, 8 / groups>(sum, scale, x, b * 256 + s * 32, StripCodes{w.codes[s]},
                                             GroupStart<T>{first, groups * s + k});
        });
      }
    }
    THERMO_EACH(c, NC) THERMO_EACH(i, 2) {
      const ActMeta256& meta = meta256(x.meta[c], b);
      __m256i min_dot = _mm256_setzero_si256();
      if constexpr (kPanelFormat<T>.has_min()) min_dot = sum_dot<T>(w.min_pairs, i, meta);
      float* const to = acc + 16 * c + 8 * i;
      _mm256_store_ps(
          to, add_block256<T>(_mm256_load_ps(to), sum[i][c], w.d[0][i], w.dmin[0][i], min_dot, meta.d));
    }
  } else {
#pragma GCC unroll 1
    for (int s = 0; s < n_subs; ++s) {
      asm volatile("" ::"r"(acc) : "memory");
      const int b = first_sub + s;
      __m256i sum[2][NC];
      if constexpr (kSignedCodes<T>)
        dot_wide(sum, w.codes[s], wide, 32 * s);
      else
        dot_block32<T>(sum, x, b, b * 32, StripCodes{w.codes[s]});
      THERMO_EACH(c, NC) THERMO_EACH(i, 2) {
        float* const to = acc + 16 * c + 8 * i;
        _mm256_store_ps(
            to, add_block32<T>(_mm256_load_ps(to), sum[i][c], w.d[s][i], w.dmin[s][i], meta32(x.meta[c], b)));
      }
    }
  }
}

// Rows that go over a panel together: their sums are on the stack.
constexpr int kManyRows = 128;
constexpr int kTileColumns = kVnni ? 6 : 4;
// Up to so many rows are multiplied with codes in registers.
constexpr int kFewRows = 4;
// More than that, in passes of nearly the same width: 7 are 4 and 3, 5 are 3 and 2 or 5.
constexpr int kLeastWidth = kFewRows >= kTileColumns ? (kFewRows + 1) / 2 : (kTileColumns + 1) / 2;

template <DType T>
void multiply_many(const PanelMatmulArgs& a, size_t stride, int t0, int n, bool cold) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  alignas(64) float acc[kManyRows * 16];
  Columns<kManyRows> rows;
  for (int t = 0; t < n; ++t) {
    const Columns<1> row = column<T>(a, t0 + t);
    rows.codes[t] = row.codes[0];
    rows.meta[t] = row.meta[0];
  }
  Strip<T> strip;
  const uint8_t* const limit = prefetch_limit<kTileColumns>(a, stride, cold);
  const int passes = (n + kTileColumns - 1) / kTileColumns;
  const int n_blocks = a.n_cols / f.block_cols;
  for (int p = 0; p < a.n_panels; ++p) {
    std::memset(acc, 0, static_cast<size_t>(n) * 64);
    const uint8_t* body = reinterpret_cast<const uint8_t*>(a.panels) + static_cast<size_t>(p) * stride;
    const uint8_t* header = body;
    constexpr int kStripBlocks = kStripSubs / kPanelFormat<T>.subs();
    for (int b0 = 0; b0 < n_blocks; b0 += kStripBlocks) {
      const uint8_t* const begin = body;
      const int blocks = n_blocks - b0 < kStripBlocks ? n_blocks - b0 : kStripBlocks;
      for (int i = 0; i < blocks; ++i) {
        const int place = (b0 + i) % f.unit_blocks;
        if (place == 0) {
          header = body;
          body += 64;
        }
        if constexpr (f.block_cols == 256) {
          strip.unpack256(header + place * kPanelFormat<T>.header_step(), body);
        } else {
          strip.read_header(header + place * kPanelFormat<T>.header_step(), i);
          strip.unpack_sub(body, i);
        }
        body += kPanelFormat<T>.body_bytes();
      }
      // The weights of a strip further on, a part with every pass.
      const int lines = static_cast<int>((body - begin) / 64);
      for (int i = 0, t = 0; i < passes; ++i) {
        for (int k = lines * i / passes; k < lines * (i + 1) / passes; ++k)
          prefetch<64, kTileColumns>(begin + 64 * k, limit);
        const int width = n / passes + (i < n % passes ? 1 : 0);
        unroll<kTileColumns - kLeastWidth + 1>([&](auto m) THERMO_LAMBDA {
          constexpr int nc = kLeastWidth + m;
          if (width == nc) {
            Columns<nc> x;
            for (int c = 0; c < nc; ++c) {
              x.codes[c] = rows.codes[t + c];
              x.meta[c] = rows.meta[t + c];
            }
            multiply_strip<T, nc>(strip, blocks * kPanelFormat<T>.subs(), b0 * kPanelFormat<T>.subs(), x,
                                  acc + 16 * t);
          }
        });
        t += width;
      }
    }
    for (int t = 0; t < n; ++t)
      store_panel(a, p, t0 + t, _mm256_load_ps(acc + 16 * t), _mm256_load_ps(acc + 16 * t + 8));
  }
}

}  // namespace
}  // namespace thermo
