// AMX, types with blocks of 256 columns. Included by the AMX file only.
//
// A block's sum of scale * code * activation is an exact integer, so the scale may meet the code first. That
// product has more than 8 bits; it is stored as two bytes, each of which is a tile operand of its own:
//
//     Q4_K Q5_K   scale = lower 3 bits + 8 * upper 3 bits, code * either <= 31 * 7
//     Q2_K        code * scale <= 45: one byte
//     others      code * scale in 16 bits: the lower byte without a sign, the upper one with it
//
//     sum = A * lower + 8 (256) * (A * upper)
//
// Tiles are then full, 64 columns, and stay in their registers for a whole block: 8 products and 2 stores
// for 256 columns times 16 rows times 16 activation rows. Scaling the products of every 32 columns takes 8
// products of half-filled tiles, 8 stores, and 16 * 8 loads, conversions and multiply-adds.
//
// Codes that have an offset keep it: the sums of activation codes take it off, as they do the minima.
//
// Three things are mixed so that the tile unit always has work, a quarter of each at a time: the products of
// a strip (a block of a panel) with 32 activation rows, unpacking the next strip, and what the product before
// adds to the outputs. Strips follow each other down a few panels, so that the activations of 256 columns
// stay in the first-level cache (StripCursor).
//
// Bound on Golden Cove. A product takes 16 cycles: 128 for 256 columns of 16 rows and 16 activation rows, 512
// multiply-adds a cycle. Unpacking Q4_K: 64 x (1.5 + 2) operations and 128 stores, about 145 cycles a strip,
// for all activation rows together. Adding to the outputs: 13 operations an activation row, 7 cycles.
//
// Measured on a Sapphire Rapids core (virtual, 2.9 GHz), weights and activations in cache, K = 2048, GMAC/s.
// Before: each product of 32 columns scaled in AVX-512; Q6_K without tiles.
//
//     n_act        8   16   32   64  128    before, 8 to 128
//     Q4_K       251  316  401  427  436    183  290  304  295  291
//     Q6_K       160  268  327  368  378    145  143  145  145  147
//
// 64 rows of Q4_K are at 145 multiply-adds a cycle, 28 % of the bound. Products alone reach 280. Unpacking is
// hidden behind them but for its stores, which take about a cycle each; tile stores take 40 cycles beside
// them instead of 17.
//
// Tried: one panel after the other, 13 to 25 % slower at n_act = 32: activations come from the second-level
// cache for every panel. Adding to the outputs in all four quarters, 15 % slower at 64 rows: the first rows
// wait for their tile stores. The two parts 4 KiB apart instead of side by side, nothing.
#pragma once

#include "kernels/quant_matmul/acts_amx.h"
#include "kernels/quant_matmul/tiles_amx.h"

namespace thermo {
namespace {

// VPSHUFB's places: byte i of every lane of 32 bits at bytes 0 and 2, or at 1 and 3; zero elsewhere.
struct alignas(64) LanePlaces {
  int8_t byte[64];
  consteval LanePlaces(int i, int parity) : byte{} {
    for (int k = 0; k < 64; ++k) byte[k] = static_cast<int8_t>(k % 2 == parity ? k % 16 / 4 * 4 + i : -128);
  }
};
template <int I, int Parity>
inline constexpr LanePlaces kLanePlaces{I, Parity};
// The other byte of a pair.
struct alignas(64) SwappedBytes {
  int8_t byte[64];
  consteval SwappedBytes() : byte{} {
    for (int k = 0; k < 64; ++k) byte[k] = static_cast<int8_t>(k % 16 ^ 1);
  }
};
inline constexpr SwappedBytes kSwappedBytes;

enum class Fold : uint8_t { One, Bits, Bytes };
template <DType T>
constexpr Fold kFold = kPanelFormat<T>.scales == ScaleKind::Nibble   ? Fold::One
                       : kPanelFormat<T>.scales == ScaleKind::SixMin ? Fold::Bits
                                                                     : Fold::Bytes;

// Codes times scales of a block of a panel: [64 columns][part][4 columns] are B tiles as they lie.
template <DType T>
struct Folded {
  static constexpr int kParts = kFold<T> == Fold::One ? 1 : 2;
  alignas(64) uint8_t bytes[4][kParts][16][64];
};

// What the outputs need of a block besides.
template <DType T>
struct BlockScales {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr bool kOffset = f.offset_log2 >= 0;
  static constexpr int kPairs = f.group_cols == 16 ? 8 : 4;
  Scales256<T> k;
  // Minima, or scales where codes have an offset, as 16-bit numbers in the order of the sums of activations.
  __m512i pairs[kPairs];

