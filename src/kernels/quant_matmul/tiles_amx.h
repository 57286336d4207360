// AMX tile operations: as instructions, and as loops that do the same where there is no AMX, for the tests.
// Included by the AMX file only.
//
// The number of a tile is a template parameter and is printed into the instruction. GCC's own intrinsics do
// not say which memory they read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/quant_matmul/panel_avx512.h"

namespace thermo {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int n_rows, int n_bytes) {
    rows[tile] = static_cast<uint8_t>(n_rows);
    row_bytes[tile] = static_cast<uint16_t>(n_bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

struct HardwareTiles {
  static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
  static void release() { asm volatile("tilerelease"); }
  template <int T>
  THERMO_INLINE static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  THERMO_INLINE static void load(const void* p, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  THERMO_INLINE static void store(void* p) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(size_t{64}), "i"(T) : "memory");
  }
  // C += A * B; the bytes of A are signed.
  template <int C, int A, int B, bool kSigned>
  THERMO_INLINE static void product() {
    if constexpr (kSigned)
      asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    else
      asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

struct EmulatedTiles {
  inline static thread_local TileConfig shape;
  inline static thread_local int8_t bytes[8][16][64];

  static void configure(const TileConfig& config) { shape = config; }
  static void release() { shape = {}; }
  template <int T>
  static void zero() {
    std::memset(bytes[T], 0, sizeof(bytes[T]));
  }
  template <int T>
  static void load(const void* p, size_t stride) {
    zero<T>();
    for (size_t r = 0; r < shape.rows[T]; ++r)
      std::memcpy(bytes[T][r], static_cast<const std::byte*>(p) + r * stride, shape.row_bytes[T]);
  }
  template <int T>
  static void store(void* p) {
    for (size_t r = 0; r < shape.rows[T]; ++r)
      std::memcpy(static_cast<std::byte*>(p) + r * 64, bytes[T][r], shape.row_bytes[T]);
  }
  template <int C, int A, int B, bool kSigned>
  static void product() {
    for (int m = 0; m < shape.rows[A]; ++m) {
      int32_t sums[16];
      std::memcpy(sums, bytes[C][m], sizeof(sums));
      for (int n = 0; n < 16; ++n)
        for (int k = 0; k < shape.row_bytes[A]; ++k) {
          const int8_t b = bytes[B][k / 4][4 * n + k % 4];
          sums[n] += bytes[A][m][k] * (kSigned ? b : static_cast<uint8_t>(b));
        }
      std::memcpy(bytes[C][m], sums, sizeof(sums));
    }
  }
};

}  // namespace
}  // namespace thermo
