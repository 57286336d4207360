// The panels with 32-byte vectors: the lower and the upper 8 rows of every 64-byte vector are two passes over
// the same bytes, block by block, so that each cache line is read from memory once.
//
// VPMADDUBSW multiplies unsigned codes with activation codes and adds pairs to 16 bits, saturating. With
// codes up to m and activations up to 127 there is room for 32767 / (254 * m) of them: 8 for 4-bit codes, 4
// for 5-bit ones, 2 for 6-bit ones. Then VPMADDWD widens, and multiplies by the small scale on the way: a
// block of 256 columns is one exact 32-bit integer per row until it meets its float scale. Codes that need
// all 8 bits (Q8_0, IQ4) are used as |code| and the sign moves to the activation: 128 * 127 * 2 still fits,
// but only once.
//
// Work per 256 columns and 8 rows of Q4_K: 64 VPMADDUBSW, 56 VPADDW, 8 VPMADDWD, about 50 to unpack: 180
// operations for 1152 bytes, so decode waits for memory.
//
// Measured on a Zen 4 server core (EPYC, 3.64 GHz, shared with other work: best of many), K = 2048. Left:
// GMAC/s of one core with the weights in L2. Right: n_act = 1, weights from memory, two cores, and the share
// of plain reading (66-70 GB/s).
//
//     n_act    1    2    4   64     from memory
//     Q4_K    77  106  110  114     57.7 GB/s  88 %
//     Q5_K    63   87   95   97     55.2       84
//     Q6_K    53   73   84   88     55.6       85
//     Q8_0    49   56   64   64     60.9       93
//     F16     29   51   52   53     62.2       94
//
// Tried: prefetching by software with one or two activation rows, 10-25 % slower; prefetching a block at
// once, 65 instead of 97 GMAC/s at n_act = 4 from memory; a copy of the kernel without the test for cold
// weights, +9 % for Q4_K, -12 % for Q6_K (GCC spills differently) and twice the code; 4 columns of float
// weights, spills.
#if defined(__x86_64__)

#include "kernels/quant_matmul/panel_avx2.h"

