// Split experts, and the parts of a dense model (qwen35), on the GPU: whatever is hot, whichever lane
// computes the rest, however it changes while running, the outputs are those of the reference. Skipped where
// there is no GPU.
#include "model/gpu/gpu_experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "device/testing/skip_without_gpu.h"
#include "experts/expert_store.h"
#include "gguf/gguf_file.h"
#include "model/gpu/gpu_model.h"
#include "model/testing/quantised_file.h"
#include "model/testing/recorded_model.h"

namespace thermo {
namespace {

constexpr double kTolerance = 1e-4;

enum class Lanes { Cpu, Fetch, Both };

// `share`: of the experts' bytes that are hot; negative: nothing is split.
std::unique_ptr<GpuModel> make_split(const GgufFile& file, ThreadPool& pool, double share, Lanes lanes,
                                     bool swaps = true) {
  ModelConfig config = share >= 0.0 ? read_split_config(file) : read_model_config(file);
  insert_all_taps(config.network, config.n_layer);
  const Weights weights = Weights::load(config, file, false, pool, {});
  uint64_t total = 0;
  for (const LayerWeights& layer : weights.layers)
    for (const BlockWeights& block : layer.blocks)
      for (const Ffn& expert : block.experts) total += expert.n_bytes() + 3 * kExpertAlign;
  ModelOptions options;
  options.n_batch = 300;
  options.n_sequences = 2;
  options.isa = best_isa();
  options.sequence = {.n_ctx = 512,
                      .max_draft_rows = std::min(64, GpuModel::max_draft_rows(config)),
                      .k_type = KvType::F32,
                      .v_type = KvType::F32};
  options.experts.split = share >= 0.0;
  options.experts.budget_bytes =
      options.experts.split ? static_cast<uint64_t>(share * static_cast<double>(total)) : 0;
  options.experts.swaps = swaps;
  options.experts.cpu = lanes != Lanes::Fetch;
  options.experts.fetch = lanes != Lanes::Cpu;
  return std::make_unique<GpuModel>(std::move(config), weights, options, pool, LoadProgressFn{});
}

class GpuSplitTest : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, GpuSplitTest, testing::Values("qwen35moe", "laguna", "qwen3moe", "qwen35"),
                         [](const auto& test) { return test.param; });

TEST_P(GpuSplitTest, MatchesTheReferenceForEveryShareAndLane) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 4});
  for (const double share : {0.0, 0.01, 0.3, 0.6, 1.0})
    for (const Lanes lanes : {Lanes::Both, Lanes::Cpu, Lanes::Fetch}) {
      const auto model = make_split(fixture.file, pool, share, lanes);
      for (const size_t chunk : {size_t{100}, size_t{1}, size_t{2}, size_t{7}, size_t{32}, size_t{33}}) {
        const Outputs got = run_in_chunks(*model, fixture.ids, chunk, chunk == 7);
        ASSERT_EQ(model->fault(), "");
        EXPECT_LT(error_of(got.logits, fixture.reference("logits")), kTolerance)
            << "share " << share << " lanes " << static_cast<int>(lanes) << " chunk " << chunk;
      }
      const ExpertTelemetry t = model->expert_telemetry();
      EXPECT_EQ(t.hot_pairs == t.pairs, share == 1.0);
      if (lanes != Lanes::Both) {
        EXPECT_EQ(t.cpu_pairs > 0, lanes == Lanes::Cpu && share < 1.0);
      }
      if (lanes != Lanes::Both) {
        EXPECT_EQ(t.fetched_pairs > 0, lanes == Lanes::Fetch && share < 1.0);
      }
    }
}

