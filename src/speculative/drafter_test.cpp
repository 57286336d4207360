#include "speculative/drafter.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/error.h"
#include "kernels/quant_matmul/quant_matmul.h"
#include "model/model.h"
#include "model/testing/edited_file.h"
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

// A pass takes kDrafterBatch rows.
TEST(MtpDrafter, RunsMorePairsThanAPassTakes) {
  Plankton p(on_cpu());
  const GgufFile expected(data("plankton-mtp-expected.gguf"));
  const auto recorded = recorded_values<TokenId>(expected, "ids");
  const auto states = recorded_values<float>(expected, "hidden");
  constexpr size_t kPairs = 2 * kDrafterBatch + 7;
  std::vector<TokenId> ids;
  std::vector<float> hidden;
  while (ids.size() < kPairs) {
    ids.insert(ids.end(), recorded.begin(), recorded.end());
    hidden.insert(hidden.end(), states.begin(), states.end());
  }
  const ModelConfig config = nextn_network(p.config);
  ModelOptions options = exact_drafter_options(0);
  options.sequence.n_ctx = static_cast<int>(ids.size());
  MtpDrafter drafter(p.config.n_layer,
                     on_cpu().make(config, Weights::of_nextn(config, p.weights), options, p.pool),
                     kDrafterTestSequences);
  const Feeder feeder(drafter.model(), hidden, ids.size());
  const std::vector<float> all = drafter.run_pairs(0, std::span(ids).first(kPairs), feeder.view(0, kPairs));
  const auto n_vocab = static_cast<size_t>(p.config.n_vocab);
  ASSERT_EQ(all.size(), kPairs * n_vocab);
  std::vector<float> one_by_one;
  for (size_t i = 0; i < kPairs; ++i) {
    const auto row = drafter.run_pairs(1, std::span(ids).subspan(i, 1), feeder.view(i, i + 1));
    if (i + 3 > kPairs) one_by_one.insert(one_by_one.end(), row.begin(), row.end());
  }
  EXPECT_TRUE(std::equal(one_by_one.begin(), one_by_one.end(),
                         all.end() - static_cast<ptrdiff_t>(one_by_one.size())));
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
    const Weights own = Weights::of_drafter(dflash.model, drafter, target, true, pool);
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

// Of one that has only its own embedding, the head is still the target's.
TEST(Drafters, HaveAnEmbeddingOfTheirOwnWithoutAHead) {
  ThreadPool pool({.n_threads = 1, .pin = false});
  const GgufFile file(data("laguna-f32.gguf"));
  const ModelConfig config = read_model_config(file);
  const Weights target = Weights::load(config, file, false, pool, {});
  const EditedFile edited(GgufFile(data("dflash-laguna-f32.gguf")), [](GgufWriter& writer, EditedFile& e) {
    e.add_zeros(writer, "token_embd.weight", {64, 256});
  });
  const GgufFile drafter = edited.open();
  const Weights own =
      Weights::of_drafter(read_dflash_config(drafter, config).model, drafter, target, false, pool);
  EXPECT_EQ(own.output.front()[Role::Output].rows, target.output.front()[Role::Output].rows);
  EXPECT_EQ(own.input.front()[Role::Embedding].rows, drafter.require_tensor("token_embd.weight").data);
}

std::string refusal_of(const GgufFile& drafter, const ModelConfig& target) {
  try {
    read_dflash_config(drafter, target);
  } catch (const LoadError& error) {
    return error.what();
  }
  return "";
}

TEST(Drafters, AreRefusedWithWhatIsNotComputed) {
  const ModelConfig laguna = read_model_config(GgufFile(data("laguna-f32.gguf")));
  const GgufFile source(data("dflash-laguna-f32.gguf"));
  const auto with_tensor = [&](std::string_view name) {
    return EditedFile(source, [&](GgufWriter& w, EditedFile& e) { e.add_zeros(w, name, {64}); });
  };
  for (const char* name : {"fc.bias", "dflash.fc.bias", "rope_freqs.weight", "d2t", "blk.0.attn_q.bias"})
    EXPECT_NE(refusal_of(with_tensor(name).open(), laguna).find(name), std::string::npos) << name;
  EXPECT_EQ(refusal_of(with_tensor("rotary_emb.inv_freq").open(), laguna), "");

  const ModelConfig plankton =
      read_model_config(GgufFile(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf"));
  const EditedFile layers(GgufFile(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf"),
                          [](GgufWriter& writer, EditedFile&) {
                            writer.set_array("dflash.target_layers", std::vector<int32_t>{0, 3});
                          });
  EXPECT_NE(refusal_of(layers.open(), plankton).find("dflash.target_layers holds 0, expected 1 to 8"),
            std::string::npos);
}

// Only one that sees both ways has an end after the row, which attention does not know.
TEST(Drafters, MayHaveWindowsShorterThanTheirBlock) {
  const ModelConfig laguna = read_model_config(GgufFile(data("laguna-f32.gguf")));
  const auto with_window = [](const char* name) {
    return EditedFile(GgufFile(data(name)), [](GgufWriter& writer, EditedFile&) {
      writer.set("dflash-draft.attention.sliding_window", uint32_t{3});
    });
  };
  EXPECT_EQ(refusal_of(with_window("dflash-laguna-f32.gguf").open(), laguna), "");
  EXPECT_NE(refusal_of(with_window("dflash-laguna-bidirectional-f32.gguf").open(), laguna).find("block of 6"),
            std::string::npos);
}

TEST(Drafters, MayHaveAMagnitudeOfTheirOwn) {
  const ModelConfig laguna = read_model_config(GgufFile(data("laguna-f32.gguf")));
  const auto magnitude = [&](bool own) {
    const EditedFile edited(GgufFile(data("dflash-laguna-f32.gguf")), [&](GgufWriter& writer, EditedFile&) {
      const std::string scaling = "dflash-draft.rope.scaling.";
      writer.set(scaling + "type", "yarn");
      writer.set(scaling + "factor", 8.0F);
      writer.set(scaling + "original_context_length", uint32_t{64});
      if (own) writer.set(scaling + "attention_factor", 1.5F);
    });
    return make_rope_table(read_dflash_config(edited.open(), laguna).model.ropes[0]).magnitude;
  };
  EXPECT_FLOAT_EQ(magnitude(false), static_cast<float>(yarn_magnitude(8.0)));
  EXPECT_FLOAT_EQ(magnitude(true), 1.5F);
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
