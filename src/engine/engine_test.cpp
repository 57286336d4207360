#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "engine/prefix_cache.h"
#include "experts/heat.h"
#include "experts/telemetry.h"
#include "kernels/isa.h"
#include "model/backend.h"
#include "model/model_config.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "base/json.h"
#include "base/units.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

constexpr DeviceChoice kCpu{.kind = DeviceChoice::Kind::Cpu}, kStandIn{.kind = DeviceChoice::Kind::StandIn};
ExpertBudget budget(std::string_view text) {
  return parse_expert_budget(text).value();
}

const GgufFile& plankton() {
  static const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  return file;
}

std::vector<TokenId> prompt() {
  const GgufFile expected(std::string(THERMO_TEST_DATA) + "/plankton-expected.gguf");
  const GgufTensor& ids = expected.require_tensor("ids");
  std::vector<TokenId> tokens(ids.n_elements());
  std::memcpy(tokens.data(), ids.data, ids.n_bytes);
  return tokens;
}

EngineOptions small() {
  EngineOptions options;
  options.n_ctx = 256;
  options.n_threads = 2;
  options.n_batch = 32;
  return options;
}

Result<StepOutput> step_rows(Engine& engine, std::span<const Row> rows, SequenceRows group = {}) {
  group.rows = rows;
  return engine.step({.groups = {&group, 1}});
}

std::vector<TokenId> greedy(Session& session, int n) {
  GenerateOptions options;
  options.sampling.temperature = 0.0f;
  options.max_tokens = n;
  std::vector<TokenId> tokens;
  const auto result = session.generate(options, [&](const GeneratedToken& token) {
    tokens.push_back(token.id);
    return true;
  });
  EXPECT_TRUE(result.has_value());
  return tokens;
}

std::vector<TokenId> answer(const EngineOptions& options, std::span<const TokenId> tokens) {
  Engine engine(plankton(), options);
  Session session = std::move(engine.open_session().value());
  EXPECT_TRUE(session.append(tokens).ok());
  return greedy(session, 24);
}

TEST(Engine, WritesTheSameGreedyTextOnEveryPath) {
  const std::vector<TokenId> tokens = prompt();
  const std::vector<TokenId> want = answer(small(), std::span(tokens).first(20));
  ASSERT_EQ(want.size(), 24u);
  for (const Isa isa : available_isas()) {
    EngineOptions options = small();
    options.isa = isa;
    EXPECT_EQ(answer(options, std::span(tokens).first(20)), want) << isa_name(isa);
  }
  EngineOptions mapped = small();
  mapped.repack = false;
  EXPECT_EQ(answer(mapped, std::span(tokens).first(20)), want);
  EngineOptions single = small();
  single.n_threads = 1;
  single.n_batch = 7;
  EXPECT_EQ(answer(single, std::span(tokens).first(20)), want);
}

TEST(Engine, AgreesWithTheFullPrecisionModelOnNearlyEveryToken) {
  const std::vector<TokenId> tokens = prompt();
  const GgufFile expected(std::string(THERMO_TEST_DATA) + "/plankton-expected.gguf");
  const auto* logits = reinterpret_cast<const float*>(expected.require_tensor("logits").data);
  Engine engine(plankton(), small());
  const int n_vocab = engine.config().n_vocab;
  std::vector<Row> rows;
  for (size_t i = 0; i < 32; ++i)
    rows.push_back({.token = tokens[i], .parent = static_cast<int32_t>(i) - 1, .want_logits = true});
  const auto out = step_rows(engine, rows);
  ASSERT_TRUE(out.has_value());
  int agree = 0;
  for (int r = 0; r < 32; ++r) {
    const auto got = out->rows[static_cast<size_t>(r)].logits;
    const float* const want = logits + static_cast<size_t>(r) * static_cast<size_t>(n_vocab);
    agree += std::max_element(got.begin(), got.end()) - got.begin() ==
             std::max_element(want, want + n_vocab) - want;
  }
  EXPECT_GE(agree, 31);  // the 4-bit file itself differs once in the 39 recorded tokens
}

