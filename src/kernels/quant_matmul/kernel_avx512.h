// The AVX-512 matmul as a template over the weight type. Included by quant_matmul_*avx512.cpp, which
// instantiate it for a few types each so that they compile side by side.
//
// A panel is read once per up to 8 activation rows ("columns"). Per 32-column sub-block of 16 rows: unpack 8
// code vectors, then for each column 8 VPDPBUSD whose other operand is 4 activation codes broadcast from
// memory, and what multiplies their sum with the sub-block's scale, exactly (ScaledSum). Minima meet the sums
// of activation codes in VPDPWSSD (4 per 256 columns), offsets start the accumulator at -offset * sum.
//
// Bound. A VPDPBUSD is 64 multiply-adds and Zen 4 starts one a cycle; float multiply-adds share its ports.
// Q4_K needs 64 + 8 + 4 + 3 = 79 such operations per 256 columns: 52 multiply-adds a cycle, 189 G/s at 3.64
// GHz. Decode reads every weight once (0.5625 bytes a weight of Q4_K, 0.82 of Q6_K) and is bound by memory.
//
// Measured on a Zen 4 server core (EPYC, 3.64 GHz, two cores, shared with other work: best of many), K =
// 2048. Left: GMAC/s of one core with the weights in L2. Right: n_act = 1, weights from memory, and the share
// of plain reading of the same memory (one core 34-37 GB/s, two 65-70).
//
//     n_act    1    2    3    4    8   64     one core           two cores
//     Q4_K   114  157  168  172  174  174     31.8 GB/s  87 %    58-66 GB/s  87-96 %
//     Q5_K    88  130  149  156  167  167     31.8       87      55-59       85-88
//     Q6_K    87  131  147  155  170  170     31.2       86      56-63       84-93
//     Q8_0   100  127  129  164  168  168     34.7       95      64          99
//     Q3_K    88  126  150  156  164  164     32.5       89      59          90
//     Q2_K    99  140  152  155  157  158     30.2       83      55          84
//     IQ4_XS 102  140  162  170  181  181     34.1       94      64          97
//     MXFP4   94  132  146  155  168  168     34.0       93      61          94
//     F16     29   50   58   57   58   58     33.8       93      61          93
//
// Weights from memory and n_act = 3, 4, 8, one core: Q4_K 154, 161, 164 GMAC/s; Q6_K 133, 143, 158.
//
// Tried:
// - bit planes (4 low bits, then the fifth and sixth) instead of panel_layout.h's packing: Q6_K 69 instead of
//   87 at n_act = 1 and 155 instead of 170 at 8; Q5_K 73 and 161; Q3_K 66 and 147.
// - software prefetch at n_act = 1, every hint and distances of 256 to 16384 bytes: 0 to 30 % slower. From
//   n_act = 3 it is needed: without it 4 activation rows read 15 instead of 21 GB/s and 8 rows 7 instead of
//   11 (Q4_K). It must cover every line: without the headers of Q8_0 it made things worse.
// - prefetching a whole block at once instead of sub-block by sub-block: most of the gain is lost.
// - 2 or 4 panels at a time at n_act = 1: neighbours 50 % slower, far apart equal.
// - high nibbles used as 16 * code, without the shift: 125 instead of 114 at n_act = 1 in L2, nothing from
//   memory.
// - unpacking a strip once for many rows: not written. What it could gain is the 8 % to the bound.
#pragma once

#include "kernels/quant_matmul/panel_avx512.h"
#include "kernels/quant_matmul/panel_prefetch.h"
#include "kernels/quant_matmul/quant_matmul_impl.h"

