// The matmul with 32-byte vectors as a template over the weight type. Included by the AVX2 and the AVX-VNNI
// files, which differ in how they add products (panel_avx2.h).
//
// AVX2. VPMADDUBSW multiplies unsigned codes with activation codes and adds pairs to 16 bits, saturating.
// With codes up to m and activations up to 127 there is room for 32767 / (254 * m) of them: 8 for 4-bit
// codes, 4 for 5-bit ones, 2 for 6-bit ones. Then VPMADDWD widens, and multiplies by the small scale on the
// way: a block of 256 columns is one exact 32-bit integer per row until it meets its float scale. Codes that
// need all 8 bits (Q8_0, IQ4) are used as |code| and the sign moves to the activation: 128 * 127 * 2 still
// fits, but only once. With many rows they are widened to 16 bits instead, and so are the activations.
//
// Few rows, up to kFewRows: codes are unpacked in registers. One activation row, and two with VPDPBUSD, meet
// all 16 matrix rows of every 64-byte vector at once. More of them have no registers for that: the lower and
// the upper 8 matrix rows are two passes over the same bytes, block by block, so that each cache line is read
// from memory once. Work per 256 columns and 8 matrix rows of Q4_K: 64 VPMADDUBSW, 56 VPADDW, 8 VPMADDWD,
// about 50 to unpack: 180 operations for 1152 bytes, so decode waits for memory.
//
// Many rows: 256 columns of a panel (a strip) are unpacked into 4 KiB of the first-level cache, once for all
// activation rows. Then 16 matrix rows times 4 activation rows are multiplied at a time: 6 loads feed 8
// products, where few rows need 5 loads and 6 more operations for 4. The weights are read once whatever the
// number of rows.
//
// Bound. Zen 4 starts 8 VPMADDUBSW and 8 VPADDW in 5.0 cycles, not 4: additions take turns on the two ports
// of the products. Q4_K has 72 + 72 of them and 12 others per 256 columns, 8 matrix rows and activation row:
// 49 cycles, 153 multiply-adds a nanosecond at 3.66 GHz. The product of a strip alone reaches that; unpacking
// takes another 150 cycles a strip, a tenth of the time of 16 rows. VPDPBUSD: 64 + 8 + 4 + 5 operations on
// two ports, 41 cycles. Golden Cove has three ports, two of which multiply: 50 and 41 cycles by the same
// count, reached 57 and 45 with 64 rows. AVX-VNNI cannot be 1.4 times as fast as AVX2 there: its 64 products
// alone take 32 cycles, and the three ports do AVX2's additions at the same time as its products.
//
// Measured on a Zen 4 server core (EPYC, 3.66 GHz, shared with other work: best of many), K = 2048: GMAC/s of
// one core with the weights in L2. Before: the kernel of few rows in passes of 4. From memory one row reads
// 84 to 94 % of what plain reading does on two cores.
//
//     n_act           1    2    4   16   64    before, 16 and 64
//     Q4_K, AVX2     77  106  108  126  133    105  104
//     Q5_K           54   87   90  106  117     90   92
//     Q6_K           53   78   86   95  102     81   83
//     Q8_0           49   56   59   64   69     60   62
//     IQ4_XS         45   57   61   69   74     58   60
//     Q4_K, VPDPBUSD 69   97  108  130  145
//
// One row in one pass instead of two, and places of activations that are not computed ahead and kept on the
// stack (64 of them, which GCC did): Zen 5, two threads, 8 layers of 35B-A3B, decode in turn: AVX2 124 -> 139
// tokens/s, VPDPBUSD 121 -> 151. Two rows in one pass: VPDPBUSD 6 % faster from the caches, AVX2 the same.
//
// Tried: tiles of 5 and 6 activation rows with AVX2, +-2 %; of 3, -3 %. Keeping a strip's activations in the
// first-level cache by taking all panels of a task strip by strip: nothing to gain, 12 KiB of activations are
// as fast as 48. Prefetching by software with one or two activation rows, 10-25 % slower on Zen 4 (Sapphire
// Rapids and Zen 5 need it, so it is measured at load: kernels/linear/prefetch_choice.h); prefetching a block
// at once, 65 instead of 97 GMAC/s at n_act = 4 from memory. Lambdas instead of THERMO_EACH and named types
// in dot(): the same code after three times the compile time.
#pragma once

#include "kernels/quant_matmul/dot_avx2.h"
#include "kernels/quant_matmul/panel_prefetch.h"
#include "kernels/quant_matmul/quant_matmul_impl.h"
#include "kernels/quant_matmul/strip_avx2.h"

