// Panels times activation rows with the bits of the processor's kernels: experts are computed on both sides
// of the link, and who computes one must not show.
//
// Activations are rounded as there (quant_matmul.h, ActFormat): groups of 256 columns for types with blocks
// of 256, of 32 for the others, by the same operations. The product of a block is an exact integer, from
// which the same three float operations make a value, in the same order for every instruction set:
//
//   value = d * float(sum of scale * dot)                block of 256; of 32: without small scales
//   value = value - float(sum of min * code sums) * dmin      one rounding, where the type has minima
//   y     = y + value * step                                  one rounding; blocks in the order of columns
//
// Lanes share a block's integers, never its floats. What follows a value is a chain over blocks: the warp
// that has all blocks of a panel walks it itself, else values go to shared memory and one thread walks it.
#pragma once

#include "kernels/quant_matmul/panel_mma8.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {

// ---- activations ----

// 256 columns of an activation row: x = step * code.
struct alignas(16) BlockActs {
  uint32_t codes[8][4][2];  // [sub-block][g][columns 4g.., columns 16 + 4g..]
  struct alignas(16) Meta {
    float step;
    int32_t sum0, sum1;  // of the codes of the first and the other 16 columns
    uint32_t sum_bytes;
  } meta[8];  // [sub-block]
  // The same 16 sums as operands of a tensor core, a byte each: sum = low + 64 * high, with the low parts of
  // sums 4j.. in meta[j].sum_bytes and the high ones in meta[4 + j].sum_bytes, j = 0..3.
};
static_assert(sizeof(BlockActs) == kDotChunkBytes);

// The parts of a sum of 16 codes: in the low and the second byte.
__host__ __device__ __forceinline__ uint32_t sum_parts(int sum) {
  return static_cast<uint32_t>(sum & 63) | (static_cast<uint32_t>(sum >> 6) & 255u) << 8;
}

// Columns that share a step.
__host__ __device__ constexpr int act_group_cols(DType weight) {
#define CASE(t) return kPanelFormat<DType::t>.block_cols
  THERMO_FOR_QUANT_TYPE(weight, CASE)
#undef CASE
  return 0;
}

struct ActRounding {
  float inverse, step;
};
// 127 / x and x / 127 as IEEE division gives them, for x from 1e-35 on: without its branch to a subroutine.
__device__ __forceinline__ float divide_127(float x) {
  const float shrink = x > 0x1p64f ? 0x1p-64f : 1.0f;
  const float b = x * shrink;
  float r;
  asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = __fmaf_rn(__fmaf_rn(-b, r, 1.0f), r, r);
  float q = __fmul_rn(127.0f, r);
  q = __fmaf_rn(__fmaf_rn(-b, q, 127.0f), r, q);
  q = __fmaf_rn(__fmaf_rn(-b, q, 127.0f), r, q);
  return q * shrink;
}
__device__ __forceinline__ float divide_by_127(float x) {
  constexpr float kInverse = 1.0f / 127.0f;
  const float q = __fmul_rn(x, kInverse);
  return __fmaf_rn(__fmaf_rn(-127.0f, q, x), kInverse, q);
}
// `top`: the largest |x| as bits, which order NaN above infinity above numbers.
__device__ __forceinline__ ActRounding act_rounding(uint32_t top) {
  const float most = __uint_as_float(top);
  if (top >= 0x7f800000u) return {0.0f, __uint_as_float(0x7fc00000u)};
  if (most < 1e-35f) return {0.0f, 0.0f};  // 127 / most would overflow
  return {divide_127(most), divide_by_127(most)};
}
__device__ __forceinline__ uint32_t abs_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}
__device__ __forceinline__ uint32_t max_bits(float a, float b, float c, float d) {
  return max(max(abs_bits(a), abs_bits(b)), max(abs_bits(c), abs_bits(d)));
}

