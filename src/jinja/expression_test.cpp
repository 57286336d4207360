// Operators, filters, tests and methods.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "jinja/testing/render.h"

namespace thermo::jinja {
namespace {

using testing::HasSubstr;

struct Case {
  const char* expression;
  const char* printed;
};

void expect_all(std::initializer_list<Case> cases, const char* context = "{}") {
  for (const Case& c : cases)
    EXPECT_EQ(render(std::string("{{ ") + c.expression + " }}", context), c.printed) << c.expression;
}

TEST(Expression, CalculatesLikePython) {
  expect_all(
      {{"1 + 2 * 3", "7"},
       {"7 / 2", "3.5"},
       {"6 / 2", "3.0"},
       {"-7 // 2", "-4"},
       {"-7 % 3", "2"},
       {"7 % -3", "-2"},
       {"-7.5 // 2", "-4.0"},
       {"2 ** 10", "1024"},
       {"2 ** -1", "0.5"},
       {"0.1 + 0.2", "0.30000000000000004"},
       {"1e16", "1e+16"},
       {"1e15", "1000000000000000.0"},
       {"0.00001", "1e-05"},
       {"true + 1", "2"},
       {"0x1F + 1_000", "1031"},
       {"'ab' * 2", "abab"},
       {"[1] + [2]", "[1, 2]"},
       {"1 ~ 2 + 3", "ERROR template line 1: '+' does not work on str and int; use '~' to join text"}});
  EXPECT_THAT(render("{{ 1 / 0 }}"), HasSubstr("division by zero"));
  EXPECT_THAT(render("{{ 2 ** 200 }}"), HasSubstr("does not fit into 128 bits"));
}

TEST(Expression, ComparesAndChains) {
  expect_all({{"1 < 2 < 3", "True"},
              {"1 < 3 < 2", "False"},
              {"1 == 1.0", "True"},
              {"'a' < 'b'", "True"},
              {"[1, 2] < [1, 3]", "True"},
              {"'a' in 'abc'", "True"},
              {"1 not in [2]", "True"},
              {"'k' in {'k': 1}", "True"},
              {"none == false", "False"},
              {"0 or 'x'", "x"},
              {"0 and 'x'", "0"},
              {"not 1", "False"},
              {"1 if true else 2", "1"},
              {"(1 if false) is defined", "False"}});
}

TEST(Expression, IndexesAndSlices) {
  expect_all({{"l[-1]", "3"},
              {"l[::-1]", "[3, 2, 1]"},
              {"l[1:]", "[2, 3]"},
              {"l[9]", ""},
              {"s[1:3]", "él"},
              {"s[::-1]", "olléh"},
              {"s|length", "5"},
              {"l.0", "1"},
              {"{'a': [1, 2]}['a'].1", "2"}},
             R"({"l": [1, 2, 3], "s": "héllo"})");
}

TEST(Expression, PrintsLikePython) {
  expect_all({{"[1, 'a', none, true, 1.0, {'k': ()}]", "[1, 'a', None, True, 1.0, {'k': ()}]"},
              {"['it\\'s', '\\n\\x07é']", "[\"it's\", '\\n\\x07é']"},
              {"(1,)", "(1,)"},
              {"range(3)", "range(0, 3)"},
              {"{'a': 1}.keys()", "dict_keys(['a'])"},
              {"none", "None"}});
}

TEST(Expression, WritesJsonLikePython) {
  expect_all({{"x|tojson", R"({"b": [1, 2.0, null, true], "a": "é<\"\n"})"},
              {"x|tojson(indent=2)",
               "{\n  \"b\": [\n    1,\n    2.0,\n    null,\n    true\n  ],\n  \"a\": \"é<\\\"\\n\"\n}"},
              {"x.a|tojson(ensure_ascii=True)", R"("\u00e9<\"\n")"},
              {"x|tojson(separators=(',', ':'))", R"({"b":[1,2.0,null,true],"a":"é<\"\n"})"},
              {"{'b': 1, 'a': 2}|tojson(sort_keys=true)", R"({"a": 2, "b": 1})"},
              {"[[], {}]|tojson(indent=1)", "[\n [],\n {}\n]"},
              {"'\\x01'|tojson", "\"\\u0001\""}},
             R"({"x": {"b": [1, 2.0, null, true], "a": "é<\"\n"}})");
}

