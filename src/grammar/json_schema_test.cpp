// JSON schemas by the table: texts that fit and texts that do not.
#include "grammar/json_schema.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "grammar/grammar_machine.h"

namespace thermo {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Case {
  std::string schema;
  std::vector<std::string> yes, no;
};

void check(const std::vector<Case>& cases, bool strict = false) {
  for (const Case& c : cases) {
    const auto compiled = compile_json_schema(Json::parse(c.schema), {.strict = strict});
    ASSERT_TRUE(compiled.has_value()) << c.schema << "\n" << compiled.error().message;
    GrammarMachine machine(compiled->grammar);
    const auto accepts = [&](const std::string& text) {
      return machine.can_end(machine.walk(machine.start(), text));
    };
    for (const std::string& text : c.yes) EXPECT_TRUE(accepts(text)) << c.schema << "\n" << text;
    for (const std::string& text : c.no) EXPECT_FALSE(accepts(text)) << c.schema << "\n" << text;
  }
}

TEST(JsonSchema, KnowsTypes) {
  check({
      {R"({"type": "string"})",
       {R"("")", R"("aé\n\u00e9\ud83d\ude00/")"},
       {"a", "\"\n\"", R"("\ud83d")", R"("\q")", "1"}},
      {R"({"type": "integer"})",
       {"0", "-7", "1234567890123456"},
       {"01", "1.0", "1e3", "-", "12345678901234567", "+1"}},
      {R"({"type": "number"})", {"0", "-7.25", "1e-5", "1.5E+10"}, {".5", "1.", "1e", "1e1000", "NaN"}},
      {R"({"type": "boolean"})", {"true", "false"}, {"True", "1"}},
      {R"({"type": "null"})", {"null"}, {"nul", "None"}},
      {R"({"type": ["string", "null"]})", {"null", R"("x")"}, {"1"}},
      {R"({"type": "string", "nullable": true})", {"null", R"("x")"}, {"1"}},
      {R"({"type": "array"})", {"[]", "[1, \"a\",[ ]]", "[\n  1\n]"}, {"[1,]", "[", "[,1]"}},
      {R"({"type": "object"})",
       {"{}", R"({"a": 1,"b":{"c":[]}})"},
       {"{a: 1}", R"({"a" : 1})", R"({"a":1,})"}},
      {"{}", {"1", "{}", "[]", "\"\"", "null", "true"}, {""}},
      {"true", {"1", "{}"}, {"x"}},
      {R"({"type": "array", "items": {}})",
       {"[\n" + std::string(32, ' ') + "1]", "[1,\n2\n]", "[ 1, 2 ]"},
       {"[\n\n1]", "[  1]", "[1,  2]", "[1 \n]", "[\n" + std::string(33, ' ') + "1]"}},
  });
}

// However many values there are, and however much of them is the same.
TEST(JsonSchema, KnowsLongListsOfValues) {
  Json values = Json::array({Json::array({1}), nullptr});
  Json nested = Json::array();
  for (int i = 0; i < 9000; ++i) values.push_back("the value " + std::to_string(i));
  for (int i = 0; i < 9000; ++i) values.push_back(i);
  for (int i = 0; i < 300; ++i)
    nested.push_back(std::string(static_cast<size_t>(i), 'a') + (i % 2 ? "ä" : "ö"));
  check(
      {{Json{{"enum", values}}.dump(),
        {R"("the value 0")", R"("the value 12")", R"("the value 8999")", "0", "12", "8999", "null", "[ 1]"},
        {R"("the value ")", R"("the value 9000")", R"("the value 012")", "9000", "01", "nul", "", "the"}},
       {Json{{"enum", nested}}.dump(),
        {R"("ö")", R"("aaaä")", "\"" + std::string(298, 'a') + "ö\"", "\"" + std::string(299, 'a') + "ä\""},
        {R"("ä")", R"("aaa")", "\"" + std::string(300, 'a') + "ö\"", "\"" + std::string(298, 'a') + "ä\""}}});
}

TEST(JsonSchema, HasMembersInOrderRequiredOrNot) {
  const std::string object =
      R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"},
      "c": {"type": "integer"}}, "additionalProperties": false, "required": )";
  check({
      {object + R"(["a", "b", "c"]})",
       {R"({"a": 1, "b": 2, "c": 3})"},
       {"{}", R"({"a":1,"b":2})", R"({"b":2,"a":1,"c":3})"}},
      {object + "[]}",
       {"{}", "{ }", R"({"a":1})", R"({"b":1})", R"({"c":1})", R"({"a":1,"c":1})", R"({"a":1,"b":2,"c":3})"},
       {R"({"c":1,"a":1})", R"({"d":1})", R"({"a":1,})", R"({"a":1,"a":1})"}},
      {object + R"(["b"]})",
       {R"({"b":1})", R"({"a":1,"b":1})", R"({"b":1,"c":1})"},
       {"{}", R"({"a":1,"c":1})"}},
      {R"({"properties": {"a": {"type": "integer"}, "ab": {"const": 1}}})",
       {"{}", R"({"x":1})", R"({"a":1,"abc":"x","x\u00e9":[],"b":{}})", R"({"a":1,"ab":1})", R"({"é":1})"},
       {R"({"a":"x"})", R"({"x":1,"a":1})", R"({"\u0061":"x"})", R"({"ab":2})"}},
      {R"({"properties": {"a": true}, "additionalProperties": {"type": "boolean"}, "required": ["z"]})",
       {R"({"z":true})", R"({"a":[],"z":false,"y":true})"},
       {"{}", R"({"a":1})", R"({"z":1})", R"({"z":true,"y":1})"}},
      {R"({"properties": {"k\"ey": {"const": 1}}, "required": ["k\"ey"], "additionalProperties": false})",
       {R"({"k\"ey":1})"},
       {R"({"key":1})"}},
      {R"({"properties": {"a": false, "b": {"type": "null"}}})",
       {"{}", R"({"b":null,"c":1})"},
       {R"({"a":1})"}},
  });
  check({{R"({"properties": {"a": {"type": "integer"}}})", {"{}", R"({"a":1})"}, {R"({"b":1})"}}}, true);
}

