#include "speculative/drafter.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/error.h"
#include "kernels/quant_matmul/quant_matmul.h"
#include "model/model.h"
#include "speculative/testing/drafter_checks.h"

namespace thermo {
namespace {

DrafterPlace on_cpu() {
  return {
      .make = [](const ModelConfig& config, Weights weights, const ModelOptions& options, ThreadPool& pool) {
        return std::make_unique<Model>(config, std::move(weights), options, pool);
      }};
}

TEST(DflashDrafter, GivesTheRecordedBlocks) {
  for (const DrafterCase& which : kDrafterCases) expect_recorded_blocks(on_cpu(), which);
}

TEST(DflashDrafter, FillsPlanktonsBlockAsRecorded) {
  expect_planktons_block(on_cpu());
}

TEST(MtpDrafter, GivesTheRecordedLogitsAndChains) {
  expect_recorded_chains(on_cpu());
}

TEST(MtpDrafter, DraftsTheSameHoweverItWasTold) {
  expect_same_drafts_however_told(on_cpu(), 0.0);
}

// The head that a drafter borrows needs memory for its panels where its owner does not repack it.
TEST(DflashDrafter, KnowsThePanelsOfABorrowedHead) {
  ThreadPool pool({.n_threads = 1, .pin = false});
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  const GgufFile drafter(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  const ModelConfig config = read_model_config(file);
  const DflashConfig dflash = read_dflash_config(drafter, config);
  for (const bool repack : {false, true}) {
    const Weights target = Weights::load(config, file, repack, pool, {});
    const Weights own = load_dflash_weights(dflash, drafter, target, true, pool);
    const Matrix& head = target.output.front()[Role::Output];
    EXPECT_EQ(own.max_unpacked_panel_bytes(dflash.model), repack ? 0 : panel_bytes(head.dtype, head.n_cols));
  }
}

TEST(Drafters, AreRefusedByAnotherModel) {
  const ModelConfig plankton =
      read_model_config(GgufFile(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf"));
  EXPECT_THROW(read_dflash_config(GgufFile(data("dflash-qwen35-f32.gguf")), plankton), LoadError);
  EXPECT_THROW(read_dflash_config(GgufFile(data("qwen35-f32.gguf")), plankton), LoadError);
  const ModelConfig laguna = read_model_config(GgufFile(data("laguna-f32.gguf")));
  EXPECT_NO_THROW(read_dflash_config(GgufFile(data("dflash-laguna-f32.gguf")), laguna));
}

// What a GPU hands over gives the candidates that the row gives.
TEST(Drafters, TakeCandidatesFromAListOrFromTheRow) {
  std::vector<float> logits(500);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>((i * 7919) % 97) * 0.1f;
  const auto top = std::make_unique<TopLogits>();
  for (const int n_wanted : {kFewTokens, kTopTokens}) {
    top_logits_ref(logits, n_wanted, *top);
    for (const size_t n : {1u, 3u, 8u}) {
      std::vector<int32_t> tokens(n), from_list(n);
      std::vector<float> logprobs(n), of_list(n);
      best_candidates(RowLogits{.logits = logits}, tokens, logprobs);
      best_candidates(RowLogits{.top = top.get()}, from_list, of_list);
      EXPECT_EQ(tokens, from_list);
      for (size_t i = 0; i < n; ++i) EXPECT_NEAR(logprobs[i], of_list[i], 1e-5);
    }
  }
  top_logits_ref(std::vector<float>(500, -std::numeric_limits<float>::infinity()), kFewTokens, *top);
  std::vector<int32_t> tokens(2);
  std::vector<float> logprobs(2, 0.0f);
  best_candidates(RowLogits{.top = top.get()}, tokens, logprobs);
  EXPECT_TRUE(std::isinf(logprobs[0]) && std::isinf(logprobs[1]));
}

}  // namespace
}  // namespace thermo
