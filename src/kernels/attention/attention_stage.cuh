// Heads of the cache in shared memory as tensor cores read them: rows of kDim halves whose 16-byte pieces are
// exchanged so that eight rows at one column lie in different banks. Copied while the thread goes on when the
// cache is f16; other types become f16 on the way: d * q of q8_0 and q4_0 rounded, bf16 exactly where f16
// reaches (below 2^-14 its last places are lost, beyond 65504 it stays there). Cards before 8.0 have no
// products of bf16, and a row has the same bits on all paths.
#pragma once

#include "kernels/attention/attention_heads.cuh"
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

// (byte - bias) * scale of four bytes as halves: 1024 + byte is a half with the byte in its last places.
template <int kBias>
__device__ __forceinline__ uint2 widen_bytes(uint32_t bytes, half2 scale) {
  const half2 base = __half2half2(__ushort_as_half(0x6400 + kBias));
  const half2 x = __hsub2(as_half2(__byte_perm(bytes, 0x64646464u, 0x4140)), base);
  const half2 y = __hsub2(as_half2(__byte_perm(bytes, 0x64646464u, 0x4342)), base);
  return {as_bits(__hmul2(x, scale)), as_bits(__hmul2(y, scale))};
}
// A bf16 as the products get it.
__device__ __forceinline__ half half_of_bf16(uint16_t bits) {
  const float x = bf16_value(bits);
  return __float2half_rn(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x);  // NaN stays NaN
}
__device__ __forceinline__ uint32_t halves_of_bf16(uint32_t pair) {
  return as_bits(__halves2half2(half_of_bf16(static_cast<uint16_t>(pair & 0xffff)),
                                half_of_bf16(static_cast<uint16_t>(pair >> 16))));
}

// Piece `piece` of a head that is not f16. Blocks of 34 or 18 bytes: aligned to 2 only.
template <KvType kType>
__device__ __forceinline__ uint4 widen_piece(const std::byte* head, int piece) {
  if constexpr (kType == KvType::BF16) {
    const uint4 x = reinterpret_cast<const uint4*>(head)[piece];
    return {halves_of_bf16(x.x), halves_of_bf16(x.y), halves_of_bf16(x.z), halves_of_bf16(x.w)};
  } else {
    constexpr bool kQ4 = kType == KvType::Q4_0;
    static_assert(kQ4 || kType == KvType::Q8_0);
    const std::byte* const block = head + piece / 4 * (kQ4 ? 18 : 34);
    const uint16_t* const from =
        reinterpret_cast<const uint16_t*>(block + 2 + (kQ4 ? piece % 2 : piece % 4) * 8);
    const half2 scale = __half2half2(*reinterpret_cast<const half*>(block));
    const auto widen = [&](uint32_t bytes) {
      if constexpr (kQ4)
        return widen_bytes<8>(bytes >> (piece % 4 / 2 * 4) & 0x0f0f0f0fu, scale);
      else
        return widen_bytes<128>(bytes ^ 0x80808080u, scale);
    };
    const uint2 x = widen(from[0] | static_cast<uint32_t>(from[1]) << 16);
    const uint2 y = widen(from[2] | static_cast<uint32_t>(from[3]) << 16);
    return {x.x, x.y, y.x, y.y};
  }
}

template <KvType kType>
struct WidenPiece {
  __device__ __forceinline__ uint4 operator()(const std::byte* head, int piece) const {
    return widen_piece<kType>(head, piece);
  }
};
// body(widen) for a type that is not f16: asked once, not for each piece.
template <class Body>
__device__ __forceinline__ void with_widened(KvType type, Body body) {
  if (type == KvType::Q8_0)
    body(WidenPiece<KvType::Q8_0>{});
  else if (type == KvType::Q4_0)
    body(WidenPiece<KvType::Q4_0>{});
  else
    body(WidenPiece<KvType::BF16>{});
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
    return;
  }
  // What follows from this is computed here, and not kept in registers that the f16 path has to do without.
  int here = thread;
  asm volatile("" : "+r"(here));
  with_widened(type, [&](auto widen) {
#pragma unroll 4
    for (int n = 0; n < kSlots * kPieces / kThreads; ++n) {
      const int i = here + n * kThreads, slot = i / kPieces, piece = i % kPieces;
      uint4 x{0, 0, 0, 0};
      if (first + slot < end) x = widen(heads + slot * head.step, piece);
      *reinterpret_cast<uint4*>(to + piece_offset<kDim>(slot, piece)) = x;
    }
  });
}

// kSlots slots from anywhere, by a warp: slot i lies where lane i says, or becomes zeros if that is 0.
template <int kDim, int kSlots>
__device__ __forceinline__ void stage_gathered(KvType type, std::byte* to, uint64_t mine, int lane) {
  constexpr int kPieces = kDim / 8;
  static_assert(kSlots <= 32 && kSlots * kPieces % 32 == 0);
  const auto gather = [&](auto load) {
#pragma unroll 4
    for (int i = lane; i < kSlots * kPieces; i += 32) {
      const int slot = i / kPieces, piece = i % kPieces;
      const std::byte* const from = reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, mine, slot));
      uint4 x{0, 0, 0, 0};
      if (from != nullptr) x = load(from, piece);
      *reinterpret_cast<uint4*>(to + piece_offset<kDim>(slot, piece)) = x;
    }
  };
  if (type == KvType::F16)
    gather([](const std::byte* from, int piece) { return reinterpret_cast<const uint4*>(from)[piece]; });
  else
    with_widened(type, gather);
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
