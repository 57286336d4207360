// Bodies of clients to requests: shapes as clients send them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "server/api/generation_request.h"
#include "server/api/sealed_reasoning.h"

namespace thermo {
namespace {

using ::testing::ElementsAre;

RequestDefaults defaults() {
  RequestDefaults d;
  d.n_vocab = 1000;
  d.n_ctx = 4096;
  return d;
}
GenerationRequest chat(const std::string& body) {
  return read_chat_request(Json::parse(body), defaults());
}
GenerationRequest messages(const char* body) {
  return read_messages_request(Json::parse(body), defaults());
}
GenerationRequest responses(const std::string& body) {
  return read_responses_request(Json::parse(body), defaults());
}

std::vector<std::string> shown(const GenerationRequest& request) {
  std::vector<std::string> out;
  for (const Turn& turn : request.turns) {
    std::string text = turn.role + ":" + turn.content;
    if (!turn.reasoning.empty()) text += " (" + turn.reasoning + ")";
    for (const ToolCall& call : turn.tool_calls) text += " " + call.name + call.arguments;
    out.push_back(text);
  }
  return out;
}

template <class Read>
std::string refusal(Read read) {
  try {
    read();
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    return error.code + " " + error.param;
  }
  return "accepted";
}

TEST(ChatRequest, JoinsPartsAndSystemTurns) {
  const GenerationRequest r = chat(R"({"messages": [
      {"role": "developer", "content": "a"}, {"role": "system", "content": [{"type": "text", "text": "b"}]},
      {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
      {"role": "system", "content": "late"}]})");
  EXPECT_THAT(shown(r),
              ElementsAre("system:a\n\nb", "user:cd", "user:<system-reminder>\nlate\n</system-reminder>"));
}

TEST(ChatRequest, SortsResultsByTheirCalls) {
  const GenerationRequest r = chat(R"({"messages": [{"role": "user", "content": "q"},
      {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "no JSON"}}]},
      {"role": "tool", "tool_call_id": "9", "content": "nine"}, {"role": "tool", "tool_call_id": "2", "content": "two"},
      {"role": "tool", "tool_call_id": "1", "content": "one"}]})");
  EXPECT_THAT(shown(r), ElementsAre("user:q", "assistant: (hm) f{\"b\": 1, \"a\": 2} gno JSON", "tool:one",
                                    "tool:two", "tool:nine"));
}

// 16,000 results in reverse order took 8 s.
TEST(ChatRequest, SortsManyResultsAtOnce) {
  constexpr int kCalls = 100'000;
  Json calls = Json::array(), messages = Json::array({{{"role", "user"}, {"content", "q"}}});
  for (int i = 0; i < kCalls; ++i)
    calls.push_back({{"id", std::to_string(i)}, {"function", {{"name", "f"}, {"arguments", "{}"}}}});
  messages.push_back({{"role", "assistant"}, {"content", nullptr}, {"tool_calls", std::move(calls)}});
  for (int i = kCalls; i-- > 0;)
    messages.push_back(
        {{"role", "tool"}, {"tool_call_id", std::to_string(i)}, {"content", std::to_string(i)}});
  const auto begin = std::chrono::steady_clock::now();
  const GenerationRequest r = chat(Json{{"messages", std::move(messages)}}.dump());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));  // of minutes
  ASSERT_EQ(r.turns.size(), 2u + kCalls);
  EXPECT_EQ(r.turns[2].content, "0");
  EXPECT_EQ(r.turns.back().content, std::to_string(kCalls - 1));
}

// The call was left out and its result shown as a user's turn.
TEST(ChatRequest, ReadsCallsInTheirOldForm) {
  EXPECT_THAT(shown(chat(R"({"messages": [{"role": "user", "content": "q"},
      {"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": "{\"a\": 1}"}},
      {"role": "function", "name": "f", "content": "one"}]})")),
              ElementsAre("user:q", "assistant: f{\"a\": 1}", "tool:one"));
  EXPECT_EQ(
      refusal([] { chat(R"({"messages": [{"role": "assistant", "function_call": {"arguments": "{}"}}]})"); }),
      "missing_required_parameter messages[0].function_call.name");
}

