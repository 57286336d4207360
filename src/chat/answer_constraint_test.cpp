// Constraints of answers, with random writers: whatever they write within the constraint is parsed as what
// was asked for.
#include "chat/answer_constraint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "chat/answer_parser.h"
#include "gguf/gguf_file.h"
#include "grammar/gbnf.h"
#include "grammar/json_schema.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

VocabData plankton_data() {
  return *read_vocab(GgufFile(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf"));
}

struct Words {
  Tokenizer tokenizer;
  std::shared_ptr<const TokenTrie> trie;
  explicit Words(VocabData data)
      : tokenizer(std::move(data)), trie(std::make_shared<const TokenTrie>(tokenizer.vocab())) {}
};

// Plankton's, whose markers are tokens.
const Words& with_markers() {
  static const Words words(plankton_data());
  return words;
}

// The same without them: they are spelled.
const Words& without_markers() {
  static const Words words([] {
    VocabData data = plankton_data();
    for (size_t i = 0; i < data.tokens.size(); ++i)
      for (const char* marker : {"<think>", "</think>", "<tool_call>", "</tool_call>"})
        if (data.tokens[i] == marker) data.types[i] = static_cast<int32_t>(TokenType::Unused);
    return data;
  }());
  return words;
}

std::vector<Tool> tools() {
  return {{.name = "get_weather",
           .parameters = Json::parse(R"({"type": "object", "properties": {"city": {"type": "string"},
               "days": {"type": "integer", "minimum": 1}, "exact": {"type": "boolean"}}, "required": ["city", "days"]})")},
          {.name = "write_file",
           .parameters = Json::parse(R"({"type": "object", "properties": {"path": {"type": "string"},
               "lines": {"type": "array", "items": {"type": "string"}}, "mode": {"enum": ["a", "w"]}}, "required": ["path"]})")},
          {.name = "now"}};
}

struct Written {
  std::vector<int32_t> tokens;
  std::string text;
  bool ended = false;  // by the writer, and not by a limit
};

// A writer without sense: any allowed token, and now and then the wish to write something that leads on.
class Writer {
 public:
  Writer(const Words& words, uint64_t seed) : words_(words), random_(seed) {}

  Written write(AnswerConstraint& constraint, int limit) {
    Written out;
    std::vector<int32_t> wish;
    const Vocab& vocab = words_.tokenizer.vocab();
    while (static_cast<int>(out.tokens.size()) < limit) {
      int32_t token = -1;
      if (const auto forced = constraint.forced()) {
        token = *forced;
      } else {
        if (wish.empty() && random_() % 6 == 0) wish = random_wish();
        if (!wish.empty() && constraint.allows(wish.front())) {
          token = wish.front();
          wish.erase(wish.begin());
        } else {
          wish.clear();
          token = any_allowed(constraint);
        }
        token = constraint.instead_of(token);
      }
      if (vocab.is_end_of_generation(token)) {
        out.ended = true;
        break;
      }
      constraint.accept(token);
      out.tokens.push_back(token);
      out.text += vocab.token_bytes(token);
    }
    return out;
  }

 private:
  int32_t any_allowed(AnswerConstraint& constraint) {
    const auto n = static_cast<uint64_t>(words_.tokenizer.vocab().n_tokens());
    for (int i = 0; i < 40; ++i)
      if (const auto token = static_cast<int32_t>(random_() % n); constraint.allows(token)) return token;
    std::vector<int32_t> allowed;
    const std::span<const uint64_t> mask = constraint.mask();
    for (int32_t token = 0; token < static_cast<int32_t>(n); ++token) {
      if (constraint.allows(token)) allowed.push_back(token);
      if (!mask.empty()) {
        EXPECT_EQ(mask[static_cast<size_t>(token) / 64] >> (token % 64) & 1,
                  constraint.allows(token) ? 1u : 0u)
            << token;
      }
    }
    EXPECT_FALSE(allowed.empty());
    return allowed.empty() ? 0 : allowed[random_() % allowed.size()];
  }

