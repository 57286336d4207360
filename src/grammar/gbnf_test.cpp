// GBNF: what grammars accept, and how wrong ones are refused.
#include "grammar/gbnf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "grammar/grammar_machine.h"

namespace thermo {
namespace {

using testing::HasSubstr;

std::shared_ptr<const Grammar> grammar_of(std::string_view text) {
  auto grammar = parse_gbnf(text);
  EXPECT_TRUE(grammar.has_value()) << text << "\n" << (grammar ? "" : grammar.error().message);
  return grammar ? *grammar : nullptr;
}

bool accepts(GrammarMachine& machine, std::string_view text) {
  return machine.can_end(machine.walk(machine.start(), text));
}

struct Case {
  std::string grammar;
  std::vector<std::string> yes, no;
};

TEST(Gbnf, AcceptsWhatItsRulesSay) {
  const std::vector<Case> cases = {
      {"root ::= \"a\"", {"a"}, {"", "b", "aa"}},
      {"root ::= \"a\" \"bc\" | \"d\"", {"abc", "d"}, {"a", "abcd", "ad"}},
      {"root ::= \"a\"*", {"", "a", "aaaa"}, {"b", "aab"}},
      {"root ::= \"a\"+ \"b\"?", {"a", "aaab"}, {"", "b", "abb"}},
      {"root ::= [a-c]{2}", {"ab", "cc"}, {"a", "abc", "ad"}},
      {"root ::= \"a\" * ( \"b\"\n ? )", {"", "aab"}, {"bb"}},
      {"root ::= [a-c]{2,}", {"ab", "ccabc"}, {"a", "abd"}},
      {"root ::= [0-9]{1,3} \".\"", {"1.", "123."}, {".", "1234."}},
      {"root ::= (\"x\" | y){2,3}\ny ::= \"y\" \"z\"?", {"xx", "yzx", "yyzyz"}, {"x", "xxxx", "zx"}},
      {"root ::= [^a-z\\n]", {"A", "0", "é", "€", "😀"}, {"a", "\n", "AB", "\xFF", "\xC3"}},
      {"root ::= .", {"a", "\n", "\xF4\x8F\xBF\xBF"}, {"", "\xED\xA0\x80", "\xC0\x80", "\xF4\x90\x80\x80"}},
      {"root ::= [\\x41-\\x43\\u00e9\\U0001F600]", {"A", "C", "é", "😀"}, {"D", "è", "😁"}},
      {"root ::= \"\\\"\\\\\\n\\t\\x41\\u20ac\"", {"\"\\\n\tA€"}, {"A"}},
      {"root ::= [a\\]\\-]", {"a", "]", "-"}, {"b"}},
      {"root ::= [a-]", {"a", "-"}, {"b"}},
      {"# first\nroot ::= a # the rest\n  | b\na ::= \"a\"\r\n\nb ::= (\n \"b\" |\n \"c\" # here\n)\n",
       {"a", "b", "c"},
       {"ab"}},
      {"root ::= \"a\" |\n \"b\"", {"a", "b"}, {"c"}},
      {"root ::= |  \"a\"", {"", "a"}, {"b"}},
      {"root ::= \"(\" root \")\" | \"\"", {"", "()", "((()))"}, {"(", "(()", "())"}},
      // Ambiguous: which of the two endings comes is known only at the end.
      {"root ::= s\ns ::= \"a\" s \"b\" | \"a\" s \"c\" | \"\"",
       {"", "ab", "aabc", "aacb"},
       {"a", "aab", "abc"}},
      {"root ::= a b c\na ::= \"x\"?\nb ::= \"x\"?\nc ::= \"x\"?", {"", "x", "xx", "xxx"}, {"xxxx"}},
      {"root ::= ((\"a\"?)*)* \"b\"", {"b", "aab"}, {"a"}},
      {"root ::= list\nlist ::= \"[\" (list (\",\" list)*)? \"]\"", {"[]", "[[],[[]]]"}, {"[,]", "[[]"}},
      {"root ::= dead | \"a\"\ndead ::= \"x\" []", {"a"}, {"x"}},
  };
  for (const Case& c : cases) {
    const auto grammar = grammar_of(c.grammar);
    ASSERT_TRUE(grammar);
    GrammarMachine machine(grammar);
    for (const std::string& text : c.yes) EXPECT_TRUE(accepts(machine, text)) << c.grammar << "\n" << text;
    for (const std::string& text : c.no) EXPECT_FALSE(accepts(machine, text)) << c.grammar << "\n" << text;
  }
}

TEST(Gbnf, SaysWhereAGrammarIsWrong) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "no rule named 'root'"},
      {"a ::= \"x\"", "no rule named 'root'"},
      {"root = \"x\"", "line 1, column 6: '=' where '::=' was expected"},
      {"root ::= \"a\n\n", "quotes or brackets are not closed"},
      {"root ::= [a", "not closed"},
      {"root ::= (\"a\"", "the end of the text where ')' was expected"},
      {"root ::= \"é\" missing", "line 1, column 14: rule 'missing' is not defined"},
      {"root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1: rule 'root' is defined a second time"},
      {"root ::= \"a\" )", "column 14: ')' where the end of the rule"},
      {"root ::= \"\\q\"", "the escape \\q is not known"},
      {"root ::= \"\\u12\"", "hexadecimal digits"},
      {"root ::= \"\\ud800\"", "no such character"},
      {"root ::= [z-a]", "ends before it begins"},
      {"root ::= \"a\"{3,2}", "at least 3 and at most 2"},
      {"root ::= \"a\"{99999}", "more than 10000 repetitions"},
      {"root ::= \"a\"{x}", "where a number was expected"},
      {"root ::= <think>", "write its text"},
      {"root ::= \"\xFF\"", "not UTF-8"},
      {"root ::= root \"a\" | \"b\"", "rule 'root' calls itself before it reads anything"},
      {"root ::= a\na ::= \"x\"? b\nb ::= a \"y\" | \"z\"", "calls itself"},
      {"root ::= \"a\" root", "matches no text"},
      {"root ::= []", "matches no text"},
  };
  for (const auto& [text, want] : cases) {
    const auto grammar = parse_gbnf(text);
    ASSERT_FALSE(grammar.has_value()) << text;
    EXPECT_THAT(grammar.error().message, HasSubstr(want)) << text;
  }
}