TEST(ChatRequest, TakesReasoningFromWhereverItStands) {
  for (const char* answer :
       {R"("reasoning_content": "r", "content": "a")", R"("reasoning": "r", "content": "a")",
        R"("reasoning_details": [{"text": "r"}], "content": "a")",
        R"("content": "<think>\nr\n</think>\n\na")",
        R"("reasoning_content": "r", "content": "<think>\nr\n</think>\n\na")",
        R"("content": [{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "a"}])"}) {
    const std::string body =
        std::string(R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", )") + answer +
        "}]}";
    EXPECT_THAT(shown(chat(body.c_str())), ElementsAre("user:q", "assistant:a (r)")) << answer;
  }
}

TEST(ChatRequest, TurnsAResultWithoutACallIntoAUserTurn) {
  EXPECT_THAT(shown(chat(R"({"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]})")),
              ElementsAre("user:[tool result] x"));
}

// It was taken for what the user said.
TEST(MessagesRequest, KnowsAResultAfterWhatTheUserSaid) {
  EXPECT_THAT(shown(messages(R"({"max_tokens": 5, "messages": [{"role": "user", "content": "q"},
      {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
      {"role": "user", "content": [{"type": "text", "text": "wait"},
        {"type": "tool_result", "tool_use_id": "2", "content": "two"},
        {"type": "tool_result", "tool_use_id": "1", "content": "one"}]}]})")),
              ElementsAre("user:q", "assistant: f{}", "user:wait", "tool:one", "user:[tool result] two"));
}

TEST(ChatRequest, LeavesOlderImagesOutAndRefusesTheLast) {
  const char* image = R"([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])";
  const std::string old = std::string(R"({"messages": [{"role": "user", "content": )") + image +
                          R"(}, {"role": "user", "content": "q"}]})";
  EXPECT_THAT(shown(chat(old.c_str())), ElementsAre("user:[image omitted: image/png, 3 bytes]", "user:q"));
  const std::string last = std::string(R"({"messages": [{"role": "user", "content": )") + image + "}]}";
  EXPECT_EQ(refusal([&] { chat(last.c_str()); }), "unsupported_parameter messages[0].content[0].type");
}

TEST(CompletionsRequest, TakesWhatFollows) {
  const auto read = [](const char* body) { return read_completions_request(Json::parse(body), defaults()); };
  EXPECT_EQ(read(R"({"prompt": "a"})").suffix, "");
  EXPECT_EQ(read(R"({"prompt": "a", "suffix": null})").suffix, "");
  EXPECT_EQ(read(R"({"prompt": "a", "suffix": "b"})").suffix, "b");
  EXPECT_EQ(refusal([&] { read(R"({"prompt": "a", "suffix": 1})"); }), "invalid_value suffix");
  EXPECT_EQ(refusal([&] { read(R"({"prompt": "a", "suffix": "b", "echo": true})"); }), "invalid_value echo");
}

TEST(ChatRequest, TakesTheScopeOfLogProbabilities) {
  const auto scope = [](const std::string& value) {
    return chat((R"({"messages": [{"role": "user", "content": "q"}], "logprobs": true, "logprobs_scope": )" +
                 value + "}")
                    .c_str());
  };
  EXPECT_FALSE(scope("\"content\"").logprobs_of_all);
  EXPECT_TRUE(scope("\"all\"").logprobs_of_all);
  EXPECT_TRUE(scope("\"all\"").ignored_fields.empty());
  EXPECT_EQ(refusal([&] { scope("\"tools\""); }), "invalid_value logprobs_scope");
}

