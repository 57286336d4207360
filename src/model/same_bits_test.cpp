// The same bits: for one instruction set, the logits of a token depend on the tokens before it, and on
// nothing else. Not on how a prompt is cut into steps, on the number of threads, on other sequences in a
// step, on where experts are, nor on whether rows were a chain or a branch of a tree that was committed
// later.
//
// A case is one of the setups of a model and one of the ways to feed it. Every case must give the logits of
// plain decoding: the first setup, one token a step. Each of a model's five prompts goes through 60 cases,
// and together they go through all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <string>

#include "experts/sim_experts.h"
#include "experts/tiered_experts.h"
#include "kernels/testing/compare.h"
#include "model/model.h"
#include "model/testing/recorded_model.h"

namespace thermo {
namespace {

using testing::same_bits;

// ---- models

enum class Experts { Here, OnTheStandIn, InTheFile };
struct Setup {
  const char* name;
  int n_threads = 1;
  bool repack = true;
  Experts experts = Experts::Here;
  double hot = 0.0;     // share of the experts in the stand-in's memory
  bool little = false;  // main memory holds as few experts as it can
  size_t way_step = 1;  // every n-th way only: steps are slow
};
constexpr Setup kSetups[] = {
    {.name = "one thread"},
    {.name = "two threads", .n_threads = 2},
    {.name = "three threads", .n_threads = 3},
    {.name = "five threads", .n_threads = 5},
    {.name = "weights as in the file", .n_threads = 2, .repack = false, .way_step = 4},
    {.name = "no expert hot", .experts = Experts::OnTheStandIn},
    {.name = "30 % hot, two threads", .n_threads = 2, .experts = Experts::OnTheStandIn, .hot = 0.3},
    {.name = "70 % hot", .experts = Experts::OnTheStandIn, .hot = 0.7},
    {.name = "all hot", .experts = Experts::OnTheStandIn, .hot = 1.0},
    {.name = "40 % hot, others in the file", .experts = Experts::OnTheStandIn, .hot = 0.4, .little = true},
    {.name = "experts in the file", .n_threads = 2, .experts = Experts::InTheFile, .little = true},
};

std::unique_ptr<ExpertRunner> runner_of(const ModelConfig& config, const Weights& weights,
                                        const GgufFile& file, const Setup& setup, Isa isa, int n_batch,
                                        ThreadPool& pool) {
  ExpertCatalog catalog = expert_catalog(config, weights);
  SplitOptions split{
      .split = true,
      .budget_bytes = static_cast<uint64_t>(setup.hot * static_cast<double>(catalog.total_bytes())),
      .host_bytes = setup.little ? HostTier::min_bytes(catalog) : 0};
  for (int i = 0; i < file.n_parts(); ++i)
    if (file.part(i)) split.files.push_back(file.part(i));
  HeatMap heat(catalog);
  if (setup.experts == Experts::InTheFile)
    return std::make_unique<TieredExperts>(std::move(catalog), std::move(heat), split, isa, pool,
                                           ExpertCore::Progress{});
  return std::make_unique<SimExperts>(std::move(catalog), std::move(heat),
                                      SimExpertsOptions{.split = split,
                                                        .n_batch = n_batch,
                                                        .stream_min_pairs = 4,
                                                        .isa = isa,
                                                        .route = config.route,
                                                        .routers = router_views(config, weights)},
                                      pool, ExpertCore::Progress{});
}

struct LoadedModel {
  ThreadPool pool;
  std::unique_ptr<Model> model;

