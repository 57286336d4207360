// Plain C++ that any compiler vectorises somewhat: the path for processors we have no kernel for, and a
// second opinion in tests. A sub-block is decoded to 16-bit values once and multiplied with up to 8
// activation rows.
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/quant_matmul/panel_decode.h"
#include "kernels/quant_matmul/quant_matmul_impl.h"

namespace thermo {
namespace {

constexpr int kMaxCols = 8;

int round_up(int n, int to) {
  return (n + to - 1) / to * to;
}

// ---- activations ----

// d and codes of n floats (n <= size), zero codes after them.
float quantize_block(const float* x, int n, int size, int8_t* codes) {
  // As integers, |x| orders like x and a NaN is above infinity, so one maximum finds both.
  uint32_t max_bits = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    max_bits = bits > max_bits ? bits : max_bits;
  }
  std::memset(codes, 0, static_cast<size_t>(size));
  const float amax = std::bit_cast<float>(max_bits);
  if (max_bits >= 0x7f800000u) return std::bit_cast<float>(0x7fc00000u);
  if (amax < 1e-35f) return 0.0f;  // 127 / amax would overflow
  const float inverse = 127.0f / amax;
  for (int i = 0; i < n; ++i) {
    // Adding 1.5 * 2^23 leaves the nearest integer (halves to even) in the low bits.
    const float shifted = x[i] * inverse + 12582912.0f;
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - 0x4b400000u));
  }
  return amax / 127.0f;
}

int sum_codes(const int8_t* codes, int n) {
  int sum = 0;
  for (int i = 0; i < n; ++i) sum += codes[i];
  return sum;
}

void quantize_row_portable(ActFormat format, const float* x, int n_cols, std::byte* out) noexcept {
  std::memset(out, 0, act_row_bytes(format, n_cols));
  int8_t* codes = reinterpret_cast<int8_t*>(out);
  if (format == ActFormat::F32) {
    std::memcpy(out, x, static_cast<size_t>(n_cols) * sizeof(float));
  } else if (format == ActFormat::Q8x32) {
    ActMeta32* meta = reinterpret_cast<ActMeta32*>(out + round_up(n_cols, 64));
    for (int c = 0; c < n_cols; c += 32, ++meta) {
      meta->d = quantize_block(x + c, n_cols - c < 32 ? n_cols - c : 32, 32, codes + c);
      meta->neg_sum = -sum_codes(codes + c, 32);
    }
  } else {
    ActMeta256* meta = reinterpret_cast<ActMeta256*>(out + round_up(n_cols, 256));
    for (int c = 0; c < n_cols; c += 256, ++meta) {
      meta->d = quantize_block(x + c, n_cols - c < 256 ? n_cols - c : 256, 256, codes + c);
      constexpr int kPlace[4] = {0, 2, 1, 3};
      for (int g = 0; g < 16; ++g) {
        const int sum = sum_codes(codes + c + 16 * g, 16);
        meta->start32[g] = -32 * sum;
        meta->sum16[g / 4 * 4 + kPlace[g % 4]] = static_cast<int16_t>(sum);
        const int s = g / 2;
        int16_t& sum32 = meta->sum32[s / 4 * 4 + kPlace[s % 4]];
        sum32 = static_cast<int16_t>(sum32 + sum);
      }
    }
  }
}

// ---- matmul ----

using Accumulators = float[kMaxCols][16];

// 32 columns of a panel, two by two, so that SSE2, which every x86-64 has, can add two products at a time:
// fewer instructions than what the compiler makes of the plain loop.
struct ColumnPairs {
  alignas(16) int16_t value[16][16][2];  // [pair][row]

  explicit ColumnPairs(const int16_t (&columns)[32][16]) {
    for (int p = 0; p < 16; ++p)
      for (int r = 0; r < 16; ++r) {
        value[p][r][0] = columns[2 * p][r];
        value[p][r][1] = columns[2 * p + 1][r];
      }
  }

  // Products of n columns from `first` on with the codes, added up for each row.
  void dot(int first, int n, const int8_t* codes, int32_t (&sums)[16]) const {
#if defined(__SSE2__)
    __m128i sum[4] = {};
    for (int c = 0; c < n; c += 2) {
      const __m128i pair = _mm_set1_epi32((codes[c] & 0xffff) | static_cast<int32_t>(codes[c + 1]) * 65536);
      const auto* const row = reinterpret_cast<const __m128i*>(value[(first + c) / 2]);
      for (int i = 0; i < 4; ++i)
        sum[i] = _mm_add_epi32(sum[i], _mm_madd_epi16(_mm_load_si128(row + i), pair));
    }
    std::memcpy(sums, sum, sizeof(sums));
#else
    std::fill_n(sums, 16, 0);
    for (int c = 0; c < n; c += 2)
      for (int r = 0; r < 16; ++r) {
        const int16_t* const v = value[(first + c) / 2][r];
        sums[r] += v[0] * codes[c] + v[1] * codes[c + 1];
      }
#endif
  }
};