TEST(Requests, FollowThePolicyForImages) {
  const Json openai =
      Json::parse(R"([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])");
  const Json claude =
      Json::parse(R"([{"type": "image", "source": {"media_type": "image/png", "data": "AAAA"}}])");
  const auto read = [&](Dialect dialect, ImagePolicy policy, bool as_question) {
    RequestDefaults d = defaults();
    d.images = policy;
    const Json& image = dialect == Dialect::Messages ? claude : openai;
    Json turns = Json::array({{{"role", "user"}, {"content", image}}});
    if (!as_question) turns.push_back({{"role", "user"}, {"content", "q"}});
    return refusal([&] {
      const GenerationRequest r = dialect == Dialect::Chat ? read_chat_request({{"messages", turns}}, d)
                                  : dialect == Dialect::Messages
                                      ? read_messages_request({{"messages", turns}, {"max_tokens", 1}}, d)
                                      : read_responses_request({{"input", turns}}, d);
      EXPECT_EQ(r.turns[0].content, "[image omitted: image/png, 3 bytes]");
    });
  };
  for (const Dialect dialect : {Dialect::Chat, Dialect::Messages, Dialect::Responses}) {
    const std::string refused = std::string("unsupported_parameter ") +
                                (dialect == Dialect::Responses ? "input" : "messages") +
                                "[0].content[0].type";
    EXPECT_EQ(read(dialect, ImagePolicy::Auto, true), refused);
    EXPECT_EQ(read(dialect, ImagePolicy::Auto, false), "accepted");
    EXPECT_EQ(read(dialect, ImagePolicy::Refuse, true), refused);
    EXPECT_EQ(read(dialect, ImagePolicy::Refuse, false), refused);
    EXPECT_EQ(read(dialect, ImagePolicy::Placeholder, true), "accepted");
    EXPECT_EQ(read(dialect, ImagePolicy::Placeholder, false), "accepted");
  }
}

TEST(ChatRequest, NamesWhatItDoesNotKnow) {
  const GenerationRequest r =
      chat(R"({"messages": [{"role": "user", "content": "q"}], "store": true, "odd": 1,
      "tools": [{"type": "web_search"}]})");
  EXPECT_THAT(r.ignored_fields, ElementsAre("odd"));
  EXPECT_THAT(r.ignored_tools, ElementsAre("web_search"));
}

TEST(ChatRequest, ReadsLimitsEffortsAndFormats) {
  const GenerationRequest r =
      chat(R"({"messages": [{"role": "user", "content": "q"}], "max_completion_tokens": 7,
      "max_tokens": 9, "reasoning_effort": "low", "stop": "x", "seed": 18446744073709551615, "prompt_cache_key": "k",
      "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": {"type": "object"}}}})");
  EXPECT_EQ(r.max_tokens, 7);
  EXPECT_EQ(r.thinking, true);
  EXPECT_EQ(r.thinking_budget, 4032);
  EXPECT_EQ(r.sampling.seed, UINT64_MAX);
  EXPECT_EQ(r.session_key, "k");
  EXPECT_EQ(r.format.kind, OutputFormat::Kind::JsonSchema);
  EXPECT_TRUE(r.format.strict);
  EXPECT_EQ(chat(R"({"messages": [{"role": "user", "content": "q"}], "reasoning_effort": "none"})").thinking,
            false);
}

TEST(ChatRequest, TakesTextsAtWhichRunsEnd) {
  RequestDefaults d = defaults();
  std::vector<std::string> asked = {"nobody asked"};
  d.breakers_of = [&](const std::vector<std::string>& texts) {
    asked = texts;
    auto breakers = std::make_shared<DryBreakers>();
    for (size_t i = 0; i < texts.size(); ++i) breakers->add(std::vector<int32_t>{7});
    return breakers;
  };
  const auto read = [&](const std::string& more) {
    return read_chat_request(Json::parse(R"({"messages": [{"role": "user", "content": "a"}])" + more + "}"),
                             d);
  };
  EXPECT_EQ(read(R"(, "dry_sequence_breakers": ["\n"])").sampling.dry_breakers, nullptr);  // DRY is off
  EXPECT_THAT(asked, ElementsAre("nobody asked"));
  EXPECT_EQ(read(R"(, "dry_multiplier": 0.8, "dry_sequence_breakers": ["\n", "x"])")
                .sampling.dry_breakers->longest(),
            1);
  EXPECT_THAT(asked, ElementsAre("\n", "x"));
  read(R"(, "dry_multiplier": 0.8)");
  EXPECT_EQ(asked, usual_dry_breakers());
  read(R"(, "dry_multiplier": 0.8, "dry_sequence_breakers": [])");
  EXPECT_TRUE(asked.empty());
  const auto refused = [&](const std::string& list) {
    return refusal([&] { read(R"(, "dry_sequence_breakers": )" + list); });
  };
  EXPECT_EQ(refused(R"(["a", ""])"), "invalid_value dry_sequence_breakers[1]");
  EXPECT_EQ(refused("[3]"), "invalid_value dry_sequence_breakers[0]");
  EXPECT_EQ(refused('"' + std::string("a") + '"'), "invalid_value dry_sequence_breakers");
  EXPECT_EQ(refused("[\"" + std::string(41, 'a') + "\"]"), "invalid_value dry_sequence_breakers[0]");
  EXPECT_EQ(refused(Json(std::vector<std::string>(33, "a")).dump()), "invalid_value dry_sequence_breakers");
}