  void read(const uint8_t* header, const uint8_t* body) {
    k.read(header, body);
    unroll<kPairs / 2>([&](auto j) THERMO_LAMBDA {
      if constexpr (kOffset) {
        pairs[2 * j] = _mm512_srai_epi16(_mm512_slli_epi16(k.t[j], 8), 8);
        pairs[2 * j + 1] = _mm512_srai_epi16(k.t[j], 8);
      } else {
        pairs[2 * j] = _mm512_and_si512(k.mins[j], _mm512_set1_epi32(0x00ff00ff));
        pairs[2 * j + 1] = _mm512_srli_epi16(k.mins[j], 8);
      }
    });
  }
  THERMO_INLINE __m512i sum_dot(const ActMeta256& meta) const {
    const int16_t* sums = f.group_cols == 16 ? meta.sum16 : meta.sum32;
    __m512i even = _mm512_setzero_si512(), odd = even;
    unroll<kPairs / 2>([&](auto j) THERMO_LAMBDA {
      even = _mm512_dpwssd_epi32(even, pairs[2 * j], broadcast32(sums + 4 * j));
      odd = _mm512_dpwssd_epi32(odd, pairs[2 * j + 1], broadcast32(sums + 4 * j + 2));
    });
    return _mm512_add_epi32(even, odd);
  }
};

// 64 columns from sub-block 2 * Q on. `ahead`: the body of a block that will be unpacked soon.
template <DType T, int Q>
THERMO_INLINE void fold_quarter(const uint8_t* body, const uint8_t* ahead, const Scales256<T>& k,
                                Folded<T>& to) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  constexpr int kVectors = f.group_cols / 4;  // that share a scale
  unroll<2>([&](auto h) THERMO_LAMBDA {
    constexpr int s = 2 * Q + h;
    const uint8_t* const sub = body + f.scale_bytes + s * kPanelFormat<T>.sub_bytes();
    unroll<f.bits>([&](auto i) THERMO_LAMBDA {
      _mm_prefetch(
          reinterpret_cast<const char*>(ahead + f.scale_bytes + s * kPanelFormat<T>.sub_bytes() + 64 * i),
          _MM_HINT_T1);
    });
    __m512i v[8];
    unpack<T>(sub, v);
    unroll<8 / kVectors>([&](auto j) THERMO_LAMBDA {
      constexpr int g = s * 32 / f.group_cols + j, i = g % 4;
      const __m512i scale = _mm512_shuffle_epi8(k.t[g / 4], load(kLanePlaces<i, 0>.byte));
      const auto each = [&](auto&& body_of) THERMO_LAMBDA {
        unroll<kVectors>([&](auto n)
                             THERMO_LAMBDA { body_of(v[kVectors * j + n], 8 * h + kVectors * j + n); });
      };
      if constexpr (kFold<T> == Fold::One) {
        each([&](__m512i x, int row)
                 THERMO_LAMBDA { _mm512_store_si512(to.bytes[Q][0][row], _mm512_mullo_epi16(x, scale)); });
      } else if constexpr (kFold<T> == Fold::Bits) {
        // Two codes of 16 bits at once: no product carries into the upper one.
        const __m512i lower = _mm512_and_si512(scale, _mm512_set1_epi16(7));
        const __m512i upper = _mm512_srli_epi16(scale, 3);
        each([&](__m512i x, int row) THERMO_LAMBDA {
          _mm512_store_si512(to.bytes[Q][0][row], _mm512_mullo_epi16(x, lower));
          _mm512_store_si512(to.bytes[Q][1][row], _mm512_mullo_epi16(x, upper));
        });
      } else {
        const __m512i scale_high = _mm512_shuffle_epi8(k.t[g / 4], load(kLanePlaces<i, 1>.byte));
        const __m512i swap = load(kSwappedBytes.byte);
        each([&](__m512i x, int row) THERMO_LAMBDA {
          const __m512i even = _mm512_maddubs_epi16(x, scale), odd = _mm512_maddubs_epi16(x, scale_high);
          _mm512_store_si512(to.bytes[Q][0][row],
                             _mm512_mask_shuffle_epi8(even, 0xaaaaaaaaaaaaaaaau, odd, swap));
          _mm512_store_si512(to.bytes[Q][1][row],
                             _mm512_mask_shuffle_epi8(odd, 0x5555555555555555u, even, swap));
        });
      }
    });
  });
}

template <DType T, class Tiles>
struct Block256 {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr int kParts = Folded<T>::kParts;
  // The products of a strip and a pair of activation tiles: [part][row].
  struct alignas(64) Products {
    int32_t sum[kParts][kPairActs][16];
  };
  // Products that wait to be added to the outputs.
  struct Item {
    const Products* products = nullptr;
    const BlockScales<T>* scales;
    int panel, block, pair;
    int sums;  // place of the outputs in acc
  };