TEST(JsonSchema, HasElementsWithinBounds) {
  check({
      {R"({"items": {"type": "integer"}, "minItems": 1, "maxItems": 3})",
       {"[1]", "[1,2, 3]"},
       {"[]", "[1,2,3,4]", "[\"a\"]"}},
      {R"({"items": {"type": "integer"}, "minItems": 2})", {"[1,2]", "[1,2,3,4]"}, {"[]", "[1]"}},
      {R"({"items": {"type": "integer"}, "maxItems": 0})", {"[]", "[ ]"}, {"[1]"}},
      {R"({"type": "array", "maxItems": 1})", {"[]", "[{}]"}, {"[1,1]"}},
      {R"({"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "boolean"}})",
       {"[]", "[1]", R"([1,"a"])", R"([1,"a",true,false])"},
       {R"(["a"])", "[1,2]", R"([1,"a",1])"}},
      {R"({"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": false, "minItems": 2})",
       {R"([1,"a"])"},
       {"[]", "[1]", R"([1,"a",1])"}},
      {R"({"items": [{"type": "integer"}], "additionalItems": {"type": "null"}, "minItems": 2, "maxItems": 3})",
       {"[1,null]", "[1,null,null]"},
       {"[1]", "[1,1]", "[1,null,null,null]"}},
  });
}

TEST(JsonSchema, HasValuesOfAList) {
  check({
      {R"({"enum": ["a", 1, null, true, {"x": [1, 2]}, 1.5]})",
       {"\"a\"", "1", "null", "true", R"({"x":[1,2]})", R"({ "x": [1, 2] })", "1.5"},
       {"\"b\"", "2", R"({"x":[1]})"}},
      {R"({"const": "a\"é"})", {R"("a\"é")"}, {R"("a")"}},
      {R"({"type": "string", "enum": ["a", 1]})", {"\"a\""}, {"1"}},
      {R"({"type": "integer", "minimum": 2, "enum": [1, 2, 3.0, "x"]})", {"2", "3.0"}, {"1", "\"x\""}},
  });
}

