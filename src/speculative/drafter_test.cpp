// Drafters against outputs that were computed for them elsewhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "model/testing/recorded_model.h"
#include "speculative/dflash_drafter.h"
#include "speculative/mtp_drafter.h"

namespace thermo {
namespace {

std::string data(const std::string& name) {
  return std::string(THERMO_TEST_DATA) + "/" + name;
}

DrafterOptions exact_options() {
  return {.n_ctx = 128, .n_sequences = 2, .k_type = KvType::F32, .v_type = KvType::F32, .isa = best_isa()};
}

double deviation_of(std::span<const float> values) {
  double sum = 0.0, squares = 0.0;
  for (const float v : values) {
    sum += v;
    squares += static_cast<double>(v) * v;
  }
  const double n = static_cast<double>(values.size());
  return std::sqrt(squares / n - sum / n * (sum / n));
}

double largest_error(std::span<const float> got, std::span<const float> want) {
  double largest = 0.0;
  for (size_t i = 0; i < want.size(); ++i)
    largest = std::max(largest, std::fabs(static_cast<double>(got[i]) - want[i]));
  return largest / deviation_of(want);
}

struct Feeder {
  std::vector<float> hidden;  // [taps][n][n_embd]
  size_t n = 0, n_embd = 0;
  std::vector<int32_t> rows;