TEST(Session, ReusesTheCommonBeginning) {
  const std::vector<TokenId> tokens = prompt();
  Engine engine(plankton(), small());
  Session session = std::move(engine.open_session().value());
  ASSERT_TRUE(session.append(std::span(tokens).first(20)).ok());
  session.checkpoint();
  const std::vector<TokenId> first = greedy(session, 5);
  // Growing keeps everything.
  std::vector<TokenId> grown(session.tokens().begin(), session.tokens().end());
  grown.push_back(tokens[3]);
  const auto kept = session.set_tokens(grown);
  ASSERT_TRUE(kept.has_value());
  EXPECT_EQ(*kept, 25);
  // Going elsewhere comes back to the checkpoint, and the result is as if it had never left.
  std::vector<TokenId> other(tokens.begin(), tokens.begin() + 22);
  const auto reused = session.set_tokens(other);
  ASSERT_TRUE(reused.has_value());
  EXPECT_EQ(*reused, 20);
  const std::vector<float> logits(session.logits().begin(), session.logits().end());
  session.clear();
  ASSERT_TRUE(session.append(other).ok());
  for (size_t i = 0; i < logits.size(); ++i) ASSERT_NEAR(logits[i], session.logits()[i], 0.05f) << i;
}

TEST(Session, GivesLogitsAgainForTheTokensItAlreadyHolds) {
  const std::vector<TokenId> tokens = prompt();
  Engine engine(plankton(), small());
  Session session = std::move(engine.open_session().value());
  ASSERT_TRUE(session.append(tokens).ok());
  ASSERT_TRUE(session.set_tokens(tokens).has_value());
  EXPECT_FALSE(session.logits().empty());
  EXPECT_EQ(session.n_past(), static_cast<int>(tokens.size()));
  EXPECT_EQ(session.set_tokens({}).value(), 0);
  EXPECT_EQ(session.n_past(), 0);
}

TEST(Session, RefusesAPromptLongerThanTheContext) {
  Engine engine(plankton(), small());
  Session session = std::move(engine.open_session().value());
  const Status status = session.append(std::vector<TokenId>(257, 1));
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::ContextFull);
  EXPECT_NE(status.error().message.find("256"), std::string::npos);
  EXPECT_EQ(session.n_past(), 0);
}

TEST(Session, StopsGeneratingWhenTheContextIsFull) {
  EngineOptions options = small();
  options.n_ctx = 24;
  Engine engine(plankton(), options);
  Session session = std::move(engine.open_session().value());
  const std::vector<TokenId> tokens = prompt();
  ASSERT_TRUE(session.append(std::span(tokens).first(20)).ok());
  GenerateOptions generate;
  generate.sampling.temperature = 0.0f;
  const auto result = session.generate(generate, [](const GeneratedToken&) { return true; });
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->reason, FinishReason::ContextFull);
  EXPECT_EQ(result->n_generated, 5);  // the last one is reported but has no place any more
}

TEST(Session, StopsReadingThePromptWhenAsked) {
  Engine engine(plankton(), small());
  Session session = std::move(engine.open_session().value());
  const Status status = session.append(std::vector<TokenId>(100, 5), [](int done, int) { return done < 64; });
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::Cancelled);
  EXPECT_EQ(session.n_past(), 64);
}

TEST(Session, ReturnsItsSequenceWhenItEnds) {
  Engine engine(plankton(), small());
  {
    Session session = std::move(engine.open_session().value());
    EXPECT_FALSE(engine.open_session().has_value());
  }
  EXPECT_TRUE(engine.open_session().has_value());
}

