// Tool calls in answers, in every dialect, cut up in every way, and damaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "chat/answer_parser.h"
#include "chat/argument_value.h"
#include "chat/tool_grammar.h"
#include "embedded/embedded_model.h"
#include "gguf/gguf_file.h"
#include "grammar/grammar_machine.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

using Kind = AnswerEvent::Kind;

const Tokenizer& tokenizer() {
  static const Tokenizer instance = [] {
    GgufFile file(embedded_model(), "embedded");
    return Tokenizer(*read_vocab(file));
  }();
  return instance;
}

// The same without tokens for the markers: they are spelled with several.
const Tokenizer& plain_tokenizer() {
  static const Tokenizer instance = [] {
    GgufFile file(embedded_model(), "embedded");
    VocabData data = *read_vocab(file);
    for (std::string& token : data.tokens)
      if (token == "<think>" || token == "</think>" || token == "<tool_call>" || token == "</tool_call>")
        token += '_';
    return Tokenizer(std::move(data));
  }();
  return instance;
}

std::vector<Tool> tools() {
  return {{"weather", "", Json::parse(R"({"type": "object", "properties": {
             "city": {"type": "string"}, "days": {"type": "integer"}, "detail": {"type": "boolean"},
             "units": {"enum": ["metric", "imperial"]}, "where": {"$ref": "#/$defs/place"},
             "limit": {"type": ["number", "null"]}, "tags": {"anyOf": [{"type": "array"}, {"type": "string"}]}},
             "$defs": {"place": {"type": "object"}}})")},
          {"write_file", "",
           Json::parse(R"({"properties": {"path": {"type": "string"}, "text": {"type": "string"}}})")},
          {"now", "", nullptr}};
}

struct Parsed {
  std::string reasoning, content;
  std::vector<std::pair<std::string, std::string>> calls;  // name, arguments
  std::vector<bool> complete;
  bool operator==(const Parsed&) const = default;
};

void PrintTo(const Parsed& parsed, std::ostream* out) {
  *out << "reasoning [" << parsed.reasoning << "] content [" << parsed.content << "]";
  for (const auto& [name, arguments] : parsed.calls) *out << " " << name << "(" << arguments << ")";
}

// Follows the events as a client would and checks their order.
class Client {
 public:
  void take(const AnswerParser::Events& events) {
    for (const AnswerEvent& event : events) {
      const size_t call = static_cast<size_t>(event.call);
      EXPECT_TRUE(Json::accept(quote_json(event.text)));
      switch (event.kind) {
        case Kind::Reasoning:
          EXPECT_TRUE(parsed.content.empty() && parsed.calls.empty());
          parsed.reasoning += event.text;
          break;
        case Kind::Content:
          EXPECT_TRUE(parsed.calls.empty());
          parsed.content += event.text;
          break;
        case Kind::CallBegin:
          EXPECT_EQ(call, parsed.calls.size());
          EXPECT_TRUE(parsed.complete.empty() || parsed.complete.back());
          parsed.calls.push_back({event.text, ""});
          parsed.complete.push_back(false);
          break;
        case Kind::CallArguments:
          ASSERT_EQ(call + 1, parsed.calls.size());
          EXPECT_FALSE(parsed.complete.back());
          parsed.calls.back().second += event.text;
          break;
        case Kind::CallEnd:
          ASSERT_EQ(call + 1, parsed.calls.size());
          parsed.complete.back() = true;
          EXPECT_TRUE(Json::accept(parsed.calls.back().second)) << parsed.calls.back().second;
          break;
      }
    }
  }
  Parsed parsed;
};

AnswerOptions with_tools(bool in_reasoning) {
  return {.starts_in_reasoning = in_reasoning, .stops = {"STOP"}, .tools = tools()};
}

Parsed parse_pieces(const std::vector<std::string>& pieces, bool in_reasoning, bool end_of_turn = true) {
  AnswerParser parser(plain_tokenizer(), with_tools(in_reasoning));
  Client client;
  for (const std::string& piece : pieces) client.take(parser.push_text(piece));
  client.take(parser.finish(end_of_turn));
  EXPECT_EQ(client.parsed.content, parser.content());
  EXPECT_EQ(client.parsed.reasoning, parser.reasoning());
  EXPECT_EQ(client.parsed.calls.size(), parser.calls().size());
  return client.parsed;
}

