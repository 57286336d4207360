// The engine on a GPU: tokens chosen from what the device hands over, logits that stay there until someone
// asks, and memory that does not grow. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "base/error.h"
#include "base/units.h"
#include "device/buffer.h"
#include "device/device_info.h"
#include "device/testing/skip_without_gpu.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "gguf/gguf_file.h"
#include "sampling/sampler.h"

namespace thermo {
namespace {

constexpr DeviceChoice kGpu{.kind = DeviceChoice::Kind::Gpu};
ExpertBudget budget(std::string_view text) {
  return parse_expert_budget(text).value();
}

const GgufFile& plankton() {
  static const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  return file;
}

EngineOptions on_gpu(int n_sequences = 1) {
  EngineOptions options;
  options.device = kGpu;
  options.n_ctx = 256;
  options.n_threads = 2;
  options.n_sequences = n_sequences;
  return options;
}

std::vector<TokenId> prompt(int seed, int n = 12) {
  std::vector<TokenId> ids;
  for (int i = 0; i < n; ++i) ids.push_back((seed * 7919 + i * 104729) % 4000);
  return ids;
}

std::vector<TokenId> generate(Session& session, const SamplingParams& sampling, int n) {
  std::vector<TokenId> tokens;
  GenerateOptions options;
  options.sampling = sampling;
  options.max_tokens = n;
  const Result<GenerateResult> result = session.generate(options, [&](const GeneratedToken& token) {
    tokens.push_back(token.id);
    return true;
  });
  EXPECT_TRUE(result.has_value());
  return tokens;
}

// The same with every row of logits on the host.
std::vector<TokenId> generate_from_rows(Session& session, const SamplingParams& sampling, int n) {
  Sampler sampler(sampling, static_cast<int>(session.logits().size()));
  sampler.accept_prompt(session.tokens());
  std::vector<TokenId> tokens;
  for (int i = 0; i < n; ++i) {
    const TokenId token = sampler.sample(session.logits(), static_cast<int64_t>(session.tokens().size()));
    sampler.accept(token);
    tokens.push_back(token);
    EXPECT_TRUE(session.append({&token, 1}).ok());
  }
  return tokens;
}

TEST(GpuEngine, ChoosesTheTokensThatTheRowsOfLogitsGive) {
  SKIP_WITHOUT_GPU();
  Engine engine(plankton(), on_gpu());
  std::vector<SamplingParams> cases(9);
  cases[1].temperature = 0.0f;
  cases[2].temperature = 0.0f;
  cases[2].repetition_penalty = 1.2f;
  cases[3].top_k = 200;
  cases[3].top_p = 0.99f;
  cases[3].temperature = 1.5f;
  cases[4].top_k = 0;
  cases[4].top_p = 0.9f;
  cases[5].top_k = 0;
  cases[5].top_p = 1.0f;
  cases[5].min_p = 0.02f;
  cases[6].top_k = 0;
  cases[6].top_p = 1.0f;  // no cut at all: needs the rows
  cases[7].presence_penalty = 1.0f;
  cases[7].frequency_penalty = 0.5f;
  cases[7].dry_multiplier = 0.8f;
  cases[8].logit_bias = {{11, 3.0f}, {12, -100.0f}};
  for (int seed = 0; seed < 20; ++seed) {
    for (size_t i = 0; i < cases.size(); ++i) {
      cases[i].seed = static_cast<uint64_t>(seed) + 1;
      std::vector<TokenId> answers[2];
      for (const bool rows : {false, true}) {
        Session session = std::move(engine.open_session().value());
        ASSERT_TRUE(session.append(prompt(seed)).ok());
        answers[rows] = rows ? generate_from_rows(session, cases[i], 12) : generate(session, cases[i], 12);
      }
      ASSERT_EQ(answers[0], answers[1]) << "parameters " << i << " seed " << seed;
    }
  }
}

TEST(GpuEngine, KeepsTheLogitsOfASessionWhileAnotherRuns) {
  SKIP_WITHOUT_GPU();
  Engine engine(plankton(), on_gpu(2));
  std::vector<float> alone;
  {
    Session session = std::move(engine.open_session().value());
    ASSERT_TRUE(session.append(prompt(1)).ok());
    alone.assign(session.logits().begin(), session.logits().end());
  }
  Session first = std::move(engine.open_session().value());
  Session second = std::move(engine.open_session().value());
  ASSERT_TRUE(first.append(prompt(1)).ok());
  ASSERT_TRUE(second.append(prompt(2)).ok());
  ASSERT_TRUE(second.append(prompt(3)).ok());
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), first.logits().begin(), first.logits().end()));
  EXPECT_EQ(generate(first, {.temperature = 0.0f}, 1)[0],
            std::max_element(alone.begin(), alone.end()) - alone.begin());
}

