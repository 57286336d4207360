// The GPU against the recorded outputs of the reference implementation and against the CPU engine: every way
// to cut the same tokens into steps, several sequences, trees, checkpoints, and a quantised model. Skipped
// where there is no GPU.
#include "model/gpu/gpu_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/units.h"
#include "device/buffer.h"
#include "device/device_info.h"
#include "device/testing/skip_without_gpu.h"
#include "experts/heat.h"
#include "gguf/gguf_file.h"
#include "model/model.h"
#include "model/testing/model_checks.h"
#include "model/testing/page_checks.h"
#include "model/testing/quantised_file.h"
#include "model/testing/recorded_model.h"

namespace thermo {
namespace {

constexpr double kTolerance = 1e-4;  // as on the CPU: float32 weights, float32 cache, another order of sums

// `window`: of sliding layers; 0: as in the file.
std::unique_ptr<GpuModel> make_gpu(const GgufFile& file, ThreadPool& pool, const SequenceConfig& sequence,
                                   int n_sequences, bool graphs, int window) {
  ModelConfig config = read_model_config(file);
  for (Layer& layer : config.network.layers)
    for (Block& block : layer.blocks)
      if (block.window > 0 && window > 0) block.window = window;
  insert_all_taps(config.network, config.n_layer);
  const Weights weights = Weights::load(config, file, false, pool, {});
  ModelOptions options;
  options.n_batch = 128;
  options.n_sequences = n_sequences;
  options.graphs = graphs;
  options.sequence = sequence;
  // Compute capability 7.5 has the shared memory for a few less than 64.
  options.sequence.max_draft_rows = std::min(sequence.max_draft_rows, GpuModel::max_draft_rows(config));
  return std::make_unique<GpuModel>(std::move(config), weights, options, pool, LoadProgressFn{});
}

std::unique_ptr<GpuModel> make_gpu(const GgufFile& file, ThreadPool& pool, KvType kv, int n_sequences = 2,
                                   bool graphs = true) {
  return make_gpu(file, pool, {.n_ctx = 512, .max_draft_rows = 64, .k_type = kv, .v_type = kv}, n_sequences,
                  graphs, 0);
}

class GpuArchitectureTest : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, GpuArchitectureTest,
                         testing::Values("qwen35moe", "qwen35", "laguna", "qwen3moe"),
                         [](const auto& test) { return test.param; });

TEST_P(GpuArchitectureTest, MatchesTheReferenceForEveryChunkLength) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  const auto model = make_gpu(fixture.file, pool, KvType::F32);
  for (size_t chunk : {size_t{100}, size_t{1}, size_t{2}, size_t{7}, size_t{16}, size_t{32}, size_t{33},
                       size_t{64}, size_t{65}}) {
    for (const bool with_hidden : {true, false}) {
      const Outputs got = run_in_chunks(*model, fixture.ids, chunk, with_hidden);
      ASSERT_EQ(model->fault(), "");
      EXPECT_LT(error_of(got.logits, fixture.reference("logits")), kTolerance)
          << "chunk " << chunk << " hidden " << with_hidden;
      for (size_t l = 0; with_hidden && l < got.hidden.size(); ++l)
        EXPECT_LT(error_of(got.hidden[l], fixture.reference("hidden." + std::to_string(l))), kTolerance)
            << "chunk " << chunk << " layer " << l;
    }
  }
}

SequenceConfig floats_of(int n_ctx, int max_draft_rows = 0, int n_pages = 0) {
  return {.n_ctx = n_ctx,
          .max_draft_rows = max_draft_rows,
          .k_type = KvType::F32,
          .v_type = KvType::F32,
          .n_pages = n_pages};
}

TEST_P(GpuArchitectureTest, SequencesShareWhatTheyBeginWith) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  expect_shared_pages_to_part(*make_gpu(fixture.file, pool, floats_of(700), 3, true, 0), kTolerance);
}

TEST_P(GpuArchitectureTest, CrossesTheBordersOfPages) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  for (const int window : {5, 130, 300})
    expect_page_borders_to_be_crossed(*make_gpu(fixture.file, pool, floats_of(701, 40), 2, true, window),
                                      kTolerance);
}

