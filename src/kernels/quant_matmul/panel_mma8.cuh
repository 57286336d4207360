// One panel of 16 weight rows times up to 8 activation rows in the int8 form (DotActs), on integer tensor
// cores: lanes and rows as in panel_mma.cuh. Codes go to the tensor core as they are; scales and minima are
// applied to the sums of 16 columns in f32:
//
//   sum_c w x = s * step * sum code_w code_x + (min - offset * s) * step * sum code_x
//
// About 480 instructions of a warp for 256 columns of Q4_K, for any number of rows up to 8.
#pragma once

#include "kernels/quant_matmul/panel_dot.cuh"

namespace thermo {

// Some sub-blocks of a chunk of 256 columns, loaded together and multiplied later: what lies between can hide
// the load.
template <DType T>
struct SubBatch {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr bool kBig = f.block_cols == 256;
  static constexpr int kSubs = f.bits == 4 && kBig ? 8 : 4;  // as many as registers allow

  RawCodes raw[kSubs];
  BlockScaleReader<T> scales[kBig ? 1 : kSubs];

  // Sub-blocks first .. first + kSubs - 1 of the chunk. `n_subs`: those inside the matrix, 8 but for the last
  // chunk of a 32-column type.
  __device__ __forceinline__ void load(const uint8_t* panel, int chunk, int first, int n_subs, int lane) {
    const int g = lane >> 2, t = lane & 3;
    if constexpr (kBig) {
      const uint8_t* const unit = panel + static_cast<size_t>(chunk / f.unit_blocks) * f.unit_bytes();
      const int place = chunk % f.unit_blocks;
      const uint8_t* const body = unit + 64 + place * f.body_bytes();
#pragma unroll
      for (int s = 0; s < kSubs; ++s)
        raw[s] = load_codes<T>(body + f.scale_bytes + (first + s) * f.sub_bytes(), g, t);
      if (first == 0) scales[0].load(unit + place * f.header_step(), body, g);
    } else {
#pragma unroll
      for (int s = 0; s < kSubs; ++s) {
        if (first + s >= n_subs) break;
        const int block = chunk * 8 + first + s;
        const uint8_t* const unit = panel + static_cast<size_t>(block / f.unit_blocks) * f.unit_bytes();
        const int place = block % f.unit_blocks;
        const uint8_t* const body = unit + 64 + place * f.body_bytes();
        raw[s] = load_codes<T>(body, g, t);
        scales[s].load(unit + place * f.header_step(), body, g);
      }
    }
  }
};

// c += a * b, 16 columns: bytes of `a` are unsigned, of `b` signed.
__device__ __forceinline__ void mma_int8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(b));
#else
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
               : "+r"(c[0]), "+r"(c[1])
               : "r"(a0), "r"(b));
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
               : "+r"(c[2]), "+r"(c[3])
               : "r"(a1), "r"(b));
#endif
}

// acc += the sub-blocks of `batch` times the activation rows; acts_of(n): row n of 8. acc lies as in
// panel_mma.cuh.
template <DType T, class ActsOf>
__device__ __forceinline__ void multiply_int8(const SubBatch<T>& batch, int first, int n_subs, int lane,
                                              const ActsOf& acts_of, float (&acc)[4]) {
  using Batch = SubBatch<T>;
  constexpr PanelFormat f = kPanelFormat<T>;
  constexpr float kOffset = f.offset_log2 >= 0 ? static_cast<float>(1 << f.offset_log2) : 0.0f;
  constexpr bool kHalves = f.group_cols == 16;
  constexpr int kMagic = 0x4b400000;  // 1.5 * 2^23: sums below 2^22 are read as floats without conversion
  const int g = lane >> 2, t = lane & 3;
  const DotActs& codes = acts_of(g);
  const DotActs& left = acts_of(2 * t);
  const DotActs& right = acts_of(2 * t + 1);
#pragma unroll
  for (int s = 0; s < Batch::kSubs; ++s) {
    if (!Batch::kBig && first + s >= n_subs) break;
    const int sub = first + s;
    const uint2 b = *reinterpret_cast<const uint2*>(codes.codes[sub][t]);
    const float4 meta[2] = {left.meta[sub], right.meta[sub]};
    uint32_t x[2], y[2];
    code_bytes<T>(batch.raw[s], t, x, y);
    int c0[4] = {kMagic, kMagic, kMagic, kMagic}, c1[4] = {kMagic, kMagic, kMagic, kMagic};
    mma_int8(c0, x[0], x[1], b.x);
    mma_int8(c1, y[0], y[1], b.y);
    const auto& scales = batch.scales[Batch::kBig ? 0 : s];
    const int group = Batch::kBig ? (kHalves ? 2 * sub : sub) : 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float scale0, shift0, scale1, shift1;
      scales.get_exact(row, group, scale0, shift0);
      shift0 = fmaf(-kOffset, scale0, shift0);
      if constexpr (kHalves) {
        scales.get_exact(row, group + 1, scale1, shift1);
        shift1 = fmaf(-kOffset, scale1, shift1);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float f0 = __int_as_float(c0[2 * row + i]) - __int_as_float(kMagic),
                    f1 = __int_as_float(c1[2 * row + i]) - __int_as_float(kMagic);
        float& sum = acc[2 * row + i];
        if constexpr (kHalves) {
          sum = fmaf(scale0, meta[i].x * f0, sum);
          sum = fmaf(scale1, meta[i].y * f1, sum);
          sum = fmaf(shift0, meta[i].z, sum);
          sum = fmaf(shift1, meta[i].w, sum);
        } else {
          sum = fmaf(scale0, fmaf(meta[i].x, f0, meta[i].y * f1), sum);
          if constexpr (f.has_min() || f.offset_log2 >= 0) sum = fmaf(shift0, meta[i].z + meta[i].w, sum);
        }
      }
    }
  }
}

}  // namespace thermo