namespace thermo {
namespace {

// ---- few rows: one block, R times 8 matrix rows, NC activation rows; codes are unpacked for each use ----

// R: 2 are all 16 matrix rows, 1 is half of them. Block `b`, whose activation codes begin at x.codes.
template <DType T, int R, int NC, bool kAsk>
THERMO_INLINE void multiply_block256(const uint8_t* header, const uint8_t* body, int half, int b,
                                     const Columns<NC>& x, [[maybe_unused]] const uint8_t* limit,
                                     __m256 (*acc)[NC]) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  if constexpr (kAsk) prefetch<64 + f.scale_bytes, NC>(body - 64, half == 0 ? limit : nullptr);
  Scales256<T> scales[R];
  Starts<T> starts[NC];
  const int32_t* first[NC];
  __m256i sum[R][NC];
  THERMO_EACH(i, R) scales[i].read(header, body, half + i);
  unroll<NC>([&](auto c) THERMO_LAMBDA {
    const ActMeta256& meta = meta256(x.meta[c], b);
    first[c] = starts[c].prepare(meta);
    THERMO_EACH(i, R) {
      sum[i][c] = _mm256_setzero_si256();
      if constexpr (Scales256<T>::kFactor != 0)
        sum[i][c] = times_factor<Scales256<T>::kFactor>(scales[i].template sum_dot<false>(meta));
    }
  });
  unroll<8>([&](auto s) THERMO_LAMBDA {
    constexpr int groups = 32 / f.group_cols;
    const uint8_t* sub = body + f.scale_bytes + s * kPanelFormat<T>.sub_bytes() + 32 * half;
    if constexpr (kAsk)
      prefetch<kPanelFormat<T>.sub_bytes(), NC>(sub, R == 2 || s % 2 == half ? limit : nullptr);
    unroll<groups>([&](auto k) THERMO_LAMBDA {
      __m256i scale[R];
      THERMO_EACH(i, R) scale[i] = scales[i].template scale<groups * s + k>();
      dot<T, 8 / groups * k, 8 / groups>(sum, scale, x, s * 32, PackedCodes<T>{sub},
                                         GroupStart<T>{first, groups * s + k});
    });
  });
  unroll<R * NC>([&](auto k) THERMO_LAMBDA {
    constexpr int i = k / NC, c = k % NC;
    const ActMeta256& meta = meta256(x.meta[c], b);
    __m256i min_dot = _mm256_setzero_si256();
    __m256 dmin = _mm256_setzero_ps();
    if constexpr (kPanelFormat<T>.has_min()) {
      min_dot = scales[i].template sum_dot<true>(meta);
      dmin = half8(header + 32 + 16 * (half + i));
    }
    acc[i][c] = add_block256<T>(acc[i][c], sum[i][c], half8(header + 16 * (half + i)), dmin, min_dot, meta.d);
  });
}

template <DType T, int R, int NC, bool kAsk>
THERMO_INLINE void multiply_block32(const uint8_t* header, const uint8_t* body, int half, int b,
                                    const Columns<NC>& x, [[maybe_unused]] const uint8_t* limit,
                                    __m256 (*acc)[NC]) {
  if constexpr (kAsk)
    prefetch<64 + kPanelFormat<T>.body_bytes(), NC>(body - 64, limit);  // with the header before it
  __m256i sum[R][NC];
  dot_block32<T>(sum, x, b, 0, PackedCodes<T>{body + 32 * half});
  THERMO_EACH(i, R) {
    const __m256 scale = block_scale<T>(header, half + i);
    const __m256 min = kPanelFormat<T>.has_min() ? half8(header + 32 + 16 * (half + i)) : _mm256_setzero_ps();
    THERMO_EACH(c, NC) acc[i][c] = add_block32<T>(acc[i][c], sum[i][c], scale, min, meta32(x.meta[c], b));
  }
}

// kAsk: asks for weights up to `limit`. The question alone costs one row a sixth of its speed from cache.
// Of 256 columns each half asks for every other 32: memory is then as busy during the upper half as during
// the lower. Q4_K from memory, one Sapphire Rapids core, 1, 2 and 4 activation rows: 23.6, 42, 65 -> 24.3,
// 45, 76 GMAC/s. Blocks of 32 columns gain nothing by it.
template <DType T, int NC, bool kAsk>
void multiply_panel(const uint8_t* panel, int n_cols, const Columns<NC>& x, const uint8_t* limit,
                    __m256 out[2][NC]) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  constexpr int R = NC == 1 || (kVnni && NC == 2) ? 2 : 1;
  __m256 acc[2][NC];
  unroll<2 * NC>([&](auto i) THERMO_LAMBDA { acc[i / NC][i % NC] = _mm256_setzero_ps(); });
  const int n_blocks = n_cols / f.block_cols;
  const uint8_t* body = panel;
  for (int b0 = 0; b0 < n_blocks; b0 += f.unit_blocks) {
    const uint8_t* header = body;
    body += 64;
    for (int i = 0; i < f.unit_blocks && b0 + i < n_blocks; ++i) {
#pragma GCC unroll 1
      for (int half = 0; half < 2; half += R) {
        // Both halves broadcast the same activations. GCC would keep all of them on the stack, and their
        // places as well: 64 more loads and stores.
        Columns<NC> here = x;
        THERMO_EACH(c, NC) {
          here.codes[c] += (b0 + i) * f.block_cols;
          asm volatile("" : "+r"(here.codes[c])::"memory");
        }
        if constexpr (f.block_cols == 256)
          multiply_block256<T, R, NC, kAsk>(header + i * kPanelFormat<T>.header_step(), body, half, b0 + i,
                                            here, limit, acc + half);
        else
          multiply_block32<T, R, NC, kAsk>(header + i * kPanelFormat<T>.header_step(), body, half, b0 + i,
                                           here, half == 0 ? limit : nullptr, acc + half);
      }
      body += kPanelFormat<T>.body_bytes();
    }
  }
  unroll<2 * NC>([&](auto i) THERMO_LAMBDA { out[i / NC][i % NC] = acc[i / NC][i % NC]; });
}