TEST(JsonSchema, BoundsStrings) {
  check({
      {R"({"type": "string", "minLength": 2, "maxLength": 3})",
       {R"("ab")", R"("aé€")", R"("\n\ud83d\ude00")"},
       {R"("a")", R"("abcd")"}},
      {R"({"maxLength": 0})", {R"("")"}, {R"("a")"}},
      {R"({"pattern": "^[a-c]+\\d{2,3}$"})", {R"("ab12")"}, {R"("12")", R"("ab1")", R"("xab12")"}},
      {R"({"pattern": "b|^x$"})", {R"("abc")", R"("b")", R"("x")"}, {R"("xx")", R"("")"}},
      {R"({"pattern": "^(?:a|[^\\w\\s])?.\\.\\u0041$"})",
       {R"("ab.A")", R"("-\".A")"},
       {R"("bb.A")", R"("x.B")"}},
      {R"({"pattern": "^\"\\\\\\n$"})", {R"("\"\\\n")"}, {R"("n")"}},
      {R"({"format": "date"})",
       {R"("2024-02-28")", R"("1999-12-31")"},
       {R"("2024-02-30")", R"("2024-13-01")"}},
      {R"({"format": "date-time"})",
       {R"("2024-02-28T23:59:59Z")", R"("2024-02-28T00:00:00.5+02:00")"},
       {R"("2024-02-28")"}},
      {R"({"format": "time"})", {R"("12:00:00Z")"}, {R"("24:00:00Z")"}},
      {R"({"format": "uuid"})", {R"("123e4567-e89b-12d3-a456-426614174000")"}, {R"("123e4567")"}},
      {R"({"format": "ipv4"})", {R"("192.168.0.255")"}, {R"("256.1.1.1")"}},
      {R"({"format": "ipv6"})", {R"("::1")", R"("1:2:3:4:5:6:7:8")", R"("fe80::1")"}, {R"(":::")"}},
      {R"({"format": "email"})", {R"("a.b@c.de")"}, {R"("a@b")", R"("@c.de")"}},
  });
}

TEST(JsonSchema, BoundsNumbersExactly) {
  for (const auto& [least, most] : std::vector<std::pair<int, int>>{
           {0, 0}, {0, 9}, {5, 123}, {-5, 5}, {-123, -7}, {99, 101}, {-1000, 1000}, {10, 10}, {-1, 0}}) {
    const Json schema{{"type", "integer"}, {"minimum", least}, {"maximum", most}};
    GrammarMachine machine(compile_json_schema(schema)->grammar);
    for (int i = -1200; i <= 1200; ++i)
      ASSERT_EQ(machine.can_end(machine.walk(machine.start(), std::to_string(i))), i >= least && i <= most)
          << schema << " " << i;
  }
  check({
      {R"({"type": "integer", "minimum": 3})", {"3", "10", "9999999999999998"}, {"2", "0", "-3", "03"}},
      {R"({"type": "integer", "maximum": -3})", {"-3", "-10"}, {"-2", "0", "3"}},
      {R"({"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 4.5})", {"3", "4"}, {"2", "5"}},
      {R"({"type": "integer", "minimum": 2, "exclusiveMinimum": true})", {"3"}, {"2"}},
      {R"({"type": "number", "minimum": 0, "maximum": 1})",
       {"0", "1", "0.5", "1.0", "0.0"},
       {"1.1", "-0.1", "1.01", "2"}},
      {R"({"type": "number", "minimum": 0.25, "maximum": 2.5})",
       {"0.25", "0.3", "0.2500001", "1", "1.999", "2", "2.5", "2.50", "2.4999"},
       {"0.2", "0", "0.24", "2.51", "2.6", "3"}},
      {R"({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5})",
       {"0.1", "0.4999", "0.0001"},
       {"0", "0.0", "0.5", "0.50", "0.6"}},
      {R"({"type": "number", "minimum": -1.5, "maximum": -0.5})",
       {"-1", "-1.5", "-0.5", "-0.75"},
       {"-0.4", "-1.6", "0", "1"}},
      {R"({"type": "number", "minimum": 1.25, "maximum": 1.5})",
       {"1.25", "1.3", "1.5", "1.4999"},
       {"1.2", "1.51", "1", "1.249"}},
      {R"({"minimum": 100})", {"100", "100.5", "5000"}, {"99", "99.9", "-100"}},
  });
}