  std::vector<int32_t> random_wish() {
    static const std::vector<std::string> kWishes = {
        "</think>\n\n",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n",
        "\n</parameter>\n<parameter=days>\n3\n",
        "\n</parameter>\n</function>\n</tool_call>",
        "\n</parameter>\n<parameter=city>\nOslo",
        "</parameter>\n</function>\n</tool_call>",
        "\n</parameter>\n<parameter=path>\n",
        "<tool_call>\n<function=no_such_tool>\n",
        "</arg_value>\n<arg_key>path</arg_key>\n<arg_value>",
        "</arg_value>\n</tool_call>",
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>7</arg_value>\n",
        "</arg_value>\n<arg_key>city</arg_key>\n<arg_value>",
        "\"}}\n</tool_call>",
        "\", \"days\": 4}}",
        "<think>",
        "</function>",
        "<|im_end|>"};
    return words_.tokenizer.encode(kWishes[random_() % kWishes.size()]);
  }

  const Words& words_;
  std::mt19937_64 random_;
};

struct Parsed {
  std::string reasoning, content;
  std::vector<ToolCall> calls;
  int n_repairs = 0;
};

Parsed parse(const Words& words, const Written& written, bool in_reasoning, std::vector<Tool> known) {
  AnswerParser parser(words.tokenizer,
                      {.starts_in_reasoning = in_reasoning, .stops = {}, .tools = std::move(known)});
  for (const int32_t token : written.tokens) parser.push(token);
  parser.finish(written.ended);
  const ToolCallRepairs& r = parser.repairs();
  // Where any name is a parameter, one may come again.
  const bool any_names = std::any_of(parser.calls().begin(), parser.calls().end(),
                                     [](const ToolCall& call) { return call.name == "now"; });
  return {parser.reasoning(), parser.content(), parser.calls(),
          r.values_closed + r.calls_closed + (any_names ? 0 : r.repeated_keys) + r.bare_functions +
              r.unknown_tools + r.dropped_texts};
}

AnswerConstraint constraint_of(const Words& words, const ConstraintOptions& options,
                               bool in_reasoning = false) {
  const auto rules = AnswerRules::compile(words.tokenizer, words.trie, options);
  EXPECT_TRUE(rules.has_value()) << rules.error().message;
  return {*rules, in_reasoning};
}

void check_call(const ToolCall& call, const std::string& context) {
  const Json arguments = Json::parse(call.arguments, nullptr, false);
  ASSERT_TRUE(arguments.is_object()) << call.arguments << context;
  if (call.name == "get_weather") {
    EXPECT_TRUE(arguments.contains("city") && arguments["city"].is_string()) << call.arguments << context;
    EXPECT_TRUE(arguments.contains("days") && arguments["days"].is_number_integer())
        << call.arguments << context;
    if (arguments.contains("exact")) {
      EXPECT_TRUE(arguments["exact"].is_boolean()) << call.arguments << context;
    }
  }
  if (call.name == "write_file") {
    EXPECT_TRUE(arguments.contains("path") && arguments["path"].is_string()) << call.arguments << context;
    if (arguments.contains("lines")) {
      EXPECT_TRUE(arguments["lines"].is_array()) << call.arguments << context;
    }
  }
}

