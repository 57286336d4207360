#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/units.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

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
  for (size_t i = 0; i < tokens.size(); ++i)
    rows.push_back(
        {.token = tokens[i], .sequence = 0, .parent = static_cast<int32_t>(i) - 1, .want_logits = true});
  rows.resize(32);
  const auto out = engine.step({.rows = rows});
  ASSERT_TRUE(out.has_value());
  int agree = 0;
  for (int r = 0; r < 32; ++r) {
    const auto got = out->logits_of(r, n_vocab);
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
  const auto refused = [&](std::vector<Row> rows, Commit commit = Commit::All) {
    const auto result = engine.step({.rows = rows, .commit = commit});
    return !result.has_value() && !result.error().message.empty();
  };
  EXPECT_TRUE(refused({}));
  EXPECT_TRUE(refused({{.token = -1}}));
  EXPECT_TRUE(refused({{.token = 4096}}));
  EXPECT_TRUE(refused({{.token = 1, .sequence = 1}}));
  EXPECT_TRUE(refused({{.token = 1, .parent = 0}}));
  EXPECT_TRUE(refused({{.token = 1}, {.token = 1, .parent = -1}}));  // a branch that would be kept
  EXPECT_TRUE(refused(std::vector<Row>(33, Row{.token = 1})));
  EXPECT_TRUE(refused(std::vector<Row>(5, Row{.token = 1}), Commit::Later));
  EXPECT_FALSE(engine.commit(0, std::vector<int32_t>{0}).ok());

  ASSERT_TRUE(
      engine
          .step({.rows = std::vector<Row>{{.token = 1}, {.token = 2, .parent = 0}, {.token = 3, .parent = 0}},
                 .commit = Commit::Later})
          .has_value());
  EXPECT_TRUE(refused({{.token = 1}}));  // waits for commit
  EXPECT_FALSE(engine.commit(0, std::vector<int32_t>{0, 1, 2}).ok());
  EXPECT_FALSE(engine.commit(0, std::vector<int32_t>{3}).ok());
  EXPECT_TRUE(engine.commit(0, std::vector<int32_t>{0, 2}).ok());
}

TEST(Engine, SaysWhatIsWrongWithItsOptions) {
  EngineOptions options = small();
  options.n_batch = -1;
  EXPECT_THROW(Engine(plankton(), options), ConfigError);
  options = small();
  options.device = "toaster";
  EXPECT_THROW(Engine(plankton(), options), ConfigError);
  options = small();
  options.n_ctx = 1 << 24;
  EXPECT_THROW(Engine(plankton(), options), MemoryError);
}

TEST(MemoryPlan, HalvesTheContextUntilItFits) {
  const ModelConfig config = read_model_config(plankton());
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  const MemoryPlan wide = plan_memory(config, plankton(), inputs);
  EXPECT_EQ(wide.n_ctx, 4096);
  inputs.available_bytes = wide.total_bytes - 1;
  EXPECT_EQ(plan_memory(config, plankton(), inputs).n_ctx, 2048);
  inputs.n_ctx = 4096;  // asked for: never silently less
  EXPECT_THROW(plan_memory(config, plankton(), inputs), MemoryError);
  uint64_t sum = 0;
  for (const MemoryPlanItem& item : wide.items) sum += item.bytes;
  EXPECT_EQ(sum, wide.total_bytes);
}

TEST(MemoryPlan, ChoosesAContextForADevice) {
  const ModelConfig config = read_model_config(plankton());
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  const auto items = [](int n_ctx) {
    return std::vector<MemoryPlanItem>{{"kv cache", static_cast<uint64_t>(n_ctx) * MiB, ""}};
  };
  EXPECT_EQ(plan_device_memory(config, inputs, "card", 16 * GiB, items).n_ctx, 4096);
  EXPECT_EQ(plan_device_memory(config, inputs, "card", 3 * GiB, items).n_ctx, 2048);
  EXPECT_FALSE(plan_device_memory(config, inputs, "card", 512 * MiB, items).fits());
  inputs.n_ctx = 4096;  // asked for: never silently less
  EXPECT_FALSE(plan_device_memory(config, inputs, "card", 3 * GiB, items).fits());
}

TEST(Engine, PlansWithoutLoading) {
  const MemoryPlan plan = Engine::plan_for(plankton(), small());
  EXPECT_EQ(plan.n_ctx, 256);
  Engine engine(plankton(), small());
  EXPECT_EQ(engine.plan().total_bytes, plan.total_bytes);
}

TEST(MemoryPlan, NamesWhatWouldFit) {
  const ModelConfig config = read_model_config(plankton());
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  inputs.n_ctx = 512;
  const uint64_t needed = plan_memory(config, plankton(), inputs).total_bytes;
  inputs.available_bytes = needed - 1 * MiB;
  try {
    plan_memory(config, plankton(), inputs);
    FAIL() << "must not fit";
  } catch (const MemoryError& error) {
    EXPECT_NE(std::string(error.what()).find("--no-repack"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace thermo