namespace thermo {
namespace {

// ---- one block times NC activation rows ----

template <int NC>
struct Columns {
  const int8_t* codes[NC];
  const std::byte* meta[NC];
};

// Integer dot product of 4 code vectors and 16 activation codes.
THERMO_INLINE __m512i dot4(__m512i acc, const __m512i* v, const int8_t* a) {
  unroll<4>([&](auto g) THERMO_LAMBDA { acc = _mm512_dpbusd_epi32(acc, v[g], broadcast32(a + 4 * g)); });
  return acc;
}

template <bool kFloats>
struct SumVector {
  using Type = __m512i;
};
template <>
struct SumVector<true> {
  using Type = __m512;
};

// VPSHUFB's places that cut a lane of 32 bits into its low byte and its other bytes, two 16-bit numbers, and
// that move its low half into the upper one.
struct alignas(64) SplitPlaces {
  int8_t byte[64];
  consteval SplitPlaces() : byte{} {
    for (int i = 0; i < 64; ++i)
      byte[i] = static_cast<int8_t>(i % 4 == 0 ? i % 16 : i % 4 == 1 ? -128 : i % 16 - 1);
  }
};
inline constexpr SplitPlaces kSplitPlaces;
struct alignas(64) UpperPlaces {
  int8_t byte[64];
  consteval UpperPlaces() : byte{} {
    for (int i = 0; i < 64; ++i) byte[i] = static_cast<int8_t>(i % 16 / 4 * 4 + i % 2);
  }
};
inline constexpr UpperPlaces kUpperPlaces;

// A block's sum of scale * dot, exact: as floats where these cannot round (kExactGroups), else with VPDPWSSD.
// Its 16-bit numbers are the dot products of 16 columns where these fit, or a dot product of at most 24 bits,
// cut into its low byte and the rest; the scale of the rest is 256 times the scale. VPMULLD would be two
// operations on one port of Intel's.
template <DType T>
struct ScaledSum {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr bool kFloats = kExactGroups<T> >= 256 / f.group_cols;
  static constexpr bool kPairs = f.bits == 4 && f.table == CodeTable::None;
  using Sum = typename SumVector<kFloats>::Type;
  Sum sum;

  THERMO_INLINE void clear() {
    if constexpr (kFloats)
      sum = _mm512_setzero_ps();
    else
      sum = _mm512_setzero_si512();
  }
  // What add() takes for a scale.
  THERMO_INLINE static Sum prepare(__m512i scale) {
    if constexpr (kFloats)
      return _mm512_cvtepi32_ps(scale);
    else if constexpr (kPairs)
      return _mm512_or_si512(scale, _mm512_slli_epi32(scale, 16));
    else
      return and_or(scale, _mm512_set1_epi32(0xffff), _mm512_slli_epi32(scale, 24));
  }
  THERMO_INLINE void add(__m512i dot, Sum scale) {
    static_assert(!kPairs || f.group_cols == 32);
    if constexpr (kFloats)
      sum = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dot), sum);
    else
      sum = _mm512_dpwssd_epi32(sum, _mm512_shuffle_epi8(dot, load(kSplitPlaces.byte)), scale);
  }
  // Both halves of 32 columns.
  THERMO_INLINE void add(__m512i dot0, __m512i dot1, Sum scale) {
    if constexpr (kPairs)
      sum = _mm512_dpwssd_epi32(
          sum, _mm512_mask_shuffle_epi8(dot0, 0xccccccccccccccccu, dot1, load(kUpperPlaces.byte)), scale);
    else
      add(_mm512_add_epi32(dot0, dot1), scale);
  }
  THERMO_INLINE __m512 value() const {
    if constexpr (kFloats)
      return sum;
    else
      return _mm512_cvtepi32_ps(sum);
  }
};

