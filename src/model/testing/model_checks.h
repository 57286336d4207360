// What must hold for every model, wherever it runs: several sequences in a step, trees, checkpoints.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "model/testing/recorded_model.h"

namespace thermo {

// Two sequences in every step, in pieces of different lengths.
template <class AnyModel>
void expect_sequences_apart(AnyModel& model, std::span<const TokenId> ids, double tolerance) {
  const std::span<const TokenId> first = ids.first(40), second = ids.subspan(50, 30);
  const Outputs alone_first = run_in_chunks(model, first, 40),
                alone_second = run_in_chunks(model, second, 30);
  model.clear(0);
  model.clear(1);
  std::vector<float> got_first, got_second;
  for (int piece = 0; piece < 10; ++piece) {
    const std::vector<Row> a = chain(first.subspan(static_cast<size_t>(piece) * 4, 4)),
                           b = chain(second.subspan(static_cast<size_t>(piece) * 3, 3));
    const SequenceRows groups[] = {{.sequence = 1, .rows = a}, {.sequence = 0, .rows = b}};
    const StepOutput out = model.step({.groups = groups});
    ASSERT_EQ(out.rows.size(), 7u);
    append_logits(out, got_first, 0, 4);
    append_logits(out, got_second, 4);
  }
  EXPECT_LT(error_of(got_first, alone_first.logits), tolerance);
  EXPECT_LT(error_of(got_second, alone_second.logits), tolerance);
}

// What a prompt leaves, the logits that are asked for and the uses of experts do not depend on which of its
// rows want logits. For models without taps.
template <class AnyModel>
void expect_logits_of_any_rows(AnyModel& model, std::span<const TokenId> ids, double tolerance) {
  constexpr size_t kPrompt = 90;
  const auto n_vocab = static_cast<std::ptrdiff_t>(model.config().n_vocab);
  std::vector<Row> rows = chain(ids.first(kPrompt));
  const std::vector<Row> next = chain(ids.subspan(kPrompt, 1));
  std::vector<uint64_t> uses_before;
  const auto new_uses = [&] {
    std::vector<uint64_t> uses;
    if (model.heat() == nullptr) return uses;
    uses = model.heat()->uses();
    uses_before.resize(uses.size());
    for (size_t i = 0; i < uses.size(); ++i) uses[i] -= std::exchange(uses_before[i], uses[i]);
    return uses;
  };
  model.clear(0);
  const std::vector<float> all = logits_of(step_rows(model, rows)),
                           all_next = logits_of(step_rows(model, next));
  const std::vector<uint64_t> all_uses = new_uses();
  for (const std::vector<size_t>& wanted : std::vector<std::vector<size_t>>{
           {}, {kPrompt - 1}, {0}, {3, 40, 41}, {1, 2, 5, 30, 31, 32, 60, 88, 89}}) {
    for (Row& row : rows) row.want_logits = false;
    std::vector<float> want;
    for (const size_t r : wanted) {
      rows[r].want_logits = true;
      const auto from = all.begin() + static_cast<std::ptrdiff_t>(r) * n_vocab;
      want.insert(want.end(), from, from + n_vocab);
    }
    model.clear(0);
    const StepOutput output = step_rows(model, rows);
    ASSERT_EQ(output.rows.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_EQ(output.rows[i].row, static_cast<int32_t>(wanted[i]));
    if (!wanted.empty()) {
      EXPECT_LE(error_of(logits_of(output), want), tolerance) << wanted.size() << " rows";
    }
    EXPECT_LE(error_of(logits_of(step_rows(model, next)), all_next), tolerance) << wanted.size() << " rows";
    EXPECT_EQ(new_uses(), all_uses) << wanted.size() << " rows";
  }
}

inline std::vector<Row> random_tree(int n_nodes, size_t n_vocab, std::mt19937& random) {
  std::vector<Row> rows;
  for (int i = 0; i < n_nodes; ++i) {
    const int reach = std::min(i, 6);  // deep rather than bushy
    const int parent = i == 0 ? -1 : i - 1 - static_cast<int>(random() % static_cast<unsigned>(reach));
    rows.push_back(
        {.token = static_cast<TokenId>(random() % n_vocab), .parent = parent, .want_logits = true});
  }
  return rows;
}

inline std::vector<int32_t> path_to_last(std::span<const Row> rows) {
  std::vector<int32_t> path;
  for (int r = static_cast<int>(rows.size()) - 1; r >= 0; r = rows[static_cast<size_t>(r)].parent)
    path.insert(path.begin(), r);
  return path;
}

// Every node of a random tree sees exactly its own path, and committing any path leaves the sequence as if
// that path had been evaluated token by token.
template <class AnyModel>
void expect_trees_like_their_paths(AnyModel& model, std::span<const TokenId> ids, double tolerance) {
  std::mt19937 random(7);
  const auto n_vocab = static_cast<size_t>(model.config().n_vocab);
  for (const int n_nodes : {1, 2, 9, 32, 33, 64}) {
    const std::span<const TokenId> prompt = ids.first(static_cast<size_t>(20 + n_nodes % 7));
    const std::vector<Row> rows = random_tree(n_nodes, n_vocab, random);
    run_in_chunks(model, prompt, 128);
    const std::vector<float> tree_logits = logits_of(step_rows(model, rows, {.uncommitted = true}));
    ASSERT_EQ(tree_logits.size(), rows.size() * n_vocab);
    const std::vector<int32_t> path = path_to_last(rows);
    model.commit(0, path);
    ASSERT_EQ(model.n_past(0), static_cast<int>(prompt.size() + path.size()));
    const std::vector<float> tree_after = logits_of(step_rows(model, chain(ids.first(12))));

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
  const auto point = model.checkpoint(0, false);
  ASSERT_NE(point, nullptr);
  step_rows(model, chain(ids.first(30)));  // somewhere else
  model.restore(0, *point);
  EXPECT_EQ(model.n_past(0), 50);
  const std::vector<float> again = logits_of(step_rows(model, chain(ids.subspan(50))));
  EXPECT_LT(error_of(again, std::span<const float>(straight.logits).last(again.size())), tolerance);
}

// A checkpoint with keys and values is good for any sequence, also after its own went elsewhere.
template <class AnyModel>
void expect_checkpoints_in_other_sequences(AnyModel& model, std::span<const TokenId> ids, double tolerance) {
  const Outputs straight = run_in_chunks(model, ids, 50);
  run_in_chunks(model, ids.first(50), 50);
  const auto point = model.checkpoint(0, true);
  ASSERT_NE(point, nullptr);
  EXPECT_TRUE(point->has_kv());
  run_in_chunks(model, ids.subspan(20, 60), 60);  // somewhere else
  model.clear(1);
  for (const int sequence : {1, 0}) {
    model.restore(sequence, *point);
    EXPECT_EQ(model.n_past(sequence), 50);
    const std::vector<float> again =
        logits_of(step_rows(model, chain(ids.subspan(50)), {.sequence = sequence}));
    EXPECT_LE(error_of(again, std::span<const float>(straight.logits).last(again.size())), tolerance);
  }
}

// Blocks of keys and values and a checkpoint without them make up a sequence, in another one, too. What a
// sequence has already need not be loaded.
template <class AnyModel>
void expect_blocks_in_other_sequences(AnyModel& model, std::span<const TokenId> ids, double tolerance) {
  const Outputs straight = run_in_chunks(model, ids, 50);
  const auto block = model.make_host_memory(model.block_bytes());
  ASSERT_NE(block, nullptr);
  run_in_chunks(model, ids.first(30), 30);
  model.save_kv(*model.pin_kv(0), {.position = 0, .slot = 0, .n = 30}, block->data());
  step_rows(model, chain(ids.subspan(30, 20)));
  auto pin = model.pin_kv(0);
  auto point = model.checkpoint(0, false);
  ASSERT_NE(point, nullptr);
  EXPECT_GE(model.checkpoint_bytes(50, true), model.checkpoint_bytes(50, false));
  run_in_chunks(model, ids.subspan(20, 60), 60);  // somewhere else
  // The block grew. What is pinned did not change, though its sequence did.
  model.save_kv(*pin, {.position = 30, .slot = 30, .n = 20}, block->data());
  pin.reset();
  model.clear(1);
  step_rows(model, chain(ids.first(12)), {.sequence = 1});
  for (const int sequence : {1, 0}) {
    const int n_same = sequence == 1 ? 12 : 0;
    model.load_kv(sequence, {.position = n_same, .slot = n_same, .n = 50 - n_same}, block->data());
    model.restore(sequence, *point);
    EXPECT_EQ(model.n_past(sequence), 50);
    const std::vector<float> again =
        logits_of(step_rows(model, chain(ids.subspan(50)), {.sequence = sequence}));
    EXPECT_LE(error_of(again, std::span<const float>(straight.logits).last(again.size())), tolerance);
  }
  // Memory of a checkpoint that nobody needs serves the next one.
  const auto next = model.checkpoint(0, false, std::move(point));
  ASSERT_NE(next, nullptr);
  EXPECT_EQ(next->n_past(), model.n_past(0));
}

// A prefill chunk, a decoded row and uncommitted trees of different sequences in one step give what each
// gives alone, and each tree can be committed while the other still waits. Needs four sequences.
template <class AnyModel>
void expect_mixed_steps_like_single_ones(AnyModel& model, std::span<const TokenId> ids, int n_prefill,
                                         double tolerance) {
  std::mt19937 random(11);
  const auto n_vocab = static_cast<size_t>(model.config().n_vocab);
  const std::vector<Row> prefill = chain(ids.first(static_cast<size_t>(n_prefill))),
                         decode = chain(ids.subspan(7, 1)), tree = random_tree(9, n_vocab, random),
                         other = random_tree(20, n_vocab, random), next = chain(ids.subspan(3, 2));
  const SequenceRows groups[] = {{.sequence = 2, .rows = tree, .uncommitted = true},
                                 {.sequence = 0, .rows = prefill},
                                 {.sequence = 3, .rows = other, .uncommitted = true},
                                 {.sequence = 1, .rows = decode}};
  const auto begin = [&](int sequence) {
    model.clear(sequence);
    step_rows(model, chain(ids.subspan(static_cast<size_t>(sequence), 10)), {.sequence = sequence});
  };
  const auto commit = [&](const SequenceRows& group) {
    if (group.uncommitted) model.commit(group.sequence, path_to_last(group.rows));
  };
  std::vector<float> want, want_next;
  for (const SequenceRows& group : groups) {
    begin(group.sequence);
    append_logits(model.step({.groups = {&group, 1}}), want);
    commit(group);
    append_logits(step_rows(model, next, {.sequence = group.sequence}), want_next);
  }
  for (const SequenceRows& group : groups) begin(group.sequence);
  const std::vector<float> got = logits_of(model.step({.groups = groups}));
  EXPECT_LE(error_of(got, want), tolerance);
  std::vector<float> got_next;
  for (const SequenceRows& group : groups) {  // the second tree waits while the first goes on
    commit(group);
    append_logits(step_rows(model, next, {.sequence = group.sequence}), got_next);
  }
  EXPECT_LE(error_of(got_next, want_next), tolerance);
}

}  // namespace thermo
