// Templates that try to crash the process, to hang it or to use up its memory; and marks, which must survive
// every way to move text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "jinja/testing/render.h"

namespace thermo::jinja {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

std::string repeat(const std::string& s, int n) {
  std::string out;
  for (int i = 0; i < n; ++i) out += s;
  return out;
}

TEST(Hostile, EndsLoopsThatDoNotEnd) {
  RenderOptions options;
  options.limits.max_steps = 100'000;
  const std::string loops = repeat("{% for i in range(1000) %}", 5) + repeat("{% endfor %}", 5);
  EXPECT_THAT(render(loops, "{}", options), HasSubstr("more than 100000 steps"));
  EXPECT_THAT(render("{% set l = [1] %}{% for i in l %}{% do l.append(i) %}{% endfor %}", "{}", options),
              HasSubstr("steps"));
  EXPECT_THAT(render("{% for i in range(1000000000) %}{% endfor %}"),
              HasSubstr("range() gives at most 100000"));
}

TEST(Hostile, BoundsOutputAndStrings) {
  EXPECT_THAT(render("{{ 'a' * 1000000000 }}"), HasSubstr("over the limit"));
  EXPECT_THAT(render("{{ 'a' * 10 ** 30 }}"), HasSubstr("over the limit"));
  EXPECT_THAT(render("{{ [0] * 1000000000 }}"), HasSubstr("over the limit"));
  EXPECT_THAT(render("{{ '%999999999d' % 1 }}"), HasSubstr("over 10000"));
  RenderOptions options;
  options.limits.max_output_bytes = 100'000;
  for (const char* source :
       {"{% set s = namespace(s='a') %}{% for i in range(99) %}{% set s.s = s.s ~ s.s %}{% endfor %}",
        "{% set s = 'a' * 1000 %}{{ s.replace('', s) }}", "{% set s = 'a' * 1000 %}{{ s|list|join(s) }}",
        "{% set s = 'a' * 1000 %}{{ [s] * 200 }}", "{% set s = 'a' * 1000 %}{{ ([s] * 200)|tojson }}",
        "{% for i in range(100000) %}aa{% endfor %}"}) {
    EXPECT_THAT(render(source, "{}", options), HasSubstr("over the limit of 100000")) << source;
  }
}

TEST(Hostile, RefusesEvenWhenTheLimitsAreTooSmallToStart) {
  RenderOptions options;
  options.limits = {.max_output_bytes = 0, .max_live_bytes = 0, .max_steps = 0, .max_depth = 0};
  EXPECT_THAT(render("a", "{}", options), StartsWith("ERROR"));
}

TEST(Hostile, BoundsLiveMemory) {
  RenderOptions options;
  options.limits.max_live_bytes = 1 << 20;
  EXPECT_THAT(render("{% set l = [] %}{% for i in range(2000) %}{% do l.append('a' * 1000) %}{% endfor %}",
                     "{}", options),
              HasSubstr("more than 1048576 bytes of memory"));
  // What is dropped again does not count.
  EXPECT_EQ(render("{% for i in range(2000) %}{% set x = 'a' * 1000 %}{% endfor %}", "{}", options), "");
}

TEST(Hostile, BoundsRecursion) {
  EXPECT_THAT(render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), HasSubstr("deep"));
  EXPECT_THAT(render("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}"), HasSubstr("deep"));
  EXPECT_THAT(render("{{" + repeat("(", 10000) + "1" + repeat(")", 10000) + "}}"), HasSubstr("deep"));
  EXPECT_THAT(render("{{" + repeat("[", 10000) + repeat("]", 10000) + "}}"), HasSubstr("deep"));
  EXPECT_THAT(render("{{" + repeat("not ", 10000) + "1}}"), HasSubstr("deep"));
  EXPECT_THAT(render("{{" + repeat("-", 10000) + "1}}"), HasSubstr("deep"));
  EXPECT_THAT(render("{{ 1" + repeat(" + 1", 10000) + "}}"), HasSubstr("deep"));
  EXPECT_THAT(render("{{ x" + repeat("|list", 10000) + "}}"), HasSubstr("deep"));
  EXPECT_THAT(render("{{ x" + repeat(".a", 10000) + "}}"), HasSubstr("deep"));
  EXPECT_THAT(render("{{ x" + repeat(" if x else x", 10000) + "}}"), HasSubstr("deep"));
  EXPECT_THAT(render(repeat("{% if x %}", 10000)), HasSubstr("deep"));
  EXPECT_EQ(render("{% if x %}" + repeat("{% elif x %}", 5000) + "{% else %}ok{% endif %}"), "ok");
  EXPECT_EQ(render("{{ 'a'" + repeat(" ~ 'a'", 1000) + " }}").size(), 1001u);
  EXPECT_THAT(render("{{ x }}", "{\"x\": " + repeat("[", 1000) + repeat("]", 1000) + "}"),
              HasSubstr("nested more than"));
}