// One chunk by one warp: lane = 4 sub + t brings columns 4t..4t+3 of its sub-block in `low`, 16+4t.. in
// `high`. kSums: with the sums of codes.
template <int kGroupCols, bool kSums = true>
__device__ __forceinline__ void put_block_acts(float4 low, float4 high, int lane, BlockActs& out) {
  const int sub = lane >> 2, t = lane & 3;
  uint32_t top = max(max_bits(low.x, low.y, low.z, low.w), max_bits(high.x, high.y, high.z, high.w));
  if constexpr (kGroupCols == 256) {
    top = warp_max(top);
  } else {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, mask));
  }
  const ActRounding rounding = act_rounding(top);
  const uint32_t codes0 = round_codes(low.x, low.y, low.z, low.w, rounding.inverse),
                 codes1 = round_codes(high.x, high.y, high.z, high.w, rounding.inverse);
  *reinterpret_cast<uint2*>(out.codes[sub][t]) = {codes0, codes1};
  int sum0 = 0, sum1 = 0;
  uint32_t sum_bytes = 0;
  if constexpr (kSums) {
    sum0 = __dp4a(static_cast<int>(codes0), 0x01010101, 0);
    sum1 = __dp4a(static_cast<int>(codes1), 0x01010101, 0);
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      sum0 += __shfl_xor_sync(0xffffffffu, sum0, mask);
      sum1 += __shfl_xor_sync(0xffffffffu, sum1, mask);
    }
    // Low parts of both sums, then the high ones; of two sub-blocks for the word that this lane stores.
    const uint32_t parts = __byte_perm(sum_parts(sum0), sum_parts(sum1), 0x5140);
    const int from = 8 * (sub & 3);
    const uint32_t even = __shfl_sync(0xffffffffu, parts, from),
                   odd = __shfl_sync(0xffffffffu, parts, from + 4);
    sum_bytes = __byte_perm(even, odd, sub < 4 ? 0x5410 : 0x7632);
  }
  if (t == 0) out.meta[sub] = {rounding.step, sum0, sum1, sum_bytes};
}

// The lane's columns of a chunk of a row, zeros from n_cols on.
struct ActPiece {
  float4 low{0.0f, 0.0f, 0.0f, 0.0f}, high{0.0f, 0.0f, 0.0f, 0.0f};

  static __device__ __forceinline__ int column(int chunk, int lane) {
    return chunk * 256 + (lane >> 2) * 32 + (lane & 3) * 4;
  }
  __device__ __forceinline__ void load(const float* row, int chunk, int n_cols, int lane) {
    const int at = column(chunk, lane);
    if (at >= n_cols) return;
    low = *reinterpret_cast<const float4*>(row + at);
    high = *reinterpret_cast<const float4*>(row + at + 16);
  }
  // From the f16 form; `scale`: of it.
  __device__ __forceinline__ void load_halves(const half* row, int chunk, int n_cols, float scale, int lane) {
    if (column(chunk, lane) >= n_cols) return;
    take_halves(*reinterpret_cast<const uint4*>(row + chunk * 256 + lane * 8), scale);
  }
  __device__ __forceinline__ void take_halves(const uint4& v, float scale) {
    // Stored as 0 2 1 3 (act_place).
    const float2 a = __half22float2(as_half2(v.x)), b = __half22float2(as_half2(v.y)),
                 c = __half22float2(as_half2(v.z)), d = __half22float2(as_half2(v.w));
    low = {a.x * scale, b.x * scale, a.y * scale, b.y * scale};
    high = {c.x * scale, d.x * scale, c.y * scale, d.y * scale};
  }
};

// ---- one or two rows: integer dot products ----

// A lane's sub-block of an activation row.
struct SubCodes {
  uint4 low, high;  // codes[s][0..1], codes[s][2..3]
  int sum0, sum1;

  __device__ __forceinline__ void load(const BlockActs& acts, int s) {
    const uint4* const words = reinterpret_cast<const uint4*>(acts.codes[s]);
    low = words[0];
    high = words[1];
    const BlockActs::Meta meta = acts.meta[s];
    sum0 = meta.sum0;
    sum1 = meta.sum1;
  }
  // Of rows that were rounded without their sums: eight instructions, where a warp that must wait for its own
  // rounding would wait longer.
  template <DType T>
  __device__ __forceinline__ void load_and_sum(const BlockActs& acts, int s) {
    const uint4* const words = reinterpret_cast<const uint4*>(acts.codes[s]);
    low = words[0];
    high = words[1];
    sum0 = sum1 = 0;
    if constexpr (kPanelFormat<T>.has_min() || kPanelFormat<T>.bits == 6) {
      for (const uint32_t x : {low.x, low.z, high.x, high.z})
        sum0 = __dp4a(static_cast<int>(x), 0x01010101, sum0);
      for (const uint32_t x : {low.y, low.w, high.y, high.w})
        sum1 = __dp4a(static_cast<int>(x), 0x01010101, sum1);
    }
  }
};

// Blocks of a chunk of 256 columns.
template <DType T>
inline constexpr int kChunkBlocks = 256 / kPanelFormat<T>.block_cols;

__device__ __forceinline__ float block_value(float d, int sum) {
  return __fmul_rn(d, __int2float_rn(sum));
}
__device__ __forceinline__ float subtract_min(float value, float min, int sum) {
  return __fmaf_rn(-__int2float_rn(sum), min, value);
}

