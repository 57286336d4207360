#include "grammar/json_rules.h"

#include <algorithm>
#include <map>

#include "base/utf8.h"

namespace thermo {
namespace {

constexpr int kMaxDigits = 16;
constexpr int kMaxIndent = 32;

}  // namespace

std::string json_text(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

ExprId JsonRules::once(std::optional<RuleId>& rule, const char* name, ExprId (JsonRules::*make)()) {
  if (!rule) {
    rule = rules_.add_rule(name);  // before its body, which may use it
    rules_.define(*rule, (this->*make)());
  }
  return rules_.rule(*rule);
}

ExprId JsonRules::space() {
  return once(space_, "space", &JsonRules::make_space);
}
ExprId JsonRules::value() {
  return once(value_, "value", &JsonRules::make_value);
}
ExprId JsonRules::object() {
  return once(object_, "object", &JsonRules::make_object);
}
ExprId JsonRules::array() {
  return once(array_, "array", &JsonRules::make_array);
}
ExprId JsonRules::string() {
  return once(string_, "string", &JsonRules::make_string);
}
ExprId JsonRules::string_char() {
  return once(char_, "character", &JsonRules::make_string_char);
}
ExprId JsonRules::number() {
  return once(number_, "number", &JsonRules::make_number);
}
ExprId JsonRules::integer() {
  return once(integer_, "integer", &JsonRules::make_integer);
}
ExprId JsonRules::boolean() {
  return rules_.choice({rules_.text("true"), rules_.text("false")});
}
ExprId JsonRules::null() {
  return rules_.text("null");
}

ExprId JsonRules::make_space() {
  return rules_.choice(
      {rules_.text(""), rules_.text(" "),
       rules_.sequence({rules_.text("\n"), rules_.repeat(rules_.text(" "), 0, kMaxIndent)})});
}

ExprId JsonRules::make_value() {
  return rules_.choice({object(), array(), string(), number(), boolean(), null()});
}

ExprId JsonRules::braces(ExprId body) {
  return rules_.sequence({rules_.text("{"), space(), body, rules_.text("}")});
}

ExprId JsonRules::brackets(ExprId body) {
  return rules_.sequence({rules_.text("["), space(), body, rules_.text("]")});
}

ExprId JsonRules::make_object() {
  const ExprId member =
      rules_.named("member", rules_.sequence({string(), rules_.text(":"), space(), value()}));
  const ExprId more = rules_.repeat(rules_.sequence({rules_.text(","), space(), member}), 0, -1);
  return braces(rules_.optional(rules_.sequence({member, more, space()})));
}

ExprId JsonRules::make_array() {
  const ExprId more = rules_.repeat(rules_.sequence({rules_.text(","), space(), value()}), 0, -1);
  return brackets(rules_.optional(rules_.sequence({value(), more, space()})));
}

// Surrogates are escaped in pairs or not at all.
ExprId JsonRules::make_string_char() {
  const auto hex = [this](int n) {
    return rules_.repeat(rules_.chars({{'0', '9'}, {'a', 'f'}, {'A', 'F'}}), n, n);
  };
  const ExprId d = rules_.chars({{'d', 'd'}, {'D', 'D'}});
  const ExprId alone = rules_.choice(
      {rules_.sequence({rules_.chars({{'0', '9'}, {'a', 'c'}, {'e', 'f'}, {'A', 'C'}, {'E', 'F'}}), hex(3)}),
       rules_.sequence({d, rules_.chars({{'0', '7'}}), hex(2)})});
  const ExprId pair =
      rules_.sequence({d, rules_.chars({{'8', '9'}, {'a', 'b'}, {'A', 'B'}}), hex(2), rules_.text("\\u"), d,
                       rules_.chars({{'c', 'f'}, {'C', 'F'}}), hex(2)});
  const ExprId escape = rules_.choice({rules_.chars({{'"', '"'},
                                                     {'\\', '\\'},
                                                     {'/', '/'},
                                                     {'b', 'b'},
                                                     {'f', 'f'},
                                                     {'n', 'n'},
                                                     {'r', 'r'},
                                                     {'t', 't'}}),
                                       rules_.sequence({rules_.text("u"), rules_.choice({alone, pair})})});
  return rules_.choice({rules_.chars({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}}, true),
                        rules_.sequence({rules_.text("\\"), escape})});
}

ExprId JsonRules::string_char_of(const std::vector<CharRange>& ranges, bool negated) {
  const std::vector<CharRange> chars = rules_.expr(rules_.chars(ranges, negated)).chars;
  const auto has = [&](char32_t c) {
    return std::any_of(chars.begin(), chars.end(),
                       [c](const CharRange& r) { return c >= r.first && c <= r.last; });
  };
  std::vector<ExprId> parts;
  std::vector<CharRange> plain;
  for (const CharRange& range : chars) {
    // The parts of the range between the characters that must be escaped.
    char32_t next = std::max(range.first, char32_t{0x20});
    for (const char32_t c : {U'"', U'\\'})
      if (c >= next && c <= range.last) {
        if (c > next) plain.push_back({next, c - 1});
        next = c + 1;
      }
    if (next <= range.last) plain.push_back({next, range.last});
  }
  if (!plain.empty()) parts.push_back(rules_.chars(plain));
  for (char32_t c = 0; c < 0x20; ++c)
    if (has(c)) parts.push_back(rules_.text(json_text(std::string(1, static_cast<char>(c))).substr(1)));
  for (ExprId& part : parts)
    if (rules_.expr(part).kind == Expr::Kind::Bytes) {  // without the closing quote
      const std::string bytes = rules_.expr(part).bytes;
      part = rules_.text(std::string_view(bytes).substr(0, bytes.size() - 1));
    }
  if (has('"')) parts.push_back(rules_.text("\\\""));
  if (has('\\')) parts.push_back(rules_.text("\\\\"));
  return rules_.choice(std::move(parts));
}

ExprId JsonRules::make_string() {
  return rules_.sequence({rules_.text("\""), rules_.repeat(string_char(), 0, -1), rules_.text("\"")});
}

ExprId JsonRules::string_of(int least, int most) {
  return rules_.sequence({rules_.text("\""), rules_.repeat(string_char(), least, most), rules_.text("\"")});
}

// Follows the tree of the keys' characters: a text that leaves it may go on in any way, and one that ends
// inside it must not end where a key does.
ExprId JsonRules::key_except(const std::vector<std::string>& keys) {
  struct Branch {
    std::map<char32_t, size_t> next;
    bool is_key = false;
  };
  std::vector<Branch> branches(1);
  for (const std::string& key : keys) {
    size_t at = 0;
    for (size_t i = 0; i < key.size();) {
      const DecodedChar c = decode_utf8(key, i);
      i += c.length;
      const auto [found, added] = branches[at].next.try_emplace(c.code, branches.size());
      at = found->second;
      if (added) branches.emplace_back();
    }
    branches[at].is_key = true;
  }
  const ExprId end = rules_.text("\"");
  const ExprId rest =
      rules_.named("rest of a key", rules_.sequence({rules_.repeat(string_char(), 0, -1), end}));
  std::vector<RuleId> rule_of;
  for (size_t i = 0; i < branches.size(); ++i) rule_of.push_back(rules_.add_rule("key"));
  for (size_t i = 0; i < branches.size(); ++i) {
    std::vector<ExprId> parts;
    // Escapes on the tree could spell a key in another way.
    std::vector<CharRange> others{{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
    for (const auto& [c, next] : branches[i].next) {
      others.push_back({c, c});
      std::string text;
      append_utf8(text, c);
      const std::string quoted = json_text(text);
      parts.push_back(
          rules_.sequence({rules_.text(quoted.substr(1, quoted.size() - 2)), rules_.rule(rule_of[next])}));
    }
    parts.push_back(rules_.sequence({rules_.chars(others, true), rest}));
    if (i > 0 && !branches[i].is_key) parts.push_back(end);
    rules_.define(rule_of[i], rules_.choice(std::move(parts)));
  }
  return rules_.sequence({rules_.text("\""), rules_.rule(rule_of[0])});
}

ExprId JsonRules::make_integer() {
  const ExprId digits = rules_.choice(
      {rules_.text("0"), rules_.sequence({rules_.chars({{'1', '9'}}),
                                          rules_.repeat(rules_.chars({{'0', '9'}}), 0, kMaxDigits - 1)})});
  return rules_.sequence({rules_.optional(rules_.text("-")), digits});
}

ExprId JsonRules::make_number() {
  const ExprId digit = rules_.chars({{'0', '9'}});
  const ExprId fraction = rules_.sequence({rules_.text("."), rules_.repeat(digit, 1, kMaxDigits)});
  const ExprId exponent =
      rules_.sequence({rules_.chars({{'e', 'e'}, {'E', 'E'}}),
                       rules_.optional(rules_.chars({{'+', '+'}, {'-', '-'}})), rules_.repeat(digit, 1, 2)});
  return rules_.sequence({integer(), rules_.optional(fraction), rules_.optional(exponent)});
}

ExprId JsonRules::exactly(const Json& value) {
  if (value.is_string()) return rules_.text(json_text(value.get_ref<const std::string&>()));
  if (!value.is_structured()) return rules_.text(value.dump());
  std::vector<ExprId> parts;
  for (const auto& [key, item] : value.items()) {
    if (!parts.empty()) {
      parts.push_back(rules_.text(","));
      parts.push_back(space());
    }
    if (value.is_object()) {
      parts.push_back(rules_.text(json_text(key) + ":"));
      parts.push_back(space());
    }
    parts.push_back(exactly(item));
  }
  if (!parts.empty()) parts.push_back(space());
  const ExprId body = rules_.sequence(std::move(parts));
  return value.is_object() ? braces(body) : brackets(body);
}

}  // namespace thermo
