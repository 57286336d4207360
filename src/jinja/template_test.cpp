// What templates do, statement by statement. tests/jinja_parity.py compares far more against python3-jinja2.
#include "jinja/template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "jinja/testing/render.h"

namespace thermo::jinja {
namespace {

using testing::HasSubstr;

TEST(Template, TrimsTheNewlineAfterABlockAndSpacesBeforeOne) {
  EXPECT_EQ(render("{% if true %}\na\n{% endif %}\nb"), "a\nb");
  EXPECT_EQ(render("x\n  {% if true %}\n  a\n  {% endif %}\ny"), "x\n  a\ny");
  EXPECT_EQ(render("x  {% if true %}a{% endif %}"), "x  a");
  EXPECT_EQ(render("  {{ 1 }}\n{{ 2 }}"), "  1\n2");
  EXPECT_EQ(render("  {# c #}\na"), "a");
}

TEST(Template, StripsWithMinusAndKeepsWithPlus) {
  EXPECT_EQ(render("a \n {{- 1 -}} \n b"), "a1b");
  EXPECT_EQ(render("a \n {%- if true -%} \n b {%- endif %}"), "ab");
  EXPECT_EQ(render("a\n  {%+ if true +%}\nb{% endif %}"), "a\n  \nb");
  EXPECT_EQ(render("a {#- c -#} b"), "ab");
}

TEST(Template, DropsOneNewlineAtTheEnd) {
  EXPECT_EQ(render("a\n"), "a");
  EXPECT_EQ(render("a\n\n"), "a\n");
  EXPECT_EQ(render("a\r\nb\r\n"), "a\nb");
}

TEST(Template, LeavesRawBlocksAlone) {
  EXPECT_EQ(render("{% raw %}{{ x }} {% if %}{% endraw %}"), "{{ x }} {% if %}");
  EXPECT_EQ(render("a {%- raw -%} {{ {%- endraw -%} b"), "a{{b");
}

TEST(Template, LetsBracesNestInsideExpressions) {
  EXPECT_EQ(render("{{ {'a': {'b': 1}} }}"), "{'a': {'b': 1}}");
  EXPECT_EQ(render("{{ '}}' }}{% set x = '%}' %}{{ x }}"), "}}%}");
}

TEST(Template, ChoosesBranches) {
  const char* source = "{% if x == 1 %}one{% elif x == 2 %}two{% else %}many{% endif %}";
  EXPECT_EQ(render(source, R"({"x": 1})"), "one");
  EXPECT_EQ(render(source, R"({"x": 2})"), "two");
  EXPECT_EQ(render(source, R"({"x": 3})"), "many");
}

TEST(Template, LoopsWithItsLoopVariable) {
  EXPECT_EQ(
      render("{% for i in [7, 8, 9] %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}"
             "{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') "
             "}} {% endfor %}"),
      "103TrueFalse38a 212FalseFalse379b 321FalseTrue38a ");
  EXPECT_EQ(render("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}"), "a=1;b=2;");
  EXPECT_EQ(render("{% for i in range(6) if i is odd %}{{ i }}{{ loop.last }} {% else %}none{% endfor %}"),
            "1False 3False 5True ");
  EXPECT_EQ(render("{% for i in [] %}x{% else %}none{% endfor %}"), "none");
  EXPECT_EQ(render("{% for i in missing %}x{% else %}none{% endfor %}"), "none");
}

TEST(Template, BreaksAndContinues) {
  EXPECT_EQ(render("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break "
                   "%}{% endif %}"
                   "{{ i }}{% endfor %}"),
            "023");
}

TEST(Template, CallsARecursiveLoopAgain) {
  EXPECT_EQ(
      render("{% for x in [1, [2, [3]]] recursive %}<{{ loop(x) if x is sequence else x }}>{% endfor %}"),
      "<1><<2><<3>>>");
}

TEST(Template, KeepsASetInsideALoopForOneIteration) {
  EXPECT_EQ(render("{% set x = 0 %}{% for i in [1, 2] %}{{ x }}{% set x = i %}{{ x }} {% endfor %}{{ x }}"),
            "01 02 0");
  EXPECT_EQ(render("{% if true %}{% set y = 1 %}{% endif %}{{ y }}"), "1");
}

TEST(Template, ChangesANamespaceFromInsideALoop) {
  EXPECT_EQ(render("{% set ns = namespace(n=1) %}{% for i in [2, 3] %}{% set ns.n = ns.n * i %}{% endfor "
                   "%}{{ ns.n }}"),
            "6");
  EXPECT_THAT(render("{% set x = 1 %}{% set x.y = 2 %}"), HasSubstr("expected a namespace"));
}

TEST(Template, EvaluatesALoopConditionWhenItsItemIsReached) {
  EXPECT_EQ(render("{% set ns = namespace(last=0) %}{% for i in [1, 1, 2] if i != ns.last %}{{ i }}"
                   "{% set ns.last = i %}{% endfor %}"),
            "12");
}

TEST(Template, CapturesSetAndFilterBlocks) {
  EXPECT_EQ(render("{% set x | upper %}a{{ 1 }}b{% endset %}[{{ x }}]"), "[A1B]");
  EXPECT_EQ(render("{% filter replace('a', 'b') | upper %}aa{% endfilter %}"), "BB");
  EXPECT_EQ(render("{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}"), "3False");
}

TEST(Template, CallsMacrosWithDefaultsAndKeywords) {
  const std::string macro = "{% macro m(a, b=2) %}({{ a }},{{ b }}){% endmacro %}";
  EXPECT_EQ(render(macro + "{{ m(1) }}{{ m(1, 3) }}{{ m(b=4, a=5) }}{{ m() }}"), "(1,2)(1,3)(5,4)(,2)");
  EXPECT_THAT(render(macro + "{{ m(1, 2, 3) }}"), HasSubstr("takes 2 values, seen 3"));
  EXPECT_THAT(render(macro + "{{ m(c=1) }}"), HasSubstr("no parameter named 'c'"));
  EXPECT_EQ(render("{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, k=2) }}"), "(1,){'k': 2}");
}

TEST(Template, HandsACallBlockToItsMacro) {
  EXPECT_EQ(render("{% macro m() %}[{{ caller(1) }}]{% endmacro %}{% call(v) m() %}<{{ v }}>{% endcall %}"),
            "[<1>]");
}

TEST(Template, LetsMacrosSeeTopLevelNames) {
  EXPECT_EQ(render("{% macro m() %}{{ x }}{% endmacro %}{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{{ "
                   "m() }}{% endfor %}"),
            "1");
}

TEST(Template, RendersTheBodyOfAGenerationBlock) {
  EXPECT_EQ(render("{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x is defined }}"), "aFalse");
}

TEST(Template, RefusesOtherTemplates) {
  for (const char* source :
       {"{% include 'a' %}", "{% import 'a' as b %}", "{% from 'a' import b %}", "{% extends 'a' %}"}) {
    EXPECT_THAT(render(source), HasSubstr("needs a second template")) << source;
  }
}

TEST(Template, SaysLineSeenAndExpected) {
  EXPECT_EQ(render("a\n\n{% if x %}\n{{ y ! }}"),
            "ERROR template line 4: unexpected character '!', expected a name, a value or an operator");
  EXPECT_EQ(render("\n{{ 1 + }}"), "ERROR template line 2: unexpected '}}', expected a value");
  EXPECT_EQ(render("{% for x of y %}"), "ERROR template line 1: unexpected 'of', expected 'in'");
  EXPECT_THAT(render("{% if a %}\n\n"), HasSubstr("the template ends inside a block, expected '{% elif %}'"));
  EXPECT_THAT(render("\n{% endfor %}"), HasSubstr("line 2: unknown statement 'endfor'"));
  EXPECT_THAT(render("{{ 'a"), HasSubstr("a string is never closed"));
  EXPECT_THAT(render("{# a"), HasSubstr("a comment '{#' is never closed"));
  EXPECT_THAT(render("{{ (1 }}"), HasSubstr("unexpected '}', expected ')'"));
  EXPECT_EQ(render("a\n{{ x.y.z }}", R"({"x": {}})"),
            "ERROR template line 2: 'dict object' has no attribute 'y', so it has no attribute 'z'");
  EXPECT_EQ(render("{{ f(1) }}"), "ERROR template line 1: 'f' is undefined, so it cannot be called");
  EXPECT_THAT(render("{{ 1 | nope }}"), HasSubstr("unknown filter 'nope'"));
  EXPECT_THAT(render("{{ 1 is nope }}"), HasSubstr("unknown test 'nope'"));
  EXPECT_THAT(render("{{ 'a' + 1 }}"), HasSubstr("use '~' to join text"));
}

TEST(Template, GivesTheMessageOfRaiseException) {
  EXPECT_EQ(render("\n{{ raise_exception('No user.') }}"), "ERROR template line 2: No user.");
}

TEST(Template, TreatsUndefinedAsPythonDoes) {
  EXPECT_EQ(render("[{{ x }}{{ x ~ 'a' }}{{ x|default('b') }}{{ not x }}{{ x == y }}{{ 1 in x }}{{ x|length "
                   "}}{{ x|items|list }}]"),
            "[abTrueTrueFalse0[]]");
  for (const char* source :
       {"{{ x.y }}", "{{ x[0] }}", "{{ x() }}", "{{ x + 1 }}", "{{ -x }}", "{{ x < 1 }}", "{{ x|tojson }}"}) {
    EXPECT_THAT(render(source), HasSubstr("'x' is undefined")) << source;
  }
}

TEST(Template, PrefersMethodsForDotsAndKeysForBrackets) {
  const char* context = R"({"d": {"items": 5, "k": 6}})";
  EXPECT_EQ(render("{{ d['items'] }}{{ d.k }}{{ d.items()|list }}", context), "56[('items', 5), ('k', 6)]");
}

TEST(Template, KeepsIntegersOf64Bits) {
  EXPECT_EQ(
      render("{{ a }} {{ b }} {{ a + 1 }}", R"({"a": 18446744073709551615, "b": -9223372036854775808})"),
      "18446744073709551615 -9223372036854775808 18446744073709551616");
}

TEST(Template, UsesTheGivenTime) {
  RenderOptions options;
  options.now = std::chrono::system_clock::from_time_t(86400 * 365);
  EXPECT_EQ(render("{{ strftime_now('%Y') }}", "{}", options), "1971");
}

TEST(Template, RendersFromSeveralThreads) {
  const Template parsed = Template::parse("{% for i in range(100) %}{{ 'a' ~ i }}{% endfor %}").value();
  const std::string expected = parsed.render(Json::object()).value().text;
  std::vector<std::thread> threads;
  std::vector<int> same(4, 0);
  for (size_t t = 0; t < same.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) same[t] += parsed.render(Json::object()).value().text == expected ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(same, std::vector<int>(4, 50));
}

TEST(Template, RefusesAContextThatIsNoObject) {
  EXPECT_FALSE(try_render("a", "[]"));
}

}  // namespace
}  // namespace thermo::jinja