  StateRows view(size_t begin, size_t end) {
    rows.clear();
    for (size_t i = begin; i < end; ++i) rows.push_back(static_cast<int32_t>(i));
    return {.hidden = hidden.data(), .n_step_rows = n, .n_embd = n_embd, .rows = rows};
  }
};

struct Case {
  std::string drafter, target;
};

class RecordedDrafter : public testing::TestWithParam<Case> {};

TEST_P(RecordedDrafter, GivesTheRecordedBlocks) {
  const GgufFile target_file(data(GetParam().target + "-f32.gguf"));
  const GgufFile file(data(GetParam().drafter + "-f32.gguf"));
  const GgufFile expected(data(GetParam().drafter + "-expected.gguf"));
  const ModelConfig target = read_model_config(target_file);
  const DflashConfig config = read_dflash_config(file, target);
  ThreadPool pool({.n_threads = 2, .pin = false});
  const Weights weights = Weights::load(target, target_file, true, pool, {});
  DflashDrafter drafter(config, file, weights, exact_options(), pool);
  const auto ids = recorded_values<TokenId>(expected, "ids");
  Feeder feeder;
  feeder.n_embd = static_cast<size_t>(target.n_embd);
  feeder.n = ids.size();
  for (const int layer : config.layers) {
    const auto rows = recorded_values<float>(expected, "feature." + std::to_string(layer));
    feeder.hidden.insert(feeder.hidden.end(), rows.begin(), rows.end());
  }
  size_t done = 0;
  std::vector<float> hidden(static_cast<size_t>(config.block) * feeder.n_embd);
  for (const size_t anchor : {5u, 30u, 77u}) {
    SCOPED_TRACE(anchor);
    const std::string name = "anchor." + std::to_string(anchor);
    // Each sequence gets its features in pieces of another size.
    for (int sequence = 0; sequence < 2; ++sequence)
      for (size_t at = done; at < anchor;) {
        const size_t end = std::min(anchor, at + (sequence == 0 ? anchor : 3));
        drafter.commit(sequence, std::span(ids).subspan(at, end - at), feeder.view(at, end));
        at = end;
      }
    done = anchor;
    // Too much, and back again.
    drafter.commit(1, std::span(ids).subspan(anchor, 2), feeder.view(anchor, anchor + 2));
    drafter.truncate(1, static_cast<int>(anchor));
    const auto want = recorded_values<float>(expected, name + ".logits");
    const auto want_hidden = recorded_values<float>(expected, name + ".hidden");
    for (int sequence = 0; sequence < 2; ++sequence) {
      const StepOutput output = drafter.run_block(sequence, ids[anchor], hidden.data());
      EXPECT_LE(largest_error(logits_of(output), want), 1e-4);
      EXPECT_LE(largest_error(hidden, want_hidden), 1e-4);
    }
    // The same through the face that drafting uses.
    const DraftRequest request{
        .sequence = 0, .root = ids[anchor], .n_depths = config.block - 1, .n_ranks = 3};
    Draft draft;
    drafter.draft({&request, 1}, {&draft, 1});
    const auto n_vocab = static_cast<size_t>(target.n_vocab);
    for (int depth = 1; depth < config.block; ++depth) {
      const auto row = std::span(want).subspan(static_cast<size_t>(depth) * n_vocab, n_vocab);
      EXPECT_EQ(draft.tokens_at(depth)[0], std::max_element(row.begin(), row.end()) - row.begin());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RecordedDrafter,
                         testing::Values(Case{"dflash-qwen35moe", "qwen35moe"},
                                         Case{"dflash-laguna", "laguna"},
                                         Case{"dflash-laguna-bidirectional", "laguna"},
                                         Case{"dflash-qwen35", "qwen35"}),
                         [](const auto& each) {
                           std::string name = each.param.drafter;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(Drafters, AreRefusedByAnotherModel) {
  const ModelConfig plankton =
      read_model_config(GgufFile(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf"));
  EXPECT_THROW(read_dflash_config(GgufFile(data("dflash-qwen35-f32.gguf")), plankton), LoadError);
  EXPECT_THROW(read_dflash_config(GgufFile(data("qwen35-f32.gguf")), plankton), LoadError);
  const ModelConfig laguna = read_model_config(GgufFile(data("laguna-f32.gguf")));
  EXPECT_NO_THROW(read_dflash_config(GgufFile(data("dflash-laguna-f32.gguf")), laguna));
}

struct Plankton {
  GgufFile file{std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf"};
  ModelConfig config = read_model_config(file);
  ThreadPool pool{{.n_threads = 2, .pin = false}};
  Weights weights = Weights::load(config, file, true, pool, {});
};

std::vector<int32_t> argmax_of(std::span<const float> logits, size_t n_vocab) {
  std::vector<int32_t> best;
  for (size_t at = 0; at < logits.size(); at += n_vocab) {
    const auto row = logits.subspan(at, n_vocab);
    best.push_back(static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin()));
  }
  return best;
}

double rms_error(std::span<const float> got, std::span<const float> want) {
  double sum = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    sum += d * d;
  }
  return std::sqrt(sum / static_cast<double>(want.size())) / deviation_of(want);
}

TEST(MtpDrafter, GivesTheRecordedLogitsAndChains) {
  Plankton p;
  const GgufFile expected(data("plankton-mtp-expected.gguf"));
  const auto ids = recorded_values<TokenId>(expected, "ids");
  const auto hidden = recorded_values<float>(expected, "hidden");
  const auto want = recorded_values<float>(expected, "mtp.logits");
  const auto n_vocab = static_cast<size_t>(p.config.n_vocab);
  MtpDrafter drafter(p.config, p.weights, exact_options(), p.pool);
  const StepOutput output = drafter.run_pairs(0, std::span(ids).subspan(1), hidden.data());
  const std::vector<float> logits = logits_of(output);
  EXPECT_EQ(argmax_of(logits, n_vocab), argmax_of(want, n_vocab));
  EXPECT_LE(rms_error(logits, want), 0.06);

  Feeder feeder{
      .hidden = hidden, .n = ids.size(), .n_embd = static_cast<size_t>(p.config.n_embd), .rows = {}};
  size_t done = 0;
  for (const size_t anchor : {12u, 30u}) {
    SCOPED_TRACE(anchor);
    drafter.commit(1, std::span(ids).subspan(done, anchor - done), feeder.view(done, anchor));
    done = anchor;
    const DraftRequest request{.sequence = 1, .root = ids[anchor], .n_depths = 4, .n_ranks = 2};
    Draft draft;
    for (int again = 0; again < 2; ++again) {
      drafter.draft({&request, 1}, {&draft, 1});
      const auto chain = recorded_values<TokenId>(expected, "chain." + std::to_string(anchor) + ".ids");
      for (int depth = 1; depth <= 4; ++depth)
        EXPECT_EQ(draft.tokens_at(depth)[0], chain[static_cast<size_t>(depth) - 1]) << depth;
    }
  }
}

TEST(MtpDrafter, DraftsTheSameHoweverItWasTold) {
  Plankton p;
  const GgufFile expected(data("plankton-mtp-expected.gguf"));
  const auto ids = recorded_values<TokenId>(expected, "ids");
  Feeder feeder{.hidden = recorded_values<float>(expected, "hidden"),
                .n = ids.size(),
                .n_embd = static_cast<size_t>(p.config.n_embd),
                .rows = {}};
  MtpDrafter drafter(p.config, p.weights, exact_options(), p.pool);
  const auto draft_at = [&](int sequence, size_t n) {
    const DraftRequest request{.sequence = sequence, .root = ids[n], .n_depths = 3, .n_ranks = 2};
    Draft draft;
    drafter.draft({&request, 1}, {&draft, 1});
    return draft;
  };
  drafter.commit(0, std::span(ids).first(20), feeder.view(0, 20));
  const Draft want = draft_at(0, 20);
  // Round by round, with drafts between, and after a way back.
  std::vector<float> point;
  for (size_t n = 1; n <= 20; ++n) {
    drafter.commit(1, std::span(ids).subspan(n - 1, 1), feeder.view(n - 1, n));
    if (n == 10) point = drafter.snapshot(1);
    if (n % 3 == 0) draft_at(1, n);
  }
  EXPECT_EQ(draft_at(1, 20).tokens, want.tokens);
  EXPECT_EQ(draft_at(1, 20).logprobs, want.logprobs);
  drafter.restore(1, 10, point);
  drafter.commit(1, std::span(ids).subspan(10, 10), feeder.view(10, 20));
  EXPECT_EQ(draft_at(1, 20).tokens, want.tokens);
  EXPECT_EQ(draft_at(1, 20).logprobs, want.logprobs);
}

TEST(DflashDrafter, FillsPlanktonsBlockAsRecorded) {
  Plankton p;
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  const GgufFile expected(data("plankton-draft-expected.gguf"));
  const DflashConfig config = read_dflash_config(file, p.config);
  DflashDrafter drafter(config, file, p.weights, exact_options(), p.pool);
  const auto ids = recorded_values<TokenId>(expected, "ids");
  Feeder feeder{
      .hidden = {}, .n = ids.size() - 1, .n_embd = static_cast<size_t>(p.config.n_embd), .rows = {}};
  for (const int layer : config.layers) {
    const auto rows = recorded_values<float>(expected, "feature." + std::to_string(layer));
    feeder.hidden.insert(feeder.hidden.end(), rows.begin(), rows.end());
  }
  drafter.commit(0, std::span(ids).first(feeder.n), feeder.view(0, feeder.n));
  const std::vector<float> got = logits_of(drafter.run_block(0, ids.back(), nullptr));
  const auto want = recorded_values<float>(expected, "logits");
  const auto n_vocab = static_cast<size_t>(p.config.n_vocab);
  EXPECT_EQ(argmax_of(std::span(got).subspan(n_vocab), n_vocab),
            argmax_of(std::span(want).subspan(n_vocab), n_vocab));
  EXPECT_LE(rms_error(std::span(got).subspan(n_vocab), std::span(want).subspan(n_vocab)), 0.05);
}

}  // namespace
}  // namespace thermo
