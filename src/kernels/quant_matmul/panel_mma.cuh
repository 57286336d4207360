// One panel of 16 weight rows times up to 8 * NT8 activation rows, 256 columns at a time, on tensor cores.
//
// A warp owns a panel. Lane = 4 g + t takes the rows 2g and 2g + 1 and, of every 32 columns, 4t..4t+3 and
// 16+4t..16+4t+3: exactly one 8-byte load per bit plane, and exactly what lane (g, t) of mma.m16n8k16 holds
// of the A operand once the mma's rows g and g + 8 are read as panel rows 2g and 2g + 1 and its k index as
// the order of act_place(). So weights go from memory to the tensor core through registers only: bytes are
// unpacked, turned into halves by placing them under the exponent of 1024, and scaled with one fused
// multiply-add. 2.7 instructions per weight for Q4_K, for any number of activation rows up to the tile.
//
// The result lies as the mma leaves it: acc[n][0..3] = (row 2g, act 8n + 2t), (2g, 8n + 2t + 1), (2g + 1, 8n
// + 2t), (2g + 1, ...).
//
// Rounding: codes and 6-bit scales are exact in f16, d * scale and the weight are rounded once each to 11
// bits, sums are f32.
#pragma once

#include <cuda_fp16.h>

#include "kernels/linear/device_matrix.h"
#include "kernels/quant_matmul/panel_layout.h"