// Grammars made to be expensive are refused, or run, in a moment.
TEST(Gbnf, SurvivesHostileGrammars) {
  std::string parentheses = "root ::= ", optional = "root ::= ", chain = "root ::= r0\n";
  for (int i = 0; i < 100000; ++i) parentheses += "(";
  for (int i = 0; i < 30000; ++i) optional += "\"a\"? ";
  for (int i = 0; i < 20000; ++i) chain += "r" + std::to_string(i) + " ::= r" + std::to_string(i + 1) + "\n";
  chain += "r20000 ::= \"x\"";
  EXPECT_FALSE(parse_gbnf(parentheses).has_value());
  EXPECT_FALSE(parse_gbnf(optional).has_value());
  EXPECT_TRUE(
      parse_gbnf("root ::= ((((\"a\"{1000}){1000}){1000}) \"b\"){10000} [é]{10000}{10000}").has_value());
  EXPECT_FALSE(parse_gbnf(std::string(kMaxGrammarBytes + 1, '#')).has_value());
  GrammarMachine deep(grammar_of(chain));
  EXPECT_TRUE(accepts(deep, "x"));
  GrammarMachine ambiguous(
      grammar_of("root ::= e\ne ::= t (\"a\" e)? (\"a\" e)?\nt ::= \"a\" t | \"a\"? \"b\"?"));
  GrammarMachine::State state = ambiguous.start();
  for (int i = 0; i < 400; ++i) state = ambiguous.step(state, 'a');
}

TEST(GrammarMachine, SaysThatATextHasTooManyReadings) {
  std::string alternatives;
  for (int i = 0; i < 4500; ++i)
    alternatives += (i > 0 ? " | " : "") + ("\"x\" [0-9] \"" + std::to_string(10000 + i) + "\"");
  GrammarMachine at_once(grammar_of("root ::= \"a\" (" + alternatives + ")")),
      later(grammar_of("root ::= [a-z]{300} (" + alternatives + ")")),
      never(grammar_of("root ::= [a-z]{300} (\"x\" [0-9] \"1\" | \"x\" [0-9] \"2\")"));
  EXPECT_TRUE(at_once.gives_up_soon());
  EXPECT_FALSE(later.gives_up_soon());
  EXPECT_EQ(later.walk(later.start(), std::string(300, 'b') + "x"), GrammarMachine::kDead);
  EXPECT_TRUE(later.has_given_up());
  EXPECT_EQ(never.walk(never.start(), std::string(300, 'b') + "y"), GrammarMachine::kDead);
  EXPECT_FALSE(never.has_given_up());
}

// The machine begins again when it remembers too much; the text goes on.
TEST(GrammarMachine, GoesOnInAnotherMachine) {
  const auto grammar = grammar_of("root ::= \"[\" (root | [a-z]*) \"]\"");
  GrammarMachine a(grammar), b(grammar);
  const std::string open(500, '['), close(500, ']');
  const GrammarMachine::State there = a.walk(a.start(), open + "xyz]]");
  ASSERT_NE(there, GrammarMachine::kDead);
  b.walk(b.start(), "[[q");
  const GrammarMachine::State copy = a.copy_to(b, there);
  EXPECT_TRUE(b.can_end(b.walk(copy, close.substr(2))));
  EXPECT_EQ(b.walk(copy, close), GrammarMachine::kDead);
  EXPECT_TRUE(b.must_end(b.walk(copy, close.substr(2))));
}

}  // namespace
}  // namespace thermo
