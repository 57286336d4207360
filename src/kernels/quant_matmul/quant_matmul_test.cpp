#include "kernels/quant_matmul/quant_matmul.h"
#include "kernels/quant_matmul/pack.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "kernels/dequantize/dequantize.h"
#include "kernels/quant_matmul/panel_decode.h"
#include "kernels/quant_matmul/quant_matmul_impl.h"
#include "kernels/testing/thinned.h"

namespace thermo {
namespace {

using thermo::testing::Thinned;

constexpr DType kTypes[] = {DType::F32,  DType::F16,    DType::BF16,   DType::Q4_0, DType::Q4_1, DType::Q5_0,
                            DType::Q5_1, DType::Q8_0,   DType::Q2_K,   DType::Q3_K, DType::Q4_K, DType::Q5_K,
                            DType::Q6_K, DType::IQ4_NL, DType::IQ4_XS, DType::MXFP4};

struct Path {
  std::string name;
  const QuantMatmulKernels* kernels;
};

std::vector<Path> paths() {
  std::vector<Path> all;
  for (Isa isa : available_isas()) all.push_back({isa_name(isa), &quant_matmul_kernels(isa)});
#if defined(__x86_64__)
  if (isa_available(Isa::Avx512)) {
    all.push_back({"amx emulated", &kQuantMatmulAmxEmulated});
    all.push_back({"avxvnni by avx512", &kQuantMatmulVnniEvex});
  }
#endif
  return all;
}

// 64-byte aligned bytes.
class Bytes {
 public:
  explicit Bytes(size_t n) : size_(n), data_(new (std::align_val_t{64}) std::byte[n + 64]) {
    std::memset(data(), 0xa5, n);
  }
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Delete {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  size_t size_;
  std::unique_ptr<std::byte[], Delete> data_;
};

using Random = std::mt19937;

uint16_t random_half(Random& random) {
  std::uniform_real_distribution<float> value(-0.02f, 0.02f);
  return f32_to_f16(value(random));
}

// Random bits, with scales that keep sums of products in the range of floats.
std::vector<std::byte> random_rows(DType dtype, int n_rows, int n_cols, Random& random) {
  const DTypeInfo& info = dtype_info(dtype);
  const size_t n_blocks = static_cast<size_t>(n_rows) * static_cast<size_t>(n_cols / info.block_elements);
  std::vector<std::byte> rows(n_blocks * static_cast<size_t>(info.block_bytes));
  for (std::byte& b : rows) b = static_cast<std::byte>(random());
  const auto put_half = [&](std::byte* at) {
    const uint16_t h = random_half(random);
    std::memcpy(at, &h, sizeof(h));
  };
  for (size_t i = 0; i < n_blocks; ++i) {
    std::byte* block = rows.data() + i * static_cast<size_t>(info.block_bytes);
    switch (dtype) {
      case DType::F32: {
        const float v = std::normal_distribution<float>()(random);
        std::memcpy(block, &v, sizeof(v));
        break;
      }
      case DType::F16:
        put_half(block);
        break;
      case DType::BF16: {
        const uint16_t h = f32_to_bf16(std::normal_distribution<float>()(random));
        std::memcpy(block, &h, sizeof(h));
        break;
      }
      case DType::MXFP4:
        block[0] = static_cast<std::byte>(115 + random() % 16);
        break;
      case DType::Q2_K:
        put_half(block + 80), put_half(block + 82);
        break;
      case DType::Q3_K:
        put_half(block + 108);
        break;
      case DType::Q6_K:
        put_half(block + 208);
        break;
      case DType::Q4_1:
      case DType::Q5_1:
      case DType::Q4_K:
      case DType::Q5_K:
        put_half(block), put_half(block + 2);
        break;
      default:
        put_half(block);
        break;
    }
  }
  return rows;
}

// Mostly small, now and then large: uniform noise would hide faults of the scales.
std::vector<float> spiky(int n, Random& random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) {
    v = normal(random);
    if (random() % 61 == 0) v *= 30.0f;
  }
  return x;
}

Bytes pack_matrix(DType dtype, const std::byte* rows, int n_rows, int n_cols) {
  Bytes packed(packed_matrix_bytes(dtype, n_rows, n_cols));
  for (int p = 0; p < n_panels(n_rows); ++p)
    pack_panel(dtype, rows, n_rows, n_cols, p,
               packed.data() + static_cast<size_t>(p) * panel_bytes(dtype, n_cols));
  return packed;
}

template <DType T>
void decode_quant_panel(const std::byte* panel, int n_cols, std::vector<float>& weight,
                        std::vector<float>& size) {
  constexpr PanelFormat f = kPanelFormat<T>;
  for (int b = 0; b < n_cols / f.block_cols; ++b) {
    const BlockPlace place = find_block<T>(reinterpret_cast<const uint8_t*>(panel), b);
    BlockScales scales = {};
    decode_scales<T>(place, scales);
    for (int s = 0; s < kPanelFormat<T>.subs(); ++s) {
      int16_t value[32][16];
      decode_values<T>(place.body, s, value);
      for (int i = 0; i < 32; ++i) {
        const int group = (32 * s + i) / f.group_cols;
        const int column = b * f.block_cols + 32 * s + i;
        for (int r = 0; r < 16; ++r) {
          const float product = scales.scale[group][r] * value[i][r];
          const size_t at =
              static_cast<size_t>(r) * static_cast<size_t>(n_cols) + static_cast<size_t>(column);
          weight[at] = kPanelFormat<T>.has_min() ? product - scales.min[group][r] : product;
          size[at] =
              std::fabs(product) + (kPanelFormat<T>.has_min() ? std::fabs(scales.min[group][r]) : 0.0f);
        }
      }
    }
  }
}

// A panel as floats [16][n_cols], and the size of the terms each weight is the sum of.
void decode_panel(DType dtype, const std::byte* panel, int n_cols, std::vector<float>& weight,
                  std::vector<float>& size) {
  weight.assign(16 * static_cast<size_t>(n_cols), 0.0f);
  size.assign(16 * static_cast<size_t>(n_cols), 0.0f);
  if (act_format(dtype) == ActFormat::F32) {
    const size_t bytes = static_cast<size_t>(dtype_info(dtype).block_bytes);
    for (int c = 0; c < n_cols; ++c)
      for (int r = 0; r < 16; ++r) {
        const size_t at = static_cast<size_t>(r) * static_cast<size_t>(n_cols) + static_cast<size_t>(c);
        dequantize_row(dtype, panel + static_cast<size_t>(16 * c + r) * bytes, 1, &weight[at]);
        size[at] = std::fabs(weight[at]);
      }
    return;
  }
#define CASE(t) return decode_quant_panel<DType::t>(panel, n_cols, weight, size)
  THERMO_FOR_QUANT_TYPE(dtype, CASE)
#undef CASE
}

// The floats that a quantised activation row stands for.
std::vector<float> dequantize_act(ActFormat format, const std::byte* row, int n_cols) {
  std::vector<float> x(static_cast<size_t>(n_cols));
  const int8_t* codes = reinterpret_cast<const int8_t*>(row);
  for (int c = 0; c < n_cols; ++c) {
    if (format == ActFormat::F32) {
      std::memcpy(&x[c], row + 4 * c, 4);
    } else if (format == ActFormat::Q8x32) {
      ActMeta32 meta;
      std::memcpy(&meta, row + (n_cols + 63) / 64 * 64 + sizeof(meta) * static_cast<size_t>(c / 32),
                  sizeof(meta));
      x[c] = meta.d * codes[c];
    } else {
      ActMeta256 meta;
      std::memcpy(&meta, row + (n_cols + 255) / 256 * 256 + sizeof(meta) * static_cast<size_t>(c / 256),
                  sizeof(meta));
      x[c] = meta.d * codes[c];
    }
  }
  return x;
}

// Everything one matrix needs to be checked: packed weights, activations, expected results and their bounds.
struct Case {
  DType dtype;
  int n_rows, n_cols, n_act;
  std::vector<std::byte> rows;
  Bytes packed;
  std::vector<float> x;
  Bytes acts;
  size_t act_stride;
  std::vector<float> expected;  // [n_act][n_rows], of the dequantised activations
  std::vector<float> bound;

