#include "kernels/dequantize/dequantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/dequantize/block_tables.h"

namespace thermo {
namespace {

constexpr DType kWeightTypes[] = {DType::F32,  DType::F16,   DType::BF16,   DType::Q4_0,
                                  DType::Q4_1, DType::Q5_0,  DType::Q5_1,   DType::Q8_0,
                                  DType::Q2_K, DType::Q3_K,  DType::Q4_K,   DType::Q5_K,
                                  DType::Q6_K, DType::MXFP4, DType::IQ4_NL, DType::IQ4_XS};

struct FieldOffsets {
  int d = -1, min = -1;  // byte offset of the half in a block
};

FieldOffsets half_fields(DType dtype) {
  switch (dtype) {
    case DType::Q4_0:
    case DType::Q5_0:
    case DType::Q8_0:
    case DType::IQ4_NL:
    case DType::IQ4_XS:
      return {0};
    case DType::Q4_1:
    case DType::Q5_1:
    case DType::Q4_K:
    case DType::Q5_K:
      return {0, 2};
    case DType::Q2_K:
      return {80, 82};
    case DType::Q3_K:
      return {108};
    case DType::Q6_K:
      return {208};
    default:
      return {};
  }
}

void put_half(std::vector<std::byte>& block, int offset, uint16_t bits) {
  if (offset >= 0) std::memcpy(block.data() + offset, &bits, sizeof(bits));
}

std::vector<float> decode(DType dtype, const std::vector<std::byte>& blocks, int64_t n) {
  std::vector<float> y(static_cast<size_t>(n));
  dequantize_row(dtype, blocks.data(), n, y.data());
  return y;
}

std::vector<std::byte> encode(DType dtype, const std::vector<float>& x) {
  std::vector<std::byte> blocks(row_bytes(dtype, x.size()));
  quantize_row(dtype, x.data(), static_cast<int64_t>(x.size()), blocks.data());
  return blocks;
}

std::vector<float> round_trip(DType dtype, const std::vector<float>& x) {
  return decode(dtype, encode(dtype, x), static_cast<int64_t>(x.size()));
}

// ---- scalars

TEST(HalfFloat, EveryHalfSurvivesTheRoundTrip) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const float value = f16_to_f32(static_cast<uint16_t>(h));
    if ((h & 0x7FFF) > 0x7C00) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(f32_to_f16(value), 0x7E00 | (h & 0x8000));
    } else {
      EXPECT_EQ(f32_to_f16(value), h) << value;
    }
  }
}

TEST(HalfFloat, DecodesByTheDefinition) {
  for (int h = 0; h < 0x7C00; ++h) {
    const int exponent = h >> 10, mantissa = h & 1023;
    const double value =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    EXPECT_EQ(f16_to_f32(static_cast<uint16_t>(h)), value);
    EXPECT_EQ(f16_to_f32(static_cast<uint16_t>(h | 0x8000)), -value);
  }
  EXPECT_EQ(f16_to_f32(0x7C00), INFINITY);
  EXPECT_EQ(f16_to_f32(0xFC00), -INFINITY);
  EXPECT_TRUE(std::signbit(f16_to_f32(0x8000)));
}

TEST(HalfFloat, RoundsEveryMidpointToEvenAndItsNeighboursToTheNearest) {
  for (uint16_t h = 0; h < 0x7BFF; ++h) {
    const float middle = (f16_to_f32(h) + f16_to_f32(static_cast<uint16_t>(h + 1))) / 2;  // exact in f32
    EXPECT_EQ(f32_to_f16(middle), h + (h & 1)) << middle;
    EXPECT_EQ(f32_to_f16(std::nextafter(middle, 0.0f)), h) << middle;
    EXPECT_EQ(f32_to_f16(std::nextafter(middle, INFINITY)), h + 1) << middle;
    EXPECT_EQ(f32_to_f16(-middle), 0x8000 | (h + (h & 1))) << middle;
  }
}