TEST(JsonSchema, PutsSchemasTogether) {
  check({
      {R"({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]})",
       {"1", "\"a\""},
       {"\"ab\"", "null"}},
      {R"({"oneOf": [{"const": 1}, {"const": 2}]})", {"1", "2"}, {"3"}},
      {R"({"allOf": [{"type": ["integer", "string"], "minimum": 3}, {"type": "number", "maximum": 5}]})",
       {"3", "5"},
       {"2", "6", "\"a\"", "4.5"}},
      {R"({"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                     {"properties": {"b": {"type": "string"}, "a": {"minimum": 5}}, "required": ["b"]}]})",
       {R"({"a":5,"b":""})"},
       {R"({"a":4,"b":""})", R"({"a":5})"}},
      {R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
           "additionalProperties": false, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]})",
       {R"({"a":1})", R"({"b":1})", R"({"a":1,"b":1})"},
       {"{}"}},
      {R"({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}, {"not": {}}]})", {"2", "3"}, {"1", "4"}},
      {R"({"allOf": [{"$ref": "#/$defs/a"}, {"maxLength": 2}], "$defs": {"a": {"type": "string", "minLength": 2}}})",
       {"\"ab\""},
       {"\"a\"", "\"abc\""}},
  });
}

TEST(JsonSchema, FollowsReferences) {
  check({
      {R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"},
          "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": false}}})",
       {R"({"v":1,"next":null})", R"({"v":1,"next":{"v":2,"next":null}})"},
       {R"({"v":1})", R"({"v":1,"next":{"v":2}})"}},
      {R"({"type": "array", "items": {"$ref": "#"}})", {"[]", "[[],[[]]]"}, {"[1]"}},
      {R"({"properties": {"a": {"$ref": "#/definitions/x~1y%20z"}}, "definitions": {"x/y z": {"const": 1}}, "required": ["a"]})",
       {R"({"a":1})"},
       {R"({"a":2})"}},
      {R"({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a", "minimum": 5}}, "required": ["b"]})",
       {R"({"b":5})"},
       {R"({"b":4})"}},
  });
}

