#include "kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>
#include <span>

#include "base/thread_pool.h"
#include "kernels/dequantize/dequantize.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/guard_band.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/thinned.h"

namespace thermo {
namespace {

using namespace thermo::testing;

struct Shape {
  int n_head, n_head_kv, head_dim;
};
struct Step {
  int n_past, n_rows;
  int window = 0;
};

// Pages of a cache in an order of their own, with one that nobody has between any two; NaN where nothing was
// written.
struct TestPages {
  std::vector<int32_t> table;
  size_t slot = 0, page_bytes = 0;
  std::vector<std::byte> bytes;

  TestPages() = default;
  TestPages(int n_slots, size_t slot_bytes, size_t longest_slot)
      : slot(slot_bytes), page_bytes(kKvPage * longest_slot) {
    const int n = (n_slots + kKvPage - 1) / kKvPage;
    for (int i = 0; i < n; ++i) table.push_back(2 * ((i * 7 + 3) % n));
    while (std::set<int32_t>(table.begin(), table.end()).size() < table.size())  // 7 divides n
      for (int i = 0; i < n; ++i) table[static_cast<size_t>(i)] = 2 * (n - 1 - i);
    bytes.resize(static_cast<size_t>(2 * n) * page_bytes, std::byte{0xff});
  }
  std::byte* at(int i) {
    return bytes.data() + static_cast<size_t>(table[static_cast<size_t>(i / kKvPage)]) * page_bytes +
           static_cast<size_t>(i % kKvPage) * slot;
  }
};

// One layer of one sequence: a cache with n_past + n_rows slots, the last n_rows of them the step's own.
struct Problem {
  Shape shape;
  Step step;
  KvType k_type, v_type;
  std::vector<float> q, k, v;
  std::vector<int32_t> positions;
  std::vector<int32_t> parents;  // empty: a chain
  std::vector<uint64_t> words;
  bool both_ways = false;
  TestPages k_cache, v_cache;

  Problem(const Shape& s, const Step& t, KvType kt, KvType vt, uint64_t seed, bool tree = false)
      : shape(s), step(t), k_type(kt), v_type(vt) {
    Inputs in(seed);
    const size_t n_slots = static_cast<size_t>(t.n_past + t.n_rows);
    const size_t head_dim = static_cast<size_t>(s.head_dim), n_head_kv = static_cast<size_t>(s.n_head_kv);
    q = in.spiky(static_cast<size_t>(t.n_rows * s.n_head) * head_dim);
    k = in.spiky(n_slots * n_head_kv * head_dim);
    v = in.spiky(n_slots * n_head_kv * head_dim);
    positions.resize(static_cast<size_t>(t.n_rows));
    std::iota(positions.begin(), positions.end(), t.n_past);
    if (tree) {
      parents = in.tree(t.n_rows);
      for (size_t i = 0; i < parents.size(); ++i)
        positions[i] = parents[i] < 0 ? t.n_past : positions[static_cast<size_t>(parents[i])] + 1;
      words = ancestor_words(parents, words_per_row());
    }
    const size_t k_slot = n_head_kv * kv_head_bytes(kt, s.head_dim),
                 v_slot = n_head_kv * kv_head_bytes(vt, s.head_dim), longest = std::max(k_slot, v_slot);
    k_cache = TestPages(t.n_past + t.n_rows, k_slot, longest);
    v_cache = TestPages(t.n_past + t.n_rows, v_slot, longest);
    fill_cache();
  }

  void fill_cache() {
    attention_kernels(Isa::Portable)
        .kv_append({.k = k.data(),
                    .v = v.data(),
                    .kv = kv(),
                    .first_slot = 0,
                    .n_rows = step.n_past + step.n_rows,
                    .n_head_kv = shape.n_head_kv,
                    .head_dim = shape.head_dim});
    forget_unseen();
  }

  // Pages before the first one that a row sees are somebody else's by now.
  void forget_unseen() {
    if (step.window == 0 || step.n_rows == 0) return;
    const int first = std::max(0, *std::min_element(positions.begin(), positions.end()) - step.window + 1);
    for (int page = 0; page < first / kKvPage; ++page)
      for (TestPages* cache : {&k_cache, &v_cache})
        std::memset(cache->at(page * kKvPage), 0xff, cache->page_bytes);
  }