// The rows of several sessions stay on the card after one step; each is brought over before it is
// overwritten.
TEST(GpuEngine, KeepsTheLogitsOfRequestsThatRanTogether) {
  SKIP_WITHOUT_GPU();
  Engine engine(plankton(), on_gpu(4));
  std::vector<Session> sessions;
  for (int i = 0; i < 4; ++i) sessions.push_back(std::move(engine.open_session().value()));
  RequestLoop loop(engine);
  GenerateOptions options;
  options.max_tokens = 1;
  for (int i = 0; i < 3; ++i)
    ASSERT_TRUE(loop.add(sessions[static_cast<size_t>(i)], prompt(i), options).has_value());
  while (!loop.empty()) loop.step();
  std::vector<TokenId> best;
  for (int i = 0; i < 3; ++i) best.push_back(sessions[static_cast<size_t>(i)].best());
  EXPECT_EQ(std::max_element(sessions[1].logits().begin(), sessions[1].logits().end()) -
                sessions[1].logits().begin(),
            best[1]);
  ASSERT_TRUE(sessions[3].append(prompt(9)).ok());
  for (const size_t i : {0, 1, 2}) {
    const std::span<const float> logits = sessions[i].logits();
    EXPECT_EQ(std::max_element(logits.begin(), logits.end()) - logits.begin(), best[i]) << i;
  }
}