namespace thermo {

// Where column c of an activation row lies in the f16 form.
__host__ __device__ constexpr int act_place(int c) {
  const int in = c & 31;
  const int t = (in & 15) >> 2, step = in >> 4, i = in & 3;
  return (c & ~31) + t * 8 + step * 4 + ((i & 1) << 1 | i >> 1);
}

__device__ __forceinline__ uint2 load_stream8(const uint8_t* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load8(const uint8_t* p) {
  return __ldg(reinterpret_cast<const uint2*>(p));
}
__device__ __forceinline__ uint32_t load4(const uint8_t* p) {
  return __ldg(reinterpret_cast<const uint32_t*>(p));
}

__device__ __forceinline__ half2 as_half2(uint32_t x) {
  return *reinterpret_cast<half2*>(&x);
}
__device__ __forceinline__ uint32_t as_bits(half2 x) {
  return *reinterpret_cast<uint32_t*>(&x);
}
// Half `i` of a pair, twice.
__device__ __forceinline__ half2 both(uint32_t pair, int i) {
  return as_half2(__byte_perm(pair, 0, i == 0 ? 0x1010 : 0x3232));
}
// Byte i of a word as a half, twice, minus `offset` (at most 1023; exact).
__device__ __forceinline__ half2 byte_both(uint32_t word, int i, int offset) {
  const uint32_t bits = __byte_perm(word, 0x64646464u, 0x4040u + 0x0101u * static_cast<uint32_t>(i));
  return __hsub2(as_half2(bits),
                 __half2half2(__ushort_as_half(static_cast<unsigned short>(0x6400 + offset))));
}

__device__ __forceinline__ void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// ---- codes ----

// The vectors of one sub-block that a lane reads. Codes of 5 and 6 bits are spread over their neighbours'
// spare bits: what a lane of the quad misses comes from the others by shuffles.
struct RawCodes {
  uint2 p, q, r;
};

template <DType T>
__device__ __forceinline__ RawCodes load_codes(const uint8_t* sub, int g, int t) {
  constexpr int kBits = kPanelFormat<T>.bits;
  RawCodes raw{};
  const uint8_t* const x = sub + 8 * g;  // X_i is at x + 64 i
  if constexpr (kBits == 4) {
    raw.p = load_stream8(x + 64 * t);
  } else if constexpr (kBits == 8) {
    raw.p = load_stream8(x + 64 * t);
    raw.q = load_stream8(x + 64 * t + 256);
  } else if constexpr (kBits == 2) {
    raw.p = load_stream8(x);
    raw.q = load_stream8(x + 64);
  } else if constexpr (kBits == 6) {
    if (t < 3) {
      raw.p = load_stream8(x + 64 * t);
      raw.q = load_stream8(x + 64 * t + 192);
    }
  } else if constexpr (kBits == 5) {
    raw.p = load_stream8(x + 64 * t);
    if (t == 0 || t == 3) raw.q = load_stream8(x + 256);
  } else {
    static_assert(kBits == 3);
    raw.p = load_stream8(x + 64 * (t / 2));
    raw.q = load_stream8(x + 64 * (t % 2));
    raw.r = load_stream8(x + 128);
  }
  return raw;
}

// value + 2^offset of four 4-bit codes through a table, as bytes.
template <CodeTable kTable, int kOffset>
__device__ __forceinline__ uint32_t look_up(uint32_t codes) {
  constexpr auto entry = [](int i) {
    return static_cast<uint32_t>((kTable == CodeTable::Iq4 ? kIq4Values[i] : kMxfp4Values[i]) + kOffset) &
           255u;
  };
  constexpr auto word = [entry](int i) {
    return entry(i) | entry(i + 1) << 8 | entry(i + 2) << 16 | entry(i + 3) << 24;
  };
  constexpr uint32_t w0 = word(0), w1 = word(4), w2 = word(8), w3 = word(12);
  const uint32_t pairs = codes | codes >> 4;
  const uint32_t selector = __byte_perm(pairs, 0, 0x4420) & 0x7777u;
  const uint32_t below = __byte_perm(w0, w1, selector), above = __byte_perm(w2, w3, selector);
  const uint32_t mask = ((codes >> 3) & 0x01010101u) * 255u;
  return (below & ~mask) | (above & mask);
}

// The codes of the lane's two rows as bytes: columns 4t.. in x, 16+4t.. in y. All lanes of the warp take
// part.
template <DType T>
__device__ __forceinline__ void code_bytes(const RawCodes& raw, int t, uint32_t (&x)[2], uint32_t (&y)[2]) {
  constexpr PanelFormat f = kPanelFormat<T>;
  const uint32_t p[2] = {raw.p.x, raw.p.y}, q[2] = {raw.q.x, raw.q.y}, r[2] = {raw.r.x, raw.r.y};
  if constexpr (f.bits == 6) {
    // Lane 3 gathers the top bits of its neighbours: both rows and both halves of a lane fit into one word.
    const uint32_t tops = ((p[0] >> 6) & 0x03030303u) | ((p[1] >> 4) & 0x0c0c0c0cu) |
                          ((q[0] >> 2) & 0x30303030u) | (q[1] & 0xc0c0c0c0u);
    const uint32_t a = __shfl_sync(0xffffffffu, tops, 0, 4), b = __shfl_sync(0xffffffffu, tops, 1, 4),
                   c = __shfl_sync(0xffffffffu, tops, 2, 4);
    const bool gathers = t == 3;
    x[0] = gathers ? (a & 0x03030303u) | (b & 0x03030303u) << 2 | (c & 0x03030303u) << 4 : p[0] & 0x3f3f3f3fu;
    x[1] =
        gathers ? ((a >> 2) & 0x03030303u) | (b & 0x0c0c0c0cu) | (c & 0x0c0c0c0cu) << 2 : p[1] & 0x3f3f3f3fu;
    y[0] = gathers ? ((a >> 4) & 0x03030303u) | ((b >> 2) & 0x0c0c0c0cu) | (c & 0x30303030u)
                   : q[0] & 0x3f3f3f3fu;
    y[1] = gathers ? ((a >> 6) & 0x03030303u) | ((b >> 4) & 0x0c0c0c0cu) | ((c >> 2) & 0x30303030u)
                   : q[1] & 0x3f3f3f3fu;
  } else {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if constexpr (f.bits == 4) {
        x[row] = p[row] & 0x0f0f0f0fu;
        y[row] = (p[row] >> 4) & 0x0f0f0f0fu;
      } else if constexpr (f.bits == 8) {
        x[row] = p[row];
        y[row] = q[row];
      } else if constexpr (f.bits == 2) {
        x[row] = (p[row] >> (2 * t)) & 0x03030303u;
        y[row] = (q[row] >> (2 * t)) & 0x03030303u;
      } else if constexpr (f.bits == 5) {
        // V_5 lies in X_0 and X_1, V_6 in X_2 and X_3, V_7 in X_4, X_1 and X_3.
        const uint32_t other = __shfl_sync(0xffffffffu, p[row], t == 1 ? 0 : t == 2 ? 3 : 1, 4);
        x[row] = p[row] & 0x1f1f1f1fu;
        const uint32_t low = t == 1 ? other : t == 2 ? p[row] : q[row];
        const uint32_t high = t == 1 ? p[row] : other;
        const uint32_t top =
            t == 3 ? ((other >> 2) & 0x08080808u) | ((p[row] >> 1) & 0x10101010u) : (high >> 3) & 0x18181818u;
        y[row] = t == 0 ? q[row] & 0x1f1f1f1fu : ((low >> 5) & 0x07070707u) | top;
      } else {
        x[row] = (p[row] >> (3 * (t % 2))) & 0x07070707u;
        y[row] = t < 2 ? (r[row] >> (3 * t)) & 0x07070707u
                       : ((q[row] >> 6) & 0x03030303u) | ((t == 2 ? r[row] >> 4 : r[row] >> 5) & 0x04040404u);
      }
    }
  }
  if constexpr (f.table != CodeTable::None) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      x[row] = look_up<f.table, 1 << f.offset_log2>(x[row]);
      y[row] = look_up<f.table, 1 << f.offset_log2>(y[row]);
    }
  }
}