TEST(JsonSchema, SaysWhatCannotBeUsedAndWhere) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"1", "#: an object or a boolean was expected"},
      {R"({"properties": {"a": {"type": "strin"}}})", "#/properties/a: the type \"strin\" is not known"},
      {R"({"type": 3})", "\"type\" must be a name"},
      {R"({"items": {"$ref": "#/$defs/none"}})", "#/items: the reference #/$defs/none leads nowhere"},
      {R"({"minLength": 1.5})", "\"minLength\" must be a whole number from 0 on"},
      {R"({"minItems": -1})", "\"minItems\" must be a whole number from 0 on"},
      {R"({"minimum": "a"})", "\"minimum\" must be a number"},
      {R"({"enum": 1})", "\"enum\" must be a list"},
      {R"({"anyOf": []})", "\"anyOf\" must be a list"},
      {R"({"properties": []})", "\"properties\" must be an object"},
      {"false", "no JSON fits it"},
      {R"({"allOf": [{"properties": {"a": true}, "required": ["a"]}], "additionalProperties": false})",
       "no JSON fits it"},
      {R"({"allOf": [{"const": 1}, {"const": 2}]})", "no JSON fits it"},
      {R"({"type": "integer", "minimum": 3, "maximum": 2})", "no JSON fits it"},
      {R"({"$ref": "#"})", "no JSON fits it"},
      {R"({"anyOf": [{"$ref": "#"}, {"type": "null"}]})", "calls itself"},
      {R"({"properties": {"a": {"$ref": "#"}}, "required": ["a"]})", "no JSON fits it"},
      {R"({"allOf": [{"pattern": "a"}, {"pattern": "b"}]})", "two different values of \"pattern\""},
  };
  for (const auto& [schema, want] : cases) {
    const auto compiled = compile_json_schema(Json::parse(schema));
    ASSERT_FALSE(compiled.has_value()) << schema;
    EXPECT_THAT(compiled.error().message, HasSubstr(want)) << schema;
  }
}

// A pattern beyond what grammars can say was refused whether the schema was strict or not.
TEST(JsonSchema, ListsPatternsThatItDoesNotReadAndRefusesThemWhenStrict) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"(?=a)", "look around"}, {"\\bword", "\\b cannot be used"}, {"(a", "')' was expected"}};
  for (const auto& [pattern, want] : cases) {
    const Json schema{{"type", "string"}, {"pattern", pattern}, {"maxLength", 3}};
    const auto compiled = compile_json_schema(schema);
    ASSERT_TRUE(compiled.has_value()) << pattern;
    EXPECT_THAT(compiled->ignored, ElementsAre("#/pattern"));
    GrammarMachine machine(compiled->grammar);
    EXPECT_TRUE(machine.can_end(machine.walk(machine.start(), R"("abc")"))) << "the length still holds";
    EXPECT_EQ(machine.walk(machine.start(), R"("abcd)"), GrammarMachine::kDead);
    const auto strict = compile_json_schema(schema, {.strict = true});
    ASSERT_FALSE(strict.has_value()) << pattern;
    EXPECT_THAT(strict.error().message, HasSubstr(want));
  }
}

TEST(JsonSchema, ListsWhatItDoesNotEnforceAndRefusesItWhenStrict) {
  const Json schema = Json::parse(R"({"title": "t", "x-mine": 1, "type": "object", "properties": {
      "a": {"type": "array", "uniqueItems": true}, "b": {"type": "number", "multipleOf": 2, "description": "d"},
      "c": {"$ref": "https://example.com/x"}, "d": {"type": "string", "format": "color"},
      "e": {"pattern": "^a+$", "maxLength": 3}}, "minProperties": 0})");
  const auto compiled = compile_json_schema(schema);
  ASSERT_TRUE(compiled.has_value());
  EXPECT_THAT(compiled->ignored,
              ElementsAre("#/properties/a/uniqueItems", "#/properties/b/multipleOf", "#/properties/c/$ref",
                          "#/properties/d/format", "#/properties/e/maxLength"));
  const auto strict = compile_json_schema(schema, {.strict = true});
  ASSERT_FALSE(strict.has_value());
  EXPECT_THAT(strict.error().message, HasSubstr("#/properties/a: \"uniqueItems\" cannot be enforced"));
}

// They were errors, although answers hardly reach the one, and the pattern holds without the other.
TEST(JsonSchema, ListsLargeBoundsAndLengthsBesideAPattern) {
  const Json schema = Json::parse(R"({"type": "object", "properties": {
      "a": {"type": "string", "maxLength": 65536, "minLength": 1}, "b": {"type": "array", "maxItems": 100000},
      "c": {"type": "string", "pattern": "^a+$", "maxLength": 3, "minLength": 0}}, "additionalProperties": false})");
  for (const bool strict : {false, true}) {
    const auto compiled = compile_json_schema(schema, {.strict = strict});
    ASSERT_TRUE(compiled.has_value()) << compiled.error().message;
    EXPECT_THAT(compiled->ignored, ElementsAre("#/properties/a/maxLength", "#/properties/b/maxItems",
                                               "#/properties/c/maxLength"));
    GrammarMachine machine(compiled->grammar);
    EXPECT_TRUE(machine.can_end(machine.walk(machine.start(), R"({"a": "x", "b": [1], "c": "aa"})")));
    EXPECT_EQ(machine.walk(machine.start(), R"({"a": "")"), GrammarMachine::kDead) << "minLength holds";
    EXPECT_EQ(machine.walk(machine.start(), R"({"c": "b)"), GrammarMachine::kDead) << "the pattern holds";
  }
  const auto least = compile_json_schema(Json{{"minLength", 20000}}, {.strict = true});
  ASSERT_FALSE(least.has_value());
  EXPECT_THAT(least.error().message, HasSubstr("leave it out"));
}