// ---- driver ----

template <DType T, int NC>
void multiply_columns(const PanelMatmulArgs& a, size_t stride) {
  const uint8_t* const limit = prefetch_limit<NC>(a, stride, true);
  Columns<NC> x;
  for (int c = 0; c < NC; ++c) {
    const Columns<1> row = column<T>(a, c);
    x.codes[c] = row.codes[0];
    x.meta[c] = row.meta[0];
  }
  for (int p = 0; p < a.n_panels; ++p) {
    const uint8_t* panel = reinterpret_cast<const uint8_t*>(a.panels) + static_cast<size_t>(p) * stride;
    __m256 out[2][NC];
    if (NC >= 3 || limit != nullptr)
      multiply_panel<T, NC, true>(panel, a.n_cols, x, limit, out);
    else
      multiply_panel<T, NC, (NC >= 3)>(panel, a.n_cols, x, limit, out);
    for (int c = 0; c < NC; ++c) store_panel(a, p, c, out[0][c], out[1][c]);
  }
}

template <DType T>
void multiply(const PanelMatmulArgs& a) {
  const size_t stride = panel_bytes(T, a.n_cols);
  if (a.n_act > kFewRows) {
    const int passes = (a.n_act + kManyRows - 1) / kManyRows;
    for (int i = 0, t = 0; i < passes; ++i) {
      const int n = a.n_act / passes + (i < a.n_act % passes ? 1 : 0);
      multiply_many<T>(a, stride, t, n, i == 0);
      t += n;
    }
    return;
  }
  unroll<kFewRows>([&](auto n) THERMO_LAMBDA {
    if (a.n_act == n + 1) multiply_columns<T, n + 1>(a, stride);
  });
}

[[maybe_unused]] void multiply_types32(const PanelMatmulArgs& a) {
  switch (a.dtype) {
    case DType::Q4_0:
      return multiply<DType::Q4_0>(a);
    case DType::Q4_1:
      return multiply<DType::Q4_1>(a);
    case DType::Q5_0:
      return multiply<DType::Q5_0>(a);
    case DType::Q5_1:
      return multiply<DType::Q5_1>(a);
    case DType::Q8_0:
      return multiply<DType::Q8_0>(a);
    case DType::IQ4_NL:
      return multiply<DType::IQ4_NL>(a);
    default:
      return multiply<DType::MXFP4>(a);
  }
}

[[maybe_unused]] void multiply_types256(const PanelMatmulArgs& a) {
  switch (a.dtype) {
    case DType::Q2_K:
      return multiply<DType::Q2_K>(a);
    case DType::Q3_K:
      return multiply<DType::Q3_K>(a);
    case DType::Q4_K:
      return multiply<DType::Q4_K>(a);
    case DType::Q5_K:
      return multiply<DType::Q5_K>(a);
    case DType::Q6_K:
      return multiply<DType::Q6_K>(a);
    default:
      return multiply<DType::IQ4_XS>(a);
  }
}

}  // namespace
}  // namespace thermo