// A chunk's sums of its four rows and kActs activation rows, in the lane's sub-block: with scales, and after
// each the one with minima where the type has them.
template <DType T, int kActs>
inline constexpr int kDotSums = 4 * kActs*(kPanelFormat<T>.has_min() ? 2 : 1);
template <DType T, int kActs>
__device__ __forceinline__ void dot_sums(const DotChunk<T>& data, const SubCodes (&acts)[kActs], int s,
                                         int (&sums)[kDotSums<T, kActs>]) {
  constexpr PanelFormat f = kPanelFormat<T>;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int code[8];
    data.unpack(i, code);
    int scale0 = 1, scale1 = 1, min = 0;
    data.small_scales(i, s, scale0, scale1, min);
#pragma unroll
    for (int a = 0; a < kActs; ++a) {
      const uint4 low = acts[a].low, high = acts[a].high;
      int dot0 = __dp4a(code[0], static_cast<int>(low.x), 0);
      int dot1 = __dp4a(code[4], static_cast<int>(low.y), 0);
      dot0 = __dp4a(code[1], static_cast<int>(low.z), dot0);
      dot1 = __dp4a(code[5], static_cast<int>(low.w), dot1);
      dot0 = __dp4a(code[2], static_cast<int>(high.x), dot0);
      dot1 = __dp4a(code[6], static_cast<int>(high.y), dot1);
      dot0 = __dp4a(code[3], static_cast<int>(high.z), dot0);
      dot1 = __dp4a(code[7], static_cast<int>(high.w), dot1);
      const int at = (a * 4 + i) * (f.has_min() ? 2 : 1);
      if constexpr (f.bits == 6)
        sums[at] = scale0 * (dot0 - 32 * acts[a].sum0) + scale1 * (dot1 - 32 * acts[a].sum1);
      else
        sums[at] = scale0 * (dot0 + dot1);
      if constexpr (f.has_min()) sums[at + 1] = min * (acts[a].sum0 + acts[a].sum1);
    }
  }
}

// One value of a block of 256 columns, in the lane that the sums came to: of activation row `act` and weight
// row `row`, always the same for a lane.
struct LaneValue {
  float value;
  int act, row;
  bool here;
};
template <DType T, int kActs>
__device__ __forceinline__ LaneValue lane_value(const DotChunk<T>& data, int (&sums)[kDotSums<T, kActs>],
                                                int lane) {
  constexpr PanelFormat f = kPanelFormat<T>;
  static_assert(f.block_cols == 256);
  scatter_sums(sums, lane);
  // Which of eight parts: bits of the lane, the lowest of the sub-block first.
  const int b2 = lane >> 4, place = 4 * ((lane >> 2) & 1) + 2 * ((lane >> 3) & 1) + b2;
  constexpr bool kOne = kActs == 1;
  static_assert(kActs == 1 || kActs == 2);
  const int i = kOne ? place >> 1 : place & 3;
  const auto half_at = [](const uint2& v, int n) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>((n < 2 ? v.x : v.y) >> (16 * (n & 1)))));
  };
  float value = block_value(half_at(data.d, i), sums[0]);
  if constexpr (f.has_min()) {
    int min_sum;
    if constexpr (kOne)
      min_sum = __shfl_xor_sync(0xffffffffu, sums[0], 16);
    else
      min_sum = sums[1];
    value = subtract_min(value, half_at(data.m, i), min_sum);
  }
  return {value, kOne ? 0 : place >> 2, 4 * (lane & 3) + i, !kOne || b2 == 0};
}

// Values of a chunk, by the warp that has it: values[(block * kSpread + a) * 16 + row], block of the chunk.
// n_subs: those inside the matrix.
template <DType T, int kActs, int kSpread = kActs>
__device__ __forceinline__ void dot_values(const DotChunk<T>& data, const SubCodes (&acts)[kActs], int n_subs,
                                           int lane, float* values) {
  const int s = lane >> 2, q = lane & 3;
  int sums[kDotSums<T, kActs>];
  dot_sums<T, kActs>(data, acts, s, sums);
  if constexpr (kPanelFormat<T>.block_cols == 256) {
    const LaneValue v = lane_value<T, kActs>(data, sums, lane);
    if (v.here) values[v.act * 16 + v.row] = v.value;
  } else {
    if (s >= n_subs) return;
#pragma unroll
    for (int a = 0; a < kActs; ++a) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = block_value(half_of(data.d, i), sums[a * 4 + i]);
      *reinterpret_cast<float4*>(values + (s * kSpread + a) * 16 + 4 * q) = {v[0], v[1], v[2], v[3]};
    }
  }
}