TEST(HalfFloat, OverflowsToInfinityAndUnderflowsToZero) {
  EXPECT_EQ(f32_to_f16(std::nextafter(65520.0f, 0.0f)), 0x7BFF);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7C00);
  EXPECT_EQ(f32_to_f16(std::numeric_limits<float>::max()), 0x7C00);
  EXPECT_EQ(f32_to_f16(-INFINITY), 0xFC00);
  EXPECT_EQ(f32_to_f16(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(f32_to_f16(-0.0f), 0x8000);
  EXPECT_EQ(f32_to_f16(std::bit_cast<float>(0x7F800001u)), 0x7E00);
  EXPECT_EQ(f32_to_f16(std::bit_cast<float>(0xFFC12345u)), 0xFE00);
}

TEST(BrainFloat, EveryValueSurvivesTheRoundTrip) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const float value = bf16_to_f32(static_cast<uint16_t>(h));
    if (std::isnan(value))
      EXPECT_EQ(f32_to_bf16(value), h | 0x40);
    else
      EXPECT_EQ(f32_to_bf16(value), h);
  }
}

TEST(BrainFloat, RoundsToNearestEvenAndKeepsNaNQuiet) {
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3F808000u)), 0x3F80);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3F808001u)), 0x3F81);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3F818000u)), 0x3F82);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x00008001u)), 0x0001);  // subnormals are kept
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x7F800001u)), 0x7FC0);  // would truncate to infinity
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0xFFFFFFFFu)), 0xFFFF);  // would round up to zero
}

// ---- decoding

struct Conformance {
  DType dtype;
  double sum, wsum, y0, y1, y16, y31, last;
};

// Blocks of bytes (37 i + 11) mod 256 with d = 0.25 and min = 0.125, values from another decoder.
constexpr Conformance kConformance[] = {
    {DType::Q4_0, -5.25, -129.5, -0.75, 0.5, -0.75, 0, 0},
    {DType::Q4_1, 65.25, 1061.75, 3.875, 1.125, 2.375, 3.125, 3.125},
    {DType::Q5_0, 3.75, 28, 2.25, -0.5, 3.5, 0.25, 0.25},
    {DType::Q5_1, 130.25, 2041.25, 4.875, 6.125, 4.875, 1.375, 1.375},
    {DType::Q8_0, -44, -2020, 21.25, 30.5, -22.75, -12, -12},
    {DType::Q2_K, 514.75, 60782.5, 8.25, 0, -0.375, -0.375, 1.125},
    {DType::Q3_K, 239.5, 44286.25, 20.25, -27, -24, 16, 10.5},
    {DType::Q4_K, 13610, 1893210, 78.875, -6.375, 78.875, 40.125, 12.125},
    {DType::Q5_K, 29054, 4006862, 202.875, -6.375, 202.875, 40.125, 27.125},
    {DType::Q6_K, 1153, 196105, -357.75, 424, -108, -24, -15},
    {DType::IQ4_NL, -64.25, -1729.75, -8.75, 6.25, -8.75, 0.25, 0.25},
    {DType::IQ4_XS, -2751.25, -522783.5, 16.25, -0.25, 16.25, 8.75, -4},
    {DType::MXFP4, 6.25, 159.5, 0, 1.5, 0.75, 1.5, 1.5},
};

std::vector<std::byte> conformance_block(DType dtype) {
  std::vector<std::byte> block(static_cast<size_t>(dtype_info(dtype).block_bytes));
  for (size_t i = 0; i < block.size(); ++i) block[i] = static_cast<std::byte>((37 * i + 11) % 256);
  const FieldOffsets fields = half_fields(dtype);
  put_half(block, fields.d, 0x3400);
  put_half(block, fields.min, 0x3000);
  if (dtype == DType::MXFP4) block[0] = std::byte{126};
  return block;
}

TEST(Dequantize, MatchesTheConformanceVectorsExactly) {
  for (const Conformance& want : kConformance) {
    SCOPED_TRACE(dtype_name(want.dtype));
    const std::vector<float> y =
        decode(want.dtype, conformance_block(want.dtype), dtype_info(want.dtype).block_elements);
    double sum = 0, wsum = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      sum += y[i];
      wsum += static_cast<double>(i + 1) * y[i];
    }
    EXPECT_EQ(sum, want.sum);
    EXPECT_EQ(wsum, want.wsum);
    EXPECT_EQ(y[0], want.y0);
    EXPECT_EQ(y[1], want.y1);
    EXPECT_EQ(y[16], want.y16);
    EXPECT_EQ(y[31], want.y31);
    EXPECT_EQ(y.back(), want.last);
  }
}

