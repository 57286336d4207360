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

TEST(AnswerParser, LooksForStopTextsEverywhereWhenTold) {
  const AnswerOptions options{
      .starts_in_reasoning = true, .stops = {"STOP", "o\nt"}, .stop_everywhere = true};
  const Parsed thought = parse("a STOP here\n</think>\n\none STOP two", options);
  EXPECT_EQ(thought.reasoning, "a ");
  EXPECT_EQ(thought.content, "");
  EXPECT_TRUE(thought.stopped);
  // A marker is no text: what begins before it does not go on after it.
  const Parsed spread = parse("STO</think>P and so\nto", options);
  EXPECT_EQ(spread.reasoning, "STO");
  EXPECT_EQ(spread.content, "P and s");
  EXPECT_TRUE(spread.stopped);
  // A call that is cut stays so, also where the model ended its turn before it was told to stop.
  AnswerParser call(
      tokenizer(), {.stops = {"STOP"}, .stop_everywhere = true, .tools = {{.name = "f", .description = ""}}});
  for (int32_t id : tokenizer().encode("<tool_call>\n<function=f>\n<parameter=a>\nb STOP c\n")) call.push(id);
  call.finish(true);
  ASSERT_EQ(call.calls().size(), 1u);
  EXPECT_FALSE(call.calls()[0].complete);
  EXPECT_EQ(call.calls()[0].arguments, "{\"a\": \"b ");
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

// A byte that belongs to no character becomes three, and the tokens after it were named before their text
// came: streams lost their log probabilities.
TEST(AnswerParser, NamesTheTokensOfBrokenCharactersWithTheirText) {
  const auto byte = [](int value) {
    for (int32_t id = 0; id < tokenizer().vocab().n_tokens(); ++id)
      if (tokenizer().token_bytes(id) == std::string(1, static_cast<char>(value))) return id;
    return -1;
  };
  // A stray byte, the two of a character, the four of one that does not exist, and one that stays open.
  const std::vector<int32_t> ids = {byte('a'),  byte(0x80), byte(0xc3), byte(0xa9), byte(0xf4),
                                    byte(0x90), byte(0x80), byte(0x80), byte('b'),  byte(0xe2)};
  AnswerParser parser(tokenizer(), {});
  std::vector<size_t> taken;
  const auto take = [&](const AnswerParser::Events& events) {
    const std::vector<size_t> tokens = parser.take_content_tokens();
    EXPECT_EQ(tokens.empty(), events.empty()) << taken.size();
    taken.insert(taken.end(), tokens.begin(), tokens.end());
  };
  for (const int32_t id : ids) take(parser.push(id));
  take(parser.finish());
  EXPECT_THAT(taken, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_EQ(taken, parser.content_tokens());
}

TEST(AnswerParser, NamesTheTokensOfReasoningAndCalls) {
  const std::string thought = "hm\n</think>", call = "<tool_call>\n<function=now>\n</function>\n</tool_call>";
  const Tool now{.name = "now"};
  const auto parts = [&](const Tokenizer& words, const std::string& text) {
    const std::vector<int32_t> ids = words.encode(text);
    AnswerParser parser(words, {.starts_in_reasoning = true, .stops = {}, .tools = {now}});
    std::vector<size_t> taken;
    for (const int32_t id : ids) {
      parser.push(id);
      for (const size_t index : parser.take_call_tokens()) taken.push_back(index);
    }
    parser.finish();
    for (const size_t index : parser.take_call_tokens()) taken.push_back(index);
    EXPECT_EQ(taken, parser.call_tokens());
    EXPECT_EQ(parser.take_reasoning_tokens(), parser.reasoning_tokens());
    EXPECT_TRUE(parser.take_reasoning_tokens().empty());
    const auto text_of = [&](const std::vector<size_t>& indices) {
      std::string all;
      for (const size_t index : indices) all += words.token_bytes(ids[index]);
      return all;
    };
    return std::vector<std::string>{text_of(parser.reasoning_tokens()), text_of(parser.content_tokens()),
                                    text_of(parser.call_tokens())};
  };
  const std::string text = thought + "\n\nLook: " + call;
  const std::vector<std::string> found = parts(tokenizer(), text);
  EXPECT_EQ(found[0], thought);
  EXPECT_EQ(found[1].substr(0, 5), "Look:");
  EXPECT_EQ(found[2], call);
  EXPECT_THAT(parts(tokenizer(), "hm" + call), ElementsAre("hm", "", call));  // out of a thought

  // Markers that are spelled with several tokens.
  VocabData data = *read_vocab(GgufFile(embedded_model(), "embedded"));
  for (size_t i = 0; i < data.tokens.size(); ++i)
    if (data.tokens[i].ends_with("think>") || data.tokens[i].ends_with("tool_call>"))
      data.types[i] = static_cast<int32_t>(TokenType::Unused);
  const Tokenizer spelled(std::move(data));
  const std::vector<std::string> again = parts(spelled, text);
  EXPECT_TRUE(again[0].starts_with(thought)) << again[0];  // a token may go on after it
  EXPECT_EQ(again[1].substr(0, 5), "Look:");
  EXPECT_TRUE(again[2].ends_with(call.substr(2))) << again[2];
}

}  // namespace
}  // namespace thermo