TEST_P(GpuArchitectureTest, SaysWhenThePoolIsFull) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  expect_a_full_pool_to_be_said(*make_gpu(fixture.file, pool, floats_of(600, 0, 3), 2, true, 0), kTolerance);
}

// A window that moves on is like a cache that keeps everything.
TEST(GpuModelTest, WindowsAreLikeAWholeCache) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture("laguna");
  ThreadPool pool({.n_threads = 2});
  for (const int window : {1, 100, 257, 300}) {
    SequenceConfig whole = floats_of(1300);
    whole.keep_windows = true;
    const auto full = make_gpu(fixture.file, pool, whole, 1, true, window);
    const std::vector<TokenId> ids = random_tokens(*full, 1000, 9);
    const std::vector<float> want = append_tokens(*full, 0, ids, 128);
    const auto sliding = make_gpu(fixture.file, pool, floats_of(1300, 8), 2, true, window);
    for (const size_t chunk : {size_t{128}, size_t{37}, size_t{1}}) {
      sliding->clear(0);
      expect_close(append_tokens(*sliding, 0, ids, chunk), want, kTolerance);
    }
  }
}

// Single rows take the few launches that quantised weights allow, larger steps do not; graphs or not.
TEST_P(GpuArchitectureTest, MatchesTheReferenceWithQuantisedWeights) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  const QuantisedFile quantised(fixture.file);
  const GgufFile file = quantised.open();
  ThreadPool pool({.n_threads = 2});
  for (const bool graphs : {true, false}) {
    const auto model = make_gpu(file, pool, KvType::F32, 1, graphs);
    for (const size_t chunk : {size_t{1}, size_t{7}, size_t{64}}) {
      const Outputs got = run_in_chunks(*model, fixture.ids, chunk, true);
      ASSERT_EQ(model->fault(), "");
      EXPECT_LT(median_error_of_rows(got.logits, fixture.reference("logits"),
                                     static_cast<size_t>(model->config().n_vocab)),
                0.3)
          << "chunk " << chunk << " graphs " << graphs;
      for (size_t l = 0; l < got.hidden.size(); ++l)
        EXPECT_LT(median_error_of_rows(got.hidden[l], fixture.reference("hidden." + std::to_string(l)),
                                       static_cast<size_t>(model->config().n_embd)),
                  0.3)
            << "chunk " << chunk << " graphs " << graphs << " layer " << l;
    }
  }
}

// On Hopper a feed-forward block as wide as this has kernels of its own from 65 rows on (linear_wide_cuda.h).
TEST(GpuModelTest, ManyRowsOfAWideDenseModelAreLikeTheProcessors) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture("qwen35");
  const QuantisedFile quantised(fixture.file, 1024);
  const GgufFile file = quantised.open();
  ThreadPool pool({.n_threads = 2});
  ModelConfig config = read_model_config(file);
  Weights weights = Weights::load(config, file, true, pool, {});
  ModelOptions options;
  options.n_batch = 128;
  options.isa = best_isa();
  options.sequence = {.n_ctx = 512, .max_draft_rows = 0, .k_type = KvType::F32, .v_type = KvType::F32};
  Model cpu(std::move(config), std::move(weights), options, pool);
  const auto gpu = make_gpu(file, pool, KvType::F32, 1);
  const auto n_vocab = static_cast<size_t>(cpu.config().n_vocab);
  std::vector<TokenId> ids = fixture.ids;
  while (ids.size() < 250) ids.push_back(ids[ids.size() * 7 % fixture.ids.size()]);
  const Outputs want = run_in_chunks(cpu, ids, 100);
  for (const size_t chunk : {size_t{125}, size_t{65}, size_t{64}}) {
    const Outputs got = run_in_chunks(*gpu, ids, chunk);
    ASSERT_EQ(gpu->fault(), "");
    EXPECT_LT(median_error_of_rows(got.logits, want.logits, n_vocab), 0.25) << "chunk " << chunk;
  }
}

TEST_P(GpuArchitectureTest, KeepsSequencesApart) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  expect_sequences_apart(*make_gpu(fixture.file, pool, KvType::F32), fixture.ids, kTolerance);
}

