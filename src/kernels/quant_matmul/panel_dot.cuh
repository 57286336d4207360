// How lanes read a panel of 16 weight rows, 256 columns at a time, for 4-way integer dot products: one or two
// activation rows (panel_exact.cuh).
//
// Lane = 4 s + q takes sub-block s (32 columns) of the rows 4q..4q+3: one 16-byte load per code vector, no
// lane needs another's bits, and the scales of a row are bytes of one word. Instructions of a lane for its
// 128 weights of Q4_K: 100 to unpack codes and scales, then 60 for each activation row; a tensor-core tile of
// 8 rows costs 400 to 500 for any number of rows, so at one or two rows instructions would be the bound.
#pragma once

#include "kernels/quant_matmul/panel_mma.cuh"

namespace thermo {

__host__ __device__ constexpr int dot_chunks(int n_cols) {
  return (n_cols + 255) / 256;
}

// Rounds 16 columns, four in each lane of a quad. `inverse`: 127 / top.
__device__ __forceinline__ uint32_t round_codes(float x0, float x1, float x2, float x3, float inverse) {
  const auto byte = [inverse](float x) { return static_cast<uint32_t>(__float2int_rn(x * inverse)) & 255u; };
  return byte(x0) | byte(x1) << 8 | byte(x2) << 16 | byte(x3) << 24;
}

__device__ __forceinline__ uint4 load_stream16(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load16(const uint8_t* p) {
  return __ldg(reinterpret_cast<const uint4*>(p));
}
__device__ __forceinline__ uint32_t part_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
// Half i of four.
__device__ __forceinline__ float half_of(const uint2& v, int i) {
  const uint32_t pair = i < 2 ? v.x : v.y;
  return __half2float(i % 2 == 0 ? __low2half(as_half2(pair)) : __high2half(as_half2(pair)));
}

__host__ __device__ constexpr bool has_dot(DType dtype) {
  return dtype == DType::Q4_K || dtype == DType::Q5_K || dtype == DType::Q6_K || dtype == DType::Q8_0;
}

// What a lane reads of a chunk, loaded before the activations are known.
template <DType T>
struct DotChunk {
  static constexpr PanelFormat f = kPanelFormat<T>;
  uint4 x[f.bits];
  uint4 scale_a, scale_b, scale_c;
  uint2 d, m;

  // kStaged: the whole panel lies in shared memory.
  template <bool kStaged = false>
  __device__ __forceinline__ void load(const uint8_t* panel, int chunk, int n_subs, int lane) {
    if constexpr (f.block_cols == 256) {
      const uint8_t* const unit = panel + static_cast<size_t>(chunk / f.unit_blocks) * f.unit_bytes();
      const int place = chunk % f.unit_blocks;
      load_block<kStaged>(unit + place * f.header_step(), unit + 64 + place * f.body_bytes(), lane);
    } else {
      const int s = lane >> 2, q = lane & 3;
      const int block = chunk * 8 + (s < n_subs ? s : 0);
      const uint8_t* const unit = panel + static_cast<size_t>(block / f.unit_blocks) * f.unit_bytes();
      const int place = block % f.unit_blocks;
      load_codes<kStaged>(unit + 64 + place * f.body_bytes() + 16 * q, unit + place * f.header_step(), q);
    }
  }

  template <bool kStaged>
  __device__ __forceinline__ void load_block(const uint8_t* header, const uint8_t* body, int lane) {
    const int s = lane >> 2, q = lane & 3;
    const uint8_t* const vectors = body + 16 * q;
    const auto vector = [](const uint8_t* p) {
      if constexpr (kStaged) return *reinterpret_cast<const uint4*>(p);
      return load16(p);
    };
    if constexpr (f.scales == ScaleKind::SixMin) {
      scale_a = vector(vectors + 64 * (s / 4));
      scale_b = vector(vectors + 128);
      scale_c = vector(vectors);
    } else {
      static_assert(f.scales == ScaleKind::Byte);
      scale_a = vector(vectors + 64 * (s / 2));
    }
    load_codes<kStaged>(body + f.scale_bytes + s * f.sub_bytes() + 16 * q, header, q);
  }

  template <bool kStaged>
  __device__ __forceinline__ void load_codes(const uint8_t* sub, const uint8_t* header, int q) {
    if constexpr (kStaged && f.bits % 2 == 0) {
      // Sub-blocks lie a multiple of 128 bytes apart: odd ones take each pair of vectors the other way round,
      // so that neighbours read different banks.
      const int odd = (threadIdx.x >> 2) & 1;
#pragma unroll
      for (int i = 0; i < f.bits; i += 2) {
        const uint4 u = *reinterpret_cast<const uint4*>(sub + 64 * (i + odd)),
                    v = *reinterpret_cast<const uint4*>(sub + 64 * (i + 1 - odd));
        x[i] = odd ? v : u;
        x[i + 1] = odd ? u : v;
      }
    } else {
#pragma unroll
      for (int i = 0; i < f.bits; ++i) {
        if constexpr (kStaged)
          x[i] = *reinterpret_cast<const uint4*>(sub + 64 * i);
        else
          x[i] = load_stream16(sub + 64 * i);
      }
    }
    const auto halves = [](const uint8_t* p) {
      if constexpr (kStaged) return *reinterpret_cast<const uint2*>(p);
      return load8(p);
    };
    d = halves(header + 8 * q);
    if constexpr (f.has_min()) m = halves(header + 32 + 8 * q);
  }

  // The codes of row 4q + i: columns 4g.. in [g], 16 + 4g.. in [4 + g], as signed bytes, for 6 bits plus 32.
  __device__ __forceinline__ void unpack(int i, int (&code)[8]) const {
    if constexpr (f.bits == 4) {
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const uint32_t w = part_of(x[g], i);
        code[g] = static_cast<int>(w & 0x0f0f0f0fu);
        code[4 + g] = static_cast<int>((w >> 4) & 0x0f0f0f0fu);
      }
    } else if constexpr (f.bits == 5) {
      const uint32_t w[5] = {part_of(x[0], i), part_of(x[1], i), part_of(x[2], i), part_of(x[3], i),
                             part_of(x[4], i)};
#pragma unroll
      for (int g = 0; g < 5; ++g) code[g] = static_cast<int>(w[g] & 0x1f1f1f1fu);
      code[5] = static_cast<int>(((w[0] >> 5) & 0x07070707u) | ((w[1] >> 3) & 0x18181818u));
      code[6] = static_cast<int>(((w[2] >> 5) & 0x07070707u) | ((w[3] >> 3) & 0x18181818u));
      code[7] = static_cast<int>(((w[4] >> 5) & 0x07070707u) | ((w[1] >> 2) & 0x08080808u) |
                                 ((w[3] >> 1) & 0x10101010u));
    } else if constexpr (f.bits == 6) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t w[3] = {part_of(x[3 * h], i), part_of(x[3 * h + 1], i), part_of(x[3 * h + 2], i)};
#pragma unroll
        for (int g = 0; g < 3; ++g) code[4 * h + g] = static_cast<int>(w[g] & 0x3f3f3f3fu);
        code[4 * h + 3] = static_cast<int>(((w[0] >> 6) & 0x03030303u) | ((w[1] >> 4) & 0x0c0c0c0cu) |
                                           ((w[2] >> 2) & 0x30303030u));
      }
    } else {
#pragma unroll
      for (int g = 0; g < 8; ++g) code[g] = static_cast<int>(part_of(x[g], i) ^ 0x80808080u);
    }
  }

  // The small scales of row 4q + i: of the first 16 columns, of the others, and the minimum.
  __device__ __forceinline__ void small_scales(int i, int s, int& scale0, int& scale1, int& min) const {
    if constexpr (f.scales == ScaleKind::SixMin) {
      const uint32_t t0 = part_of(scale_c, i), t1 = part_of(scale_a, i),
                     t2 = part_of(scale_b, i);  // t1: T_0 for the first four sub-blocks
      const uint32_t mins =
          s < 4 ? t2 & 0x3f3f3f3fu
                : ((t0 >> 6) & 0x03030303u) | ((t1 >> 4) & 0x0c0c0c0cu) | ((t2 >> 2) & 0x30303030u);
      const int shift = 8 * (s & 3);
      scale0 = scale1 = static_cast<int>(t1 >> shift & 63u);
      min = static_cast<int>(mins >> shift & 63u);
    } else if constexpr (f.scales == ScaleKind::Byte) {
      const uint32_t pair = part_of(scale_a, i) >> (16 * (s & 1));
      scale0 = static_cast<int8_t>(pair & 255u);
      scale1 = static_cast<int8_t>((pair >> 8) & 255u);
    }
  }
};

// Sums over the eight lanes of a quarter, spread over them. Half of the values change sides in each step.
// Steps are template arguments: as a loop, sixteen values ended up in memory.
template <int kMask = 4, int kLeft = 0, class V, int N>
__device__ __forceinline__ void scatter_sums(V (&v)[N], int lane) {
  constexpr int n = kLeft == 0 ? N : kLeft;
  if constexpr (n > 1) {
    const bool upper = (lane & kMask) != 0;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const V mine = upper ? v[i + n / 2] : v[i], other = upper ? v[i] : v[i + n / 2];
      v[i] = mine + __shfl_xor_sync(0xffffffffu, other, kMask);
    }
  } else {
    v[0] += __shfl_xor_sync(0xffffffffu, v[0], kMask);
  }
  if constexpr (kMask < 16) scatter_sums<2 * kMask, (n > 1 ? n / 2 : 1)>(v, lane);
}

}  // namespace thermo
