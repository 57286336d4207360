// What must hold for every model, wherever it runs: several sequences in a step, trees, checkpoints.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <span>
#include <vector>

#include "model/sequence_state.h"
#include "model/testing/recorded_model.h"

namespace thermo {

// Two sequences in every step, in pieces of different lengths.
template <class AnyModel>
void expect_sequences_apart(AnyModel& model, std::span<const TokenId> ids, double tolerance) {
  const std::span<const TokenId> first = ids.first(40), second = ids.subspan(50, 30);
  const Outputs alone_first = run_in_chunks(model, first, 40),
                alone_second = run_in_chunks(model, second, 30);
  model.sequence(0).clear();
  model.sequence(1).clear();
  std::vector<float> got_first, got_second;
  for (int piece = 0; piece < 10; ++piece) {
    std::vector<Row> rows = chain(first.subspan(static_cast<size_t>(piece) * 4, 4), 1);
    for (Row row : chain(second.subspan(static_cast<size_t>(piece) * 3, 3), 0)) {
      if (row.parent >= 0) row.parent += 4;
      rows.push_back(row);
    }
    const StepOutput out = model.step({.rows = rows});
    const auto n_vocab = static_cast<std::ptrdiff_t>(model.config().n_vocab);
    ASSERT_EQ(out.logits.size(), static_cast<size_t>(7 * n_vocab));
    got_first.insert(got_first.end(), out.logits.begin(), out.logits.begin() + 4 * n_vocab);
    got_second.insert(got_second.end(), out.logits.begin() + 4 * n_vocab, out.logits.end());
  }
  EXPECT_LT(error_of(got_first, alone_first.logits), tolerance);
  EXPECT_LT(error_of(got_second, alone_second.logits), tolerance);
}

// Every node of a random tree sees exactly its own path, and committing any path leaves the sequence as if
// that path had been evaluated token by token.
template <class AnyModel>
void expect_trees_like_their_paths(AnyModel& model, std::span<const TokenId> ids, double tolerance) {
  std::mt19937 random(7);
  const auto n_vocab = static_cast<size_t>(model.config().n_vocab);
  for (const int n_nodes : {1, 2, 9, 32, 33, 64}) {
    const std::span<const TokenId> prompt = ids.first(static_cast<size_t>(20 + n_nodes % 7));
    std::vector<Row> rows;
    for (int i = 0; i < n_nodes; ++i) {
      const int reach = std::min(i, 6);  // deep rather than bushy
      const int parent = i == 0 ? -1 : i - 1 - static_cast<int>(random() % static_cast<unsigned>(reach));
      rows.push_back({.token = static_cast<TokenId>(random() % n_vocab),
                      .sequence = 0,
                      .parent = parent,
                      .want_logits = true});
    }
    run_in_chunks(model, prompt, 128);
    const StepOutput out = model.step({.rows = rows, .commit = Commit::Later});
    const std::vector<float> tree_logits(out.logits.begin(), out.logits.end());
    ASSERT_EQ(tree_logits.size(), rows.size() * n_vocab);
    std::vector<int32_t> path;  // to the last node
    for (int r = n_nodes - 1; r >= 0; r = rows[static_cast<size_t>(r)].parent) path.insert(path.begin(), r);
    model.commit(0, path);
    ASSERT_EQ(model.sequence(0).n_past(), static_cast<int>(prompt.size() + path.size()));
    const StepOutput continued = model.step({.rows = chain(ids.first(12))});
    const std::vector<float> tree_after(continued.logits.begin(), continued.logits.end());

    std::vector<TokenId> tokens(prompt.begin(), prompt.end());
    for (const int32_t r : path) tokens.push_back(rows[static_cast<size_t>(r)].token);
    tokens.insert(tokens.end(), ids.begin(), ids.begin() + 12);
    const Outputs sequential = run_in_chunks(model, tokens, 1);
    std::vector<float> path_logits;
    for (const int32_t r : path) {
      const auto row = tree_logits.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(r) * n_vocab);
      path_logits.insert(path_logits.end(), row, row + static_cast<std::ptrdiff_t>(n_vocab));
    }
    const std::span<const float> want(sequential.logits);
    EXPECT_LT(error_of(path_logits, want.subspan(prompt.size() * n_vocab, path_logits.size())), tolerance)
        << n_nodes << " nodes";
    EXPECT_LT(error_of(tree_after, want.last(tree_after.size())), tolerance) << n_nodes << " nodes";
  }
}

template <class AnyModel>
void expect_return_to_a_checkpoint(AnyModel& model, std::span<const TokenId> ids, double tolerance) {
  const Outputs straight = run_in_chunks(model, ids, 50);
  run_in_chunks(model, ids.first(50), 50);
  const Checkpoint point = model.sequence(0).checkpoint();
  model.step({.rows = chain(ids.first(30))});  // somewhere else
  model.sequence(0).restore(point);
  EXPECT_EQ(model.sequence(0).n_past(), 50);
  const StepOutput again = model.step({.rows = chain(ids.subspan(50))});
  EXPECT_LT(error_of(again.logits, std::span<const float>(straight.logits).last(again.logits.size())),
            tolerance);
}

}  // namespace thermo