// y = y + values[b * stride] * steps(b) for b = 0 .. n - 1: reads of eight blocks run together, whatever n
// is.
template <class StepOf>
__device__ __forceinline__ float chain_blocks(const float* values, int stride, int n, const StepOf& step_of) {
  constexpr int kTogether = 8;
  float y = 0.0f;
  for (int begin = 0; begin < n; begin += kTogether) {
    float v[kTogether], step[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      v[i] = step[i] = 0.0f;
      if (begin + i < n) v[i] = values[(begin + i) * stride], step[i] = step_of(begin + i);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (begin + i < n) y = __fmaf_rn(v[i], step[i], y);
  }
  return y;
}

// ---- up to eight rows: integer tensor cores, every type ----

// emit(block of the chunk, value, step of act 2t, of act 2t + 1) for every block of a chunk whose sub-blocks
// go through multiply(), in the order of columns. value[2 * r + i]: row 2g + r, act 2t + i.
template <DType T>
struct MmaBlocks {
  using Batch = SubBatch<T>;
  static constexpr PanelFormat f = kPanelFormat<T>;
  int sums[4] = {}, min_sums[4] = {};

  template <class ActsOf, class Emit>
  __device__ __forceinline__ void multiply(const Batch& batch, int first, int n_subs, int lane,
                                           const ActsOf& acts_of, const Emit& emit) {
    constexpr int kOffset = f.offset_log2 >= 0 ? 1 << f.offset_log2 : 0;
    constexpr bool kHalves = f.group_cols == 16;
    const int g = lane >> 2, t = lane & 3;
    const BlockActs& codes = acts_of(g);
    const BlockActs& left = acts_of(2 * t);
    const BlockActs& right = acts_of(2 * t + 1);
#pragma unroll
    for (int s = 0; s < Batch::kSubs; ++s) {
      if (!Batch::kBig && first + s >= n_subs) break;
      const int sub = first + s;
      const uint2 b = *reinterpret_cast<const uint2*>(codes.codes[sub][t]);
      const BlockActs::Meta meta[2] = {left.meta[sub], right.meta[sub]};
      uint32_t x[2], y[2];
      code_bytes<T>(batch.raw[s], t, x, y);
      // Codes have an offset: the dot product starts at minus offset * (sum of the activation codes).
      const int start0[2] = {-kOffset * meta[0].sum0, -kOffset * meta[1].sum0},
                start1[2] = {-kOffset * meta[0].sum1, -kOffset * meta[1].sum1};
      int c0[4] = {start0[0], start0[1], start0[0], start0[1]},
          c1[4] = {start1[0], start1[1], start1[0], start1[1]};
      mma_int8(c0, x[0], x[1], b.x);
      mma_int8(c1, y[0], y[1], b.y);
      const auto& scales = batch.scales[Batch::kBig ? 0 : s];
      if constexpr (Batch::kBig) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int scale0 = scales.group_scale(row, kHalves ? 2 * sub : sub);
          const int scale1 = kHalves ? scales.group_scale(row, 2 * sub + 1) : scale0;
          const int min0 = f.has_min() ? scales.group_min(row, kHalves ? 2 * sub : sub) : 0;
          const int min1 = f.has_min() && kHalves ? scales.group_min(row, 2 * sub + 1) : min0;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = 2 * row + i;
            if constexpr (kHalves)
              sums[at] += scale0 * c0[at] + scale1 * c1[at];
            else
              sums[at] += scale0 * (c0[at] + c1[at]);
            if constexpr (f.has_min()) min_sums[at] += min0 * meta[i].sum0 + min1 * meta[i].sum1;
          }
        }
      } else {
        float value[4];
#pragma unroll
        for (int at = 0; at < 4; ++at) {
          value[at] = block_value(scales.block_scale(at / 2), c0[at] + c1[at]);
          // Minima are stored with their sign turned here.
          if constexpr (f.has_min())
            value[at] =
                subtract_min(value[at], scales.block_min(at / 2), -(meta[at & 1].sum0 + meta[at & 1].sum1));
        }
        emit(sub, value, meta[0].step, meta[1].step);
      }
    }
    if constexpr (Batch::kBig) {
      if (first + Batch::kSubs < 8) return;
      float value[4];
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        value[at] = block_value(batch.scales[0].block_scale(at / 2), sums[at]);
        if constexpr (f.has_min())
          value[at] = subtract_min(value[at], batch.scales[0].block_min(at / 2), min_sums[at]);
        sums[at] = min_sums[at] = 0;
      }
      emit(0, value, left.meta[0].step, right.meta[0].step);
    }
  }
};

}  // namespace thermo
