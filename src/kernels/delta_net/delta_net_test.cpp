#include "kernels/delta_net/delta_net.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "kernels/testing/compare.h"
#include "kernels/testing/guard_band.h"
#include "kernels/testing/inputs.h"

namespace thermo {
namespace {

using namespace thermo::testing;

struct Shape {
  int n_head_k, n_head_v, dim;
};
constexpr Shape kFixture = {2, 4, 16};

enum class Decay { None, Weak, Strong, Mixed };

// q, k and v of a step as the model has them: one row of q, k, v after the convolution.
struct Problem {
  Shape shape;
  int n_rows;
  size_t dim, k_size, v_size;
  std::vector<float> qkv, g, beta, state;
  std::vector<int32_t> parents;
  std::vector<uint64_t> words;

  Problem(const Shape& s, int rows, uint64_t seed, Decay decay = Decay::Mixed, bool tree = false)
      : shape(s),
        n_rows(rows),
        dim(static_cast<size_t>(s.dim)),
        k_size(static_cast<size_t>(s.n_head_k) * dim),
        v_size(static_cast<size_t>(s.n_head_v) * dim) {
    Inputs in(seed);
    const size_t n = static_cast<size_t>(rows);
    const size_t stride = 2 * k_size + v_size;
    qkv = in.spiky(n * stride);
    for (size_t r = 0; r < n; ++r) {
      l2_normalize_ref(&qkv[r * stride], s.n_head_k, s.dim, 1.0f / std::sqrt(static_cast<float>(s.dim)));
      l2_normalize_ref(&qkv[r * stride + k_size], s.n_head_k, s.dim, 1.0f);
      if (in.chance(0.05)) std::fill_n(&qkv[r * stride + k_size], dim, 0.0f);
    }
    for (size_t i = 0; i < n * static_cast<size_t>(s.n_head_v); ++i) {
      const float size = decay == Decay::None     ? 0.0f
                         : decay == Decay::Weak   ? 0.02f
                         : decay == Decay::Strong ? 3.0f
                         : in.chance(0.2)         ? 8.0f
                                                  : 0.1f;
      g.push_back(-size * std::fabs(in.normal()));
      beta.push_back(in.chance(0.1) ? 1.0f : in.uniform(0.0f, 1.0f));
    }
    state = in.spiky(static_cast<size_t>(s.n_head_v) * dim * dim, 0.3f);
    if (tree) set_tree(in.tree(rows));
  }

  void set_tree(const std::vector<int32_t>& tree) {
    parents = tree;
    words = ancestor_words(parents, 1);
  }

  size_t out_size() const { return static_cast<size_t>(n_rows) * v_size; }
  int64_t stride() const { return static_cast<int64_t>(2 * k_size + v_size); }

  DeltaNetArgs args(float* state_out, float* out, float* delta, bool uncommitted) const {
    return {.q = qkv.data(),
            .k = qkv.data() + k_size,
            .v = qkv.data() + 2 * k_size,
            .g = g.data(),
            .beta = beta.data(),
            .q_stride = stride(),
            .k_stride = stride(),
            .v_stride = stride(),
            .state = state_out,
            .out = out,
            .delta = delta,
            .n_rows = n_rows,
            .n_head_k = shape.n_head_k,
            .n_head_v = shape.n_head_v,
            .dim = shape.dim,
            .ancestors = words.empty() ? AncestorBits{} : AncestorBits{words.data(), 1},
            .uncommitted = uncommitted};
  }
  // The rows `first` .. `first + count` as a chain of their own.
  DeltaNetArgs slice(int first, int count, float* state_out, float* out) const {
    DeltaNetArgs a = args(state_out, out, nullptr, false);
    a.q += first * stride(), a.k += first * stride(), a.v += first * stride();
    a.g += first * shape.n_head_v, a.beta += first * shape.n_head_v;
    a.out += static_cast<size_t>(first) * v_size;
    a.n_rows = count;
    a.ancestors = {};
    return a;
  }