TEST_P(GpuArchitectureTest, EvaluatesAndCommitsTreesLikeTheirPaths) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  expect_trees_like_their_paths(*make_gpu(fixture.file, pool, KvType::F32), fixture.ids, kTolerance);
}

TEST_P(GpuArchitectureTest, RunsPrefillDecodeAndTreesInOneStep) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  const auto model = make_gpu(fixture.file, pool, KvType::F32, 4);
  expect_mixed_steps_like_single_ones(*model, fixture.ids, 80, kTolerance);
  expect_mixed_steps_like_single_ones(*model, fixture.ids, 2, kTolerance);
}

TEST_P(GpuArchitectureTest, ComesBackToACheckpoint) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  expect_return_to_a_checkpoint(*make_gpu(fixture.file, pool, KvType::F32), fixture.ids, kTolerance);
}

TEST_P(GpuArchitectureTest, RestoresACheckpointInAnotherSequence) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  expect_checkpoints_in_other_sequences(*make_gpu(fixture.file, pool, KvType::F32), fixture.ids, kTolerance);
}

TEST_P(GpuArchitectureTest, LoadsBlocksOfKeysAndValuesInAnotherSequence) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  expect_blocks_in_other_sequences(*make_gpu(fixture.file, pool, KvType::F32), fixture.ids, kTolerance);
}

// Half a unit of 11 or 8 bits for f16 and bf16, of 7 or 3 bits relative to the block for q8_0 and q4_0,
// carried through a few layers; a row whose router was near a tie may choose another expert, so the bound is
// on the typical row.
TEST_P(GpuArchitectureTest, RunsWithEveryCacheType) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  const std::pair<KvType, double> cases[] = {
      {KvType::F16, 0.005}, {KvType::BF16, 0.04}, {KvType::Q8_0, 0.1}, {KvType::Q4_0, 0.8}};
  const std::vector<float> want = fixture.reference("logits");
  for (const auto& [type, bound] : cases) {
    const auto model = make_gpu(fixture.file, pool, type, 1);
    for (const size_t chunk : {size_t{33}, size_t{1}}) {
      const Outputs got = run_in_chunks(*model, fixture.ids, chunk);
      const auto n_vocab = static_cast<size_t>(model->config().n_vocab);
      EXPECT_LT(median_error_of_rows(got.logits, want, n_vocab), bound)
          << kv_type_name(type) << " chunk " << chunk;
    }
  }
}

// The quantised model: activations are rounded differently (f16 here, int8 on the CPU), so logits agree to
// the typical rounding of int8 and greedy text is the same unless two tokens were as near as that.
TEST(GpuPlankton, AnswersLikeTheCpu) {
  SKIP_WITHOUT_GPU();
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  const GgufFile expected(std::string(THERMO_TEST_DATA) + "/plankton-expected.gguf");
  const std::vector<TokenId> ids = recorded_values<TokenId>(expected, "ids");

  ThreadPool pool({.n_threads = 2});
  ModelConfig config = read_model_config(file);
  Weights weights = Weights::load(config, file, true, pool, {});
  ModelOptions options;
  options.n_batch = 128;
  options.isa = best_isa();
  options.sequence = {.n_ctx = 512, .max_draft_rows = 0, .k_type = KvType::F16, .v_type = KvType::F16};
  Model cpu(std::move(config), std::move(weights), options, pool);
  const auto gpu = make_gpu(file, pool, KvType::F16, 1);
  const auto n_vocab = static_cast<size_t>(cpu.config().n_vocab);

  const Outputs want = run_in_chunks(cpu, ids, 100);
  for (const size_t chunk : {size_t{100}, size_t{1}, size_t{5}, size_t{16}, size_t{30}}) {
    const Outputs got = run_in_chunks(*gpu, ids, chunk);
    ASSERT_EQ(gpu->fault(), "");
    EXPECT_LT(median_error_of_rows(got.logits, want.logits, n_vocab), 0.25) << "chunk " << chunk;
  }

  // Greedy from here; a difference counts when the CPU was sure.
  run_in_chunks(cpu, ids, 100);
  run_in_chunks(*gpu, ids, 100);
  const auto best = [&](std::span<const float> logits) {
    return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  };
  TokenId token = best(std::span<const float>(want.logits).last(n_vocab));
  for (int i = 0; i < 64; ++i) {
    const std::vector<Row> row = chain({&token, 1});
    const std::span<const float> a = step_rows(cpu, row).rows[0].logits,
                                 b = step_rows(*gpu, row).rows[0].logits;
    token = best(a);
    const TokenId other = best(b);
    if (other != token) {
      EXPECT_LT(a[static_cast<size_t>(token)] - a[static_cast<size_t>(other)], 0.5f) << "token " << i;
    }
  }
}

