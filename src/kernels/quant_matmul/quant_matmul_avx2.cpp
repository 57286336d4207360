// AVX2: float weights, activations and the choice of the type; also for AVX-VNNI, which differs in block
// formats only. The kernel of those is kernel_avx2.h.
//
// Float weights, measured as there, GMAC/s at n_act = 1, 2, 4, 64: F16 29, 51, 52, 53; one row from memory
// reads 62 GB/s on two cores, 94 % of plain reading. Tried: 4 columns, spills.
#if defined(__x86_64__)

#include "kernels/quant_matmul/kernel_avx2.h"

namespace thermo {
namespace {

// ---- float weights ----

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

// Panels that are multiplied with all activation rows before the next ones: they stay in the second-level
// cache.
constexpr size_t kGroupBytes = 128 * 1024;

template <DType T, int NC>
void multiply_float_columns(const PanelMatmulArgs& a, size_t stride, int p0, int p1, int t0) {
  Columns<NC> x;
  for (int c = 0; c < NC; ++c) x.codes[c] = column<T>(a, t0 + c).codes[0];
  for (int p = p0; p < p1; ++p) {
    __m256 out[2][NC];
    multiply_float_panel<T, NC>(reinterpret_cast<const uint8_t*>(a.panels) + static_cast<size_t>(p) * stride,
                                a.n_cols, x, out);
    for (int c = 0; c < NC; ++c) store_panel(a, p, t0 + c, out[0][c], out[1][c]);
  }
}

template <DType T>
void multiply_float(const PanelMatmulArgs& a) {
  constexpr int kColumns = 2;
  const size_t stride = panel_bytes(T, a.n_cols);
  const int group = a.n_act <= kColumns     ? a.n_panels
                    : stride >= kGroupBytes ? 1
                                            : static_cast<int>(kGroupBytes / stride);
  for (int p0 = 0; p0 < a.n_panels; p0 += group) {
    const int p1 = a.n_panels - p0 < group ? a.n_panels : p0 + group;
    int t = 0;
    for (; t + kColumns <= a.n_act; t += kColumns) multiply_float_columns<T, kColumns>(a, stride, p0, p1, t);
    if (t < a.n_act) multiply_float_columns<T, 1>(a, stride, p0, p1, t);
  }
}

// Block formats by their parts of a path; floats are the same for all of these paths.
template <auto kMatmul32, auto kMatmul256>
void matmul(const PanelMatmulArgs& a) noexcept {
  switch (act_format(a.dtype)) {
    case ActFormat::Q8x32:
      return kMatmul32(a);
    case ActFormat::Q8x256:
      return kMatmul256(a);
    case ActFormat::F32:
      break;
  }
  switch (a.dtype) {
    case DType::F32:
      return multiply_float<DType::F32>(a);
    case DType::F16:
      return multiply_float<DType::F16>(a);
    default:
      return multiply_float<DType::BF16>(a);
  }
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

const QuantMatmulKernels kQuantMatmulAvx2 = {quantize_row_avx2,
                                             matmul<matmul_block32_avx2, matmul_block256_avx2>};
const QuantMatmulKernels kQuantMatmulAvxVnni = {quantize_row_avx2,
                                                matmul<matmul_block32_avxvnni, matmul_block256_avxvnni>};
const QuantMatmulKernels kQuantMatmulVnniEvex = {quantize_row_avx2,
                                                 matmul<matmul_block32_vnni_evex, matmul_block256_vnni_evex>};

}  // namespace thermo

#endif
