// How a panel of 16 matrix rows and an activation row lie in memory. One layout for every instruction set.
//
// A code vector V_g (64 bytes) holds the codes of 4 consecutive columns of all 16 rows:
//
//     byte 4*r + i  =  code of row r, column 4*g + i          r = 0..15, i = 0..3
//
// that is one operand of VPDPBUSD, 8 of them are a 32-column sub-block and, stacked, an AMX int8 B tile.
// Codes of b bits take b vectors X_i a sub-block. Bits are placed so that most codes come out with one mask
// and none needs more than three pieces:
//
//     8 bits:  X_i = V_i
//     4 bits:  X_i = V_i | V_{i+4} << 4                                                 i = 0..3
//     2 bits:  X_i = V_{4i} | V_{4i+1} << 2 | V_{4i+2} << 4 | V_{4i+3} << 6             i = 0, 1
//     6 bits:  twice, for V_0..V_3 and V_4..V_7: three vectors hold a code and two bits of the fourth,
//              X_i = V_i | ((V_3 >> 2i) & 3) << 6                                       i = 0..2
//     5 bits:  X_i = V_i | T_i << 5    i = 0..4,  T_0 = V_5 & 7      T_1 = (V_5 >> 3) << 1 | ((V_7 >> 3) & 1)
//                                                 T_2 = V_6 & 7      T_3 = (V_6 >> 3) << 1 | (V_7 >> 4)
//                                                 T_4 = V_7 & 7
//     3 bits:  X_i = V_{2i} | V_{2i+1} << 3 | T_i << 6   i = 0..2,   T_0 = V_6 & 3, T_1 = V_7 & 3,
//                                                                    T_2 = V_6 >> 2 | (V_7 >> 2) << 1
//
// A block (32 or 256 columns) is its small scales, then its sub-blocks. A unit is one 64-byte header with the
// f16 scales of 1, 2 or 4 blocks, then those blocks. A panel is its units, one stream without holes; the last
// unit may hold fewer blocks. Everything starts at a multiple of 64.
//
//     type          header, per block    small scales             codes            bytes
//     Q4_0  IQ4_NL  d f16[16]            -                        4 bits           16 * 18
//     Q4_1          d f16[16] m f16[16]  -                        4 bits           16 * 20
//     Q5_0          d f16[16]            -                        5 bits           16 * 22
//     Q5_1          d f16[16] m f16[16]  -                        5 bits           16 * 24
//     Q8_0          d f16[16]            -                        8 bits, q + 128  16 * 34
//     MXFP4         e u8[16]             -                        4 bits           16 * 17
//     Q2_K          d f16[16] m f16[16]  256: sc | mn << 4        2 bits           16 * 84
//     Q3_K          d f16[16]            192: six-bit sc + 32     3 bits, q + 4    16 * 110
//     Q4_K          d f16[16] m f16[16]  192: six-bit sc, mn      4 bits           16 * 144
//     Q5_K          d f16[16] m f16[16]  192: six-bit sc, mn      5 bits           16 * 176
//     Q6_K          d f16[16]            256: sc int8             6 bits, q + 32   16 * 210
//     IQ4_XS        d f16[16], top bits  64: low 4 bits of ls     4 bits           16 * 136
//
// so no type grows, but for the header of a last, partly filled unit (at most 48 bytes a panel).
//
// Small scales use the order of the codes: scale vector T_j (64 bytes) holds at byte 4*r + i the scale of row
// r, group 4*j + i (a group is 16 or 32 columns). Six-bit scales store four such vectors in three:
//
//     T_0..T_2 = low six bits of the vectors,   T_3 = (top of 0) | (top of 1) << 2 | (top of 2) << 4
//
//     Q4_K Q5_K: T_0, T_1 = sc[0..7], T_2, T_3 = mn[0..7].   Q3_K: T_0..T_3 = sc[0..15] + 32.
//     IQ4_XS: T_0 (ls[0..3]) in the low nibbles and T_1 (ls[4..7]) in the high nibbles of the 64 bytes;
//     header byte 32 + n has the top two bits: 0-1 of T_0[n], 2-3 of T_0[32 + n], 4-5 of T_1[n], 6-7 of
//     T_1[32 + n].
//
// Float weights: [column][16 rows] of the element type, the panel padded to 64 bytes.
//
// This header is read by files compiled for different instruction sets, so it holds constants and consteval
// functions only: an inline function compiled with AVX-512 could be the copy the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace thermo {

// How the scales of a type are stored.
enum class ScaleKind : uint8_t {
  Block,      // one f16 per block: Q4_0 Q5_0 Q8_0 IQ4_NL
  BlockMin,   // f16 scale and f16 minimum per block: Q4_1 Q5_1
  Exponent,   // a power of two per block: MXFP4
  Nibble,     // Q2_K
  SixSigned,  // Q3_K
  SixMin,     // Q4_K Q5_K
  Byte,       // Q6_K
  SixSplit,   // IQ4_XS
};

enum class CodeTable : uint8_t { None, Iq4, Mxfp4 };

struct PanelFormat {
  int block_cols;   // 32 or 256
  int unit_blocks;  // blocks that share a 64-byte header
  ScaleKind scales;
  int scale_bytes;  // small scales of one block
  int group_cols;   // columns that share a small scale: 16 or 32
  int bits;         // of a code: 2, 3, 4, 5, 6 or 8
  int offset_log2;  // value = code - 2^offset_log2; -1: no offset
  CodeTable table;  // value = table[code] - 2^offset_log2

