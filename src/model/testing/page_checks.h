// What must hold for the memory of sequences, wherever a model runs: pages that are shared, copied, given
// back and used up, and windows that move on. A model of the processor must give the same bits, which is what
// a tolerance of 0 asks for.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <span>
#include <vector>

#include "model/backend.h"
#include "model/testing/model_checks.h"
#include "model/testing/recorded_model.h"

namespace thermo {

inline void expect_close(std::span<const float> got, std::span<const float> want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  if (tolerance > 0.0) {
    EXPECT_LT(error_of({got.begin(), got.end()}, {want.begin(), want.end()}), tolerance);
  } else {
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size_bytes()), 0);
  }
}

inline std::vector<TokenId> random_tokens(const Backend& model, size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<TokenId> ids(n);
  for (TokenId& id : ids) id = static_cast<TokenId>(random() % static_cast<unsigned>(model.config().n_vocab));
  return ids;
}

// Appends tokens to a sequence, `chunk` in a step, and gives their logits.
inline std::vector<float> append_tokens(Backend& model, int sequence, std::span<const TokenId> ids,
                                        size_t chunk) {
  std::vector<float> logits;
  for (size_t begin = 0; begin < ids.size(); begin += chunk) {
    const std::vector<Row> rows = chain(ids.subspan(begin, std::min(chunk, ids.size() - begin)));
    append_logits(step_rows(model, rows, {.sequence = sequence}), logits);
  }
  return logits;
}

// Of what comes after `ids` in a sequence that read them by itself.
inline std::vector<float> logits_after(Backend& model, int sequence, std::span<const TokenId> ids,
                                       std::span<const TokenId> more) {
  model.clear(sequence);
  append_tokens(model, sequence, ids, 100);
  return append_tokens(model, sequence, more, 1);
}

// Two sequences go on differently from the same beginning, which they have once. REQUIRES: three sequences
// of 700 tokens, of which one is empty.
inline void expect_shared_pages_to_part(Backend& model, double tolerance) {
  const std::vector<TokenId> ids = random_tokens(model, 600, 1), a = random_tokens(model, 40, 2),
                             b = random_tokens(model, 40, 3);
  for (const int n : {1, 255, 256, 257, 511, 590}) {
    const std::span<const TokenId> begin = std::span(ids).first(static_cast<size_t>(n));
    const std::vector<float> want_a = logits_after(model, 2, begin, a),
                             want_b = logits_after(model, 2, begin, b);
    model.clear(2);
    model.clear(1);
    model.clear(0);
    append_tokens(model, 0, begin, 64);
    const auto point = model.can_cut() ? nullptr : model.checkpoint(0, false);
    // What `from` read after that does not matter.
    append_tokens(model, 0, std::span(ids).subspan(static_cast<size_t>(n), 10), 10);
    const int n_free = model.kv_pool().n_free;
    model.share(0, 1, n);
    EXPECT_EQ(model.kv_pool().n_free, n_free);
    EXPECT_TRUE(point == nullptr || model.restore(1, *point));
    ASSERT_EQ(model.n_past(1), n);
    // The last page is copied for whoever writes first.
    const std::vector<float> got_b = append_tokens(model, 1, b, 1);
    EXPECT_TRUE(point == nullptr || model.restore(0, *point));
    if (point == nullptr) model.truncate(0, n);
    const std::vector<float> got_a = append_tokens(model, 0, a, 1);
    expect_close(got_a, want_a, tolerance);
    expect_close(got_b, want_b, tolerance);
    // The one that stays keeps what it shared.
    model.clear(0);
    expect_close(
        append_tokens(model, 1, a, 7),
        [&] {
          model.clear(2);
          append_tokens(model, 2, begin, 64);
          append_tokens(model, 2, b, 1);
          return append_tokens(model, 2, a, 7);
        }(),
        tolerance);
    model.clear(1);
    model.clear(2);
    EXPECT_EQ(model.kv_pool().n_free, model.kv_pool().n_pages);
  }
}