// With the markers as tokens.
Parsed parse_tokens(const std::string& text, bool in_reasoning = false) {
  AnswerParser parser(tokenizer(), with_tools(in_reasoning));
  Client client;
  for (const int32_t id : tokenizer().encode(text)) client.take(parser.push(id));
  client.take(parser.finish());
  return client.parsed;
}

const std::string kWeather =
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</"
    "parameter>\n"
    "</function>\n</tool_call>";
const std::string kFile =  // a file that holds the markup itself
    "<tool_call>\n<function=write_file>\n<parameter=path>\na "
    "\"b\".md\n</parameter>\n<parameter=text>\n\nWrite\n"
    "<parameter=x>\n1\n</parameter>\nand </function> or\n</function>\nthen "
    "é🙂.\n\n</parameter>\n</function>\n</tool_call>";
const std::string kLaguna =
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>";

TEST(ToolCalls, AreFoundWhereReasoningIsText) {
  for (const bool as_tokens : {true, false}) {
    AnswerOptions options = with_tools(true);
    options.split_reasoning = false;
    AnswerParser parser(as_tokens ? tokenizer() : plain_tokenizer(), std::move(options));
    const std::string thought = "Would\n<function=weather> help?\n</think>\n\nYes: ";
    Client client;
    if (as_tokens)
      for (const int32_t id : tokenizer().encode(thought + kWeather)) client.take(parser.push(id));
    else
      for (const char c : thought + kWeather) client.take(parser.push_text(std::string(1, c)));
    client.take(parser.finish());
    EXPECT_EQ(parser.content(), thought.substr(0, thought.size() - 1));
    EXPECT_EQ(parser.reasoning(), "");
    ASSERT_EQ(client.parsed.calls.size(), 1u);
    EXPECT_EQ(client.parsed.calls[0].first, "weather");
    EXPECT_EQ(client.parsed.calls[0].second, R"({"city": "Oslo", "days": 3})");
  }
}

const std::vector<std::string>& samples() {
  static const std::vector<std::string> list = {
      "Just text.",
      "I will look.\n\n" + kWeather,
      kWeather + "\n" + kFile + "\n",
      "hm\n</think>\n\nLet me see. " + kWeather,
      "hm " + kWeather,  // a call inside a thought
      kLaguna + "\n" + kLaguna,
      "<tool_call>now</tool_call>",
      "<tool_call>\n<function=now>\n</function>\n</tool_call>",
      "<tool_call>weather<arg_key>city</arg_key><arg_value>a</arg_value>b</arg_value></tool_call>",
      "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>",
      "<tool_call>\n<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call> more",
      "<tool_call>not a call at all</tool_call> text",
      "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</function>\n</"
      "tool_call>",
      "<tool_call>\n<function=weather>\n<parameter=city>\nOslo",
      "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</fun",
      "text\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\ntail",
      "text <function=weather> is no call, nor is\n<function=nothing>\n",
      "<tool_call><tool_call></tool_call></tool_call><think></think>",
      "a <b> << <tool <tool_cal </tool_call> <<function=",
      "<tool_call>\n<function=weather>\njunk <b> "
      "<parameter=city>\nx\n</parameter>\njunk</function></tool_call>",
      "one STOP two " + kWeather,
      "one STO" + kWeather,
      "bytes \xff\xc3 and "
      "<tool_call>\n<function=now>\n<parameter=\xff>\n\xe2\x82\n</parameter>\n</function>\n</tool_call>",
  };
  return list;
}

TEST(ToolCalls, AreReadInEveryDialect) {
  const std::pair<std::string, std::string> oslo{"weather", R"({"city": "Oslo", "days": 3})"};
  EXPECT_THAT(parse_tokens(kWeather).calls, testing::ElementsAre(oslo));
  EXPECT_THAT(parse_tokens(kLaguna).calls, testing::ElementsAre(oslo));
  EXPECT_THAT(
      parse_tokens("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>")
          .calls,
      testing::ElementsAre(testing::Pair("weather", R"({"city":"Oslo"})")));
  EXPECT_THAT(parse_tokens("<tool_call>now\n</tool_call>").calls,
              testing::ElementsAre(testing::Pair("now", "{}")));
}

