// Plain C++ reading of panels: values and scales of one block. The portable kernel is built on it and the
// tests decode panels with it. Everything has internal linkage, because files of different instruction sets
// include it.
#pragma once

#include <bit>
#include <cstring>

#include "kernels/dequantize/dequantize.h"
#include "kernels/quant_matmul/panel_layout.h"

namespace thermo {
namespace {

// Block b of a panel.
struct BlockPlace {
  const uint8_t* header;  // its part of the unit header
  const uint8_t* body;
};
template <DType T>
BlockPlace find_block(const uint8_t* panel, int b) {
  constexpr PanelFormat f = kPanelFormat<T>;
  const uint8_t* unit = panel + static_cast<size_t>(b / f.unit_blocks) * kPanelFormat<T>.unit_bytes();
  const int i = b % f.unit_blocks;
  return {unit + i * kPanelFormat<T>.header_step(), unit + 64 + i * kPanelFormat<T>.body_bytes()};
}

// Byte n of code vector V_g of a sub-block.
template <int Bits>
int decode_code(const uint8_t* sub, int g, int n) {
  const uint8_t* x = sub + n;  // X_i is x[64 * i]
  const auto bits = [&](int i, int from, int count) { return (x[64 * i] >> from) & ((1 << count) - 1); };
  if constexpr (Bits == 8) return x[64 * g];
  if constexpr (Bits == 4) return bits(g % 4, g < 4 ? 0 : 4, 4);
  if constexpr (Bits == 2) return bits(g / 4, 2 * (g % 4), 2);
  if constexpr (Bits == 6) {
    const int h = 3 * (g / 4);
    if (g % 4 < 3) return bits(h + g % 4, 0, 6);
    return bits(h, 6, 2) | bits(h + 1, 6, 2) << 2 | bits(h + 2, 6, 2) << 4;
  }
  if constexpr (Bits == 5) {
    if (g < 5) return bits(g, 0, 5);
    if (g == 5) return bits(0, 5, 3) | bits(1, 6, 2) << 3;
    if (g == 6) return bits(2, 5, 3) | bits(3, 6, 2) << 3;
    return bits(4, 5, 3) | bits(1, 5, 1) << 3 | bits(3, 5, 1) << 4;
  }
  if (g < 6) return bits(g / 2, 3 * (g % 2), 3);
  return g == 6 ? bits(0, 6, 2) | bits(2, 6, 1) << 2 : bits(1, 6, 2) | bits(2, 7, 1) << 2;
}

// Values (code or table entry, minus the offset) of sub-block s: value[column][row].
template <DType T>
void decode_values(const uint8_t* body, int s, int16_t value[32][16]) {
  constexpr PanelFormat f = kPanelFormat<T>;
  const uint8_t* sub = body + f.scale_bytes + s * kPanelFormat<T>.sub_bytes();
  for (int g = 0; g < 8; ++g) {
    for (int n = 0; n < 64; ++n) {
      int code = decode_code<f.bits>(sub, g, n);
      if constexpr (f.table == CodeTable::Iq4) {
        code = kIq4Values[code];
      } else if constexpr (f.table == CodeTable::Mxfp4) {
        code = kMxfp4Values[code];
      } else if constexpr (f.offset_log2 >= 0) {
        code -= 1 << f.offset_log2;
      }
      value[4 * g + n % 4][n / 4] = static_cast<int16_t>(code);
    }
  }
}

// weight = scale[group][row] * value - min[group][row]
struct BlockScales {
  float scale[16][16];
  float min[16][16];
};

template <DType T>
void decode_scales(BlockPlace place, BlockScales& out) {
  constexpr PanelFormat f = kPanelFormat<T>;
  const auto half = [&](int slot, int r) {
    uint16_t bits;
    std::memcpy(&bits, place.header + 32 * slot + 2 * r, sizeof(bits));
    return f16_to_f32(bits);
  };
  // Six-bit value of row r, group 4 * j + i.
  const auto six = [&](int j, int i, int r) {
    const uint8_t* v = place.body + 4 * r + i;
    if (j < 3) return v[64 * j] & 63;
    return (v[0] >> 6) | (v[64] >> 6) << 2 | (v[128] >> 6) << 4;
  };
  for (int r = 0; r < 16; ++r) {
    if constexpr (f.scales == ScaleKind::Block) {
      out.scale[0][r] = half(0, r);
    } else if constexpr (f.scales == ScaleKind::BlockMin) {
      out.scale[0][r] = half(0, r);
      out.min[0][r] = -half(1, r);
    } else if constexpr (f.scales == ScaleKind::Exponent) {
      const uint32_t e = place.header[r];
      // 2^(e - 128): 2^-128 and 2^-127 are subnormal.
      out.scale[0][r] = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    } else if constexpr (f.scales == ScaleKind::SixSplit) {
      const float d = half(0, r);
      for (int s = 0; s < 8; ++s) {
        const int j = s / 4, n = 4 * r + s % 4;
        const int low = (place.body[n] >> (4 * j)) & 15;
        const int top = (place.header[32 + n % 32] >> (4 * j + (n < 32 ? 0 : 2))) & 3;
        out.scale[s][r] = d * static_cast<float>((low | top << 4) - 32);
      }
    } else {
      const float d = half(0, r);
      for (int g = 0; g < 256 / f.group_cols; ++g) {
        const int j = g / 4, i = g % 4;
        if constexpr (f.scales == ScaleKind::Nibble) {
          const int v = place.body[64 * j + 4 * r + i];
          out.scale[g][r] = d * static_cast<float>(v & 15);
          out.min[g][r] = half(1, r) * static_cast<float>(v >> 4);
        } else if constexpr (f.scales == ScaleKind::SixSigned) {
          out.scale[g][r] = d * static_cast<float>(six(j, i, r) - 32);
        } else if constexpr (f.scales == ScaleKind::SixMin) {
          out.scale[g][r] = d * static_cast<float>(six(j, i, r));
          out.min[g][r] = half(1, r) * static_cast<float>(six(j + 2, i, r));
        } else {
          static_assert(f.scales == ScaleKind::Byte);
          out.scale[g][r] = d * static_cast<float>(static_cast<int8_t>(place.body[64 * j + 4 * r + i]));
        }
      }
    }
  }
}

}  // namespace
}  // namespace thermo
