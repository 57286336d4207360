// Answers by way of a service that plays texts: what is shown, how they end, and what was measured.
#include "chat/answer.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "embedded/embedded_model.h"
#include "engine/scripted_engine.h"
#include "gguf/gguf_file.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer instance = [] {
    GgufFile file(embedded_model(), "embedded");
    return Tokenizer(*read_vocab(file));
  }();
  return instance;
}

AnswerRequest request_with(int max_tokens = -1) {
  AnswerRequest request;
  request.prompt = {1, 2, 3};
  request.max_tokens = max_tokens;
  return request;
}

ScriptedEngineOptions playing(const std::string& text, double tokens_per_second = 0.0) {
  ScriptedEngineOptions options;
  options.scripts = {tokenizer().encode(text)};
  options.tokens_per_second = tokens_per_second;
  return options;
}

TEST(StopWatch, EndsWithTheTokenThatCompletesAStopText) {
  EXPECT_FALSE(stop_watch(tokenizer(), {}));
  const auto ends_after = stop_watch(tokenizer(), {.stops = {"three"}});
  std::string read;
  for (const TokenId token : tokenizer().encode("One two three four five.")) {
    read += tokenizer().token_bytes(token);
    const bool ends = ends_after(token);
    ASSERT_EQ(ends, read.find("three") != std::string::npos) << read;
    if (ends) return;
  }
  FAIL() << "it did not end";
}

TEST(GenerateAnswer, ShowsWhatComesAndCountsIt) {
  ScriptedEngine service(playing("One two three four five."));
  const auto n_tokens = static_cast<int>(tokenizer().encode("One two three four five.").size());
  std::string shown;
  int n_read = 0;
  const Answer answer = generate_answer(service, tokenizer(), request_with(),
                                        {.on_prompt = [&](int done, int) { n_read = done; },
                                         .on_events =
                                             [&](const AnswerParser::Events& events) {
                                               for (const AnswerEvent& event : events) shown += event.text;
                                             },
                                         .cancelled = {}});
  EXPECT_EQ(shown, "One two three four five.");
  EXPECT_EQ(answer.content, shown);
  EXPECT_EQ(answer.finish_reason, "stop");
  EXPECT_EQ(n_read, 3);
  EXPECT_EQ(answer.stats.n_prompt, 3);
  EXPECT_GE(answer.stats.n_completion, n_tokens);

  const Answer cut = generate_answer(service, tokenizer(), request_with(2), {});
  EXPECT_EQ(cut.finish_reason, "length");
  EXPECT_EQ(cut.stats.n_completion, 2);
}

// Tokens that were written before the service heard of it are not shown.
// Where nothing held the answer to anything, its reasoning was said to be none.
TEST(GenerateAnswer, SaysHowReasoningEnded) {
  AnswerRequest request = request_with();
  request.answer.starts_in_reasoning = true;
  ScriptedEngine closing(playing("hm</think>\n\nYes."));
  EXPECT_EQ(generate_answer(closing, tokenizer(), request, {}).stats.reasoning_close, "natural");
  ScriptedEngine open(playing("hm"));
  EXPECT_EQ(generate_answer(open, tokenizer(), request, {}).stats.reasoning_close, "");
  ScriptedEngine plain(playing("Yes."));
  EXPECT_EQ(generate_answer(plain, tokenizer(), request_with(), {}).stats.reasoning_close, "");
}

TEST(GenerateAnswer, EndsAtAStopTextAndWhenItIsTold) {
  ScriptedEngine service(playing("One two three four five six seven eight nine ten."));
  AnswerRequest request = request_with();
  request.answer.stops = {" four"};
  const Answer stopped = generate_answer(service, tokenizer(), request, {});
  EXPECT_EQ(stopped.content, "One two three");
  EXPECT_EQ(stopped.stop_text, " four");
  EXPECT_EQ(stopped.finish_reason, "stop");
  EXPECT_FALSE(stopped.interrupted);
  EXPECT_LT(stopped.stats.n_completion, 8);

  bool leave = false;
  std::string shown;
  const Answer interrupted = generate_answer(service, tokenizer(), request_with(),
                                             {.on_prompt = {},
                                              .on_events =
                                                  [&](const AnswerParser::Events& events) {
                                                    for (const AnswerEvent& event : events)
                                                      shown += event.text;
                                                    leave = shown.size() > 6;
                                                  },
                                              .cancelled = [&] { return leave; }});
  EXPECT_TRUE(interrupted.interrupted);
  EXPECT_EQ(interrupted.content, shown);
  EXPECT_LT(shown.size(), 20u);
  EXPECT_EQ(service.state().n_running, 0);
}

TEST(GenerateAnswer, LeavesAPromptThatIsBeingRead) {
  ScriptedEngineOptions options = playing("One.");
  options.prompt_tokens_per_second = 1.0;
  ScriptedEngine service(options);
  const Answer answer = generate_answer(service, tokenizer(), request_with(),
                                        {.on_prompt = {}, .on_events = {}, .cancelled = [] { return true; }});
  EXPECT_TRUE(answer.interrupted);
  EXPECT_EQ(answer.content, "");
  EXPECT_EQ(answer.stats.n_completion, 0);
}

TEST(GenerateAnswer, SaysWhyThereIsNone) {
  ScriptedEngine service(playing("One."));
  service.break_down("the device is gone");
  try {
    generate_answer(service, tokenizer(), request_with(), {});
    FAIL() << "an answer of a broken device";
  } catch (const ThermoError& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::DeviceFault);
  }
}

}  // namespace
}  // namespace thermo