// Cuts, checkpoints and drafts at and across the borders of pages. REQUIRES: two sequences of 700 tokens and
// 40 draft rows.
inline void expect_page_borders_to_be_crossed(Backend& model, double tolerance) {
  const std::vector<TokenId> ids = random_tokens(model, 620, 4), more = random_tokens(model, 20, 5);
  std::mt19937 random(6);
  for (const int n : {1, 37, 255, 256, 257, 500, 512}) {
    const std::span<const TokenId> begin = std::span(ids).first(static_cast<size_t>(n));
    const std::vector<float> want = logits_after(model, 0, begin, more);
    // Back from further on, by a checkpoint with and without keys and values, here and elsewhere.
    model.clear(0);
    append_tokens(model, 0, begin, 77);
    const auto without = model.checkpoint(0, false), with = model.checkpoint(0, true);
    append_tokens(model, 0, std::span(ids).subspan(static_cast<size_t>(n), 100), 50);
    ASSERT_TRUE(model.restore(0, *without));
    expect_close(append_tokens(model, 0, more, 1), want, tolerance);
    append_tokens(model, 1, std::span(ids).first(300), 100);
    ASSERT_TRUE(model.restore(1, *with));
    expect_close(append_tokens(model, 1, more, 1), want, tolerance);
    ASSERT_TRUE(model.restore(1, *with));
    // A short way back.
    append_tokens(model, 1, std::span(ids).subspan(static_cast<size_t>(n), 30), 30);
    if (model.config().n_recurrent_layers() == 0) {
      ASSERT_TRUE(model.can_truncate(1, n));
      model.truncate(1, n);
      expect_close(append_tokens(model, 1, more, 1), want, tolerance);
    }
    EXPECT_TRUE(model.can_truncate(1, 0));
    model.clear(1);

    // A draft whose rows and path may lie in several pages.
    const std::vector<Row> tree = random_tree(33, static_cast<size_t>(model.config().n_vocab), random);
    const std::vector<int32_t> path = path_to_last(tree);
    std::vector<TokenId> all(begin.begin(), begin.end());
    for (const int32_t r : path) all.push_back(tree[static_cast<size_t>(r)].token);
    const std::vector<float> after = logits_after(model, 0, all, more);
    model.clear(0);
    append_tokens(model, 0, begin, 77);
    step_rows(model, tree, {.uncommitted = true});
    model.commit(0, path);
    expect_close(append_tokens(model, 0, more, 1), after, tolerance);
    model.clear(0);
  }
}

// With three pages for two sequences that could have two or more each.
inline void expect_a_full_pool_to_be_said(Backend& model, double tolerance) {
  ASSERT_EQ(model.kv_pool().n_pages, 3);
  const std::vector<TokenId> ids = random_tokens(model, 500, 8);
  const std::vector<float> want = append_tokens(model, 0, ids, 100);
  EXPECT_EQ(model.n_pages(0), 2);
  const auto point = model.checkpoint(0, true);
  model.clear(0);

  EXPECT_EQ(model.reserve(0, 100), 100);
  EXPECT_EQ(model.reserve(1, 600), 512);
  EXPECT_EQ(model.kv_pool().n_free, 0);
  std::vector<float> got = append_tokens(model, 0, std::span(ids).first(256), 64);
  EXPECT_EQ(model.reserve(0, 1), 0);  // and nothing happened to it
  EXPECT_FALSE(model.restore(1, *point) && model.restore(0, *point));
  model.clear(1);
  if (model.n_past(0) == 0) got = append_tokens(model, 0, std::span(ids).first(256), 64);
  EXPECT_EQ(model.reserve(0, 244), 244);
  const std::vector<float> rest = append_tokens(model, 0, std::span(ids).subspan(256), 61);
  got.insert(got.end(), rest.begin(), rest.end());
  expect_close(got, want, tolerance);
  // A page that is shared is one page, and writing into it takes another.
  model.truncate(0, 0);
  append_tokens(model, 0, std::span(ids).first(260), 65);
  const auto short_point = model.checkpoint(0, false);
  model.share(0, 1, 260);
  EXPECT_TRUE(model.can_cut() || model.restore(1, *short_point));
  EXPECT_EQ(model.kv_pool().n_free, 1);
  EXPECT_EQ(model.reserve(1, 10), 10);
  EXPECT_EQ(model.kv_pool().n_free, 0);
  EXPECT_EQ(model.reserve(0, 300), 252);  // its own page again
  model.clear(0);
  model.clear(1);
}

}  // namespace thermo
