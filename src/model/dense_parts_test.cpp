#include "model/dense_parts.h"

#include <gtest/gtest.h>

#include "model/model.h"
#include "model/testing/quantised_file.h"
#include "model/testing/recorded_model.h"

namespace thermo {
namespace {

std::unique_ptr<Model> make_model(ModelConfig config, const GgufFile& file, bool repack, ThreadPool& pool) {
  ModelOptions options;
  options.n_batch = 128;
  options.n_sequences = 2;
  options.isa = best_isa();
  options.sequence = {.n_ctx = 160, .max_draft_rows = 64, .k_type = KvType::F32, .v_type = KvType::F32};
  Weights weights = Weights::load(config, file, repack, pool, {});
  return std::make_unique<Model>(std::move(config), std::move(weights), options, pool);
}

TEST(DenseParts, CutAtBordersOfBlocks) {
  const RecordedModel fixture("qwen35");
  const ModelConfig whole = read_model_config(fixture.file), cut = read_split_config(fixture.file);
  const int n_parts = dense_parts(whole, fixture.file);
  ASSERT_GT(n_parts, 1);
  EXPECT_FALSE(cut.is_moe());
  EXPECT_TRUE(cut.has_parts());
  EXPECT_EQ(cut.max_n_ff() * n_parts, whole.max_n_ff());
  EXPECT_EQ(dense_parts(cut, fixture.file), 0) << "it is cut already";
  const Weights weights = Weights::bind(cut, fixture.file), all = Weights::bind(whole, fixture.file);
  EXPECT_EQ(weights.bytes_per_token, all.bytes_per_token);
  for (size_t l = 0; l < static_cast<size_t>(cut.n_layer); ++l) {
    const BlockWeights& block = weights.layers[l].blocks.back();
    const Ffn& ffn = all.layers[l].blocks.back().common;
    ASSERT_EQ(block.experts.size(), static_cast<size_t>(n_parts));
    EXPECT_TRUE(block.common.empty());
    EXPECT_EQ(block.experts[1].gate.rows, ffn.gate.rows + ffn.gate.n_bytes() / static_cast<size_t>(n_parts));
    EXPECT_EQ(block.experts[1].down.rows,
              ffn.down.rows + block.experts[0].down.n_bytes() / static_cast<size_t>(ffn.down.n_rows));
    EXPECT_EQ(block.experts[1].down.row_stride * static_cast<size_t>(ffn.down.n_rows), ffn.down.n_bytes());
  }
  const RecordedModel moe("qwen35moe");
  EXPECT_EQ(dense_parts(read_model_config(moe.file), moe.file), 0);
}

// The sum of the parts is the FFN, up to the rounding of that sum.
TEST(DenseParts, GiveWhatTheWholeGives) {
  const RecordedModel fixture("qwen35");
  const QuantisedFile quantised(fixture.file), wider(fixture.file, 2048);
  const GgufFile q8 = quantised.open(), wide = wider.open();
  EXPECT_EQ(dense_parts(read_model_config(wide), wide), 4) << "as a GPU adds up few rows of the whole";
  ThreadPool pool({.n_threads = 2, .spin_us = 0});
  for (const GgufFile* file : {&fixture.file, &q8, &wide})
    for (const bool repack : {true, false}) {
      const auto whole = make_model(read_model_config(*file), *file, repack, pool),
                 cut = make_model(read_split_config(*file), *file, repack, pool);
      ASSERT_TRUE(cut->config().has_parts());
      for (const size_t chunk : {size_t{1}, size_t{7}, size_t{40}, size_t{100}}) {
        const Outputs want = run_in_chunks(*whole, fixture.ids, chunk),
                      got = run_in_chunks(*cut, fixture.ids, chunk);
        // Rounding a row anew after a last bit has changed may change a code of it.
        const bool exact = file == &fixture.file;
        EXPECT_LT(error_of(got.logits, want.logits), exact ? 1e-5 : 0.05) << chunk;
        if (!exact) continue;
        EXPECT_LT(error_of(got.logits, fixture.reference("logits")), 1e-4) << chunk;
      }
    }
}

}  // namespace
}  // namespace thermo