// ---- scales ----

// 2^(e - 128): 2^-128 and 2^-127 are subnormal.
__device__ __forceinline__ float exponent_scale(uint32_t e) {
  return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

template <DType T>
struct BlockScaleReader {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr bool kSmall = f.block_cols == 256;

  uint32_t d = 0, m = 0;  // f16 of the lane's two rows; of MXFP4, `m` has the exponents as they are stored
  uint2 small[4] = {};    // scale vectors of the two rows
  int top_shift = 0;

  // `word4`, `word8`: how memory is read.
  template <class Word4, class Word8>
  __device__ __forceinline__ void load_with(const uint8_t* header, const uint8_t* body, int g,
                                            const Word4& word4, const Word8& word8) {
    if constexpr (f.scales == ScaleKind::Exponent) {
      const uint32_t e = *reinterpret_cast<const uint16_t*>(header + 2 * g);
      // 2^(e - 128) as f16; what f16 cannot hold becomes its nearest power of two.
      const auto power = [](uint32_t exponent) -> uint32_t {
        const int p = static_cast<int>(exponent) - 128;
        return p >= -14 ? static_cast<uint32_t>(min(p, 15) + 15) << 10 : (p >= -24 ? 1u << (p + 24) : 0u);
      };
      d = power(e & 255) | power(e >> 8) << 16;
      m = e;
      return;
    } else {
      d = word4(header + 4 * g);
    }
    if constexpr (f.has_min()) m = word4(header + 32 + 4 * g);
    if constexpr (f.scales == ScaleKind::SixSplit) {
      small[0] = word8(body + 8 * g);
      small[1] = word8(header + 32 + 8 * (g & 3));
      top_shift = g < 4 ? 0 : 2;
    } else if constexpr (kSmall) {
#pragma unroll
      for (int j = 0; j < f.scale_bytes / 64; ++j) small[j] = word8(body + 64 * j + 8 * g);
    }
  }

  __device__ __forceinline__ void load(const uint8_t* header, const uint8_t* body, int g) {
    load_with(
        header, body, g, [](const uint8_t* p) { return load4(p); },
        [](const uint8_t* p) { return load8(p); });
  }
  __device__ __forceinline__ void load_staged(const uint8_t* header, const uint8_t* body, int g) {
    load_with(
        header, body, g, [](const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); },
        [](const uint8_t* p) { return *reinterpret_cast<const uint2*>(p); });
  }

  static constexpr int kScaleOffset = f.scales == ScaleKind::Byte ? 128
                                      : (f.scales == ScaleKind::SixSigned || f.scales == ScaleKind::SixSplit)
                                          ? 32
                                          : 0;

  __device__ __forceinline__ uint32_t part(int j, int row) const {
    return row == 0 ? small[j].x : small[j].y;
  }
  // Six-bit words: vector 3 lies in the top bits of the others.
  __device__ __forceinline__ uint32_t six(int j, int row) const {
    if (j < 3) return part(j, row) & 0x3f3f3f3fu;
    return ((part(0, row) >> 6) & 0x03030303u) | ((part(1, row) >> 4) & 0x0c0c0c0cu) |
           ((part(2, row) >> 2) & 0x30303030u);
  }
  __device__ __forceinline__ uint32_t scale_word(int j, int row) const {
    if constexpr (f.scales == ScaleKind::SixMin || f.scales == ScaleKind::SixSigned) return six(j, row);
    if constexpr (f.scales == ScaleKind::Byte) return part(j, row) ^ 0x80808080u;
    if constexpr (f.scales == ScaleKind::Nibble) return part(j, row) & 0x0f0f0f0fu;
    if constexpr (f.scales == ScaleKind::SixSplit)
      return ((part(0, row) >> (4 * j)) & 0x0f0f0f0fu) | ((part(1, row) >> (4 * j + top_shift)) & 0x03030303u)
                                                             << 4;
    return 0;
  }
  __device__ __forceinline__ uint32_t min_word(int j, int row) const {
    if constexpr (f.scales == ScaleKind::SixMin) return six(j + 2, row);
    if constexpr (f.scales == ScaleKind::Nibble) return (part(j, row) >> 4) & 0x0f0f0f0fu;
    return 0;
  }

  // weight = value * scale + shift for group `group` of the block.
  __device__ __forceinline__ void get(int row, int group, half2& scale, half2& shift) const {
    if constexpr (!kSmall) {
      scale = both(d, row);
      if constexpr (f.has_min()) shift = both(m, row);
    } else {
      const uint32_t words = scale_word(group / 4, row);
      scale = __hmul2(both(d, row), byte_both(words, group % 4, kScaleOffset));
      if constexpr (f.has_min())
        shift = __hmul2(__hneg2(both(m, row)), byte_both(min_word(group / 4, row), group % 4, 0));
    }
  }

  // The block's own scale and minimum.
  __device__ __forceinline__ float block_scale(int row) const {
    if constexpr (f.scales == ScaleKind::Exponent) return exponent_scale(m >> (8 * row) & 255u);
    return __half2float(__low2half(both(d, row)));
  }
  __device__ __forceinline__ float block_min(int row) const {
    return f.has_min() ? __half2float(__low2half(both(m, row))) : 0.0f;
  }
  // The small scale and minimum of a group, as integers.
  __device__ __forceinline__ int group_scale(int row, int group) const {
    return static_cast<int>(scale_word(group / 4, row) >> (8 * (group % 4)) & 255u) - kScaleOffset;
  }
  __device__ __forceinline__ int group_min(int row, int group) const {
    return static_cast<int>(min_word(group / 4, row) >> (8 * (group % 4)) & 255u);
  }

  // As get(), without rounding to f16.
  __device__ void get_exact(int row, int group, float& scale, float& shift) const {
    if constexpr (!kSmall) {
      scale = block_scale(row);
      shift = block_min(row);
    } else {
      scale = block_scale(row) * static_cast<float>(group_scale(row, group));
      shift = f.has_min() ? -block_min(row) * static_cast<float>(group_min(row, group)) : 0.0f;
    }
  }
};

