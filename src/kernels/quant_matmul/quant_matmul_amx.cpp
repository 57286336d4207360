// AMX: tiles multiply 16 activation rows with 16 weight rows. Below 10 activation rows the AVX-512 kernel is
// as fast and is called instead; float weights and formats with a scale per 16 columns always go there.
//
// For a strip of 256 columns of a panel the codes are unpacked once to the scratch `Strip`, where the 8 (4)
// code vectors of a 32-column (16-column) group are a B tile as they lie: row k of B holds columns 4k..4k+3
// of 16 weight rows. Activation codes are the A tile as they lie, 16 rows apart by the row stride. TDPBSUD
// gives the exact integer dot products of a group; groups have scales of their own, so C is stored and scaled
// with AVX-512 after each group, four groups at a time to keep the tile unit and the vector unit busy
// together:
//
//     for 4 groups:  C = 0;  load A, B;  C += A * B;  store C     4 x (16 x 16) int32, 4 KiB in L1
//     for 4 groups:  sum[row] += scale * C[row], exactly          16 registers
//
// The float operations and their order are those of the AVX-512 kernel, so both give the same bits.
//
// Bound: 16 stores, 16 conversions, 16 multiply-adds for 8192 multiply-adds of a 32-column group: about 20
// cycles, 400 multiply-adds a cycle, where VNNI on the same core has at most 128.
//
// Measured on a Sapphire Rapids core (virtual, 2.1 GHz nominal), weights and activations in cache, K = 2048,
// GMAC/s:
//
//     n_act             16    32    64   128
//     Q4_K  AVX-512     92    94    97    99    (before its second accumulator chain)
//     Q4_K  AMX        291   292   279   149    (128: rows 3072 bytes apart thrash the L1 cache; they are an
//     odd number of
//                                                lines apart since)
//     Q6_K  AVX-512    154   155   156   156
//     Q6_K  AMX        141   141   143   145    half-filled tiles: not used
//
// The tile operations are a template parameter, and the tests run everything else with emulated ones.
#if defined(__x86_64__)

#include <new>

#include "kernels/quant_matmul/panel_avx512.h"
#include "kernels/quant_matmul/quant_matmul_impl.h"