  const PanelMatmulArgs& a;
  const ActTiles& acts;
  const int t0;  // the first activation row
  const int n_blocks;
  const size_t panel_stride;
  Folded<T> folded[2];
  BlockScales<T> scales[3];  // of the strip in folded[..], of the next, and of an item that waits
  Products products[2];
  StripCursor unpacked, ahead;  // the strip that was unpacked last; one that is asked for
  alignas(64) float acc[kGroupSums][16];

  // Leaves the rest as it is: 30 KiB.
  Block256(const PanelMatmulArgs& args, const ActTiles& tiles, int first)
      : a(args),
        acts(tiles),
        t0(first),
        n_blocks(args.n_cols / f.block_cols),
        panel_stride(panel_bytes(T, args.n_cols)),
        unpacked(args.n_panels, n_blocks, tiles.n_acts),
        ahead(unpacked) {}

  const uint8_t* unit_of(const StripCursor& at) const {
    return reinterpret_cast<const uint8_t*>(a.panels) + static_cast<size_t>(at.panel) * panel_stride +
           static_cast<size_t>(at.strip / f.unit_blocks) * kPanelFormat<T>.unit_bytes();
  }

  // A quarter of the strip `unpacked`, to the given places.
  template <int Q>
  THERMO_INLINE void unpack_quarter(BlockScales<T>& scales_to, Folded<T>& to) {
    const uint8_t* const unit = unit_of(unpacked);
    const int i = unpacked.strip % f.unit_blocks;
    const uint8_t* const body = unit + 64 + i * kPanelFormat<T>.body_bytes();
    const uint8_t* const next =
        unit_of(ahead) + 64 + ahead.strip % f.unit_blocks * kPanelFormat<T>.body_bytes();
    if constexpr (Q == 0) {
      for (int k = -64; k < f.scale_bytes; k += 64)
        _mm_prefetch(reinterpret_cast<const char*>(next + k), _MM_HINT_T1);
      scales_to.read(unit + i * kPanelFormat<T>.header_step(), body);
    }
    fold_quarter<T, Q>(body, next, scales_to.k, to);
  }