TEST_P(GpuArchitectureTest, TakesTheBytesThatWerePlanned) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  const ModelConfig config = read_model_config(fixture.file);
  const Weights weights = Weights::load(config, fixture.file, false, pool, {});
  for (const int n_batch : {1, 33, 512})
    for (const uint64_t expert_bytes : {uint64_t{0}, 300 * KiB}) {  // 0: all on the GPU
      ModelOptions options;
      options.n_batch = n_batch;
      options.n_sequences = 3;
      options.sequence = {.n_ctx = 300, .max_draft_rows = 9, .k_type = KvType::F16, .v_type = KvType::Q8_0};
      options.isa = best_isa();
      options.experts.split = expert_bytes > 0;
      options.experts.budget_bytes = expert_bytes;
      uint64_t planned = 0;
      for (const GpuMemoryItem& item :
           GpuModel::plan(config, weights, options, use_device(0).n_multiprocessors))
        planned += item.bytes;
      const size_t before = DeviceBuffer::total_bytes();
      const GpuModel model(config, weights, options, pool, {});
      EXPECT_EQ(DeviceBuffer::total_bytes() - before, planned)
          << "batch " << n_batch << ", experts " << expert_bytes;
    }
}

// The top of each row is that of the row itself, in recorded steps and in larger ones.
TEST(GpuPlankton, FindsTheTopOfTheRows) {
  SKIP_WITHOUT_GPU();
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  ThreadPool pool({.n_threads = 2});
  const auto gpu = make_gpu(file, pool, KvType::F16, 1);
  const auto n_vocab = static_cast<size_t>(gpu->config().n_vocab);
  std::vector<TokenId> ids;
  for (int i = 0; i < 128; ++i) ids.push_back(17 * i % 4000);
  // More rows than the head computes at a time, too.
  for (const size_t n :
       {size_t{1}, size_t{3}, size_t{32}, size_t{64}, size_t{65}, size_t{100}, size_t{128}}) {
    for (const LogitsNeed need : {LogitsNeed::Best, LogitsNeed::Top}) {
      std::vector<Row> rows = chain(std::span(ids).first(n));
      if (n == 100)
        for (size_t i = 0; i < 90; ++i) rows[i].want_logits = false;
      gpu->clear(0);
      const std::vector<float> want = logits_of(step_rows(*gpu, rows));
      gpu->clear(0);
      const StepOutput out = step_rows(*gpu, rows, {.need = need});
      ASSERT_EQ(gpu->fault(), "");
      ASSERT_EQ(out.rows.size() * n_vocab, want.size());
      for (size_t i = 0; i < out.rows.size(); ++i) {
        EXPECT_TRUE(out.rows[i].logits.empty());
        ASSERT_NE(out.rows[i].top, nullptr);
        const TopLogits& top = *out.rows[i].top;
        const std::span<const float> row = std::span(want).subspan(i * n_vocab, n_vocab);
        TopLogits expected;
        top_logits_ref(row, need == LogitsNeed::Best ? 1 : kTopTokens, expected);
        EXPECT_EQ(top.best, expected.best) << n << " row " << i;
        EXPECT_EQ(top.max, expected.max) << n << " row " << i;
        if (need == LogitsNeed::Top) {
          EXPECT_GE(top.n, kTopTokens);
        }
        const std::span<const float> fetched = gpu->fetch_logits(static_cast<int>(i));
        EXPECT_TRUE(std::equal(fetched.begin(), fetched.end(), row.begin(), row.end())) << n << " row " << i;
      }
    }
  }
}