namespace thermo {
namespace {

// ---- one block, 8 rows, NC activation rows ----

// Asks for weights that will be used soon, if they are not in the cache yet. With one or two activation rows
// the processor's own prefetcher does better; with more, their streams make it lose the weights'.
constexpr int kAhead = 12288;
template <int NC, int N>
THERMO_INLINE void prefetch(const uint8_t* p, bool cold) {
  if constexpr (NC >= 3) {
    if (cold)
      unroll<N / 64>([&](auto i) THERMO_LAMBDA {
        _mm_prefetch(reinterpret_cast<const char*>(p + kAhead + 64 * i), _MM_HINT_T1);
      });
  }
}

template <int NC>
struct Columns {
  const int8_t* codes[NC];
  const std::byte* meta[NC];
};

template <DType T, int NC>
THERMO_INLINE void multiply_block256(const uint8_t* header, const uint8_t* body, int half, int b,
                                     const Columns<NC>& x, bool cold, __m256 acc[NC]) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  prefetch<NC, 64 + f.scale_bytes>(body - 64, cold);
  Scales256<T> scales;
  scales.read(header, body, half);
  __m256i sum[NC];
  unroll<NC>([&](auto c) THERMO_LAMBDA {
    sum[c] = _mm256_setzero_si256();
    if constexpr (Scales256<T>::kOffset) {
      const ActMeta256& meta = reinterpret_cast<const ActMeta256*>(x.meta[c])[b];
      sum[c] = _mm256_sub_epi32(sum[c], _mm256_slli_epi32(scales.sum_dot(meta), f.offset_log2));
    }
  });
  unroll<8>([&](auto s) THERMO_LAMBDA {
    const uint8_t* sub = body + f.scale_bytes + s * f.sub_bytes() + 32 * half;
    prefetch<NC, f.sub_bytes()>(sub, cold);
    if constexpr (f.group_cols == 16) {
      dot<T, 0, 4, NC>(sum, sub, x.codes, b * 256 + s * 32, scales.template scale<2 * s>());
      dot<T, 4, 4, NC>(sum, sub, x.codes, b * 256 + s * 32, scales.template scale<2 * s + 1>());
    } else {
      dot<T, 0, 8, NC>(sum, sub, x.codes, b * 256 + s * 32, scales.template scale<s>());
    }
  });
  unroll<NC>([&](auto c) THERMO_LAMBDA {
    const ActMeta256& meta = reinterpret_cast<const ActMeta256*>(x.meta[c])[b];
    __m256 value = _mm256_mul_ps(half8(header + 16 * half), _mm256_cvtepi32_ps(sum[c]));
    if constexpr (f.has_min())
      value =
          _mm256_fnmadd_ps(_mm256_cvtepi32_ps(scales.sum_dot(meta)), half8(header + 32 + 16 * half), value);
    acc[c] = _mm256_fmadd_ps(value, _mm256_set1_ps(meta.d), acc[c]);
  });
}

template <DType T, int NC>
THERMO_INLINE void multiply_block32(const uint8_t* header, const uint8_t* body, int half, int b,
                                    const Columns<NC>& x, bool cold, __m256 acc[NC]) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  __m256 scale, min;
  if constexpr (f.scales == ScaleKind::Exponent) {
    const __m256i e =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(header + 8 * half)));
    // 2^(e - 128); the exponents 0 and 1 are subnormal floats.
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    const __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    scale = _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, tiny));
  } else {
    scale = half8(header + 16 * half);
  }
  if constexpr (f.has_min()) min = half8(header + 32 + 16 * half);
  prefetch<NC, 64 + f.body_bytes()>(body - 64, cold);  // with the header before it
  const auto meta = [&](int c) THERMO_LAMBDA { return reinterpret_cast<const ActMeta32*>(x.meta[c]) + b; };
  __m256i sum[NC];
  unroll<NC>([&](auto c) THERMO_LAMBDA {
    sum[c] = _mm256_setzero_si256();
    if constexpr (f.offset_log2 >= 0 && !kSignedCodes<T>)
      sum[c] = _mm256_slli_epi32(_mm256_set1_epi32(meta(c)->neg_sum), f.offset_log2);
  });
  dot<T, 0, 8, NC>(sum, body + 32 * half, x.codes, b * 32, _mm256_set1_epi16(1));
  unroll<NC>([&](auto c) THERMO_LAMBDA {
    __m256 value = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum[c]));
    if constexpr (f.has_min())
      value = _mm256_fnmadd_ps(min, _mm256_cvtepi32_ps(_mm256_set1_epi32(meta(c)->neg_sum)), value);
    acc[c] = _mm256_fmadd_ps(value, _mm256_set1_ps(meta(c)->d), acc[c]);
  });
}

// ---- a panel times NC activation rows ----

template <DType T, int NC>
void multiply_panel(const uint8_t* panel, int n_cols, const Columns<NC>& x, bool cold, __m256 out[2][NC]) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  __m256 acc[2][NC];
  unroll<2 * NC>([&](auto i) THERMO_LAMBDA { acc[i / NC][i % NC] = _mm256_setzero_ps(); });
  const int n_blocks = n_cols / f.block_cols;
  const uint8_t* body = panel;
  for (int b0 = 0; b0 < n_blocks; b0 += f.unit_blocks) {
    const uint8_t* header = body;
    body += 64;
    for (int i = 0; i < f.unit_blocks && b0 + i < n_blocks; ++i) {
#pragma GCC unroll 1
      for (int half = 0; half < 2; ++half) {
        // Both halves broadcast the same activations; GCC would keep all of them, on the stack.
        asm volatile("" ::: "memory");
        if constexpr (f.block_cols == 256)
          multiply_block256<T, NC>(header + i * f.header_step(), body, half, b0 + i, x, cold && half == 0,
                                   acc[half]);
        else
          multiply_block32<T, NC>(header + i * f.header_step(), body, half, b0 + i, x, cold && half == 0,
                                  acc[half]);
      }
      body += f.body_bytes();
    }
  }
  unroll<2 * NC>([&](auto i) THERMO_LAMBDA { out[i / NC][i % NC] = acc[i / NC][i % NC]; });
}