TEST(Engine, RefusesStepsThatMakeNoSense) {
  EngineOptions options = small();
  options.max_draft_rows = 4;
  Engine engine(plankton(), options);
  const auto refused = [&](std::vector<Row> rows, SequenceRows group = {}) {
    const auto result = step_rows(engine, rows, group);
    return !result.has_value() && !result.error().message.empty();
  };
  EXPECT_TRUE(refused({}));
  EXPECT_TRUE(refused({{.token = -1}}));
  EXPECT_TRUE(refused({{.token = 4096}}));
  EXPECT_TRUE(refused({{.token = 1}}, {.sequence = 1}));
  EXPECT_TRUE(refused({{.token = 1, .parent = 0}}));
  EXPECT_TRUE(refused({{.token = 1}, {.token = 1, .parent = -1}}));  // a branch that would be kept
  EXPECT_TRUE(refused(std::vector<Row>(33, Row{.token = 1})));
  EXPECT_TRUE(refused(std::vector<Row>(5, Row{.token = 1}), {.uncommitted = true}));
  EXPECT_FALSE(engine.commit(0, std::vector<int32_t>{0}).ok());

  const std::vector<Row> one = {{.token = 1}};
  const SequenceRows twice[] = {{.rows = one}, {.rows = one}};
  EXPECT_FALSE(engine.step({.groups = twice}).has_value());
  const std::vector<Row> tree = {{.token = 1}, {.token = 2, .parent = 0}, {.token = 3, .parent = 0}};
  ASSERT_TRUE(step_rows(engine, tree, {.uncommitted = true}).has_value());
  EXPECT_TRUE(refused({{.token = 1}}));  // waits for commit
  EXPECT_FALSE(engine.commit(0, std::vector<int32_t>{0, 1, 2}).ok());
  EXPECT_FALSE(engine.commit(0, std::vector<int32_t>{3}).ok());
  EXPECT_TRUE(engine.commit(0, std::vector<int32_t>{0, 2}).ok());
}

// Guards a crash: the second uncommitted step forgot the rows of the first.
TEST(Engine, CommitsTwoSequencesThatWaitedTogether) {
  EngineOptions options = small();
  options.n_sequences = 2;
  options.max_draft_rows = 4;
  Engine engine(plankton(), options);
  for (const int32_t s : {0, 1})
    ASSERT_TRUE(step_rows(engine,
                          std::vector<Row>{
                              {.token = 1}, {.token = 2 + s, .parent = 0}, {.token = 5 + s, .parent = 0}},
                          {.sequence = s, .uncommitted = true})
                    .has_value());
  EXPECT_FALSE(engine.commit(0, std::vector<int32_t>{1}).ok());
  EXPECT_TRUE(engine.commit(0, std::vector<int32_t>{0, 2}).ok());
  EXPECT_TRUE(engine.commit(1, std::vector<int32_t>{0, 1}).ok());
  EXPECT_FALSE(engine.commit(1, std::vector<int32_t>{0, 1}).ok());
}

// Layers with a window keep what it sees and a little more: further back it takes a checkpoint.
TEST(Engine, GoesBackWhereWindowsHaveMovedOn) {
  const GgufFile file(std::string(THERMO_TEST_DATA) + "/laguna-f32.gguf");
  EngineOptions options = small();
  options.n_ctx = 1000;
  options.n_sequences = 2;
  Engine engine(file, options);
  std::vector<TokenId> ids;
  for (int k = 0; k < 900; ++k) ids.push_back(17 * k * (k + 3) % engine.config().n_vocab);
  Session session = std::move(engine.open_session().value());
  ASSERT_TRUE(session.append(std::span(ids).first(300)).ok());
  session.checkpoint();
  ASSERT_TRUE(session.append(std::span(ids).subspan(300, 400)).ok());
  const auto edited = [&](size_t at) {
    std::vector<TokenId> other(ids.begin(), ids.begin() + static_cast<ptrdiff_t>(at));
    for (int k = 0; k < 40; ++k) other.push_back(ids[static_cast<size_t>(k)]);
    return other;
  };
  for (const auto& [at, want] : {std::pair{size_t{650}, 650}, {size_t{400}, 300}, {size_t{200}, 0}}) {
    const std::vector<TokenId> prompt = edited(at);
    const Result<int> reused = session.set_tokens(prompt);
    ASSERT_TRUE(reused.has_value());
    EXPECT_EQ(*reused, want) << at;
    Session fresh = std::move(engine.open_session().value());
    ASSERT_TRUE(fresh.append(prompt).ok());
    const std::span<const float> a = session.logits(), b = fresh.logits();
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end())) << at;
  }
}

