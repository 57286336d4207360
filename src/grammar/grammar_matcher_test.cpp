// Tokens against grammars: the mask of all tokens is what each token alone gives.
#include "grammar/grammar_matcher.h"

#include <gtest/gtest.h>

#include <random>

#include "gguf/gguf_file.h"
#include "grammar/gbnf.h"
#include "grammar/json_schema.h"
#include "grammar/rule_set.h"
#include "tokenizer/testing/small_vocab.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

const Vocab& plankton() {
  static const Vocab vocab(*read_vocab(GgufFile(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf")));
  return vocab;
}

const std::shared_ptr<const TokenTrie>& plankton_trie() {
  static const auto trie = std::make_shared<const TokenTrie>(plankton());
  return trie;
}

TEST(GrammarMatcher, GivesTheSameByMaskAndTokenByToken) {
  const std::vector<std::shared_ptr<const Grammar>> grammars = {
      *parse_gbnf("root ::= [a-z ]* \"<\" [^>]+ \">\" root | \"\""),
      *parse_gbnf("root ::= .*"),
      *parse_gbnf("root ::= .{2,9}"),
      *parse_gbnf("root ::= word \"!\" (word \"ing\")*\nword ::= [^\\n]{0,7}"),
      *parse_gbnf("root ::= \"\\\"\" [^\"<]{4,40} \"\\\"\" | .{1,3} \"x\"+"),
      *parse_gbnf("root ::= (\"a\" | \"ab\" | \"abc\" \" the\"?)* [0-9]{0,5}"),
      any_json_object(),
      compile_json_schema(Json::parse(R"({"properties": {"name": {"type": "string", "maxLength": 12},
          "n": {"type": "integer", "minimum": 3}, "list": {"items": {"enum": ["red", "green", "blue"]}}}})"))
          ->grammar,
  };
  std::mt19937_64 random(3);
  for (size_t g = 0; g < grammars.size(); ++g) {
    const auto machine = std::make_shared<TokenMachine>(grammars[g], plankton_trie());
    for (int run = 0; run < 8; ++run) {
      GrammarMatcher matcher(machine);
      for (int step = 0; step < 25; ++step) {
        // Fresh machines: what is remembered changes nothing.
        GrammarMatcher masked = matcher;
        std::vector<int32_t> allowed;
        std::vector<bool> one_by_one;
        for (int32_t id = 0; id < plankton().n_tokens(); ++id) {
          GrammarMatcher single = matcher;
          one_by_one.push_back(single.allows(id));
          GrammarMatcher tried = matcher;
          if (!plankton_trie()->is_end(id)) {
            ASSERT_EQ(tried.accept(id), one_by_one.back()) << id;
          }
          if (one_by_one.back() && !plankton_trie()->is_end(id)) allowed.push_back(id);
        }
        for (int32_t id = 0; id < plankton().n_tokens(); ++id)
          ASSERT_EQ(masked.allows(id), one_by_one[static_cast<size_t>(id)])
              << "grammar " << g << " step " << step << " token " << id << " '" << plankton().token_bytes(id)
              << "'";
        ASSERT_EQ(allowed.empty(), matcher.must_end());
        if (allowed.empty()) break;
        ASSERT_TRUE(matcher.accept(allowed[random() % allowed.size()]));
      }
    }
  }
}

TEST(GrammarMatcher, AllowsEndTokensWhereTheTextIsCompleteAndNoOtherControls) {
  const auto machine = std::make_shared<TokenMachine>(*parse_gbnf("root ::= .{2,3}"), plankton_trie());
  GrammarMatcher matcher(machine);
  const std::vector<int32_t> ends(plankton().end_of_generation().begin(),
                                  plankton().end_of_generation().end());
  ASSERT_FALSE(ends.empty());
  const auto end_is_allowed = [&] { return matcher.allows(ends[0]); };
  EXPECT_FALSE(end_is_allowed());
  ASSERT_TRUE(matcher.accept_text("é"));
  EXPECT_FALSE(end_is_allowed());
  ASSERT_TRUE(matcher.accept_text("x"));
  EXPECT_TRUE(end_is_allowed());
  for (const int32_t end : ends) EXPECT_TRUE(matcher.allows(end));
  for (int32_t id = 0; id < plankton().n_tokens(); ++id)
    if (plankton().is_control(id) && !plankton().is_end_of_generation(id)) {
      EXPECT_FALSE(matcher.allows(id));
    }
  for (const char* marker : {"<think>", "</think>", "<tool_call>", "</tool_call>"})
    if (const auto id = plankton().find_special(marker)) {
      EXPECT_FALSE(matcher.allows(*id)) << marker;
    }
  EXPECT_FALSE(matcher.allows(-1));
  EXPECT_FALSE(matcher.allows(1 << 30));
  ASSERT_TRUE(matcher.accept_text("\xE2\x82"));  // the third character is not whole
  EXPECT_FALSE(end_is_allowed());
  ASSERT_TRUE(matcher.accept_text("\xAC"));
  EXPECT_TRUE(matcher.must_end());
  EXPECT_FALSE(matcher.accept_text("y"));
  EXPECT_FALSE(matcher.accept_text(""));
}

TEST(GrammarMatcher, TakesTokensThatAreNoTextWhereTheGrammarNamesThem) {
  const Vocab vocab(testing::small_vocab());
  const int32_t think = *vocab.find_special("<think>"), other = *vocab.find_special("</think>");
  RuleSet rules;
  const RuleId root = rules.add_rule("root");
  rules.define(root,
               rules.sequence({rules.text("a"), rules.token(think), rules.repeat(rules.any_char(), 0, -1)}));
  GrammarMatcher matcher(std::make_shared<TokenMachine>(*Grammar::compile(rules, root),
                                                        std::make_shared<const TokenTrie>(vocab)));
  EXPECT_FALSE(matcher.allows(think));
  ASSERT_TRUE(matcher.accept('a'));
  EXPECT_TRUE(matcher.allows(think));
  EXPECT_FALSE(matcher.allows(other));
  EXPECT_FALSE(matcher.accept_text("<think>"));  // the same letters are no token
  EXPECT_FALSE(matcher.allows(0xFF));            // nor is the byte that stands for one
  ASSERT_TRUE(matcher.accept(think));
  EXPECT_FALSE(matcher.allows(think));
  EXPECT_TRUE(matcher.accept_text("<think>"));
}

TEST(GrammarMatcher, FindsAnyTextButTheForbiddenOne) {
  RuleSet rules;
  const RuleId root = rules.add_rule("root");
  const ExprId space = rules.repeat(rules.chars({{' ', ' '}, {'\n', '\n'}}), 0, -1);
  rules.define(root, rules.text_without(rules.sequence({rules.text("</p>"), space, rules.text("<p=")})));
  GrammarMachine machine(*Grammar::compile(rules, root));
  const auto accepts = [&](std::string_view text) {
    return machine.can_end(machine.walk(machine.start(), text));
  };
  for (const char* text : {"", "x</p>", "</p> <p", "</p>x<p=", "<</p></p>é", "</p></p> \n <p>"})
    EXPECT_TRUE(accepts(text)) << text;
  for (const char* text : {"</p><p=", "x</p> \n<p=y", "</</p> <p=", "</p></p><p=", "\xC3", "\xFF"})
    EXPECT_FALSE(accepts(text)) << text;
}

TEST(GrammarMatcher, CopiesGoTheirOwnWay) {
  const auto machine =
      std::make_shared<TokenMachine>(*parse_gbnf("root ::= \"ab\" | \"ac\""), plankton_trie());
  GrammarMatcher a(machine);
  ASSERT_TRUE(a.accept_text("a"));
  GrammarMatcher b = a;
  EXPECT_TRUE(a.accept_text("b"));
  EXPECT_TRUE(b.accept_text("c"));
  EXPECT_TRUE(a.must_end() && b.must_end());
}

// Nesting makes new states for ever; the machine begins again now and then.
TEST(GrammarMatcher, StaysSmallInLongTexts) {
  GrammarMatcher matcher(std::make_shared<TokenMachine>(any_json_object(), plankton_trie()));
  ASSERT_TRUE(matcher.accept_text("{\"a\":"));
  for (int i = 0; i < 120000; ++i) ASSERT_TRUE(matcher.accept_text("[")) << i;
  for (int i = 0; i < 120000; ++i) ASSERT_TRUE(matcher.accept_text(i == 0 ? "1]" : "]")) << i;
  EXPECT_FALSE(matcher.accept_text("]"));
  EXPECT_TRUE(matcher.accept_text("}"));
  EXPECT_TRUE(matcher.must_end());
}

}  // namespace
}  // namespace thermo