// Element i of a block straight from the formulas of the specification, one element at a time.
float element_by_the_book(DType dtype, const std::vector<std::byte>& block, int i) {
  const auto* b = reinterpret_cast<const uint8_t*>(block.data());
  const FieldOffsets fields = half_fields(dtype);
  const auto half = [&](int o) {
    return o < 0 ? 0.0f : f16_to_f32(static_cast<uint16_t>(b[o] | b[o + 1] << 8));
  };
  const auto nibble = [&](int o) { return i < 16 ? b[o + i] & 15 : b[o + i - 16] >> 4; };
  const auto bit = [&](int o) { return b[o + i / 8] >> (i % 8) & 1; };
  const auto f = [](int v) { return static_cast<float>(v); };
  const float d = half(fields.d), m = half(fields.min);
  const int n = i / 128, j = i % 128 / 32, l = i % 32, s = i / 32, k = 8 * n + 2 * j + l / 16;
  const uint8_t* p = b + 4;
  const int sc = s < 4 ? p[s] & 63 : (p[s + 4] & 15) | (p[s - 4] >> 6) << 4;
  const int mn = s < 4 ? p[s + 4] & 63 : (p[s + 4] >> 4) | (p[s] >> 6) << 4;
  switch (dtype) {
    case DType::Q4_0:
      return d * f(nibble(2) - 8);
    case DType::Q4_1:
      return d * f(nibble(4)) + m;
    case DType::Q5_0:
      return d * f(nibble(6) + 16 * bit(2) - 16);
    case DType::Q5_1:
      return d * f(nibble(8) + 16 * bit(4)) + m;
    case DType::Q8_0:
      return d * f(static_cast<int8_t>(b[2 + i]));
    case DType::IQ4_NL:
      return d * f(kIq4Values[nibble(2)]);
    case DType::MXFP4:
      return static_cast<float>(std::ldexp(kMxfp4Values[nibble(1)], b[0] - 128));
    case DType::Q2_K:
      return d * f(b[k] & 15) * f(b[16 + 32 * n + l] >> (2 * j) & 3) - m * f(b[k] >> 4);
    case DType::Q3_K: {
      const int low = k < 8 ? b[96 + k] & 15 : b[96 + k - 8] >> 4;
      const int scale = (low | (b[104 + k % 4] >> (2 * (k / 4)) & 3) << 4) - 32;
      const int q = (b[32 + 32 * n + l] >> (2 * j) & 3) - ((b[l] >> (4 * n + j) & 1) != 0 ? 0 : 4);
      return d * f(scale) * f(q);
    }
    case DType::Q4_K:
      return d * f(sc) * f(b[16 + 32 * (s / 2) + l] >> (4 * (s & 1)) & 15) - m * f(mn);
    case DType::Q5_K: {
      const int q = (b[48 + 32 * (s / 2) + l] >> (4 * (s & 1)) & 15) + 16 * (b[16 + l] >> s & 1);
      return d * f(sc) * f(q) - m * f(mn);
    }
    case DType::Q6_K: {
      const int byte = b[64 * n + 32 * (j & 1) + l], low = j < 2 ? byte & 15 : byte >> 4;
      const int q = (low | (b[128 + 32 * n + l] >> (2 * j) & 3) << 4) - 32;
      return d * f(static_cast<int8_t>(b[192 + k])) * f(q);
    }
    case DType::IQ4_XS: {
      const int high = (b[2] | b[3] << 8) >> (2 * s) & 3;
      const int ls = (b[4 + s / 2] >> (4 * (s & 1)) & 15) | high << 4;
      const int byte = b[8 + 16 * s + (l & 15)];
      return d * f(ls - 32) * f(kIq4Values[l < 16 ? byte & 15 : byte >> 4]);
    }
    default:
      return NAN;
  }
}