  int words_per_row() const { return (step.n_rows + 63) / 64; }
  KvView kv() {
    return {.k_type = k_type,
            .v_type = v_type,
            .k = k_cache.bytes.data(),
            .v = v_cache.bytes.data(),
            .pages = k_cache.table.data(),
            .page_bytes = static_cast<int64_t>(k_cache.page_bytes)};
  }
  size_t out_size() const { return q.size(); }
  AttentionArgs args(float* out) {
    return {.q = q.data(),
            .kv = kv(),
            .out = out,
            .positions = positions.data(),
            .n_rows = step.n_rows,
            .n_past = step.n_past,
            .n_head = shape.n_head,
            .n_head_kv = shape.n_head_kv,
            .head_dim = shape.head_dim,
            .scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim)),
            .window = step.window,
            .ancestors = words.empty() ? AncestorBits{} : AncestorBits{words.data(), words_per_row()},
            .both_ways = both_ways};
  }
};

std::vector<float> reference(Problem& problem) {
  std::vector<float> want(problem.out_size());
  attention_ref(problem.args(want.data()));
  return want;
}

double longest_head(const float* x, size_t n_heads, size_t dim) {
  double most = 0.0;
  for (size_t h = 0; h < n_heads; ++h) {
    double sum = 0.0;
    for (size_t i = 0; i < dim; ++i) sum += double{x[h * dim + i]} * x[h * dim + i];
    most = std::max(most, std::sqrt(sum));
  }
  return most;
}

// What rounding may do to each output. A score is a sum of head_dim products, one after the other at worst,
// with sum |q_i k_i| <= |q| |k|; its error changes a weight relatively by as much, twice (the weight and the
// sum of weights). Then a sum over the slots, whose terms add up to the attention over |v|.
std::vector<double> bounds(Problem& problem) {
  const size_t dim = static_cast<size_t>(problem.shape.head_dim);
  Problem absolute = problem;
  for (float& x : absolute.v) x = std::fabs(x);
  absolute.fill_cache();
  const std::vector<float> size = reference(absolute);
  const double longest_k = longest_head(problem.k.data(), problem.k.size() / dim, dim);
  const int n_slots = problem.step.n_past + problem.step.n_rows;
  std::vector<double> out(size.size());
  for (size_t i = 0; i < out.size(); ++i) {
    const double score =
        longest_head(&problem.q[i / dim * dim], 1, dim) * longest_k / std::sqrt(static_cast<double>(dim));
    const double score_error = (static_cast<double>(dim) + 4) * kF32Epsilon * score;
    out[i] = (2 * score_error + (n_slots + 16) * kF32Epsilon) * size[i] + 1e-30;
  }
  return out;
}

::testing::AssertionResult is_attention(std::span<const float> got, Problem& problem) {
  const std::vector<double> bound = bounds(problem);
  return all_close_at(
      got, reference(problem), [&](size_t i) { return bound[i]; }, 0.0, 0.99999);
}

class Attention : public ::testing::TestWithParam<Isa> {
 protected:
  const AttentionKernels& kernels = attention_kernels(GetParam());

  // Every row and head, `tile_rows` rows per call.
  void expect_same(Problem& problem, int tile_rows, size_t misalign = 0) {
    const Shape& s = problem.shape;
    GuardedBuffer<float> out(problem.out_size(), misalign);
    GuardedBuffer<float> scratch(attention_scratch_floats(s.n_head, s.n_head_kv, s.head_dim));
    const AttentionArgs args = problem.args(out.data());
    for (int r = 0; r < args.n_rows; r += tile_rows)
      for (int g = 0; g < s.n_head_kv; ++g)
        kernels.attend(args, r, std::min(args.n_rows, r + tile_rows), g, scratch.data());
    EXPECT_TRUE(out.intact());
    EXPECT_TRUE(scratch.intact());
    EXPECT_TRUE(is_attention(out.span(), problem))
        << s.n_head << " heads, " << s.n_head_kv << " kv, dim " << s.head_dim << ", past " << args.n_past
        << ", rows " << args.n_rows << ", window " << args.window << ", k " << kv_type_name(problem.k_type)
        << ", v " << kv_type_name(problem.v_type);
  }
};
INSTANTIATE_TEST_SUITE_P(Isas, Attention, ::testing::ValuesIn(available_isas()),
                         [](const auto& test) { return isa_name(test.param); });