// 1000 answers: every choice, dialect and vocabulary, with reasoning and without.
TEST(AnswerConstraint, KeepsTheChoiceOfToolsWhateverIsWritten) {
  int n_calls = 0, n_ended = 0;
  for (int i = 0; i < 1000; ++i) {
    const Words& words = i % 4 == 3 ? without_markers() : with_markers();
    ConstraintOptions options;
    const bool in_reasoning = i / 4 % 2 == 0;
    options.may_reason = i / 8 % 2 == 0;
    options.reasoning_budget = 20;
    options.tools = tools();
    options.tool_dialect = std::array{ToolDialect::Qwen, ToolDialect::Qwen, ToolDialect::Laguna,
                                      ToolDialect::Hermes}[static_cast<size_t>(i / 3 % 4)];
    options.parallel_calls = i % 5 != 0;
    const int choice = i % 3;
    options.tool_choice =
        std::array{ToolChoice::None, ToolChoice::Auto, ToolChoice::Required}[static_cast<size_t>(choice)];
    const bool named = choice == 2 && i / 3 % 3 == 0;
    if (named) options.tools = {options.tools[static_cast<size_t>(i / 9 % 3)]};
    AnswerConstraint constraint = constraint_of(words, options, in_reasoning);
    const Written written = Writer(words, static_cast<uint64_t>(i)).write(constraint, 250);
    const Parsed parsed = parse(words, written, in_reasoning, tools());
    const std::string context = "\nanswer " + std::to_string(i) + "\n" + written.text;
    if (choice == 0) {
      EXPECT_TRUE(parsed.calls.empty()) << context;
      continue;
    }
    n_ended += written.ended;
    if (choice == 2 && written.ended) {
      EXPECT_FALSE(parsed.calls.empty()) << context;
      EXPECT_EQ(parsed.content, "") << context;
    }
    if (!options.parallel_calls) {
      EXPECT_LE(parsed.calls.size(), 1u) << context;
    }
    if (written.ended && !parsed.calls.empty() && options.tool_dialect != ToolDialect::Laguna) {
      EXPECT_EQ(parsed.n_repairs, 0) << context;
    }
    for (const ToolCall& call : parsed.calls) {
      if (named) {
        EXPECT_EQ(call.name, options.tools[0].name) << context;
      }
      if (!call.complete || !written.ended) continue;
      ++n_calls;
      ASSERT_NO_FATAL_FAILURE(check_call(call, context));
    }
    if (testing::Test::HasFailure()) break;
  }
  EXPECT_GT(n_calls, 200);
  std::printf("%d answers ended, %d calls\n", n_ended, n_calls);
}

TEST(AnswerConstraint, BeginsAfterTheThoughtAndEndsWithTheGrammar) {
  for (const Words* words : {&with_markers(), &without_markers()})
    for (int i = 0; i < 60; ++i) {
      ConstraintOptions options;
      const bool in_reasoning = i % 2 == 0;
      options.may_reason = false;
      options.reasoning_budget = 15;
      options.grammar =
          compile_json_schema(Json::parse(R"({"type": "object", "properties": {"ok": {"type": "boolean"},
          "word": {"enum": ["yes", "no"]}}, "required": ["ok", "word"], "additionalProperties": false})"))
              ->grammar;
      AnswerConstraint constraint = constraint_of(*words, options, in_reasoning);
      const Written written = Writer(*words, static_cast<uint64_t>(i)).write(constraint, 400);
      ASSERT_TRUE(written.ended) << written.text;
      const Parsed parsed = parse(*words, written, in_reasoning, {});
      const Json value = Json::parse(parsed.content, nullptr, false);
      ASSERT_TRUE(value.is_object() && value["ok"].is_boolean()) << written.text;
      EXPECT_EQ(parsed.reasoning.empty(), !in_reasoning) << written.text;
    }
}

TEST(AnswerConstraint, AnswersWithTheGrammarOrCallsATool) {
  int n_calls = 0, n_texts = 0;
  for (int i = 0; i < 100; ++i) {
    ConstraintOptions options;
    options.tools = {tools()[2]};
    options.tool_grammar = i % 2 == 0 ? ToolGrammar::Auto : ToolGrammar::Strict;
    options.may_reason = false;
    options.grammar = *parse_gbnf("root ::= \"yes\" | \"no\"");
    AnswerConstraint constraint = constraint_of(with_markers(), options);
    const Written written = Writer(with_markers(), static_cast<uint64_t>(i)).write(constraint, 300);
    const Parsed parsed = parse(with_markers(), written, false, options.tools);
    if (!written.ended) continue;
    n_calls += !parsed.calls.empty();
    n_texts += parsed.calls.empty();
    if (parsed.calls.empty()) {
      EXPECT_TRUE(parsed.content == "yes" || parsed.content == "no") << written.text;
    }
  }
  EXPECT_GT(n_calls, 5);
  EXPECT_GT(n_texts, 5);
}