// ---- the product ----

// The A operands of both 16-column steps of one sub-block.
template <DType T, class Scales>
__device__ __forceinline__ void make_operands(const RawCodes& raw, const Scales& scales, int sub_in_block,
                                              int t, uint32_t (&a0)[4], uint32_t (&a1)[4]) {
  constexpr PanelFormat f = kPanelFormat<T>;
  constexpr int kOffset = f.offset_log2 >= 0 ? 1 << f.offset_log2 : 0;
  constexpr bool kHasMin = f.has_min();
  const half2 base = __half2half2(__ushort_as_half(static_cast<unsigned short>(0x6400 + kOffset)));
  uint32_t x[2], y[2];
  code_bytes<T>(raw, t, x, y);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    half2 scale0, scale1, shift0, shift1;
    if constexpr (f.group_cols == 16) {
      scales.get(row, 2 * sub_in_block, scale0, shift0);
      scales.get(row, 2 * sub_in_block + 1, scale1, shift1);
    } else {
      scales.get(row, sub_in_block, scale0, shift0);
      scale1 = scale0;
      shift1 = shift0;
    }
    const auto weight = [&](uint32_t word, uint32_t selector, half2 scale, half2 shift) {
      const half2 value = __hsub2(as_half2(__byte_perm(word, 0x64646464u, selector)), base);
      if constexpr (kHasMin) return as_bits(__hfma2(value, scale, shift));
      return as_bits(__hmul2(value, scale));
    };
    a0[row] = weight(x[row], 0x4240, scale0, shift0);
    a0[row + 2] = weight(x[row], 0x4341, scale0, shift0);
    a1[row] = weight(y[row], 0x4240, scale1, shift1);
    a1[row + 2] = weight(y[row], 0x4341, scale1, shift1);
  }
}