  LoadedModel(const GgufFile& file, const Setup& setup, Isa isa, KvType cache)
      : pool({.n_threads = setup.n_threads, .pin = false, .spin_us = 20}) {
    ModelConfig config = read_model_config(file);
    const bool here = setup.experts == Experts::Here;
    Weights weights = Weights::load(config, file, setup.repack, pool, {}, here);
    ModelOptions options;
    options.n_batch = 512;
    options.n_sequences = 2;
    options.isa = isa;
    options.sequence = {.n_ctx = 400, .max_draft_rows = 64, .k_type = cache, .v_type = cache};
    std::unique_ptr<ExpertRunner> runner;
    if (!here) runner = runner_of(config, weights, file, setup, isa, options.n_batch, pool);
    model = std::make_unique<Model>(std::move(config), std::move(weights), options, pool, std::move(runner));
  }
};

// ---- ways to feed tokens to sequence 0: the logits of each

using Tokens = std::span<const TokenId>;

std::vector<float> in_chunks(Model& model, Tokens ids, size_t length) {
  return run_in_chunks(model, ids, length).logits;
}

// Beside sequence 1, which takes the same tokens from the last to the first, in steps of other lengths.
std::vector<float> beside_another(Model& model, Tokens ids, size_t length) {
  model.clear(0);
  model.clear(1);
  const std::vector<TokenId> reversed(ids.rbegin(), ids.rend());
  std::vector<float> logits;
  size_t other = 0;
  for (size_t begin = 0, piece = 0; begin < ids.size(); begin += length, ++piece) {
    const std::vector<Row> rows = chain(ids.subspan(begin, std::min(length, ids.size() - begin)));
    const size_t n_other = std::min((piece * 5) % 9, ids.size() - other);
    const std::vector<Row> neighbours = chain(Tokens(reversed).subspan(other, n_other));
    other += n_other;
    std::vector<SequenceRows> groups;
    if (piece % 2 == 0 && n_other > 0) groups.push_back({.sequence = 1, .rows = neighbours});
    groups.push_back({.sequence = 0, .rows = rows});
    if (piece % 2 == 1 && n_other > 0) groups.push_back({.sequence = 1, .rows = neighbours});
    append_logits(model.step({.groups = groups}), logits, piece % 2 == 0 ? n_other : 0, rows.size());
  }
  return logits;
}

// A draft whose branch `branch` holds the tokens; before every `every`-th of them comes a wrong one, which
// has a child of its own. So no slot is where its position says.
struct Draft {
  std::vector<Row> rows;
  std::vector<int32_t> branch;
};
Draft draft_of(Tokens ids, int every) {
  Draft draft;
  const auto add = [&](TokenId token, int32_t parent) {
    draft.rows.push_back({.token = token, .parent = parent, .want_logits = true});
    return static_cast<int32_t>(draft.rows.size()) - 1;
  };
  int32_t parent = -1;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (static_cast<int>(i) % every == 0) add(ids[ids.size() - 1 - i], add(ids[i] ^ 1, parent));
    parent = add(ids[i], parent);
    draft.branch.push_back(parent);
  }
  return draft;
}

// A prompt, then drafts of which the branch is committed; one token after each draft as plain decoding.
std::vector<float> in_drafts(Model& model, Tokens ids, size_t prompt, size_t depth, int every) {
  prompt = std::min(prompt, ids.size() / 2);
  std::vector<float> logits = in_chunks(model, ids.first(prompt), 512);
  for (size_t begin = prompt; begin < ids.size();) {
    const size_t n = std::min(depth, ids.size() - begin);
    const Draft draft = draft_of(ids.subspan(begin, n), every);
    EXPECT_LE(draft.rows.size(), 64u);
    const StepOutput output = step_rows(model, draft.rows, {.uncommitted = true});
    for (const int32_t row : draft.branch) append_logits(output, logits, static_cast<size_t>(row), 1);
    model.commit(0, draft.branch);
    begin += n;
    if (begin == ids.size()) break;
    append_logits(step_rows(model, chain(ids.subspan(begin, 1))), logits);
    ++begin;
  }
  return logits;
}

struct Way {
  std::string name;
  std::function<std::vector<float>(Model&, Tokens)> run;
};
std::vector<Way> ways() {
  std::vector<Way> all;
  for (const size_t n : {1, 2, 3, 17, 64, 65, 128, 512})
    all.push_back({"chunks of " + std::to_string(n),
                   [n](Model& model, Tokens ids) { return in_chunks(model, ids, n); }});
  for (const size_t n : {1, 7, 24})
    all.push_back({"beside another sequence, " + std::to_string(n),
                   [n](Model& model, Tokens ids) { return beside_another(model, ids, n); }});
  all.push_back({"bushy drafts", [](Model& model, Tokens ids) { return in_drafts(model, ids, 37, 21, 1); }});
  all.push_back({"deep drafts", [](Model& model, Tokens ids) { return in_drafts(model, ids, 1, 50, 8); }});
  all.push_back({"short drafts", [](Model& model, Tokens ids) { return in_drafts(model, ids, 60, 3, 2); }});
  all.push_back({"drafts of one", [](Model& model, Tokens ids) { return in_drafts(model, ids, 70, 1, 9); }});
  return all;
}

// ---- every case

std::vector<TokenId> random_tokens(const GgufFile& file, size_t n) {
  std::mt19937 random(static_cast<unsigned>(n));
  const auto n_vocab = static_cast<unsigned>(read_model_config(file).n_vocab);
  std::vector<TokenId> ids(n);
  for (TokenId& id : ids) id = static_cast<TokenId>(random() % (n_vocab / 2 * 2));  // so that id ^ 1 is one
  return ids;
}

struct Case {
  size_t setup, way;
};

// All cases of a model, in a random order. Each prompt takes kCasesOfAPrompt of them in turn. The prompts
// begin at evenly spaced cases.
constexpr size_t kCasesOfAPrompt = 60;
std::vector<Case> all_cases(bool routed, size_t n_ways) {
  std::vector<Case> cases;
  for (size_t s = 0; s < std::size(kSetups); ++s)
    if (kSetups[s].experts == Experts::Here || routed)
      for (size_t w = 0; w < n_ways; w += kSetups[s].way_step) cases.push_back({s, w});
  std::mt19937 random(12);
  std::shuffle(cases.begin(), cases.end(), random);
  return cases;
}

void expect_same_bits(const GgufFile& file, std::span<const size_t> prompts, KvType cache) {
  const std::vector<Way> all = ways();
  const std::vector<Case> cases = all_cases(read_model_config(file).route.n_expert > 0, all.size());
  ASSERT_GE(cases.size(), kCasesOfAPrompt);
  for (const Isa isa : available_isas()) {
    std::vector<std::vector<float>> want;
    for (const LoadedModel plain(file, kSetups[0], isa, cache); const size_t n : prompts)
      want.push_back(in_chunks(*plain.model, random_tokens(file, n), 1));
    std::vector<size_t> n_done(prompts.size());
    for (size_t s = 0; s < std::size(kSetups); ++s) {
      std::optional<LoadedModel> loaded;
      for (size_t p = 0; p < prompts.size(); ++p) {
        const std::vector<TokenId> ids = random_tokens(file, prompts[p]);
        for (size_t i = 0; i < kCasesOfAPrompt; ++i) {
          const Case& c = cases[(p * cases.size() / prompts.size() + i) % cases.size()];
          if (c.setup != s) continue;
          if (!loaded) loaded.emplace(file, kSetups[s], isa, cache);
          EXPECT_TRUE(same_bits(all[c.way].run(*loaded->model, ids), want[p]))
              << isa_name(isa) << ", " << kSetups[s].name << ", " << all[c.way].name << ", " << prompts[p]
              << " tokens, cache " << kv_type_name(cache);
          ++n_done[p];
        }
      }
    }
    for (const size_t n : n_done) EXPECT_EQ(n, kCasesOfAPrompt);
  }
}

class SameBits : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Fixtures, SameBits, ::testing::Values("qwen35moe", "qwen35", "laguna", "qwen3moe"),
                         [](const auto& test) { return test.param; });