namespace thermo {
namespace {

constexpr int kTileActs = 16;  // activation rows of a tile
constexpr int kMaxTiles = 8;   // tiles of activation rows that share one unpacked strip
constexpr int kStripCols = 256;
constexpr int kMinActs = 10;
constexpr int kAhead = 12288;  // bytes of weights asked for ahead of their use

// ---- tile operations ----

// Tiles 0..3 are C, 4 and 5 A, 6 and 7 B. Products use A 4 and B 6 for even C, A 5 and B 7 for odd C.
struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

struct HardwareTiles {
  static void configure(int group_cols) {
    alignas(64) TileConfig config;
    for (int i = 0; i < 4; ++i) config.rows[i] = 16, config.row_bytes[i] = 64;
    for (int i = 4; i < 6; ++i) config.rows[i] = 16, config.row_bytes[i] = static_cast<uint16_t>(group_cols);
    for (int i = 6; i < 8; ++i)
      config.rows[i] = static_cast<uint8_t>(group_cols / 4), config.row_bytes[i] = 64;
    // GCC's _tile_loadconfig claims to read 8 bytes only; this makes all 64 be there.
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  static void release() { _tile_release(); }
  // GCC pastes tile numbers into assembly, so they must be written out; and its loads do not say that they
  // read memory, hence the barriers.
  template <int C>
  THERMO_INLINE static void product(const int8_t* a, size_t a_stride, const uint8_t* b, int32_t* out) {
    asm volatile("" ::: "memory");
    if constexpr (C == 0) {
      _tile_zero(0);
      _tile_loadd(4, a, a_stride);
      _tile_loadd(6, b, 64);
      _tile_dpbsud(0, 4, 6);
      _tile_stored(0, out, 64);
    } else if constexpr (C == 1) {
      _tile_zero(1);
      _tile_loadd(5, a, a_stride);
      _tile_loadd(7, b, 64);
      _tile_dpbsud(1, 5, 7);
      _tile_stored(1, out, 64);
    } else if constexpr (C == 2) {
      _tile_zero(2);
      _tile_loadd(4, a, a_stride);
      _tile_loadd(6, b, 64);
      _tile_dpbsud(2, 4, 6);
      _tile_stored(2, out, 64);
    } else {
      _tile_zero(3);
      _tile_loadd(5, a, a_stride);
      _tile_loadd(7, b, 64);
      _tile_dpbsud(3, 5, 7);
      _tile_stored(3, out, 64);
    }
    asm volatile("" ::: "memory");
  }
};

// What the instructions do, as loops.
struct EmulatedTiles {
  inline static thread_local int group_cols = 0;
  static void configure(int cols) { group_cols = cols; }
  static void release() { group_cols = 0; }
  template <int C>
  static void product(const int8_t* a, size_t a_stride, const uint8_t* b, int32_t* out) {
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 16; ++n) {
        int32_t sum = 0;
        for (int k = 0; k < group_cols; ++k)
          sum +=
              a[static_cast<size_t>(m) * a_stride + static_cast<size_t>(k)] * b[64 * (k / 4) + 4 * n + k % 4];
        out[16 * m + n] = sum;
      }
  }
};

// ---- a strip of a panel, unpacked ----

template <DType T>
struct Strip {
  static constexpr PanelFormat f = kPanelFormat<T>;
  static constexpr int kGroups = kStripCols / f.group_cols;
  // Whether the sums of four groups are exact as floats; else they are integers.
  static constexpr bool kFloats = kExactGroups<T> >= 4;
  alignas(64) uint8_t codes[8][8][64];
  __m512 scale[kGroups];                               // of floats: of groups, or of 32-column blocks
  __m512i whole_scale[kGroups];                        // of integers
  __m512 min[kGroups];                                 // of 32-column blocks
  Scales256<f.block_cols == 256 ? T : DType::Q4_K> k;  // of 256-column blocks

  // Blocks b0.. of the panel, 256 columns or what is left; returns the number of groups.
  int read(const uint8_t* panel, int b0, int n_blocks) {
    if constexpr (f.block_cols == 256) {
      const uint8_t* unit = panel + static_cast<size_t>(b0 / f.unit_blocks) * f.unit_bytes();
      const int i = b0 % f.unit_blocks;
      const uint8_t* body = unit + 64 + i * f.body_bytes();
      k.read(unit + i * f.header_step(), body);
      unroll<kGroups>([&](auto g) THERMO_LAMBDA {
        if constexpr (kFloats)
          scale[g] = _mm512_cvtepi32_ps(k.template scale<g>());
        else
          whole_scale[g] = k.template scale<g>();
      });
      prefetch(body, f.body_bytes());
      for (int s = 0; s < 8; ++s) unpack_to(body + f.scale_bytes + s * f.sub_bytes(), s);
      return kGroups;
    } else {
      const int n = n_blocks - b0 < 8 ? n_blocks - b0 : 8;
      for (int s = 0; s < n; ++s) {
        const int b = b0 + s;
        const uint8_t* unit = panel + static_cast<size_t>(b / f.unit_blocks) * f.unit_bytes();
        const int i = b % f.unit_blocks;
        scale[s] = block_scale<T>(unit + i * f.header_step());
        if constexpr (f.has_min()) min[s] = half16(unit + i * f.header_step() + 32);
        prefetch(unit + 64 + i * f.body_bytes(), f.body_bytes());
        unpack_to(unit + 64 + i * f.body_bytes(), s);
      }
      return n;
    }
  }