// ---- a chunk that lies in shared memory: header, then body ----

// The same product for few activation rows, where instructions per weight decide. Codes go to the tensor core
// as they are, as halves 1024 + code; the scales of the whole chunk are decoded once, by all lanes, into a
// table, and applied to the sums of a group:
//
//   sum_c w x = s * sum (1024 + code) x + b * sum x,      b = -min - (1024 + offset) s
//
// and sum x, for every activation row at once, is the product with a matrix of ones. The cancellation of the
// 1024 costs 7 of the 24 bits of the sum. Loops instead of straight code: a decode step runs this once or
// twice per warp, so instruction fetches count.
template <DType T>
struct StagedChunk {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr bool kBig = f.block_cols == 256;
  static constexpr int kGroups = 256 / f.group_cols;  // of a chunk
  static constexpr float kShift = 1024.0f + (f.offset_log2 >= 0 ? 1 << f.offset_log2 : 0);

  __device__ static __forceinline__ uint2 word(const uint8_t* p) {
    return *reinterpret_cast<const uint2*>(p);
  }
  __device__ static __forceinline__ uint32_t word4(const uint8_t* p) {
    return *reinterpret_cast<const uint32_t*>(p);
  }
  __device__ static __forceinline__ float half_at(const uint8_t* p) {
    return __half2float(*reinterpret_cast<const half*>(p));
  }