TEST(ChatRequest, TakesTheFormatOfReasoning) {
  RequestDefaults d = defaults();
  const auto read = [&](const std::string& more) {
    return read_chat_request(Json::parse(R"({"messages": [{"role": "user", "content": "a"}])" + more + "}"),
                             d)
        .reasoning_format;
  };
  EXPECT_EQ(read(""), ReasoningFormat::Apart);
  EXPECT_EQ(read(R"(, "reasoning_format": "deepseek-legacy")"), ReasoningFormat::Both);
  EXPECT_EQ(read(R"(, "reasoning_format": "none")"), ReasoningFormat::InText);
  d.reasoning_format = ReasoningFormat::Both;
  EXPECT_EQ(read(""), ReasoningFormat::Both);
  EXPECT_EQ(read(R"(, "reasoning_format": "auto")"), ReasoningFormat::Apart);
  EXPECT_EQ(refusal([&] { read(R"(, "reasoning_format": "loud")"); }),
            "unsupported_parameter reasoning_format");
}

TEST(ChatRequest, TakesEffortsAsTheModelHasThem) {
  RequestDefaults d = defaults();
  d.efforts = {{"none", 0}, {"high", 500}, {"xhigh", 600}, {"huge", 9}};
  const auto request = [&](const std::string& effort) {
    return read_chat_request(
        Json{{"messages", {{{"role", "user"}, {"content", "a"}}}}, {"reasoning_effort", effort}}, d);
  };
  const auto budget = [&](const std::string& effort) { return request(effort).thinking_budget; };
  EXPECT_EQ(budget("huge"), 9);
  EXPECT_EQ(budget("x-high"), 600);
  EXPECT_EQ(budget("none"), std::nullopt);
  // Clients send new names before a server knows them: an answer to them is better than none.
  EXPECT_EQ(budget("ultra"), 500);
  EXPECT_EQ(request("ultra").effort, "high");
  EXPECT_THAT(request("ultra").ignored_fields, ElementsAre("reasoning_effort"));
}

// They were dropped without a word.
TEST(Requests, SayWhatTheyDoNotTake) {
  EXPECT_THAT(responses(R"({"input": "x", "reasoning": {"effort": "ultra"}})").ignored_fields,
              ElementsAre("reasoning.effort"));
  EXPECT_THAT(messages(R"({"messages": [{"role": "user", "content": "x"}], "max_tokens": 5,
                           "output_config": {"effort": "ultra"}})")
                  .ignored_fields,
              ElementsAre("output_config.effort"));
  const std::string ask = R"({"messages": [{"role": "user", "content": "x"}], )";
  EXPECT_EQ(refusal([&] { chat(ask + R"("response_format": {}})"); }),
            "missing_required_parameter response_format.type");
  EXPECT_THAT(chat(ask + R"("web_search_options": {"a": 1}, "prediction": {"b": 2}, "id_slot": 0,
                            "cache_prompt": false})")
                  .ignored_fields,
              testing::UnorderedElementsAre("cache_prompt", "web_search_options", "prediction", "id_slot"));
  EXPECT_TRUE(chat(ask + R"("cache_prompt": true})").ignored_fields.empty());
}