  Case(DType type, int rows_, int cols_, int acts_, Random& random)
      : dtype(type),
        n_rows(rows_),
        n_cols(cols_),
        n_act(acts_),
        rows(random_rows(type, rows_, cols_, random)),
        packed(pack_matrix(type, rows.data(), rows_, cols_)),
        x(spiky(cols_ * acts_, random)),
        acts(static_cast<size_t>(acts_) * act_row_bytes(act_format(type), cols_)),
        act_stride(act_row_bytes(act_format(type), cols_)) {
    const ActFormat format = act_format(dtype);
    std::vector<float> exact;
    for (int t = 0; t < n_act; ++t) {
      std::byte* row = acts.data() + static_cast<size_t>(t) * act_stride;
      kQuantMatmulPortable.quantize_row(
          format, x.data() + static_cast<size_t>(t) * static_cast<size_t>(n_cols), n_cols, row);
      const std::vector<float> back = dequantize_act(format, row, n_cols);
      exact.insert(exact.end(), back.begin(), back.end());
    }
    expected.resize(static_cast<size_t>(n_act) * static_cast<size_t>(n_rows));
    bound.resize(expected.size());
    quant_matmul_ref(dtype, rows.data(), n_rows, n_cols, exact.data(), n_act, expected.data());
    // Float weights add n_cols products one after the other; of quantised ones only the sums of blocks are
    // floats.
    const double depth = format == ActFormat::F32 ? n_cols / 2 + 8 : 160;
    std::vector<float> weight, size;
    for (int p = 0; p < n_panels(n_rows); ++p) {
      decode_panel(dtype, packed.data() + static_cast<size_t>(p) * panel_bytes(dtype, n_cols), n_cols, weight,
                   size);
      for (int r = 16 * p; r < n_rows && r < 16 * p + 16; ++r)
        for (int t = 0; t < n_act; ++t) {
          double sum = 0;
          for (int c = 0; c < n_cols; ++c)
            sum += static_cast<double>(size[static_cast<size_t>((r - 16 * p) * n_cols + c)]) *
                   static_cast<double>(std::fabs(exact[static_cast<size_t>(t * n_cols + c)]));
          bound[static_cast<size_t>(t * n_rows + r)] = static_cast<float>(depth * 0x1p-24 * sum);
        }
    }
  }