// Kernels of one row, of few and of many count what they use, and nothing else does.
TEST(GpuPlankton, CountsTheUsesOfExpertsThatAreAllOnTheCard) {
  SKIP_WITHOUT_GPU();
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  ThreadPool pool({.n_threads = 2});
  const auto gpu = make_gpu(file, pool, KvType::F16, 1);
  ASSERT_NE(gpu->heat(), nullptr);
  EXPECT_TRUE(gpu->heat()->empty());
  std::vector<TokenId> ids;
  for (int i = 0; i < 128; ++i) ids.push_back(17 * i % 4000);
  double total = 0.0;  // uses of a layer, faded
  uint64_t n_tokens = 0;
  for (const int n : {1, 1, 2, 7, 33, 64, 100, 128}) {
    gpu->clear(0);
    step_rows(*gpu, chain(std::span(ids).first(static_cast<size_t>(n))));
    ASSERT_EQ(gpu->fault(), "");
    const HeatMap& heat = *gpu->heat();
    n_tokens += static_cast<uint64_t>(n);
    total = (total + n * gpu->config().route.n_expert_used) * std::exp2(-n / 2048.0);
    EXPECT_EQ(heat.n_tokens(), n_tokens);
    for (int il = 0; il < heat.n_layers(); ++il) {
      if (heat.n_expert(il) == 0) continue;
      double sum = 0.0;
      for (int e = 0; e < heat.n_expert(il); ++e) sum += heat.heat(il, e);
      EXPECT_NEAR(sum, total, 1e-3 * total) << "layer " << il << " after " << n;
    }
  }
}

// Sequences of one step that need different parts of their logits.
TEST(GpuPlankton, GivesEachSequenceTheLogitsItNeeds) {
  SKIP_WITHOUT_GPU();
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  ThreadPool pool({.n_threads = 2});
  const auto gpu = make_gpu(file, pool, KvType::F16, 4);
  const std::vector<TokenId> ids = {17, 170, 1700, 34};
  const std::vector<Row> one = chain(std::span(ids).first(1)), four = chain(ids);
  const SequenceRows groups[] = {{.sequence = 3, .rows = one, .need = LogitsNeed::Best},
                                 {.sequence = 0, .rows = four},
                                 {.sequence = 1, .rows = one, .need = LogitsNeed::Top},
                                 {.sequence = 2, .rows = one}};
  const StepOutput out = gpu->step({.groups = groups});
  ASSERT_EQ(gpu->fault(), "");
  ASSERT_EQ(out.rows.size(), 7u);
  for (const size_t i : {0, 5}) EXPECT_TRUE(out.rows[i].top != nullptr && out.rows[i].logits.empty()) << i;
  const std::vector<float> row(out.rows[6].logits.begin(), out.rows[6].logits.end());
  for (const size_t i : {1, 2, 3, 4, 6}) EXPECT_FALSE(out.rows[i].logits.empty()) << i;
  EXPECT_EQ(out.rows[0].top->best, std::max_element(row.begin(), row.end()) - row.begin());
  EXPECT_GE(out.rows[5].top->n, kTopTokens);
  for (const int i : {0, 5}) {  // the same token, wherever it is
    const std::span<const float> fetched = gpu->fetch_logits(i);
    EXPECT_TRUE(std::equal(fetched.begin(), fetched.end(), row.begin(), row.end())) << i;
  }
}

TEST(GpuPlankton, GivesTheSameWithAndWithoutGraphs) {
  SKIP_WITHOUT_GPU();
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  ThreadPool pool({.n_threads = 2});
  const auto recorded = make_gpu(file, pool, KvType::F16, 1, true),
             queued = make_gpu(file, pool, KvType::F16, 1, false);
  std::vector<TokenId> ids;
  for (int i = 0; i < 60; ++i) ids.push_back(17 * i % 4000);
  for (const size_t chunk : {size_t{1}, size_t{4}, size_t{8}})
    EXPECT_EQ(run_in_chunks(*recorded, ids, chunk).logits, run_in_chunks(*queued, ids, chunk).logits)
        << chunk;
}

}  // namespace
}  // namespace thermo