TEST(ChatRequest, SaysWhereItIsWrong) {
  const auto with = [](const std::string& more) {
    return refusal(
        [&] { chat((R"({"messages": [{"role": "user", "content": "q"}], )" + more + "}").c_str()); });
  };
  EXPECT_EQ(with(R"("temperature": 6)"), "invalid_value temperature");
  EXPECT_EQ(with(R"("logit_bias": {"1000": 1})"), "invalid_value logit_bias.1000");
  EXPECT_EQ(with(R"("tool_choice": {"type": "function", "function": {"name": "f"}})"),
            "invalid_value tool_choice");
  // A list of no tools allowed all of them.
  const std::string tools = R"("tools": [{"type": "function", "function": {"name": "f"}}], )";
  EXPECT_EQ(with(tools + R"("tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []})"),
            "invalid_value tool_choice.tools");
  EXPECT_EQ(with(tools + R"("tool_choice": {"type": "allowed_tools", "mode": "required"})"),
            "missing_required_parameter tool_choice.tools");
  EXPECT_EQ(with(R"("stop": ["a", ""])"), "invalid_value stop");
  // Heartbeats without a pause filled the memory.
  EXPECT_EQ(with(R"("sse_ping_interval": 1e-9)"), "invalid_value sse_ping_interval");
  EXPECT_EQ(with(R"("response_format": {"type": "json_object"}, "grammar": "root ::= \"a\"")"),
            "invalid_value grammar");
  EXPECT_EQ(refusal([] { chat("{}"); }), "missing_required_parameter messages");
}

TEST(MessagesRequest, ReadsWhatClaudeCodeSends) {
  const GenerationRequest r = messages(R"({"model": "m", "max_tokens": 32000, "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "You are a tool.", "cache_control": {"type": "ephemeral"}}],
      "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "system", "content": "remember"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"},
          {"type": "text", "text": "ok"}, {"type": "tool_use", "id": "u1", "name": "Read", "input": {"b": 1, "a": 2}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u1", "is_error": true,
          "content": [{"type": "text", "text": "gone"}]}, {"type": "text", "text": "go on"}]}],
      "tools": [{"name": "Read", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web_search"}],
      "metadata": {"user_id": "me"}, "context_management": {}})");
  EXPECT_THAT(
      shown(r),
      ElementsAre("system:You are a tool.", "user:hi", "user:<system-reminder>\nremember\n</system-reminder>",
                  "assistant:ok (t) Read{\"b\":1,\"a\":2}", "tool:Error: gone", "user:go on"));
  EXPECT_EQ(r.tools.size(), 1u);
  EXPECT_THAT(r.ignored_tools, ElementsAre("web_search_20250305"));
  EXPECT_TRUE(r.ignored_fields.empty());
  EXPECT_EQ(r.user, "me");
  EXPECT_EQ(r.thinking, false) << "this API thinks when it is told to";
}

// An effort without "thinking" had no effect, and nothing said so.
TEST(MessagesRequest, SaysThatAnEffortNeedsThinking) {
  Json body = {{"messages", Json::array({{{"role", "user"}, {"content", "q"}}})},
               {"output_config", {{"effort", "low"}}}};
  RequestDefaults d = defaults();
  GenerationRequest r = read_messages_request(body, d);
  EXPECT_EQ(r.thinking, false);
  EXPECT_EQ(r.effort, "");
  EXPECT_THAT(r.ignored_fields, ElementsAre("output_config.effort"));
  body["thinking"] = {{"type", "disabled"}};
  EXPECT_THAT(read_messages_request(body, d).ignored_fields, ElementsAre("output_config.effort"));
  body["thinking"] = {{"type", "adaptive"}};
  r = read_messages_request(body, d);
  EXPECT_EQ(r.thinking_budget, 4032);
  EXPECT_TRUE(r.ignored_fields.empty());
  // Where the template decides whether to think, the effort holds.
  body.erase("thinking");
  d.anthropic_thinking = true;
  r = read_messages_request(body, d);
  EXPECT_EQ(r.thinking_budget, 4032);
  EXPECT_TRUE(r.ignored_fields.empty());
}