TEST(ToolCalls, KeepMarkupInsideAValue) {
  const Parsed parsed = parse_tokens(kFile);
  ASSERT_EQ(parsed.calls.size(), 1u);
  const Json arguments = Json::parse(parsed.calls[0].second);
  EXPECT_EQ(arguments["path"], "a \"b\".md");
  EXPECT_EQ(arguments["text"],
            "\nWrite\n<parameter=x>\n1\n</parameter>\nand </function> or\n</function>\nthen é🙂.\n");
}

TEST(ToolCalls, FollowTextAndEndAThought) {
  const Parsed after_text = parse_tokens("I will look. \n\n" + kWeather + "\n" + kWeather + "\ntail");
  EXPECT_EQ(after_text.content, "I will look.");
  EXPECT_EQ(after_text.calls.size(), 2u);

  AnswerParser parser(tokenizer(), with_tools(true));
  for (const int32_t id : tokenizer().encode("I need the weather.\n" + kWeather)) parser.push(id);
  parser.finish();
  EXPECT_EQ(parser.reasoning(), "I need the weather.");
  EXPECT_EQ(parser.calls().size(), 1u);
}

TEST(ToolCalls, BeginWithTheNameAndStreamStrings) {
  AnswerParser parser(tokenizer(), with_tools(false));
  Client client;
  size_t n_fragments = 0;
  for (const int32_t id : tokenizer().encode(kFile)) {
    const AnswerParser::Events events = parser.push(id);
    n_fragments += events.size();
    client.take(events);
    if (client.parsed.calls.size() == 1 && client.parsed.calls[0].second == "{") SUCCEED();
  }
  EXPECT_GT(n_fragments, 10u) << "a long text arrives piece by piece";
  EXPECT_EQ(client.parsed.complete, std::vector<bool>{true})
      << "complete before the closing marker is needed";
}

TEST(ToolCalls, OfUnknownToolsAreContent) {
  const std::string text = "See <tool_call>\n<function=rm>\n</function>\n</tool_call> there";
  EXPECT_EQ(parse_tokens(text).content, text);
  EXPECT_TRUE(parse_tokens(text).calls.empty());
}

TEST(ToolCalls, AreTextWhereNoToolWasOffered) {
  AnswerParser parser(tokenizer(), {});
  for (const int32_t id : tokenizer().encode(kWeather)) parser.push(id);
  parser.finish();
  EXPECT_EQ(parser.content(), kWeather);
}

TEST(ToolCalls, StayAsFarAsTheyCameWhenTheAnswerIsCut) {
  const Parsed cut = parse_pieces({"<tool_call>\n<function=weather>\n<parameter=city>\nOsl"}, false, false);
  EXPECT_EQ(cut.calls[0].second, R"({"city": "Osl)");
  EXPECT_FALSE(cut.complete[0]);
  const Parsed closed = parse_pieces({"<tool_call>\n<function=weather>\n<parameter=city>\nOsl"}, false, true);
  EXPECT_EQ(closed.calls[0].second, R"({"city": "Osl"})");
}

TEST(ToolCalls, CountWhatTheyRepair) {
  AnswerParser parser(plain_tokenizer(), with_tools(false));
  parser.push_text(
      "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>\n"
      "<parameter=city>\nagain\n</parameter>\n</function>\n</tool_call> tail");
  parser.finish();
  EXPECT_EQ(parser.calls()[0].arguments, R"({"city": "Oslo", "days": 3})");
  EXPECT_EQ(parser.repairs().values_closed, 1);
  EXPECT_EQ(parser.repairs().repeated_keys, 1);
  EXPECT_EQ(parser.repairs().dropped_texts, 1);
  EXPECT_TRUE(parser.calls()[0].repaired);
}

