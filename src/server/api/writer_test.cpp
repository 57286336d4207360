// Streams and whole replies of each API, made of the same answer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/api/reply_writer.h"
#include "server/api/sealed_reasoning.h"

namespace thermo {
namespace {

using ::testing::ElementsAre;
using Kind = AnswerEvent::Kind;

const AnswerParser::Events kEvents = {
    {Kind::Reasoning, "think", -1},   {Kind::Reasoning, " hard", -1},
    {Kind::Content, "Hel", -1},       {Kind::Content, "lo", -1},
    {Kind::CallBegin, "f", 0},        {Kind::CallArguments, "{\"a\": ", 0},
    {Kind::CallArguments, "1}", 0},   {Kind::CallEnd, "", 0},
    {Kind::CallBegin, "space__g", 1}, {Kind::CallArguments, "{\"input\": \"x\"}", 1},
    {Kind::CallEnd, "", 1},
};

Answer answer() {
  Answer a;
  a.reasoning = "think hard";
  a.content = "Hello";
  a.tool_calls = {{.id = "", .name = "f", .arguments = "{\"a\": 1}"},
                  {.id = "", .name = "space__g", .arguments = "{\"input\": \"x\"}"}};
  a.finish_reason = "tool_calls";
  a.n_reasoning_tokens = 2;
  a.stats.n_prompt = 10;
  a.stats.n_cached = 4;
  a.stats.n_completion = 9;
  return a;
}

GenerationRequest request(Dialect dialect) {
  GenerationRequest r;
  r.dialect = dialect;
  r.include_usage = true;
  r.prompts.emplace_back("x");
  r.tool_origins["space__g"] = {.space = "space", .name = "g", .custom = true};
  for (const char* name : {"instructions", "max_output_tokens", "metadata", "parallel_tool_calls",
                           "prompt_cache_key", "reasoning", "text", "tool_choice", "tools", "user"})
    r.echoed[name] = nullptr;
  return r;
}

struct Event {
  std::string name;
  Json data;
};

// As a client reads it: one event, one line of data, a blank line.
std::vector<Event> parse(const std::string& stream) {
  std::vector<Event> events;
  Event event;
  for (size_t at = 0; at < stream.size();) {
    const size_t end = stream.find('\n', at);
    EXPECT_NE(end, std::string::npos);
    const std::string line = stream.substr(at, end - at);
    at = end + 1;
    if (line.starts_with("event: ")) event.name = line.substr(7);
    if (line.starts_with("data: ") && line != "data: [DONE]") event.data = Json::parse(line.substr(6));
    if (line == "data: [DONE]") event.data = "[DONE]";
    if (!line.empty()) continue;
    if (!event.data.is_null()) events.push_back(std::move(event));
    event = {};
  }
  return events;
}

struct Written {
  std::vector<Event> events;
  Json whole;
};

Written write(Dialect dialect, size_t piece) {
  const GenerationRequest r = request(dialect);
  const auto make = [&] {
    return make_reply_writer(
        {.request = &r, .tokenizer = nullptr, .model = "m", .fingerprint = "f", .request_id = "req"});
  };
  const auto writer = make();
  const std::vector<Answer> answers = {answer()};
  std::string stream = writer->begin(10);
  for (size_t at = 0; at < kEvents.size(); at += piece)
    stream += writer->pieces(0,
                             {kEvents.begin() + static_cast<long>(at),
                              kEvents.begin() + static_cast<long>(std::min(kEvents.size(), at + piece))},
                             {});
  stream += writer->finish(0, answers[0]);
  stream += writer->end(answers);
  return {parse(stream), make()->whole(answers)};
}

TEST(ChatWriter, StreamsWhatTheWholeReplyHas) {
  for (const size_t piece : {1, 3, 100}) {
    const Written w = write(Dialect::Chat, piece);
    Json calls = Json::array();
    std::string text, reasoning, finish;
    for (const Event& event : w.events) {
      if (event.data == Json("[DONE]")) continue;
      for (const Json& choice : event.data["choices"]) {
        const Json& delta = choice["delta"];
        text += delta.value("content", "");
        reasoning += delta.value("reasoning_content", "");
        if (!choice["finish_reason"].is_null()) finish = choice["finish_reason"];
        for (const Json& call : delta.value("tool_calls", Json::array())) {
          if (call.contains("id"))
            calls.push_back(call["function"]);
          else
            calls.back()["arguments"] = calls.back()["arguments"].get<std::string>() +
                                        call["function"]["arguments"].get<std::string>();
        }
      }
    }
    const Json& message = w.whole["choices"][0]["message"];
    EXPECT_EQ(text, message["content"]);
    EXPECT_EQ(reasoning, message["reasoning"]);
    EXPECT_EQ(finish, "tool_calls");
    ASSERT_EQ(calls.size(), 2u);
    for (size_t i = 0; i < 2; ++i) EXPECT_EQ(calls[i], message["tool_calls"][i]["function"]);
    EXPECT_EQ(w.events.back().data, Json("[DONE]"));
    EXPECT_EQ(w.events[w.events.size() - 2].data["usage"]["total_tokens"], 19);
  }
}

TEST(ChatWriter, SendsReasoningUnderTheNamesThatAreWanted) {
  const GenerationRequest r = request(Dialect::Chat);
  for (const std::vector<std::string>& names :
       std::vector<std::vector<std::string>>{{}, {"reasoning"}, {"reasoning_content", "reasoning"}}) {
    const auto writer = make_reply_writer({.request = &r,
                                           .tokenizer = nullptr,
                                           .model = "m",
                                           .fingerprint = "f",
                                           .request_id = "req",
                                           .reasoning_fields = names});
    const std::vector<Event> events = parse(writer->pieces(0, {{Kind::Reasoning, "think", -1}}, {}));
    ASSERT_EQ(events.size(), names.empty() ? 0u : 1u);
    Json want = Json::object();
    for (const std::string& name : names) want[name] = "think";
    if (!names.empty()) {
      EXPECT_EQ(events[0].data["choices"][0]["delta"], want);
    }
    const std::vector<Answer> answers = {answer()};
    const Json message = writer->whole(answers)["choices"][0]["message"];
    for (const char* name : {"reasoning_content", "reasoning"})
      EXPECT_EQ(message.value(name, ""), want.contains(name) ? "think hard" : "") << name;
  }
}

// reasoning_format deepseek-legacy: apart, and with its tags in the content.
TEST(ChatWriter, RepeatsReasoningInTheContentWhereThatIsAskedFor) {
  GenerationRequest r = request(Dialect::Chat);
  r.reasoning_format = ReasoningFormat::Both;
  const auto make = [&] {
    return make_reply_writer(
        {.request = &r, .tokenizer = nullptr, .model = "m", .fingerprint = "f", .request_id = "req"});
  };
  const auto shown = [&](const AnswerParser::Events& events, const Answer& answer) {
    const auto writer = make();
    std::string stream = writer->begin(10);
    for (const AnswerEvent& event : events) stream += writer->pieces(0, {event}, {});
    stream += writer->finish(0, answer);
    std::string text, reasoning;
    for (const Event& event : parse(stream))
      for (const Json& choice : event.data["choices"]) {
        const Json& delta = choice["delta"];
        EXPECT_FALSE(delta.contains("content") && delta.contains("reasoning"));  // one kind in each chunk
        text += delta.value("content", "");
        reasoning += delta.value("reasoning_content", "");
      }
    const std::vector<Answer> answers = {answer};
    const Json message = make()->whole(answers)["choices"][0]["message"];
    EXPECT_EQ(message["content"], text);
    EXPECT_EQ(message["reasoning_content"], reasoning);
    return text;
  };
  Answer one;
  one.reasoning = "think hard";
  one.content = "yes";
  const AnswerParser::Events thought = {{Kind::Reasoning, "think", -1}, {Kind::Reasoning, " hard", -1}};
  AnswerParser::Events answered = thought;
  answered.push_back({Kind::Content, "yes", -1});
  EXPECT_EQ(shown(answered, one), "<think>\nthink hard\n</think>\n\nyes");
  one.content.clear();
  EXPECT_EQ(shown(thought, one), "<think>\nthink hard");  // it ended in the middle of it
  one.stats.reasoning_close = "natural";
  EXPECT_EQ(shown(thought, one), "<think>\nthink hard\n</think>\n\n");
}

TEST(ChatWriter, HasTimesOnEveryEventWhereTheyAreAskedFor) {
  for (const Dialect dialect : {Dialect::Chat, Dialect::Completions}) {
    const GenerationRequest r = request(dialect);
    const auto writer = make_reply_writer(
        {.request = &r, .tokenizer = nullptr, .model = "m", .fingerprint = "f", .request_id = "req"});
    AnswerStats so_far;
    so_far.n_prompt = 10;
    so_far.n_completion = 3;
    writer->set_stats(so_far);
    const std::vector<Event> events = parse(writer->pieces(0, {{Kind::Content, "Hel", -1}}, {}));
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].data["timings"]["predicted_n"], 3);
    EXPECT_FALSE(events[0].data["timings"].contains("seed"));
  }
}