TEST(MessagesRequest, HasOneAnswer) {
  EXPECT_EQ(refusal([] { messages(R"({"n": 2, "messages": [{"role": "user", "content": "x"}]})"); }),
            "unsupported_parameter n");
}

// Titles and citations were dropped without a word.
TEST(MessagesRequest, NamesWhatItDoesNotReadOfDocuments) {
  const GenerationRequest r = messages(R"({"messages": [{"role": "user", "content": [
      {"type": "document", "title": "T", "context": "C", "citations": {"enabled": true}, "cache_control": {"type": "ephemeral"},
       "source": {"type": "text", "media_type": "text/plain", "data": "a"}},
      {"type": "document", "citations": {"enabled": false}, "source": {"type": "content", "content": [
        {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}},
      {"type": "search_result", "source": "https://x", "content": [{"type": "text", "text": "d"}]}]}]})");
  EXPECT_THAT(shown(r), ElementsAre("user:abcd"));
  const std::string path = "messages[0].content";
  EXPECT_THAT(r.ignored_fields, ElementsAre(path + "[0].citations", path + "[0].title", path + "[0].context",
                                            path + "[2].source"));
}

// Marks stay where they are in the text, whatever is put before it.
TEST(MessagesRequest, KeepsCacheMarksInsideOfTurns) {
  const GenerationRequest r = messages(R"({"system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "And kind."}],
      "messages": [
        {"role": "user", "content": [{"type": "text", "text": "A book.", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "A question."}]},
        {"role": "assistant", "content": "An answer."},
        {"role": "system", "content": [{"type": "text", "text": "remember", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u1", "content": "gone",
                                      "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
        {"role": "user", "content": [{"type": "text", "text": "q", "cache_control": null}]}]})");
  std::vector<std::string> before;
  for (const Turn& turn : r.turns)
    for (const size_t mark : turn.marks) before.push_back(turn.content.substr(0, mark));
  EXPECT_THAT(before,
              ElementsAre("Be brief.", "A book.", "<system-reminder>\nremember", "[tool result] gone"));
  EXPECT_TRUE(r.ignored_fields.empty());
}

TEST(MessagesRequest, ContinuesAnAnswerThatWasBegun) {
  EXPECT_TRUE(
      messages(R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The"}]})")
          .continue_last_turn);
}

// The empty turn of a user came last and was continued instead of the answer.
TEST(MessagesRequest, ContinuesAnAnswerToNobody) {
  const GenerationRequest r =
      messages(R"({"system": "s", "messages": [{"role": "assistant", "content": "The"}]})");
  EXPECT_TRUE(r.continue_last_turn);
  EXPECT_THAT(shown(r), ElementsAre("system:s", "user:", "assistant:The"));
  EXPECT_THAT(shown(chat(R"({"messages": [{"role": "assistant", "content": "The"}],
                             "continue_final_message": true})")),
              ElementsAre("user:", "assistant:The"));
  EXPECT_THAT(shown(chat(R"({"messages": [{"role": "assistant", "content": "The"}]})")),
              ElementsAre("assistant:The", "user:"));
}

