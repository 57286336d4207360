// Drafters on a GPU against recorded outputs: alone, and sharing the memory of their target. Skipped where
// there is no GPU.
#include <gtest/gtest.h>

#include "device/buffer.h"
#include "device/testing/skip_without_gpu.h"
#include "model/gpu/gpu_model.h"
#include "speculative/testing/drafter_checks.h"

namespace thermo {
namespace {

DrafterPlace on_gpu(bool graphs = true, KvType kv = KvType::F32) {
  return {.repack = false,
          .make = [graphs, kv](const ModelConfig& config, const Weights& weights, ModelOptions options,
                               ThreadPool& pool) {
            options.graphs = graphs;
            options.sequence.k_type = options.sequence.v_type = kv;
            return std::make_unique<GpuModel>(config, weights, options, pool, LoadProgressFn{});
          }};
}

TEST(GpuDflashDrafter, GivesTheRecordedBlocks) {
  SKIP_WITHOUT_GPU();
  for (const bool graphs : {true, false})
    for (const DrafterCase& which : kDrafterCases) expect_recorded_blocks(on_gpu(graphs), which);
}

TEST(GpuDflashDrafter, FillsPlanktonsBlockAsRecorded) {
  SKIP_WITHOUT_GPU();
  expect_planktons_block(on_gpu());
}

// With such a cache the layers are computed in few launches, where the card can.
TEST(GpuDflashDrafter, FillsPlanktonsBlockOverACacheOfHalves) {
  SKIP_WITHOUT_GPU();
  for (const KvType kv : {KvType::F16, KvType::BF16, KvType::Q8_0})
    for (const bool graphs : {true, false}) expect_planktons_block(on_gpu(graphs, kv));
}

TEST(GpuMtpDrafter, GivesTheRecordedLogitsAndChains) {
  SKIP_WITHOUT_GPU();
  expect_recorded_chains(on_gpu());
}

// Steps of other sizes round activations in other ways.
TEST(GpuMtpDrafter, DraftsTheSameHoweverItWasTold) {
  SKIP_WITHOUT_GPU();
  expect_same_drafts_however_told(on_gpu(), 0.3);
}

// Embedding and head are there once, and the plan knows it.
TEST(GpuDrafters, TakeTheMatricesOfTheirTarget) {
  SKIP_WITHOUT_GPU();
  const DrafterPlace place = on_gpu();
  Plankton p(place);
  ModelOptions options;
  options.n_batch = 64;
  options.sequence = {.n_ctx = 128, .max_draft_rows = 16};
  const GpuModel target(p.config, p.weights, options, p.pool, LoadProgressFn{});
  const int n_multiprocessors = use_device(0).n_multiprocessors;
  const auto expect_planned = [&](const ModelConfig& config, const Weights& weights, int block) {
    const ModelOptions own = exact_drafter_options(block);
    const size_t before = DeviceBuffer::total_bytes();
    const GpuModel drafter(config, weights, own, p.pool, LoadProgressFn{}, &target);
    const uint64_t taken = DeviceBuffer::total_bytes() - before;
    EXPECT_EQ(taken, GpuModel::drafter_bytes(config, weights, own, n_multiprocessors, p.config, p.weights));
    uint64_t alone = 0;
    for (const GpuMemoryItem& item : GpuModel::plan(config, weights, own, n_multiprocessors))
      alone += item.bytes;
    EXPECT_LT(taken, alone);
  };
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  const DflashConfig dflash = read_dflash_config(file, p.config);
  expect_planned(dflash.model, Weights::of_drafter(dflash.model, file, p.weights, false, p.pool),
                 dflash.block);
  const ModelConfig nextn = nextn_network(p.config);
  expect_planned(nextn, Weights::of_nextn(nextn, p.weights), 0);
}

// Rows of a target's step become features without leaving the GPU.
TEST(GpuDflashDrafter, ReadsTheStatesOfItsTargetWhereTheyAre) {
  SKIP_WITHOUT_GPU();
  const GgufFile target_file(data("qwen35moe-f32.gguf")), file(data("dflash-qwen35moe-f32.gguf")),
      expected(data("dflash-qwen35moe-expected.gguf"));
  ModelConfig config = read_model_config(target_file);
  const DflashConfig dflash = read_dflash_config(file, config);
  insert_taps(config.network, config.n_layer, dflash.states);
  ThreadPool pool({.n_threads = 2, .pin = false});
  const Weights weights = Weights::load(config, target_file, false, pool, {});
  ModelOptions options;
  options.n_batch = 64;
  options.sequence = {.n_ctx = 128, .max_draft_rows = 16, .k_type = KvType::F32, .v_type = KvType::F32};
  GpuModel target(config, weights, options, pool, LoadProgressFn{});
  DflashDrafter drafter(
      dflash,
      std::make_unique<GpuModel>(dflash.model, Weights::of_drafter(dflash.model, file, weights, false, pool),
                                 exact_drafter_options(dflash.block), pool, LoadProgressFn{}, &target),
      kDrafterTestSequences);
  const auto ids = recorded_values<TokenId>(expected, "ids");
  // Chunks, single rows, and a path of a tree whose other rows are wrong.
  const auto feed = [&](size_t begin, size_t end) {
    const std::vector<TokenId> some(ids.begin() + static_cast<ptrdiff_t>(begin),
                                    ids.begin() + static_cast<ptrdiff_t>(end));
    const std::vector<Row> rows = chain(some);
    step_rows(target, rows);
    drafter.commit(0, some, target.states());
  };
  feed(0, 20);
  feed(20, 21);
  feed(21, 23);
  const std::vector<Row> tree = {{.token = ids[23], .parent = -1}, {.token = 3, .parent = 0},
                                 {.token = ids[24], .parent = 0},  {.token = 5, .parent = 1},
                                 {.token = ids[25], .parent = 2},  {.token = ids[26], .parent = 4}};
  step_rows(target, tree, {.uncommitted = true});
  const std::vector<int32_t> path = {0, 2, 4, 5};
  target.commit(0, path);
  drafter.commit(0, std::span(ids).subspan(23, 4), target.states().pick(path));
  feed(27, 30);
  std::vector<float> hidden(static_cast<size_t>(dflash.block) * static_cast<size_t>(config.n_embd));
  const auto got = logits_of(drafter.run_block(0, ids[30], hidden.data()));
  ASSERT_EQ(target.fault(), "");
  // The target's own states are within 1e-4 of the recorded ones, and so is what is made of them, nearly.
  EXPECT_LE(largest_error(got, recorded_values<float>(expected, "anchor.30.logits")), 5e-4);
  EXPECT_LE(largest_error(hidden, recorded_values<float>(expected, "anchor.30.hidden")), 5e-4);
}

}  // namespace
}  // namespace thermo
