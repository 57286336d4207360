// With a draft, the text must be that of plain decoding, whichever drafter is used and however many tokens it
// guesses.
#include "engine/speculation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>

#include "base/cpu_info.h"
#include "base/error.h"
#include "base/mapped_file.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "experts/heat.h"
#include "gguf/gguf_file.h"
#include "model/model_config.h"

namespace thermo {
namespace {

using Kind = DraftOptions::Kind;

const GgufFile& plankton() {
  static const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  return file;
}

const GgufFile& plankton_drafter() {
  static const GgufFile file(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  return file;
}

EngineOptions options_for(const DraftOptions& draft, int n_sequences = 1) {
  EngineOptions options;
  options.n_ctx = 256;
  options.n_threads = 2;
  options.n_batch = 64;
  options.n_sequences = n_sequences;
  options.device.kind = DeviceChoice::Kind::Cpu;
  options.draft = draft;
  return options;
}

// Prompts with repetitions, so that there is something to look up.
std::vector<TokenId> prompt(int i) {
  std::vector<TokenId> ids;
  for (int k = 0; k < 24 + 5 * i; ++k) ids.push_back((300 + 37 * i + 11 * (k % (5 + i))) % 4000);
  return ids;
}

struct Text {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;
  GenerateResult result;
  std::vector<TokenId> session;
};

Text text_of(Engine& engine, int i, GenerateOptions options, int stop_after = -1) {
  Session session = std::move(engine.open_session().value());
  EXPECT_TRUE(session.append(prompt(i)).ok());
  Text text;
  const auto result = session.generate(options, [&](const GeneratedToken& token) {
    text.tokens.push_back(token.id);
    for (const TokenLogprob& logprob : token.logprobs) text.logprobs.push_back(logprob.logprob);
    return static_cast<int>(text.tokens.size()) != stop_after;
  });
  EXPECT_TRUE(result.has_value());
  text.result = *result;
  text.session.assign(session.tokens().begin(), session.tokens().end());
  EXPECT_EQ(static_cast<int>(text.session.size()), session.n_past());
  return text;
}

void expect_equal(const Text& got, const Text& want) {
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.logprobs, want.logprobs);
  EXPECT_EQ(got.result.reason, want.result.reason);
  EXPECT_EQ(got.result.n_generated, want.result.n_generated);
  EXPECT_EQ(got.session, want.session);
}

GenerateOptions sampling(int i, int max_tokens = 40) {
  GenerateOptions options;
  options.max_tokens = max_tokens;
  options.sampling.temperature = i % 2 == 0 ? 0.0f : 0.8f;
  options.sampling.seed = static_cast<uint64_t>(i);
  if (i == 2) options.sampling.n_probs = 3;
  if (i == 3) options.sampling.repetition_penalty = 1.3f;
  return options;
}

DraftOptions draft_of(Kind kind, int budget) {
  DraftOptions draft;
  draft.kind = kind;
  draft.file = &plankton_drafter();
  draft.budget = budget;
  return draft;
}

std::vector<DraftOptions> drafts() {
  std::vector<DraftOptions> all;
  for (const Kind kind : {Kind::Lookup, Kind::Mtp, Kind::File})
    for (const int budget : {1, 7, 16, 63, 0}) all.push_back(draft_of(kind, budget));
  return all;
}

TEST(Speculation, WritesTheTextOfPlainDecoding) {
  Engine plain(plankton(), options_for({}));
  std::vector<Text> want;
  for (int i = 0; i < 4; ++i) want.push_back(text_of(plain, i, sampling(i)));
  for (const DraftOptions& draft : drafts()) {
    Engine engine(plankton(), options_for(draft));
    for (int i = 0; i < 4; ++i) {
      SCOPED_TRACE(testing::Message()
                   << engine.draft_telemetry().drafter << " budget " << draft.budget << " prompt " << i);
      expect_equal(text_of(engine, i, sampling(i)), want[static_cast<size_t>(i)]);
    }
    const DraftTelemetry telemetry = engine.draft_telemetry();
    EXPECT_TRUE(draft.budget == 0 || telemetry.n_rounds > 0) << "silently never drafted";
    EXPECT_LE(telemetry.n_accepted, telemetry.n_drafted);
  }
}

// A drafter multiplies by the model's head, which is packed as it is used.
TEST(Speculation, WritesTheTextOfPlainDecodingWithoutRepacking) {
  EngineOptions options = options_for({});
  options.repack = false;
  Engine plain(plankton(), options);
  const Text want = text_of(plain, 1, sampling(1));
  const auto drafter_bytes = [&] {
    const std::vector<MemoryPlanItem> items = Engine::plan_for(plankton(), options).items;
    const auto item = std::find_if(items.begin(), items.end(),
                                   [](const MemoryPlanItem& i) { return i.name == kDrafterItem; });
    return item == items.end() ? 0 : item->bytes;
  };
  for (const Kind kind : {Kind::Mtp, Kind::File, Kind::Auto}) {
    SCOPED_TRACE(static_cast<int>(kind));
    options.draft = draft_of(kind, 7);
    options.repack = true;
    const uint64_t repacked = drafter_bytes();
    options.repack = false;
    EXPECT_GT(drafter_bytes(), repacked);
    Engine engine(plankton(), options);
    expect_equal(text_of(engine, 1, sampling(1)), want);
    EXPECT_GT(engine.draft_telemetry().n_accepted, 0u);
  }
}

// Heat is that of text that was written: rows that were drafted and not accepted leave none.
TEST(Speculation, LeavesTheHeatOfPlainDecoding) {
  const auto on_cpu = [](EngineOptions&) {};
  const auto on_stand_in = [](EngineOptions& options) {
    options.device.kind = DeviceChoice::Kind::StandIn;
    options.expert_cache = {.bytes = {}, .share = 0.4};
  };
  const auto in_file = [](EngineOptions& options) { options.expert_ram = {.bytes = {}, .share = 0.6}; };
  for (const auto& place :
       std::initializer_list<std::function<void(EngineOptions&)>>{on_cpu, on_stand_in, in_file}) {
    const auto load = [&](const DraftOptions& draft) {
      EngineOptions options = options_for(draft);
      place(options);
      auto engine = std::make_unique<Engine>(plankton(), options);
      for (int i = 0; i < 4; ++i) text_of(*engine, i, sampling(i));
      return engine;
    };
    const std::unique_ptr<Engine> plain = load({});
    for (const DraftOptions& draft : drafts()) {
      if (draft.budget != 16 && draft.budget != 0) continue;
      const std::unique_ptr<Engine> engine = load(draft);
      SCOPED_TRACE(testing::Message()
                   << "draft " << static_cast<int>(draft.kind) << " budget " << draft.budget);
      const DraftTelemetry drafted = engine->draft_telemetry();
      if (draft.budget > 0) {
        EXPECT_GT(drafted.n_drafted, drafted.n_accepted);
      }
      EXPECT_EQ(engine->heat()->n_tokens(), plain->heat()->n_tokens());
      EXPECT_EQ(engine->heat()->uses(), plain->heat()->uses());
      EXPECT_EQ(engine->heat()->values(), plain->heat()->values());
    }
  }
}

// Such a draft belongs to the time of the prompt, so a short answer is as fast as without it.
TEST(Speculation, DraftsWhenAPromptWasReadAndNothingElseIsWritten) {
  // Whether it drafted before it told the first tokens of the second of two answers.
  const auto drafts_early = [](const DraftOptions& draft, bool writes_another) {
    Engine engine(plankton(), options_for(draft, 2));
    Session first = std::move(engine.open_session().value()),
            second = std::move(engine.open_session().value());
    RequestLoop loop(engine);
    if (writes_another) {
      EXPECT_TRUE(loop.add(first, prompt(0), sampling(0)).has_value());
      loop.step();
    }
    EXPECT_TRUE(loop.add(second, prompt(2), sampling(0)).has_value());
    const double before = engine.draft_telemetry().draft_seconds;
    const auto told = loop.step();
    EXPECT_TRUE(std::any_of(told.begin(), told.end(), [](const RequestEvent& event) {
      return std::holds_alternative<GeneratedToken>(event.what);
    }));
    return engine.draft_telemetry().draft_seconds > before;
  };
  DraftOptions draft;
  draft.file = &plankton_drafter();
  for (const Kind kind : {Kind::Auto, Kind::File}) {
    draft.kind = kind;
    EXPECT_TRUE(drafts_early(draft, false));
    EXPECT_FALSE(drafts_early(draft, true));
  }
  draft.budget = 7;  // needs no planning
  EXPECT_FALSE(drafts_early(draft, false));
}

// Whatever the sampler looks at besides the logits: a draft knows nothing of it.
TEST(Speculation, WritesTheTextOfPlainDecodingWithEveryRule) {
  using Set = void (*)(SamplingParams&);
  const std::vector<Set> rules = {
      [](SamplingParams& p) { p.top_k = 2; },
      [](SamplingParams& p) { p.top_p = 0.5f; },
      [](SamplingParams& p) { p.min_p = 0.3f; },
      [](SamplingParams& p) { p.presence_penalty = 1.5f; },
      [](SamplingParams& p) { p.frequency_penalty = 1.5f; },
      [](SamplingParams& p) { p.dry_multiplier = 1.0f; },
      [](SamplingParams& p) {
        p.logit_bias = {{300, 4.0f}, {311, kBanToken}};
      },
  };
  Engine plain(plankton(), options_for({})), lookup(plankton(), options_for(draft_of(Kind::Lookup, 7))),
      file(plankton(), options_for(draft_of(Kind::File, 7)));
  for (size_t rule = 0; rule < rules.size(); ++rule)
    for (const int i : {0, 1}) {  // greedy, and drawn
      SCOPED_TRACE(testing::Message() << "rule " << rule << ", prompt " << i);
      GenerateOptions options = sampling(i, 30);
      rules[rule](options.sampling);
      const Text want = text_of(plain, i, options);
      expect_equal(text_of(lookup, i, options), want);
      expect_equal(text_of(file, i, options), want);
    }
  EXPECT_GT(file.draft_telemetry().n_accepted, 0u);
}

// One token may be guessed in several ways, even if it is the last. Its row was computed in a step of its
// own.
TEST(Speculation, DraftsAsDeepAsAnAnswerGoesOn) {
  Engine engine(plankton(), options_for(draft_of(Kind::File, 16)));
  const DraftTelemetry t = text_of(engine, 0, sampling(0, 2)).result.draft;
  EXPECT_EQ(t.n_rounds, 1u);
  EXPECT_EQ(t.n_drafted, 8u);
  EXPECT_EQ(t.tried_by_depth().size(), 1u);
  EXPECT_EQ(text_of(engine, 0, sampling(0, 1)).result.draft.n_drafted, 0u) << "none is left";
  Engine sure(plankton(), options_for(draft_of(Kind::Lookup, 16)));
  for (int n = 2; n <= 40; ++n) {
    const Text text = text_of(sure, 0, sampling(0, n));
    const DraftTelemetry& last = text.result.draft;
    EXPECT_EQ(last.n_accepted + last.n_steps(), static_cast<uint64_t>(n));
    EXPECT_LE(last.tried_by_depth().size(), static_cast<size_t>(n) - 1);
  }
}

// Not that it drafts while it cannot.
TEST(Speculation, SaysWhyNothingIsVerified) {
  Engine planned(plankton(), options_for(draft_of(Kind::File, 0)));
  EXPECT_TRUE(planned.draft_telemetry().state.starts_with("waiting: ")) << planned.draft_telemetry().state;
  DraftOptions never = draft_of(Kind::File, 7);
  never.min_depth = 7;
  never.min_probability = 0.999f;
  Engine engine(plankton(), options_for(never));
  const Text text = text_of(engine, 1, sampling(1));
  ASSERT_EQ(text.result.draft.n_rounds, 0u);
  EXPECT_TRUE(text.result.draft.state.starts_with("off: ")) << text.result.draft.state;
  EXPECT_EQ(engine.draft_telemetry().state, text.result.draft.state);
}

// Each expert of a layer once, however many rows of the round use it.
TEST(Speculation, CountsTheExpertsOfItsRounds) {
  Engine engine(plankton(), options_for(draft_of(Kind::File, 7)));
  const DraftTelemetry t = text_of(engine, 0, sampling(0)).result.draft;
  ASSERT_GT(t.n_rounds, 0u);
  const auto n_layers = static_cast<uint64_t>(engine.config().n_routed_layers());
  EXPECT_EQ(t.n_layers, t.n_rounds * n_layers);
  EXPECT_GE(t.experts_per_layer(), engine.config().route.n_expert_used);
  EXPECT_LE(t.experts_per_layer(), engine.config().route.n_expert);
  EXPECT_EQ(t.n_cold_experts, 0u) << "all are where they are computed";
  EXPECT_EQ(engine.draft_telemetry().n_experts, t.n_experts);
}

TEST(Speculation, EndsWherePlainDecodingEnds) {
  Engine plain(plankton(), options_for({}));
  DraftOptions draft;
  draft.kind = Kind::Lookup;
  draft.budget = 16;
  Engine engine(plankton(), options_for(draft));
  const Text whole = text_of(plain, 0, sampling(0));
  for (int n = 1; n <= 40; n += n < 12 ? 1 : 7) {
    SCOPED_TRACE(n);
    // A limit, a caller that stops, and a stop token, at every place.
    expect_equal(text_of(engine, 0, sampling(0, n)), text_of(plain, 0, sampling(0, n)));
    expect_equal(text_of(engine, 0, sampling(0), n), text_of(plain, 0, sampling(0), n));
    GenerateOptions stop = sampling(0);
    stop.stop_tokens = {whole.tokens[static_cast<size_t>(n) - 1]};
    expect_equal(text_of(engine, 0, stop), text_of(plain, 0, stop));
    // And a stop text: what was drafted after it is neither committed nor counted.
    const auto ends_after = [n] {
      GenerateOptions options = sampling(0);
      options.ends_after = [n, n_told = 0](TokenId) mutable { return ++n_told == n; };
      return options;
    };
    const Text got = text_of(engine, 0, ends_after());
    expect_equal(got, text_of(plain, 0, ends_after()));
    EXPECT_EQ(got.result.reason, FinishReason::StopText);
    EXPECT_EQ(got.session.size(), prompt(0).size() + static_cast<size_t>(n) - 1);
    const DraftTelemetry& t = got.result.draft;
    EXPECT_EQ(t.n_accepted + t.n_steps(), static_cast<uint64_t>(n) - 1);
  }
  // The end of the context.
  EngineOptions small = options_for({}), small_draft = options_for(draft);
  small.n_ctx = small_draft.n_ctx = 40;
  Engine plain_small(plankton(), small), engine_small(plankton(), small_draft);
  const Text full = text_of(plain_small, 0, sampling(0, -1));
  EXPECT_EQ(full.result.reason, FinishReason::ContextFull);
  expect_equal(text_of(engine_small, 0, sampling(0, -1)), full);
}

TEST(Speculation, GoesOnWithPlainStepsWhereADrafterGivesNoNumbers) {
  const MappedFile mapped(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  std::vector<std::byte> bytes(mapped.bytes().begin(), mapped.bytes().end());
  const GgufTensor norm = plankton_drafter().require_tensor("output_norm.weight");
  ASSERT_EQ(norm.dtype, DType::F32);
  const std::vector<float> nan(norm.n_elements(), std::numeric_limits<float>::quiet_NaN());
  std::memcpy(bytes.data() + norm.file_offset, nan.data(), norm.n_bytes);
  const GgufFile broken(std::span<const std::byte>(bytes), "broken");
  DraftOptions draft;
  draft.kind = Kind::File;
  draft.file = &broken;
  Engine plain(plankton(), options_for({}));
  for (const int budget : {0, 7}) {
    draft.budget = budget;
    Engine engine(plankton(), options_for(draft));
    for (int i = 0; i < 2; ++i) expect_equal(text_of(engine, i, sampling(i)), text_of(plain, i, sampling(i)));
    EXPECT_EQ(engine.draft_telemetry().n_rounds, 0u);
    EXPECT_GT(engine.draft_telemetry().n_plain, 0u);
  }
}

TEST(Speculation, NeedsMemoryForItsDrafter) {
  EngineOptions options = options_for({}, 256);
  const auto total = [&](int n_ctx) {
    options.n_ctx = n_ctx;
    return Engine::plan_for(plankton(), options).total_bytes;
  };
  const uint64_t token = (total(2048) - total(1024)) / 1024;
  const auto n_ctx = static_cast<int>(7 * (available_memory_bytes() / 10) / token);
  options.n_ctx = n_ctx;
  EXPECT_NO_THROW(Engine::plan_for(plankton(), options));
  options.draft.kind = Kind::File;
  options.draft.file = &plankton_drafter();
  options.draft.k_type = options.draft.v_type = KvType::F32;
  EXPECT_THROW(Engine::plan_for(plankton(), options), MemoryError);
  options.draft.kind = Kind::Auto;  // goes on without
  EXPECT_NE(Engine::plan_for(plankton(), options).note.find("nothing is drafted"), std::string::npos);
}

// With many sequences of a wide model these were gigabytes that no plan had.
TEST(Speculation, PlansTheStatesThatWaitForItsDrafter) {
  const auto planned = [](Kind kind, int n_ctx, int n_sequences) {
    EngineOptions options = options_for(draft_of(kind, kMaxDraftNodes), n_sequences);
    options.n_ctx = n_ctx;
    for (const MemoryPlanItem& item : Engine::plan_for(plankton(), options).items)
      if (item.name == kDrafterItem) return item.bytes;
    return uint64_t{0};
  };
  for (const auto& [kind, n_states] : {std::pair(Kind::Mtp, 1), std::pair(Kind::File, 3)}) {
    const uint64_t token = (planned(kind, 512, 1) - planned(kind, 256, 1)) / 256,
                   row = static_cast<uint64_t>(n_states) * 256 * sizeof(float);
    EXPECT_GE(planned(kind, 256, 2) - planned(kind, 256, 1),
              256 * token + (kDrafterQueueRows + kMaxDraftNodes + 1) * row);
  }
}

TEST(Speculation, RefusesGuessesThatAreLongerThanItsDrafters) {
  for (const auto& [kind, depth] : {std::pair(Kind::Mtp, 4), std::pair(Kind::File, 7)}) {
    EngineOptions options = options_for(draft_of(kind, 16));
    options.draft.min_depth = depth;
    EXPECT_NO_THROW(Engine::plan_for(plankton(), options));
    options.draft.min_depth = depth + 1;
    EXPECT_THROW(Engine::plan_for(plankton(), options), ConfigError);
  }
}

// At a temperature close to 0 the drawn token is the most likely one, and the text that of temperature 0.
TEST(Speculation, LeavesOutWhatTheDrafterThinksUnlikelyAtEveryTemperature) {
  DraftOptions draft = draft_of(Kind::File, 16);
  draft.min_probability = 0.9f;
  Engine engine(plankton(), options_for(draft));
  GenerateOptions greedy = sampling(0), cold = sampling(0);
  cold.sampling.temperature = 1e-4f;
  const Text want = text_of(engine, 0, greedy), got = text_of(engine, 0, cold);
  ASSERT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.result.draft.n_drafted, want.result.draft.n_drafted);
  EXPECT_GT(got.result.draft.n_drafted, 0u);
}

// Also when it finds out what steps take, before the first answer.
TEST(Speculation, MakesNoLargerStepsThanAreAllowed) {
  for (const int n_batch : {1, 2, 3, 7}) {
    EngineOptions options = options_for({});
    options.n_batch = n_batch;
    Engine plain(plankton(), options);
    const Text want = text_of(plain, 0, sampling(0));
    for (const DraftOptions& draft : drafts()) {
      if (draft.budget != 0 && draft.budget != 16) continue;
      SCOPED_TRACE(testing::Message() << n_batch << " " << static_cast<int>(draft.kind));
      options.draft = draft;
      Engine engine(plankton(), options);
      expect_equal(text_of(engine, 0, sampling(0)), want);
      // Lookup guesses only where the text repeats itself, and the text depends on the instruction set.
      EXPECT_TRUE(n_batch == 1 || draft.budget == 0 || draft.kind == Kind::Lookup ||
                  engine.draft_telemetry().n_rounds > 0);
    }
  }
}

TEST(Speculation, GoesOnAfterComingBackToACheckpoint) {
  for (const DraftOptions& draft : drafts()) {
    if (draft.budget != 7) continue;
    Engine plain(plankton(), options_for({})), engine(plankton(), options_for(draft));
    std::vector<std::vector<TokenId>> texts[2];
    Engine* const engines[] = {&plain, &engine};
    for (int e = 0; e < 2; ++e) {
      Session session = std::move(engines[e]->open_session().value());
      ASSERT_TRUE(session.append(prompt(0)).ok());
      session.checkpoint();
      for (int turn = 0; turn < 3; ++turn) {
        std::vector<TokenId> ids = prompt(0);
        for (int k = 0; k < 4 + turn; ++k) ids.push_back(500 + turn);
        ASSERT_TRUE(session.set_tokens(ids).has_value());
        std::vector<TokenId>& text = texts[e].emplace_back();
        ASSERT_TRUE(session
                        .generate(sampling(turn, 20),
                                  [&](const GeneratedToken& token) {
                                    text.push_back(token.id);
                                    return true;
                                  })
                        .has_value());
      }
    }
    EXPECT_EQ(texts[0], texts[1]);
  }
}

// Rows that a caller computed wait for their commit through a step of another sequence, however few the
// drafter's own rounds have.
TEST(Speculation, KeepsTheStatesOfAsManyRowsAsAreAllowed) {
  constexpr int kRows = 64;
  EngineOptions options = options_for(draft_of(Kind::File, 1), 2);
  options.max_draft_rows = kRows;
  options.n_threads = 1;
  Engine engine(plankton(), options);
  std::vector<Row> rows;
  std::vector<int32_t> path;
  for (int r = 0; r < kRows; ++r) {
    rows.push_back({.token = 300 + r, .parent = r - 1, .want_logits = true});
    path.push_back(r);
  }
  const auto run = [&](int sequence, std::span<const Row> of_it, bool uncommitted) {
    const SequenceRows group{.sequence = sequence, .rows = of_it, .uncommitted = uncommitted};
    ASSERT_TRUE(engine.step({.groups = {&group, 1}}).has_value());
  };
  run(0, rows, true);
  run(1, std::span(rows).first(1), false);
  EXPECT_TRUE(engine.commit(0, path).ok());
}

TEST(Speculation, WritesTheSameForSeveralSequencesTogether) {
  Engine plain(plankton(), options_for({}));
  std::vector<Text> want;
  for (int i = 0; i < 5; ++i) want.push_back(text_of(plain, i, sampling(i, 20 + i)));
  for (const DraftOptions& draft : drafts())
    for (const int n : {2, 5}) {
      if (draft.budget == 1 || draft.budget == 16) continue;
      SCOPED_TRACE(testing::Message() << static_cast<int>(draft.kind) << " " << draft.budget << " " << n);
      Engine engine(plankton(), options_for(draft, n));
      RequestLoop loop(engine);
      std::vector<Session> sessions;
      std::map<RequestId, int> which;
      std::vector<std::vector<TokenId>> got(static_cast<size_t>(n));
      for (int i = 0; i < n; ++i) sessions.push_back(std::move(engine.open_session().value()));
      for (int i = 0; i < n; ++i)
        which[loop.add(sessions[static_cast<size_t>(i)], prompt(i), sampling(i, 20 + i)).value()] = i;
      while (!loop.empty())
        for (const RequestEvent& event : loop.step())
          if (const auto* token = std::get_if<GeneratedToken>(&event.what))
            got[static_cast<size_t>(which[event.request])].push_back(token->id);
      for (int i = 0; i < n; ++i)
        EXPECT_EQ(got[static_cast<size_t>(i)], want[static_cast<size_t>(i)].tokens) << i;
    }
}

uint64_t sum(std::span<const uint64_t> values) {
  return std::accumulate(values.begin(), values.end(), uint64_t{0});
}

// Every step of an answer but its last writes one token more than were accepted; the first came with the
// prompt.
TEST(Speculation, CountsForEachAnswerWhatWasDraftedForIt) {
  for (const DraftOptions& draft : drafts()) {
    if (draft.budget != 1 && draft.budget != 7) continue;
    SCOPED_TRACE(testing::Message() << static_cast<int>(draft.kind) << " " << draft.budget);
    constexpr int kSessions = 3;
    Engine engine(plankton(), options_for(draft, kSessions));
    RequestLoop loop(engine);
    std::vector<Session> sessions;
    for (int i = 0; i < kSessions; ++i) sessions.push_back(std::move(engine.open_session().value()));
    std::map<RequestId, int> taken;
    for (int i = 0; i < kSessions; ++i)
      taken[loop.add(sessions[static_cast<size_t>(i)], prompt(i), sampling(i, 12 + 9 * i)).value()] = 0;
    const RequestId stopped = taken.begin()->first;
    DraftTelemetry all;
    while (!loop.empty()) {
      std::map<RequestId, int> now;
      for (const RequestEvent& event : loop.step()) {
        if (std::holds_alternative<GeneratedToken>(event.what)) {
          ++now[event.request];
          if (++taken[event.request] == 6 && event.request == stopped)
            loop.cancel(stopped, now[stopped]);  // inside a round, if it was right for so long
        }
        const auto* result = std::get_if<GenerateResult>(&event.what);
        if (result == nullptr) continue;
        const DraftTelemetry& t = result->draft;
        EXPECT_EQ(t.n_accepted + t.n_steps(), static_cast<uint64_t>(result->n_generated));
        EXPECT_EQ(sum(t.accepted), t.n_accepted);
        EXPECT_LE(t.n_drafted, t.n_rounds * static_cast<uint64_t>(draft.budget));
        EXPECT_EQ(event.request == stopped ? 6 : taken[event.request], result->n_generated);
        all = all + t;
      }
    }
    const DraftTelemetry together = engine.draft_telemetry();
    EXPECT_EQ(all.n_rounds, together.n_rounds);
    EXPECT_EQ(all.n_plain, together.n_plain);
    EXPECT_EQ(all.n_drafted, together.n_drafted);
    EXPECT_EQ(all.n_accepted, together.n_accepted);
    EXPECT_EQ(all.tried, together.tried);
    EXPECT_EQ(all.accepted, together.accepted);
    // They waited together for most of the steps.
    EXPECT_LT(together.verify_seconds + together.plain_seconds, all.verify_seconds + all.plain_seconds);
  }
}

}  // namespace
}  // namespace thermo