constexpr KvType kTypes[] = {KvType::F32, KvType::F16, KvType::Q8_0, KvType::BF16, KvType::Q4_0};

TEST_P(Attention, DecodesOneRowForEveryGroupAndType) {
  uint64_t seed = 1;
  Thinned cases(7);
  for (int group : {1, 2, 3, 4, 6, 8, 12, 16})
    for (KvType kt : kTypes)
      for (KvType vt : kTypes)
        for (int n_past : {0, 1, 62, 63, 64, 65, 131, 255, 256, 513}) {
          if (!cases.takes()) continue;
          Problem problem({2 * group, 2, 64}, {n_past, 1}, kt, vt, seed++);
          expect_same(problem, 1);
        }
}

TEST_P(Attention, HandlesEveryHeadSize) {
  for (int dim : {8, 16, 24, 32, 40, 64, 80, 128, 256})
    for (int n_rows : {1, 3, 17}) {
      Problem f16({6, 2, dim}, {37, n_rows}, KvType::F16, KvType::F32, 11);
      expect_same(f16, n_rows);
      Problem f32({6, 2, dim}, {37, n_rows}, KvType::F32, KvType::F16, 12);
      expect_same(f32, n_rows, 1);
      Problem bf16({6, 2, dim}, {37, n_rows}, KvType::BF16, KvType::BF16, 14);
      expect_same(bf16, n_rows);
      if (dim % 32 != 0) continue;
      Problem q8({6, 2, dim}, {37, n_rows}, KvType::Q8_0, KvType::Q8_0, 13);
      expect_same(q8, n_rows);
      Problem q4({6, 2, dim}, {37, n_rows}, KvType::Q4_0, KvType::Q4_0, 15);
      expect_same(q4, n_rows);
    }
}

TEST_P(Attention, PrefillsInTilesOfAnyLength) {
  Thinned cases(5);
  for (int n_rows : {1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 101})
    for (int n_past : {0, 5, 64, 130})
      for (int window : {0, 1, 13, 64}) {
        if (!cases.takes()) continue;
        Problem problem({8, 2, 32}, {n_past, n_rows, window}, KvType::F16, KvType::F16,
                        static_cast<uint64_t>(n_rows * 1000 + n_past));
        expect_same(problem, n_rows);
        if (n_rows > 8) expect_same(problem, 8);
      }
}

TEST_P(Attention, SeesBothWays) {
  Thinned cases(3);
  for (int n_rows : {1, 2, 7, 16, 33})
    for (int n_past : {0, 5, 64, 130})
      for (int window : {0, 40}) {
        if (!cases.takes()) continue;
        Problem problem({6, 2, 32}, {n_past, n_rows, window}, KvType::F16, KvType::F32,
                        static_cast<uint64_t>(n_rows * 1000 + n_past));
        problem.both_ways = true;
        expect_same(problem, n_rows);
        expect_same(problem, 3);
      }
}

TEST_P(Attention, TakesNoRows) {
  Problem problem({8, 2, 32}, {5, 0}, KvType::F16, KvType::F16, 1);
  expect_same(problem, 1);
}

TEST_P(Attention, RunsTheRealShapes) {
  const Shape qwen = {16, 2, 256}, laguna_full = {48, 8, 128}, laguna_window = {64, 8, 128},
              plankton = {4, 2, 32};
  struct Types {
    KvType k, v;
    uint64_t seed;
  };
  Thinned cases(5);
  for (const Shape& shape : {qwen, laguna_full, laguna_window, plankton}) {
    const int window = shape.n_head == 64 ? 512 : 0;
    for (const Step& step : {Step{700, 1, window}, Step{600, 16, window}, Step{0, 65, window}})
      for (const auto& [k, v, seed] :
           {Types{KvType::F16, KvType::F16, 21}, Types{KvType::Q8_0, KvType::Q8_0, 22},
            Types{KvType::Q4_0, KvType::BF16, 23}}) {
        if (!cases.takes()) continue;
        Problem problem(shape, step, k, v, seed);
        expect_same(problem, step.n_rows);
      }
  }
}