TEST(MessagesWriter, StopsEachBlockBeforeTheNext) {
  const Written w = write(Dialect::Messages, 1);
  std::vector<std::string> names;
  for (const Event& event : w.events) {
    EXPECT_EQ(event.name, event.data["type"]);
    if (names.empty() || names.back() != event.name) names.push_back(event.name);
  }
  EXPECT_THAT(names, ElementsAre("message_start", "ping", "content_block_start", "content_block_delta",
                                 "content_block_stop", "content_block_start", "content_block_delta",
                                 "content_block_stop", "content_block_start", "content_block_delta",
                                 "content_block_stop", "content_block_start", "content_block_delta",
                                 "content_block_stop", "message_delta", "message_stop"));
  EXPECT_EQ(w.whole["stop_reason"], "tool_use");
  EXPECT_EQ(w.whole["content"][2]["input"], Json({{"a", 1}}));
  EXPECT_EQ(w.whole["usage"]["input_tokens"], 6);
  EXPECT_EQ(w.whole["usage"]["cache_read_input_tokens"], 4);
}

TEST(ResponsesWriter, NumbersItsEventsAndRepeatsItsItems) {
  for (const size_t piece : {1, 4, 100}) {
    const Written w = write(Dialect::Responses, piece);
    int number = 0;
    for (const Event& event : w.events) {
      EXPECT_EQ(event.data["sequence_number"], number++);
      EXPECT_EQ(event.name, event.data["type"]);
      if (event.name.starts_with("response.output_text") ||
          event.name.starts_with("response.reasoning_text")) {
        EXPECT_TRUE(event.data.contains("content_index") && event.data.contains("item_id") &&
                    event.data.contains("output_index"));
      }
    }
    const Json& last = w.events.back().data["response"];
    EXPECT_EQ(w.events.back().name, "response.completed");
    ASSERT_EQ(last["output"].size(), 4u);
    ASSERT_EQ(w.whole["output"].size(), 4u);
    for (size_t i = 0; i < 4; ++i) {
      Json streamed = last["output"][i], whole = w.whole["output"][i];
      for (const char* id : {"id", "call_id"}) streamed.erase(id), whole.erase(id);
      EXPECT_EQ(streamed, whole);
    }
    EXPECT_EQ(last["output"][3]["type"], "custom_tool_call");
    EXPECT_EQ(last["output"][3]["input"], "x");
    EXPECT_EQ(last["output"][3]["namespace"], "space");
    EXPECT_EQ(w.whole["output_text"], "Hello");
  }
}

