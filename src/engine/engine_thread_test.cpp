// Requests from other threads: each writes what it writes alone, joins while others run, and leaves when
// told.
#include "engine/engine_thread.h"

#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <functional>
#include <future>
#include <thread>

#include "engine/request_queue.h"
#include "engine/scripted_engine.h"
#include "engine/testing/token_listener.h"
#include "gguf/gguf_file.h"
#include "model/model_config.h"

namespace thermo {
namespace {

using Listener = TokenListener;

const GgufFile& plankton() {
  static const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  return file;
}

EngineOptions options_for(int n_sequences) {
  EngineOptions options;
  options.n_ctx = 256;
  options.n_threads = 2;
  options.n_batch = 32;
  options.n_sequences = n_sequences;
  return options;
}

std::vector<TokenId> prompt_of(int i, int n) {
  std::vector<TokenId> prompt;
  for (int k = 0; k < n; ++k) prompt.push_back((331 * i + 17 * k * (k + 3)) % 4000);
  return prompt;
}

TEST(EngineThread, WritesTogetherWhatEachWritesAlone) {
  std::vector<std::vector<TokenId>> want;
  for (const bool together : {false, true}) {
    Engine engine(plankton(), options_for(together ? 3 : 1));
    EngineThread service(engine, {});
    std::vector<Listener> listeners(7);
    for (int i = 0; i < 7; ++i) {
      ASSERT_TRUE(service.submit(request_of(listeners[i], prompt_of(i, 9 + 20 * i), 12 + i)));
      if (!together) listeners[i].wait();
    }
    for (int i = 0; i < 7; ++i) {
      const TokensEnded ended = listeners[i].wait();
      EXPECT_EQ(ended.reason, FinishReason::Length);
      EXPECT_EQ(ended.usage.n_completion, 12 + i);
      EXPECT_EQ(ended.usage.n_prompt, 9 + 20 * i);
      if (!together)
        want.push_back(listeners[i].text());
      else
        EXPECT_EQ(listeners[i].text(), want[static_cast<size_t>(i)]) << i;
    }
    const TokenServiceState state = service.state();
    EXPECT_EQ(state.n_running, 0);
    EXPECT_EQ(state.n_waiting, 0);
  }
}

// Waking a client for each of thousands of tokens a second took a tenth of the time of a small model.
TEST(EngineThread, TellsOfTokensOnceAMillisecondAtMost) {
  Engine engine(plankton(), options_for(1));
  EngineThread service(engine, {});
  Listener listener;
  TokenRequest request = request_of(listener, prompt_of(1, 30), 200);
  std::vector<std::chrono::steady_clock::time_point> told;  // of the engine's thread until the end
  request.on_event = [&told, tell = request.on_event](const TokenEvent& event) {
    if (std::holds_alternative<TokensWritten>(event)) told.push_back(std::chrono::steady_clock::now());
    tell(event);
  };
  ASSERT_TRUE(service.submit(std::move(request)));
  listener.wait();
  EXPECT_EQ(listener.text().size(), 200u);
  ASSERT_GE(told.size(), 2u);  // the first token, and the last
  for (size_t i = 1; i + 1 < told.size(); ++i)
    EXPECT_GE(told[i] - told[i - 1], std::chrono::milliseconds(1)) << i;
}

TEST(EngineThread, WritesNothingAfterAStopText) {
  Engine engine(plankton(), options_for(1));
  EngineThread service(engine, {});
  Listener listener;
  TokenRequest request = request_of(listener, prompt_of(1, 30), 50);
  request.options.ends_after = [n = 0](TokenId) mutable { return ++n == 7; };
  ASSERT_TRUE(service.submit(std::move(request)));
  const TokensEnded ended = listener.wait();
  EXPECT_EQ(ended.reason, FinishReason::StopText);
  EXPECT_EQ(ended.usage.n_completion, 7);
  EXPECT_EQ(listener.text().size(), 7u);
}

TEST(EngineThread, ComputesOnlyWhatIsNewInTheNextTurn) {
  Engine engine(plankton(), options_for(2));
  EngineThread service(engine, {});
  std::vector<TokenId> prompt = prompt_of(1, 80);
  Listener first, other, second, edited;
  (void)service.submit(request_of(first, prompt, 10));
  EXPECT_EQ(first.wait().usage.n_cached, 0);
  (void)service.submit(request_of(other, prompt_of(2, 40), 4));
  EXPECT_EQ(other.wait().usage.n_cached, 0);

  const std::vector<TokenId> answer = first.text();
  prompt.insert(prompt.end(), answer.begin(), answer.end());
  prompt.push_back(17);
  (void)service.submit(request_of(second, prompt, 4));
  EXPECT_GE(second.wait().usage.n_cached, 80 + 9);

  // A change inside the answer: what comes before the mark is there still.
  Listener marked;
  TokenRequest request = request_of(marked, prompt_of(3, 60), 6);
  request.marks = {50};
  (void)service.submit(std::move(request));
  marked.wait();
  std::vector<TokenId> changed = prompt_of(3, 60);
  changed[55] += 1;
  (void)service.submit(request_of(edited, changed, 4));
  EXPECT_EQ(edited.wait().usage.n_cached, 50);
}

TEST(EngineThread, EndsWhatIsCancelledAndNothingElse) {
  Engine engine(plankton(), options_for(1));
  EngineThread service(engine, {});
  Listener running, waiting, next;
  running.hold_at_tokens(3);
  const RequestHandle a = *service.submit(request_of(running, prompt_of(1, 10), -1));
  const RequestHandle b = *service.submit(request_of(waiting, prompt_of(2, 10), 5));
  (void)service.submit(request_of(next, prompt_of(3, 10), 5));
  running.wait_for_tokens(3);
  service.cancel(b);
  EXPECT_EQ(waiting.wait().reason, FinishReason::Cancelled);
  service.cancel(a);
  service.cancel(a);  // a late one meets nobody
  running.release();
  EXPECT_EQ(running.wait().reason, FinishReason::Cancelled);
  EXPECT_EQ(next.wait().reason, FinishReason::Length);
  service.cancel(a);
}

// The second and third answer to a prompt read nothing, also while the first one is written.
TEST(EngineThread, SharesThePromptOfABusySlot) {
  for (const char* name : {"qwen3moe", "qwen35moe", "laguna"}) {
    const GgufFile file(std::string(THERMO_TEST_DATA) + "/" + name + "-f32.gguf");
    EngineOptions options = options_for(3);
    options.n_ctx = 1000;
    Engine engine(file, options);
    std::vector<TokenId> prompt;
    for (int k = 0; k < 400; ++k) prompt.push_back(17 * k * (k + 3) % engine.config().n_vocab);
    EngineThread thread(engine, {});
    const auto submit = [&](Listener& listener, int n_tokens) {
      TokenRequest request = request_of(listener, prompt, n_tokens);
      request.marks = {300};
      ASSERT_TRUE(thread.submit(std::move(request)).has_value());
    };
    Listener first, second, third;
    submit(first, 400);
    first.wait_for_tokens(5);
    submit(second, 60);
    submit(third, 60);
    EXPECT_GE(second.wait().usage.n_cached, 300) << name;
    EXPECT_GE(third.wait().usage.n_cached, 300) << name;
    first.wait();
    EXPECT_EQ(second.text(), third.text());
    const std::vector<TokenId> text = first.text();
    EXPECT_EQ(second.text(), std::vector<TokenId>(text.begin(), text.begin() + 60)) << name;
  }
}

// Six requests in four slots with pages for little more than one context.
TEST(EngineThread, SharesAPoolThatIsTooSmall) {
  EngineOptions options = options_for(4);
  options.n_ctx = 800;
  options.n_batch = 64;
  options.n_pages = 4;
  Engine engine(plankton(), options);
  std::vector<std::vector<TokenId>> want;
  for (int i = 0; i < 6; ++i) {
    EngineThread alone(engine, {});
    Listener listener;
    ASSERT_TRUE(alone.submit(request_of(listener, prompt_of(i, 190 + 20 * i), 180)).has_value());
    listener.wait();
    want.push_back(listener.text());
  }
  EngineThread together(engine, {});
  std::vector<Listener> listeners(6);
  for (int i = 0; i < 6; ++i)
    ASSERT_TRUE(
        together.submit(request_of(listeners[static_cast<size_t>(i)], prompt_of(i, 190 + 20 * i), 180))
            .has_value());
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_FALSE(listeners[i].wait().error) << i;
    EXPECT_EQ(listeners[i].text(), want[i]) << i;
  }
}

// A request waits for the pages of one whose reader does not keep up, and costs nothing meanwhile.
TEST(EngineThread, WaitsForThePagesOfAPausedRequest) {
  EngineOptions options = options_for(2);
  options.n_ctx = 500;
  options.n_pages = 2;
  Engine engine(plankton(), options);
  EngineThread thread(engine, {});
  Listener slow, next;
  slow.hold_at_tokens(3);
  const auto handle = thread.submit(request_of(slow, prompt_of(1, 300), 100));
  ASSERT_TRUE(handle.has_value());
  slow.wait_for_tokens(3);
  thread.pause(*handle, true);
  ASSERT_TRUE(thread.submit(request_of(next, prompt_of(2, 300), 10)).has_value());
  slow.release();
  while (thread.state().n_paused == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const std::clock_t begin = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 0.15);
  EXPECT_EQ(thread.state().n_waiting, 1);
  EXPECT_TRUE(next.text().empty());
  thread.pause(*handle, false);
  EXPECT_FALSE(slow.wait().error);
  EXPECT_FALSE(next.wait().error);
  EXPECT_EQ(slow.text().size(), 100u);
  EXPECT_EQ(next.text().size(), 10u);
}

TEST(EngineThread, PausesAndGoesOn) {
  Engine engine(plankton(), options_for(2));
  Listener alone, paused;
  EngineThread service(engine, {});
  (void)service.submit(request_of(alone, prompt_of(1, 10), 40));
  alone.wait();
  paused.hold_at_tokens(2);
  const RequestHandle handle = *service.submit(request_of(paused, prompt_of(1, 10), 40));
  paused.wait_for_tokens(2);
  service.pause(handle, true);
  paused.release();
  Listener other;
  (void)service.submit(request_of(other, prompt_of(2, 10), 60));
  other.wait();
  EXPECT_LT(paused.text().size(), 40u);
  service.pause(handle, false);
  paused.wait();
  EXPECT_EQ(paused.text(), alone.text());
}

// A reader that wakes up and then goes away, both during one step of another request.
TEST(EngineThread, EndsAParkedRequestThatIsToGoOnAndCancelledAtOnce) {
  Engine engine(plankton(), options_for(1));
  Listener slow, other, last;
  EngineThread service(engine, {.quantum = 4});
  // Calls a function of the engine's thread when the first token is there.
  const auto at_first_token = [](TokenRequest request, std::function<void()> function) {
    request.on_event = [on_event = std::move(request.on_event), function = std::move(function),
                        called = false](TokenEvent event) mutable {
      if (std::holds_alternative<TokensWritten>(event) && !std::exchange(called, true)) function();
      on_event(std::move(event));
    };
    return request;
  };
  std::promise<RequestHandle> promised;
  const std::shared_future<RequestHandle> handle = promised.get_future();
  promised.set_value(*service.submit(
      at_first_token(request_of(slow, prompt_of(1, 10), 200), [&] { service.pause(handle.get(), true); })));
  (void)service.submit(at_first_token(request_of(other, prompt_of(2, 10), 60), [&] {
    service.pause(handle.get(), false);
    service.cancel(handle.get());
  }));
  EXPECT_EQ(slow.wait().reason, FinishReason::Cancelled);
  EXPECT_EQ(other.wait().reason, FinishReason::Length);
  EXPECT_EQ(service.state().n_waiting, 0);
  (void)service.submit(request_of(last, prompt_of(3, 10), 5));
  EXPECT_EQ(last.wait().reason, FinishReason::Length);
}

TEST(EngineThread, RefusesWhatDoesNotFitAndWhatNobodyWaitsFor) {
  Engine engine(plankton(), options_for(1));
  Listener unused, long_one;
  std::vector<Listener> others(3);
  EngineThread service(engine, {.max_waiting = 2});
  EXPECT_EQ(service.submit(request_of(unused, {}, 4)).error().code, ErrorCode::InvalidArgument);
  EXPECT_EQ(service.submit(request_of(unused, {5000}, 4)).error().code, ErrorCode::InvalidArgument);
  EXPECT_EQ(service.submit(request_of(unused, prompt_of(1, 256), 4)).error().code, ErrorCode::ContextFull);
  (void)service.submit(request_of(long_one, prompt_of(1, 10), 200));
  int n_refused = 0;
  for (Listener& other : others) {
    const Result<RequestHandle> handle = service.submit(request_of(other, prompt_of(2, 10), 2));
    if (handle) continue;
    EXPECT_EQ(handle.error().code, ErrorCode::Busy);
    ++n_refused;
  }
  EXPECT_EQ(n_refused, 1);
}

TEST(EngineThread, LetsKeysTakeTurns) {
  RequestQueue queue;
  const auto push = [&](uint64_t epoch, const char* key, const char* session) {
    TokenRequest request;
    request.fairness_key = key;
    request.session_key = session;
    queue.push({{epoch}, std::move(request), {}});
  };
  push(1, "a", "x");
  push(2, "a", "x");
  push(3, "a", "y");
  push(4, "b", "z");
  std::vector<uint64_t> order;
  while (!queue.empty()) order.push_back(queue.pop().handle.epoch);
  EXPECT_EQ(order, (std::vector<uint64_t>{1, 4, 3, 2}));
}

TEST(EngineThread, LetsOthersBeginWhileATextIsRead) {
  RequestQueue queue;
  for (const uint64_t epoch : {1, 2, 3}) {
    TokenRequest request;
    request.prompt.resize(100);
    queue.push({{epoch}, std::move(request), {}});
  }
  EXPECT_EQ(queue.oldest_for_text(), nullptr);
  queue.next()->waits_for_text = true;
  EXPECT_EQ(queue.oldest_for_text()->handle.epoch, 1u);
  EXPECT_EQ(queue.n_ready(), 2);
  EXPECT_EQ(queue.pop().handle.epoch, 2u);
  queue.for_each([](WaitingRequest& one) { one.waits_for_text = true; });
  EXPECT_EQ(queue.next(), nullptr);
  EXPECT_FALSE(queue.empty());
  queue.for_each([](WaitingRequest& one) { one.waits_for_text = one.handle.epoch == 1; });
  EXPECT_EQ(queue.pop().handle.epoch, 3u);
}

TEST(EngineThread, CountsWhatWaitingRequestsHaveToCompute) {
  RequestQueue queue;
  TokenRequest request;
  request.prompt.resize(100);
  queue.push({{1}, request, {}});
  queue.push({{2}, request, {}});
  EXPECT_EQ(queue.n_tokens(), 200);
  queue.for_each([](WaitingRequest& one) { one.n_to_compute -= one.handle.epoch == 1 ? 90 : 0; });
  EXPECT_EQ(queue.n_tokens(), 110);
  queue.remove({1});
  EXPECT_EQ(queue.n_tokens(), 100);

  // A prompt that the engine knows does not count once it has looked at it.
  Engine engine(plankton(), options_for(1));
  Listener first, running, waiting;
  EngineThread service(engine, {});
  std::vector<TokenId> prompt = prompt_of(1, 100);
  (void)service.submit(request_of(first, prompt, 10));
  first.wait();
  for (const std::vector<TokenId>& more : {first.text(), prompt_of(3, 20)})
    prompt.insert(prompt.end(), more.begin(), more.end());
  running.hold_at_tokens(3);
  (void)service.submit(request_of(running, prompt_of(2, 10), 120));
  running.wait_until_held();
  (void)service.submit(request_of(waiting, prompt, 1));
  EXPECT_EQ(service.state().waiting_tokens, 130);
  for (int i = 0; i < 3; ++i) {  // a step is over then, so the engine has looked at its queue
    running.hold_at_next_token();
    running.wait_until_held();
  }
  EXPECT_EQ(service.state().n_waiting, 1);
  EXPECT_LT(service.state().waiting_tokens, 50);
  running.release();
}

TEST(ScriptedEngine, PlaysItsScriptsAndObeys) {
  ScriptedEngine service({.scripts = {{1, 2, 3}, {4, 5, 6, 7}}, .n_slots = 1, .tokens_per_second = 200.0});
  Listener first, second, third;
  TokenRequest request = request_of(first, {9, 9}, -1);
  (void)service.submit(std::move(request));
  request = request_of(second, {9}, -1);
  request.options.stop_tokens = {6};
  (void)service.submit(std::move(request));
  const RequestHandle handle = *service.submit(request_of(third, {9}, -1));
  service.cancel(handle);
  EXPECT_EQ(first.wait().reason, FinishReason::Stop);
  EXPECT_EQ(first.text(), (std::vector<TokenId>{1, 2, 3}));
  EXPECT_EQ(second.wait().reason, FinishReason::Stop);
  EXPECT_EQ(second.text(), (std::vector<TokenId>{4, 5}));
  EXPECT_EQ(third.wait().reason, FinishReason::Cancelled);
}

}  // namespace
}  // namespace thermo