TEST(AnswerConstraint, EndsReasoningWhenItsBudgetIsUsedUp) {
  for (const Words* words : {&with_markers(), &without_markers()}) {
    ConstraintOptions options;
    options.reasoning_budget = 3;
    options.budget_message = "\nEnough.\n";
    AnswerConstraint constraint = constraint_of(*words, options, true);
    std::string text;
    for (const int32_t token : words->tokenizer.encode("one two three four")) {
      if (constraint.forced()) break;
      constraint.accept(token);
      text += words->tokenizer.token_bytes(token);
    }
    int n_forced = 0;
    while (const auto forced = constraint.forced()) {
      EXPECT_TRUE(constraint.allows(*forced));
      EXPECT_FALSE(constraint.allows(*forced + 1));
      constraint.accept(*forced);
      ++n_forced;
      text += words->tokenizer.token_bytes(*forced);
    }
    EXPECT_TRUE(text.ends_with("\nEnough.\n</think>\n\n")) << text;
    EXPECT_EQ(constraint.n_forced(), n_forced);
    EXPECT_GT(constraint.n_forced_reasoning(), 0);
    EXPECT_LT(constraint.n_forced_reasoning(), n_forced);  // the marker and what follows it are none
    EXPECT_STREQ(constraint.reasoning_close(), "budget");
    for (const int32_t token : words->tokenizer.encode("and so on")) EXPECT_TRUE(constraint.allows(token));
  }
}

TEST(AnswerConstraint, EndsReasoningWhenSomebodyAsksForIt) {
  const Words& words = with_markers();
  ConstraintOptions options;
  options.budget_message = "\nEnough.\n";
  AnswerConstraint constraint = constraint_of(words, options, true);
  const std::vector<int32_t> thought = words.tokenizer.encode("one two three");
  constraint.accept(thought[0]);
  EXPECT_FALSE(constraint.forced());
  constraint.end_reasoning();
  constraint.accept(thought[1]);
  std::string text;
  while (const auto forced = constraint.forced()) {
    constraint.accept(*forced);
    text += words.tokenizer.token_bytes(*forced);
  }
  EXPECT_EQ(text, "\nEnough.\n</think>\n\n");
  EXPECT_STREQ(constraint.reasoning_close(), "client");
  constraint.end_reasoning();  // too late
  constraint.accept(thought[2]);
  EXPECT_FALSE(constraint.forced());
}

TEST(AnswerConstraint, EndsReasoningThatRepeatsItself) {
  const Words& words = with_markers();
  const auto n_until_forced = [&](int period, bool ends_loops, int odd_one) {
    ConstraintOptions options;
    options.ends_loops = ends_loops;
    AnswerConstraint constraint = constraint_of(words, options, true);
    int n = 0;
    for (; n < 5000 && !constraint.forced(); ++n) {
      const auto noise = static_cast<uint32_t>(n % period) * 2654435761u;
      const std::string letter(1, n == odd_one ? 'Z' : static_cast<char>('a' + (noise >> 16) % 26));
      constraint.accept(words.tokenizer.encode(letter).front());
    }
    if (n < 5000) {
      EXPECT_STREQ(constraint.reasoning_close(), "loop");
    }
    return n;
  };
  for (const int period : {16, 17, 100, 256})
    EXPECT_LE(n_until_forced(period, true, -1), 6 * period) << period;
  EXPECT_EQ(n_until_forced(16, true, -1), 96);
  EXPECT_GT(n_until_forced(100, true, 450), 800);  // it was no loop yet
  EXPECT_EQ(n_until_forced(300, true, -1), 5000);
  EXPECT_EQ(n_until_forced(16, false, -1), 5000);
}

