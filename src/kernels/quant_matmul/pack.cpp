// GGUF rows to panels (panel_layout.h). Only the places of bits change.
//
// Four neighbouring codes of a row are the four bytes of one 32-bit word, in the file and in the panel, so
// all the work is on words: eight words w[g] are a 32-column sub-block of a row, and word r of code vector
// V_g is w[g] of row r. A type is described by how its words and scales are read; how vectors are written
// depends on the bits only.
#include <bit>
#include <cstring>

#include "base/check.h"
#include "kernels/quant_matmul/pack.h"
#include "kernels/quant_matmul/panel_layout.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF blocks and panels are little-endian");

constexpr uint32_t k01 = 0x01010101, k03 = 0x03030303, k07 = 0x07070707, k0f = 0x0f0f0f0f, k3f = 0x3f3f3f3f,
                   k80 = 0x80808080;

uint32_t load32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
uint16_t load16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
// Bits 0..3 of x to the lowest bits of the four bytes.
uint32_t spread4(uint32_t x) {
  return ((x & 15) * 0x00204081u) & k01;
}

// The codes of sub-block s of a GGUF block, four to a word.
template <DType T>
inline void read_codes(const uint8_t* block, int s, uint32_t w[8]) {
  if constexpr (T == DType::Q4_0 || T == DType::Q4_1 || T == DType::IQ4_NL || T == DType::MXFP4 ||
                T == DType::IQ4_XS) {
    const uint8_t* q = block + (T == DType::Q4_1     ? 4
                                : T == DType::MXFP4  ? 1
                                : T == DType::IQ4_XS ? 8 + 16 * s
                                                     : 2);
    for (int g = 0; g < 4; ++g) {
      w[g] = load32(q + 4 * g) & k0f;
      w[g + 4] = (load32(q + 4 * g) >> 4) & k0f;
    }
  } else if constexpr (T == DType::Q5_0 || T == DType::Q5_1) {
    const uint8_t* q = block + (T == DType::Q5_0 ? 6 : 8);
    const uint32_t high = load32(q - 4);
    for (int g = 0; g < 4; ++g) {
      w[g] = (load32(q + 4 * g) & k0f) | spread4(high >> (4 * g)) << 4;
      w[g + 4] = ((load32(q + 4 * g) >> 4) & k0f) | spread4(high >> (4 * g + 16)) << 4;
    }
  } else if constexpr (T == DType::Q8_0) {
    for (int g = 0; g < 8; ++g) w[g] = load32(block + 2 + 4 * g) ^ k80;
  } else if constexpr (T == DType::Q2_K) {
    const uint8_t* q = block + 16 + 32 * (s / 4);
    for (int g = 0; g < 8; ++g) w[g] = (load32(q + 4 * g) >> (2 * (s % 4))) & k03;
  } else if constexpr (T == DType::Q3_K) {
    const uint8_t* q = block + 32 + 32 * (s / 4);
    for (int g = 0; g < 8; ++g)
      w[g] = ((load32(q + 4 * g) >> (2 * (s % 4))) & k03) | ((load32(block + 4 * g) >> s) & k01) << 2;
  } else if constexpr (T == DType::Q4_K) {
    const uint8_t* q = block + 16 + 32 * (s / 2);
    for (int g = 0; g < 8; ++g) w[g] = (load32(q + 4 * g) >> (4 * (s % 2))) & k0f;
  } else if constexpr (T == DType::Q5_K) {
    const uint8_t* q = block + 48 + 32 * (s / 2);
    for (int g = 0; g < 8; ++g)
      w[g] = ((load32(q + 4 * g) >> (4 * (s % 2))) & k0f) | ((load32(block + 16 + 4 * g) >> s) & k01) << 4;
  } else {
    static_assert(T == DType::Q6_K);
    const uint8_t* q = block + 64 * (s / 4) + 32 * (s % 2);
    const uint8_t* h = block + 128 + 32 * (s / 4);
    const int low_shift = s % 4 < 2 ? 0 : 4;
    for (int g = 0; g < 8; ++g)
      w[g] = ((load32(q + 4 * g) >> low_shift) & k0f) | ((load32(h + 4 * g) >> (2 * (s % 4))) & k03) << 4;
  }
}

