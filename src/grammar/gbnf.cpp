#include "grammar/gbnf.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/utf8.h"
#include "base/utf8_chars.h"

namespace thermo {
namespace {

constexpr int kMaxDepth = 100;  // of parentheses

bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

std::optional<uint32_t> hex_digit(char c) {
  if (c >= '0' && c <= '9') return static_cast<uint32_t>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<uint32_t>(c - 'a' + 10);
  if (c >= 'A' && c <= 'F') return static_cast<uint32_t>(c - 'A' + 10);
  return std::nullopt;
}

class Parser {
 public:
  struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  explicit Parser(std::string_view text) : text_(text) {}

  std::shared_ptr<const Grammar> parse() {
    if (text_.size() > kMaxGrammarBytes)
      fail(fmt::format("the grammar has {} bytes, at most {} are read", text_.size(), kMaxGrammarBytes));
    skip_space(true);
    while (!at_end()) parse_rule();
    for (const auto& [name, rule] : rules_by_name_)
      if (!rules_.is_defined(rule.id)) {
        at_ = rule.first_use;
        fail(fmt::format("rule '{}' is not defined", name));
      }
    const auto root = rules_by_name_.find("root");
    if (root == rules_by_name_.end()) throw Refused("the grammar has no rule named 'root'");
    auto compiled = Grammar::compile(rules_, root->second.id);
    if (!compiled) throw Refused(compiled.error().message);
    return *compiled;
  }

 private:
  struct NamedRule {
    RuleId id;
    size_t first_use;
  };

  [[noreturn]] void fail(const std::string& message) const {
    size_t line = 1, column = 1;
    for (size_t i = 0; i < at_ && i < text_.size(); ++i) {
      if (text_[i] == '\n') {
        ++line;
        column = 1;
      } else if (!is_utf8_continuation(text_[i])) {
        ++column;
      }
    }
    throw Refused(fmt::format("line {}, column {}: {}", line, column, message));
  }

  bool at_end() const { return at_ >= text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[at_]; }
  bool take(std::string_view expected) {
    if (!text_.substr(std::min(at_, text_.size())).starts_with(expected)) return false;
    at_ += expected.size();
    return true;
  }
  std::string seen() const {
    if (at_end()) return "the end of the text";
    if (peek() == '\n' || peek() == '\r') return "the end of the line";
    return fmt::format("'{}'", text_.substr(at_, utf8_length()));
  }
  size_t utf8_length() const {
    size_t n = 1;
    while (n < 4 && at_ + n < text_.size() && is_utf8_continuation(text_[at_ + n])) ++n;
    return n;
  }

  void skip_space(bool newlines) {
    while (!at_end()) {
      const char c = peek();
      if (c == '#') {
        while (!at_end() && peek() != '\n') ++at_;
      } else if (c == ' ' || c == '\t' || (newlines && (c == '\n' || c == '\r'))) {
        ++at_;
      } else {
        return;
      }
    }
  }

  std::string_view parse_name() {
    const size_t begin = at_;
    while (!at_end() && is_name_char(peek())) ++at_;
    if (at_ == begin) fail(fmt::format("{} where the name of a rule was expected", seen()));
    return text_.substr(begin, at_ - begin);
  }

  RuleId rule_named(std::string_view name, size_t use) {
    const auto found = rules_by_name_.find(name);
    if (found != rules_by_name_.end()) return found->second.id;
    if (rules_by_name_.size() >= Grammar::kMaxRules)
      fail(fmt::format("more than {} rules", Grammar::kMaxRules));
    const RuleId id = rules_.add_rule(std::string(name));
    rules_by_name_.emplace(std::string(name), NamedRule{id, use});
    return id;
  }

  void parse_rule() {
    const size_t begin = at_;
    const std::string_view name = parse_name();
    const RuleId id = rule_named(name, begin);
    if (rules_.is_defined(id)) {
      at_ = begin;
      fail(fmt::format("rule '{}' is defined a second time", name));
    }
    skip_space(false);
    if (!take("::=")) fail(fmt::format("{} where '::=' was expected", seen()));
    skip_space(true);
    rules_.define(id, parse_choice(0));
    if (!at_end() && peek() != '\n' && peek() != '\r')
      fail(fmt::format("{} where the end of the rule was expected", seen()));
    skip_space(true);
  }

  ExprId parse_choice(int depth) {
    if (depth > kMaxDepth) fail(fmt::format("more than {} nested groups", kMaxDepth));
    std::vector<ExprId> parts{parse_sequence(depth)};
    while (true) {
      // A line that begins with a bar goes on with the rule.
      const size_t before = at_;
      skip_space(true);
      if (!take("|")) {
        if (depth == 0) at_ = before;
        break;
      }
      skip_space(true);
      parts.push_back(parse_sequence(depth));
    }
    return rules_.choice(std::move(parts));
  }