TEST_P(Attention, WindowCountsTheRowItself) {
  // Key j is visible to query i iff i - j < window. A window of 1 is the row alone.
  Problem problem({4, 2, 32}, {40, 3, 1}, KvType::F32, KvType::F32, 31);
  GuardedBuffer<float> out(problem.out_size());
  GuardedBuffer<float> scratch(attention_scratch_floats(4, 2, 32));
  const AttentionArgs args = problem.args(out.data());
  for (int g = 0; g < 2; ++g) kernels.attend(args, 0, 3, g, scratch.data());
  for (size_t r = 0; r < 3; ++r)
    for (size_t h = 0; h < 4; ++h)
      for (size_t d = 0; d < 32; ++d) {
        const float v = problem.v[((40 + r) * 2 + h / 2) * 32 + d];
        EXPECT_NEAR(out[(r * 4 + h) * 32 + d], v, 2 * kF32Epsilon * std::fabs(v));
      }
}

// ---- bits

std::vector<float> attend_all(const AttentionKernels& kernels, const AttentionArgs& args, int tile_rows) {
  std::vector<float> out(static_cast<size_t>(args.n_rows) * static_cast<size_t>(args.n_head * args.head_dim));
  AttentionArgs to_out = args;
  to_out.out = out.data();
  GuardedBuffer<float> scratch(attention_scratch_floats(args.n_head, args.n_head_kv, args.head_dim));
  for (int r = 0; r < args.n_rows; r += tile_rows)
    for (int g = 0; g < args.n_head_kv; ++g)
      kernels.attend(to_out, r, std::min(args.n_rows, r + tile_rows), g, scratch.data());
  EXPECT_TRUE(scratch.intact());
  return out;
}