TEST(AnswerConstraint, ClosesAThoughtBeforeACall) {
  const Words& words = with_markers();
  ConstraintOptions options;
  options.tools = tools();
  AnswerConstraint constraint = constraint_of(words, options, true);
  const int32_t call = *words.tokenizer.vocab().find_special("<tool_call>");
  ASSERT_TRUE(constraint.allows(call));
  std::string text;
  int32_t token = constraint.instead_of(call);
  for (int n = 0; n < 10; ++n) {
    constraint.accept(token);
    text += words.tokenizer.token_bytes(token);
    if (!constraint.forced()) break;
    token = *constraint.forced();
  }
  EXPECT_EQ(text, "</think>\n\n<tool_call>");
  EXPECT_STREQ(constraint.reasoning_close(), "tool_call");
  EXPECT_FALSE(constraint.allows(words.tokenizer.encode("x")[0]));
}

TEST(AnswerConstraint, WritesMarkupInsideAValue) {
  const Words& words = with_markers();
  ConstraintOptions options;
  options.may_reason = false;
  options.tools = tools();
  options.tool_choice = ToolChoice::Required;
  const std::string file = "<function=x>\n<parameter=y>\nz\n</parameter>\nno\n</function>\n";
  AnswerConstraint constraint = constraint_of(words, options);
  Written written;
  for (const int32_t token :
       words.tokenizer.encode("<tool_call>\n<function=write_file>\n<parameter=path>\n" + file +
                              "\n</parameter>\n<parameter=mode>\na\n"
                              "</parameter>\n</function>\n</tool_call>")) {
    ASSERT_TRUE(constraint.allows(token)) << written.text;
    constraint.accept(token);
    written.tokens.push_back(token);
    written.text += words.tokenizer.token_bytes(token);
  }
  const auto end = static_cast<int32_t>(words.tokenizer.vocab().end_of_generation()[0]);
  EXPECT_TRUE(constraint.allows(end));
  written.ended = true;
  const Parsed parsed = parse(words, written, false, tools());
  ASSERT_EQ(parsed.calls.size(), 1u);
  EXPECT_EQ(Json::parse(parsed.calls[0].arguments)["path"], file);
}

TEST(AnswerConstraint, HoldsStrictToolsToTheirSchema) {
  const Words& words = with_markers();
  ConstraintOptions options;
  options.may_reason = false;
  options.tool_choice = ToolChoice::Required;
  options.tools = {
      {.name = "f",
       .parameters = Json::parse(
           R"({"type": "object", "properties": {"level": {"type": "integer", "minimum": 1, "maximum": 3},
                        "mode": {"type": "string", "enum": ["fast", "slow"]}}, "required": ["level", "mode"]})"),
       .strict = true}};
  const auto takes = [&](const std::string& text) {
    AnswerConstraint constraint = constraint_of(words, options);
    for (const int32_t token : words.tokenizer.encode(text)) {
      if (!constraint.allows(token)) return false;
      constraint.accept(token);
    }
    return true;
  };
  const std::string begin = "<tool_call>\n<function=f>\n";
  EXPECT_TRUE(takes(
      begin +
      "<parameter=level>\n3\n</parameter>\n<parameter=mode>\nfast\n</parameter>\n</function>\n</tool_call>"));
  EXPECT_TRUE(takes(
      begin +
      "<parameter=mode>\nslow\n</parameter>\n<parameter=level>\n1\n</parameter>\n</function>\n</tool_call>"));
  EXPECT_FALSE(takes(begin + "<parameter=level>\n4"));
  EXPECT_FALSE(takes(begin + "<parameter=mode>\nother"));
  EXPECT_FALSE(takes(begin + "<parameter=mode>\nfast\n</parameter>\n</function>"));
  EXPECT_FALSE(takes(begin + "<parameter=other>"));
  EXPECT_FALSE(takes("<tool_call>\n<function=g>"));
  options.tools[0].parameters["properties"]["level"]["multipleOf"] = 2;
  const auto rules = AnswerRules::compile(words.tokenizer, words.trie, options);
  ASSERT_FALSE(rules.has_value());
  EXPECT_THAT(rules.error().message, testing::HasSubstr("tool 'f'"));
  EXPECT_THAT(rules.error().message, testing::HasSubstr("#/properties/level"));
}