  ExprId parse_sequence(int depth) {
    std::vector<ExprId> parts;
    while (!at_end()) {
      const std::optional<ExprId> item = parse_item(depth);
      if (!item) break;
      parts.push_back(*item);
      parse_repeats(parts.back(), depth > 0);
    }
    if (parts.empty()) return rules_.text("");
    return rules_.sequence(std::move(parts));
  }

  // nullopt: nothing that an expression begins with.
  std::optional<ExprId> parse_item(int depth) {
    const char c = peek();
    if (c == '"') return parse_literal();
    if (c == '[') return parse_class();
    if (take(".")) return rules_.any_char();
    if (take("(")) {
      skip_space(true);
      const ExprId group = parse_choice(depth + 1);
      skip_space(true);
      if (!take(")")) fail(fmt::format("{} where ')' was expected", seen()));
      return group;
    }
    if (is_name_char(c)) {
      const size_t begin = at_;
      return rules_.rule(rule_named(parse_name(), begin));
    }
    if (c == '<' || c == '!') fail("a token by its name or number cannot be used here: write its text");
    return std::nullopt;
  }

  // And the space after them.
  void parse_repeats(ExprId& part, bool newlines) {
    for (int n = 0;; ++n) {
      skip_space(newlines);
      if (n > kMaxDepth) fail("too many repetitions of one item");
      if (take("*"))
        part = rules_.repeat(part, 0, -1);
      else if (take("+"))
        part = rules_.repeat(part, 1, -1);
      else if (take("?"))
        part = rules_.repeat(part, 0, 1);
      else if (take("{"))
        parse_count(part);
      else
        return;
    }
  }

  void parse_count(ExprId& part) {
    skip_space(false);
    const int least = parse_number();
    skip_space(false);
    int most = least;
    if (take(",")) {
      skip_space(false);
      most = peek() == '}' ? -1 : parse_number();
      skip_space(false);
    }
    if (!take("}")) fail(fmt::format("{} where '}}' was expected", seen()));
    if (most >= 0 && most < least) fail(fmt::format("at least {} and at most {} times", least, most));
    part = rules_.repeat(part, least, most);
  }

  int parse_number() {
    if (peek() < '0' || peek() > '9') fail(fmt::format("{} where a number was expected", seen()));
    int value = 0;
    while (peek() >= '0' && peek() <= '9') {
      value = 10 * value + (peek() - '0');
      if (value > Grammar::kMaxRepeats) fail(fmt::format("more than {} repetitions", Grammar::kMaxRepeats));
      ++at_;
    }
    return value;
  }

  // One character of a literal or a class, with its escapes.
  char32_t parse_char() {
    if (at_end()) fail("quotes or brackets are not closed");
    if (take("\\")) {
      const char c = peek();
      const auto hex = [&](int n) {
        char32_t value = 0;
        for (int i = 0; i < n; ++i) {
          const std::optional<uint32_t> digit = hex_digit(peek());
          if (!digit) fail(fmt::format("{} where one of {} hexadecimal digits was expected", seen(), n));
          value = 16 * value + *digit;
          ++at_;
        }
        if (value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) fail("there is no such character");
        return value;
      };
      if (take("x")) return hex(2);
      if (take("u")) return hex(4);
      if (take("U")) return hex(8);
      if (take("n")) return '\n';
      if (take("t")) return '\t';
      if (take("r")) return '\r';
      if (c != '\0' && std::string_view("\\\"[]-^./").find(c) != std::string_view::npos) {
        ++at_;
        return static_cast<char32_t>(c);
      }
      fail(fmt::format("the escape \\{} is not known",
                       at_end() ? "" : std::string(text_.substr(at_, utf8_length()))));
    }
    const DecodedChar c = decode_utf8(text_, at_);
    if (!c.valid) fail("this is not UTF-8");
    at_ += c.length;
    return c.code;
  }

  ExprId parse_literal() {
    ++at_;
    std::string bytes;
    while (!take("\"")) append_utf8(bytes, parse_char());
    return rules_.text(bytes);
  }

  ExprId parse_class() {
    ++at_;
    const bool negated = take("^");
    std::vector<CharRange> ranges;
    while (!take("]")) {
      const char32_t first = parse_char();
      char32_t last = first;
      if (peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        last = parse_char();
        if (last < first) fail("the range ends before it begins");
      }
      ranges.push_back({first, last});
    }
    return rules_.chars(std::move(ranges), negated);
  }

  std::string_view text_;
  size_t at_ = 0;
  RuleSet rules_;
  std::map<std::string, NamedRule, std::less<>> rules_by_name_;
};

}  // namespace

Result<std::shared_ptr<const Grammar>> parse_gbnf(std::string_view text) {
  try {
    return Parser(text).parse();
  } catch (const Parser::Refused& refused) {
    return Error{ErrorCode::InvalidArgument, fmt::format("the grammar cannot be used: {}", refused.what())};
  }
}

}  // namespace thermo
