// AMX, types with blocks of 32 columns. Included by the AMX file only.
//
// Weights and activations have a float scale every 32 columns, so the product of a block leaves its tile and
// meets them in AVX-512: 16 conversions, multiplications and multiply-adds for 8192 multiply-adds. Codes that
// have an offset lose it when they are unpacked; B is then signed. Two blocks times 32 activation rows are
// multiplied while the two before are added to the outputs, and a part of the next strip of 256 columns is
// unpacked meanwhile.
//
// Bound on Golden Cove: 24 cycles for the 48 operations, 340 multiply-adds a cycle; the product takes 16, its
// store 17. Measured as in block256_amx.h: Q8_0 with 16, 32, 64 and 128 rows 227, 254, 265, 266 GMAC/s, 27 %
// of the bound; 198, 213, 211, 212 before, when a product was scaled right after its store and the offset
// taken off there.
#pragma once

#include "kernels/quant_matmul/acts_amx.h"
#include "kernels/quant_matmul/tiles_amx.h"

namespace thermo {
namespace {

template <DType T, class Tiles>
struct Blocks32 {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr bool kSigned = f.offset_log2 >= 0;
  static constexpr int kStripBlocks = 8;
  struct Scales {
    __m512 d[kStripBlocks], min[kStripBlocks];
  };
  // Of two blocks and a pair of activation tiles: [block][row].
  struct alignas(64) Products {
    int32_t sum[2][kPairActs][16];
  };
  struct Item {
    const Products* products = nullptr;
    const Scales* scales;
    int panel, block, n_blocks, pair;  // blocks of the panel
    int sums;                          // place of the outputs in acc
  };

  const PanelMatmulArgs& a;
  const ActTiles& acts;
  const int t0;
  const int n_blocks;  // of a panel
  const size_t panel_stride;
  alignas(64) uint8_t codes[2][kStripBlocks][8][64];
  Scales scales[3];
  Products products[2];
  StripCursor unpacked, ahead;  // the strip that was unpacked last; one that is asked for
  alignas(64) float acc[kGroupSums][16];

  Blocks32(const PanelMatmulArgs& args, const ActTiles& tiles, int first)
      : a(args),
        acts(tiles),
        t0(first),
        n_blocks(args.n_cols / 32),
        panel_stride(panel_bytes(T, args.n_cols)),
        unpacked(args.n_panels, (n_blocks + kStripBlocks - 1) / kStripBlocks, tiles.n_acts),
        ahead(unpacked) {}

  const uint8_t* unit_of(int panel, int block) const {
    return reinterpret_cast<const uint8_t*>(a.panels) + static_cast<size_t>(panel) * panel_stride +
           static_cast<size_t>(block / f.unit_blocks) * kPanelFormat<T>.unit_bytes();
  }

  // Two blocks of the strip `unpacked`, from block 2 * part of it on.
  void unpack_part(int part, Scales& scales_to, uint8_t (*to)[8][64]) {
    for (int s = 2 * part; s < 2 * part + 2; ++s) {
      const int block = unpacked.strip * kStripBlocks + s;
      if (block >= n_blocks) return;
      const uint8_t* const unit = unit_of(unpacked.panel, block);
      const int i = block % f.unit_blocks;
      const uint8_t *const header = unit + i * kPanelFormat<T>.header_step(),
                           *const body = unit + 64 + i * kPanelFormat<T>.body_bytes();
      const uint8_t* const next =
          unit_of(ahead.panel, ahead.strip * kStripBlocks + s) + i * kPanelFormat<T>.body_bytes();
      for (int k = 0; k < 64 + kPanelFormat<T>.body_bytes(); k += 64)
        _mm_prefetch(reinterpret_cast<const char*>(next + k), _MM_HINT_T1);
      scales_to.d[s] = block_scale<T>(header);
      if constexpr (kPanelFormat<T>.has_min()) scales_to.min[s] = half16(header + 32);
      __m512i v[8];
      unpack<T>(body, v);
      unroll<8>([&](auto g) THERMO_LAMBDA {
        _mm512_store_si512(to[s][g],
                           kSigned ? _mm512_sub_epi8(v[g], bytes(1 << (kSigned ? f.offset_log2 : 0))) : v[g]);
      });
    }
  }

