// Several requests in one step. Each must write exactly what it writes alone.
#include <gtest/gtest.h>

#include <map>

#include "engine/engine.h"
#include "gguf/gguf_file.h"
#include "model/backend.h"

namespace thermo {
namespace {

const GgufFile& plankton() {
  static const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  return file;
}

EngineOptions options_for(int n_sequences, int n_batch = 32) {
  EngineOptions options;
  options.n_ctx = 256;
  options.n_threads = 2;
  options.n_batch = n_batch;
  options.n_sequences = n_sequences;
  return options;
}

struct Task {
  std::vector<TokenId> prompt;
  GenerateOptions options;
};

// Prompts of different lengths, greedy and sampled, with and without log probabilities.
Task task(int i) {
  Task t;
  for (int k = 0; k < 7 + 23 * i; ++k) t.prompt.push_back((331 * i + 17 * k * (k + 3)) % 4000);
  t.options.max_tokens = 10 + 5 * (i % 3);
  t.options.sampling.temperature = i % 2 == 0 ? 0.0f : 0.8f;
  t.options.sampling.seed = static_cast<uint64_t>(i);
  if (i == 3) t.options.sampling.n_probs = 2;
  return t;
}

std::vector<TokenId> text_alone(Engine& engine, const Task& t) {
  Session session = std::move(engine.open_session().value());
  EXPECT_TRUE(session.append(t.prompt).ok());
  std::vector<TokenId> text;
  EXPECT_TRUE(session
                  .generate(t.options,
                            [&](const GeneratedToken& token) {
                              text.push_back(token.id);
                              return true;
                            })
                  .has_value());
  return text;
}

struct Ended {
  std::vector<TokenId> text;
  int n_prompt = 0;
  std::optional<FinishReason> reason;
};

void take_events(std::span<const RequestEvent> events, std::map<RequestId, Ended>& all) {
  for (const RequestEvent& event : events) {
    Ended& one = all[event.request];
    EXPECT_FALSE(one.reason) << "an event after the last one";
    if (const auto* token = std::get_if<GeneratedToken>(&event.what)) one.text.push_back(token->id);
    if (const auto* progress = std::get_if<PromptProgress>(&event.what)) one.n_prompt = progress->done;
    if (const auto* result = std::get_if<GenerateResult>(&event.what)) {
      one.reason = result->reason;
      EXPECT_EQ(result->n_generated, static_cast<int>(one.text.size()));
    }
    ASSERT_FALSE(std::holds_alternative<Error>(event.what));
  }
}

TEST(RequestLoop, WritesWhatEachRequestWritesAlone) {
  Engine alone(plankton(), options_for(1));
  std::vector<std::vector<TokenId>> want;
  for (int i = 0; i < 5; ++i) want.push_back(text_alone(alone, task(i)));
  for (const int n_requests : {1, 2, 5})
    for (const int n_batch : {3, 32, 128}) {
      Engine engine(plankton(), options_for(n_requests, n_batch));
      std::vector<Session> sessions;
      std::map<RequestId, Ended> ended;
      std::map<RequestId, int> tasks;
      RequestLoop loop(engine);
      sessions.reserve(static_cast<size_t>(n_requests));
      // They join one after the other, while the earlier ones run.
      for (int i = 0; i < n_requests || !loop.empty();) {
        if (i < n_requests) {
          sessions.push_back(std::move(engine.open_session().value()));
          const auto id = loop.add(sessions.back(), task(i).prompt, task(i).options);
          ASSERT_TRUE(id.has_value());
          tasks[*id] = i++;
        }
        ASSERT_NO_FATAL_FAILURE(take_events(loop.step(), ended));
      }
      ASSERT_EQ(ended.size(), static_cast<size_t>(n_requests));
      for (const auto& [id, i] : tasks) {
        EXPECT_EQ(ended[id].text, want[static_cast<size_t>(i)])
            << "request " << i << " of " << n_requests << ", steps of " << n_batch;
        EXPECT_EQ(ended[id].n_prompt, static_cast<int>(task(i).prompt.size()));
        EXPECT_EQ(ended[id].reason, FinishReason::Length);
        // The session holds everything it reported.
        EXPECT_EQ(sessions[static_cast<size_t>(i)].n_past(),
                  static_cast<int>(task(i).prompt.size() + ended[id].text.size()));
      }
    }
}

// More text than the pool of pages holds, with and without drafts: requests wait for each other, and each
// still writes what it writes alone.
TEST(RequestLoop, SharesAPoolThatIsTooSmall) {
  for (const bool drafts : {false, true}) {
    EngineOptions options = options_for(4, 64);
    options.n_ctx = 1000;
    options.n_pages = 5;
    if (drafts) options.draft.kind = DraftOptions::Kind::Lookup;
    options.draft.budget = 7;
    const auto long_task = [](int i) {
      Task t = task(i);
      t.prompt.clear();
      for (int k = 0; k < 200 + 31 * i; ++k) t.prompt.push_back((331 * i + 17 * k * (k + 3)) % 4000);
      t.options.max_tokens = 330;
      return t;
    };
    Engine engine(plankton(), options);
    ASSERT_EQ(engine.kv_pool().n_pages, 5);
    std::vector<std::vector<TokenId>> want;
    for (int i = 0; i < 4; ++i) want.push_back(text_alone(engine, long_task(i)));
    std::vector<Session> sessions;
    for (int i = 0; i < 4; ++i) sessions.push_back(std::move(engine.open_session().value()));
    RequestLoop loop(engine);
    std::map<RequestId, Ended> ended;
    std::map<RequestId, int> tasks;
    // What has ended keeps its text for a next turn, until somebody needs the pages.
    loop.on_shortage([&] {
      for (const auto& [id, i] : tasks)
        if (ended[id].reason && sessions[static_cast<size_t>(i)].n_pages() > 0) {
          sessions[static_cast<size_t>(i)].clear();
          return true;
        }
      return false;
    });
    for (int i = 0; i < 4; ++i) {
      const auto id = loop.add(sessions[static_cast<size_t>(i)], long_task(i).prompt, long_task(i).options);
      ASSERT_TRUE(id.has_value());
      tasks[*id] = i;
    }
    for (int n_steps = 0; !loop.empty(); ++n_steps) {
      ASSERT_LT(n_steps, 5000);
      ASSERT_NO_FATAL_FAILURE(take_events(loop.step(), ended));
      EXPECT_GE(engine.kv_pool().n_free, 0);
    }
    for (const auto& [id, i] : tasks) {
      EXPECT_EQ(ended[id].text, want[static_cast<size_t>(i)]) << "request " << i;
      EXPECT_EQ(ended[id].n_prompt, static_cast<int>(long_task(i).prompt.size()));
    }
  }
}

TEST(RequestLoop, SaysThatNobodyWillGiveAPageBack) {
  EngineOptions options = options_for(2, 64);
  options.n_ctx = 500;
  options.n_pages = 2;
  Engine engine(plankton(), options);
  Session idle = std::move(engine.open_session().value()), other = std::move(engine.open_session().value());
  std::vector<TokenId> ids(400, 7);
  ASSERT_TRUE(idle.append(ids).ok());
  EXPECT_EQ(idle.n_pages(), 2);
  const Status full = other.append(ids);
  ASSERT_FALSE(full.ok());
  EXPECT_EQ(full.error().code, ErrorCode::Busy);
  RequestLoop loop(engine);
  ASSERT_TRUE(loop.add(other, ids, {}).has_value());
  const std::span<const RequestEvent> events = loop.step();
  ASSERT_EQ(events.size(), 1u);
  const auto* error = std::get_if<Error>(&events[0].what);
  ASSERT_NE(error, nullptr);
  EXPECT_EQ(error->code, ErrorCode::Busy);
  EXPECT_TRUE(loop.empty());
  // The one that has pages goes on, and when it is gone there is room.
  EXPECT_TRUE(idle.append(std::vector<TokenId>(20, 9)).ok());
  idle.clear();
  EXPECT_TRUE(other.append(ids).ok());
}

// A guess that was open when a request gave way is compared with what is written after the text was read
// again, not with the text.
TEST(RequestLoop, ComparesAGuessWithWhatFollowsAReadingAgain) {
  constexpr TokenId kOne = 3001, kTwo = 3002, kThree = 3003;
  EngineOptions options = options_for(2, 64);
  options.n_ctx = 300;
  options.n_pages = 2;
  options.draft.kind = DraftOptions::Kind::Lookup;
  Engine engine(plankton(), options);
  ASSERT_EQ(engine.kv_pool().n_pages, 2);
  Session first = std::move(engine.open_session().value()), second = std::move(engine.open_session().value());
  RequestLoop loop(engine);
  // A few steps, to know what they take.
  const auto writing = [](std::vector<TokenId> script) {
    GenerateOptions generate;
    generate.script = std::move(script);
    return generate;
  };
  const RequestId holder = loop.add(first, std::vector<TokenId>{7}, writing({11, 12, 13, 14, 15})).value();
  for (int step = 0; step < 4; ++step) loop.step();
  loop.pause(holder, true);
  // It fills a page. Its end and its answer repeat its beginning, and then the answer differs.
  std::vector<TokenId> prompt{kOne, kTwo, kThree};
  while (prompt.size() < static_cast<size_t>(kKvPage) - 2)
    prompt.push_back(static_cast<TokenId>(prompt.size()));
  prompt.insert(prompt.end(), {kOne, kTwo});
  const RequestId other = loop.add(second, prompt, writing({kThree, 21, 22})).value();
  const auto is_open = [&] { return loop.draft(other).state == "waiting: the drafter was not right yet"; };
  while (second.n_past() < kKvPage) loop.step();
  loop.step();  // it guesses, and gives way
  ASSERT_EQ(second.n_past(), 0);
  ASSERT_TRUE(is_open()) << loop.draft(other).state;
  loop.cancel(holder);
  loop.step();
  first.clear();
  while (second.n_past() <= kKvPage) {
    EXPECT_TRUE(is_open()) << loop.draft(other).state << " after " << second.n_past() << " tokens";
    loop.step();
  }
  EXPECT_FALSE(is_open());  // the guess was wrong
}

TEST(RequestLoop, NeverLetsAStreamWaitForAPrompt) {
  Engine engine(plankton(), options_for(2, 16));
  Session first = std::move(engine.open_session().value()), second = std::move(engine.open_session().value());
  RequestLoop loop(engine);
  const auto writing = loop.add(first, task(0).prompt, task(0).options);
  loop.step();  // its prompt, and the first token
  const auto reading = loop.add(second, std::vector<TokenId>(100, 7), task(0).options);
  for (int step = 0; step < 6; ++step) {
    int n_tokens = 0;
    for (const RequestEvent& event : loop.step()) {
      n_tokens += event.request == *writing && std::holds_alternative<GeneratedToken>(event.what);
      if (const auto* progress = std::get_if<PromptProgress>(&event.what)) {
        EXPECT_EQ(event.request, *reading);
        EXPECT_EQ(progress->done, 15 * (step + 1));
      }
    }
    EXPECT_EQ(n_tokens, 1);
  }
}

TEST(RequestLoop, HasOneMomentForOtherWorkInEveryStep) {
  Engine engine(plankton(), options_for(1));
  Session session = std::move(engine.open_session().value());
  RequestLoop loop(engine);
  int n_moments = 0;
  const auto count = [&] { ++n_moments; };
  EXPECT_TRUE(loop.step(INT_MAX, count).empty());
  EXPECT_EQ(n_moments, 0) << "nothing was computed";
  const Task t = task(2);
  ASSERT_TRUE(loop.add(session, t.prompt, t.options).has_value());
  std::map<RequestId, Ended> all;
  int n_steps = 0;
  for (;; ++n_steps) {
    take_events(loop.step(16, count), all);
    if (loop.empty()) break;
    EXPECT_EQ(n_moments, n_steps + 1);
  }
  EXPECT_EQ(all.begin()->second.text.size(), static_cast<size_t>(t.options.max_tokens));
}

TEST(RequestLoop, StopsARequestAndGoesOnWithTheOthers) {
  Engine engine(plankton(), options_for(3));
  std::vector<Session> sessions;
  for (int i = 0; i < 3; ++i) sessions.push_back(std::move(engine.open_session().value()));
  RequestLoop loop(engine);
  const RequestId a = loop.add(sessions[0], task(0).prompt, task(0).options).value(),
                  b = loop.add(sessions[1], task(1).prompt, task(1).options).value(),
                  c = loop.add(sessions[2], std::vector<TokenId>(100, 7), task(2).options).value();
  EXPECT_FALSE(loop.add(sessions[0], task(0).prompt, task(0).options).has_value());  // has one
  std::map<RequestId, Ended> ended;
  for (int i = 0; i < 3; ++i) take_events(loop.step(), ended);
  EXPECT_LT(ended[c].n_prompt, 100);
  loop.cancel(a);
  loop.cancel(c);
  loop.cancel(12345);
  while (!loop.empty()) take_events(loop.step(), ended);
  EXPECT_EQ(ended[a].reason, FinishReason::Cancelled);
  EXPECT_EQ(ended[b].reason, FinishReason::Length);
  EXPECT_EQ(ended[c].reason, FinishReason::Cancelled);
  EXPECT_EQ(ended[a].text.size(), 3u);
  EXPECT_EQ(sessions[0].n_past(), static_cast<int>(task(0).prompt.size()) + 3);
  EXPECT_EQ(sessions[2].n_past(), ended[c].n_prompt);
  EXPECT_TRUE(ended[c].text.empty());
  // The sessions can go on.
  EXPECT_TRUE(loop.add(sessions[0], {}, task(0).options).has_value());
  EXPECT_FALSE(loop.add(sessions[2], {}, task(0).options).has_value());  // nothing to continue from
}

TEST(RequestLoop, RefusesWhatCannotRun) {
  Engine engine(plankton(), options_for(1));
  Session session = std::move(engine.open_session().value());
  RequestLoop loop(engine);
  EXPECT_FALSE(loop.add(session, {}, {}).has_value());
  EXPECT_EQ(loop.add(session, std::vector<TokenId>(257, 1), {}).error().code, ErrorCode::ContextFull);
  EXPECT_FALSE(loop.add(session, std::vector<TokenId>{4096}, {}).has_value());
  GenerateOptions bad;
  bad.sampling.top_p = 2.0f;
  EXPECT_FALSE(loop.add(session, std::vector<TokenId>{1}, bad).has_value());
  EXPECT_TRUE(loop.empty());
  EXPECT_TRUE(loop.step().empty());
}

TEST(Session, SaysNothingAfterItWasAskedToStop) {
  Engine engine(plankton(), options_for(1));
  Session session = std::move(engine.open_session().value());
  ASSERT_TRUE(session.append(task(0).prompt).ok());
  for (const int n : {1, 3}) {
    int n_tokens = 0;
    const int before = session.n_past();
    const auto result =
        session.generate(task(0).options, [&](const GeneratedToken&) { return ++n_tokens < n; });
    ASSERT_TRUE(result.has_value());
    EXPECT_EQ(result->reason, FinishReason::Cancelled);
    EXPECT_EQ(n_tokens, n);
    EXPECT_EQ(session.n_past(), before + n);
  }
}

}  // namespace
}  // namespace thermo