TEST_P(SameBits, HoweverTheTokensAreFed) {
  // The first is longer than a span of attention.
  constexpr size_t kPrompts[] = {300, 72, 91, 110, 129};
  expect_same_bits(GgufFile(std::string(THERMO_TEST_DATA) + "/" + GetParam() + "-f32.gguf"), kPrompts,
                   KvType::F32);
}

TEST_P(SameBits, WithHalvesInTheCache) {
  constexpr size_t kPrompts[] = {90};
  expect_same_bits(GgufFile(std::string(THERMO_TEST_DATA) + "/" + GetParam() + "-f32.gguf"), kPrompts,
                   KvType::F16);
}

TEST(SameBitsPlankton, HoweverTheTokensAreFed) {
  // Short ones, since the portable path is slow.
  constexpr size_t kPrompts[] = {75, 21, 26, 31, 34};
  expect_same_bits(GgufFile(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf"), kPrompts, KvType::F16);
}

TEST(SameBitsPlankton, WithEveryTypeInTheCache) {
  constexpr size_t kPrompts[] = {29};
  for (const KvType type : {KvType::BF16, KvType::Q8_0, KvType::Q4_0})
    expect_same_bits(GgufFile(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf"), kPrompts, type);
}

}  // namespace
}  // namespace thermo