TEST_P(GpuSplitTest, StaysExactWhileExpertsMove) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 4});
  const auto model = make_split(fixture.file, pool, 0.4, Lanes::Both);
  const ModelConfig& c = model->config();
  const int n_vocab = c.n_vocab;
  const std::vector<float> want = fixture.reference("logits");
  std::mt19937 random(7);
  model->clear(0);
  for (size_t i = 0; i < fixture.ids.size(); ++i) {
    std::vector<std::vector<int32_t>> hot(static_cast<size_t>(c.n_layer));
    for (std::vector<int32_t>& layer : hot)
      for (int e = 0; e < c.route.n_expert; ++e)
        if (random() % 5 < 2) layer.push_back(e);
    if (i % 8 == 7)
      EXPECT_TRUE(model->reset_experts());
    else
      model->experts()->store().force(hot);
    const StepOutput out = step_rows(*model, chain(std::span(fixture.ids).subspan(i, 1)));
    ASSERT_EQ(model->fault(), "");
    const size_t width = static_cast<size_t>(n_vocab);
    EXPECT_LT(error_of(out.rows[0].logits, std::span(want).subspan(i * width, width)), 2 * kTolerance)
        << "token " << i;
  }
}

TEST_P(GpuSplitTest, RunsDraftTreesLikeTheResidentModel) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 4});
  const auto split = make_split(fixture.file, pool, 0.3, Lanes::Both),
             whole = make_split(fixture.file, pool, 1.0, Lanes::Both);
  std::vector<Row> tree;
  for (int i = 0; i < 12; ++i)
    tree.push_back({.token = fixture.ids[static_cast<size_t>(20 + i)],
                    .parent = i == 0 ? -1 : (i - 1) / 2,
                    .want_logits = true});
  std::vector<float> got[2];
  int which = 0;
  for (GpuModel* model : {split.get(), whole.get()}) {
    run_in_chunks(*model, std::span(fixture.ids).first(20), 20);
    append_logits(step_rows(*model, tree, {.uncommitted = true}), got[which]);
    model->commit(0, std::vector<int32_t>{0, 2, 5});
    append_logits(step_rows(*model, chain(std::span(fixture.ids).subspan(40, 1))), got[which]);
    ASSERT_EQ(model->fault(), "");
    ++which;
  }
  EXPECT_LT(error_of(got[0], got[1]), kTolerance);
}

TEST_P(GpuSplitTest, CountsOnlyTheRowsOfADraftThatWereAccepted) {
  SKIP_WITHOUT_GPU();
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 4});
  const std::span<const TokenId> prompt = std::span(fixture.ids).first(20),
                                 text = std::span(fixture.ids).subspan(20, 2);
  const std::vector<Row> tree = {{.token = text[0], .parent = -1},
                                 {.token = fixture.ids[40], .parent = 0},
                                 {.token = text[1], .parent = 0}};
  const auto plain = make_split(fixture.file, pool, 0.3, Lanes::Both),
             drafts = make_split(fixture.file, pool, 0.3, Lanes::Both);
  for (GpuModel* const model : {plain.get(), drafts.get()}) run_in_chunks(*model, prompt, 20);
  for (size_t i = 0; i < text.size(); ++i) step_rows(*plain, chain(text.subspan(i, 1)));
  step_rows(*drafts, tree, {.uncommitted = true});
  drafts->commit(0, std::vector<int32_t>{0, 2});
  ASSERT_EQ(drafts->fault(), "");
  EXPECT_EQ(drafts->heat()->n_tokens(), plain->heat()->n_tokens());
  const auto sum = [](const HeatMap& heat, int il) {
    double heats = 0.0;
    for (int e = 0; e < heat.n_expert(il); ++e) heats += heat.heat(il, e);
    return heats;
  };
  for (int il = 0; il < plain->heat()->n_layers(); ++il)
    EXPECT_NEAR(sum(*drafts->heat(), il), sum(*plain->heat(), il), 1e-3) << "layer " << il;
}