template <DType T, int NC>
THERMO_INLINE void multiply_block256(const uint8_t* header, const uint8_t* body, int b, const Columns<NC>& x,
                                     const uint8_t* limit, __m512 acc[NC]) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  Scales256<T> scales;
  prefetch<64 + f.scale_bytes, NC>(body - 64, limit);
  scales.read(header, body);
  ScaledSum<T> sum[NC];
  unroll<NC>([&](auto c) THERMO_LAMBDA { sum[c].clear(); });
  // Codes have an offset: the dot product starts at minus offset * (sum of the activation codes).
  const auto start = [&](int c, int group16) THERMO_LAMBDA {
    if constexpr (f.offset_log2 < 0) return _mm512_setzero_si512();
    const ActMeta256* meta = reinterpret_cast<const ActMeta256*>(x.meta[c]) + b;
    const __m512i times32 = broadcast32(meta->start32 + group16);
    if constexpr (f.offset_log2 > 5) return _mm512_slli_epi32(times32, f.offset_log2 - 5);
    if constexpr (f.offset_log2 < 5) return _mm512_srai_epi32(times32, 5 - f.offset_log2);
    return times32;
  };
  unroll<8>([&](auto s) THERMO_LAMBDA {
    const uint8_t* sub = body + f.scale_bytes + s * kPanelFormat<T>.sub_bytes();
    prefetch<kPanelFormat<T>.sub_bytes(), NC>(sub, limit);
    __m512i v[8];
    unpack<T>(sub, v);
    if constexpr (f.group_cols == 16) {
      const auto scale0 = ScaledSum<T>::prepare(scales.template scale<2 * s>()),
                 scale1 = ScaledSum<T>::prepare(scales.template scale<2 * s + 1>());
      unroll<NC>([&](auto c) THERMO_LAMBDA {
        const int8_t* a = x.codes[c] + b * 256 + s * 32;
        const __m512i dot0 = dot4(start(c, 2 * s), v, a);
        const __m512i dot1 = dot4(start(c, 2 * s + 1), v + 4, a + 16);
        sum[c].add(dot0, scale0);
        sum[c].add(dot1, scale1);
      });
    } else {
      const auto scale = ScaledSum<T>::prepare(scales.template scale<s>());
      unroll<NC>([&](auto c) THERMO_LAMBDA {
        const int8_t* a = x.codes[c] + b * 256 + s * 32;
        // Two chains: Intel starts two dot instructions a cycle and each takes five.
        sum[c].add(dot4(start(c, 2 * s), v, a), dot4(start(c, 2 * s + 1), v + 4, a + 16), scale);
      });
    }
  });
  unroll<NC>([&](auto c) THERMO_LAMBDA {
    const ActMeta256& meta = reinterpret_cast<const ActMeta256*>(x.meta[c])[b];
    __m512 value = _mm512_mul_ps(sum[c].value(), scales.d);
    if constexpr (kPanelFormat<T>.has_min())
      value = _mm512_fnmadd_ps(scales.min_dot(meta), scales.dmin, value);
    acc[c] = _mm512_fmadd_ps(value, _mm512_set1_ps(meta.d), acc[c]);
  });
}

template <DType T, int NC>
THERMO_INLINE void multiply_block32(const uint8_t* header, const uint8_t* body, int b, const Columns<NC>& x,
                                    const uint8_t* limit, __m512 acc[NC]) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  const __m512 scale = block_scale<T>(header);
  __m512 min;
  if constexpr (kPanelFormat<T>.has_min()) min = half16(header + 32);
  prefetch<64 + kPanelFormat<T>.body_bytes(), NC>(body - 64, limit);  // with the header before it
  __m512i v[8];
  unpack<T>(body, v);
  unroll<NC>([&](auto c) THERMO_LAMBDA {
    const int8_t* a = x.codes[c] + b * 32;
    const ActMeta32& meta = reinterpret_cast<const ActMeta32*>(x.meta[c])[b];
    const __m512i neg_sum = _mm512_set1_epi32(meta.neg_sum);
    __m512i dot = _mm512_setzero_si512();
    if constexpr (f.offset_log2 >= 0) dot = _mm512_slli_epi32(neg_sum, f.offset_log2);
    dot = dot4(dot4(dot, v, a), v + 4, a + 16);
    __m512 value = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(dot));
    if constexpr (kPanelFormat<T>.has_min())
      value = _mm512_fnmadd_ps(min, _mm512_cvtepi32_ps(neg_sum), value);
    acc[c] = _mm512_fmadd_ps(value, _mm512_set1_ps(meta.d), acc[c]);
  });
}

// ---- a panel times NC activation rows ----

template <DType T, int NC>
void multiply_panel(const uint8_t* panel, int n_cols, const Columns<NC>& x, const uint8_t* limit,
                    __m512 out[NC]) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  __m512 acc[NC];
  unroll<NC>([&](auto c) THERMO_LAMBDA { acc[c] = _mm512_setzero_ps(); });
  const int n_blocks = n_cols / f.block_cols;
  const uint8_t* body = panel;
  for (int b0 = 0; b0 < n_blocks; b0 += f.unit_blocks) {
    const uint8_t* header = body;
    body += 64;
    for (int i = 0; i < f.unit_blocks && b0 + i < n_blocks; ++i) {
      if constexpr (f.block_cols == 256)
        multiply_block256<T, NC>(header + i * kPanelFormat<T>.header_step(), body, b0 + i, x, limit, acc);
      else
        multiply_block32<T, NC>(header + i * kPanelFormat<T>.header_step(), body, b0 + i, x, limit, acc);
      body += kPanelFormat<T>.body_bytes();
    }
  }
  unroll<NC>([&](auto c) THERMO_LAMBDA { out[c] = acc[c]; });
}