// Each row of a chain as a step of its own.
std::vector<float> decode(const AttentionKernels& kernels, Problem& chain) {
  std::vector<float> out;
  const AttentionArgs all = chain.args(nullptr);
  for (int r = 0; r < all.n_rows; ++r) {
    AttentionArgs one = all;
    one.q += static_cast<ptrdiff_t>(r) * all.n_head * all.head_dim;
    one.positions += r;
    one.n_past += r;
    one.n_rows = 1;
    const std::vector<float> row = attend_all(kernels, one, 1);
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

// The branch of a tree that ends in `leaf`, as the chain it would be.
Problem branch(const Problem& tree, int leaf) {
  const auto path = path_to(tree.parents, leaf);
  Problem chain(tree.shape, {tree.step.n_past, static_cast<int>(path.size()), tree.step.window}, tree.k_type,
                tree.v_type, 0);
  const size_t row_floats = tree.q.size() / tree.parents.size();
  for (size_t i = 0; i < path.size(); ++i)
    std::copy_n(tree.q.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(path[i]) * row_floats),
                row_floats, chain.q.begin() + static_cast<ptrdiff_t>(i * row_floats));
  const auto copy_slots = [&](TestPages from, TestPages& to) {
    for (int i = 0; i < tree.step.n_past; ++i) std::copy_n(from.at(i), from.slot, to.at(i));
    for (size_t i = 0; i < path.size(); ++i)
      std::copy_n(from.at(tree.step.n_past + path[i]), from.slot,
                  to.at(tree.step.n_past + static_cast<int>(i)));
  };
  copy_slots(tree.k_cache, chain.k_cache);
  copy_slots(tree.v_cache, chain.v_cache);
  return chain;
}

TEST_P(Attention, RowsHaveTheSameBitsAloneAndTogether) {
  uint64_t seed = 200;
  for (const Shape& shape : {Shape{8, 2, 64},
                             {16, 2, 128},
                             {16, 2, 256},
                             {5, 1, 32},
                             {7, 1, 80},
                             {6, 2, 24},
                             {12, 1, 64},
                             {2, 2, 16},
                             {3, 1, 40},
                             {64, 1, 8},
                             {70, 1, 16}})
    for (const Step& step : {Step{0, 70}, Step{60, 9}, Step{250, 130}, Step{250, 130, 100}, Step{700, 5, 300},
                             Step{500, 20, 1}}) {
      if (shape.head_dim >= 128 && step.n_rows > 100) continue;
      const KvType type = kTypes[seed % std::size(kTypes)];
      const bool fits = !kv_in_blocks(type) || shape.head_dim % 32 == 0;
      Problem problem(shape, step, fits ? type : KvType::F32, KvType::F16, seed++);
      const std::vector<float> want = decode(kernels, problem);
      const AttentionArgs args = problem.args(nullptr);
      for (int tile_rows : {2, 3, 8, 64, step.n_rows})
        EXPECT_TRUE(same_bits(attend_all(kernels, args, tile_rows), want))
            << shape.n_head << " heads of " << shape.head_dim << ", past " << step.n_past << ", rows "
            << step.n_rows << ", window " << step.window << ", by " << tile_rows;
    }
}

TEST_P(Attention, EveryTypeHasTheSameBitsAloneAndTogether) {
  Thinned cases(7);
  for (KvType kt : kTypes)
    for (KvType vt : kTypes)
      for (int group : {1, 2, 3, 4, 5, 6, 7, 8, 9}) {
        if (!cases.takes()) continue;
        Problem problem({2 * group, 2, 64}, {90, 45}, kt, vt, static_cast<uint64_t>(group));
        EXPECT_TRUE(same_bits(attend_all(kernels, problem.args(nullptr), 45), decode(kernels, problem)))
            << kv_type_name(kt) << " " << kv_type_name(vt) << ", group " << group;
      }
}

TEST_P(Attention, TreeRowsHaveTheBitsOfTheirBranch) {
  Thinned cases(5);
  for (int n_rows : {1, 2, 6, 16, 33, 64, 70})
    for (const auto& [n_past, window] :
         {std::pair{45, 0}, {45, 3}, {250, 20}, {0, 0}, {256, 0}, {640, 130}, {230, 0}, {1010, 100}})
      for (const Shape& shape : {Shape{8, 2, 64}, {9, 1, 40}, {4, 4, 32}}) {
        if (!cases.takes()) continue;
        const KvType v_type = shape.head_dim % 32 == 0 ? KvType::Q8_0 : KvType::F32;
        Problem tree(shape, {n_past, n_rows, window}, KvType::F16, v_type, static_cast<uint64_t>(n_rows),
                     true);
        if (n_past == 45) expect_same(tree, n_rows);
        const std::vector<float> got = attend_all(kernels, tree.args(nullptr), n_rows);
        EXPECT_TRUE(same_bits(attend_all(kernels, tree.args(nullptr), 3), got));
        const size_t row_floats = static_cast<size_t>(shape.n_head * shape.head_dim);
        for (int leaf = 0; leaf < n_rows; leaf += 5) {
          Problem chain = branch(tree, leaf);
          const std::vector<float> want = decode(kernels, chain);
          EXPECT_TRUE(same_bits(std::span(got).subspan(static_cast<size_t>(leaf) * row_floats, row_floats),
                                std::span(want).last(row_floats)))
              << "row " << leaf << " of " << n_rows << ", past " << n_past << ", window " << window
              << ", heads " << shape.n_head << " of " << shape.head_dim;
        }
      }
}

TEST_P(Attention, DoesNotReadWhatNobodySees) {
  // Slots after the last row, and siblings of a tree row, may hold anything.
  Problem tree({8, 2, 64}, {70, 8}, KvType::F32, KvType::F32, 91, true);
  tree.parents = {-1, -1, 0, 1, 2, 3, 4, 5};
  tree.positions = {70, 70, 71, 71, 72, 72, 73, 73};
  tree.words = ancestor_words(tree.parents, 1);
  const std::vector<float> want = attend_all(kernels, tree.args(nullptr), 1);
  const size_t row_floats = 8 * 64;
  for (int odd = 1; odd < 8; odd += 2)
    for (TestPages* cache : {&tree.k_cache, &tree.v_cache})
      std::memset(cache->at(70 + odd), 0xff, cache->slot);  // NaN
  const std::vector<float> got = attend_all(kernels, tree.args(nullptr), 8);
  for (size_t even = 0; even < 8; even += 2)
    EXPECT_TRUE(same_bits(std::span(got).subspan(even * row_floats, row_floats),
                          std::span(want).subspan(even * row_floats, row_floats)));
}

TEST_P(Attention, FollowsTheWorkedTree) {
  // A tree of six rows: root, A, AC, B, ACE, BC.
  Problem problem({4, 2, 32}, {10, 6}, KvType::F32, KvType::F32, 51);
  problem.parents = {-1, 0, 1, 0, 2, 3};
  problem.positions = {10, 11, 12, 11, 13, 12};
  problem.words = ancestor_words(problem.parents, 1);
  EXPECT_EQ(problem.words, (std::vector<uint64_t>{0b1, 0b11, 0b111, 0b1001, 0b10111, 0b101001}));
  expect_same(problem, 6);
  // Depth-dependent left edge: with window 3, row 4 at position 13 sees positions 11, 12, 13 only.
  problem.step.window = 3;
  expect_same(problem, 6);
}

TEST_P(Attention, StaysFiniteForExtremeScores) {
  Problem problem({8, 2, 64}, {200, 20, 16}, KvType::F32, KvType::F32, 61);
  for (float& x : problem.q) x *= 200.0f;  // scores of tens of thousands: one weight is 1, the others 0
  GuardedBuffer<float> out(problem.out_size());
  GuardedBuffer<float> scratch(attention_scratch_floats(8, 2, 64));
  const AttentionArgs args = problem.args(out.data());
  for (int g = 0; g < 2; ++g) kernels.attend(args, 0, args.n_rows, g, scratch.data());
  for (float x : out.span()) ASSERT_TRUE(std::isfinite(x));
}

TEST_P(Attention, HasTheSameBitsOnAnyNumberOfThreads) {
  struct Case {
    Shape shape;
    Step step;
    bool tree;
  };
  for (const Case& c : {Case{{16, 2, 256}, {3000, 1}, false}, Case{{16, 2, 128}, {1500, 5}, true},
                        Case{{12, 1, 64}, {2000, 1, 700}, false}, Case{{8, 2, 64}, {40, 70}, false},
                        Case{{8, 2, 64}, {2500, 20}, true}, Case{{8, 2, 64}, {0, 1}, false},
                        Case{{8, 1, 32}, {20000, 1}, false}}) {
    Problem problem(c.shape, c.step, KvType::F16, KvType::F16, 71, c.tree);
    const std::vector<float> want = attend_all(kernels, problem.args(nullptr), 1);
    EXPECT_TRUE(is_attention(want, problem));
    for (int n_threads : {1, 2, 3, 5, 16, 40}) {
      ThreadPool pool({.n_threads = n_threads, .pin = false});
      GuardedBuffer<float> out(problem.out_size());
      GuardedBuffer<float> scratch(
          attention_scratch_floats(c.shape.n_head, c.shape.n_head_kv, c.shape.head_dim) *
          static_cast<size_t>(n_threads));
      attention_cpu(problem.args(out.data()), kernels, pool, scratch.data());
      EXPECT_TRUE(out.intact());
      EXPECT_TRUE(scratch.intact());
      EXPECT_TRUE(same_bits(out.span(), want)) << n_threads << " threads, past " << c.step.n_past;
    }
  }
}

// A block of GGUF's q4_0. Its farthest element is stored as -8 scales, to the rounding of the scale to f16
// (8 * 2^-11 of it, or half of f16's last place, 2^-25, where it is tiny). Any other is half a scale away at
// most, and a whole one where it is as far out to the other side, which would be code 16.
void expect_q4_block(const std::byte* block, const float* x) {
  std::vector<float> decoded(32);
  dequantize_row(DType::Q4_0, block, 32, decoded.data());
  float most = 0.0f;
  for (int i = 0; i < 32; ++i)
    if (std::fabs(x[i]) > std::fabs(most)) most = x[i];
  const double scale = std::fabs(double{most}) / 8;
  for (int i = 0; i < 32; ++i) {
    const double code = double{x[i]} * (most > 0 ? -1 : 1);  // -8 scales where it is the farthest
    const double step = code > 7.5 * scale ? 1.0 : 0.5;
    EXPECT_LE(std::fabs(double{decoded[static_cast<size_t>(i)]} - x[i]),
              step * scale * 1.00001 + 8 * std::max(scale * 0x1p-11, 0x1p-25))
        << "element " << i;
  }
}

TEST_P(Attention, AppendsInPlaceAndNowhereElse) {
  for (KvType type : kTypes)
    for (int dim : {8, 16, 32, 64, 96, 256}) {
      if (kv_in_blocks(type) && dim % 32 != 0) continue;
      Inputs in(81);
      const int n_rows = 3, n_head_kv = 2, first = 2;
      auto k = in.spiky(static_cast<size_t>(n_rows * n_head_kv * dim));
      auto v = in.spiky(k.size());
      std::fill_n(k.begin(), std::min(dim, 32), 0.0f);  // a block of zeros has no scale
      const size_t head = kv_head_bytes(type, dim);
      GuardedBuffer<std::byte> k_cache(6 * n_head_kv * head, 2), v_cache(6 * n_head_kv * head, 2);
      const int32_t page = 0;
      kernels.kv_append({.k = k.data(),
                         .v = v.data(),
                         .kv = {type, type, k_cache.data(), v_cache.data(), &page, 0},
                         .first_slot = first,
                         .n_rows = n_rows,
                         .n_head_kv = n_head_kv,
                         .head_dim = dim});
      EXPECT_TRUE(k_cache.intact());
      EXPECT_TRUE(v_cache.intact());
      for (const auto& [cache, values] : {std::pair(k_cache.data(), &k), std::pair(v_cache.data(), &v)}) {
        for (size_t i = 0; i < 2 * n_head_kv * head; ++i) ASSERT_EQ(cache[i], std::byte{0xff});
        for (size_t i = 5 * n_head_kv * head; i < 6 * n_head_kv * head; ++i)
          ASSERT_EQ(cache[i], std::byte{0xff});
        for (size_t h = 0; h < static_cast<size_t>(n_rows * n_head_kv); ++h) {
          const std::byte* stored = cache + (first * n_head_kv + h) * head;
          const float* x = values->data() + h * static_cast<size_t>(dim);
          if (type == KvType::F32) {
            EXPECT_EQ(std::memcmp(stored, x, head), 0);
          }
          if (type == KvType::F16)
            for (int i = 0; i < dim; ++i) {
              uint16_t bits;
              std::memcpy(&bits, stored + 2 * i, 2);
              EXPECT_EQ(bits, f32_to_f16(x[i]));
            }
          if (type == KvType::BF16)
            for (int i = 0; i < dim; ++i) {
              uint16_t bits;
              std::memcpy(&bits, stored + 2 * i, 2);
              EXPECT_EQ(bits, f32_to_bf16(x[i]));
            }
          if (type == KvType::Q4_0)
            for (int b = 0; b < dim / 32; ++b) expect_q4_block(stored + 18 * b, x + 32 * b);
          if (type == KvType::Q8_0)
            for (int b = 0; b < dim / 32; ++b) {
              float most = 0.0f;
              for (int i = 0; i < 32; ++i) most = std::max(most, std::fabs(x[32 * b + i]));
              const float scale = most / 127.0f;
              uint16_t bits;
              std::memcpy(&bits, stored + 34 * b, 2);
              EXPECT_EQ(bits, f32_to_f16(scale));
              for (int i = 0; i < 32; ++i) {
                const float want = scale > 0 ? std::nearbyint(x[32 * b + i] * (1.0f / scale)) : 0.0f;
                EXPECT_EQ(static_cast<float>(static_cast<int8_t>(stored[34 * b + 2 + i])), want);
              }
            }
        }
      }
    }
}

TEST_P(Attention, RoundsHalvesLikeTheFormat) {
  // Subnormals, ties, overflow, signed zero.
  std::vector<float> x = {0.0f,           -0.0f,          1.0f,     65504.0f, 65519.9f, 65520.0f,
                          -70000.0f,      6e-8f,          2.98e-8f, 2.99e-8f, -6.1e-5f, 6.0e-5f,
                          1.00048828125f, 1.00146484375f, 3.14159f, 1e-10f};
  std::vector<uint16_t> stored(16), other(16);
  const int32_t page = 0;
  kernels.kv_append({.k = x.data(),
                     .v = x.data(),
                     .kv = {KvType::F16, KvType::F16, reinterpret_cast<std::byte*>(stored.data()),
                            reinterpret_cast<std::byte*>(other.data()), &page, 0},
                     .first_slot = 0,
                     .n_rows = 1,
                     .n_head_kv = 1,
                     .head_dim = 16});
  for (size_t i = 0; i < 16; ++i) EXPECT_EQ(stored[i], f32_to_f16(x[i])) << x[i];
}

}  // namespace
}  // namespace thermo