TEST(Engine, SaysWhatIsWrongWithItsOptions) {
  EngineOptions options = small();
  options.n_batch = -1;
  EXPECT_THROW(Engine(plankton(), options), ConfigError);
  options = small();
  options.device = {.kind = DeviceChoice::Kind::Gpu, .gpu = 99};
  EXPECT_THROW(Engine(plankton(), options), ThermoError);
  options = small();
  options.n_ctx = 1 << 24;
  options.k_type = options.v_type = KvType::F32;
  EXPECT_THROW(Engine(plankton(), options), MemoryError);
}

TEST(Engine, PlansWithoutLoading) {
  const MemoryPlan plan = Engine::plan_for(plankton(), small());
  EXPECT_EQ(plan.n_ctx, 256);
  Engine engine(plankton(), small());
  EXPECT_EQ(engine.plan().total_bytes, plan.total_bytes);
}

std::string temporary(const std::string& name) {
  return ::testing::TempDir() + "/" + std::to_string(::getpid()) + "-" + name;
}

TEST(Engine, WritesTheSameTextOnTheStandInDevice) {
  const std::vector<TokenId> tokens = prompt();
  const std::vector<TokenId> want = answer(small(), tokens);
  for (const std::string cache : {"0", "2M", "10%", "40%", "auto"})
    for (const std::string ram : {"auto", "1%"}) {
      EngineOptions options = small();
      options.device = kStandIn;
      options.n_batch = 64;  // a prompt in one chunk: popular experts are streamed
      options.expert_cache = budget(cache);
      options.expert_ram = budget(ram);
      EXPECT_EQ(answer(options, tokens), want) << cache << " " << ram;
    }
}

// Its FFNs are split where they are not with the whole model: the text is the same at every share, in steps
// of one row, in prompts and with drafts.
TEST(Engine, WritesTheSameTextOfADenseModelAtEveryShare) {
  const GgufFile file(std::string(THERMO_TEST_DATA) + "/qwen35-f32.gguf");
  std::vector<TokenId> tokens;
  for (int i = 0; i < 60; ++i) tokens.push_back((i * i + 7) % 20);
  const auto answer_of = [&](const EngineOptions& options, double hot) {
    Engine engine(file, options);
    EXPECT_EQ(engine.config().has_parts(), hot >= 0.0);
    EXPECT_EQ(engine.plan().ffn_parts > 0, hot >= 0.0);
    std::vector<float> logits;
    Session session = std::move(engine.open_session().value());
    EXPECT_TRUE(session.append(tokens).ok());
    const std::vector<TokenId> answer = greedy(session, 24);
    logits.assign(session.logits().begin(), session.logits().end());
    if (hot >= 0.0) {
      EXPECT_NEAR(engine.expert_telemetry().hit_rate(), hot, 0.1);
    }
    return std::pair(answer, logits);
  };
  EngineOptions options = small();
  const auto whole = answer_of(options, -1.0);
  options.device = kStandIn;
  std::optional<std::pair<std::vector<TokenId>, std::vector<float>>> want;
  for (const DraftOptions::Kind kind : {DraftOptions::Kind::None, DraftOptions::Kind::Lookup})
    for (const auto& [share, hot] : {std::pair("100%", 1.0), {"40%", 0.4}, {"0", 0.0}}) {
      options.expert_cache = budget(share);
      options.draft.kind = kind;
      const auto got = answer_of(options, hot);
      if (!want) want = got;
      EXPECT_EQ(got, *want) << share;
    }
  EXPECT_EQ(want->first, whole.first);
  const MemoryPlan plan = Engine::plan_for(file, options);
  EXPECT_TRUE(std::any_of(plan.items.begin(), plan.items.end(),
                          [](const MemoryPlanItem& item) { return item.name == "FFN parts"; }));
}