  // Called on kPanelFormat<T> itself: clang 14 does not see that a constant of a template is one.
  consteval int subs() const { return block_cols / 32; }
  consteval int sub_bytes() const { return 64 * bits; }
  consteval int body_bytes() const { return scale_bytes + subs() * sub_bytes(); }
  consteval int unit_bytes() const { return 64 + unit_blocks * body_bytes(); }
  consteval int header_step() const { return 64 / unit_blocks; }
  consteval bool has_min() const {
    return scales == ScaleKind::BlockMin || scales == ScaleKind::Nibble || scales == ScaleKind::SixMin;
  }
};

// clang-format off
template <DType T> inline constexpr PanelFormat kPanelFormat{};
//                                                            cols unit  scales              bytes group bits offset table
template <> inline constexpr PanelFormat kPanelFormat<DType::Q4_0>  {32, 2, ScaleKind::Block,       0, 32, 4, 3, CodeTable::None};
template <> inline constexpr PanelFormat kPanelFormat<DType::Q4_1>  {32, 1, ScaleKind::BlockMin,    0, 32, 4, -1, CodeTable::None};
template <> inline constexpr PanelFormat kPanelFormat<DType::Q5_0>  {32, 2, ScaleKind::Block,       0, 32, 5, 4, CodeTable::None};
template <> inline constexpr PanelFormat kPanelFormat<DType::Q5_1>  {32, 1, ScaleKind::BlockMin,    0, 32, 5, -1, CodeTable::None};
template <> inline constexpr PanelFormat kPanelFormat<DType::Q8_0>  {32, 2, ScaleKind::Block,       0, 32, 8, 7, CodeTable::None};
template <> inline constexpr PanelFormat kPanelFormat<DType::IQ4_NL>{32, 2, ScaleKind::Block,       0, 32, 4, 7, CodeTable::Iq4};
template <> inline constexpr PanelFormat kPanelFormat<DType::MXFP4> {32, 4, ScaleKind::Exponent,    0, 32, 4, 4, CodeTable::Mxfp4};
template <> inline constexpr PanelFormat kPanelFormat<DType::Q2_K>  {256, 1, ScaleKind::Nibble,   256, 16, 2, -1, CodeTable::None};
template <> inline constexpr PanelFormat kPanelFormat<DType::Q3_K>  {256, 2, ScaleKind::SixSigned,192, 16, 3, 2, CodeTable::None};
template <> inline constexpr PanelFormat kPanelFormat<DType::Q4_K>  {256, 1, ScaleKind::SixMin,   192, 32, 4, -1, CodeTable::None};
template <> inline constexpr PanelFormat kPanelFormat<DType::Q5_K>  {256, 1, ScaleKind::SixMin,   192, 32, 5, -1, CodeTable::None};
template <> inline constexpr PanelFormat kPanelFormat<DType::Q6_K>  {256, 2, ScaleKind::Byte,     256, 16, 6, 5, CodeTable::None};
template <> inline constexpr PanelFormat kPanelFormat<DType::IQ4_XS>{256, 1, ScaleKind::SixSplit,  64, 32, 4, 7, CodeTable::Iq4};
// clang-format on

// Decoded values of the 4-bit table types; the kernels store them plus 2^offset_log2, as unsigned bytes.
inline constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};
inline constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// An activation row. Columns past n_cols are zero codes.
//
//     Q8x256:  int8 codes[round_up(n_cols, 256)], then an ActMeta256 per 256 columns
//     Q8x32:   int8 codes[round_up(n_cols, 64)],  then an ActMeta32 per 32 columns
//     F32:     float x[n_cols]
//
// x = d * code. A row with a NaN or an infinity in a block has d = NaN there, so the output shows it.
// Pairs of sums are stored in the order 0 2 1 3: the bytes of a scale vector, masked to 16-bit lanes, give
// the groups 0 2 and 1 3 of a row, and VPDPWSSD multiplies them with two sums at once.
struct ActMeta256 {
  int32_t
      start32[16];    // -32 * (sum of 16 codes): where the dot product with codes of offset 32 (Q6_K) starts
  int16_t sum16[16];  // sums of 16 codes, in the order 0 2 1 3  4 6 5 7 ...
  int16_t sum32[8];   // sums of 32 codes, in the order 0 2 1 3  4 6 5 7
  float d;
  int32_t unused[3];
};
static_assert(sizeof(ActMeta256) == 128);

struct ActMeta32 {
  float d;
  int32_t neg_sum;
};

// Runs f.template operator()<T>() for the quantised type with this id. A macro, so that the switch is
// compiled into the caller and not shared between instruction sets.
#define THERMO_FOR_QUANT_TYPE(dtype, CASE) \
  switch (dtype) {                         \
    case DType::Q4_0:                      \
      CASE(Q4_0);                          \
    case DType::Q4_1:                      \
      CASE(Q4_1);                          \
    case DType::Q5_0:                      \
      CASE(Q5_0);                          \
    case DType::Q5_1:                      \
      CASE(Q5_1);                          \
    case DType::Q8_0:                      \
      CASE(Q8_0);                          \
    case DType::Q2_K:                      \
      CASE(Q2_K);                          \
    case DType::Q3_K:                      \
      CASE(Q3_K);                          \
    case DType::Q4_K:                      \
      CASE(Q4_K);                          \
    case DType::Q5_K:                      \
      CASE(Q5_K);                          \
    case DType::Q6_K:                      \
      CASE(Q6_K);                          \
    case DType::IQ4_NL:                    \
      CASE(IQ4_NL);                        \
    case DType::IQ4_XS:                    \
      CASE(IQ4_XS);                        \
    case DType::MXFP4:                     \
      CASE(MXFP4);                         \
    default:                               \
      break;                               \
  }

}  // namespace thermo