// Word r of the vectors of a sub-block.
template <int Bits>
inline void write_codes(const uint32_t w[8], uint32_t* out) {
  if constexpr (Bits == 8) {
    for (int g = 0; g < 8; ++g) out[16 * g] = w[g];
  } else if constexpr (Bits == 4) {
    for (int i = 0; i < 4; ++i) out[16 * i] = w[i] | w[i + 4] << 4;
  } else if constexpr (Bits == 2) {
    for (int i = 0; i < 2; ++i)
      out[16 * i] = w[4 * i] | w[4 * i + 1] << 2 | w[4 * i + 2] << 4 | w[4 * i + 3] << 6;
  } else if constexpr (Bits == 6) {
    for (int h = 0; h < 2; ++h)
      for (int i = 0; i < 3; ++i)
        out[16 * (3 * h + i)] = w[4 * h + i] | ((w[4 * h + 3] >> (2 * i)) & k03) << 6;
  } else if constexpr (Bits == 5) {
    out[0] = w[0] | (w[5] & k07) << 5;
    out[16] = w[1] | ((w[5] >> 3) & k03) << 6 | ((w[7] >> 3) & k01) << 5;
    out[32] = w[2] | (w[6] & k07) << 5;
    out[48] = w[3] | ((w[6] >> 3) & k03) << 6 | ((w[7] >> 4) & k01) << 5;
    out[64] = w[4] | (w[7] & k07) << 5;
  } else {
    static_assert(Bits == 3);
    out[0] = w[0] | w[1] << 3 | (w[6] & k03) << 6;
    out[16] = w[2] | w[3] << 3 | (w[7] & k03) << 6;
    out[32] = w[4] | w[5] << 3 | ((w[6] >> 2) & k01) << 6 | ((w[7] >> 2) & k01) << 7;
  }
}

// Four vectors of six-bit values in three.
inline void write_six(const uint32_t t[4], uint32_t* out) {
  for (int j = 0; j < 3; ++j) out[16 * j] = t[j] | ((t[3] >> (2 * j)) & k03) << 6;
}

// The scales of row r: `header` is the block's part of the unit header, `scales` the start of its body.
template <DType T>
inline void write_scales(const uint8_t* block, int r, uint8_t* header, uint32_t* scales) {
  constexpr ScaleKind kind = kPanelFormat<T>.scales;
  const auto put16 = [&](int slot, const uint8_t* from) { std::memcpy(header + 32 * slot + 2 * r, from, 2); };
  if constexpr (kind == ScaleKind::Block) {
    put16(0, block);
  } else if constexpr (kind == ScaleKind::BlockMin) {
    put16(0, block);
    put16(1, block + 2);
  } else if constexpr (kind == ScaleKind::Exponent) {
    header[r] = block[0];
  } else if constexpr (kind == ScaleKind::Nibble) {
    put16(0, block + 80);
    put16(1, block + 82);
    for (int j = 0; j < 4; ++j) scales[16 * j + r] = load32(block + 4 * j);
  } else if constexpr (kind == ScaleKind::SixSigned) {
    put16(0, block + 108);
    const uint32_t a = load32(block + 96), b = load32(block + 100), h = load32(block + 104);
    const uint32_t t[4] = {(a & k0f) | (h & k03) << 4, (b & k0f) | ((h >> 2) & k03) << 4,
                           ((a >> 4) & k0f) | ((h >> 4) & k03) << 4,
                           ((b >> 4) & k0f) | ((h >> 6) & k03) << 4};
    write_six(t, scales + r);
  } else if constexpr (kind == ScaleKind::SixMin) {
    put16(0, block);
    put16(1, block + 2);
    const uint32_t p0 = load32(block + 4), p1 = load32(block + 8), p2 = load32(block + 12);
    const uint32_t t[4] = {p0 & k3f, (p2 & k0f) | ((p0 >> 6) & k03) << 4, p1 & k3f,
                           ((p2 >> 4) & k0f) | ((p1 >> 6) & k03) << 4};
    write_six(t, scales + r);
  } else if constexpr (kind == ScaleKind::Byte) {
    put16(0, block + 208);
    for (int j = 0; j < 4; ++j) scales[16 * j + r] = load32(block + 192 + 4 * j);
  } else {
    static_assert(kind == ScaleKind::SixSplit);
    put16(0, block);
    const uint32_t sh = load16(block + 2);
    uint32_t low[2] = {}, high[2] = {};
    for (int s = 0; s < 8; ++s) {
      low[s / 4] |= ((uint32_t{block[4 + s / 2]} >> (4 * (s & 1))) & 15u) << (8 * (s % 4));
      high[s / 4] |= ((sh >> (2 * s)) & 3u) << (8 * (s % 4));
    }
    scales[r] = low[0] | low[1] << 4;
    uint8_t* top_bytes = header + 32 + 4 * (r & 7);
    uint32_t top = r < 8 ? 0 : load32(top_bytes);
    top |= high[0] << (r < 8 ? 0 : 2) | high[1] << (r < 8 ? 4 : 6);
    std::memcpy(top_bytes, &top, 4);
  }
}

