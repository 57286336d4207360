// Heads of the cache in shared memory as tensor cores read them: rows of kDim halves whose 16-byte pieces are
// exchanged so that eight rows at one column lie in different banks. Copied while the thread goes on when the
// cache is f16; q8_0 is widened on the way, d * q rounded to f16.
#pragma once

#include "kernels/attention/attention_parts.cuh"
#include "kernels/linear/copy_async.cuh"

namespace thermo {

template <int kDim>
__device__ __forceinline__ int piece_swizzle(int row) {
  return kDim >= 64 ? row & 7 : (row >> 1) & 3;
}
// Byte offset of piece `piece` (8 halves) of a row.
template <int kDim>
__device__ __forceinline__ int piece_offset(int row, int piece) {
  return row * 2 * kDim + ((piece ^ piece_swizzle<kDim>(row)) << 4);
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Where a lane points for ldmatrix: matrices 0..3 are (row 0, column 0), (row 8, column 0), (row 0, column
// 8), (row 8, column 8) of a 16 x 16 tile, or with `columns_first` in the order 0, 2, 1, 3.
template <int kDim>
struct MatrixLane {
  uint32_t base, turn;

  __device__ __forceinline__ MatrixLane(const void* shared, int first_row, bool columns_first, int lane) {
    const int id = lane / 8;
    const int row = first_row + lane % 8 + ((columns_first ? id >> 1 : id & 1) << 3);
    base = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + static_cast<uint32_t>(row * 2 * kDim);
    turn = static_cast<uint32_t>(((columns_first ? id & 1 : id >> 1) ^ piece_swizzle<kDim>(row)) << 4);
  }
  // Tile at row 16 * i, column 16 * j.
  __device__ __forceinline__ uint32_t at(int i, int j) const {
    return base + static_cast<uint32_t>(i * 32 * kDim) + (static_cast<uint32_t>(j << 5) ^ turn);
  }
};

__device__ __forceinline__ uint32_t pack_halves(float x, float y) {
  return as_bits(__floats2half2_rn(x, y));
}

// Four int8 as halves times `scale`.
__device__ __forceinline__ uint2 widen_bytes(uint32_t bytes, half2 scale) {
  const uint32_t biased = bytes ^ 0x80808080u;
  const half2 base = __half2half2(__ushort_as_half(0x6480));  // 1024 + 128
  const half2 x = __hsub2(as_half2(__byte_perm(biased, 0x64646464u, 0x4140)), base);
  const half2 y = __hsub2(as_half2(__byte_perm(biased, 0x64646464u, 0x4342)), base);
  return {as_bits(__hmul2(x, scale)), as_bits(__hmul2(y, scale))};
}

// Piece `piece` of a q8_0 head. Blocks of 34 bytes: aligned to 2 only.
__device__ __forceinline__ uint4 widen_piece(const std::byte* head, int piece) {
  const std::byte* const block = head + piece / 4 * 34;
  const uint16_t* const from = reinterpret_cast<const uint16_t*>(block + 2 + piece % 4 * 8);
  const half2 scale = __half2half2(*reinterpret_cast<const half*>(block));
  const uint2 x = widen_bytes(from[0] | static_cast<uint32_t>(from[1]) << 16, scale);
  const uint2 y = widen_bytes(from[2] | static_cast<uint32_t>(from[3]) << 16, scale);
  return {x.x, x.y, y.x, y.y};
}

// kSlots slots from `first` on, by kThreads threads. Slots from `end` on become zeros: what lies in the cache
// after them may be anything. REQUIRES: `first` is a multiple of kSlots, so that all lie in one page, and the
// table has that page.
template <int kDim, int kSlots, int kThreads>
__device__ __forceinline__ void stage_slots(KvType type, std::byte* to, const PagedHead& head, int first,
                                            int end, int thread) {
  constexpr int kPieces = kDim / 8;
  static_assert(kSlots * kPieces % kThreads == 0 && kKvPage % kSlots == 0);
  const std::byte* const heads = head.at(first);
  if (type == KvType::F16) {
#pragma unroll
    for (int n = 0; n < kSlots * kPieces / kThreads; ++n) {
      const int i = thread + n * kThreads, slot = i / kPieces, piece = i % kPieces;
      const bool valid = first + slot < end;
      copy16(to + piece_offset<kDim>(slot, piece), heads + (valid ? slot * head.step + piece * 16 : 0),
             valid);
    }
  } else {
#pragma unroll 4
    for (int n = 0; n < kSlots * kPieces / kThreads; ++n) {
      const int i = thread + n * kThreads, slot = i / kPieces, piece = i % kPieces;
      uint4 x{0, 0, 0, 0};
      if (first + slot < end) x = widen_piece(heads + slot * head.step, piece);
      *reinterpret_cast<uint4*>(to + piece_offset<kDim>(slot, piece)) = x;
    }
  }
}

// kSlots slots from anywhere, by a warp: slot i lies where lane i says, or becomes zeros if that is 0.
template <int kDim, int kSlots>
__device__ __forceinline__ void stage_gathered(KvType type, std::byte* to, uint64_t mine, int lane) {
  constexpr int kPieces = kDim / 8;
  static_assert(kSlots <= 32 && kSlots * kPieces % 32 == 0);
#pragma unroll 4
  for (int i = lane; i < kSlots * kPieces; i += 32) {
    const int slot = i / kPieces, piece = i % kPieces;
    const std::byte* const from = reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, mine, slot));
    uint4 x{0, 0, 0, 0};
    if (from != nullptr)
      x = type == KvType::F16 ? reinterpret_cast<const uint4*>(from)[piece] : widen_piece(from, piece);
    *reinterpret_cast<uint4*>(to + piece_offset<kDim>(slot, piece)) = x;
  }
}

// The queries of a tile that read one kv head: number i is row first_row + i / per_kv, head i % per_kv.
struct TileQueries {
  int first_row, n_rows, per_kv, kv_head;

  __device__ __forceinline__ TileQueries(const DeviceAttentionArgs& a, const AttentionTiling& tiling,
                                         int tile, int head)
      : first_row(tile * tiling.rows),
        n_rows(min(tiling.rows, a.n_rows - tile * tiling.rows)),
        per_kv(a.n_head / a.n_head_kv),
        kv_head(head) {}
  __device__ __forceinline__ bool has(int i) const { return i < n_rows * per_kv; }
  // Row of query i; of none: a row no segment has.
  __device__ __forceinline__ int row(int i) const { return has(i) ? first_row + i / per_kv : -1; }
  __device__ __forceinline__ int head(int i) const { return kv_head * per_kv + i % per_kv; }
  __device__ __forceinline__ const float* q(const DeviceAttentionArgs& a, int i) const {
    return a.q + (static_cast<int64_t>(row(i)) * a.n_head + head(i)) * a.head_dim;
  }
};

}  // namespace thermo
