// Hot and cold experts on the stand-in device, and experts in the file, against the model that has them all
// in memory: wherever an expert is, the logits are the same. The same for the parts of a dense model
// (qwen35).
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "experts/sim_experts.h"
#include "experts/tiered_experts.h"
#include "model/model.h"
#include "model/testing/model_checks.h"
#include "model/testing/recorded_model.h"

namespace thermo {
namespace {

constexpr int kBatch = 128;

ModelOptions model_options() {
  ModelOptions options;
  options.n_batch = kBatch;
  options.n_sequences = 2;
  options.isa = best_isa();
  options.sequence = {.n_ctx = 160, .max_draft_rows = 64, .k_type = KvType::F32, .v_type = KvType::F32};
  return options;
}

std::unique_ptr<Model> plain_model(const GgufFile& file, ThreadPool& pool) {
  ModelConfig config = read_split_config(file);
  Weights weights = Weights::load(config, file, true, pool, {});
  return std::make_unique<Model>(std::move(config), std::move(weights), model_options(), pool);
}

std::vector<const MappedFile*> files_of(const GgufFile& file) {
  std::vector<const MappedFile*> files;
  for (int i = 0; i < file.n_parts(); ++i)
    if (file.part(i)) files.push_back(file.part(i));
  return files;
}

// A model whose experts somebody else runs.
struct SplitModel {
  SimExperts* sim = nullptr;
  std::unique_ptr<Model> model;
};

struct SimSetup {
  double share = 0.5;  // of the experts in "device memory"
  bool swaps = true;
  bool in_file = false;  // main memory holds as few experts as it can
  int decode_rows = 32;
  int stream_min_pairs = 4;
  int pin_layers = 0;
};

SplitModel sim_model(const GgufFile& file, ThreadPool& pool, const SimSetup& setup) {
  ModelConfig config = read_split_config(file);
  Weights weights = Weights::load(config, file, true, pool, {}, false);
  ExpertCatalog catalog = expert_catalog(config, weights);
  SimExpertsOptions options;
  options.split.split = true;
  options.split.budget_bytes =
      static_cast<uint64_t>(setup.share * static_cast<double>(catalog.total_bytes()));
  options.split.host_bytes = setup.in_file ? HostTier::min_bytes(catalog) : 0;
  options.split.swaps = setup.swaps;
  options.split.pin_layers = setup.pin_layers;
  options.n_batch = kBatch;
  options.decode_rows = setup.decode_rows;
  options.stream_min_pairs = setup.stream_min_pairs;
  options.isa = best_isa();
  options.route = config.route;
  options.routers = router_views(config, weights);
  options.split.files = files_of(file);
  HeatMap heat(catalog);
  auto runner = std::make_unique<SimExperts>(std::move(catalog), std::move(heat), options, pool,
                                             std::function<void(uint64_t, uint64_t)>{});
  SplitModel split;
  split.sim = runner.get();
  split.model = std::make_unique<Model>(std::move(config), std::move(weights), model_options(), pool,
                                        std::move(runner));
  return split;
}

// Main memory holds as few experts as it can.
std::unique_ptr<Model> tiered_model(const GgufFile& file, ThreadPool& pool) {
  ModelConfig config = read_split_config(file);
  Weights weights = Weights::load(config, file, true, pool, {}, false);
  ExpertCatalog catalog = expert_catalog(config, weights);
  const uint64_t bytes = HostTier::min_bytes(catalog);
  EXPECT_LT(bytes, catalog.total_bytes());
  HeatMap heat(catalog);
  auto runner = std::make_unique<TieredExperts>(
      std::move(catalog), std::move(heat),
      SplitOptions{.split = true, .host_bytes = bytes, .files = files_of(file)}, best_isa(), pool,
      std::function<void(uint64_t, uint64_t)>{});
  return std::make_unique<Model>(std::move(config), std::move(weights), model_options(), pool,
                                 std::move(runner));
}

class ExpertPlacementTest : public ::testing::TestWithParam<const char*> {
 protected:
  const RecordedModel fixture{GetParam()};
  ThreadPool pool{{.n_threads = 2, .spin_us = 0}};  // spinning would keep the lane off its core
  std::unique_ptr<Model> plain = plain_model(fixture.file, pool);
};
INSTANTIATE_TEST_SUITE_P(All, ExpertPlacementTest,
                         ::testing::Values("qwen35moe", "laguna", "qwen3moe", "qwen35"),
                         [](const auto& test) { return test.param; });

TEST_P(ExpertPlacementTest, GivesTheSameLogitsForEveryShareAndChunkLength) {
  for (const bool in_file : {false, true})
    for (const double share : {0.0, 0.01, 0.3, 0.6, 1.0}) {
      const SplitModel split = sim_model(fixture.file, pool, {.share = share, .in_file = in_file});
      for (const size_t chunk : {size_t{1}, size_t{7}, size_t{40}, size_t{100}}) {
        const Outputs want = run_in_chunks(*plain, fixture.ids, chunk);
        const Outputs got = run_in_chunks(*split.model, fixture.ids, chunk);
        EXPECT_TRUE(got.logits == want.logits)
            << "share " << share << " chunk " << chunk << " in file " << in_file;
      }
      const ExpertTelemetry t = split.model->expert_telemetry();
      EXPECT_EQ(t.pairs, t.hot_pairs + t.cpu_pairs + t.fetched_pairs);
      EXPECT_EQ(t.tokens, 4 * fixture.ids.size());
      EXPECT_LE(t.hot_expert_bytes, t.budget_bytes);
      if (share == 0.0) {
        EXPECT_EQ(t.hot_pairs, 0u);
      }
      if (share == 1.0) {
        EXPECT_EQ(t.hot_pairs, t.pairs);
        EXPECT_EQ(t.all_hot, t.layer_steps);
      }
      if (share == 0.6) {
        EXPECT_GT(t.hot_pairs, 0u);
        EXPECT_GT(t.cpu_pairs, 0u);
        EXPECT_EQ(t.moved > 0, plain->config().is_moe()) << "experts move while serving";
        EXPECT_GT(t.streamed_bytes, 0u) << "a prompt streams popular cold experts";
        EXPECT_GT(t.copy_wait_ns, 0u) << "and waits for the first of them";
        EXPECT_GT(t.device_wait_ns, 0u) << "the CPU lane waits for the next layer";
        // Those of the third layer after the one that is computed.
        EXPECT_EQ(t.parcels > 0, !in_file && plain->config().is_moe() && plain->config().n_layer > 3)
            << "single rows send experts ahead";
      }
      EXPECT_EQ(t.disk_bytes > 0, in_file);
      EXPECT_TRUE(split.model->fault().empty());
    }
}

TEST_P(ExpertPlacementTest, IsBitForBitThePlainModelWhenEverythingIsHot) {
  const SplitModel split = sim_model(fixture.file, pool, {.share = 1.0});
  EXPECT_TRUE(run_in_chunks(*split.model, fixture.ids, 7).logits ==
              run_in_chunks(*plain, fixture.ids, 7).logits);
}

TEST_P(ExpertPlacementTest, GivesTheSameLogitsForRandomPlacements) {
  const SplitModel split = sim_model(fixture.file, pool, {.share = 0.7, .swaps = false});
  const ExpertCatalog& catalog = split.sim->catalog();
  const Outputs want = run_in_chunks(*plain, fixture.ids, 9);
  std::mt19937 random(11);
  for (int round = 0; round < 8; ++round) {
    std::vector<std::vector<int32_t>> hot(catalog.layers.size());
    const auto odds = random() % 100;
    for (size_t l = 0; l < hot.size(); ++l)
      for (int e = 0; e < catalog.layers[l].n_expert(); ++e)
        if (random() % 100 < odds) hot[l].push_back(e);
    split.sim->store().force(hot);
    EXPECT_TRUE(run_in_chunks(*split.model, fixture.ids, 9).logits == want.logits) << odds;
  }
}

// Exactly the experts that the step will choose are cold; then exactly those are hot.
TEST_P(ExpertPlacementTest, GivesTheSameLogitsForAdversarialPlacements) {
  // A step chooses all parts of a dense model.
  const double share = plain->config().is_moe() ? 0.9 : 1.0;
  const SplitModel split = sim_model(fixture.file, pool, {.share = share, .swaps = false});
  const ExpertCatalog& catalog = split.sim->catalog();
  plain->clear(0);
  split.model->clear(0);
  uint64_t all_hot = 0;
  for (size_t i = 0; i < 40; ++i) {
    const std::vector<Row> row = chain(std::span(fixture.ids).subspan(i, 1));
    const StepOutput want = step_rows(*plain, row);
    const bool cold = i % 2 == 0;
    std::vector<std::vector<int32_t>> hot(catalog.layers.size());
    for (size_t l = 0; l < hot.size(); ++l)
      for (int e = 0; e < catalog.layers[l].n_expert(); ++e)
        if ((plain->heat()->age(static_cast<int>(l), e) == 1) != cold) hot[l].push_back(e);
    split.sim->store().force(hot);
    const ExpertTelemetry before = split.model->expert_telemetry();
    const StepOutput got = step_rows(*split.model, row);
    ASSERT_TRUE(std::ranges::equal(got.rows[0].logits, want.rows[0].logits)) << i;
    const ExpertTelemetry after = split.model->expert_telemetry();
    const uint64_t hot_pairs = after.hot_pairs - before.hot_pairs, pairs = after.pairs - before.pairs;
    EXPECT_EQ(hot_pairs, cold ? 0 : pairs) << i;
    all_hot += after.all_hot - before.all_hot;
  }
  EXPECT_EQ(all_hot, 20u * static_cast<uint64_t>(catalog.n_moe_layers()));
}

TEST_P(ExpertPlacementTest, GivesTheSameLogitsWhilePlacementsChange) {
  const SplitModel split = sim_model(fixture.file, pool, {.share = 0.4, .decode_rows = 8});
  const Outputs want = run_in_chunks(*plain, fixture.ids, 3);
  const Outputs prompt = run_in_chunks(*plain, fixture.ids, 20);
  std::mt19937 random(3);
  // How many experts move in a round depends on how fast copies are.
  const auto n_moved = [&] { return split.model->expert_telemetry().moved; };
  for (int round = 0; round < 6 || (n_moved() <= 20 && round < 300); ++round) {
    EXPECT_TRUE(run_in_chunks(*split.model, fixture.ids, 3).logits == want.logits);
    EXPECT_TRUE(run_in_chunks(*split.model, fixture.ids, 20).logits == prompt.logits);
    // Somebody else becomes hot.
    HeatMap& heat = *split.model->heat();
    for (int i = 0; i < 40; ++i) {
      const int l = static_cast<int>(random() % static_cast<unsigned>(heat.n_layers()));
      if (heat.n_expert(l) > 0)
        heat.use(l, static_cast<int>(random() % static_cast<unsigned>(heat.n_expert(l))), 50.0f);
    }
  }
  EXPECT_GT(n_moved(), 20u);
}

TEST_P(ExpertPlacementTest, EvaluatesTreesAndSeveralSequencesLikeThePlainModel) {
  std::mt19937 random(7);
  for (const double share : {0.0, 0.5}) {
    const SplitModel split = sim_model(fixture.file, pool, {.share = share});
    const auto n_vocab = static_cast<size_t>(plain->config().n_vocab);
    for (const int n_nodes : {1, 2, 9, 33, 64}) {
      const std::vector<Row> tree = random_tree(n_nodes, n_vocab, random);
      const std::span<const TokenId> prompt = std::span(fixture.ids).first(20);
      const auto evaluate = [&](Model& model) {
        run_in_chunks(model, prompt, 20);
        std::vector<float> logits = logits_of(step_rows(model, tree, {.uncommitted = true}));
        const std::vector<int32_t> path = {0};
        model.commit(0, path);
        // Another sequence beside the one that goes on.
        model.clear(1);
        const std::vector<Row> other = chain(std::span(fixture.ids).subspan(30, 5)),
                               next = chain(std::span(fixture.ids).subspan(50, 4));
        const SequenceRows groups[] = {{.sequence = 1, .rows = other}, {.sequence = 0, .rows = next}};
        append_logits(model.step({.groups = groups}), logits);
        return logits;
      };
      const std::vector<float> want = evaluate(*plain), got = evaluate(*split.model);
      EXPECT_TRUE(got == want) << "share " << share << " nodes " << n_nodes;
    }
  }
}

// Guesses from several rows move experts early and change no result.
TEST_P(ExpertPlacementTest, LooksAheadFromTheRowsOfDraftsAndOfSeveralSequences) {
  const std::span<const TokenId> ids = fixture.ids;
  std::mt19937 random(9);
  const std::vector<Row> tree = random_tree(17, static_cast<size_t>(plain->config().n_vocab), random);
  for (const double share : {0.0, 0.3}) {
    const SplitModel split = sim_model(fixture.file, pool, {.share = share});
    const auto evaluate = [&](Model& model) {
      std::vector<float> logits;
      for (const int s : {0, 1}) model.clear(s);
      for (size_t i = 0; i + 3 < ids.size() / 2; i += 3) {
        const std::vector<Row> one = chain(ids.subspan(i, 1)), two = chain(ids.subspan(i + 1, 2));
        const SequenceRows groups[] = {{.sequence = 0, .rows = one}, {.sequence = 1, .rows = two}};
        append_logits(model.step({.groups = groups}), logits);
        append_logits(step_rows(model, tree, {.uncommitted = true}), logits);
        model.commit(0, std::vector<int32_t>{0});
      }
      return logits;
    };
    EXPECT_TRUE(evaluate(*split.model) == evaluate(*plain)) << "share " << share;
    const ExpertTelemetry t = split.model->expert_telemetry();
    const bool guesses = plain->config().is_moe();
    EXPECT_EQ(t.parcels > 0, guesses && plain->config().n_layer > 3);
    EXPECT_EQ(t.foreseen > 0, guesses);
  }
}

TEST_P(ExpertPlacementTest, CountsTheSameHeatWhereverExpertsAre) {
  const SplitModel split = sim_model(fixture.file, pool, {.share = 0.3});
  run_in_chunks(*plain, fixture.ids, 10);
  run_in_chunks(*split.model, fixture.ids, 10);
  EXPECT_EQ(plain->heat()->values(), split.model->heat()->values());
  double sum = 0;
  for (const float value : plain->heat()->values()) sum += value;
  EXPECT_GT(sum, 0.0);
}

TEST_P(ExpertPlacementTest, CountsOnlyTheRowsOfADraftThatWereAccepted) {
  const std::span<const TokenId> prompt = std::span(fixture.ids).first(20),
                                 text = std::span(fixture.ids).subspan(20, 3);
  run_in_chunks(*plain, prompt, 20);
  for (size_t i = 0; i < text.size(); ++i) step_rows(*plain, chain(text.subspan(i, 1)));
  const auto other = [&](size_t i) { return fixture.ids[40 + i]; };
  // A wrong guess beside each right one.
  const std::vector<Row> tree = {{.token = text[0], .parent = -1}, {.token = other(0), .parent = 0},
                                 {.token = text[1], .parent = 0},  {.token = other(1), .parent = 2},
                                 {.token = text[2], .parent = 2},  {.token = other(2), .parent = 4}};
  const std::vector<int32_t> path = {0, 2, 4};
  const std::unique_ptr<Model> drafts = plain_model(fixture.file, pool);
  const SplitModel split = sim_model(fixture.file, pool, {.share = 0.3});
  const std::unique_ptr<Model> tiered = tiered_model(fixture.file, pool);
  for (Model* const model : {drafts.get(), split.model.get(), tiered.get()}) {
    run_in_chunks(*model, prompt, 20);
    step_rows(*model, tree, {.uncommitted = true});
    model->commit(0, path);
    EXPECT_EQ(model->heat()->values(), plain->heat()->values());
    EXPECT_EQ(model->heat()->uses(), plain->heat()->uses());
    EXPECT_EQ(model->heat()->n_tokens(), plain->heat()->n_tokens());
  }
}

TEST_P(ExpertPlacementTest, KeepsPinnedLayersHot) {
  const SplitModel split = sim_model(fixture.file, pool, {.share = 0.8, .pin_layers = 2});
  for (int round = 0; round < 3; ++round) run_in_chunks(*split.model, fixture.ids, 1);
  EXPECT_EQ(split.model->expert_telemetry().moved > 0, plain->config().is_moe()) << "parts are all as hot";
  for (const int l : {0, 1})
    for (int e = 0; e < split.sim->catalog().layers[static_cast<size_t>(l)].n_expert(); ++e)
      EXPECT_TRUE(split.sim->store().hot(l, e)) << l << " " << e;
}

TEST_P(ExpertPlacementTest, IsBitForBitThePlainModelWithExpertsInTheFile) {
  const std::unique_ptr<Model> tiered = tiered_model(fixture.file, pool);
  for (const size_t chunk : {size_t{1}, size_t{40}, size_t{100}})
    EXPECT_EQ(run_in_chunks(*tiered, fixture.ids, chunk).logits,
              run_in_chunks(*plain, fixture.ids, chunk).logits)
        << chunk;
  const ExpertTelemetry t = tiered->expert_telemetry();
  EXPECT_GT(t.disk_bytes, 0u);
  EXPECT_GT(t.hot_pairs, 0u);
  EXPECT_EQ(t.pairs, t.hot_pairs + t.fetched_pairs);
}

}  // namespace
}  // namespace thermo
