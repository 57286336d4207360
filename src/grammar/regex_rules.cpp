#include "grammar/regex_rules.h"

#include <fmt/format.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "base/utf8.h"
#include "grammar/grammar.h"

namespace thermo {
namespace {

constexpr int kMaxDepth = 50;

const std::vector<CharRange> kDigit{{'0', '9'}};
const std::vector<CharRange> kWord{{'0', '9'}, {'A', 'Z'}, {'a', 'z'}, {'_', '_'}};
const std::vector<CharRange> kSpace{{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                                    {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                                    {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};

class RegexParser {
 public:
  struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  RegexParser(RuleSet& rules, std::string_view pattern, const CharWriter& write)
      : rules_(rules), text_(pattern), write_(write) {}

  ExprId parse() {
    std::vector<ExprId> parts;
    do {
      parts.push_back(parse_anchored());
    } while (take('|'));
    if (!at_end()) fail(fmt::format("'{}' has no place here", text_[at_]));
    return rules_.choice(std::move(parts));
  }

 private:
  [[noreturn]] void fail(const std::string& message) const {
    throw Refused(fmt::format("character {}: {}", at_ + 1, message));
  }
  bool at_end() const { return at_ >= text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[at_]; }
  bool take(char c) {
    if (at_end() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  // An alternative of the whole: anchors may be at its ends.
  ExprId parse_anchored() {
    const ExprId anything = rules_.repeat(write_({}, true), 0, -1);
    std::vector<ExprId> parts;
    if (!take('^')) parts.push_back(anything);
    parts.push_back(parse_sequence(0));
    if (!take('$')) parts.push_back(anything);
    return rules_.sequence(std::move(parts));
  }

  ExprId parse_choice(int depth) {
    if (depth > kMaxDepth) fail("too many nested groups");
    std::vector<ExprId> parts;
    do {
      parts.push_back(parse_sequence(depth));
    } while (take('|'));
    return rules_.choice(std::move(parts));
  }

  ExprId parse_sequence(int depth) {
    std::vector<ExprId> parts;
    while (!at_end() && peek() != '|' && peek() != ')' && peek() != '$') {
      ExprId item = parse_item(depth);
      parse_repeat(item);
      parts.push_back(item);
    }
    if (parts.empty()) return rules_.text("");
    return rules_.sequence(std::move(parts));
  }

  ExprId parse_item(int depth) {
    if (take('(')) {
      if (take('?') && !take(':')) fail("groups that look around or have a name cannot be used");
      const ExprId group = parse_choice(depth + 1);
      if (!take(')')) fail("')' was expected");
      return group;
    }
    if (take('[')) return parse_class();
    if (take('.')) return write_({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}, true);
    if (std::string_view("*+?{^").find(peek()) != std::string_view::npos)
      fail(fmt::format("'{}' has no place here", peek()));
    std::vector<CharRange> ranges;
    const bool negated = parse_char(ranges);
    return write_(ranges, negated);
  }

  void parse_repeat(ExprId& item) {
    if (take('*')) {
      item = rules_.repeat(item, 0, -1);
    } else if (take('+')) {
      item = rules_.repeat(item, 1, -1);
    } else if (take('?')) {
      item = rules_.repeat(item, 0, 1);
    } else if (take('{')) {
      const int least = parse_number();
      int most = least;
      if (take(',')) most = peek() == '}' ? -1 : parse_number();
      if (!take('}')) fail("'}' was expected");
      if (most >= 0 && most < least) fail("the most repetitions are fewer than the least");
      item = rules_.repeat(item, least, most);
    } else {
      return;
    }
    take('?');  // short or long matches: as a set of texts the same
  }

  int parse_number() {
    if (peek() < '0' || peek() > '9') fail("a number was expected");
    int value = 0;
    while (peek() >= '0' && peek() <= '9') {
      value = 10 * value + (text_[at_++] - '0');
      if (value > Grammar::kMaxRepeats) fail(fmt::format("more than {} repetitions", Grammar::kMaxRepeats));
    }
    return value;
  }

  // One character or a class by its letter; true: it is negated.
  bool parse_char(std::vector<CharRange>& out) {
    if (at_end()) fail("the pattern ends too early");
    if (!take('\\')) {
      const DecodedChar c = decode_utf8(text_, at_);
      if (!c.valid) fail("this is not UTF-8");
      at_ += c.length;
      out.push_back({c.code, c.code});
      return false;
    }
    if (at_end()) fail("the pattern ends with a backslash");
    const char c = text_[at_++];
    const auto add = [&out](const std::vector<CharRange>& ranges) {
      out.insert(out.end(), ranges.begin(), ranges.end());
    };
    const auto one = [&out](char32_t code) { out.push_back({code, code}); };
    switch (c) {
      case 'd':
      case 'D':
        add(kDigit);
        return c == 'D';
      case 'w':
      case 'W':
        add(kWord);
        return c == 'W';
      case 's':
      case 'S':
        add(kSpace);
        return c == 'S';
      case 'n':
        one('\n');
        return false;
      case 't':
        one('\t');
        return false;
      case 'r':
        one('\r');
        return false;
      case 'f':
        one('\f');
        return false;
      case 'v':
        one('\v');
        return false;
      case 'x':
        one(parse_hex(2));
        return false;
      case 'u': {
        const bool braces = take('{');
        one(parse_hex(braces ? 0 : 4));
        if (braces && !take('}')) fail("'}' was expected");
        return false;
      }
      default:
        break;
    }
    if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
      fail(fmt::format("\\{} cannot be used", c));
    one(static_cast<char32_t>(static_cast<uint8_t>(c)));
    return false;
  }

  // n digits, or up to six.
  char32_t parse_hex(int n) {
    char32_t value = 0;
    int digits = 0;
    while (digits < (n == 0 ? 6 : n)) {
      const char c = peek();
      int digit = 0;
      if (c >= '0' && c <= '9')
        digit = c - '0';
      else if (c >= 'a' && c <= 'f')
        digit = c - 'a' + 10;
      else if (c >= 'A' && c <= 'F')
        digit = c - 'A' + 10;
      else
        break;
      value = 16 * value + static_cast<char32_t>(digit);
      ++digits;
      ++at_;
    }
    if (digits < n || digits == 0) fail("hexadecimal digits were expected");
    if (value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) fail("there is no such character");
    return value;
  }

  ExprId parse_class() {
    const bool negated = take('^');
    std::vector<CharRange> ranges;
    while (!take(']')) {
      std::vector<CharRange> item;
      if (parse_char(item)) {  // \D and the like: all others
        item = rules_.expr(rules_.chars(item, true)).chars;
      } else if (item.size() == 1 && item[0].first == item[0].last && peek() == '-' &&
                 at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        std::vector<CharRange> end;
        if (parse_char(end) || end.size() != 1 || end[0].first < item[0].first)
          fail("the range ends before it begins");
        item[0].last = end[0].last;
      }
      ranges.insert(ranges.end(), item.begin(), item.end());
    }
    return write_(ranges, negated);
  }

  RuleSet& rules_;
  std::string_view text_;
  const CharWriter& write_;
  size_t at_ = 0;
};

}  // namespace

Result<ExprId> regex_expr(RuleSet& rules, std::string_view pattern, const CharWriter& write) {
  try {
    return RegexParser(rules, pattern, write).parse();
  } catch (const RegexParser::Refused& refused) {
    return Error{ErrorCode::InvalidArgument, refused.what()};
  }
}

}  // namespace thermo