TEST(Dequantize, MatchesTheFormulasOnRandomBlocks) {
  std::mt19937 rng(7);
  for (const Conformance& row : kConformance) {
    SCOPED_TRACE(dtype_name(row.dtype));
    for (int round = 0; round < 50; ++round) {
      std::vector<std::byte> block = conformance_block(row.dtype);
      for (std::byte& byte : block) byte = static_cast<std::byte>(rng());
      const FieldOffsets fields = half_fields(row.dtype);  // any half but infinity and NaN
      put_half(block, fields.d, static_cast<uint16_t>(rng() % 0x7C00));
      put_half(block, fields.min, static_cast<uint16_t>(0x8000 | rng() % 0x7C00));
      const std::vector<float> y = decode(row.dtype, block, dtype_info(row.dtype).block_elements);
      for (size_t i = 0; i < y.size(); ++i)
        ASSERT_EQ(y[i], element_by_the_book(row.dtype, block, static_cast<int>(i))) << "element " << i;
    }
  }
}

TEST(Dequantize, Mxfp4ExponentsAreExactAtBothEnds) {
  for (int e : {0, 1, 2, 3, 126, 253, 254, 255}) {
    std::vector<std::byte> block(17, std::byte{0x91});  // 1 low, -1 high
    block[0] = static_cast<std::byte>(e);
    const std::vector<float> y = decode(DType::MXFP4, block, 32);
    EXPECT_EQ(y[0], static_cast<float>(std::ldexp(1.0, e - 128))) << e;
    EXPECT_EQ(y[31], -static_cast<float>(std::ldexp(1.0, e - 128))) << e;
  }
}

TEST(Dequantize, ReadsBlocksAtAnyAddressAndWritesOnlyTheRow) {
  std::mt19937 rng(11);
  for (DType dtype : kWeightTypes) {
    SCOPED_TRACE(dtype_name(dtype));
    const int64_t n = 3 * std::max(32, dtype_info(dtype).block_elements);
    const size_t bytes = row_bytes(dtype, static_cast<uint64_t>(n));
    std::vector<float> x(static_cast<size_t>(n));
    std::normal_distribution<float> normal;
    for (float& v : x) v = normal(rng);
    const std::vector<std::byte> aligned = encode(dtype, x);
    const std::vector<float> want = decode(dtype, aligned, n);
    for (size_t shift = 1; shift < 4; ++shift) {
      // Exact allocations: a sanitizer sees a read or write past either end.
      std::vector<std::byte> moved(bytes + shift);
      quantize_row(dtype, x.data(), n, moved.data() + shift);
      EXPECT_TRUE(std::equal(aligned.begin(), aligned.end(), moved.begin() + static_cast<ptrdiff_t>(shift)));
      std::vector<float> y(want.size() + 8, -777.0f);
      dequantize_row(dtype, moved.data() + shift, n, y.data());
      EXPECT_TRUE(std::equal(want.begin(), want.end(), y.begin()));
      EXPECT_TRUE(std::all_of(y.end() - 8, y.end(), [](float v) { return v == -777.0f; }));
    }
    dequantize_row(dtype, nullptr, 0, nullptr);
    quantize_row(dtype, nullptr, 0, nullptr);
  }
}

// ---- encoding

struct ErrorBound {
  DType dtype;
  double rms;    // root mean square error over root mean square of the input
  double worst;  // largest error over the largest input of its block
};

// A code of step d is off by d/2 at most and by d/sqrt(12) in the mean. A normal block of 32 has its extreme
// near 2.2 sigma, so 2^b codes over -2.2..2.2 sigma give rms of about 4.4 / 2^b / sqrt(12); Q4_0 for one:
// 0.08. The sub-block formats add the rounding of their scales (1/63 at most of a scale for 6 bits, 1/15 for
// 4), the least-squares ones may clip an extreme by about a step.
constexpr ErrorBound kErrorBounds[] = {
    {DType::F32, 0, 0},          {DType::F16, 0x1p-12, 0x1p-11}, {DType::BF16, 0x1p-9, 0x1p-8},
    {DType::Q4_0, 0.10, 0.126},  {DType::Q4_1, 0.09, 0.13},      {DType::Q5_0, 0.05, 0.063},
    {DType::Q5_1, 0.045, 0.065}, {DType::Q8_0, 0.006, 0.0045},   {DType::Q2_K, 0.35, 0.60},
    {DType::Q3_K, 0.20, 0.35},   {DType::Q4_K, 0.09, 0.15},      {DType::Q5_K, 0.045, 0.08},
    {DType::Q6_K, 0.022, 0.035}, {DType::IQ4_NL, 0.09, 0.15},    {DType::IQ4_XS, 0.095, 0.17},
    {DType::MXFP4, 0.14, 0.26},
};