// It was the JSON around it.
TEST(ResponsesWriter, HasTheTextOfACallThatWasCut) {
  const GenerationRequest r = request(Dialect::Responses);
  for (const auto& [arguments, input] :
       {std::pair("{\"input\": \"a\\nb", "a\nb"), {"{", ""}, {"{\"input\": ", ""}}) {
    Answer cut;
    cut.finish_reason = "length";
    cut.tool_calls = {{.id = "", .name = "space__g", .arguments = arguments, .complete = false}};
    const auto writer = make_reply_writer(
        {.request = &r, .tokenizer = nullptr, .model = "m", .fingerprint = "f", .request_id = "req"});
    const Json item = writer->whole(std::span(&cut, 1))["output"][0];
    EXPECT_EQ(item["input"], input);
    EXPECT_EQ(item["status"], "incomplete");
  }
}

TEST(ResponsesWriter, EndsAStreamWithItsTimes) {
  const Written w = write(Dialect::Responses, 3);
  const Json& last = w.events.back().data;
  EXPECT_EQ(last["timings"]["predicted_n"], 9);
  EXPECT_EQ(last["response"]["timings"], w.whole["timings"]);
  EXPECT_EQ(last["timings"], w.whole["timings"]);
}

TEST(ResponsesWriter, SealsReasoningForThoseWhoAskForIt) {
  GenerationRequest r = request(Dialect::Responses);
  for (const bool asked : {false, true}) {
    r.seal_reasoning = asked;
    const auto writer = make_reply_writer(
        {.request = &r, .tokenizer = nullptr, .model = "m", .fingerprint = "f", .request_id = "req"});
    const std::vector<Answer> answers = {answer()};
    const Json item = writer->whole(answers)["output"][0];
    ASSERT_EQ(item["type"], "reasoning");
    if (asked)
      EXPECT_EQ(open_reasoning(item["encrypted_content"].get<std::string>()), "think hard");
    else
      EXPECT_TRUE(item["encrypted_content"].is_null());
  }
}