  template <int kBlocks>
  THERMO_INLINE void add_rows(const Item& item) {
    const int rows = a.n_rows - 16 * item.panel;
    const __mmask16 mask = static_cast<__mmask16>(rows >= 16 ? 0xffffu : (1u << rows) - 1);
    const bool last = item.block + kBlocks == n_blocks;
    __m512 d[kBlocks], min[kBlocks];
    unroll<kBlocks>([&](auto i) THERMO_LAMBDA {
      d[i] = item.scales->d[item.block % kStripBlocks + i];
      if constexpr (kPanelFormat<T>.has_min()) min[i] = item.scales->min[item.block % kStripBlocks + i];
    });
    // Locals: the compiler must think that the stores change the rest.
    const int n = acts.n_rows(item.pair), first = kPairActs * item.pair, block = item.block;
    const std::byte* const* const meta_of = acts.meta + first;
    const Products& products_of = *item.products;
    float(*const sums_at)[16] = acc + (item.sums + first);
    float* const y = a.y + (t0 + first) * a.y_stride + 16 * item.panel;
    const int64_t y_stride = a.y_stride;
    for (int m = 0; m < n; ++m) {
      const ActMeta32* const meta = reinterpret_cast<const ActMeta32*>(meta_of[m]) + block;
      __m512 sum = block == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sums_at[m]);
      unroll<kBlocks>([&](auto i) THERMO_LAMBDA {
        __m512 value = _mm512_mul_ps(d[i], _mm512_cvtepi32_ps(load(products_of.sum[i][m])));
        if constexpr (kPanelFormat<T>.has_min())
          value = _mm512_fnmadd_ps(min[i], _mm512_cvtepi32_ps(_mm512_set1_epi32(meta[i].neg_sum)), value);
        sum = _mm512_fmadd_ps(value, _mm512_set1_ps(meta[i].d), sum);
      });
      if (last)
        _mm512_mask_storeu_ps(y + m * y_stride, mask, sum);
      else
        _mm512_store_ps(sums_at[m], sum);
    }
  }
  void add(const Item& item) {
    if (item.products == nullptr) return;
    if (item.n_blocks == 2)
      add_rows<2>(item);
    else
      add_rows<1>(item);
  }

  // Tiles: 0 and 1 are the products of the first block with the lower and the upper 16 activation rows, 2 and
  // 3 those of the second; 4 and 5 the activations, 6 and 7 the blocks.
  template <int I>
  THERMO_INLINE void multiply_block(const uint8_t (*w)[64], int block, int pair, bool upper, Products& to) {
    Tiles::template load<6 + I>(w, 64);
    Tiles::template load<4>(acts.tile[2 * pair].codes + 32 * block, acts.tile[2 * pair].stride);
    Tiles::template zero<2 * I>();
    Tiles::template product<2 * I, 4, 6 + I, kSigned>();
    Tiles::template store<2 * I>(to.sum[I][0]);
    if (upper) {
      Tiles::template load<5>(acts.tile[2 * pair + 1].codes + 32 * block, acts.tile[2 * pair + 1].stride);
      Tiles::template zero<2 * I + 1>();
      Tiles::template product<2 * I + 1, 5, 6 + I, kSigned>();
      Tiles::template store<2 * I + 1>(to.sum[I][kTileActs]);
    }
  }

  void run() {
    TileConfig config;
    for (int i = 0; i < 4; ++i) config.set(i, acts.tile_rows(i % 2), 64);
    for (int i = 4; i < 6; ++i) config.set(i, acts.tile_rows(i - 4), 32);
    for (int i = 6; i < 8; ++i) config.set(i, 8, 64);
    Tiles::configure(config);
    ahead.advance(kStripsAhead);
    for (int part = 0; part < kStripBlocks / 2; ++part) unpack_part(part, scales[0], codes[0]);
    Item waiting;
    int turn = 0;
    const int n_strips = a.n_panels * unpacked.n_strips;
    for (int strip = 0; strip < n_strips; ++strip) {
      const int panel = unpacked.panel, first = unpacked.strip * kStripBlocks;
      const int sums = unpacked.in_group() * acts.n_acts;
      unpacked.advance();
      ahead.advance();
      for (int pair = 0; pair < acts.n_pairs(); ++pair) {
        const bool unpacks = pair == 0 && strip + 1 < n_strips;
        const bool upper = acts.n_rows(pair) > kTileActs;
        for (int part = 0; part < kStripBlocks / 2; ++part) {
          const int block = first + 2 * part, n = n_blocks - block < 2 ? n_blocks - block : 2;
          if (n > 0) {
            Products& to = products[turn];
            multiply_block<0>(codes[strip % 2][2 * part], block, pair, upper, to);
            if (n == 2) multiply_block<1>(codes[strip % 2][2 * part + 1], block + 1, pair, upper, to);
          }
          if (unpacks) unpack_part(part, scales[(strip + 1) % 3], codes[(strip + 1) % 2]);
          if (n > 0) {
            add(waiting);
            waiting = {&products[turn], &scales[strip % 3], panel, block, n, pair, sums};
            turn ^= 1;
          }
        }
      }
    }
    add(waiting);
    Tiles::release();
  }
};

template <DType T, class Tiles>
void multiply32(const PanelMatmulArgs& a) {
  ActTiles acts;
  for (int t0 = 0; t0 < a.n_act; t0 += kMaxActs) {
    acts.read(a, t0, a.n_act - t0 < kMaxActs ? a.n_act - t0 : kMaxActs,
              static_cast<size_t>((a.n_cols + 63) / 64 * 64));
    Blocks32<T, Tiles>(a, acts, t0).run();
  }
}

}  // namespace
}  // namespace thermo