TEST(ResponsesRequest, ReadsWhatCodexSends) {
  const GenerationRequest r = responses(R"({"instructions": "i", "input": [
      {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
      {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
      {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}], "encrypted_content": null},
      {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
      {"type": "function_call", "call_id": "c", "name": "run", "namespace": "shell", "arguments": "{}"},
      {"type": "function_call_output", "call_id": "c", "output": "done"},
      {"type": "custom_tool_call", "call_id": "p", "name": "patch", "input": "*** x"},
      {"type": "custom_tool_call_output", "call_id": "p", "output": [{"type": "input_text", "text": "ok"}]},
      {"type": "mystery"}],
      "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"},
        {"type": "namespace", "name": "shell", "tools": [{"type": "function", "name": "run"}]},
        {"type": "custom", "name": "patch", "format": {"type": "grammar"}}],
      "store": false, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "medium", "summary": "auto"}})");
  EXPECT_THAT(shown(r), ElementsAre("system:i\n\nd", "user:u", "assistant:a (r) shell__run{}", "tool:done",
                                    "assistant: patch{\"input\":\"*** x\"}", "tool:ok"));
  EXPECT_THAT(r.ignored_fields, ElementsAre("input[8]"));
  EXPECT_EQ(r.tools.size(), 3u);
  EXPECT_EQ(r.tool_origins.at("shell__run").space, "shell");
  EXPECT_TRUE(r.tool_origins.at("patch").custom);
  EXPECT_EQ(r.thinking_budget, 16128);
}

TEST(ResponsesRequest, ChoosesAToolOfANamespace) {
  const auto names = [](const std::string& choice) {
    return responses(R"({"input": "x", "tools": [{"type": "namespace", "name": "shell",
        "tools": [{"type": "function", "name": "run"}]}], "tool_choice": )" +
                     choice + "}")
        .tool_choice.names;
  };
  const std::string run = R"({"type": "function", "namespace": "shell", "name": "run"})";
  EXPECT_THAT(names(run), ElementsAre("shell__run"));
  EXPECT_THAT(names(R"({"type": "allowed_tools", "mode": "auto", "tools": [)" + run + "]}"),
              ElementsAre("shell__run"));
}

// Clients that drop the text of reasoning send its sealed copy back. Others' copies say nothing.
TEST(ResponsesRequest, OpensReasoningThatItSealed) {
  const std::string sealed = seal_reasoning("It is 42: \"π\".\n");
  const auto turns = [](const Json& reasoning) {
    const Json body = {{"input", Json::array({{{"role", "user"}, {"content", "q"}},
                                              reasoning,
                                              {{"role", "assistant"}, {"content", "a"}},
                                              {{"role", "user"}, {"content", "r"}}})}};
    return shown(read_responses_request(body, defaults()));
  };
  Json item = {{"type", "reasoning"}, {"summary", Json::array()}, {"content", nullptr}};
  item["encrypted_content"] = sealed;
  EXPECT_THAT(turns(item), ElementsAre("user:q", "assistant:a (It is 42: \"π\".\n)", "user:r"));
  item["content"] = Json::array({{{"type", "reasoning_text"}, {"text", "seen"}}});
  EXPECT_THAT(turns(item), ElementsAre("user:q", "assistant:a (seen)", "user:r"));
  item["content"] = nullptr;
  item["summary"] = Json::array({{{"type", "summary_text"}, {"text", "short"}}});
  for (const std::string& other :
       {std::string("gAAAAABo"), std::string(), sealed.substr(4), sealed + "AAAA"}) {
    item["encrypted_content"] = other;
    EXPECT_THAT(turns(item), ElementsAre("user:q", "assistant:a (short)", "user:r")) << other;
  }
  EXPECT_TRUE(responses(R"({"input": "x", "include": ["reasoning.encrypted_content"]})").seal_reasoning);
  EXPECT_FALSE(responses(R"({"input": "x", "include": []})").seal_reasoning);
}

TEST(SealedReasoning, IsNotTakenWhenItWasChanged) {
  const std::string sealed = seal_reasoning("a thought");
  EXPECT_EQ(open_reasoning(sealed), "a thought");
  for (size_t i = 0; i < sealed.size(); ++i) {
    std::string changed = sealed;
    changed[i] = changed[i] == 'A' ? 'B' : 'A';
    EXPECT_FALSE(open_reasoning(changed).has_value()) << i;
  }
}