TEST(ToolCalls, SayWhichOfThemWereRepaired) {
  AnswerParser parser(plain_tokenizer(), with_tools(false));
  parser.push_text(kWeather + "\n<tool_call>\n<function=weather>\n<parameter=city>\nRome");
  parser.finish();
  ASSERT_EQ(parser.calls().size(), 2u);
  EXPECT_FALSE(parser.calls()[0].repaired);
  EXPECT_TRUE(parser.calls()[1].repaired);
}

// However an answer is cut into pieces, its reader gets the same.
TEST(ToolCalls, DoNotDependOnHowTheTextIsCut) {
  std::minstd_rand random(7);
  for (const std::string& sample : samples())
    for (const bool in_reasoning : {false, true}) {
      SCOPED_TRACE(sample);
      const Parsed whole = parse_pieces({sample}, in_reasoning);
      std::vector<std::string> bytes;
      for (const char c : sample) bytes.push_back(std::string(1, c));
      ASSERT_EQ(parse_pieces(bytes, in_reasoning), whole);
      for (size_t at = 1; at < sample.size(); ++at)
        ASSERT_EQ(parse_pieces({sample.substr(0, at), sample.substr(at)}, in_reasoning), whole)
            << "cut at " << at;
      for (int round = 0; round < 20; ++round) {
        std::vector<std::string> pieces;
        for (size_t at = 0; at < sample.size();) {
          const size_t n = 1 + random() % 9;
          pieces.push_back(sample.substr(at, n));
          at += n;
        }
        ASSERT_EQ(parse_pieces(pieces, in_reasoning), whole);
      }
    }
}

// What was handed out is never taken back: each beginning of an answer gives a beginning of what it becomes.
TEST(ToolCalls, HandOutOnlyWhatIsCertain) {
  for (const std::string& sample : samples())
    for (const bool in_reasoning : {false, true}) {
      SCOPED_TRACE(sample);
      const Parsed whole = parse_pieces({sample}, in_reasoning);
      for (size_t n = 0; n <= sample.size(); ++n) {
        AnswerParser parser(plain_tokenizer(), with_tools(in_reasoning));
        Client client;
        client.take(parser.push_text(sample.substr(0, n)));
        EXPECT_TRUE(whole.reasoning.starts_with(client.parsed.reasoning)) << n;
        EXPECT_TRUE(whole.content.starts_with(client.parsed.content)) << n;
        ASSERT_LE(client.parsed.calls.size(), whole.calls.size());
        for (size_t i = 0; i < client.parsed.calls.size(); ++i) {
          EXPECT_EQ(client.parsed.calls[i].first, whole.calls[i].first);
          EXPECT_TRUE(whole.calls[i].second.starts_with(client.parsed.calls[i].second)) << n;
        }
      }
    }
}

// Text made of the markup's own pieces at random: every reader ends, and complete calls are JSON.
TEST(ToolCalls, SurviveAnyText) {
  const std::vector<std::string> parts = {"<tool_call>",
                                          "</tool_call>",
                                          "<function=",
                                          "weather",
                                          "now",
                                          ">",
                                          "\n",
                                          "<parameter=",
                                          "city",
                                          "days",
                                          "</parameter>",
                                          "</function>",
                                          "<arg_key>",
                                          "</arg_key>",
                                          "<arg_value>",
                                          "</arg_value>",
                                          "{",
                                          "\"name\":",
                                          "}",
                                          "<think>",
                                          "</think>",
                                          "x",
                                          " ",
                                          "\xe2",
                                          "\"",
                                          "\\",
                                          "STOP",
                                          "<",
                                          std::string(80, ' '),
                                          std::string(300, 'k')};
  std::minstd_rand random(11);
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> pieces;
    std::string all;
    for (int i = 0; i < 24; ++i) all += pieces.emplace_back(parts[random() % parts.size()]);
    SCOPED_TRACE(all);
    ASSERT_EQ(parse_pieces(pieces, round % 2), parse_pieces({all}, round % 2));
  }
}