template <DType T>
void multiply_block(BlockPlace place, int b, int n_cols, const std::byte* const* acts, int n_act,
                    Accumulators& acc) {
  constexpr PanelFormat f = kPanelFormat<T>;
  BlockScales scales;
  decode_scales<T>(place, scales);
  float dx[kMaxCols];
  for (int t = 0; t < n_act; ++t) {
    if constexpr (f.block_cols == 256)
      dx[t] = reinterpret_cast<const ActMeta256*>(acts[t] + round_up(n_cols, 256))[b].d;
    else
      dx[t] = reinterpret_cast<const ActMeta32*>(acts[t] + round_up(n_cols, 64))[b].d;
  }
  for (int s = 0; s < kPanelFormat<T>.subs(); ++s) {
    int16_t value[32][16];
    decode_values<T>(place.body, s, value);
    const ColumnPairs pairs(value);
    for (int half = 0; half < 32 / f.group_cols; ++half) {
      const int group = s * (32 / f.group_cols) + half;
      for (int t = 0; t < n_act; ++t) {
        const int8_t* a = reinterpret_cast<const int8_t*>(acts[t]) + b * f.block_cols + group * f.group_cols;
        int32_t dot[16];
        pairs.dot(half * f.group_cols, f.group_cols, a, dot);
        const int32_t sum = kPanelFormat<T>.has_min() ? sum_codes(a, f.group_cols) : 0;
        for (int r = 0; r < 16; ++r) {
          float y = scales.scale[group][r] * static_cast<float>(dot[r]);
          if constexpr (kPanelFormat<T>.has_min()) y -= scales.min[group][r] * static_cast<float>(sum);
          acc[t][r] += dx[t] * y;
        }
      }
    }
  }
}

template <class Element>
float element_value(Element e, DType dtype) {
  if constexpr (sizeof(Element) == 4)
    return e;
  else
    return dtype == DType::BF16 ? std::bit_cast<float>(uint32_t{e} << 16) : f16_to_f32(e);
}

template <class Element>
void multiply_float(DType dtype, const uint8_t* panel, int n_cols, const std::byte* const* acts, int n_act,
                    Accumulators& acc) {
  const Element* w = reinterpret_cast<const Element*>(panel);
  for (int c = 0; c < n_cols; ++c, w += 16) {
    float row[16];
    for (int r = 0; r < 16; ++r) row[r] = element_value(w[r], dtype);
    for (int t = 0; t < n_act; ++t) {
      const float x = reinterpret_cast<const float*>(acts[t])[c];
      for (int r = 0; r < 16; ++r) acc[t][r] += row[r] * x;
    }
  }
}

void multiply_panel(DType dtype, const uint8_t* panel, int n_cols, const std::byte* const* acts, int n_act,
                    Accumulators& acc) {
  if (dtype == DType::F32) return multiply_float<float>(dtype, panel, n_cols, acts, n_act, acc);
  if (dtype == DType::F16 || dtype == DType::BF16)
    return multiply_float<uint16_t>(dtype, panel, n_cols, acts, n_act, acc);
#define CASE(t)                                                                            \
  for (int b = 0; b < n_cols / kPanelFormat<DType::t>.block_cols; ++b)                     \
    multiply_block<DType::t>(find_block<DType::t>(panel, b), b, n_cols, acts, n_act, acc); \
  return
  THERMO_FOR_QUANT_TYPE(dtype, CASE)
#undef CASE
}

void matmul_portable(const PanelMatmulArgs& a) noexcept {
  const size_t bytes = panel_bytes(a.dtype, a.n_cols);
  for (int p = 0; p < a.n_panels; ++p) {
    const uint8_t* panel = reinterpret_cast<const uint8_t*>(a.panels) + static_cast<size_t>(p) * bytes;
    const int rows = a.n_rows - 16 * p < 16 ? a.n_rows - 16 * p : 16;
    for (int t0 = 0; t0 < a.n_act; t0 += kMaxCols) {
      const int n = a.n_act - t0 < kMaxCols ? a.n_act - t0 : kMaxCols;
      const std::byte* acts[kMaxCols] = {};
      for (int t = 0; t < n; ++t)
        acts[t] = a.acts + static_cast<size_t>(a.act_index ? a.act_index[t0 + t] : t0 + t) * a.act_stride;
      Accumulators acc = {};
      multiply_panel(a.dtype, panel, a.n_cols, acts, n, acc);
      for (int t = 0; t < n; ++t)
        for (int r = 0; r < rows; ++r) a.y[(t0 + t) * a.y_stride + 16 * p + r] = acc[t][r];
    }
  }
}

}  // namespace

const QuantMatmulKernels kQuantMatmulPortable = {quantize_row_portable, matmul_portable};

}  // namespace thermo