template <DType T>
void pack_quant(const std::byte* rows, int n_rows, int n_cols, int panel, std::byte* out,
                size_t row_stride) noexcept {
  // Its functions are called on kPanelFormat<T> itself: clang 14 does not take f for a constant.
  constexpr PanelFormat f = kPanelFormat<T>;
  const int block_bytes = dtype_info(T).block_bytes;
  const int n_blocks = n_cols / f.block_cols;
  static constexpr uint8_t kZeroBlock[256] = {};
  const uint8_t* first =
      reinterpret_cast<const uint8_t*>(rows) + static_cast<size_t>(panel) * kPanelRows * row_stride;
  const int rows_here = n_rows - panel * kPanelRows < kPanelRows ? n_rows - panel * kPanelRows : kPanelRows;

  uint8_t* o = reinterpret_cast<uint8_t*>(out);
  uint8_t* header = nullptr;
  for (int b = 0; b < n_blocks; ++b, o += kPanelFormat<T>.body_bytes()) {
    if (b % f.unit_blocks == 0) {
      header = o;
      std::memset(header, 0, 64);
      o += 64;
    }
    uint32_t* words = reinterpret_cast<uint32_t*>(o);
    for (int r = 0; r < kPanelRows; ++r) {
      const uint8_t* block =
          r < rows_here ? first + static_cast<size_t>(r) * row_stride + static_cast<size_t>(b) * block_bytes
                        : kZeroBlock;
      write_scales<T>(block, r, header + b % f.unit_blocks * kPanelFormat<T>.header_step(), words);
      uint32_t* sub = words + f.scale_bytes / 4 + r;
#pragma GCC unroll 8
      for (int s = 0; s < kPanelFormat<T>.subs(); ++s) {
        uint32_t w[8];
        read_codes<T>(block, s, w);
        write_codes<f.bits>(w, sub + s * kPanelFormat<T>.sub_bytes() / 4);
      }
    }
  }
}

template <class Element>
void pack_float(const std::byte* rows, int n_rows, int n_cols, int panel, std::byte* out,
                size_t row_stride) noexcept {
  const std::byte* first = rows + static_cast<size_t>(panel) * kPanelRows * row_stride;
  const int rows_here = n_rows - panel * kPanelRows < kPanelRows ? n_rows - panel * kPanelRows : kPanelRows;
  Element* o = reinterpret_cast<Element*>(out);
  std::memset(out + static_cast<size_t>(n_cols) * kPanelRows * sizeof(Element), 0,
              panel_bytes(sizeof(Element) == 4 ? DType::F32 : DType::F16, n_cols) -
                  static_cast<size_t>(n_cols) * kPanelRows * sizeof(Element));
  // 16 columns at a time, so that a row's bytes are read a cache line at once.
  constexpr int kTile = 16;
  for (int c0 = 0; c0 < n_cols; c0 += kTile) {
    const int n = n_cols - c0 < kTile ? n_cols - c0 : kTile;
    for (int r = 0; r < kPanelRows; ++r) {
      Element tile[kTile] = {};
      if (r < rows_here)
        std::memcpy(tile,
                    first + static_cast<size_t>(r) * row_stride + static_cast<size_t>(c0) * sizeof(Element),
                    static_cast<size_t>(n) * sizeof(Element));
      for (int c = 0; c < n; ++c) o[static_cast<size_t>(c0 + c) * kPanelRows + r] = tile[c];
    }
  }
}

}  // namespace

void pack_panel(DType dtype, const std::byte* rows, int n_rows, int n_cols, int panel,
                std::byte* out) noexcept {
  pack_panel(dtype, rows, 0, n_rows, n_cols, panel, out);
}

void pack_panel(DType dtype, const std::byte* rows, size_t row_stride, int n_rows, int n_cols, int panel,
                std::byte* out) noexcept {
  const size_t stride = row_stride > 0 ? row_stride : row_bytes(dtype, static_cast<uint64_t>(n_cols));
  switch (dtype) {
    case DType::F32:
      return pack_float<uint32_t>(rows, n_rows, n_cols, panel, out, stride);
    case DType::F16:
    case DType::BF16:
      return pack_float<uint16_t>(rows, n_rows, n_cols, panel, out, stride);
    default:
      break;
  }
#define CASE(t) return pack_quant<DType::t>(rows, n_rows, n_cols, panel, out, stride)
  THERMO_FOR_QUANT_TYPE(dtype, CASE)
#undef CASE
  THERMO_CHECK(false, "pack_panel needs a weight type");
}

}  // namespace thermo