TEST(Hostile, SurvivesValuesThatHoldThemselves) {
  EXPECT_THAT(render("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}"), HasSubstr("nested"));
  EXPECT_THAT(render("{% set l = [] %}{% do l.append(l) %}{{ l }}"), HasSubstr("nested"));
  EXPECT_THAT(render("{% set l = [] %}{% do l.append(l) %}{{ l|tojson }}"), HasSubstr("nested"));
  EXPECT_THAT(render("{% set a = [] %}{% do a.append(a) %}{% set b = [] %}{% do b.append(b) %}{{ a == b }}"),
              HasSubstr("nested"));
  EXPECT_EQ(render("{% set d = {} %}{% do d.update(d=d) %}{{ d.d.d.d|length }}"), "1");
  EXPECT_EQ(render("{% set ns = namespace() %}{% for i in [1] %}{% macro m() %}{{ i }}{% endmacro %}{% set "
                   "ns.m = m %}{% set ns.l = loop %}{% endfor %}{{ ns.m() }}"),
            "1");
  EXPECT_EQ(render("{% set ns = namespace() %}{% set ns.g = [ns]|map('list') %}ok"), "ok");
}

TEST(Hostile, SurvivesLongChains) {
  EXPECT_EQ(
      render(
          "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}ok"),
      "ok");
  EXPECT_EQ(render("{% set ns = namespace(l={}) %}{% for i in range(99999) %}{% set ns.l = {'k': ns.l} %}{% "
                   "endfor %}ok"),
            "ok");
  EXPECT_EQ(render("{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l|map('upper') "
                   "%}{% endfor %}ok"),
            "ok");
  EXPECT_THAT(render("{% set ns = namespace(l=['a']) %}{% for i in range(9999) %}{% set ns.l = ns.l|batch(1) "
                     "%}{% endfor %}{{ ns.l|list }}"),
              HasSubstr("chained"));
  EXPECT_EQ(render("{% set ns = namespace(l=1) %}{% for i in range(20000) %}{% for j in [ns.l] %}{% set ns.l "
                   "= loop %}{% endfor %}{% endfor %}ok"),
            "ok");
  EXPECT_EQ(render("{% set ns = namespace(l=1) %}{% for i in range(20000) %}{% set ns.l = cycler(ns.l) %}{% "
                   "endfor %}ok"),
            "ok");
}

TEST(Hostile, EndsValuesOfExponentialSize) {
  const std::string build =
      "{% set ns = namespace(a=[1], b=[1], t=(1,)) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% "
      "set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}";
  RenderOptions options;
  options.limits.max_steps = 1'000'000;
  for (const char* use : {"{{ ns.a }}", "{{ ns.a|tojson }}", "{{ ns.a == ns.b }}", "{{ ns.a < ns.b }}",
                          "{{ {ns.t: 1} }}", "{{ [ns.t]|unique|list }}"}) {
    EXPECT_THAT(render(build + use, "{}", options), StartsWith("ERROR")) << use;
  }
}

TEST(Hostile, SurvivesBytesThatAreNotUtf8) {
  EXPECT_EQ(render("\xff{{ 'a\xff' | length }}\xc3"),
            "\xff"
            "2\xc3");
  EXPECT_EQ(render("{{ '\xe2\x82'[0:1] }}"), "\xe2");
  EXPECT_EQ(render("{{ '\xff'|upper ~ '\xff'|trim }}"), "\xff\xff");
}

std::string marked(const std::string& expression) {
  RenderOptions options;
  options.untrusted_names = {"u"};
  const Rendered r =
      try_render("{{ " + expression + " }}", R"({"u": " <é> ", "t": "<t>", "n": {"k": 1}})", options).value();
  std::string out;
  size_t at = 0;
  for (const ByteRange& range : r.marked) {
    out +=
        r.text.substr(at, range.begin - at) + "[" + r.text.substr(range.begin, range.end - range.begin) + "]";
    at = range.end;
  }
  return out + r.text.substr(at);
}

TEST(Marks, FollowTheirBytes) {
  EXPECT_EQ(marked("u"), "[ <é> ]");
  EXPECT_EQ(marked("t"), "<t>");
  EXPECT_EQ(marked("t + u|trim + t"), "<t>[<é>]<t>");
  EXPECT_EQ(marked("t ~ u.strip() ~ 1 ~ u[1]"), "<t>[<é>]1[<]");
  EXPECT_EQ(marked("u.split('é')|join('|')"), "[ <]|[> ]");
  EXPECT_EQ(marked("u|upper|trim"), "[<É>]");
  EXPECT_EQ(marked("(t ~ u)|replace('<', '{')"), "{t>[ ]{[é> ]");
  EXPECT_EQ(marked("t|replace('t', u)"), "<[ <é> ]>");
  EXPECT_EQ(marked("{'k': u}|tojson"), "{\"k\": \"[ <é> ]\"}");
  EXPECT_EQ(marked("[u]"), "['[ <é> ]']");
  EXPECT_EQ(marked("'%s|%s'|format(u, t)"), "[ <é> ]|<t>");
  EXPECT_EQ(marked("'{}|{}'.format(u, t)"), "[ <é> ]|<t>");
  EXPECT_EQ(marked("u|list|join"), "[ <é> ]");
  EXPECT_EQ(marked("u[::-1]"), "[ >é< ]");
  EXPECT_EQ(marked("u|e"), "[ &lt;é&gt; ]");
  EXPECT_EQ(marked("(t ~ '\\n' ~ u)|indent(2)"), "<t>\n  [ <é> ]");
  EXPECT_EQ(marked("u * 2"), "[ <é>  <é> ]");
}

}  // namespace
}  // namespace thermo::jinja