TEST(Expression, AppliesFilters) {
  expect_all({{"' a '|trim", "a"},
              {"'xax'|trim('x')", "a"},
              {"'aB'|upper ~ 'aB'|lower ~ 'aB'|capitalize", "ABabAb"},
              {"'it\\'s a-b'|title", "It's A-B"},
              {"'aaa'|replace('a', 'b', 2)", "bba"},
              {"[1, 2]|join('-')", "1-2"},
              {"l|map(attribute='n')|join(',')", "2,1,2"},
              {"l|selectattr('n', 'equalto', 2)|map(attribute='s')|list", "['b', 'A']"},
              {"l|rejectattr('n', 'gt', 1)|list|length", "1"},
              {"l|sort(attribute='s')|map(attribute='s')|join", "aAb"},
              {"l|groupby('n')|map('first')|list", "[1, 2]"},
              {"l|sum(attribute='n')", "5"},
              {"[3, 1, 2]|sort(reverse=true)", "[3, 2, 1]"},
              {"['a', 'A', 'b']|unique|list", "['a', 'b']"},
              {"[1, 2, 3]|reverse|list", "[3, 2, 1]"},
              {"[1, 2]|first ~ [1, 2]|last", "12"},
              {"[0, 1, '']|select|list", "[1]"},
              {"range(5)|batch(2)|list", "[[0, 1], [2, 3], [4]]"},
              {"'3.7'|int + '2'|float", "5.0"},
              {"-5|abs", "5"},
              {"2.675|round(2)", "2.67"},
              {"2.5|round", "2.0"},
              {"'a\\nb'|indent(2)", "a\n  b"},
              {"{'b': 1, 'a': 2}|dictsort", "[('a', 2), ('b', 1)]"},
              {"'<'|e", "&lt;"},
              {"'a b/é'|urlencode", "a%20b/%C3%A9"},
              {"'%s-%02d'|format('a', 5)", "a-05"},
              {"'foo bar'|truncate(5, leeway=0)", "fo..."},
              {"'a b'|wordcount", "2"},
              {"''|default('x', true)", "x"},
              {"{'a': 1}|items|list", "[('a', 1)]"},
              {"[3, 1]|min ~ [3, 1]|max", "13"}},
             R"({"l": [{"n": 2, "s": "b"}, {"n": 1, "s": "a"}, {"n": 2, "s": "A"}]})");
}

TEST(Expression, GivesGeneratorsOnceAndTreatsThemAsTrue) {
  EXPECT_EQ(render("{% set g = ['a']|map('upper') %}{{ g|list }}{{ g|list }}"), "['A'][]");
  EXPECT_EQ(render("{{ 'yes' if []|select else 'no' }}"), "yes");
  EXPECT_THAT(render("{{ [1]|select|length }}"), HasSubstr("use '| list'"));
}

TEST(Expression, Tests) {
  expect_all(
      {{"'a' is string and {} is mapping and [] is sequence and [] is iterable", "True"},
       {"1 is number and 1 is integer and 1.0 is float and true is boolean", "True"},
       {"none is none and x is undefined and 1 is defined", "True"},
       {"3 is odd and 4 is even and 9 is divisibleby 3", "True"},
       {"1 is eq 1 and 1 is ne 2 and 1 is lt 2 and 2 is gt 1 and 1 is in [1] and 1 is sameas 1", "True"},
       {"'a' is mapping or 1 is string", "False"},
       {"true is true and false is false and 1 is not true", "True"}});
}

TEST(Expression, CallsStringMethods) {
  expect_all({{"'a,b,c'.split(',', 1)", "['a', 'b,c']"},
              {"'a,b,c'.rsplit(',', 1)", "['a,b', 'c']"},
              {"' a  b '.split()", "['a', 'b']"},
              {"'a\\nb\\r\\nc'.splitlines()", "['a', 'b', 'c']"},
              {"'xxaxx'.strip('x') ~ ' a'.lstrip() ~ 'a '.rstrip()", "aaa"},
              {"'abc'.startswith('a') and 'abc'.endswith(('x', 'c'))", "True"},
              {"'héé'.find('é') ~ 'héé'.rfind('é') ~ 'h'.find('x')", "12-1"},
              {"'aXbX'.replace('X', '-', 1)", "a-bX"},
              {"', '.join(['a', 'b'])", "a, b"},
              {"'aa'.count('a')", "2"},
              {"'ab'.removeprefix('a')", "b"},
              {"'a-b'.partition('-')", "('a', '-', 'b')"},
              {"'{} {x:>3}'.format(1, x=2)", "1   2"},
              {"'12'.isdigit() and 'a'.isalpha() and ' '.isspace()", "True"},
              {"'straße'.upper()", "STRASSE"},
              {"'7'.zfill(3)", "007"},
              {"'a b'.title()", "A B"}});
}

TEST(Expression, CallsListAndDictMethods) {
  expect_all({{"{'a': 1}.get('a') ~ {'a': 1}.get('b', 2)", "12"},
              {"{'a': 1}.items()|list", "[('a', 1)]"},
              {"[1, 2, 1].count(1) ~ [1, 2].index(2)", "21"}});
  EXPECT_EQ(render("{% set a = [1] %}{% do a.append(2) %}{% set b = {} %}{% do b.update(x=a) %}{{ b }}{{ "
                   "a.pop(0) }}{{ b }}"),
            "{'x': [1, 2]}1{'x': [2]}");
}

TEST(Expression, FindsKeysInLargeDicts) {
  EXPECT_EQ(
      render(
          "{% set d = dict() %}{% for i in range(100) %}{% do d.update({i: i * 2, 'k' ~ i: i}) %}{% endfor %}"
          "{{ d[77] }} {{ d['k42'] }} {{ d.k99 }} {{ d[77.0] }} {{ d.pop(77) }} {{ d[77] is defined }} {{ "
          "d[78] }} {{ d|length }}"),
      "154 42 99 154 154 False 156 199");
}

}  // namespace
}  // namespace thermo::jinja