  // table[group][row] = (s, b). Lane = 2 row + h takes half of the groups. `place`: which of the blocks of
  // the header.
  __device__ static __forceinline__ void build_table(const uint8_t* chunk, int place, int n_subs, int lane,
                                                     float2* table) {
    const int row = lane >> 1, h = lane & 1;
    float2* const out = table + row + h * (kGroups / 2) * 16;
    const auto put = [&](int i, float s, float min) { out[i * 16] = {s, fmaf(-kShift, s, -min)}; };
    if constexpr (kBig) {
      const uint8_t* const header = chunk + place * f.header_step();
      const uint8_t* const vectors = chunk + 64 + 4 * row;
      const float d = half_at(header + 2 * row);
      const auto six = [&](int j) {
        if (j < 3) return word4(vectors + 64 * j) & 0x3f3f3f3fu;
        return ((word4(vectors) >> 6) & 0x03030303u) | ((word4(vectors + 64) >> 4) & 0x0c0c0c0cu) |
               ((word4(vectors + 128) >> 2) & 0x30303030u);
      };
      const auto byte = [](uint32_t w, int i) { return static_cast<float>((w >> (8 * i)) & 255u); };
      if constexpr (f.scales == ScaleKind::SixMin) {
        const float m = half_at(header + 32 + 2 * row);
        const uint32_t s = six(h), n = six(h + 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) put(i, d * byte(s, i), m * byte(n, i));
      } else if constexpr (f.scales == ScaleKind::SixSplit) {
        const int n = 4 * row;
        const uint32_t low = (word4(vectors) >> (4 * h)) & 0x0f0f0f0fu;
        const uint32_t top = (word4(header + 32 + n % 32) >> (4 * h + (n < 32 ? 0 : 2))) & 0x03030303u;
        const uint32_t s = low | top << 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) put(i, d * (byte(s, i) - 32.0f), 0.0f);
      } else {
        const float m = f.has_min() ? half_at(header + 32 + 2 * row) : 0.0f;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          uint32_t s, n = 0;
          float offset = 0.0f;
          if constexpr (f.scales == ScaleKind::SixSigned) {
            s = six(2 * h + k);
            offset = 32.0f;
          } else {
            s = word4(vectors + 64 * (2 * h + k));
            if constexpr (f.scales == ScaleKind::Nibble) {
              n = (s >> 4) & 0x0f0f0f0fu;
              s &= 0x0f0f0f0fu;
            } else {
              s ^= 0x80808080u;
              offset = 128.0f;
            }
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) put(4 * k + i, d * (byte(s, i) - offset), m * byte(n, i));
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = 4 * h + i;
        if (s >= n_subs) break;
        const uint8_t* const header =
            chunk + s / f.unit_blocks * f.unit_bytes() + s % f.unit_blocks * f.header_step();
        if constexpr (f.scales == ScaleKind::Exponent) {
          const uint32_t e = header[row];
          put(i, exponent_scale(e), 0.0f);
        } else {
          put(i, half_at(header + 2 * row),
              f.scales == ScaleKind::BlockMin ? -half_at(header + 32 + 2 * row) : 0.0f);
        }
      }
    }
  }

  __device__ static __forceinline__ RawCodes codes(const uint8_t* sub, int g, int t) {
    RawCodes raw{};
    const uint8_t* const x = sub + 8 * g;
    if constexpr (f.bits == 4) {
      raw.p = word(x + 64 * t);
    } else if constexpr (f.bits == 8) {
      raw.p = word(x + 64 * t);
      raw.q = word(x + 64 * t + 256);
    } else if constexpr (f.bits == 2) {
      raw.p = word(x);
      raw.q = word(x + 64);
    } else if constexpr (f.bits == 6) {
      raw.p = word(x + 64 * min(t, 2));
      raw.q = word(x + 64 * min(t, 2) + 192);
    } else if constexpr (f.bits == 5) {
      raw.p = word(x + 64 * t);
      raw.q = word(x + 256);
    } else {
      raw.p = word(x + 64 * (t / 2));
      raw.q = word(x + 64 * (t % 2));
      raw.r = word(x + 128);
    }
    return raw;
  }

  // load_b(s, n): the lane's 16 bytes of sub-block s of activation row 8n + g. `n_tiles` of the NT8
  // activation tiles hold rows.
  template <int NT8, class LoadB>
  __device__ static __forceinline__ void multiply(const uint8_t* chunk, const float2* table, int n_subs,
                                                  int n_tiles, int lane, const LoadB& load_b,
                                                  float (&acc)[NT8][4]) {
    const int g = lane >> 2, t = lane & 3;
    constexpr uint32_t kOnes[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll 1
    for (int s = 0; s < n_subs; ++s) {
      const uint8_t* sub;
      if constexpr (kBig)
        sub = chunk + 64 + f.scale_bytes + s * f.sub_bytes();
      else
        sub = chunk + s / f.unit_blocks * f.unit_bytes() + 64 + s % f.unit_blocks * f.body_bytes();
      uint32_t x[2], y[2];
      code_bytes<T>(codes(sub, g, t), t, x, y);
      uint32_t a0[4], a1[4];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        a0[row] = __byte_perm(x[row], 0x64646464u, 0x4240);
        a0[row + 2] = __byte_perm(x[row], 0x64646464u, 0x4341);
        a1[row] = __byte_perm(y[row], 0x64646464u, 0x4240);
        a1[row + 2] = __byte_perm(y[row], 0x64646464u, 0x4341);
      }
      constexpr int kPerSub = 32 / f.group_cols;
      const float4 scale0 = *reinterpret_cast<const float4*>(table + kPerSub * s * 16 + 2 * g);
      const float4 scale1 =
          *reinterpret_cast<const float4*>(table + (kPerSub * s + kPerSub - 1) * 16 + 2 * g);
      const auto apply = [](float(&sum)[4], const float(&c)[4], const float(&ones)[4], const float4& scale) {
        sum[0] = fmaf(scale.x, c[0], fmaf(scale.y, ones[0], sum[0]));
        sum[1] = fmaf(scale.x, c[1], fmaf(scale.y, ones[1], sum[1]));
        sum[2] = fmaf(scale.z, c[2], fmaf(scale.w, ones[0], sum[2]));
        sum[3] = fmaf(scale.z, c[3], fmaf(scale.w, ones[1], sum[3]));
      };
#pragma unroll
      for (int n = 0; n < NT8; ++n) {
        if (NT8 > 1 && n >= n_tiles) break;
        const uint4 b = load_b(s, n);
        float c[4] = {}, ones[4] = {};
        mma_16816(c, a0, b.x, b.y);
        mma_16816(ones, kOnes, b.x, b.y);
        if constexpr (kPerSub == 2) {
          apply(acc[n], c, ones, scale0);
#pragma unroll
          for (int i = 0; i < 4; ++i) c[i] = 0.0f, ones[i] = 0.0f;
        }
        mma_16816(c, a1, b.z, b.w);
        mma_16816(ones, kOnes, b.z, b.w);
        apply(acc[n], c, ones, scale1);
      }
    }
  }
};

}  // namespace thermo
