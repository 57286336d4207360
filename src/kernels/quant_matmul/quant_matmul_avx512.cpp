#if defined(__x86_64__)

#include "kernels/quant_matmul/panel_avx512.h"
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

template <DType T, int NC>
THERMO_INLINE void multiply_block256(const uint8_t* header, const uint8_t* body, int b, const Columns<NC>& x,
                                     __m512 acc[NC]) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  Scales256<T> scales;
  scales.read(header, body);
  __m512 sum[NC];
  unroll<NC>([&](auto c) THERMO_LAMBDA { sum[c] = _mm512_setzero_ps(); });
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
    __m512i v[8];
    unpack<T>(body + f.scale_bytes + s * f.sub_bytes(), v);
    if constexpr (f.group_cols == 16) {
      const __m512 scale0 = scales.template scale<2 * s>(), scale1 = scales.template scale<2 * s + 1>();
      unroll<NC>([&](auto c) THERMO_LAMBDA {
        const int8_t* a = x.codes[c] + b * 256 + s * 32;
        const __m512i dot0 = dot4(start(c, 2 * s), v, a);
        const __m512i dot1 = dot4(start(c, 2 * s + 1), v + 4, a + 16);
        sum[c] = _mm512_fmadd_ps(scale0, _mm512_cvtepi32_ps(dot0), sum[c]);
        sum[c] = _mm512_fmadd_ps(scale1, _mm512_cvtepi32_ps(dot1), sum[c]);
      });
    } else {
      const __m512 scale = scales.template scale<s>();
      unroll<NC>([&](auto c) THERMO_LAMBDA {
        const int8_t* a = x.codes[c] + b * 256 + s * 32;
        __m512i dot = dot4(start(c, 2 * s), v, a);
        if constexpr (f.offset_log2 < 0)
          dot = dot4(dot, v + 4, a + 16);
        else
          dot = _mm512_add_epi32(dot, dot4(start(c, 2 * s + 1), v + 4, a + 16));
        sum[c] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dot), sum[c]);
      });
    }
  });
  unroll<NC>([&](auto c) THERMO_LAMBDA {
    const ActMeta256& meta = reinterpret_cast<const ActMeta256*>(x.meta[c])[b];
    __m512 value = _mm512_mul_ps(sum[c], scales.d);
    if constexpr (f.has_min()) value = _mm512_fnmadd_ps(scales.min_dot(meta), scales.dmin, value);
    acc[c] = _mm512_fmadd_ps(value, _mm512_set1_ps(meta.d), acc[c]);
  });
}

template <DType T, int NC>
THERMO_INLINE void multiply_block32(const uint8_t* header, const uint8_t* body, int b, const Columns<NC>& x,
                                    __m512 acc[NC]) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  __m512 scale, min;
  if constexpr (f.scales == ScaleKind::Exponent) {
    const __m512i e = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(header)));
    // 2^(e - 128); the exponents 0 and 1 are subnormal floats.
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    const __mmask16 tiny = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
    scale = _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, tiny, _mm512_set1_epi32(0x00200000), e));
  } else {
    scale = half16(header);
  }
  if constexpr (f.has_min()) min = half16(header + 32);
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
    if constexpr (f.has_min()) value = _mm512_fnmadd_ps(min, _mm512_cvtepi32_ps(neg_sum), value);
    acc[c] = _mm512_fmadd_ps(value, _mm512_set1_ps(meta.d), acc[c]);
  });
}

// ---- a panel times NC activation rows ----

template <DType T, int NC>
void multiply_panel(const uint8_t* panel, int n_cols, const Columns<NC>& x, __m512 out[NC]) {
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
        multiply_block256<T, NC>(header + i * f.header_step(), body, b0 + i, x, acc);
      else
        multiply_block32<T, NC>(header + i * f.header_step(), body, b0 + i, x, acc);
      body += f.body_bytes();
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
void multiply_float_panel(const uint8_t* panel, int n_cols, const Columns<NC>& x, __m512 out[NC]) {
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
  for (; k + 2 <= n_cols; k += 2) {
    step(k, 0);
    step(k + 1, 1);
  }
  if (k < n_cols) step(k, 0);
  unroll<NC>([&](auto c) THERMO_LAMBDA { out[c] = _mm512_add_ps(acc[0][c], acc[1][c]); });
}

// ---- driver ----

constexpr size_t meta_offset(DType dtype, int n_cols) {
  switch (dtype) {
    case DType::F32:
    case DType::F16:
    case DType::BF16: return 0;
    case DType::Q2_K:
    case DType::Q3_K:
    case DType::Q4_K:
    case DType::Q5_K:
    case DType::Q6_K:
    case DType::IQ4_XS: return static_cast<size_t>((n_cols + 255) / 256 * 256);
    default: return static_cast<size_t>((n_cols + 63) / 64 * 64);
  }
}

template <DType T, int NC>
void multiply_columns(const PanelMatmulArgs& a, size_t stride, int t0) {
  Columns<NC> x;
  for (int c = 0; c < NC; ++c) {
    const std::byte* row = a.acts + static_cast<size_t>(a.act_index ? a.act_index[t0 + c] : t0 + c) * a.act_stride;
    x.codes[c] = reinterpret_cast<const int8_t*>(row);
    x.meta[c] = row + meta_offset(T, a.n_cols);
  }
  for (int p = 0; p < a.n_panels; ++p) {
    const uint8_t* panel = reinterpret_cast<const uint8_t*>(a.panels) + static_cast<size_t>(p) * stride;
    __m512 out[NC];
    if constexpr (T == DType::F32 || T == DType::F16 || T == DType::BF16)
      multiply_float_panel<T, NC>(panel, a.n_cols, x, out);
    else
      multiply_panel<T, NC>(panel, a.n_cols, x, out);
    const int rows = a.n_rows - 16 * p;
    const __mmask16 mask = rows >= 16 ? 0xffff : static_cast<__mmask16>((1u << rows) - 1);
    for (int c = 0; c < NC; ++c) _mm512_mask_storeu_ps(a.y + (t0 + c) * a.y_stride + 16 * p, mask, out[c]);
  }
}

template <DType T>
void multiply(const PanelMatmulArgs& a) {
  const size_t stride = panel_bytes(T, a.n_cols);
  int t = 0;
  for (; t + 8 <= a.n_act; t += 8) multiply_columns<T, 8>(a, stride, t);
  if (a.n_act - t >= 4) multiply_columns<T, 4>(a, stride, t), t += 4;
  if (a.n_act - t >= 2) multiply_columns<T, 2>(a, stride, t), t += 2;
  if (a.n_act - t >= 1) multiply_columns<T, 1>(a, stride, t);
}

void matmul_avx512(const PanelMatmulArgs& a) noexcept {
  switch (a.dtype) {
    case DType::F32: return multiply<DType::F32>(a);
    case DType::F16: return multiply<DType::F16>(a);
    case DType::BF16: return multiply<DType::BF16>(a);
    default: break;
  }
#define CASE(t) return multiply<DType::t>(a)
  THERMO_FOR_QUANT_TYPE(a.dtype, CASE)
#undef CASE
}

// ---- activations ----

// 16 codes of x, zero past n.
THERMO_INLINE __m512 load_floats(const float* x, int n) {
  return n >= 16 ? _mm512_loadu_ps(x) : n <= 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), x);
}