  // Activation rows [begin, end) of the item's pair. Everything is brought into locals first: the compiler
  // must think that the stores change the rest.
  THERMO_INLINE void add_rows(const Item& item, int begin, int end) {
    if (begin >= end) return;
    const BlockScales<T> s = *item.scales;
    const int first = kPairActs * item.pair, block = item.block;
    const std::byte* const* const meta_of = acts.meta + first;
    const int32_t(*const lower)[16] = item.products->sum[0],
                         (*const upper)[16] = item.products->sum[kParts - 1];
    float(*const sums_at)[16] = acc + (item.sums + first);
    const auto value_of = [&](int m) THERMO_LAMBDA {
      const ActMeta256& meta = reinterpret_cast<const ActMeta256*>(meta_of[m])[block];
      __m512i sum = load(lower[m]);
      if constexpr (kParts == 2)
        sum = _mm512_add_epi32(sum, _mm512_slli_epi32(load(upper[m]), kFold<T> == Fold::Bits ? 3 : 8));
      const __m512i sums = s.sum_dot(meta);
      if constexpr (BlockScales<T>::kOffset)
        sum = _mm512_sub_epi32(sum, _mm512_slli_epi32(sums, f.offset_log2));
      __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), s.k.d);
      if constexpr (kPanelFormat<T>.has_min())
        value = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sums), s.k.dmin, value);
      const __m512 before = block == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sums_at[m]);
      return _mm512_fmadd_ps(value, _mm512_set1_ps(meta.d), before);
    };
    if (block < n_blocks - 1) {
      for (int m = begin; m < end; ++m) _mm512_store_ps(sums_at[m], value_of(m));
    } else {
      const int rows = a.n_rows - 16 * item.panel;
      const __mmask16 mask = static_cast<__mmask16>(rows >= 16 ? 0xffffu : (1u << rows) - 1);
      float* const y = a.y + (t0 + first) * a.y_stride + 16 * item.panel;
      const int64_t stride = a.y_stride;
      for (int m = begin; m < end; ++m) _mm512_mask_storeu_ps(y + m * stride, mask, value_of(m));
    }
  }

  // Tiles: 0 and 1 are the sums of the lower 16 activation rows, 2 and 3 of the upper ones; 4 and 5 the
  // activations, 6 and 7 the parts.
  template <bool kUpper>
  void multiply_pair(int strip, int block, int pair, bool unpacks, const Item& waiting, Products& to) {
    const ActTile &lower = acts.tile[2 * pair], &upper = acts.tile[kUpper ? 2 * pair + 1 : 0];
    const Folded<T>& w = folded[strip % 2];
    const int n_waiting = waiting.products ? acts.n_rows(waiting.pair) : 0;
    Tiles::template zero<0>();
    if constexpr (kParts == 2) Tiles::template zero<1>();
    if constexpr (kUpper) Tiles::template zero<2>();
    if constexpr (kUpper && kParts == 2) Tiles::template zero<3>();
    unroll<4>([&](auto q) THERMO_LAMBDA {
      const int column = 256 * block + 64 * q;
      Tiles::template load<4>(lower.codes + column, lower.stride);
      Tiles::template load<6>(w.bytes[q][0], 64);
      Tiles::template product<0, 4, 6, false>();
      if constexpr (kUpper) {
        Tiles::template load<5>(upper.codes + column, upper.stride);
        Tiles::template product<2, 5, 6, false>();
      }
      if constexpr (kParts == 2) {
        Tiles::template load<7>(w.bytes[q][1], 64);
        Tiles::template product<1, 4, 7, kFold<T> == Fold::Bytes>();
        if constexpr (kUpper) Tiles::template product<3, 5, 7, kFold<T> == Fold::Bytes>();
      }
      if (unpacks) unpack_quarter<q>(scales[(strip + 1) % 3], folded[(strip + 1) % 2]);
      // Not earlier: the products before have to leave their tiles, and are read from memory.
      if constexpr (q >= 2) add_rows(waiting, n_waiting * (q - 2) / 2, n_waiting * (q - 1) / 2);
    });
    Tiles::template store<0>(to.sum[0][0]);
    if constexpr (kParts == 2) Tiles::template store<1>(to.sum[1][0]);
    if constexpr (kUpper) Tiles::template store<2>(to.sum[0][kTileActs]);
    if constexpr (kUpper && kParts == 2) Tiles::template store<3>(to.sum[1][kTileActs]);
  }

  void run() {
    TileConfig config;
    for (int i = 0; i < 4; ++i) config.set(i, acts.tile_rows(i / 2), 64);
    for (int i = 4; i < 6; ++i) config.set(i, acts.tile_rows(i - 4), 64);
    for (int i = 6; i < 8; ++i) config.set(i, 16, 64);
    Tiles::configure(config);
    ahead.advance(kStripsAhead);
    unroll<4>([&](auto q) THERMO_LAMBDA { unpack_quarter<q>(scales[0], folded[0]); });
    const int n_strips = a.n_panels * n_blocks, n_pairs = acts.n_pairs();
    Item waiting;
    int turn = 0;
    for (int strip = 0; strip < n_strips; ++strip) {
      const int panel = unpacked.panel, block = unpacked.strip, sums = unpacked.in_group() * acts.n_acts;
      unpacked.advance();
      ahead.advance();
      for (int pair = 0; pair < n_pairs; ++pair, turn ^= 1) {
        const bool unpacks = pair == 0 && strip + 1 < n_strips;
        if (acts.n_rows(pair) > kTileActs)
          multiply_pair<true>(strip, block, pair, unpacks, waiting, products[turn]);
        else
          multiply_pair<false>(strip, block, pair, unpacks, waiting, products[turn]);
        waiting = {&products[turn], &scales[strip % 3], panel, block, pair, sums};
      }
    }
    add_rows(waiting, 0, acts.n_rows(waiting.pair));
    Tiles::release();
  }
};

template <DType T, class Tiles>
void multiply256(const PanelMatmulArgs& a) {
  ActTiles acts;
  for (int t0 = 0; t0 < a.n_act; t0 += kMaxActs) {
    acts.read(a, t0, a.n_act - t0 < kMaxActs ? a.n_act - t0 : kMaxActs, static_cast<size_t>(a.n_cols));
    Block256<T, Tiles>(a, acts, t0).run();
  }
}

}  // namespace
}  // namespace thermo