TEST(Writers, TellErrorsInTheirWords) {
  ApiError full(503, "server_is_overloaded", "later");
  EXPECT_EQ(status_of(full, Dialect::Chat), 503);
  EXPECT_EQ(status_of(full, Dialect::Messages), 529);
  EXPECT_EQ(error_json(full, Dialect::Messages, "r")["error"]["type"], "overloaded_error");
  EXPECT_EQ(error_json(full, Dialect::Chat, "r")["error"]["type"], "service_unavailable");
  const GenerationRequest r = request(Dialect::Responses);
  const auto writer = make_reply_writer(
      {.request = &r, .tokenizer = nullptr, .model = "m", .fingerprint = "", .request_id = ""});
  const auto failed = [&](const ApiError& error) {
    const Json told = parse(writer->fail(error)).front().data["response"]["error"];
    return told["code"].get<std::string>() + ": " + told["message"].get<std::string>();
  };
  // Our own codes meant nothing to clients.
  full.retry_seconds = 7;
  EXPECT_EQ(failed(full), "rate_limit_exceeded: later. Please try again in 7s.");
  EXPECT_EQ(failed({503, "queue_timeout", "x"}), "rate_limit_exceeded: x");
  for (const char* code : {"shutting_down", "engine_failed"})
    EXPECT_EQ(failed({503, code, "x"}), "server_error: x");
  EXPECT_EQ(failed({500, "internal_error", "x"}), "server_error: x");
  EXPECT_EQ(failed({504, "timeout", "x"}), "server_error: x");
  EXPECT_EQ(failed({400, "invalid_json_schema", "x"}), "invalid_prompt: x");
  EXPECT_EQ(failed({503, "cancelled", "x"}), "invalid_prompt: x");
  EXPECT_EQ(failed({400, "context_length_exceeded", "x"}), "context_length_exceeded: x");
}

TEST(Writers, MakeIdsThatDiffer) {
  EXPECT_NE(fresh_id("call_"), fresh_id("call_"));
  EXPECT_EQ(fresh_id("call_").size(), 5u + 24u);
}

}  // namespace
}  // namespace thermo