TEST(Engine, TellsWhatTheStandInDeviceDid) {
  EngineOptions options = small();
  options.device = kStandIn;
  options.n_batch = 64;
  options.expert_cache = budget("40%");
  Engine engine(plankton(), options);
  EXPECT_EQ(engine.info().device, "sim");
  Session session = std::move(engine.open_session().value());
  ASSERT_TRUE(session.append(prompt()).ok());
  greedy(session, 40);
  const ExpertTelemetry t = engine.expert_telemetry();
  EXPECT_EQ(t.pairs, t.hot_pairs + t.cpu_pairs + t.fetched_pairs);
  EXPECT_GT(t.hot_pairs, 0u);
  EXPECT_GT(t.cpu_pairs, 0u);
  EXPECT_GT(t.moved, 0u);
  EXPECT_GT(t.cpu_ns, 0u);
  EXPECT_LE(t.hot_expert_bytes, t.budget_bytes);
  EXPECT_NEAR(static_cast<double>(t.budget_bytes), 0.4 * static_cast<double>(t.total_expert_bytes), 2.0);
  EXPECT_EQ(t.tokens, static_cast<uint64_t>(session.n_past()));
}

TEST(Engine, ForgetsWhatItLearntAboutExperts) {
  EngineOptions options = small();
  EXPECT_FALSE(Engine(plankton(), options).reset_experts());
  options.device = kStandIn;
  options.expert_cache = budget("40%");
  Engine engine(plankton(), options);
  Session session = std::move(engine.open_session().value());
  ASSERT_TRUE(session.append(prompt()).ok());
  const std::vector<TokenId> text = greedy(session, 60);
  const auto hits = [&] {
    const ExpertTelemetry before = engine.expert_telemetry();
    session.clear();
    for (const TokenId& token : text) EXPECT_TRUE(session.append({&token, 1}).ok());
    return engine.expert_telemetry().hot_pairs - before.hot_pairs;
  };
  const uint64_t warm = hits();
  EXPECT_TRUE(engine.reset_experts());
  EXPECT_TRUE(engine.heat()->empty());
  EXPECT_LT(hits(), warm);
}

TEST(Engine, LeavesNothingOfItsWarmUp) {
  const std::vector<TokenId> tokens = prompt();
  const std::vector<TokenId> want = answer(small(), tokens);
  for (const DeviceChoice device : {kCpu, kStandIn})
    for (const bool drafts : {false, true}) {
      EngineOptions options = small();
      options.device = device;
      options.n_batch = 64;
      options.n_sequences = 3;
      if (device == kStandIn) options.expert_cache = budget("40%");
      if (drafts) options.draft.kind = DraftOptions::Kind::Lookup;
      Engine engine(plankton(), options);
      const ExpertTelemetry before = engine.expert_telemetry();
      const int n_free = engine.kv_pool().n_free;
      {
        const std::unique_ptr<PrefixCache> cache = engine.make_prefix_cache(64 << 20);
        EXPECT_GT(engine.warm_up(*cache), 0.0);
        const PrefixCacheState kept = cache->state();
        EXPECT_EQ(kept.n_blocks + kept.n_points + kept.n_tokens + kept.n_evicted, 0u);
        EXPECT_GT(kept.spare_bytes, 0u);
      }
      EXPECT_TRUE(engine.heat()->empty());
      EXPECT_EQ(engine.heat()->n_tokens(), 0u);
      const ExpertTelemetry after = engine.expert_telemetry();
      EXPECT_EQ(after.tokens, before.tokens);
      EXPECT_EQ(after.pairs, before.pairs);
      EXPECT_EQ(after.routed_layers, before.routed_layers);
      EXPECT_EQ(after.hot_expert_bytes, before.hot_expert_bytes);
      EXPECT_EQ(engine.kv_pool().n_free, n_free);
      EXPECT_EQ(engine.draft_telemetry().n_plain + engine.draft_telemetry().n_rounds, 0u);
      Session session = std::move(engine.open_session().value());
      ASSERT_TRUE(session.append(tokens).ok());
      EXPECT_EQ(greedy(session, 24), want);
      EXPECT_EQ(engine.draft_telemetry().drafter.empty(), !drafts);
    }
}