// Spiky, as weights are: normal, with a run in a hundred scaled up and a few zero runs.
std::vector<float> weight_like(size_t n, float sigma) {
  std::mt19937 rng(5);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> x(n);
  for (size_t run = 0; run < n; run += 256) {
    const float scale = rng() % 100 == 0 ? 20.0f : rng() % 50 == 0 ? 0.0f : 1.0f;
    for (size_t i = run; i < std::min(n, run + 256); ++i) x[i] = scale * normal(rng);
  }
  return x;
}

TEST(Quantize, StaysWithinTheErrorOfItsStep) {
  for (float sigma : {0.02f, 3.0f}) {
    const std::vector<float> x = weight_like(256 * 512, sigma);
    for (const ErrorBound& bound : kErrorBounds) {
      SCOPED_TRACE(dtype_name(bound.dtype));
      const std::vector<float> y = round_trip(bound.dtype, x);
      const auto block = static_cast<size_t>(dtype_info(bound.dtype).block_elements);
      double error = 0, power = 0, worst = 0;
      for (size_t start = 0; start < x.size(); start += block) {
        double extreme = 0, block_worst = 0;
        for (size_t i = start; i < start + block; ++i) {
          const double off = std::fabs(static_cast<double>(x[i]) - y[i]);
          error += off * off;
          power += static_cast<double>(x[i]) * x[i];
          extreme = std::max(extreme, std::fabs(static_cast<double>(x[i])));
          block_worst = std::max(block_worst, off);
        }
        // Below the smallest normal half a scale itself loses bits.
        if (extreme > 1e-3) worst = std::max(worst, block_worst / extreme);
      }
      RecordProperty(std::string("rms_") + dtype_name(bound.dtype), std::to_string(std::sqrt(error / power)));
      EXPECT_LE(std::sqrt(error / power), bound.rms);
      EXPECT_LE(worst, bound.worst);
    }
  }
}

TEST(Quantize, ZerosStayZero) {
  const std::vector<float> zeros(512, 0.0f);
  for (DType dtype : kWeightTypes) EXPECT_EQ(round_trip(dtype, zeros), zeros) << dtype_name(dtype);
}

TEST(Quantize, AConstantRowKeepsItsValue) {
  for (float value : {1.0f, -1.0f, 0.37f, -250.0f}) {
    const std::vector<float> x(512, value);
    for (const ErrorBound& bound : kErrorBounds) {
      SCOPED_TRACE(dtype_name(bound.dtype));
      for (float y : round_trip(bound.dtype, x)) ASSERT_NEAR(y, value, bound.worst * std::fabs(value));
    }
  }
}

TEST(Quantize, AnyInputGivesFiniteBlocks) {
  const float extremes[] = {INFINITY, -INFINITY, NAN, 3e38f, -3e38f, 1e-40f, 1e-8f, 65504.0f};
  std::mt19937 rng(3);
  for (DType dtype : kWeightTypes) {
    if (dtype == DType::F32 || dtype == DType::F16 || dtype == DType::BF16) continue;
    for (float extreme : extremes) {
      std::vector<float> x = weight_like(512, 1.0f);
      for (int i = 0; i < 20; ++i) x[rng() % x.size()] = extreme;
      for (float y : round_trip(dtype, x))
        ASSERT_TRUE(std::isfinite(y)) << dtype_name(dtype) << " " << extreme;
    }
  }
}

}  // namespace
}  // namespace thermo