  // |k| <= 1, beta <= 1 and decay <= 1, so a step never amplifies an error: each row (of a chunk of at most
  // 64) adds the rounding of a sum of dim products, sqrt(dim) roundings of a random walk, relative to the
  // longest row the state can have.
  double bound() const {
    double most_state = 0.0, most_v = 0.0;
    for (size_t j = 0; j < state.size() / dim; ++j) {
      double sum = 0.0;
      for (size_t i = 0; i < dim; ++i) sum += double{state[j * dim + i]} * state[j * dim + i];
      most_state = std::max(most_state, std::sqrt(sum));
    }
    for (size_t r = 0; r < static_cast<size_t>(n_rows); ++r)
      for (size_t i = 0; i < v_size; ++i)
        most_v = std::max(most_v, std::fabs(double{qkv[r * static_cast<size_t>(stride()) + 2 * k_size + i]}));
    return (std::min(n_rows, 64) + 4) * std::sqrt(shape.dim) * kF32Epsilon * (most_state + 2 * most_v);
  }
};

struct Result {
  std::vector<float> state, out, delta;
};

Result reference(const Problem& problem, bool uncommitted) {
  Result r = {problem.state, std::vector<float>(problem.out_size()), std::vector<float>(problem.out_size())};
  delta_net_ref(problem.args(r.state.data(), r.out.data(), r.delta.data(), uncommitted));
  return r;
}

class DeltaNet : public ::testing::TestWithParam<Isa> {
 protected:
  const DeltaNetKernels& kernels = delta_net_kernels(GetParam());