TEST(Engine, KnowsTheBestTokenWithoutTheLogits) {
  Engine engine(plankton(), small());
  Session session = std::move(engine.open_session().value());
  EXPECT_EQ(session.best(), -1);
  ASSERT_TRUE(session.append(prompt()).ok());
  const std::span<const float> logits = session.logits();
  EXPECT_EQ(session.best(), std::max_element(logits.begin(), logits.end()) - logits.begin());
}

TEST(Engine, RunsWithMostExpertsInTheFile) {
  const std::vector<TokenId> tokens = prompt();
  EngineOptions options = small();
  options.expert_ram = budget("1%");
  Engine engine(plankton(), options), plain(plankton(), small());
  EXPECT_TRUE(engine.plan().experts_in_file());
  EXPECT_NE(engine.plan().note.find("too few for one layer"), std::string::npos) << engine.plan().note;
  Session session = std::move(engine.open_session().value()), other = std::move(plain.open_session().value());
  ASSERT_TRUE(session.append(tokens).ok());
  ASSERT_TRUE(other.append(tokens).ok());
  EXPECT_EQ(std::vector<float>(session.logits().begin(), session.logits().end()),
            std::vector<float>(other.logits().begin(), other.logits().end()));
  EXPECT_EQ(greedy(session, 24), greedy(other, 24));
  EXPECT_GT(engine.expert_telemetry().disk_bytes, 0u);
  EXPECT_EQ(plain.expert_telemetry().pairs, 0u);
}

// A file that is replaced or a disk that goes away while experts are read from it.
TEST(Engine, FailsCleanlyWhenItsFileBecomesShorter) {
  const std::string path = temporary("shrinking.gguf");
  std::filesystem::copy_file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf", path,
                             std::filesystem::copy_options::overwrite_existing);
  {
    const GgufFile file(path);
    const GgufTensor& embedding = file.require_tensor("token_embd.weight");
    uint64_t keep = embedding.file_offset + embedding.n_bytes;  // looked up through the mapping
    keep = (keep + 4095) / 4096 * 4096 + 65536;
    ASSERT_LT(keep, std::filesystem::file_size(path));
    EngineOptions options = small();
    options.expert_ram = budget("1%");
    Engine engine(file, options);
    Session session = std::move(engine.open_session().value());
    ASSERT_TRUE(session.append(std::vector<TokenId>{1, 2, 3}).ok());
    std::filesystem::resize_file(path, keep);
    Status status;
    for (TokenId token = 0; token < 200 && status.ok(); ++token)
      status = session.append(std::vector<TokenId>{token * 17 % 4096});
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::DeviceFault);
    EXPECT_NE(status.error().message.find("became shorter"), std::string::npos) << status.error().message;
    EXPECT_EQ(status.error().message.find("GPU"), std::string::npos) << status.error().message;
  }
  std::remove(path.c_str());
}

