// One panel of 16 weight rows times one activation row, 256 columns at a time, with 4-way integer dot
// products: a decoded token.
//
// Lane = 4 s + q takes sub-block s (32 columns) of the rows 4q..4q+3: one 16-byte load per code vector, no
// lane needs another's bits, and the scales of a row are bytes of one word. The activation is rounded to int8
// per 32 columns, as the CPU kernels do per 32 or 256. 1.3 instructions per weight for Q4_K, against 6 of the
// tensor-core path, whose cost does not depend on the number of rows: at one row instructions, not bytes,
// would be the bound.
#pragma once

#include "kernels/quant_matmul/panel_mma.cuh"

namespace thermo {

// 256 columns of an activation row in shared memory of the warp.
struct DotActs {
  uint32_t codes[8][4][2];  // [sub-block][g][columns 4g.., columns 16 + 4g..]
  int4 meta[8];             // scale (float bits), sum of the first 16 codes, sum of the others
};

// From the f16 form; columns from `n_cols` on count as zeros. `scale`: of the f16 form.
__device__ __forceinline__ void make_dot_acts(const half* row, int chunk, int n_cols, float scale, int lane,
                                              DotActs& out) {
  const int sub = lane >> 2, t = lane & 3;
  uint4 v = {0, 0, 0, 0};
  if (chunk * 256 + sub * 32 < n_cols) v = *reinterpret_cast<const uint4*>(row + chunk * 256 + lane * 8);
  // Stored as 0 2 1 3 (act_place).
  const float2 a = __half22float2(as_half2(v.x)), b = __half22float2(as_half2(v.y)),
               c = __half22float2(as_half2(v.z)), d = __half22float2(as_half2(v.w));
  float top = fmaxf(fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))),
                    fmaxf(fmaxf(fabsf(c.x), fabsf(c.y)), fmaxf(fabsf(d.x), fabsf(d.y))));
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
  const float inverse = top > 0.0f ? __fdividef(127.0f, top) : 0.0f;
  const auto pack = [inverse](float x0, float x1, float x2, float x3) {
    const auto byte = [inverse](float x) {
      return static_cast<uint32_t>(__float2int_rn(x * inverse)) & 255u;
    };
    return byte(x0) | byte(x1) << 8 | byte(x2) << 16 | byte(x3) << 24;
  };
  const uint32_t low = pack(a.x, b.x, a.y, b.y), high = pack(c.x, d.x, c.y, d.y);
  int low_sum = __dp4a(static_cast<int>(low), 0x01010101, 0),
      high_sum = __dp4a(static_cast<int>(high), 0x01010101, 0);
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    low_sum += __shfl_xor_sync(0xffffffffu, low_sum, mask);
    high_sum += __shfl_xor_sync(0xffffffffu, high_sum, mask);
  }
  *reinterpret_cast<uint2*>(out.codes[sub][t]) = {low, high};
  if (t == 0) out.meta[sub] = {__float_as_int(top * (1.0f / 127.0f) * scale), low_sum, high_sum, 0};
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
  uint4 scale0, scale1, scale2;
  uint2 d, m;

  __device__ __forceinline__ void load(const uint8_t* panel, int chunk, int n_subs, int lane) {
    const int s = lane >> 2, q = lane & 3;
    const uint8_t* sub;
    const uint8_t* header;
    if constexpr (f.block_cols == 256) {
      const uint8_t* const unit = panel + static_cast<size_t>(chunk / f.unit_blocks) * f.unit_bytes();
      const int place = chunk % f.unit_blocks;
      const uint8_t* const body = unit + 64 + place * f.body_bytes();
      sub = body + f.scale_bytes + s * f.sub_bytes() + 16 * q;
      header = unit + place * f.header_step();
      const uint8_t* const vectors = body + 16 * q;
      if constexpr (f.scales == ScaleKind::SixMin) {
        scale0 = load16(vectors + 64 * (s / 4));
        scale1 = load16(vectors + 128);
        scale2 = load16(vectors);
      } else {
        static_assert(f.scales == ScaleKind::Byte);
        scale0 = load16(vectors + 64 * (s / 2));
      }
    } else {
      const int block = chunk * 8 + (s < n_subs ? s : 0);
      const uint8_t* const unit = panel + static_cast<size_t>(block / f.unit_blocks) * f.unit_bytes();
      const int place = block % f.unit_blocks;
      sub = unit + 64 + place * f.body_bytes() + 16 * q;
      header = unit + place * f.header_step();
    }
#pragma unroll
    for (int i = 0; i < f.bits; ++i) x[i] = load_stream16(sub + 64 * i);
    d = load8(header + 8 * q);
    if constexpr (f.has_min()) m = load8(header + 32 + 8 * q);
  }

  // acc[i] += row 4q + i. Columns that the matrix does not have are zero in `acts`.
  __device__ __forceinline__ void multiply(const DotActs& acts, int lane, float (&acc)[4]) const {
    const int s = lane >> 2;
    const int4 meta = acts.meta[s];
    const uint4* const words = reinterpret_cast<const uint4*>(acts.codes[s]);
    const uint4 a = words[0], b = words[1];
    const int low[4] = {static_cast<int>(a.x), static_cast<int>(a.z), static_cast<int>(b.x),
                        static_cast<int>(b.z)};
    const int high[4] = {static_cast<int>(a.y), static_cast<int>(a.w), static_cast<int>(b.y),
                         static_cast<int>(b.w)};
    const float scale = __int_as_float(meta.x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (f.bits == 4) {
        int sum = 0;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const uint32_t w = part_of(x[g], i);
          sum = __dp4a(static_cast<int>(w & 0x0f0f0f0fu), low[g], sum);
          sum = __dp4a(static_cast<int>((w >> 4) & 0x0f0f0f0fu), high[g], sum);
        }
        add_min_scaled(sum, meta, scale, s, i, acc);
      } else if constexpr (f.bits == 5) {
        const uint32_t w[5] = {part_of(x[0], i), part_of(x[1], i), part_of(x[2], i), part_of(x[3], i),
                               part_of(x[4], i)};
        int sum = 0;
#pragma unroll
        for (int g = 0; g < 4; ++g) sum = __dp4a(static_cast<int>(w[g] & 0x1f1f1f1fu), low[g], sum);
        sum = __dp4a(static_cast<int>(w[4] & 0x1f1f1f1fu), high[0], sum);
        sum =
            __dp4a(static_cast<int>(((w[0] >> 5) & 0x07070707u) | ((w[1] >> 3) & 0x18181818u)), high[1], sum);
        sum =
            __dp4a(static_cast<int>(((w[2] >> 5) & 0x07070707u) | ((w[3] >> 3) & 0x18181818u)), high[2], sum);
        sum = __dp4a(static_cast<int>(((w[4] >> 5) & 0x07070707u) | ((w[1] >> 2) & 0x08080808u) |
                                      ((w[3] >> 1) & 0x10101010u)),
                     high[3], sum);
        add_min_scaled(sum, meta, scale, s, i, acc);
      } else if constexpr (f.bits == 6) {
        int sums[2] = {-32 * meta.y, -32 * meta.z};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t w[3] = {part_of(x[3 * h], i), part_of(x[3 * h + 1], i), part_of(x[3 * h + 2], i)};
          const int* const act = h == 0 ? low : high;
#pragma unroll
          for (int g = 0; g < 3; ++g) sums[h] = __dp4a(static_cast<int>(w[g] & 0x3f3f3f3fu), act[g], sums[h]);
          const uint32_t last =
              ((w[0] >> 6) & 0x03030303u) | ((w[1] >> 4) & 0x0c0c0c0cu) | ((w[2] >> 2) & 0x30303030u);
          sums[h] = __dp4a(static_cast<int>(last), act[3], sums[h]);
        }
        const uint32_t pair = part_of(scale0, i) >> (16 * (s & 1));
        const int sum =
            sums[0] * static_cast<int8_t>(pair & 255u) + sums[1] * static_cast<int8_t>((pair >> 8) & 255u);
        acc[i] = fmaf(scale * half_of(d, i), static_cast<float>(sum), acc[i]);
      } else {
        int sum = 0;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          sum = __dp4a(static_cast<int>(part_of(x[g], i) ^ 0x80808080u), low[g], sum);
          sum = __dp4a(static_cast<int>(part_of(x[g + 4], i) ^ 0x80808080u), high[g], sum);
        }
        acc[i] = fmaf(scale * half_of(d, i), static_cast<float>(sum), acc[i]);
      }
    }
  }

  __device__ __forceinline__ void add_min_scaled(int sum, const int4& meta, float scale, int s, int i,
                                                 float (&acc)[4]) const {
    const uint32_t t0 = part_of(scale2, i), t1 = part_of(scale0, i),
                   t2 = part_of(scale1, i);  // t1: T_0 for the first four sub-blocks
    const uint32_t mins =
        s < 4 ? t2 & 0x3f3f3f3fu
              : ((t0 >> 6) & 0x03030303u) | ((t1 >> 4) & 0x0c0c0c0cu) | ((t2 >> 2) & 0x30303030u);
    const int shift = 8 * (s & 3);
    const int sc = static_cast<int>(t1 >> shift & 63u), mn = static_cast<int>(mins >> shift & 63u);
    const float down = half_of(m, i) * static_cast<float>(mn * (meta.y + meta.z));
    acc[i] = fmaf(scale, half_of(d, i) * static_cast<float>(sum * sc) - down, acc[i]);
  }
};

}  // namespace thermo
