#include "chat/answer_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "embedded/embedded_model.h"
#include "gguf/gguf_file.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

using ::testing::ElementsAre;

const Tokenizer& tokenizer() {
  static const Tokenizer instance = [] {
    GgufFile file(embedded_model(), "embedded");
    return Tokenizer(*read_vocab(file));
  }();
  return instance;
}

// The pieces of a text, with special tokens read as such.
struct Parsed {
  std::string reasoning, content;
  std::vector<size_t> content_tokens;
  bool stopped;
};
Parsed parse(const std::string& text, AnswerOptions options) {
  AnswerParser parser(tokenizer(), std::move(options));
  Parsed parsed;
  const auto take = [&parsed](const AnswerParser::Events& events) {
    for (const AnswerEvent& event : events)
      (event.kind == AnswerEvent::Kind::Reasoning ? parsed.reasoning : parsed.content) += event.text;
  };
  for (int32_t id : tokenizer().encode(text)) take(parser.push(id));
  take(parser.finish());
  EXPECT_EQ(parsed.reasoning, parser.reasoning());
  EXPECT_EQ(parsed.content, parser.content());
  parsed.content_tokens = parser.content_tokens();
  parsed.stopped = parser.stopped();
  return parsed;
}

TEST(AnswerParser, SeparatesReasoningFromContent) {
  const Parsed parsed =
      parse("17 + 25 = 42\n</think>\n\nIt is 42.", {.starts_in_reasoning = true, .stops = {}});
  EXPECT_EQ(parsed.reasoning, "17 + 25 = 42");
  EXPECT_EQ(parsed.content, "It is 42.");
}

TEST(AnswerParser, EntersReasoningOnlyBeforeAnythingVisible) {
  EXPECT_EQ(parse("<think>\nhm\n</think>\n\nyes", {}).reasoning, "hm");
  const Parsed late = parse("a <think> b", {});
  EXPECT_EQ(late.reasoning, "");
  EXPECT_EQ(late.content, "a <think> b");
}

TEST(AnswerParser, DropsAStrayEndMarkerAndWhitespaceAlone) {
  EXPECT_EQ(parse("yes</think>no", {}).content, "yesno");
  EXPECT_EQ(parse("hm</think>\n\n \n", {.starts_in_reasoning = true, .stops = {}}).content, "");
}

TEST(AnswerParser, KeepsReasoningThatNeverEnds) {
  EXPECT_EQ(parse("still thinking", {.starts_in_reasoning = true, .stops = {}}).reasoning, "still thinking");
}

TEST(AnswerParser, LooksForStopTextsInTheContentOnly) {
  const Parsed parsed =
      parse("STOP here\n</think>\n\none STOP two", {.starts_in_reasoning = true, .stops = {"STOP"}});
  EXPECT_EQ(parsed.reasoning, "STOP here");
  EXPECT_EQ(parsed.content, "one ");
  EXPECT_TRUE(parsed.stopped);
}

TEST(AnswerParser, LeavesRawTextAsItIs) {
  EXPECT_EQ(parse("  a</think>b", {.split_reasoning = false, .stops = {}}).content, "  a</think>b");
}

TEST(AnswerParser, HandsOutWholeCharacters) {
  AnswerParser parser(tokenizer(), {});
  for (int32_t id : tokenizer().encode("日本🙂")) {
    for (const AnswerEvent& event : parser.push(id)) EXPECT_GE(event.text.size(), 3u) << event.text;
  }
  parser.finish();
  EXPECT_EQ(parser.content(), "日本🙂");
}

TEST(AnswerParser, NamesTheTokensOfTheVisibleText) {
  const std::vector<int32_t> ids = tokenizer().encode("hm\n</think>\n\nHello, world! STOP");
  const Parsed parsed =
      parse("hm\n</think>\n\nHello, world! STOP", {.starts_in_reasoning = true, .stops = {" STOP"}});
  std::string text;
  for (size_t index : parsed.content_tokens) text += tokenizer().token_bytes(ids[index]);
  EXPECT_EQ(text, "Hello, world!");
}

}  // namespace
}  // namespace thermo