TEST(Engine, FailsCleanlyWhenAnEmbeddingIsNoLongerInItsFile) {
  const std::string path = temporary("cut.gguf");
  for (const bool repack : {true, false}) {
    std::filesystem::copy_file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf", path,
                               std::filesystem::copy_options::overwrite_existing);
    const GgufFile file(path);
    EngineOptions options = small();
    options.repack = repack;
    Engine engine(file, options);
    Session session = std::move(engine.open_session().value());
    ASSERT_TRUE(session.append(std::vector<TokenId>{1, 2, 3}).ok());
    std::filesystem::resize_file(path, 4096);
    const Status status = session.append(std::vector<TokenId>{4});
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::DeviceFault);
    EXPECT_NE(status.error().message.find("cut.gguf became shorter"), std::string::npos)
        << status.error().message;
    EXPECT_THROW(Engine(file, options), LoadError);
  }
  std::remove(path.c_str());
}

TEST(Engine, KeepsHeatInAFileFromRunToRun) {
  const std::string path = temporary("heat.json");
  std::remove(path.c_str());
  EngineOptions options = small();
  options.heat_file = path;
  uint64_t n_tokens = 0;
  std::vector<float> values;
  for (int run = 1; run <= 3; ++run) {
    options.device = run == 2 ? kStandIn : kCpu;
    Engine engine(plankton(), options);
    ASSERT_NE(engine.heat(), nullptr);
    EXPECT_EQ(engine.heat()->n_tokens(), n_tokens) << "run " << run;
    EXPECT_EQ(engine.heat()->empty(), run == 1);
    if (run > 1) {
      const std::vector<float> read = engine.heat()->values();
      ASSERT_EQ(read.size(), values.size());
      for (size_t i = 0; i < read.size(); ++i) EXPECT_NEAR(read[i], values[i], 1e-3f * (1.0f + values[i]));
    }
    Session session = std::move(engine.open_session().value());
    ASSERT_TRUE(session.append(prompt()).ok());
    n_tokens = engine.heat()->n_tokens();
    values = engine.heat()->values();
  }
  // Another model's: not used, and not written over.
  std::ifstream in(path);
  const std::string before((std::istreambuf_iterator<char>(in)), {});
  {
    const GgufFile other(std::string(THERMO_TEST_DATA) + "/laguna-f32.gguf");
    options.device = kCpu;
    Engine engine(other, options);
    EXPECT_TRUE(engine.heat()->empty());
    ASSERT_TRUE(step_rows(engine, std::vector<Row>{{.token = 1}}).has_value());
  }
  std::ifstream again(path);
  EXPECT_EQ(std::string((std::istreambuf_iterator<char>(again)), {}), before);
  std::remove(path.c_str());
}

TEST(Engine, WritesATraceOfItsSteps) {
  const std::string path = temporary("trace.json");
  EngineOptions options = small();
  options.device = kStandIn;
  options.expert_cache = budget("30%");
  options.trace_file = path;
  {
    Engine engine(plankton(), options);
    Session session = std::move(engine.open_session().value());
    ASSERT_TRUE(session.append(prompt()).ok());
    greedy(session, 8);
  }
  std::ifstream in(path);
  const Json trace = Json::parse(in);
  int n_tokens = 0, n_cold = 0;
  for (const Json& event : trace) {
    n_tokens += event.value("name", "") == "token";
    n_cold += event.value("name", "") == "cold experts";
  }
  EXPECT_GE(n_tokens, 7);
  EXPECT_GT(n_cold, 0);
  std::remove(path.c_str());
  options.trace_file = "/nowhere/trace.json";
  EXPECT_THROW(Engine(plankton(), options), ConfigError);
}

TEST(Engine, SaysWhatIsWrongWithItsExpertOptions) {
  const auto error = [](const EngineOptions& options) -> std::string {
    try {
      Engine::plan_for(plankton(), options);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "";
  };
  EngineOptions options = small();
  options.pin_layers = 99;
  EXPECT_NE(error(options).find("99 layers"), std::string::npos) << error(options);
  options = small();
  options.device = kStandIn;
  options.expert_cache = budget("10%");
  EXPECT_EQ(error(options), "");
  EXPECT_NE(Engine::plan_for(plankton(), options).note.find("of each layer"), std::string::npos);
}

}  // namespace
}  // namespace thermo