template <DType T>
THERMO_INLINE __m256 float_column(const uint8_t* panel, int64_t c, int half) {
  if constexpr (T == DType::F32)
    return _mm256_load_ps(reinterpret_cast<const float*>(panel + 64 * c + 32 * half));
  if constexpr (T == DType::F16) return half8(panel + 32 * c + 16 * half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(
      _mm256_cvtepu16_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(panel + 32 * c + 16 * half))),
      16));
}

template <DType T, int NC>
void multiply_float_panel(const uint8_t* panel, int n_cols, const Columns<NC>& x, __m256 out[2][NC]) {
  // [half][column]; two of each, for even and odd k, so that additions do not wait for each other.
  __m256 acc[2][2][NC];
  unroll<4 * NC>([&](auto i) THERMO_LAMBDA { acc[i / (2 * NC)][i / NC % 2][i % NC] = _mm256_setzero_ps(); });
  const auto step = [&](int k, int parity) THERMO_LAMBDA {
    unroll<2>([&](auto half) THERMO_LAMBDA {
      const __m256 w = float_column<T>(panel, k, half);
      unroll<NC>([&](auto c) THERMO_LAMBDA {
        const float* xc = reinterpret_cast<const float*>(x.codes[c]);
        acc[parity][half][c] = _mm256_fmadd_ps(w, _mm256_set1_ps(xc[k]), acc[parity][half][c]);
      });
    });
  };
  int k = 0;
  for (; k + 2 <= n_cols; k += 2) {
    step(k, 0);
    step(k + 1, 1);
  }
  if (k < n_cols) step(k, 0);
  unroll<2 * NC>([&](auto i) THERMO_LAMBDA {
    out[i / NC][i % NC] = _mm256_add_ps(acc[0][i / NC][i % NC], acc[1][i / NC][i % NC]);
  });
}

// ---- driver ----

constexpr bool is_float(DType dtype) {
  return dtype == DType::F32 || dtype == DType::F16 || dtype == DType::BF16;
}

// Panels that are multiplied with all activation rows before the next ones: they stay in the second-level
// cache.
constexpr size_t kGroupBytes = 128 * 1024;

template <DType T, int NC>
void multiply_columns(const PanelMatmulArgs& a, size_t stride, int p0, int p1, int t0,
                      [[maybe_unused]] bool cold) {
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
    __m256 out[2][NC];
    if constexpr (is_float(T))
      multiply_float_panel<T, NC>(panel, a.n_cols, x, out);
    else
      multiply_panel<T, NC>(panel, a.n_cols, x, cold, out);
    const int rows = a.n_rows - 16 * p;
    for (int c = 0; c < NC; ++c) {
      float* y = a.y + (t0 + c) * a.y_stride + 16 * p;
      if (rows >= 16) {
        _mm256_storeu_ps(y, out[0][c]);
        _mm256_storeu_ps(y + 8, out[1][c]);
      } else {
        alignas(32) float last[16];
        _mm256_store_ps(last, out[0][c]);
        _mm256_store_ps(last + 8, out[1][c]);
        std::memcpy(y, last, static_cast<size_t>(rows) * sizeof(float));
      }
    }
  }
}

template <DType T>
void multiply(const PanelMatmulArgs& a) {
  constexpr int kMaxColumns = is_float(T) ? 2 : 4;
  const size_t stride = panel_bytes(T, a.n_cols);
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

void matmul_avx2(const PanelMatmulArgs& a) noexcept {
  switch (a.dtype) {
    case DType::F32:
      return multiply<DType::F32>(a);
    case DType::F16:
      return multiply<DType::F16>(a);
    case DType::BF16:
      return multiply<DType::BF16>(a);
    default:
      break;
  }
#define CASE(t) return multiply<DType::t>(a)
  THERMO_FOR_QUANT_TYPE(a.dtype, CASE)
#undef CASE
}

// ---- activations ----

THERMO_INLINE uint32_t max_abs_bits(const float* x, int n) {
  __m256i max = _mm256_setzero_si256();
  int i = 0;
  for (; i + 8 <= n; i += 8)
    max = _mm256_max_epu32(
        max, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), _mm256_set1_epi32(0x7fffffff)));
  alignas(32) uint32_t lane[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lane), max);
  uint32_t result = 0;
  for (uint32_t bits : lane) result = bits > result ? bits : result;
  for (; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7fffffffu;
    result = bits > result ? bits : result;
  }
  return result;
}