TEST(ArgumentValue, FollowsTheSchema) {
  const Json root = tools()[0].parameters;
  const auto value = [&root](const char* key, const std::string& text) {
    const Json& properties = root["properties"];
    return argument_json(text, properties.contains(key) ? &properties[key] : nullptr, root);
  };
  EXPECT_EQ(value("city", "12"), "\"12\"");
  EXPECT_EQ(value("city", "null"), "\"null\"");
  EXPECT_EQ(value("other", "12"), "\"12\"");
  EXPECT_EQ(value("days", " 12 "), "12");
  EXPECT_EQ(value("days", "123456789012345678901234567890"), "123456789012345678901234567890");
  EXPECT_EQ(value("days", "1.5"), "\"1.5\"");
  EXPECT_EQ(value("days", "many"), "\"many\"");
  EXPECT_EQ(value("detail", "True"), "true");
  EXPECT_EQ(value("units", "metric"), "\"metric\"");
  EXPECT_EQ(value("limit", "1.50"), "1.50");
  EXPECT_EQ(value("limit", "None"), "null");
  EXPECT_EQ(value("where", "{\"a\": [1, {}]}"), "{\"a\":[1,{}]}");
  EXPECT_EQ(value("where", "{'a': (True, None, 'x\\'y', 1.5),}"), "{\"a\":[true,null,\"x'y\",1.5]}");
  EXPECT_EQ(value("where", "[1]"), "\"[1]\"");
  EXPECT_EQ(value("where", "{'a': }"), "\"{'a': }\"");
  EXPECT_EQ(value("tags", "[1]"), "[1]");
  EXPECT_EQ(value("tags", "red"), "\"red\"");
  EXPECT_EQ(value("tags", std::string(100000, '[')).size(), 100002u);
}

// As older versions of Pydantic and OpenAPI write it: "12" of a text became a number, null of a number a
// text.
TEST(ArgumentValue, FollowsAllOfAndNullable) {
  const Json root = Json::parse(R"({"$defs": {"code": {"type": "string", "enum": ["12", "13"]}}})");
  const Json code = Json::parse(R"({"allOf": [{"$ref": "#/$defs/code"}], "default": "12"})"),
             count = Json::parse(R"({"type": "integer", "nullable": true})"),
             never = Json::parse(R"({"type": "string", "allOf": [{"type": "integer"}]})");
  EXPECT_EQ(argument_json("12", &code, root), "\"12\"");
  EXPECT_TRUE(takes_only_strings(&code, root));
  EXPECT_EQ(argument_json("null", &count, root), "null");
  EXPECT_EQ(argument_json("7", &count, root), "7");
  EXPECT_EQ(argument_json("7", &never, root), "7");
}

// As zod-to-json-schema writes them: every value was a text, and none was required.
TEST(ToolCalls, FollowParametersThatAreAReference) {
  const std::vector<Tool> offered = {{.name = "f", .parameters = Json::parse(R"({"$ref": "#/definitions/args",
      "definitions": {"args": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}})")}};
  const auto call = [](const std::string& inside) { return "\n<function=f>\n" + inside + "</function>\n"; };
  const std::string three = "<parameter=n>\n3\n</parameter>\n";
  ToolCallRepairs repairs;
  ToolCallParser parser(offered, repairs);
  parser.push(call(three));
  EXPECT_EQ(parser.take_arguments(), "{\"n\": 3}");

  const Result<SchemaGrammar> compiled = compile_tool_calls(offered, {});
  ASSERT_TRUE(compiled.has_value()) << compiled.error().message;
  GrammarMachine machine(compiled->grammar);
  const auto accepts = [&](const std::string& inside) {
    return machine.can_end(machine.walk(machine.start(), "<tool_call>" + call(inside) + "</tool_call>"));
  };
  EXPECT_TRUE(accepts(three));
  EXPECT_FALSE(accepts(""));
  EXPECT_FALSE(accepts("<parameter=n>\nmany\n</parameter>\n"));
}

// A parameter whose schema is this took hours.
TEST(ArgumentValue, FollowsAlternativesOfThemselvesOnlySoFar) {
  const Json root = Json::parse(
      R"({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"})");
  EXPECT_EQ(argument_json("12", &root, root), "12");
  EXPECT_EQ(argument_json("twelve", &root, root), "\"twelve\"");
}

}  // namespace
}  // namespace thermo