TEST(ResponsesRequest, ShowsCallsOfHostedToolsThatWereAnswered) {
  const GenerationRequest r = responses(R"({"input": [{"role": "user", "content": "u"},
      {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
      {"type": "local_shell_call", "id": "lsh", "call_id": "c", "status": "completed", "action": {"command": ["ls"]}},
      {"type": "local_shell_call_output", "id": "c", "output": "a b"},
      {"type": "shell_call", "call_id": "lost", "action": {"commands": ["ls"]}},
      {"type": "shell_call_output", "call_id": "nobody", "output": "x"},
      {"role": "user", "content": "v"}], "max_tool_calls": null, "later": null})");
  EXPECT_THAT(shown(r),
              ElementsAre("user:u", "assistant: local_shell{\"command\":[\"ls\"]}", "tool:a b", "user:v"));
  EXPECT_TRUE(r.ignored_fields.empty());
}

TEST(SharedFields, LeaveReasoningInTheTextOfChatsAlone) {
  RequestDefaults in_text = defaults();
  in_text.reasoning_format = ReasoningFormat::InText;
  const Json chat_body = Json::parse(R"({"messages": [{"role": "user", "content": "x"}]})");
  EXPECT_EQ(read_chat_request(chat_body, in_text).reasoning_format, ReasoningFormat::InText);
  EXPECT_EQ(read_messages_request(chat_body, in_text).reasoning_format, ReasoningFormat::Apart);
  EXPECT_EQ(read_responses_request({{"input", "x"}}, in_text).reasoning_format, ReasoningFormat::Apart);
}

TEST(MessagesRequest, RefusesMessagesOfWhichNothingIsLeft) {
  for (const char* type :
       {"redacted_thinking", "server_tool_use", "container_upload", "web_search_tool_result"}) {
    const Json message = {{"role", "user"}, {"content", Json::array({{{"type", type}}})}};
    const Json body = {{"messages", Json::array({message})}};
    EXPECT_EQ(refusal([&] { read_messages_request(body, defaults()); }), "invalid_value messages") << type;
  }
}

TEST(CompletionsRequest, ReadsTextsAndIds) {
  const auto read = [](const char* body) { return read_completions_request(Json::parse(body), defaults()); };
  EXPECT_EQ(read(R"({"prompt": "x"})").prompts.size(), 1u);
  EXPECT_EQ(read(R"({"prompt": ["x", "y"]})").prompts.size(), 2u);
  EXPECT_EQ(read(R"({"prompt": [1, 2]})").prompts.size(), 1u);
  EXPECT_EQ(read(R"({"prompt": [[1, 2], [3]]})").prompts.size(), 2u);
  EXPECT_EQ(read(R"({"prompt": "x"})").max_tokens, 16);
  const char* const asked =
      R"({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}})";
  EXPECT_EQ(read(asked).format.schema.dump(), R"({"type":"null"})");
  EXPECT_TRUE(read(asked).ignored_fields.empty());
  // More than are written at once was refused.
  const auto read_many = [](int n) {
    RequestDefaults d = defaults();
    d.max_choices = 1;
    return read_completions_request(Json{{"prompt", std::vector<std::string>(static_cast<size_t>(n), "x")}},
                                    d);
  };
  EXPECT_EQ(read_many(1024).prompts.size(), 1024u);
  EXPECT_EQ(refusal([&] { read_many(1025); }), "invalid_value prompt");
}

TEST(ParseBody, RefusesWhatIsNoSensibleJson) {
  for (const std::string& text : {std::string("{"), std::string("[1]"), std::string(200, '['),
                                  std::string("{\"a\": \"\xff\"}"), std::string("{\"a\": 1e999}")})
    EXPECT_EQ(refusal([&] { parse_body(text); }), "invalid_json ") << text;
  EXPECT_EQ(parse_body(R"({"a": "[[[[{{{\""})").size(), 1u);
}

// 400,000 members took a worker minutes.
TEST(ParseBody, RefusesObjectsOfTooManyMembers) {
  std::string members;
  for (int i = 0; i < 20'000; ++i) members += ",\"k" + std::to_string(i) + "\":1";
  for (const std::string& text :
       {R"({"a": 1)" + members + "}", R"({"chat_template_kwargs": {"a": [{"b": 1)" + members + "}]}}"})
    EXPECT_EQ(refusal([&] { parse_body(text); }), "invalid_json ");
}

}  // namespace
}  // namespace thermo