// Codes of 16 * N floats; the rest of a short block is zero. Stores the sums of 16 to sums[N].
template <int N>
THERMO_INLINE float quantize_block(const float* x, int n, int8_t* codes, int32_t* sums) {
  __m512 v[N];
  // As integers, |x| orders like x and a NaN is above infinity, so one maximum finds both.
  __m512i max = _mm512_setzero_si512();
  unroll<N>([&](auto i) THERMO_LAMBDA {
    v[i] = load_floats(x + 16 * i, n - 16 * i);
    max = _mm512_max_epu32(max, _mm512_and_si512(_mm512_castps_si512(v[i]), _mm512_set1_epi32(0x7fffffff)));
  });
  const uint32_t max_bits = _mm512_reduce_max_epu32(max);
  const float amax = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(max_bits))));
  const bool finite = max_bits < 0x7f800000u;
  const bool usable = finite && amax >= 1e-35f;
  if (!usable) {
    std::memset(codes, 0, 16 * N);
    std::memset(sums, 0, sizeof(int32_t) * N);
    return finite ? 0.0f : __builtin_nanf("");
  }
  const __m512 inverse = _mm512_set1_ps(127.0f / amax);
  unroll<N>([&](auto i) THERMO_LAMBDA {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16 * i), _mm512_cvtepi32_epi8(q));
    sums[i] = _mm512_reduce_add_epi32(q);
  });
  return amax / 127.0f;
}

void quantize_row_avx512(ActFormat format, const float* x, int n_cols, std::byte* out) noexcept {
  const size_t row_bytes = act_row_bytes(format, n_cols);
  int8_t* codes = reinterpret_cast<int8_t*>(out);
  if (format == ActFormat::F32) {
    std::memcpy(out, x, static_cast<size_t>(n_cols) * sizeof(float));
    std::memset(out + static_cast<size_t>(n_cols) * sizeof(float), 0, row_bytes - static_cast<size_t>(n_cols) * sizeof(float));
  } else if (format == ActFormat::Q8x32) {
    const size_t padded = static_cast<size_t>((n_cols + 63) / 64 * 64);
    ActMeta32* meta = reinterpret_cast<ActMeta32*>(out + padded);
    std::memset(meta, 0, row_bytes - padded);
    if (padded != static_cast<size_t>(n_cols)) std::memset(codes + padded - 64, 0, 64);
    for (int c = 0; c < n_cols; c += 32, ++meta) {
      int32_t sums[2];
      meta->d = quantize_block<2>(x + c, n_cols - c, codes + c, sums);
      meta->neg_sum = -(sums[0] + sums[1]);
    }
  } else {
    ActMeta256* meta = reinterpret_cast<ActMeta256*>(out + (n_cols + 255) / 256 * 256);
    for (int c = 0; c < n_cols; c += 256, ++meta) {
      int32_t sums[16];
      meta->d = quantize_block<16>(x + c, n_cols - c, codes + c, sums);
      const __m512i s = _mm512_loadu_si512(sums);
      _mm512_store_si512(meta->start32, _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), s), 5));
      const __m512i ordered = _mm512_shuffle_epi32(s, _MM_PERM_DBCA);  // 0 2 1 3
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(meta->sum16), _mm512_cvtepi32_epi16(ordered));
      // Pairs: 64-bit lanes hold neighbours.
      const __m512i pair = _mm512_add_epi32(s, _mm512_srli_epi64(s, 32));
      const __m256i sum32 = _mm256_shuffle_epi32(_mm512_cvtepi64_epi32(pair), 0xd8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(meta->sum32), _mm256_cvtepi32_epi16(sum32));
      std::memset(meta->unused, 0, sizeof(meta->unused));
    }
  }
}

}  // namespace

const QuantMatmulKernels kQuantMatmulAvx512 = {quantize_row_avx512, matmul_avx512};

}  // namespace thermo

#endif
