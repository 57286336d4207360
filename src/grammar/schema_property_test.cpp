// Random schemas and random texts: whatever is written under a schema fits it, by a validator that shares
// nothing with the compiler.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <regex>

#include "base/utf8.h"
#include "gguf/gguf_file.h"
#include "grammar/grammar_matcher.h"
#include "grammar/json_schema.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

const Vocab& plankton() {
  static const Vocab vocab(*read_vocab(GgufFile(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf")));
  return vocab;
}

class SchemaMaker {
 public:
  explicit SchemaMaker(uint64_t seed) : random_(seed) {}

  Json make() {
    Json schema = any(3);
    if (uses_tree_)
      schema["$defs"]["tree"] =
          Json{{"type", "object"},
               {"properties",
                {{"v", any(0)}, {"kids", {{"type", "array"}, {"items", {{"$ref", "#/$defs/tree"}}}}}}},
               {"required", {"v"}},
               {"additionalProperties", false}};
    return schema;
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
  bool one_in(int n) { return below(n) == 0; }

  Json any(int depth) {
    const int kind = below(depth > 0 ? 13 : 8);
    switch (kind) {
      case 0:
        return Json{{"type", "boolean"}};
      case 1:
        return integer();
      case 2:
        return number();
      case 3:
      case 4:
        return string();
      case 5:
        return Json{{"enum", {"red", 1, nullptr, false, "a \"quoted\" é", Json::array({1, "x"})}}};
      case 6:
        return one_in(2) ? Json{{"type", {"string", "null", "integer"}}, {"maxLength", 5}, {"minimum", -20}}
                         : Json{{"type", "integer"}, {"nullable", true}};
      case 7:
        return one_in(3) ? Json::object() : Json{{"const", below(100)}};
      case 8:
        return array(depth);
      case 9:
        return Json{{one_in(2) ? "anyOf" : "oneOf", {any(depth - 1), any(depth - 1)}}};
      case 10: {
        Json other = object(depth);
        other.erase("additionalProperties");
        Json first = object(depth);
        first.erase("additionalProperties");
        // Different names: two random schemas for one value often have nothing in common.
        Json renamed = Json::object();
        for (const auto& [name, value] : other["properties"].items()) renamed["other " + name] = value;
        other["properties"] = renamed;
        other["required"] = Json::array();
        return Json{{"allOf", {first, other}}};
      }
      case 11:
        if (one_in(3)) {
          uses_tree_ = true;
          return Json{{"$ref", "#/$defs/tree"}};
        }
        [[fallthrough]];
      default:
        return object(depth);
    }
  }

  Json integer() {
    Json schema{{"type", "integer"}};
    const int a = below(3000) - 1500;
    if (!one_in(3)) schema[one_in(4) ? "exclusiveMinimum" : "minimum"] = a;
    if (!one_in(3)) schema[one_in(4) ? "exclusiveMaximum" : "maximum"] = a + 2 + below(2000);
    return schema;
  }
  Json number() {
    Json schema{{"type", "number"}};
    const double a = (below(30000) - 15000) / (one_in(2) ? 1000.0 : 8.0);
    if (!one_in(3)) schema[one_in(4) ? "exclusiveMinimum" : "minimum"] = a;
    if (!one_in(3)) schema[one_in(4) ? "exclusiveMaximum" : "maximum"] = a + (1 + below(2000)) / 64.0;
    return schema;
  }
  Json string() {
    Json schema{{"type", "string"}};
    const int kind = below(8);
    static const char* const kFormats[] = {"date", "time", "date-time", "uuid", "ipv4", "email"};
    static const char* const kPatterns[] = {"^[a-f0-9]{3,6}$", "^(foo|bar)+[^x]$", "^\\d+(\\.\\d{2})?$",
                                            "a.c", "^\\w{2,4}\\s\"?$"};
    if (kind == 0) schema["format"] = kFormats[below(6)];
    if (kind == 1 || kind == 2) schema["pattern"] = kPatterns[below(5)];
    if (kind == 3 || kind == 4) {
      schema["minLength"] = below(6);
      if (one_in(2)) schema["maxLength"] = schema["minLength"].get<int>() + below(10);
    }
    return schema;
  }
  Json array(int depth) {
    Json schema{{"type", "array"}};
    if (!one_in(4)) schema["items"] = any(depth - 1);
    const int least = below(3);
    if (one_in(2)) schema["minItems"] = least;
    if (one_in(2)) schema["maxItems"] = least + below(4);
    if (one_in(4)) {
      schema["prefixItems"] = Json::array({any(depth - 1), any(depth - 1)});
      if (one_in(2)) schema["items"] = true;
    }
    return schema;
  }
  Json object(int depth) {
    static const char* const kNames[] = {"name", "nam", "age", "tags", "a \"b\"", "größe", "x", ""};
    Json schema{{"type", "object"}, {"properties", Json::object()}, {"required", Json::array()}};
    for (const char* name : kNames)
      if (one_in(3)) {
        schema["properties"][name] = any(depth - 1);
        if (one_in(2)) schema["required"].push_back(name);
      }
    if (one_in(2)) schema["additionalProperties"] = one_in(2) ? Json(false) : any(0);
    return schema;
  }

  std::mt19937_64 random_;
  bool uses_tree_ = false;
};

// As the specification of JSON Schema says; "oneOf" as "anyOf". Empty: it fits.
class Validator {
 public:
  explicit Validator(const Json& root) : root_(root) {}

  std::string check(const Json& value, const Json& schema) const {
    if (schema.is_boolean()) return schema.get<bool>() ? "" : "nothing fits";
    if (schema.contains("$ref"))
      return check(value, root_.at(Json::json_pointer(schema["$ref"].get<std::string>().substr(1))));
    if (schema.contains("type") && !has_type(value, schema))
      return "type of " + value.dump() + ", " + schema.dump();
    if (schema.contains("enum") &&
        std::find(schema["enum"].begin(), schema["enum"].end(), value) == schema["enum"].end())
      return "enum " + value.dump();
    if (schema.contains("const") && value != schema["const"]) return "const";
    for (const char* keyword : {"anyOf", "oneOf"})
      if (schema.contains(keyword) && std::none_of(schema[keyword].begin(), schema[keyword].end(),
                                                   [&](const Json& s) { return check(value, s).empty(); }))
        return keyword;
    if (schema.contains("allOf"))
      for (const Json& part : schema["allOf"])
        if (std::string why = check(value, part); !why.empty()) return why;
    if (value.is_number()) return check_number(value.get<double>(), schema);
    if (value.is_string()) return check_string(value.get<std::string>(), schema);
    if (value.is_array()) return check_array(value, schema);
    if (value.is_object()) return check_object(value, schema);
    return "";
  }

 private:
  static bool has_type(const Json& value, const Json& schema) {
    if (value.is_null() && schema.value("nullable", false)) return true;
    const Json types = schema["type"].is_array() ? schema["type"] : Json::array({schema["type"]});
    for (const Json& type : types) {
      if (type == "null" && value.is_null()) return true;
      if (type == "boolean" && value.is_boolean()) return true;
      if (type == "string" && value.is_string()) return true;
      if (type == "array" && value.is_array()) return true;
      if (type == "object" && value.is_object()) return true;
      if (type == "number" && value.is_number()) return true;
      if (type == "integer" && value.is_number() && std::floor(value.get<double>()) == value.get<double>())
        return true;
    }
    return false;
  }
  static std::string check_number(double x, const Json& schema) {
    if (schema.contains("minimum") && x < schema["minimum"].get<double>()) return "minimum";
    if (schema.contains("maximum") && x > schema["maximum"].get<double>()) return "maximum";
    if (schema.contains("exclusiveMinimum") && x <= schema["exclusiveMinimum"].get<double>())
      return "exclusiveMinimum";
    if (schema.contains("exclusiveMaximum") && x >= schema["exclusiveMaximum"].get<double>())
      return "exclusiveMaximum";
    return "";
  }
  static bool is_space(char32_t c) {
    return c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
           c == 0x202F || c == 0x205F || c == 0x3000 || c == 0xFEFF;
  }
  static std::string check_string(const std::string& text, const Json& schema) {
    size_t n = 0;
    for (size_t i = 0; i < text.size(); i += decode_utf8(text, i).length) ++n;
    if (n < schema.value("minLength", size_t{0}) || n > schema.value("maxLength", n)) return "length";
    static const std::map<std::string, std::string> kFormats = {
        {"date", R"(^\d{4}-\d\d-\d\d$)"},
        {"time", R"(^\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$)"},
        {"date-time", R"(^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$)"},
        {"uuid", R"(^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$)"},
        {"ipv4", R"(^(\d{1,3}\.){3}\d{1,3}$)"},
        {"email", R"(^[^@\s]+@[^@\s]+\.[^@\s]+$)"}};
    std::string pattern = schema.value("pattern", "");
    if (schema.contains("format")) pattern = kFormats.at(schema["format"].get<std::string>());
    if (!pattern.empty()) {
      // std::regex counts bytes: one letter for each character that has more, and it has to be no word.
      std::string plain;
      for (size_t i = 0; i < text.size(); i += decode_utf8(text, i).length)
        plain += static_cast<uint8_t>(text[i]) < 0x80  ? text[i]
                 : is_space(decode_utf8(text, i).code) ? ' '
                                                       : '~';
      if (!std::regex_search(plain, std::regex(pattern))) return "pattern " + pattern + " of " + text;
    }
    return "";
  }
  std::string check_array(const Json& value, const Json& schema) const {
    if (value.size() < schema.value("minItems", size_t{0}) ||
        value.size() > schema.value("maxItems", value.size()))
      return "number of items";
    const Json first = schema.value("prefixItems", Json::array());
    for (size_t i = 0; i < value.size(); ++i)
      if (std::string why = check(value[i], i < first.size() ? first[i] : schema.value("items", Json(true)));
          !why.empty())
        return why;
    return "";
  }
  std::string check_object(const Json& value, const Json& schema) const {
    const Json required = schema.value("required", Json::array());
    for (const Json& name : required)
      if (!value.contains(name.get<std::string>())) return "required " + name.dump();
    const Json properties = schema.value("properties", Json::object());
    for (const auto& [name, member] : value.items()) {
      const Json& own =
          properties.contains(name) ? properties[name] : schema.value("additionalProperties", Json(true));
      if (std::string why = check(member, own); !why.empty()) return name + ": " + why;
    }
    return "";
  }

  const Json& root_;
};

TEST(SchemaProperty, WhateverIsWrittenUnderASchemaFitsIt) {
  const auto trie = std::make_shared<const TokenTrie>(plankton());
  int n_whole = 0, n_cut = 0, n_impossible = 0;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    const Json schema = SchemaMaker(seed).make();
    const auto compiled = compile_json_schema(schema);
    if (!compiled) {  // some random schemas contradict themselves
      ++n_impossible;
      EXPECT_NE(compiled.error().message.find("matches no text"), std::string::npos)
          << schema.dump() << "\n"
          << compiled.error().message;
      continue;
    }
    ASSERT_TRUE(compiled->ignored.empty()) << schema.dump();
    const auto machine = std::make_shared<TokenMachine>(compiled->grammar, trie);
    std::mt19937_64 random(seed);
    for (int run = 0; run < 3; ++run) {
      GrammarMatcher matcher(machine);
      std::string text;
      bool whole = false;
      for (int step = 0; step < 400 && !whole; ++step) {
        // Any allowed token, the end rather than another one, and mostly one that leads to it.
        std::vector<int32_t> allowed, closing;
        for (int32_t id = 0; id < plankton().n_tokens(); ++id) {
          if (trie->is_end(id) || !matcher.allows(id)) continue;
          allowed.push_back(id);
          if (plankton().token_bytes(id).find_first_of("\"}],:") != std::string_view::npos)
            closing.push_back(id);
        }
        if (matcher.can_end() && (allowed.empty() || random() % 2 == 0)) {
          whole = true;
          break;
        }
        ASSERT_FALSE(allowed.empty()) << schema.dump() << "\n" << text;
        const std::vector<int32_t>& some = !closing.empty() && random() % 3 != 0 ? closing : allowed;
        const int32_t token = some[random() % some.size()];
        ASSERT_TRUE(matcher.accept(token));
        text += plankton().token_bytes(token);
      }
      (whole ? n_whole : n_cut) += 1;
      if (!whole) continue;
      const Json value = Json::parse(text, nullptr, false);
      ASSERT_FALSE(value.is_discarded()) << schema.dump() << "\n" << text;
      ASSERT_EQ(Validator(schema).check(value, schema), "") << schema.dump() << "\n" << text;
    }
  }
  EXPECT_GT(n_whole, 1000);
  EXPECT_LT(n_impossible, 25);
  RecordProperty("whole", n_whole);
  RecordProperty("cut", n_cut);
  std::printf("%d whole, %d cut by length, %d impossible\n", n_whole, n_cut, n_impossible);
}

}  // namespace
}  // namespace thermo