  // The activation rows' streams make the processor lose the weights' one (kernel_avx512.h).
  static void prefetch(const uint8_t* p, int n_bytes) {
    for (int i = 0; i < n_bytes; i += 64)
      _mm_prefetch(reinterpret_cast<const char*>(p + kAhead + i), _MM_HINT_T1);
  }

  void unpack_to(const uint8_t* sub, int s) {
    __m512i v[8];
    unpack<T>(sub, v);
    unroll<8>([&](auto g) THERMO_LAMBDA { _mm512_store_si512(codes[s][g], v[g]); });
  }
};

// ---- a strip times 16 activation rows ----

struct ActTile {
  const int8_t* codes;  // 16 rows
  size_t stride;
  const std::byte* meta[kTileActs];
  int n;  // rows that count
};

// acc[m] += strip * row m, for columns 32 * b0 .. or 256 * b0 ..
template <DType T, class Tiles>
void multiply_strip(const Strip<T>& strip, int n_groups, int b0, const ActTile& x, float* acc) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  alignas(64) int32_t product[4][kTileActs][16];
  const int8_t* a = x.codes + b0 * f.block_cols;
  const uint8_t* b = strip.codes[0][0];
  constexpr int kTileBytes = 16 * f.group_cols;
  // Rows past n are zero in A, and their sums are never read.
  __m512 sum[kTileActs];
  __m512i whole[kTileActs];
  alignas(64) float half_sum[kTileActs][16];  // of the first four groups
  constexpr bool kBig = f.block_cols == 256, kFloats = Strip<T>::kFloats;
  unroll<kTileActs>([&](auto m) THERMO_LAMBDA {
    if constexpr (!kBig)
      sum[m] = _mm512_loadu_ps(acc + 16 * m);
    else if constexpr (kFloats)
      sum[m] = _mm512_setzero_ps();
    else
      whole[m] = _mm512_setzero_si512();
  });
  for (int g0 = 0; g0 < n_groups; g0 += 4) {
    unroll<4>([&](auto i) THERMO_LAMBDA {
      const int g = g0 + i;
      if (g < n_groups)
        Tiles::template product<i>(a + g * f.group_cols, x.stride, b + g * kTileBytes, &product[i][0][0]);
    });
    for (int i = 0; i < 4 && g0 + i < n_groups; ++i) {
      const int g = g0 + i;
      unroll<kTileActs>([&](auto m) THERMO_LAMBDA {
        __m512i dot = _mm512_load_si512(product[i][m]);
        if constexpr (kBig) {
          if constexpr (f.offset_log2 >= 0) {
            const ActMeta256& meta = reinterpret_cast<const ActMeta256*>(x.meta[m])[b0];
            const int first = f.group_cols == 16 ? g : 2 * g;
            int start = meta.start32[first] + (f.group_cols == 32 ? meta.start32[first + 1] : 0);
            start = f.offset_log2 >= 5 ? start * (1 << (f.offset_log2 < 5 ? 0 : f.offset_log2 - 5))
                                       : start >> (f.offset_log2 < 5 ? 5 - f.offset_log2 : 0);
            dot = _mm512_add_epi32(dot, _mm512_set1_epi32(start));
          }
          if constexpr (kFloats)
            sum[m] = _mm512_fmadd_ps(strip.scale[g], _mm512_cvtepi32_ps(dot), sum[m]);
          else
            whole[m] = _mm512_add_epi32(whole[m], _mm512_mullo_epi32(dot, strip.whole_scale[g]));
        } else {
          const ActMeta32& meta = reinterpret_cast<const ActMeta32*>(x.meta[m])[b0 + g];
          const __m512i neg_sum = _mm512_set1_epi32(meta.neg_sum);
          if constexpr (f.offset_log2 >= 0)
            dot = _mm512_add_epi32(dot, _mm512_slli_epi32(neg_sum, f.offset_log2));
          __m512 value = _mm512_mul_ps(strip.scale[g], _mm512_cvtepi32_ps(dot));
          if constexpr (f.has_min())
            value = _mm512_fnmadd_ps(strip.min[g], _mm512_cvtepi32_ps(neg_sum), value);
          sum[m] = _mm512_fmadd_ps(value, _mm512_set1_ps(meta.d), sum[m]);
        }
      });
    }
    // Two exact halves, whose sum is rounded once, as that of the integers would be.
    if constexpr (kBig && kFloats) {
      static_assert(f.group_cols == 32 || kExactGroups<T> >= 16);
      if (g0 == 0 && f.group_cols == 32)
        unroll<kTileActs>([&](auto m) THERMO_LAMBDA {
          _mm512_store_ps(half_sum[m], sum[m]);
          sum[m] = _mm512_setzero_ps();
        });
    }
  }
  unroll<kTileActs>([&](auto m) THERMO_LAMBDA {
    if constexpr (kBig) {
      if constexpr (!kFloats)
        sum[m] = _mm512_cvtepi32_ps(whole[m]);
      else if constexpr (f.group_cols == 32)
        sum[m] = _mm512_add_ps(sum[m], _mm512_load_ps(half_sum[m]));
      const ActMeta256& meta = reinterpret_cast<const ActMeta256*>(x.meta[m])[b0];
      __m512 value = _mm512_mul_ps(sum[m], strip.k.d);
      if constexpr (f.has_min()) value = _mm512_fnmadd_ps(strip.k.min_dot(meta), strip.k.dmin, value);
      sum[m] = _mm512_fmadd_ps(value, _mm512_set1_ps(meta.d), _mm512_loadu_ps(acc + 16 * m));
    }
    _mm512_storeu_ps(acc + 16 * m, sum[m]);
  });
}

// ---- driver ----

// Memory of a thread for activation rows that do not lie 16 in a row.
struct Gathered {
  std::byte* data = nullptr;
  size_t size = 0;
  ~Gathered() { ::operator delete[](data, std::align_val_t{64}); }
  int8_t* reserve(size_t bytes) {
    if (bytes > size) {
      ::operator delete[](data, std::align_val_t{64});
      data = static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{64}));
      size = bytes;
    }
    return reinterpret_cast<int8_t*>(data);
  }
};
thread_local Gathered gathered;