// Codes of n <= size floats, zero codes after them; the scale.
THERMO_INLINE float quantize_block(const float* x, int n, int size, int8_t* codes) {
  const uint32_t max_bits = max_abs_bits(x, n);
  float amax;
  std::memcpy(&amax, &max_bits, sizeof(amax));
  const bool finite = max_bits < 0x7f800000u;
  if (!finite || amax < 1e-35f) {
    std::memset(codes, 0, static_cast<size_t>(size));
    return finite ? 0.0f : __builtin_nanf("");
  }
  const __m256 inverse = _mm256_set1_ps(127.0f / amax);
  alignas(32) float last[32] = {};
  for (int i = 0; i < size; i += 32) {
    const float* from = x + i;
    if (n - i < 32) {
      std::memset(last, 0, sizeof(last));
      if (n > i) std::memcpy(last, from, static_cast<size_t>(n - i) * sizeof(float));
      from = last;
    }
    __m256i q[4];
    unroll<4>([&](auto k) THERMO_LAMBDA {
      q[k] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 8 * k), inverse));
    });
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                        _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  }
  return amax / 127.0f;
}

// Sums of the lower and the upper 16 of 32 codes.
THERMO_INLINE void sum16(const int8_t* codes, int32_t sums[2]) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  const __m256i quads = _mm256_madd_epi16(_mm256_maddubs_epi16(bytes(1), v), _mm256_set1_epi16(1));
  const __m256i pairs = _mm256_hadd_epi32(quads, quads);
  const __m256i all = _mm256_hadd_epi32(pairs, pairs);
  sums[0] = _mm256_extract_epi32(all, 0);
  sums[1] = _mm256_extract_epi32(all, 4);
}

void quantize_row_avx2(ActFormat format, const float* x, int n_cols, std::byte* out) noexcept {
  const size_t row_size = act_row_bytes(format, n_cols);
  int8_t* codes = reinterpret_cast<int8_t*>(out);
  if (format == ActFormat::F32) {
    const size_t used = static_cast<size_t>(n_cols) * sizeof(float);
    std::memcpy(out, x, used);
    std::memset(out + used, 0, row_size - used);
  } else if (format == ActFormat::Q8x32) {
    const size_t padded = static_cast<size_t>((n_cols + 63) / 64 * 64);
    std::memset(out + padded, 0, row_size - padded);
    if (padded != static_cast<size_t>(n_cols)) std::memset(codes + padded - 64, 0, 64);
    ActMeta32* meta = reinterpret_cast<ActMeta32*>(out + padded);
    for (int c = 0; c < n_cols; c += 32, ++meta) {
      meta->d = quantize_block(x + c, n_cols - c < 32 ? n_cols - c : 32, 32, codes + c);
      int32_t sums[2];
      sum16(codes + c, sums);
      meta->neg_sum = -(sums[0] + sums[1]);
    }
  } else {
    ActMeta256* meta = reinterpret_cast<ActMeta256*>(out + (n_cols + 255) / 256 * 256);
    for (int c = 0; c < n_cols; c += 256, ++meta) {
      meta->d = quantize_block(x + c, n_cols - c < 256 ? n_cols - c : 256, 256, codes + c);
      constexpr int kPlace[4] = {0, 2, 1, 3};
      for (int s = 0; s < 8; ++s) {
        int32_t sums[2];
        sum16(codes + c + 32 * s, sums);
        for (int i = 0; i < 2; ++i) {
          const int g = 2 * s + i;
          meta->start32[g] = -32 * sums[i];
          meta->sum16[g / 4 * 4 + kPlace[g % 4]] = static_cast<int16_t>(sums[i]);
        }
        meta->sum32[s / 4 * 4 + kPlace[s % 4]] = static_cast<int16_t>(sums[0] + sums[1]);
      }
      std::memset(meta->unused, 0, sizeof(meta->unused));
    }
  }
}

}  // namespace

const QuantMatmulKernels kQuantMatmulAvx2 = {quantize_row_avx2, matmul_avx2};

}  // namespace thermo

#endif
