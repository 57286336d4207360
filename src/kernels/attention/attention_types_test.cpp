// Attention over a cache of each type against attention over the same keys and values in floats: no further
// away than the rounding of the type allows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/testing/guard_band.h"
#include "kernels/testing/inputs.h"

namespace thermo {
namespace {

using namespace thermo::testing;

constexpr int kHeads = 4, kKvHeads = 2, kDim = 64, kPast = 90, kRows = 5, kSlots = kPast + kRows;

struct Heads {
  std::vector<float> q, k, v;
  std::vector<int32_t> positions;

  explicit Heads(uint64_t seed) {
    Inputs in(seed);
    q = in.normal(size_t{kRows} * kHeads * kDim, 0.1f);  // weights that a coarse key does not turn over
    k = in.normal(size_t{kSlots} * kKvHeads * kDim, 1.0f);
    v = in.normal(size_t{kSlots} * kKvHeads * kDim, 1.0f);
    for (int i = 0; i < kRows; ++i) positions.push_back(kPast + i);
  }
};

// Of heads in one page. `way`: an instruction set; nullopt: the reference.
std::vector<float> attend(const Heads& heads, const std::vector<float>& v, KvType k_type, KvType v_type,
                          std::optional<Isa> way) {
  std::vector<std::byte> k_cache(kKvPage * kKvHeads * kv_head_bytes(k_type, kDim)),
      v_cache(kKvPage * kKvHeads * kv_head_bytes(v_type, kDim));
  const int32_t page = 0;
  const KvView kv = {k_type, v_type, k_cache.data(), v_cache.data(), &page, 0};
  const AttentionKernels& kernels = attention_kernels(way.value_or(Isa::Portable));
  kernels.kv_append({.k = heads.k.data(),
                     .v = v.data(),
                     .kv = kv,
                     .first_slot = 0,
                     .n_rows = kSlots,
                     .n_head_kv = kKvHeads,
                     .head_dim = kDim});
  std::vector<float> out(heads.q.size());
  const AttentionArgs args = {.q = heads.q.data(),
                              .kv = kv,
                              .out = out.data(),
                              .positions = heads.positions.data(),
                              .n_rows = kRows,
                              .n_past = kPast,
                              .n_head = kHeads,
                              .n_head_kv = kKvHeads,
                              .head_dim = kDim,
                              .scale = 1.0f / std::sqrt(static_cast<float>(kDim)),
                              .window = 0,
                              .ancestors = {}};
  if (!way) {
    attention_ref(args);
    return out;
  }
  GuardedBuffer<float> scratch(attention_scratch_floats(kHeads, kKvHeads, kDim));
  for (int g = 0; g < kKvHeads; ++g) kernels.attend(args, 0, kRows, g, scratch.data());
  return out;
}

// How far a stored element can be from x, in a block whose farthest element is `most`.
double rounding(KvType type, double most) {
  switch (type) {
    case KvType::F32:
      return 0.0;
    case KvType::F16:
      return most * 0x1p-11;
    case KvType::BF16:
      return most * 0x1p-8;
    case KvType::Q8_0:  // half a step, and the scale in f16
      return most / 127 * (0.5 + 127 * 0x1p-11);
    case KvType::Q4_0:  // a step where it is as far out as the farthest, on the other side
      return most / 8 * (1 + 8 * 0x1p-11);
  }
  return 0.0;
}

class AttentionTypes : public ::testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Isas, AttentionTypes, ::testing::ValuesIn(available_isas()),
                         [](const auto& test) { return isa_name(test.param); });

// Keys that are off by e move a score by e * sum |q| at most, weights relatively by e^(2 that); values that
// are off move the result by as much.
TEST_P(AttentionTypes, AreAsNearToFloatsAsTheirRounding) {
  constexpr KvType kTypes[] = {KvType::F32, KvType::F16, KvType::BF16, KvType::Q8_0, KvType::Q4_0};
  const Heads heads(7);
  std::vector<float> positive = heads.v;
  for (float& x : positive) x = std::fabs(x);
  const auto most = [](const std::vector<float>& x) {
    double top = 0.0;
    for (const float y : x) top = std::max(top, std::fabs(double{y}));
    return top;
  };
  const std::vector<float> want = attend(heads, heads.v, KvType::F32, KvType::F32, std::nullopt),
                           size = attend(heads, positive, KvType::F32, KvType::F32, std::nullopt);
  for (const KvType k_type : kTypes)
    for (const KvType v_type : kTypes) {
      const std::vector<float> got = attend(heads, heads.v, k_type, v_type, GetParam());
      double worst = 0.0, allowed = 0.0;
      for (size_t i = 0; i < want.size(); ++i) {
        double sum = 0.0;
        for (size_t d = i / kDim * kDim; d < i / kDim * kDim + kDim; ++d)
          sum += std::fabs(double{heads.q[d]});
        const double score = rounding(k_type, most(heads.k)) * sum / std::sqrt(double{kDim}),
                     bound = std::expm1(2 * score) * size[i] +
                             std::exp(2 * score) * rounding(v_type, most(heads.v)) + 1e-5;
        const double error = std::fabs(double{got[i]} - want[i]);
        ASSERT_LE(error, bound) << kv_type_name(k_type) << " " << kv_type_name(v_type) << ", element " << i;
        worst = std::max(worst, error);
        allowed = std::max(allowed, bound);
      }
      // A type with a rounding rounds, or the test looks at another type.
      if (k_type != KvType::F32 || v_type != KvType::F32) {
        EXPECT_GT(worst, allowed * 1e-3) << kv_type_name(k_type) << " " << kv_type_name(v_type);
      }
    }
}

// The range of bf16 is that of f32, and its zeros, infinities and NaN are too.
TEST_P(AttentionTypes, Bf16RoundsToNearestEven) {
  const float cases[] = {0.0f,      -0.0f,         1.0f,   1.00390625f, 1.01171875f, 3e38f,
                         3.4e38f,   -1e-40f,       1e-45f, 65520.0f,    -70000.0f,   0x1.01p0f,
                         0x1.03p0f, 0x1.010002p0f, NAN,    -INFINITY};
  const uint16_t want[] = {0x0000, 0x8000, 0x3f80, 0x3f80, 0x3f82, 0x7f62, 0x7f80, 0x8001,
                           0x0000, 0x4780, 0xc789, 0x3f80, 0x3f82, 0x3f81, 0x7fc0, 0xff80};
  std::vector<uint16_t> k(16), v(16);
  const int32_t page = 0;
  attention_kernels(GetParam())
      .kv_append({.k = cases,
                  .v = cases,
                  .kv = {KvType::BF16, KvType::BF16, reinterpret_cast<std::byte*>(k.data()),
                         reinterpret_cast<std::byte*>(v.data()), &page, 0},
                  .first_slot = 0,
                  .n_rows = 1,
                  .n_head_kv = 1,
                  .head_dim = 16});
  for (size_t i = 0; i < 16; ++i) EXPECT_EQ(k[i], want[i]) << cases[i];
  EXPECT_EQ(k, v);
}

// An empty block, one sided ones and the two ends of the codes, as GGUF's readers decode them.
TEST_P(AttentionTypes, Q4BlocksHaveTheLayoutOfTheFormat) {
  std::vector<float> x(64);
  for (int i = 0; i < 32; ++i) x[static_cast<size_t>(32 + i)] = static_cast<float>(i % 16 - 8);
  x[32 + 31] = 8.0f;  // farther out than code 15 reaches; as far as -8, so it takes the sign of the scale
  std::vector<std::byte> k(36), v(36);
  const int32_t page = 0;
  attention_kernels(GetParam())
      .kv_append({.k = x.data(),
                  .v = x.data(),
                  .kv = {KvType::Q4_0, KvType::Q4_0, k.data(), v.data(), &page, 0},
                  .first_slot = 0,
                  .n_rows = 1,
                  .n_head_kv = 1,
                  .head_dim = 64});
  EXPECT_EQ(std::to_integer<int>(k[0]) | (std::to_integer<int>(k[1]) & 0x7f), 0) << "a scale of zero";
  EXPECT_EQ(std::to_integer<int>(k[18]), 0x00);
  EXPECT_EQ(std::to_integer<int>(k[19]), 0xbc) << "scale -1";
  // Element i is -(code - 8): -8 would be code 16, and is 15.
  for (int i = 0; i < 16; ++i) {
    const int low = std::min(15, 16 - i), high = i == 15 ? 0 : std::min(15, 16 - i);
    EXPECT_EQ(std::to_integer<int>(k[static_cast<size_t>(20 + i)]), low | high << 4) << i;
  }
}

}  // namespace
}  // namespace thermo