bool is_consecutive(const int32_t* index, int n) {
  if (!index) return true;
  for (int i = 1; i < n; ++i)
    if (index[i] != index[0] + i) return false;
  return true;
}

template <DType T, class Tiles>
void multiply(const PanelMatmulArgs& a) {
  static constexpr PanelFormat f = kPanelFormat<T>;
  const size_t panel_stride = panel_bytes(T, a.n_cols);
  const int pad = f.block_cols == 256 ? 256 : 64;
  const size_t code_bytes = static_cast<size_t>((a.n_cols + pad - 1) / pad * pad);
  const size_t copy_stride = (code_bytes / 64 | 1) * 64;  // an odd number of cache lines, as act_row_bytes
  const bool in_a_row = is_consecutive(a.act_index, a.n_act);
  const int n_blocks = a.n_cols / f.block_cols;
  constexpr int kStripBlocks = kStripCols / f.block_cols;
  Tiles::configure(f.group_cols);
  for (int t0 = 0; t0 < a.n_act; t0 += kTileActs * kMaxTiles) {
    const int n_acts = a.n_act - t0 < kTileActs * kMaxTiles ? a.n_act - t0 : kTileActs * kMaxTiles;
    const int n_tiles = (n_acts + kTileActs - 1) / kTileActs;
    int8_t* copies = gathered.reserve(static_cast<size_t>(n_tiles * kTileActs) * copy_stride);
    ActTile tiles[kMaxTiles];
    for (int i = 0; i < n_tiles; ++i) {
      ActTile& tile = tiles[i];
      tile.n = n_acts - i * kTileActs < kTileActs ? n_acts - i * kTileActs : kTileActs;
      const auto row = [&](int m) {
        const int t = t0 + i * kTileActs + m;
        return a.acts + static_cast<size_t>(a.act_index ? a.act_index[t] : t) * a.act_stride;
      };
      for (int m = 0; m < kTileActs; ++m) tile.meta[m] = row(m < tile.n ? m : 0) + code_bytes;
      if (tile.n == kTileActs && in_a_row) {
        tile.codes = reinterpret_cast<const int8_t*>(row(0));
        tile.stride = a.act_stride;
      } else {
        int8_t* copy = copies + static_cast<size_t>(i * kTileActs) * copy_stride;
        for (int m = 0; m < kTileActs; ++m) {
          if (m < tile.n)
            std::memcpy(copy + static_cast<size_t>(m) * copy_stride, row(m), code_bytes);
          else
            std::memset(copy + static_cast<size_t>(m) * copy_stride, 0, code_bytes);
        }
        tile.codes = copy;
        tile.stride = copy_stride;
      }
    }
    for (int p = 0; p < a.n_panels; ++p) {
      const uint8_t* panel =
          reinterpret_cast<const uint8_t*>(a.panels) + static_cast<size_t>(p) * panel_stride;
      alignas(64) float acc[kMaxTiles][kTileActs][16];
      std::memset(acc, 0, static_cast<size_t>(n_tiles) * sizeof(acc[0]));
      for (int b = 0; b < n_blocks; b += kStripBlocks) {
        Strip<T> strip;
        const int n_groups = strip.read(panel, b, n_blocks);
        for (int i = 0; i < n_tiles; ++i)
          multiply_strip<T, Tiles>(strip, n_groups, b, tiles[i], &acc[i][0][0]);
      }
      const int rows = a.n_rows - 16 * p;
      const __mmask16 mask = static_cast<__mmask16>(rows >= 16 ? 0xffffu : (1u << rows) - 1);
      for (int t = 0; t < n_acts; ++t)
        _mm512_mask_storeu_ps(a.y + (t0 + t) * a.y_stride + 16 * p, mask,
                              _mm512_load_ps(acc[t / kTileActs][t % kTileActs]));
    }
  }
  Tiles::release();
}