// Texts that a reference leads to were 400, and those beside other types could be anything.
TEST(AnswerConstraint, HoldsStrictTextsToTheirSchemaWhereverItStands) {
  const Words& words = with_markers();
  const auto takes = [&words](const char* schema, const std::string& value) {
    ConstraintOptions options;
    options.may_reason = false;
    options.tool_choice = ToolChoice::Required;
    Json parameters = Json::parse(
        R"({"type": "object", "required": ["a"], "$defs": {"color": {"type": "string", "enum": ["red", "blue"]}}})");
    parameters["properties"]["a"] = Json::parse(schema);
    options.tools = {{.name = "f", .parameters = std::move(parameters), .strict = true}};
    AnswerConstraint constraint = constraint_of(words, options);
    const std::string call =
        "<tool_call>\n<function=f>\n<parameter=a>\n" + value + "\n</parameter>\n</function>\n</tool_call>";
    for (const int32_t token : words.tokenizer.encode(call)) {
      if (!constraint.allows(token)) return false;
      constraint.accept(token);
    }
    return true;
  };
  for (const char* color :
       {R"({"$ref": "#/$defs/color"})", R"({"allOf": [{"$ref": "#/$defs/color"}], "default": "red"})",
        R"({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]})",
        R"({"oneOf": [{"const": "red"}, {"const": "blue"}]})",
        R"({"type": ["string", "null"], "enum": ["red", "blue", null]})"}) {
    EXPECT_TRUE(takes(color, "blue")) << color;
    EXPECT_FALSE(takes(color, "green")) << color;
    EXPECT_FALSE(takes(color, "\"red\"")) << color;
  }
  EXPECT_TRUE(takes(R"({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]})", "null"));
  const char* const either =
      R"({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": {"$ref": "#/$defs/color"}}]})";
  EXPECT_TRUE(takes(either, "abc"));
  EXPECT_FALSE(takes(either, "abcd"));
  EXPECT_TRUE(takes(either, "[\"red\", \"red\"]"));
  EXPECT_FALSE(takes(either, "[\"green\"]"));
  EXPECT_TRUE(takes(R"({"type": ["string", "integer"]})", "whatever"));
  EXPECT_TRUE(takes("{}", "whatever"));
  EXPECT_FALSE(takes(R"({"type": ["string", "null"], "minLength": 3, "maxLength": 2})", "abc"));
}

// Tools were compiled again with every request.
TEST(AnswerRules, CompilesToolsOnce) {
  const Words& words = with_markers();
  ConstraintOptions options;
  options.grammars = std::make_shared<GrammarCache>();
  options.tools = {{.name = "f", .description = "", .parameters = Json::parse(R"({"type": "object"})")}};
  const auto compile = [&] {
    ASSERT_TRUE(AnswerRules::compile(words.tokenizer, words.trie, options).has_value());
  };
  compile();
  options.tools[0].description = "another one";  // the grammar does not depend on it
  compile();
  EXPECT_EQ(options.grammars->n_found(), 1u);
  options.tools[0].strict = true;
  compile();
  options.parallel_calls = false;
  compile();
  options.tools[0].name = "g";
  compile();
  options.tools[0].parameters["required"] = Json::array({"a"});
  compile();
  EXPECT_EQ(options.grammars->n_found(), 1u);
}