const GgufFile& plankton_drafter() {
  static const GgufFile file(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  return file;
}

// Rows have the same bits in steps of 1 to 64 rows: drafting cannot change the text.
TEST(GpuEngine, WritesTheTextOfPlainDecodingWithADraft) {
  SKIP_WITHOUT_GPU();
  Engine plain(plankton(), on_gpu());
  const int n_prompts = 6, n_tokens = 48;
  std::vector<std::vector<TokenId>> want;
  for (int i = 0; i < n_prompts; ++i) {
    Session session = std::move(plain.open_session().value());
    ASSERT_TRUE(session.append(prompt(i, 10 + 20 * i)).ok());
    want.push_back(generate(session, {.temperature = 0.0f}, n_tokens));
  }
  for (const DraftOptions::Kind kind :
       {DraftOptions::Kind::Lookup, DraftOptions::Kind::Mtp, DraftOptions::Kind::File})
    for (const int budget : {1, 7, 16, 63, 0}) {
      EngineOptions options = on_gpu();
      options.draft.kind = kind;
      options.draft.file = &plankton_drafter();
      options.draft.budget = budget;
      Engine engine(plankton(), options);
      for (int i = 0; i < n_prompts; ++i) {
        SCOPED_TRACE(::testing::Message() << engine.draft_telemetry().drafter << " budget " << budget);
        Session session = std::move(engine.open_session().value());
        const std::vector<TokenId> start = prompt(i, 10 + 20 * i);
        ASSERT_TRUE(session.append(start).ok());
        const std::vector<TokenId> got = generate(session, {.temperature = 0.0f}, n_tokens);
        EXPECT_EQ(got, want[static_cast<size_t>(i)]) << "prompt " << i;
      }
      const DraftTelemetry telemetry = engine.draft_telemetry();
      EXPECT_TRUE(budget == 0 || kind == DraftOptions::Kind::Lookup || telemetry.n_rounds > 0)
          << "silently never drafted";
    }
}

TEST(GpuEngine, DraftsForRequestsThatRunTogether) {
  SKIP_WITHOUT_GPU();
  for (const DraftOptions::Kind kind : {DraftOptions::Kind::Mtp, DraftOptions::Kind::File}) {
    std::vector<std::vector<TokenId>> answers[2];
    for (const int together : {1, 5}) {
      EngineOptions options = on_gpu(together);
      options.draft.kind = kind;
      options.draft.file = &plankton_drafter();
      options.draft.budget = 7;
      Engine engine(plankton(), options);
      std::vector<std::vector<TokenId>>& texts = answers[together > 1];
      texts.resize(5);
      for (int first = 0; first < 5; first += together) {
        std::vector<Session> sessions;
        std::map<RequestId, size_t> of;
        RequestLoop loop(engine);
        for (int i = first; i < first + together; ++i) {
          sessions.push_back(std::move(engine.open_session().value()));
          GenerateOptions generate;
          generate.max_tokens = 24;
          generate.sampling.temperature = 0.0f;
          of[loop.add(sessions.back(), prompt(i, 8 + i), generate).value()] = static_cast<size_t>(i);
        }
        while (!loop.empty())
          for (const RequestEvent& event : loop.step()) {
            if (const auto* token = std::get_if<GeneratedToken>(&event.what))
              texts[of[event.request]].push_back(token->id);
            EXPECT_FALSE(std::holds_alternative<Error>(event.what));
          }
      }
      EXPECT_GT(engine.draft_telemetry().n_rounds, 0u);
    }
    // All prompts together are no more than 64 rows.
    for (size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(answers[0][i].size(), 24u);
      EXPECT_EQ(answers[0][i], answers[1][i]) << i;
    }
  }
}

// A drafter and the states on their way to it are in the plan.
TEST(GpuEngine, PlansTheMemoryOfADrafter) {
  SKIP_WITHOUT_GPU();
  for (const DraftOptions::Kind kind : {DraftOptions::Kind::Mtp, DraftOptions::Kind::File}) {
    EngineOptions options = on_gpu(3);
    options.draft.kind = kind;
    options.draft.file = &plankton_drafter();
    const size_t before = DeviceBuffer::total_bytes();
    const Engine engine(plankton(), options);
    const uint64_t taken = DeviceBuffer::total_bytes() - before;
    uint64_t planned = 0, drafter = 0;
    for (const MemoryPlanItem& item : engine.plan().device_items) {
      if (item.name != "reserve") planned += item.bytes;
      if (item.name == "drafter") drafter = item.bytes;
    }
    EXPECT_GT(drafter, 0u);
    EXPECT_LE(taken, planned);
    EXPECT_GE(taken + MiB, planned);
  }
}

void expect_memory_as_it_was(const std::string& expert_cache, int n_generations) {
  EngineOptions options = on_gpu();
  options.expert_cache = budget(expert_cache);
  Engine engine(plankton(), options);
  const auto generation = [&](int i) {
    Session session = std::move(engine.open_session().value());
    ASSERT_TRUE(session.append(prompt(i, 4 + i % 60)).ok());
    SamplingParams sampling;
    sampling.temperature = i % 2 == 0 ? 0.0f : 1.0f;
    sampling.seed = 1;
    ASSERT_EQ(generate(session, sampling, 8).size(), 8u);
  };
  // The driver loads a kernel, and takes what it needs for it, when it first runs.
  for (int i = 0; i < 60; ++i) generation(i);
  const uint64_t before = use_device(0).free_bytes;
  for (int i = 0; i < n_generations; ++i) generation(i);
  EXPECT_EQ(use_device(0).free_bytes, before);
}

TEST(GpuEngine, LeavesDeviceMemoryAsItWasAfterAThousandGenerations) {
  SKIP_WITHOUT_GPU();
  expect_memory_as_it_was("auto", 1000);
}

TEST(GpuEngine, LeavesDeviceMemoryAsItWasWhileExpertsMove) {
  SKIP_WITHOUT_GPU();
  expect_memory_as_it_was("40%", 200);
}

// A card that holds all but some of the feed-forward weights: the rest is the processor's.
TEST(GpuEngine, SplitsADenseModelThatIsLargerThanTheCard) {
  SKIP_WITHOUT_GPU();
  const GgufFile file(std::string(THERMO_TEST_DATA) + "/qwen35-f32.gguf");
  std::vector<TokenId> tokens;
  for (int i = 0; i < 60; ++i) tokens.push_back((i * i + 7) % 20);
  const auto answer_of = [&](const EngineOptions& options) {
    Engine engine(file, options);
    Session session = std::move(engine.open_session().value());
    EXPECT_TRUE(session.append(tokens).ok());
    return generate(session, {.temperature = 0.0f}, 24);
  };
  EngineOptions options = on_gpu();
  const MemoryPlan whole = Engine::plan_for(file, options);
  EXPECT_EQ(whole.ffn_parts, 0);
  const std::vector<TokenId> want = answer_of(options);
  for (const char* const share : {"0", "40%"}) {
    options.expert_cache = budget(share);
    EXPECT_GT(Engine::plan_for(file, options).ffn_parts, 0);
    EXPECT_EQ(answer_of(options), want) << share;
  }
}

// Another program, as far as the engine can tell.
class Hog {
 public:
  void take_all_but(uint64_t leave) {
    for (uint64_t size = 8 * GiB; size >= 2 * MiB; size /= 2)
      while (use_device(0).free_bytes > leave + size) {
        try {
          taken_.emplace_back(size);
        } catch (const MemoryError&) {
          break;
        }
      }
  }
  bool has_any() const { return !taken_.empty(); }

 private:
  std::vector<DeviceBuffer> taken_;
};

// Memory that was free when it was planned for is gone when it is taken.
TEST(GpuEngine, GoesOnWhereItCanWhenAnotherProgramTakesTheMemory) {
  SKIP_WITHOUT_GPU();
  const auto answers = [](Engine& engine) {
    Session session = std::move(engine.open_session().value());
    ASSERT_TRUE(session.append(prompt(1)).ok());
    EXPECT_EQ(generate(session, {.temperature = 0.0f}, 8).size(), 8u);
  };
  for (const uint64_t leave : {0 * MiB, 40 * MiB}) {
    Hog hog;
    EngineOptions options = on_gpu();
    options.device = {};
    options.progress = [&](const LoadProgress&) {
      if (!hog.has_any()) hog.take_all_but(leave);
    };
    Engine engine(plankton(), options);  // on the GPU with what is left, or on the processor
    EXPECT_TRUE(hog.has_any());
    answers(engine);
    options.device = kGpu;
    if (leave == 0) {
      EXPECT_THROW(Engine(plankton(), options), MemoryError);
    }
  }
  // Nothing of it is left behind.
  Engine engine(plankton(), on_gpu());
  EXPECT_NE(engine.info().device, "cpu");
  answers(engine);
}

TEST(GpuEngine, GivesAllItsMemoryBack) {
  SKIP_WITHOUT_GPU();
  { const Engine engine(plankton(), on_gpu()); }  // what the driver keeps
  const uint64_t before = use_device(0).free_bytes;
  for (int i = 0; i < 3; ++i) {
    const Engine engine(plankton(), on_gpu());
    EXPECT_LT(use_device(0).free_bytes, before);
  }
  EXPECT_EQ(use_device(0).free_bytes, before);
}

}  // namespace
}  // namespace thermo