TEST(JsonSchema, GivesOtherMembersNames) {
  check({{R"({"properties": {"a": {"type": "integer"}}})",
          {R"({"a": 1, "b": 2})", R"({"aa": 1})"},
          {R"({"": 1})", R"({"a": 1, "": 2})", R"({"a": 1, "a": 2})", R"({"b": 1, "a": 2})"}}});
}

TEST(JsonSchema, SurvivesHostileSchemas) {
  Json deep = true, wide = Json::object();
  for (int i = 0; i < 5000; ++i) deep = Json{{"items", std::move(deep)}};
  EXPECT_FALSE(compile_json_schema(deep).has_value());
  for (int i = 0; i < 3000; ++i) wide["properties"]["p" + std::to_string(i)] = Json{{"type", "integer"}};
  EXPECT_TRUE(compile_json_schema(wide).has_value());
  Json doubling = Json::object();
  for (int i = 0; i < 40; ++i) {
    const Json next{{"$ref", "#/$defs/" + std::to_string(i + 1)}};
    doubling["$defs"][std::to_string(i)] =
        Json{{"allOf", {next, Json{{"allOf", {next, Json{{"minimum", i}}}}}}}};
  }
  doubling["$defs"]["40"] = Json{{"type", "integer"}};
  doubling["$ref"] = "#/$defs/0";
  EXPECT_FALSE(compile_json_schema(doubling).has_value());  // in a moment
  Json pairs = Json::object();
  for (int i = 0; i < 20; ++i)
    pairs["allOf"].push_back(Json{{"anyOf", {Json{{"minimum", i}}, Json{{"maximum", 100 - i}}}}});
  EXPECT_FALSE(compile_json_schema(pairs).has_value());
}

// A few hundred bytes took a minute and a gigabyte.
TEST(JsonSchema, RefusesAlternativesThatMultiplyWithoutEnd) {
  constexpr int kLong = 8;
  Json schema{{"allOf", {Json{{"$ref", "#/$defs/a0"}}, Json{{"$ref", "#/$defs/b0"}}}}};
  for (const std::string name : {"a", "b"}) {
    for (int i = 0; i < kLong; ++i) {
      const Json next{{"$ref", "#/$defs/" + name + std::to_string(i + 1)}};
      schema["$defs"][name + std::to_string(i)] = Json{{"anyOf", {next, next}}};
    }
    schema["$defs"][name + std::to_string(kLong)] = Json{{name == "a" ? "minimum" : "maximum", 5}};
  }
  const auto compiled = compile_json_schema(schema);
  ASSERT_FALSE(compiled.has_value());
  EXPECT_THAT(compiled.error().message, HasSubstr("too many, to be put together"));
}

// They were read again for each alternative.
TEST(JsonSchema, PutsOnlyTogetherWhatLimitsValues) {
  Json schema{{"type", "object"}};
  for (int i = 0; i < 3000; ++i)
    schema["$defs"][std::to_string(i)] = Json{{"type", "integer"}, {"minimum", i}, {"title", "n"}};
  for (int i = 0; i < 100; ++i)
    schema["anyOf"].push_back(Json{{"properties", {{"a", {{"$ref", "#/$defs/" + std::to_string(i)}}}}}});
  const auto compiled = compile_json_schema(schema);
  EXPECT_TRUE(compiled.has_value()) << compiled.error().message;
}

TEST(JsonSchema, HasAnyObject) {
  GrammarMachine machine(any_json_object());
  EXPECT_TRUE(machine.can_end(machine.walk(machine.start(), R"({"a": [1, {"b": null}], "c": "\u00e9"})")));
  EXPECT_EQ(machine.walk(machine.start(), "["), GrammarMachine::kDead);
}

}  // namespace
}  // namespace thermo
