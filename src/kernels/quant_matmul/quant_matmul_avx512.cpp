// AVX-512: float weights, activations and the choice of the type. The kernel is kernel_avx512.h.
#if defined(__x86_64__)

#include "kernels/quant_matmul/kernel_avx512.h"

namespace thermo {
namespace {

void matmul_avx512(const PanelMatmulArgs& a) noexcept {
  switch (act_format(a.dtype)) {
    case ActFormat::Q8x32:
      return matmul_block32_avx512(a);
    case ActFormat::Q8x256:
      return matmul_block256_avx512(a);
    case ActFormat::F32:
      break;
  }
  switch (a.dtype) {
    case DType::F32:
      return multiply<DType::F32>(a);
    case DType::F16:
      return multiply<DType::F16>(a);
    default:
      return multiply<DType::BF16>(a);
  }
}

// ---- activations ----

// 16 codes of x, zero past n.
THERMO_INLINE __m512 load_floats(const float* x, int n) {
  return n >= 16  ? _mm512_loadu_ps(x)
         : n <= 0 ? _mm512_setzero_ps()
                  : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), x);
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
    std::memset(out + static_cast<size_t>(n_cols) * sizeof(float), 0,
                row_bytes - static_cast<size_t>(n_cols) * sizeof(float));
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
