#include "kernels/row_ops/row_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/testing/compare.h"
#include "kernels/testing/guard_band.h"
#include "kernels/testing/inputs.h"

namespace thermo {
namespace {

using namespace thermo::testing;

// 0, 1, around registers of 4, 8 and 16 and their unrolled multiples, primes, real widths.
const int kSizes[] = {0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 127, 257, 509, 512, 2048, 4099};

class RowOps : public ::testing::TestWithParam<Isa> {
 protected:
  const RowOpKernels& kernels = row_op_kernels(GetParam());
  const RowOpKernels& ref = row_op_kernels_ref();
};
INSTANTIATE_TEST_SUITE_P(Isas, RowOps, ::testing::ValuesIn(available_isas()),
                         [](const auto& test) { return isa_name(test.param); });

// Runs op(kernels, x) on a copy of x in a guarded, misaligned buffer and on a plain copy with the reference.
template <class Op>
void expect_same(const RowOpKernels& kernels, const RowOpKernels& ref, const std::vector<float>& x,
                 const Bound& bound, Op op) {
  for (size_t misalign : {size_t{0}, size_t{1}}) {
    GuardedBuffer<float> got(x.size(), misalign);
    std::copy(x.begin(), x.end(), got.data());
    std::vector<float> want = x;
    op(kernels, got.data());
    op(ref, want.data());
    EXPECT_TRUE(got.intact()) << x.size();
    EXPECT_TRUE(all_close(got.span(), want, bound)) << "n " << x.size();
  }
}

TEST_P(RowOps, NormalisesLikeTheReference) {
  for (int n : kSizes) {
    if (n == 0) continue;
    Inputs in(1);
    const auto x = in.spiky(static_cast<size_t>(n)), w = in.spiky(static_cast<size_t>(n));
    // The sum of n positive terms in at least 4 lanes, halved by the square root, and four roundings.
    const Bound bound = {.absolute = 1e-30, .relative = (n / 8.0 + 12) * kF32Epsilon};
    expect_same(kernels, ref, x, bound,
                [&](const RowOpKernels& k, float* p) { k.rms_norm(p, w.data(), n, 1e-6f, p); });
    expect_same(kernels, ref, x, bound, [&](const RowOpKernels& k, float* p) {
      std::vector<float> y(static_cast<size_t>(n));
      k.rms_norm(p, w.data(), n, 1e-6f, y.data());
      std::copy(y.begin(), y.end(), p);
    });
  }
}

TEST_P(RowOps, NormalisesATinyRowByEps) {
  std::vector<float> x(64, 1e-20f), w(64, 1.0f), y(64);
  kernels.rms_norm(x.data(), w.data(), 64, 1e-6f, y.data());
  for (float v : y) EXPECT_NEAR(v, 1e-17f, 1e-22f);
}

// Bit for bit: sums over experts are exact, on every instruction set and in every order.
TEST_P(RowOps, SumsExactlyInAnyOrder) {
  for (int n : kSizes) {
    Inputs in(2);
    const size_t size = static_cast<size_t>(n);
    std::vector<std::vector<float>> terms;
    for (int t = 0; t < 9; ++t)
      terms.push_back(in.spiky(size, t % 3 == 0 ? 3e4f : t % 3 == 1 ? 1.0f : 1e-6f));
    const auto weight = [](int t) { return 0.37f + 0.11f * static_cast<float>(t); };
    std::vector<double> want(size), forwards(size), backwards(size, 17.0);
    for (int t = 0; t < 9; ++t) {
      ref.add_to_sum(want.data(), terms[static_cast<size_t>(t)].data(), weight(t), n);
      kernels.add_to_sum(forwards.data(), terms[static_cast<size_t>(t)].data(), weight(t), n);
      (t == 0 ? kernels.start_sum : kernels.add_to_sum)(
          backwards.data(), terms[static_cast<size_t>(8 - t)].data(), weight(8 - t), n);
    }
    EXPECT_EQ(forwards, want);
    EXPECT_EQ(backwards, want);
    std::vector<float> x = in.spiky(size), x_ref = x;
    kernels.add_sum(x.data(), forwards.data(), n);
    ref.add_sum(x_ref.data(), want.data(), n);
    EXPECT_EQ(x, x_ref);
  }
}

TEST_P(RowOps, GatesLikeTheReference) {
  for (int n : kSizes) {
    Inputs in(3);
    auto gate = in.spiky(static_cast<size_t>(n), 4.0f);
    const auto up = in.spiky(static_cast<size_t>(n));
    if (n > 8) gate[0] = 200.0f, gate[1] = -200.0f, gate[2] = -88.0f, gate[3] = 88.5f, gate[n - 1] = -90.0f;
    // exp within 2 ulp, then a sum, a quotient and a product. Below -88 the exponential saturates: the result
    // is smaller than 1e-36 instead of something smaller still.
    const Bound bound = {.absolute = 1e-34, .relative = 8 * kF32Epsilon};
    expect_same(kernels, ref, gate, bound,
                [&](const RowOpKernels& k, float* p) { k.swiglu(p, up.data(), n); });
    expect_same(kernels, ref, up, bound,
                [&](const RowOpKernels& k, float* p) { k.mul_sigmoid(p, gate.data(), n); });
  }
}

// An expert's activation function, whoever computes the expert.
TEST(RowOpBits, GatingIsTheSameOnEveryVectorPath) {
  Inputs in(23);
  std::vector<float> gate = in.spiky(4099), up = in.spiky(4099);
  for (size_t i = 0; i < gate.size(); ++i) gate[i] *= 8.0f;
  const float edges[] = {0.0f, -0.0f, 1e-38f, 87.3365f, -87.3365f, 88.4f, -88.4f, 1e30f, -1e30f};
  std::copy(std::begin(edges), std::end(edges), gate.begin());
  std::vector<float> want;
  for (const Isa isa : available_isas()) {
    if (isa == Isa::Portable) continue;
    std::vector<float> got = gate;
    row_op_kernels(isa).swiglu(got.data(), up.data(), static_cast<int>(got.size()));
    if (want.empty()) want = got;
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0) << isa_name(isa);
  }
}

TEST_P(RowOps, SumsExponentialsLikeTheReference) {
  for (int n : kSizes) {
    Inputs in(5);
    std::vector<float> x = in.spiky(static_cast<size_t>(n));
    const float max = n == 0 ? 0.0f : *std::max_element(x.begin(), x.end());
    x.push_back(-std::numeric_limits<float>::infinity());
    const double want = ref.sum_exp(x.data(), max, n + 1);
    EXPECT_NEAR(kernels.sum_exp(x.data(), max, n + 1), want, 1e-6 * want) << n;
  }
}

TEST_P(RowOps, TakesDotProductsLikeTheReference) {
  for (int n : kSizes) {
    Inputs in(4);
    const auto a = in.spiky(static_cast<size_t>(n) + 1), b = in.spiky(static_cast<size_t>(n));
    double magnitude = 0.0;
    for (int i = 0; i < n; ++i)
      magnitude += std::fabs(double{a[static_cast<size_t>(i) + 1]} * b[static_cast<size_t>(i)]);
    const float got = kernels.dot(a.data() + 1, b.data(), n), want = ref.dot(a.data() + 1, b.data(), n);
    EXPECT_NEAR(got, want, (n / 4.0 + 4) * kF32Epsilon * magnitude + 1e-30) << n;
  }
}

TEST_P(RowOps, RotatesHeadsAndLeavesTheRest) {
  struct Case {
    int n_head, head_dim, n_rot;
    int64_t stride;
  };
  for (const Case& c : {Case{16, 256, 64, 512}, Case{2, 256, 64, 256}, Case{8, 128, 128, 128},
                        Case{3, 32, 16, 32}, Case{1, 16, 10, 16}, Case{0, 64, 64, 64}}) {
    Inputs in(5);
    const RopeTable table = make_rope_table({.n_rot = c.n_rot, .freq_base = 1e7});
    std::vector<float> cos_sin(static_cast<size_t>(c.n_rot));
    rope_angles(table, 12345, cos_sin.data());
    const auto x = in.spiky(static_cast<size_t>(c.n_head * c.stride));
    double most = 0.0;
    for (float v : x) most = std::max(most, std::fabs(double{v}));
    expect_same(kernels, ref, x, {.absolute = 3 * kF32Epsilon * most, .relative = 0},
                [&](const RowOpKernels& k, float* p) {
                  k.rope(p, c.n_head, c.head_dim, c.stride, c.n_rot, cos_sin.data());
                });
  }
}

TEST(Rope, AnglesArePlainWithoutScaling) {
  const RopeTable table = make_rope_table({.n_rot = 64, .freq_base = 1e7});
  ASSERT_EQ(table.inv_freq.size(), 32u);
  EXPECT_EQ(table.magnitude, 1.0f);
  for (int i = 0; i < 32; ++i)
    EXPECT_EQ(table.inv_freq[static_cast<size_t>(i)], static_cast<float>(std::pow(1e7, -2.0 * i / 64)));
  std::vector<float> cos_sin(64);
  rope_angles(table, 200'003, cos_sin.data());
  EXPECT_FLOAT_EQ(cos_sin[0], static_cast<float>(std::cos(200'003.0)));
  EXPECT_FLOAT_EQ(cos_sin[32], static_cast<float>(std::sin(200'003.0)));
  rope_angles(table, 0, cos_sin.data());
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(cos_sin[i], 1.0f);
    EXPECT_EQ(cos_sin[32 + i], 0.0f);
  }
}

// Values computed once with another implementation.
TEST(Rope, YarnMatchesThePublishedValues) {
  struct Value {
    size_t i;
    double inv_freq;
  };
  const auto expect = [](const RopeTable& table, std::initializer_list<Value> values) {
    for (const Value& v : values) EXPECT_NEAR(table.inv_freq[v.i], v.inv_freq, 1e-7 * v.inv_freq) << v.i;
  };
  const RopeTable a = make_rope_table({.n_rot = 128,
                                       .freq_base = 1e7,
                                       .scaling = RopeScaling::Yarn,
                                       .factor = 64,
                                       .original_context = 4096,
                                       .beta_fast = 32,
                                       .beta_slow = 1});
  EXPECT_NEAR(a.magnitude, 1.4158883, 1e-7);
  expect(a, {{0, 1.0},
             {11, 0.062643354},
             {12, 0.045501028},
             {18, 0.0058095986},
             {25, 1.4977812e-4},
             {26, 2.2390821e-5},
             {63, 2.0099952e-9}});
  const RopeTable b = make_rope_table({.n_rot = 64,
                                       .freq_base = 5e5,
                                       .scaling = RopeScaling::Yarn,
                                       .factor = 32,
                                       .original_context = 4096,
                                       .beta_fast = 64,
                                       .beta_slow = 1});
  EXPECT_NEAR(b.magnitude, 1.3465736, 1e-7);
  expect(b, {{5, 0.12868737},
             {6, 0.077876333},
             {10, 0.0092682008},
             {15, 2.5428131e-4},
             {16, 4.4194174e-5},
             {31, 9.4183067e-8}});
  const RopeTable c = make_rope_table({.n_rot = 64,
                                       .freq_base = 5e5,
                                       .scaling = RopeScaling::Yarn,
                                       .factor = 32,
                                       .original_context = 8192,
                                       .beta_fast = 64,
                                       .beta_slow = 1});
  expect(c, {{8, 0.034294136}, {12, 0.0040814061}});
  EXPECT_NEAR(c.inv_freq[17], 1.11977e-4, 1e-9);
}

TEST(Rope, YarnWithFactorOneIsPlain) {
  const RopeTable plain = make_rope_table({.n_rot = 64, .freq_base = 5e5});
  const RopeTable yarn = make_rope_table(
      {.n_rot = 64, .freq_base = 5e5, .scaling = RopeScaling::Yarn, .factor = 1.0, .original_context = 4096});
  EXPECT_EQ(plain.inv_freq, yarn.inv_freq);
  EXPECT_EQ(yarn.magnitude, 1.0f);
}

// A factor below 1 makes slow pairs faster; only the magnitude stays at 1.
TEST(Rope, YarnTakesFactorsBelowOne) {
  const RopeConfig config{
      .n_rot = 64, .freq_base = 5e5, .scaling = RopeScaling::Yarn, .factor = 0.5, .original_context = 4096};
  const RopeTable plain = make_rope_table({.n_rot = 64, .freq_base = 5e5}), yarn = make_rope_table(config);
  EXPECT_EQ(yarn.magnitude, 1.0f);
  EXPECT_EQ(yarn.inv_freq[0], plain.inv_freq[0]);
  EXPECT_FLOAT_EQ(yarn.inv_freq[31], 2 * plain.inv_freq[31]);
  RopeConfig none = config;
  none.factor = 0.0;  // as files say that there is none
  EXPECT_EQ(make_rope_table(none).inv_freq, plain.inv_freq);
}

TEST(Rope, LinearScalingDividesEveryFrequency) {
  const RopeTable plain = make_rope_table({.n_rot = 64, .freq_base = 5e5});
  const RopeTable linear =
      make_rope_table({.n_rot = 64, .freq_base = 5e5, .scaling = RopeScaling::Linear, .factor = 4.0});
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(linear.inv_freq[i], plain.inv_freq[i] / 4) << i;
  EXPECT_EQ(linear.magnitude, 1.0f);
}

// A share of 0 leaves nothing of YaRN but the division, and one in between is in between.
TEST(Rope, YarnKeepsTheShareOfFastFrequenciesItIsAskedFor) {
  RopeConfig config{
      .n_rot = 64, .freq_base = 5e5, .scaling = RopeScaling::Yarn, .factor = 8, .original_context = 4096};
  const RopeTable all = make_rope_table(config);
  config.extrapolation = 0.0;
  const RopeTable none = make_rope_table(config);
  config.extrapolation = 0.5;
  config.attention = 2.0;
  const RopeTable half = make_rope_table(config);
  config.scaling = RopeScaling::Linear;
  EXPECT_EQ(none.inv_freq, make_rope_table(config).inv_freq);
  EXPECT_EQ(none.magnitude, 1.0f);
  EXPECT_EQ(half.magnitude, 2 * all.magnitude);
  for (size_t i = 0; i < 32; ++i)
    EXPECT_NEAR(half.inv_freq[i], (all.inv_freq[i] + none.inv_freq[i]) / 2, 1e-7 * all.inv_freq[i]) << i;
}

TEST(Rope, MagnitudeScalesCosAndSin) {
  const RopeTable table = make_rope_table({.n_rot = 64,
                                           .freq_base = 5e5,
                                           .scaling = RopeScaling::Yarn,
                                           .factor = 32,
                                           .original_context = 4096,
                                           .beta_fast = 64,
                                           .beta_slow = 1});
  std::vector<float> cos_sin(64);
  rope_angles(table, 777, cos_sin.data());
  for (size_t i = 0; i < 32; ++i)
    EXPECT_NEAR(std::hypot(cos_sin[i], cos_sin[32 + i]), table.magnitude, 4 * kF32Epsilon * table.magnitude);
}

TEST(Activations, SoftplusAndSigmoidAreStable) {
  EXPECT_EQ(softplus(50.0f), 50.0f);
  EXPECT_FLOAT_EQ(softplus(0.0f), std::log(2.0f));
  EXPECT_NEAR(softplus(-30.0f), 9.357623e-14f, 1e-19f);
  EXPECT_EQ(sigmoid(0.0f), 0.5f);
  EXPECT_EQ(sigmoid(200.0f), 1.0f);
  EXPECT_NEAR(sigmoid(-200.0f), 0.0f, 1e-30f);
}

}  // namespace
}  // namespace thermo