TEST(AnswerConstraint, HoldsCallsAsFarAsItIsTold) {
  const Words& words = with_markers();
  ConstraintOptions options;
  options.may_reason = false;
  options.tool_choice = ToolChoice::Required;
  options.tools = {tools()[0]};
  const auto takes = [&](const std::string& text) {
    AnswerConstraint constraint = constraint_of(words, options);
    for (const int32_t token : words.tokenizer.encode(text)) {
      if (!constraint.allows(token)) return false;
      constraint.accept(token);
    }
    return true;
  };
  struct Case {
    ToolDialect dialect;
    std::string begin, other, loose;  // a call of the tool; of another one; with what its schema forbids
  };
  const std::string open = "<tool_call>", close = "</tool_call>";
  const Case cases[] = {
      {ToolDialect::Qwen, "\n<function=get_weather>\n", "\n<function=set_weather>\n",
       "<parameter=days>\n0\n"},
      {ToolDialect::Laguna, "get_weather\n", "set_weather\n", "<arg_key>days</arg_key>\n<arg_value>0<"},
      {ToolDialect::Hermes, "\n{\"name\": \"get_weather\", \"arguments\": ",
       "\n{\"name\": \"set_weather\", \"arguments\": ", "{\"city\": \"x\", \"days\": 0"}};
  for (const Case& one : cases) {
    options.tool_dialect = one.dialect;
    for (const ToolGrammar grammar : {ToolGrammar::Auto, ToolGrammar::Strict, ToolGrammar::Off}) {
      options.tool_grammar = grammar;
      const bool off = grammar == ToolGrammar::Off;
      options.keep_tool_names = false;
      EXPECT_TRUE(takes(open + one.begin));
      EXPECT_EQ(takes(open + one.other), off);
      // A schema is enforced only where it is asked for; JSON knows no other way.
      if (one.dialect != ToolDialect::Hermes || grammar != ToolGrammar::Auto) {
        EXPECT_EQ(takes(open + one.begin + one.loose), grammar != ToolGrammar::Strict);
      }
      EXPECT_EQ(takes(open + one.begin + "anything" + close), off);
      options.keep_tool_names = true;
      EXPECT_FALSE(takes(open + one.other));
      EXPECT_EQ(takes(open + one.begin + "anything" + close), off);
      EXPECT_FALSE(takes("text"));
    }
  }
}

// A grammar that cannot be followed is not forgotten in silence.
TEST(AnswerConstraint, TellsThatItsFormatIsLost) {
  std::string alternatives;
  for (int i = 0; i < 4500; ++i)
    alternatives += (i > 0 ? " | " : "") + ("\"x\" [0-9] \"" + std::to_string(10000 + i) + "\"");
  const auto options_of = [&](const std::string& before) {
    ConstraintOptions options;
    options.grammar = *parse_gbnf("root ::= " + before + " (" + alternatives + ")");
    return options;
  };
  const Words& words = with_markers();
  const auto refused = AnswerRules::compile(words.tokenizer, words.trie, options_of("\"a\""));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::Unsupported);

  AnswerConstraint constraint = constraint_of(words, options_of("[a-w]{200}"));
  const int32_t letter = words.tokenizer.encode("a").front(), any = words.tokenizer.encode("!").front();
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(constraint.allows(letter)) << i;
    constraint.accept(letter);
  }
  for (int32_t token = 0; token < words.tokenizer.vocab().n_tokens(); ++token)
    ASSERT_FALSE(constraint.allows(token)) << token;
  EXPECT_FALSE(constraint.is_lost());
  constraint.accept(any);
  EXPECT_TRUE(constraint.is_lost());
}

TEST(AnswerConstraint, RefusesARequiredCallWithoutTools) {
  ConstraintOptions options;
  options.tool_choice = ToolChoice::Required;
  EXPECT_FALSE(AnswerRules::compile(with_markers().tokenizer, with_markers().trie, options).has_value());
}

}  // namespace
}  // namespace thermo