// The heat of a text is that of plain steps, whatever was drafted: where all experts are on the card
// (negative), where they are split, and where all of them are hot.
TEST(GpuSplit, LeavesTheHeatOfPlainStepsAfterDrafts) {
  SKIP_WITHOUT_GPU();
  if (!isa_available(Isa::Avx2)) GTEST_SKIP() << "needs AVX2";
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  ThreadPool pool({.n_threads = 4});
  std::mt19937 random(11);
  const auto token = [&] { return static_cast<TokenId>(random() % 2000); };
  std::vector<TokenId> prompt(20), text(60);
  std::generate(prompt.begin(), prompt.end(), token);
  std::generate(text.begin(), text.end(), token);
  for (const double share : {-1.0, 0.0, 0.3, 1.0}) {
    const auto plain = make_split(file, pool, share, Lanes::Both),
               drafts = make_split(file, pool, share, Lanes::Both);
    for (GpuModel* const model : {plain.get(), drafts.get()}) run_in_chunks(*model, prompt, 20);
    for (const TokenId id : text) step_rows(*plain, chain({&id, 1}));
    // Trees of 1, 2, 4 .. 64 rows, of which every other one is right as far as the text goes.
    for (size_t at = 0, n = 1; at < text.size(); n = n == 64 ? 1 : 2 * n) {
      std::vector<Row> tree;
      std::vector<int32_t> path;
      for (size_t r = 0; r < n; ++r) {
        const bool right = r % 2 == 0 && at + path.size() < text.size();
        tree.push_back({.token = right ? text[at + path.size()] : token(),
                        .parent = path.empty() ? -1 : path.back(),
                        .want_logits = true});
        if (right) path.push_back(static_cast<int32_t>(r));
      }
      step_rows(*drafts, tree, {.uncommitted = true});
      // Meanwhile the other sequence goes on.
      const std::vector<Row> other = chain(std::span(prompt).subspan(at % 20, 1));
      for (GpuModel* const model : {plain.get(), drafts.get()}) {
        if (at == 0) model->clear(1);
        const SequenceRows group{.sequence = 1, .rows = other};
        model->step({.groups = {&group, 1}});
      }
      drafts->commit(0, path);
      at += path.size();
    }
    ASSERT_EQ(drafts->fault(), "");
    EXPECT_EQ(drafts->heat()->n_tokens(), plain->heat()->n_tokens()) << share;
    EXPECT_EQ(drafts->heat()->uses(), plain->heat()->uses()) << share;

    // A step that is too large for a graph, with a draft in it: its rows round otherwise, so they may choose
    // otherwise, but as many count.
    std::vector<TokenId> many(120);
    std::generate(many.begin(), many.end(), token);
    const std::vector<Row> more = chain(many), draft = chain(std::span(text).first(8));
    const SequenceRows groups[] = {{.sequence = 1, .rows = more},
                                   {.sequence = 0, .rows = draft, .uncommitted = true}};
    const auto n_uses = [&](size_t n_layer) {
      const std::vector<uint64_t>& uses = drafts->heat()->uses();
      const auto each = static_cast<ptrdiff_t>(uses.size() / n_layer);
      std::vector<uint64_t> sums;
      for (auto first = uses.begin(); first != uses.end(); first += each)
        sums.push_back(std::accumulate(first, first + each, uint64_t{0}));
      return sums;
    };
    const auto n_layer = static_cast<size_t>(drafts->config().n_layer);
    const std::vector<uint64_t> before = n_uses(n_layer);
    const auto n_used = static_cast<uint64_t>(drafts->config().route.n_expert_used);
    drafts->step({.groups = groups});
    ASSERT_EQ(drafts->fault(), "");
    for (size_t il = 0; il < n_layer; ++il)
      EXPECT_EQ(n_uses(n_layer)[il] - before[il], 120 * n_used) << share << " layer " << il;
    drafts->commit(0, std::vector<int32_t>{0, 1, 2});
    for (size_t il = 0; il < n_layer; ++il)
      EXPECT_EQ(n_uses(n_layer)[il] - before[il], 123 * n_used) << share << " layer " << il;
    EXPECT_EQ(drafts->heat()->n_tokens(), plain->heat()->n_tokens() + 123);
  }
}

// Quantised experts have the same bits wherever they are computed (decision 11): single rows, the few rows
// that cold experts are posted for, the more that are dealt between copies and the processor, and prompts.
using Runs = std::vector<std::pair<size_t, size_t>>;  // tokens, and rows of a step
const Runs kFewRows = {{24, 1}, {24, 2}, {35, 7}, {64, 32}, {80, 40}},
           kAllRows = {{24, 1}, {24, 2}, {35, 7}, {64, 32}, {80, 40}, {200, 100}, {300, 300}};
