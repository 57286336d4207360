// Panels without tensor cores: columns of float weights, single values of every type, and the choice of a
// type.
#pragma once

#include "kernels/quant_matmul/panel_mma.cuh"

namespace thermo {

// ---- float weights ----

// Rows 4q..4q+3 of one column, q = 0..3.
template <DType T>
__device__ __forceinline__ float4 load_column(const uint8_t* panel, int column, int q) {
  if constexpr (T == DType::F32) {
    return __ldg(reinterpret_cast<const float4*>(panel + static_cast<size_t>(column) * 64 + 16 * q));
  } else {
    const uint2 v = load8(panel + static_cast<size_t>(column) * 32 + 8 * q);
    if constexpr (T == DType::F16) {
      const float2 a = __half22float2(as_half2(v.x)), b = __half22float2(as_half2(v.y));
      return {a.x, a.y, b.x, b.y};
    } else {
      return {__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
              __uint_as_float(v.y & 0xffff0000u)};
    }
  }
}

// acc[a][0..3] += rows 4q..4q+3 of columns begin + lane/4, + 8, ... < end, times activation row a; q = lane
// % 4. Sums of the eight lanes with one q make the result: finish_columns().
template <DType T, int kActs, class LoadX>
__device__ __forceinline__ void multiply_columns(const uint8_t* panel, int begin, int end, int lane,
                                                 const LoadX& load_x, float (&acc)[kActs][4]) {
  const int q = lane & 3;
#pragma unroll 4
  for (int c = begin + (lane >> 2); c < end; c += 8) {
    const float4 w = load_column<T>(panel, c, q);
#pragma unroll
    for (int a = 0; a < kActs; ++a) {
      const float x = load_x(a, c);
      acc[a][0] = fmaf(w.x, x, acc[a][0]);
      acc[a][1] = fmaf(w.y, x, acc[a][1]);
      acc[a][2] = fmaf(w.z, x, acc[a][2]);
      acc[a][3] = fmaf(w.w, x, acc[a][3]);
    }
  }
}

template <int kActs>
__device__ __forceinline__ void finish_columns(float (&acc)[kActs][4]) {
#pragma unroll
  for (int a = 0; a < kActs; ++a)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) acc[a][i] += __shfl_xor_sync(0xffffffffu, acc[a][i], mask);
}

// ---- single values: embedding rows ----

// Byte n of code vector V_g of a sub-block.
template <int kBits>
__device__ int single_code(const uint8_t* sub, int g, int n) {
  const auto bits = [&](int i, int from, int count) {
    return (sub[64 * i + n] >> from) & ((1 << count) - 1);
  };
  if constexpr (kBits == 8) return sub[64 * g + n];
  if constexpr (kBits == 4) return bits(g % 4, g < 4 ? 0 : 4, 4);
  if constexpr (kBits == 2) return bits(g / 4, 2 * (g % 4), 2);
  if constexpr (kBits == 6) {
    const int h = 3 * (g / 4);
    return g % 4 < 3 ? bits(h + g % 4, 0, 6)
                     : bits(h, 6, 2) | bits(h + 1, 6, 2) << 2 | bits(h + 2, 6, 2) << 4;
  }
  if constexpr (kBits == 5) {
    if (g < 5) return bits(g, 0, 5);
    if (g == 5) return bits(0, 5, 3) | bits(1, 6, 2) << 3;
    if (g == 6) return bits(2, 5, 3) | bits(3, 6, 2) << 3;
    return bits(4, 5, 3) | bits(1, 5, 1) << 3 | bits(3, 5, 1) << 4;
  }
  if (g < 6) return bits(g / 2, 3 * (g % 2), 3);
  return g == 6 ? bits(0, 6, 2) | bits(2, 6, 1) << 2 : bits(1, 6, 2) | bits(2, 7, 1) << 2;
}

template <DType T>
__device__ float panel_value(const uint8_t* panel, int row, int column) {
  if constexpr (is_float_type(T)) {
    const float4 v = load_column<T>(panel, column, row / 4);
    return row % 4 == 0 ? v.x : row % 4 == 1 ? v.y : row % 4 == 2 ? v.z : v.w;
  } else {
    constexpr PanelFormat f = kPanelFormat<T>;
    const int block = column / f.block_cols, in_block = column % f.block_cols, sub = in_block / 32,
              in_sub = in_block % 32;
    const uint8_t* const unit = panel + static_cast<size_t>(block / f.unit_blocks) * f.unit_bytes();
    const int place = block % f.unit_blocks;
    const uint8_t* const body = unit + 64 + place * f.body_bytes();
    const int code =
        single_code<f.bits>(body + f.scale_bytes + sub * f.sub_bytes(), in_sub / 4, 4 * row + in_sub % 4);
    int value = code;
    if constexpr (f.table != CodeTable::None)
      value = static_cast<int>(look_up<f.table, 1 << f.offset_log2>(static_cast<uint32_t>(code)) & 255u) -
              (1 << f.offset_log2);
    if constexpr (f.table == CodeTable::None && f.offset_log2 >= 0) value -= 1 << f.offset_log2;
    BlockScaleReader<T> scales;
    scales.load(unit + place * f.header_step(), body, row / 2);
    float scale, shift = 0.0f;
    scales.get_exact(row & 1, in_block / f.group_cols, scale, shift);
    return fmaf(static_cast<float>(value), scale, shift);
  }
}

// Calls body.template operator()<T>() for the weight type. Every path is instantiated.
template <class Body>
__device__ __forceinline__ void for_quant_type(DType dtype, const Body& body) {
#define CASE(t)                           \
  {                                       \
    body.template operator()<DType::t>(); \
    break;                                \
  }
  THERMO_FOR_QUANT_TYPE(dtype, CASE)
#undef CASE
}

template <class Body>
__device__ __forceinline__ void for_float_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::F32:
      body.template operator()<DType::F32>();
      break;
    case DType::F16:
      body.template operator()<DType::F16>();
      break;
    case DType::BF16:
      body.template operator()<DType::BF16>();
      break;
    default:
      break;
  }
}

}  // namespace thermo