  // Multiplies n rows of activations, checks the results and that nothing else was written.
  void check(const Path& path, int n, const int32_t* index) const {
    const int64_t y_stride = n_rows + 5;
    constexpr float kGuard = -12345.0f;
    std::vector<float> y(static_cast<size_t>(n * y_stride) + 32, kGuard);
    path.kernels->matmul({.dtype = dtype,
                          .n_cols = n_cols,
                          .panels = packed.data(),
                          .n_panels = n_panels(n_rows),
                          .n_rows = n_rows,
                          .acts = acts.data(),
                          .act_stride = act_stride,
                          .act_index = index,
                          .n_act = n,
                          .y = y.data() + 16,
                          .y_stride = y_stride});
    const auto where = [&](int64_t t, int64_t r) {
      return path.name + " " + dtype_name(dtype) + " " + std::to_string(n_rows) + "x" +
             std::to_string(n_cols) + " acts " + std::to_string(n) + (index ? " gathered" : "") + " at act " +
             std::to_string(t) + " row " + std::to_string(r);
    };
    for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i) {
      const int64_t t = (i - 16 + y_stride) / y_stride - 1, r = i - 16 - t * y_stride;
      const float got = y[static_cast<size_t>(i)];
      if (i < 16 || t >= n || r >= n_rows) {
        ASSERT_EQ(got, kGuard) << "overwrote a guard, " << where(t, r);
        continue;
      }
      const size_t at = static_cast<size_t>((index ? index[t] : t) * n_rows + r);
      ASSERT_LE(std::fabs(got - expected[at]), bound[at])
          << "got " << got << " not " << expected[at] << ", " << where(t, r);
    }
  }
};

int block_of(DType dtype) {
  return act_format(dtype) == ActFormat::F32 ? 32 : dtype_info(dtype).block_elements;
}

class EveryType : public ::testing::TestWithParam<DType> {};

TEST_P(EveryType, PackingOnlyMovesBits) {
  const DType dtype = GetParam();
  Random random(1);
  for (int n_rows : {1, 15, 16, 17, 33}) {
    for (int blocks : {1, 2, 3, 5, 8}) {
      const int n_cols = blocks * block_of(dtype) + (act_format(dtype) == ActFormat::F32 ? blocks % 3 : 0);
      std::vector<std::byte> rows = random_rows(dtype, n_rows, n_cols, random);
      if (dtype == DType::MXFP4)
        for (size_t i = 0; i < rows.size(); i += 17)
          rows[i] = static_cast<std::byte>(i / 17 * 7);  // also subnormals
      // A source without alignment.
      std::vector<std::byte> moved(rows.size() + 1);
      std::memcpy(moved.data() + 1, rows.data(), rows.size());
      const Bytes packed = pack_matrix(dtype, moved.data() + 1, n_rows, n_cols);
      std::vector<float> got, size, expected(static_cast<size_t>(n_cols));
      for (int r = 0; r < n_panels(n_rows) * 16; ++r) {
        if (r % 16 == 0)
          decode_panel(dtype, packed.data() + static_cast<size_t>(r / 16) * panel_bytes(dtype, n_cols),
                       n_cols, got, size);
        std::fill(expected.begin(), expected.end(), 0.0f);
        if (r < n_rows)
          dequantize_row(
              dtype, rows.data() + static_cast<size_t>(r) * row_bytes(dtype, static_cast<uint64_t>(n_cols)),
              n_cols, expected.data());
        for (int c = 0; c < n_cols; ++c) {
          const float g = got[static_cast<size_t>(r % 16 * n_cols + c)];
          ASSERT_EQ(g, expected[static_cast<size_t>(c)])
              << n_rows << "x" << n_cols << " row " << r << " column " << c;
        }
      }
    }
  }
}

TEST_P(EveryType, PacksSomeColumnsOfAMatrix) {
  const DType dtype = GetParam();
  Random random(2);
  const int n_rows = 17, n_cols = 2 * block_of(dtype), n_all = 3 * n_cols;
  const size_t part = row_bytes(dtype, static_cast<uint64_t>(n_cols)), stride = 3 * part;
  const std::vector<std::byte> rows = random_rows(dtype, n_rows, n_all, random);
  std::vector<std::byte> middle;
  for (size_t r = 0; r < static_cast<size_t>(n_rows); ++r) {
    const auto from = rows.begin() + static_cast<std::ptrdiff_t>(r * stride + part);
    middle.insert(middle.end(), from, from + static_cast<std::ptrdiff_t>(part));
  }
  const Bytes want = pack_matrix(dtype, middle.data(), n_rows, n_cols);
  Bytes got(want.size());
  for (int p = 0; p < n_panels(n_rows); ++p)
    pack_panel(dtype, rows.data() + part, stride, n_rows, n_cols, p,
               got.data() + static_cast<size_t>(p) * panel_bytes(dtype, n_cols));
  EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size()), 0);
}

