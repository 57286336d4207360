#include "model/kv_pages.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "gguf/gguf_file.h"
#include "kernels/testing/compare.h"
#include "model/model.h"
#include "model/testing/page_checks.h"

namespace thermo {
namespace {

class KvPagesTest : public ::testing::TestWithParam<const char*> {
 protected:
  const GgufFile file{std::string(THERMO_TEST_DATA) + "/" + GetParam() + "-f32.gguf"};
  ThreadPool pool{{.n_threads = 2, .pin = false}};

  // `window`: of the sliding layers; 0: as in the file.
  std::unique_ptr<Model> make(int n_ctx, int n_sequences, SequenceConfig sequence, int window = 0,
                              int n_batch = 128) {
    ModelConfig config = read_model_config(file);
    for (Layer& layer : config.network.layers)
      for (Block& block : layer.blocks)
        if (block.window > 0 && window > 0) block.window = window;
    Weights weights = Weights::load(config, file, true, pool, {});
    ModelOptions options;
    options.n_batch = n_batch;
    options.n_sequences = n_sequences;
    options.isa = best_isa();
    sequence.n_ctx = n_ctx;
    options.sequence = sequence;
    return std::make_unique<Model>(std::move(config), std::move(weights), options, pool);
  }
};
INSTANTIATE_TEST_SUITE_P(All, KvPagesTest, ::testing::Values("qwen35moe", "qwen35", "laguna", "qwen3moe"),
                         [](const auto& test) { return test.param; });

TEST_P(KvPagesTest, SequencesShareWhatTheyBeginWith) {
  expect_shared_pages_to_part(*make(700, 3, {}), 0.0);
}

TEST_P(KvPagesTest, CrossesTheBordersOfPages) {
  for (const int window : {5, 64, 130, 300})
    expect_page_borders_to_be_crossed(*make(701, 2, {.max_draft_rows = 40}, window), 0.0);
}

TEST_P(KvPagesTest, SaysWhenThePoolIsFull) {
  expect_a_full_pool_to_be_said(*make(600, 2, {.n_pages = 3}), 0.0);
}

// A window that moves on gives the bits of a cache that keeps everything.
TEST_P(KvPagesTest, WindowsHaveTheBitsOfAWholeCache) {
  for (const int window : {1, 7, 63, 64, 100, 255, 256, 257, 300}) {
    if (std::string(GetParam()) != "laguna" && window > 1) break;  // nothing slides
    const auto whole = make(1300, 1, {.keep_windows = true}, window, 300);
    const std::vector<TokenId> ids = random_tokens(*whole, 1200, 9);
    const std::vector<float> want = append_tokens(*whole, 0, ids, 300);
    const auto sliding = make(1300, 2, {.max_draft_rows = 8}, window, 300);
    EXPECT_TRUE(whole->can_truncate(0, 3) || !whole->can_cut());
    for (const size_t chunk : {size_t{300}, size_t{257}, size_t{64}, size_t{37}, size_t{1}}) {
      sliding->clear(0);
      const size_t n = chunk == 1 ? 600 : ids.size();
      const std::vector<float> got = append_tokens(*sliding, 0, std::span(ids).first(n), chunk);
      EXPECT_TRUE(testing::same_bits(got, std::span(want).first(got.size())))
          << "window " << window << ", chunks of " << chunk;
    }
  }
}

TEST_P(KvPagesTest, KeepsAFewPagesOfAWindow) {
  const ModelConfig config = read_model_config(file);
  const SequenceConfig options{.n_ctx = 100000, .max_draft_rows = 16};
  const SequenceLayout layout = SequenceLayout::on_cpu(config, options);
  const bool slides = layout.n_layers(KvKind::Sliding) > 0;
  EXPECT_EQ(slides, std::string(GetParam()) == "laguna");
  EXPECT_LE(layout.pool_pages(KvKind::Sliding, 2, 512), 10);
  EXPECT_EQ(layout.pool_pages(KvKind::Full, 2, 512), 2 * layout.table_pages());
  EXPECT_EQ(layout.table_pages(), (100016 + kKvPage - 1) / kKvPage);
}

// Any order of everything that changes pages: nobody has a page that is free or written by another one, and
// none is lost. Two sequences that step together never take more sliding pages than there are.
TEST_P(KvPagesTest, LosesNoPage) {
  const ModelConfig config = read_model_config(file);
  constexpr int kSequences = 4, kContext = 3000, kDraft = 20, kRows = 700;
  const SequenceLayout layout =
      SequenceLayout::on_cpu(config, {.n_ctx = kContext, .max_draft_rows = kDraft, .n_pages = 25});
  std::vector<int32_t> tables(KvPages::table_ints(layout, kSequences));
  int n_copies = 0;
  KvPages pages(layout, kSequences, kRows, tables, [&](KvKind kind, int from, int to) {
    EXPECT_EQ(kind, KvKind::Full);
    EXPECT_NE(from, to);
    ++n_copies;
  });
  std::vector<int> n_past(kSequences);
  std::mt19937 random(10);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 20000; ++round) {
    const int s = below(kSequences), other = (s + 1 + below(kSequences - 1)) % kSequences;
    int& n = n_past[static_cast<size_t>(s)];
    switch (below(8)) {
      case 0:
        n = below(4) == 0 ? 0 : n;
        pages.cut(s, n);
        break;
      case 1: {
        const int to = std::max(0, n - below(200));
        if (!pages.can_cut(s, to)) break;
        pages.cut(s, to);
        n = to;
        break;
      }
      case 2: {
        const int shared = below(n_past[static_cast<size_t>(other)] + 1);
        pages.share(other, s, shared);
        n = pages.replace(s, shared, false) ? shared : 0;
        break;
      }
      case 3: {
        const int length = below(kContext);
        n = pages.replace(s, length, true) ? length : 0;
        break;
      }
      default: {
        const int rows = std::min(kContext - n, 1 + below(below(2) == 0 ? kRows : kDraft));
        const int got = pages.reserve(s, n, rows);
        EXPECT_LE(got, rows);
        if (got < rows) {
          EXPECT_EQ(pages.pool(KvKind::Full).n_free(), 0);
        }
        n += below(3) == 0 ? got / 2 : got;
        pages.advance(s, n);
      }
    }
    std::map<int32_t, int> users;
    for (int i = 0; i < kSequences; ++i) {
      const int32_t* const table = pages.table(KvKind::Full, i);
      for (int p = 0; p < pages.n_pages(i); ++p) ++users[table[p]];
      EXPECT_GE(pages.n_pages(i) * kKvPage, n_past[static_cast<size_t>(i)]);
    }
    ASSERT_EQ(static_cast<int>(users.size()) + pages.pool(KvKind::Full).n_free(), 25);
    for (const auto& [page, n_users] : users)
      ASSERT_EQ(n_users > 1, pages.pool(KvKind::Full).is_shared(page));
    if (round % 100 == 0)
      pages.for_each_change([&](size_t first, size_t count) { ASSERT_LE(first + count, tables.size()); });
  }
  EXPECT_GT(n_copies, 0);
  for (int i = 0; i < kSequences; ++i) pages.cut(i, 0);
  for (const KvKind kind : kEachKvKind) EXPECT_EQ(pages.pool(kind).n_free(), pages.pool(kind).size());
}

}  // namespace
}  // namespace thermo