template <DType T>
THERMO_INLINE __m512 float_column(const uint8_t* panel, int64_t c) {
  if constexpr (T == DType::F32) return _mm512_load_ps(panel + 64 * c);
  if constexpr (T == DType::F16) return half16(panel + 32 * c);
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(panel + 32 * c))), 16));
}

template <DType T, int NC>
void multiply_float_panel(const uint8_t* panel, int n_cols, const Columns<NC>& x, const uint8_t* limit,
                          __m512 out[NC]) {
  __m512 acc[2][NC];
  unroll<2 * NC>([&](auto i) THERMO_LAMBDA { acc[i / NC][i % NC] = _mm512_setzero_ps(); });
  const auto step = [&](int k, int parity) THERMO_LAMBDA {
    const __m512 w = float_column<T>(panel, k);
    unroll<NC>([&](auto c) THERMO_LAMBDA {
      const float* xc = reinterpret_cast<const float*>(x.codes[c]);
      acc[parity][c] = _mm512_fmadd_ps(w, _mm512_set1_ps(xc[k]), acc[parity][c]);
    });
  };
  int k = 0;
  constexpr int kBytes = T == DType::F32 ? 64 : 32;
  for (; k + 2 <= n_cols; k += 2) {
    prefetch<2 * kBytes, NC>(panel + static_cast<int64_t>(k) * kBytes, limit);
    step(k, 0);
    step(k + 1, 1);
  }
  if (k < n_cols) step(k, 0);
  unroll<NC>([&](auto c) THERMO_LAMBDA { out[c] = _mm512_add_ps(acc[0][c], acc[1][c]); });
}

// ---- driver ----

constexpr bool is_float(DType dtype) {
  return dtype == DType::F32 || dtype == DType::F16 || dtype == DType::BF16;
}

constexpr int kMaxColumns = 8;
// Panels that are multiplied with all activation rows before the next ones: they stay in the second-level
// cache.
constexpr size_t kGroupBytes = 256 * 1024;

template <DType T, int NC>
void multiply_columns(const PanelMatmulArgs& a, size_t stride, int p0, int p1, int t0, bool cold) {
  const uint8_t* const limit = prefetch_limit<NC>(a, stride, cold);
  Columns<NC> x;
  for (int c = 0; c < NC; ++c) {
    const std::byte* row =
        a.acts + static_cast<size_t>(a.act_index ? a.act_index[t0 + c] : t0 + c) * a.act_stride;
    const int pad = kPanelFormat<T>.block_cols == 256 ? 256 : 64;
    x.codes[c] = reinterpret_cast<const int8_t*>(row);
    x.meta[c] = row + (a.n_cols + pad - 1) / pad * pad;
  }
  for (int p = p0; p < p1; ++p) {
    const uint8_t* panel = reinterpret_cast<const uint8_t*>(a.panels) + static_cast<size_t>(p) * stride;
    __m512 out[NC];
    if constexpr (is_float(T))
      multiply_float_panel<T, NC>(panel, a.n_cols, x, limit, out);
    else
      multiply_panel<T, NC>(panel, a.n_cols, x, limit, out);
    const int rows = a.n_rows - 16 * p;
    const __mmask16 mask = static_cast<__mmask16>(rows >= 16 ? 0xffffu : (1u << rows) - 1);
    unroll<NC>([&](auto c) THERMO_LAMBDA {
      _mm512_mask_storeu_ps(a.y + (t0 + c) * a.y_stride + 16 * p, mask, out[c]);
    });
  }
}

template <DType T>
void multiply(const PanelMatmulArgs& a) {
  const size_t stride = panel_bytes(T, a.n_cols);
  // Activation rows in passes of nearly the same width: 9 are 5 and 4, not 8 and 1.
  const int passes = (a.n_act + kMaxColumns - 1) / kMaxColumns;
  const int group = passes == 1             ? a.n_panels
                    : stride >= kGroupBytes ? 1
                                            : static_cast<int>(kGroupBytes / stride);
  for (int p0 = 0; p0 < a.n_panels; p0 += group) {
    const int p1 = a.n_panels - p0 < group ? a.n_panels : p0 + group;
    for (int i = 0, t = 0; i < passes; ++i) {
      const int width = a.n_act / passes + (i < a.n_act % passes ? 1 : 0);
      unroll<kMaxColumns>([&](auto n) THERMO_LAMBDA {
        if (width == n + 1) multiply_columns<T, n + 1>(a, stride, p0, p1, t, i == 0);
      });
      t += width;
    }
  }
}

}  // namespace
}  // namespace thermo