TEST_P(EveryType, PanelsAreAsSmallAsTheFile) {
  const DType dtype = GetParam();
  for (int n_cols : {512, 2048}) {
    const size_t file = 16 * row_bytes(dtype, static_cast<uint64_t>(n_cols));
    EXPECT_EQ(panel_bytes(dtype, n_cols), file) << n_cols;
  }
  const int one = block_of(dtype);
  EXPECT_EQ(panel_bytes(dtype, one) % 64, 0u);
  EXPECT_LT(panel_bytes(dtype, one), 16 * row_bytes(dtype, static_cast<uint64_t>(one)) + 64);
}

TEST_P(EveryType, MultipliesLikeTheReference) {
  const DType dtype = GetParam();
  const int block = block_of(dtype);
  Random random(2);
  std::vector<int32_t> index(64);
  Thinned cases(11);
  for (int n_rows : {1, 15, 16, 17, 31, 48, 127}) {
    for (int n_cols : {block, 2 * block, 3 * block, 5 * block, 512, 2048}) {
      // Few activation rows for the large ones: the reference is slow.
      const int most = n_cols * n_rows > 100000 ? 33 : 64;
      const Case c(dtype, n_rows, n_cols, most, random);
      for (const Path& path : paths()) {
        for (int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64}) {
          if (n > most || !cases.takes()) continue;
          for (int32_t& i : index) i = static_cast<int32_t>(random() % static_cast<unsigned>(most));
          c.check(path, n, nullptr);
          c.check(path, n, index.data());
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Prefill, decode and the verification of drafts must not disagree about a token.
TEST_P(EveryType, GivesTheSameBitsForEveryNumberOfActivations) {
  const DType dtype = GetParam();
  Random random(3);
  const int n_rows = 80;
  Thinned cases(5);
  for (int n_cols : {3 * block_of(dtype), 1024}) {
    const Case c(dtype, n_rows, n_cols, 64, random);
    for (const Path& path : paths()) {
      const auto multiply = [&](int first, int n) {
        std::vector<float> y(static_cast<size_t>(n * n_rows));
        path.kernels->matmul({.dtype = dtype,
                              .n_cols = n_cols,
                              .panels = c.packed.data(),
                              .n_panels = n_panels(n_rows),
                              .n_rows = n_rows,
                              .acts = c.acts.data() + static_cast<size_t>(first) * c.act_stride,
                              .act_stride = c.act_stride,
                              .act_index = nullptr,
                              .n_act = n,
                              .y = y.data(),
                              .y_stride = n_rows});
        return y;
      };
      const std::vector<float> all = multiply(0, 64);
      for (int n : {1, 3, 7, 16}) {
        for (int first = 0; first + n <= 64; first += n) {
          if (!cases.takes()) continue;
          const std::vector<float> some = multiply(first, n);
          ASSERT_EQ(std::memcmp(some.data(), all.data() + first * n_rows, some.size() * sizeof(float)), 0)
              << path.name << " " << n << " activations from " << first << ", columns " << n_cols;
        }
      }
      // However far ahead weights are asked for.
      const int before = prefetch_ahead();
      for (int ahead : {0, 4096, 8192})
        for (int n : {1, 2}) {
          set_prefetch_ahead(ahead);
          const std::vector<float> some = multiply(0, n);
          set_prefetch_ahead(before);
          ASSERT_EQ(std::memcmp(some.data(), all.data(), some.size() * sizeof(float)), 0)
              << path.name << " " << n << " activations, asked for " << ahead << " bytes ahead";
        }
    }
  }
}

TEST_P(EveryType, StaysCloseToUnquantisedActivations) {
  const DType dtype = GetParam();
  Random random(4);
  const int n_rows = 48, n_cols = 2048, n_act = 4;
  const Case c(dtype, n_rows, n_cols, n_act, random);
  std::vector<float> exact(static_cast<size_t>(n_act * n_rows));
  quant_matmul_ref(dtype, c.rows.data(), n_rows, n_cols, c.x.data(), n_act, exact.data());
  double error = 0, power = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    error += std::pow(static_cast<double>(exact[i] - c.expected[i]), 2);
    power += std::pow(static_cast<double>(exact[i]), 2);
  }
  // A code is off by at most half a step of amax / 127; spikes of 30 sigma make steps of half a sigma at
  // worst.
  EXPECT_LT(std::sqrt(error / power), 0.1);
}

TEST_P(EveryType, ShowsANanInEveryOutputOfItsRowOnly) {
  const DType dtype = GetParam();
  if (act_format(dtype) == ActFormat::F32) GTEST_SKIP() << "float rows are multiplied as they are";
  const int n_cols = 512, n_rows = 16;
  Random random(5);
  const std::vector<std::byte> rows = random_rows(dtype, n_rows, n_cols, random);
  const Bytes packed = pack_matrix(dtype, rows.data(), n_rows, n_cols);
  const ActFormat format = act_format(dtype);
  const size_t stride = act_row_bytes(format, n_cols);
  for (const Path& path : paths()) {
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> x = spiky(2 * n_cols, random);
      x[300] = bad;
      Bytes acts(2 * stride);
      for (int t = 0; t < 2; ++t)
        path.kernels->quantize_row(format, x.data() + t * n_cols, n_cols,
                                   acts.data() + static_cast<size_t>(t) * stride);
      std::vector<float> y(2 * n_rows);
      path.kernels->matmul({.dtype = dtype,
                            .n_cols = n_cols,
                            .panels = packed.data(),
                            .n_panels = 1,
                            .n_rows = n_rows,
                            .acts = acts.data(),
                            .act_stride = stride,
                            .act_index = nullptr,
                            .n_act = 2,
                            .y = y.data(),
                            .y_stride = n_rows});
      for (int r = 0; r < n_rows; ++r) {
        EXPECT_TRUE(std::isnan(y[r])) << path.name;
        EXPECT_TRUE(std::isfinite(y[n_rows + r])) << path.name;
      }
    }
  }
}

// Who computes a product must not show: alone or beside others, with any vector instructions.
TEST_P(EveryType, VectorPathsGiveTheSameBits) {
  const DType dtype = GetParam();
  Random random(11);
  for (const int blocks : {1, 3, 8}) {
    const int n_rows = 21, n_cols = blocks * std::max(block_of(dtype), 96), n_act = 40;
    Case c(dtype, n_rows, n_cols, n_act, random);
    // Rows of one value: codes of 127 make the largest sums there are.
    const ActFormat format = act_format(dtype);
    for (const int t : {2, 9, 31}) {
      const std::vector<float> flat(static_cast<size_t>(n_cols), t == 9 ? -0.7f : 1.3f);
      kQuantMatmulPortable.quantize_row(format, flat.data(), n_cols,
                                        c.acts.data() + static_cast<size_t>(t) * c.act_stride);
    }
    std::vector<float> want;
    for (const Path& path : paths()) {
      if (path.kernels == &kQuantMatmulPortable) continue;
      for (const int n : {1, 2, 3, 7, 10, 17, n_act}) {
        std::vector<float> y(static_cast<size_t>(n * n_rows));
        path.kernels->matmul({.dtype = dtype,
                              .n_cols = n_cols,
                              .panels = c.packed.data(),
                              .n_panels = n_panels(n_rows),
                              .n_rows = n_rows,
                              .acts = c.acts.data() + static_cast<size_t>(n_act - n) * c.act_stride,
                              .act_stride = c.act_stride,
                              .act_index = nullptr,
                              .n_act = n,
                              .y = y.data(),
                              .y_stride = n_rows});
        if (want.empty()) {  // one row first; all of them one by one
          for (int t = 0; t < n_act; ++t) {
            want.resize(static_cast<size_t>((t + 1) * n_rows));
            path.kernels->matmul({.dtype = dtype,
                                  .n_cols = n_cols,
                                  .panels = c.packed.data(),
                                  .n_panels = n_panels(n_rows),
                                  .n_rows = n_rows,
                                  .acts = c.acts.data() + static_cast<size_t>(t) * c.act_stride,
                                  .act_stride = c.act_stride,
                                  .act_index = nullptr,
                                  .n_act = 1,
                                  .y = want.data() + static_cast<size_t>(t * n_rows),
                                  .y_stride = n_rows});
          }
        }
        ASSERT_EQ(std::memcmp(y.data(), want.data() + static_cast<size_t>((n_act - n) * n_rows),
                              y.size() * sizeof(float)),
                  0)
            << path.name << " " << dtype_name(dtype) << " columns " << n_cols << " acts " << n;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(QuantMatmul, EveryType, ::testing::ValuesIn(kTypes),
                         [](const auto& type) { return std::string(dtype_name(type.param)); });

TEST(QuantMatmulActivations, AreTheSameBytesOnEveryPath) {
  Random random(6);
  for (ActFormat format : {ActFormat::F32, ActFormat::Q8x32, ActFormat::Q8x256}) {
    for (int n_cols : {1, 7, 16, 31, 32, 33, 64, 100, 255, 256, 257, 300, 512, 2048}) {
      for (float size : {1.0f, 0.0f, 1e-38f, 1e30f}) {
        std::vector<float> x = spiky(n_cols, random);
        for (float& v : x) v *= size;
        // The last line of a row may be padding that nobody writes or reads.
        Bytes expected(act_row_bytes(format, n_cols));
        std::memset(expected.data(), 0, expected.size());
        kQuantMatmulPortable.quantize_row(format, x.data(), n_cols, expected.data());
        for (const Path& path : paths()) {
          Bytes got(act_row_bytes(format, n_cols));
          std::memset(got.data(), 0, got.size());
          path.kernels->quantize_row(format, x.data(), n_cols, got.data());
          EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size()), 0)
              << path.name << " " << n_cols << " " << size;
        }
      }
    }
  }
}

TEST(QuantMatmulActivations, RoundToTheNearestCode) {
  Random random(7);
  const int n_cols = 512;
  const std::vector<float> x = spiky(n_cols, random);
  for (ActFormat format : {ActFormat::Q8x32, ActFormat::Q8x256}) {
    const int block = format == ActFormat::Q8x32 ? 32 : 256;
    Bytes row(act_row_bytes(format, n_cols));
    kQuantMatmulPortable.quantize_row(format, x.data(), n_cols, row.data());
    const std::vector<float> back = dequantize_act(format, row.data(), n_cols);
    for (int b = 0; b < n_cols; b += block) {
      float amax = 0;
      for (int c = b; c < b + block; ++c) amax = std::max(amax, std::fabs(x[c]));
      for (int c = b; c < b + block; ++c) EXPECT_LE(std::fabs(back[c] - x[c]), amax / 127 * 0.5001f);
    }
  }
}

}  // namespace
}  // namespace thermo