void expect_same_bits(const GgufFile& file, std::initializer_list<double> shares,
                      const Runs& runs = kAllRows) {
  ThreadPool pool({.n_threads = 4});
  const auto n_vocab = static_cast<unsigned>(std::min(2000, read_model_config(file).n_vocab));
  std::vector<TokenId> ids;
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) ids.push_back(static_cast<TokenId>(random() % n_vocab));
  std::vector<std::vector<float>> want(runs.size());
  for (const double share : shares)
    for (const Lanes lanes : {Lanes::Both, Lanes::Cpu, Lanes::Fetch}) {
      if ((share < 0.0 || share == 1.0) && lanes != Lanes::Both) continue;
      const auto model = make_split(file, pool, share, lanes);
      for (size_t i = 0; i < runs.size(); ++i) {
        const auto [n, chunk] = runs[i];
        const Outputs got = run_in_chunks(*model, std::span(ids).first(n), chunk);
        ASSERT_EQ(model->fault(), "");
        if (want[i].empty()) want[i] = got.logits;
        ASSERT_EQ(got.logits.size(), want[i].size());
        EXPECT_EQ(std::memcmp(got.logits.data(), want[i].data(), want[i].size() * sizeof(float)), 0)
            << "share " << share << " lanes " << static_cast<int>(lanes) << " chunk " << chunk;
      }
    }
}

TEST(GpuSplit, QuantisedExpertsGiveTheSameBitsForEveryShareAndLane) {
  SKIP_WITHOUT_GPU();
  if (!isa_available(Isa::Avx2)) GTEST_SKIP() << "needs AVX2";
  expect_same_bits(GgufFile(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf"),
                   {-1.0, 0.0, 0.3, 0.6, 1.0});
}

// The rows of drafts and of several sequences are looked ahead from, too.
TEST(GpuSplit, SendsExpertsAheadInStepsOfSeveralRows) {
  SKIP_WITHOUT_GPU();
  if (!isa_available(Isa::Avx2)) GTEST_SKIP() << "needs AVX2";
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  ThreadPool pool({.n_threads = 4});
  std::vector<TokenId> ids;
  std::mt19937 random(5);
  for (int i = 0; i < 280; ++i) ids.push_back(static_cast<TokenId>(random() % 2000));
  const auto whole = make_split(file, pool, 1.0, Lanes::Both),
             split = make_split(file, pool, 0.2, Lanes::Both);
  if (!Stream::can_write()) GTEST_SKIP() << "streams cannot announce parcels here";
  uint64_t parcels = 0;  // what is worth sending depends on the time that steps take: not in every chunk
  for (const size_t chunk : {size_t{2}, size_t{7}, size_t{16}, size_t{40}}) {
    const ExpertTelemetry before = split->expert_telemetry();
    const std::vector<float> want = run_in_chunks(*whole, ids, chunk).logits;
    for (int round = 0; round < 3; ++round)
      EXPECT_TRUE(run_in_chunks(*split, ids, chunk).logits == want) << "chunk " << chunk;
    ASSERT_EQ(split->fault(), "");
    const ExpertTelemetry t = split->expert_telemetry() - before;
    EXPECT_GT(t.foreseen, 0u) << "chunk " << chunk;
    EXPECT_LE(t.parcels_used, t.parcels_came) << "chunk " << chunk;
    EXPECT_LE(t.parcels_came, t.parcels) << "chunk " << chunk;
    parcels += t.parcels;
  }
  EXPECT_GT(parcels, 0u);
}

TEST(GpuSplit, PartsOfADenseModelGiveTheSameBitsForEveryShareAndLane) {
  SKIP_WITHOUT_GPU();
  if (!isa_available(Isa::Avx2)) GTEST_SKIP() << "needs AVX2";
  const RecordedModel fixture("qwen35");
  const QuantisedFile quantised(fixture.file);
  expect_same_bits(quantised.open(), {0.0, 0.4, 1.0});
  // In one piece, few rows of a wide FFN are added up in the same parts.
  const QuantisedFile wide(fixture.file, 2048);
  expect_same_bits(wide.open(), {0.0, 0.4, 1.0});
  expect_same_bits(wide.open(), {-1.0, 0.4}, kFewRows);
}

}  // namespace
}  // namespace thermo
