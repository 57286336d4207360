#include "cli/bench/bench_url.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace thermo {
namespace {

// A stream in pieces of so many bytes, one millisecond apart.
StreamRecord read(const char* dialect, std::string_view stream, size_t n_bytes) {
  StreamRecord record;
  StreamReader reader(stream_dialect(dialect), record);
  for (size_t at = 0; at < stream.size(); at += n_bytes)
    reader.take(stream.substr(at, n_bytes), 1e-3 * static_cast<double>(at / n_bytes));
  return record;
}

TEST(BenchUrl, ReadsChatStreamsInAnyPieces) {
  constexpr std::string_view kStream =
      R"(: ping

data: {"model":"m","choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}

data: {"model":"m","choices":[{"delta":{"reasoning_content":"a"}}],"usage":null}

data: {"model":"m","choices":[{"delta":{"content":"\"content\":\"x"}}],"usage":null}

data: {"model":"m","choices":[{"delta":{"content":" "}}],"usage":null}

data: {"model":"m","choices":[{"delta":{},"finish_reason":"stop"}],"usage":null}

data: {"model":"m","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}

data: [DONE]

)";
  for (const size_t n : {size_t{1}, size_t{13}, kStream.size()}) {
    const StreamRecord record = read("chat", kStream, n);
    EXPECT_EQ(record.n_events, 3) << n;
    EXPECT_EQ(record.gaps.size(), 2u);
    EXPECT_EQ(record.n_prompt, 7);
    EXPECT_EQ(record.n_written, 5);
    EXPECT_EQ(record.model, "m");
    EXPECT_TRUE(record.ended);
    EXPECT_EQ(record.error, "");
  }
  EXPECT_GT(read("chat", kStream, 1).first, 0.1);
}

TEST(BenchUrl, ReadsTheOtherApis) {
  const StreamRecord messages = read("messages", R"(event: message_start
data: {"type":"message_start","message":{"model":"m","usage":{"input_tokens":3,"cache_read_input_tokens":4,"output_tokens":1}}}

event: content_block_delta
data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"hi"}}

data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":9}}

data: {"type":"message_stop"}

)",
                                     17);
  EXPECT_EQ(messages.n_events, 1);
  EXPECT_EQ(messages.n_prompt, 7);
  EXPECT_EQ(messages.n_written, 9);
  EXPECT_TRUE(messages.ended);
  const StreamRecord responses = read("responses", R"(data: {"type":"response.output_text.delta","delta":"hi"}

data: {"type":"response.output_text.done","text":"hi"}

data: {"type":"response.completed","response":{"model":"m","usage":{"input_tokens":3,"output_tokens":2}}}

)",
                                      40);
  EXPECT_EQ(responses.n_events, 1);
  EXPECT_EQ(responses.n_written, 2);
  EXPECT_TRUE(responses.ended);
}

TEST(BenchUrl, TakesErrorsForWhatTheyAre) {
  const StreamRecord record = read("chat", "data: {\"error\":{\"message\":\"no\"}}\n\ndata: nonsense\n\n", 9);
  EXPECT_EQ(record.error, "no");
  EXPECT_FALSE(record.ended);
  EXPECT_THROW(stream_dialect("morse"), ConfigError);
}

TEST(BenchUrl, ReadsPromptsOfAFile) {
  const std::vector<UrlPrompt> prompts = read_url_prompts(
      "What is 1 + 1?\r\n\n{\"prompt\": \"two\\nlines\", \"max_tokens\": 7}\n"
      "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n{ no object",
      "file");
  ASSERT_EQ(prompts.size(), 4u);
  EXPECT_EQ(prompts[0].text, "What is 1 + 1?");
  EXPECT_EQ(prompts[1].text, "two\nlines");
  EXPECT_EQ(prompts[1].max_tokens, 7);
  EXPECT_EQ(prompts[3].text, "{ no object");
  const Json body = Json::parse(stream_body(stream_dialect("chat"), prompts[2], 5));
  EXPECT_EQ(body["messages"][0]["content"], "hi");
  EXPECT_EQ(body["max_tokens"], 5);
  EXPECT_THROW(stream_body(stream_dialect("completions"), prompts[2], 5), ConfigError);
  EXPECT_THROW(read_url_prompts("\n \n", "file"), ConfigError);
  EXPECT_THROW(read_url_prompts("{\"text\": \"x\"}", "file"), ConfigError);
}

TEST(BenchUrl, SendsAtRandomTimesThatAreTheSameEveryTime) {
  const std::vector<double> times = send_times(2000, 50.0);
  EXPECT_EQ(times, send_times(2000, 50.0));
  EXPECT_EQ(times.front(), 0.0);
  EXPECT_TRUE(std::is_sorted(times.begin(), times.end()));
  EXPECT_NEAR(times.back(), 2000 / 50.0, 4.0);
}

TEST(BenchUrl, CountsWhatCame) {
  std::vector<StreamRecord> records(4);
  for (size_t i = 0; i < 3; ++i) {
    records[i].first = 0.1;
    records[i].last = 1.1;
    records[i].end = 1.2;
    records[i].gaps = {0.5, 0.5};
    records[i].n_events = 3;
    records[i].n_prompt = 10;
    records[i].n_written = 11;
  }
  records[3].error = "status 503";
  const Json f = url_fields({}, {.n_clients = 2, .n_prompt = 10, .n_gen = 11}, records, 3.0);
  EXPECT_EQ(f["errors"], 1);
  EXPECT_EQ(f["n_requests"], 4);
  EXPECT_EQ(f["out_tokens"], 33);
  EXPECT_DOUBLE_EQ(f["out_ts"].get<double>(), 11.0);
  EXPECT_DOUBLE_EQ(f["stream_ts"].get<double>(), 20.0);
  EXPECT_DOUBLE_EQ(f["ttft_ms_p50"].get<double>(), 100.0);
  EXPECT_DOUBLE_EQ(f["itl_ms_p99"].get<double>(), 500.0);
  EXPECT_EQ(f["tokens_counted_by"], "usage");
}

}  // namespace
}  // namespace thermo