  void expect_same(const Problem& problem, bool uncommitted, size_t misalign = 0) {
    GuardedBuffer<float> state(problem.state.size(), misalign), out(problem.out_size(), misalign);
    GuardedBuffer<float> delta(problem.out_size(), misalign);
    GuardedBuffer<float> scratch(delta_net_scratch_floats(problem.shape.dim));
    std::copy(problem.state.begin(), problem.state.end(), state.data());
    const DeltaNetArgs args = problem.args(state.data(), out.data(), delta.data(), uncommitted);
    const int half = args.n_head_v / 2;
    kernels.rows(args, 0, half, scratch.data());
    kernels.rows(args, half, args.n_head_v, scratch.data());
    EXPECT_TRUE(state.intact() && out.intact() && delta.intact() && scratch.intact());
    const Result want = reference(problem, uncommitted);
    const Bound bound = {.absolute = problem.bound(), .relative = 0};
    EXPECT_TRUE(all_close(out.span(), want.out, bound))
        << "out, rows " << problem.n_rows << ", dim " << args.dim;
    EXPECT_TRUE(all_close(delta.span(), want.delta, bound))
        << "delta, rows " << problem.n_rows << ", dim " << args.dim;
    if (uncommitted)
      EXPECT_TRUE(std::equal(problem.state.begin(), problem.state.end(), state.data()));
    else
      EXPECT_TRUE(all_close(state.span(), want.state, bound)) << "state, rows " << problem.n_rows;
  }
};
INSTANTIATE_TEST_SUITE_P(Isas, DeltaNet, ::testing::ValuesIn(available_isas()),
                         [](const auto& test) { return isa_name(test.param); });

constexpr Decay kDecays[] = {Decay::None, Decay::Weak, Decay::Strong, Decay::Mixed};

TEST_P(DeltaNet, RunsChainsOfAnyLength) {
  uint64_t seed = 1;
  for (Decay decay : kDecays)
    for (int n_rows : {0, 1, 2, 5, 6, 7, 8, 9, 16, 17, 31, 63, 64, 65, 100, 128, 131}) {
      expect_same(Problem(kFixture, n_rows, seed++, decay), false);
      if (n_rows <= kDeltaChunk) expect_same(Problem(kFixture, n_rows, seed++, decay), true);
    }
}

TEST_P(DeltaNet, HandlesEveryHeadSize) {
  for (int dim : {8, 16, 24, 32, 40, 64, 72, 128})
    for (int n_rows : {1, 3, 21, 70}) {
      expect_same(Problem({1, 2, dim}, n_rows, 7), false, 1);
      if (n_rows <= kDeltaChunk) expect_same(Problem({1, 2, dim}, n_rows, 8), true);
    }
}

TEST_P(DeltaNet, RunsTheRealShape) {
  const Shape qwen = {16, 32, 128};
  for (int n_rows : {1, 4, 65}) expect_same(Problem(qwen, n_rows, 9), false);
  expect_same(Problem(qwen, 22, 10, Decay::Weak, true), true);
}

// The rows one after the other, each as one decoded token would be.
struct Decoded {
  std::vector<float> state, out;
};
Decoded decode(const DeltaNetKernels& kernels, const Problem& problem, std::span<const int32_t> rows) {
  Decoded d = {problem.state, std::vector<float>(problem.out_size())};
  GuardedBuffer<float> scratch(delta_net_scratch_floats(problem.shape.dim));
  for (const int32_t row : rows)
    kernels.rows(problem.slice(row, 1, d.state.data(), d.out.data()), 0, problem.shape.n_head_v,
                 scratch.data());
  return d;
}

std::vector<float> commit(const DeltaNetKernels& kernels, const Problem& problem, const float* delta,
                          std::span<const int32_t> path) {
  std::vector<float> state = problem.state;
  kernels.commit({.k = problem.qkv.data() + problem.k_size,
                  .g = problem.g.data(),
                  .delta = delta,
                  .k_stride = problem.stride(),
                  .state = state.data(),
                  .path = path,
                  .n_head_k = problem.shape.n_head_k,
                  .n_head_v = problem.shape.n_head_v,
                  .dim = problem.shape.dim},
                 0, problem.shape.n_head_v);
  return state;
}

std::vector<int32_t> first_numbers(int n) {
  std::vector<int32_t> rows(static_cast<size_t>(n));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

TEST_P(DeltaNet, HasTheSameBitsHoweverAChainIsCut) {
  for (const Shape& shape : {Shape{2, 4, 32}, {1, 2, 72}, {1, 2, 128}, {2, 2, 8}}) {
    const Problem problem(shape, 200, 21);
    const Decoded want = decode(kernels, problem, first_numbers(200));
    for (const std::vector<int>& lengths :
         {std::vector<int>{1, 63, 64, 65, 7}, {65, 65, 1, 1, 1, 67}, {200}, {3, 100, 97}, {2, 198}}) {
      std::vector<float> state = problem.state, out(problem.out_size());
      GuardedBuffer<float> scratch(delta_net_scratch_floats(shape.dim));
      int first = 0;
      for (int n : lengths) {
        kernels.rows(problem.slice(first, n, state.data(), out.data()), 0, shape.n_head_v, scratch.data());
        first += n;
      }
      ASSERT_EQ(first, 200);
      EXPECT_TRUE(same_bits(out, want.out)) << "dim " << shape.dim;
      EXPECT_TRUE(same_bits(state, want.state)) << "dim " << shape.dim;
    }
  }
}

TEST_P(DeltaNet, RunsRandomTrees) {
  uint64_t seed = 31;
  for (Decay decay : kDecays)
    for (int n_rows : {1, 2, 3, 6, 15, 16, 17, 33, 63, 64})
      expect_same(Problem(kFixture, n_rows, seed++, decay, true), true);
  expect_same(Problem({2, 4, 64}, 64, seed, Decay::Strong, true), true);
}

// A path of 64 rows, 64 roots, a comb (a chain whose every row has a leaf), and the tree that needs most
// blocks of state: every row has two children.
std::vector<std::vector<int32_t>> odd_trees() {
  std::vector<int32_t> path(64), roots(64, -1), comb(64), binary(64);
  for (int32_t r = 0; r < 64; ++r) {
    const size_t i = static_cast<size_t>(r);
    path[i] = r - 1;
    comb[i] = r == 0 ? -1 : (r - 1) / 2 * 2;
    binary[i] = r == 0 ? -1 : (r - 1) / 2;
  }
  return {path, roots, comb, binary};
}

TEST_P(DeltaNet, TreeRowsHaveTheBitsOfTheirBranch) {
  std::vector<std::vector<int32_t>> trees = odd_trees();
  for (int n_rows : {1, 2, 6, 23, 63, 64})
    for (uint64_t seed = 41; seed < 44; ++seed) trees.push_back(Inputs(seed).tree(n_rows));
  trees.push_back({-1, -1, 0, 1, 1, 2, -1, 6});  // several roots
  for (const Shape& shape : {Shape{2, 4, 32}, {1, 2, 24}})
    for (const std::vector<int32_t>& parents : trees) {
      const int n_rows = static_cast<int>(parents.size());
      Problem tree(shape, n_rows, 45);
      tree.set_tree(parents);
      std::vector<float> state = tree.state, out(tree.out_size()), delta(tree.out_size());
      GuardedBuffer<float> scratch(delta_net_scratch_floats(shape.dim));
      kernels.rows(tree.args(state.data(), out.data(), delta.data(), true), 0, shape.n_head_v,
                   scratch.data());
      EXPECT_TRUE(scratch.intact());
      EXPECT_TRUE(same_bits(state, tree.state));
      for (int leaf = 0; leaf < n_rows; ++leaf) {
        const auto path = path_to(parents, leaf);
        const Decoded want = decode(kernels, tree, path);
        const size_t at = static_cast<size_t>(leaf) * tree.v_size;
        EXPECT_TRUE(same_bits({out.data() + at, tree.v_size}, {want.out.data() + at, tree.v_size}))
            << "row " << leaf << " of " << n_rows;
        EXPECT_TRUE(same_bits(commit(kernels, tree, delta.data(), path), want.state))
            << "row " << leaf << " of " << n_rows;
      }
    }
}

TEST_P(DeltaNet, KeptChainsHaveTheBitsOfDecoding) {
  for (int dim : {8, 40, 128})
    for (int n_rows : {1, 2, 33, 64}) {
      const Problem problem({1, 2, dim}, n_rows, 46);
      std::vector<float> state = problem.state, out(problem.out_size()), delta(problem.out_size());
      GuardedBuffer<float> scratch(delta_net_scratch_floats(dim));
      kernels.rows(problem.args(state.data(), out.data(), delta.data(), true), 0, 2, scratch.data());
      EXPECT_TRUE(same_bits(state, problem.state));
      const std::vector<int32_t> all = first_numbers(n_rows);
      const Decoded want = decode(kernels, problem, all);
      EXPECT_TRUE(same_bits(out, want.out));
      EXPECT_TRUE(same_bits(commit(kernels, problem, delta.data(), all), want.state));
    }
}

TEST_P(DeltaNet, FollowsTheWorkedTree) {
  // A tree of six rows; the accepted path is 0, 3, 5.
  Problem tree(kFixture, 6, 51, Decay::Mixed);
  tree.set_tree({-1, 0, 1, 0, 2, 3});
  expect_same(tree, true);
  std::vector<float> state = tree.state, out(tree.out_size()), delta(tree.out_size());
  GuardedBuffer<float> scratch(delta_net_scratch_floats(16));
  kernels.rows(tree.args(state.data(), out.data(), delta.data(), true), 0, 4, scratch.data());
  std::vector<float> want = tree.state, chain_out(tree.out_size());
  const std::vector<int32_t> path = {0, 3, 5};
  for (int32_t row : path) delta_net_ref(tree.slice(row, 1, want.data(), chain_out.data()));
  state = commit(kernels, tree, delta.data(), path);
  EXPECT_TRUE(all_close(state, want, {.absolute = tree.bound(), .relative = 0}));
}

TEST_P(DeltaNet, CommitsAnyPathLikeTheReference) {
  for (int dim : {8, 16, 24, 40, 64, 128})
    for (int length : {0, 1, 2, 7, 64, 70}) {
      const Problem problem({2, 4, dim}, 70, 61, Decay::Mixed);
      Inputs in(62);
      const auto delta = in.spiky(problem.out_size());
      std::vector<int32_t> path(static_cast<size_t>(length));
      std::iota(path.begin(), path.end(), 70 - length);
      GuardedBuffer<float> state(problem.state.size(), 1);
      std::copy(problem.state.begin(), problem.state.end(), state.data());
      std::vector<float> want = problem.state;
      DeltaNetCommitArgs args = {.k = problem.qkv.data() + problem.k_size,
                                 .g = problem.g.data(),
                                 .delta = delta.data(),
                                 .k_stride = problem.stride(),
                                 .state = state.data(),
                                 .path = path,
                                 .n_head_k = 2,
                                 .n_head_v = 4,
                                 .dim = dim};
      kernels.commit(args, 0, 3);
      kernels.commit(args, 3, 4);
      args.state = want.data();
      delta_net_commit_ref(args);
      EXPECT_TRUE(state.intact());
      EXPECT_TRUE(all_close(state.span(), want, {.absolute = (length + 4) * kF32Epsilon * 64, .relative = 0}))
          << "dim " << dim << ", path " << length;
    }
}

// ---- convolution
// ----------------------------------------------------------------------------------------------

TEST_P(DeltaNet, ConvolvesLikeTheReference) {
  for (int taps : {1, 2, 3, 4, 5, 8})
    for (int n_channels : {1, 15, 16, 17, 127, 129, 300})
      for (int n_rows : {0, 1, 2, 5, 9})
        for (bool tree : {false, true}) {
          Inputs in(71);
          const size_t channels = static_cast<size_t>(n_channels);
          const size_t stride = channels + 5;  // rows need not be packed
          const auto u = in.spiky(stride * static_cast<size_t>(n_rows));
          const auto weight = in.normal(channels * static_cast<size_t>(taps));
          const auto state = in.spiky(stride * static_cast<size_t>(taps - 1));
          const auto parents = in.tree(n_rows);
          GuardedBuffer<float> out(u.size(), 1);
          std::fill(out.data(), out.data() + out.size(), 0.0f);  // what lies between rows is not written
          std::vector<float> want(u.size());
          ConvArgs args = {.u = u.data(),
                           .weight = weight.data(),
                           .state = state.data(),
                           .parents = tree ? parents.data() : nullptr,
                           .out = out.data(),
                           .n_rows = n_rows,
                           .taps = taps,
                           .stride = static_cast<int64_t>(stride)};
          kernels.conv(args, 0, n_channels / 3);
          args.n_rows = n_rows / 2;
          kernels.conv(args, n_channels / 3, n_channels);
          args.first_row = n_rows / 2;
          args.n_rows = n_rows;
          kernels.conv(args, n_channels / 3, n_channels);
          args.out = want.data();
          args.first_row = 0;
          conv_ref(args, n_channels);
          EXPECT_TRUE(out.intact());
          // taps products of at most 32 * 4, rounded each; silu has slope 1.1.
          EXPECT_TRUE(all_close(out.span(), want,
                                {.absolute = taps * kF32Epsilon * 128, .relative = 8 * kF32Epsilon}))
              << taps << " taps, " << n_channels << " channels, " << n_rows << " rows";
        }
}

TEST_P(DeltaNet, ConvolutionWalksTheWorkedTree) {
  // A tree of six rows. Inputs are distinct powers of two and weights one, so the sum names its
  // inputs.
  const std::vector<int32_t> parents = {-1, 0, 1, 0, 2, 3};
  const std::vector<float> u = {1, 2, 4, 8, 16, 32}, weight = {1, 1, 1, 1}, state = {64, 128, 256};
  std::vector<float> out(6);
  kernels.conv({.u = u.data(),
                .weight = weight.data(),
                .state = state.data(),
                .parents = parents.data(),
                .out = out.data(),
                .n_rows = 6,
                .taps = 4,
                .stride = 1},
               0, 1);
  const float want[] = {64 + 128 + 256 + 1, 128 + 256 + 1 + 2, 256 + 1 + 2 + 4,
                        128 + 256 + 1 + 8,  1 + 2 + 4 + 16,    256 + 1 + 8 + 32};
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(out[i], want[i], 1e-4f) << i;
}

// ---- norms
// ----------------------------------------------------------------------------------------------------

TEST_P(DeltaNet, NormalisesHeads) {
  for (int dim : {1, 7, 16, 17, 64, 128}) {
    Inputs in(81);
    const auto x = in.spiky(static_cast<size_t>(3 * dim)), z = in.spiky(x.size(), 3.0f);
    const auto weight = in.normal(static_cast<size_t>(dim));
    const Bound bound = {.absolute = 1e-30, .relative = (dim / 8.0 + 16) * kF32Epsilon};
    GuardedBuffer<float> got(x.size(), 1);
    std::vector<float> want = x;
    std::copy(x.begin(), x.end(), got.data());
    kernels.l2_normalize(got.data(), 3, dim, 0.25f);
    l2_normalize_ref(want.data(), 3, dim, 0.25f);
    EXPECT_TRUE(got.intact());
    EXPECT_TRUE(all_close(got.span(), want, bound));
    std::copy(x.begin(), x.end(), got.data());
    want = x;
    kernels.gated_norm(got.data(), z.data(), weight.data(), 3, dim, 1e-6f);
    gated_norm_ref(want.data(), z.data(), weight.data(), 3, dim, 1e-6f);
    EXPECT_TRUE(got.intact());
    EXPECT_TRUE(all_close(got.span(), want, bound));
  }
  std::vector<float> zero(32, 0.0f);
  kernels.l2_normalize(zero.data(), 2, 16, 1.0f);
  for (float x : zero) EXPECT_EQ(x, 0.0f);
}

}  // namespace
}  // namespace thermo