template <class Tiles>
void multiply_type(const PanelMatmulArgs& a) {
#define CASE(t) return multiply<DType::t, Tiles>(a)
  THERMO_FOR_QUANT_TYPE(a.dtype, CASE)
#undef CASE
}

template <class Tiles>
void matmul_amx(const PanelMatmulArgs& a) noexcept {
  if (a.n_act < kMinActs || act_format(a.dtype) == ActFormat::F32) return kQuantMatmulAvx512.matmul(a);
  if (a.dtype == DType::Q6_K || a.dtype == DType::Q3_K || a.dtype == DType::Q2_K)
    return kQuantMatmulAvx512.matmul(a);
  // A few rows past the last full tile would cost as much as 16.
  const int rest = a.n_act % kTileActs < kMinActs ? a.n_act % kTileActs : 0;
  PanelMatmulArgs full = a;
  full.n_act = a.n_act - rest;
  multiply_type<Tiles>(full);
  if (rest == 0) return;
  PanelMatmulArgs tail = a;
  tail.n_act = rest;
  tail.y += full.n_act * a.y_stride;
  if (a.act_index)
    tail.act_index += full.n_act;
  else
    tail.acts += static_cast<size_t>(full.n_act) * a.act_stride;
  kQuantMatmulAvx512.matmul(tail);
}

void quantize_row_amx(ActFormat format, const float* x, int n_cols, std::byte* out) noexcept {
  kQuantMatmulAvx512.quantize_row(format, x, n_cols, out);
}

}  // namespace

const QuantMatmulKernels kQuantMatmulAmx = {quantize_row_amx, matmul_amx<HardwareTiles>};
const QuantMatmulKernels kQuantMatmulAmxEmulated = {quantize_row_amx, matmul_amx<EmulatedTiles>};

}  // namespace thermo

#endif
