// Stored heads of keys and values: reading them as f32 and writing them. Over the Vf of the simd_*.h included
// before; anonymous namespace: see simd_avx512.h.
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/simd/math_impl.h"

namespace thermo {
namespace {

constexpr int kKvBlock = 32;
constexpr int kQ8Bytes = 34, kQ4Bytes = 18;

inline int64_t head_bytes(KvType type, int head_dim) {
  switch (type) {
    case KvType::F32:
      return int64_t{4} * head_dim;
    case KvType::F16:
    case KvType::BF16:
      return int64_t{2} * head_dim;
    case KvType::Q8_0:
      return int64_t{kQ8Bytes} * (head_dim / kKvBlock);
    case KvType::Q4_0:
      return int64_t{kQ4Bytes} * (head_dim / kKvBlock);
  }
  return 0;
}

inline float bf16_value(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}
// To nearest even; NaN stays NaN.
inline uint16_t bf16_bits(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded >> 16);
}
inline uint16_t load_u16(const std::byte* from) {
  uint16_t bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return bits;
}

// Register i (elements i * kWidth ..) of one stored head, and element d, where the last ones fill no
// register: blocks do.
struct ReadF32 {
  static Vf at(const std::byte* head, int i) {
    return vload(static_cast<const float*>(static_cast<const void*>(head)) + i * Vf::kWidth);
  }
};
struct ReadF16 {
  static Vf at(const std::byte* head, int i) { return vload_f16(head + 2 * i * Vf::kWidth); }
  static float one(const std::byte* head, int d) { return f16_value(load_u16(head + 2 * d)); }
};
struct ReadBf16 {
  static Vf at(const std::byte* head, int i) { return vload_bf16(head + 2 * i * Vf::kWidth); }
  static float one(const std::byte* head, int d) { return bf16_value(load_u16(head + 2 * d)); }
};
struct ReadQ8 {
  static Vf at(const std::byte* head, int i) {
    constexpr int kPerBlock = kKvBlock / Vf::kWidth;
    const std::byte* block = head + (i / kPerBlock) * kQ8Bytes;
    return vload_i8(block + 2 + (i % kPerBlock) * Vf::kWidth) * vset1(f16_value(load_u16(block)));
  }
};
struct ReadQ4 {
  static Vf at(const std::byte* head, int i) {
    constexpr int kPerBlock = kKvBlock / Vf::kWidth, kPerHalf = kPerBlock / 2;
    const std::byte* block = head + (i / kPerBlock) * kQ4Bytes;
    const std::byte* pairs = block + 2 + (i % kPerHalf) * Vf::kWidth;
    const Vf codes = i % kPerBlock < kPerHalf ? vload_u4<0>(pairs) : vload_u4<4>(pairs);
    return (codes - vset1(8.0f)) * vset1(f16_value(load_u16(block)));
  }
};

template <class Body>
inline void with_reader(KvType type, Body body) {
  switch (type) {
    case KvType::F32:
      body(ReadF32{});
      break;
    case KvType::F16:
      body(ReadF16{});
      break;
    case KvType::Q8_0:
      body(ReadQ8{});
      break;
    case KvType::BF16:
      body(ReadBf16{});
      break;
    case KvType::Q4_0:
      body(ReadQ4{});
      break;
  }
}

// Slot `slot`, whose slots are `slot_bytes` long, in the pages after `base`.
inline std::byte* slot_at(const KvView& kv, std::byte* base, int slot, int64_t slot_bytes) {
  return base + kv.pages[slot / kKvPage] * kv.page_bytes + slot % kKvPage * slot_bytes;
}

struct FloatRows {
  const float* data;
  int64_t stride;
};

// n consecutive slots of one head as f32: in place when they are stored so, else widened into `buffer`.
inline FloatRows widen(KvType type, const std::byte* first, int64_t slot_bytes, int n, int dim,
                       float* buffer) {
  if (type == KvType::F32)
    return {static_cast<const float*>(static_cast<const void*>(first)), slot_bytes / 4};
  with_reader(type, [&](auto reader) {
    const int n_vecs = dim / Vf::kWidth;
    for (int s = 0; s < n; ++s) {
      const std::byte* head = first + s * slot_bytes;
      float* out = buffer + int64_t{s} * dim;
      for (int i = 0; i < n_vecs; ++i) vstore(out + i * Vf::kWidth, reader.at(head, i));
      if constexpr (requires { reader.one(head, 0); })
        for (int d = n_vecs * Vf::kWidth; d < dim; ++d) out[d] = reader.one(head, d);
    }
  });
  return {buffer, dim};
}

// The element that is farthest from zero becomes code 0 of 0 .. 15, so that one code more has its sign.
inline void store_q4_block(const float* x, std::byte* out) {
  constexpr int W = Vf::kWidth;
  Vf high = vzero(), low = vzero();  // low: of -x
  for (int i = 0; i < kKvBlock; i += W) {
    high = vmax(high, vload(x + i));
    low = vmax(low, vzero() - vload(x + i));
  }
  const float most = vmax_lanes(high), least = vmax_lanes(low);
  const float scale = (most >= least ? most : -least) / -8.0f;
  const uint16_t half = f16_bits(scale);
  __builtin_memcpy(out, &half, sizeof(half));
  const Vf inverse = vset1(scale != 0.0f ? 1.0f / scale : 0.0f);  // of the unrounded scale, as q8_0
  int8_t codes[kKvBlock];
  for (int i = 0; i < kKvBlock; i += W) vstore_i8(codes + i, vload(x + i) * inverse);
  const auto code = [](int q) { return q < -8 ? 0 : q > 7 ? 15 : q + 8; };
  for (int i = 0; i < kKvBlock / 2; ++i)
    out[2 + i] = static_cast<std::byte>(code(codes[i]) | code(codes[i + kKvBlock / 2]) << 4);
}

inline void store_head(KvType type, const float* x, int dim, std::byte* out) {
  constexpr int W = Vf::kWidth;
  switch (type) {
    case KvType::F32:
      __builtin_memcpy(out, x, static_cast<size_t>(dim) * sizeof(float));
      return;
    case KvType::F16: {
      int i = 0;
      for (; i + W <= dim; i += W) vstore_f16(out + 2 * i, vload(x + i));
      for (; i < dim; ++i) {
        const uint16_t half = f16_bits(x[i]);
        __builtin_memcpy(out + 2 * i, &half, sizeof(half));
      }
      return;
    }
    case KvType::Q8_0:
      for (int b = 0; b < dim / kKvBlock; ++b, x += kKvBlock, out += kQ8Bytes) {
        Vf top = vzero();
        for (int i = 0; i < kKvBlock; i += W) top = vmax(top, vabs(vload(x + i)));
        const float scale = vmax_lanes(top) / 127.0f;
        const uint16_t half = f16_bits(scale);
        __builtin_memcpy(out, &half, sizeof(half));
        // Quantised by the unrounded scale, like every other q8_0 writer.
        const Vf inverse = vset1(scale > 0.0f ? 1.0f / scale : 0.0f);
        for (int i = 0; i < kKvBlock; i += W) vstore_i8(out + 2 + i, vload(x + i) * inverse);
      }
      return;
    case KvType::BF16:
      for (int i = 0; i < dim; ++i) {
        const uint16_t bits = bf16_bits(x[i]);
        __builtin_memcpy(out + 2 * i, &bits, sizeof(bits));
      }
      return;
    case KvType::Q4_0:
      for (int b = 0; b < dim / kKvBlock; ++b) store_q4_block(x + b * kKvBlock, out + b * kQ4Bytes);
      return;
  }
}

void append_rows(const KvAppendArgs& args) noexcept {
  const int64_t k_head = head_bytes(args.kv.k_type, args.head_dim);
  const int64_t v_head = head_bytes(args.kv.v_type, args.head_dim);
  for (int r = 0; r < args.n_rows; ++r) {
    std::byte* const k = slot_at(args.kv, args.kv.k, args.first_slot + r, args.n_head_kv * k_head);
    std::byte* const v = slot_at(args.kv, args.kv.v, args.first_slot + r, args.n_head_kv * v_head);
    for (int h = 0; h < args.n_head_kv; ++h) {
      const int64_t from = (int64_t{r} * args.n_head_kv + h) * args.head_dim;
      store_head(args.kv.k_type, args.k + from, args.head_dim, k + h * k_head);
      store_head(args.kv.v_type, args.v + from, args.head_dim, v + h * v_head);
    }
  }
}

}  // namespace
}  // namespace thermo
