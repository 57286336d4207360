// Integer tensor cores for up to 8 activation rows: how a warp loads the codes of a panel, lanes and rows as
// in panel_mma.cuh, and the product of 16 columns. Codes go to the tensor core as they are.
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

}  // namespace thermo
