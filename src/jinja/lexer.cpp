#include "jinja/lexer.h"

#include <algorithm>

#include "jinja/py_string.h"
#include "jinja/value_ops.h"

namespace thermo::jinja {

namespace {

// \r\n and \r become \n, and one newline at the end is removed.
std::string normalize_newlines(std::string_view s) {
  std::string out;
  out.reserve(s.size());
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] == '\r') {
      out += '\n';
      if (i + 1 < s.size() && s[i + 1] == '\n') ++i;
    } else {
      out += s[i];
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char low = static_cast<char>(c | 0x20);
  return low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
}

bool is_name_start(char32_t c) {
  return c == '_' || is_alpha(c);
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalize_newlines(source)), s_(source_) {}

  std::vector<Token> run() {
    while (pos_ < s_.size()) {
      const size_t tag = find_tag(pos_);
      if (tag == std::string::npos) {
        add_data(s_.substr(pos_));
        pos_ = s_.size();
        break;
      }
      read_tag(tag);
    }
    add(TokenKind::End);
    return std::move(tokens_);
  }

 private:
  size_t find_tag(size_t from) const {
    for (size_t at = s_.find('{', from); at != std::string::npos; at = s_.find('{', at + 1)) {
      if (at + 1 < s_.size() && (s_[at + 1] == '{' || s_[at + 1] == '%' || s_[at + 1] == '#')) return at;
    }
    return std::string::npos;
  }

  char peek(size_t at) const { return at < s_.size() ? s_[at] : '\0'; }

  Token& add(TokenKind kind) {
    tokens_.push_back({});
    tokens_.back().kind = kind;
    tokens_.back().line = line_;
    return tokens_.back();
  }

  void add_data(std::string_view text) {
    if (!text.empty()) add(TokenKind::Data).text = text;
    count_lines(text);
  }

  void count_lines(std::string_view text) {
    line_ += static_cast<int>(std::count(text.begin(), text.end(), '\n'));
  }

  // Moves on to `end` and remembers whether the next text begins a line.
  void move_to(size_t end) {
    count_lines(s_.substr(pos_, end - pos_));
    pos_ = end;
    at_line_start_ = end > 0 && s_[end - 1] == '\n';
  }

  size_t skip_space(size_t at) const {
    while (at < s_.size()) {
      size_t next = at;
      if (!is_space(decode_utf8(s_, next))) break;
      at = next;
    }
    return at;
  }

  // The text before a tag whose "{%" is followed by `sign`, as whitespace control leaves it.
  std::string_view text_before(std::string_view text, char sign, bool is_variable) const {
    if (sign == '-') return text.substr(0, strip_bounds(text, std::nullopt, Side::Right).end);
    if (sign == '+' || is_variable) return text;
    const size_t line = text.rfind('\n') + 1;  // 0 when there is none
    if (line == 0 && !at_line_start_) return text;
    const ByteRange rest = strip_bounds(text.substr(line), std::nullopt, Side::Both);
    return rest.begin == rest.end ? text.substr(0, line) : text;
  }

  void read_tag(size_t tag) {
    const char type = s_[tag + 1];
    const char sign = peek(tag + 2) == '-' || peek(tag + 2) == '+' ? peek(tag + 2) : '\0';
    const std::string_view before = s_.substr(pos_, tag - pos_);
    const std::string_view kept = text_before(before, sign, type == '{');
    add_data(kept);
    count_lines(before.substr(kept.size()));
    pos_ = tag;
    const size_t inside = tag + 2 + (sign != '\0' ? 1 : 0);
    if (type == '#') return read_comment(inside);
    if (type == '%' && read_raw(inside)) return;
    add(type == '{' ? TokenKind::VariableBegin : TokenKind::BlockBegin);
    const int begin_line = line_;
    pos_ = inside;
    read_expression(type == '{', begin_line);
  }

  // Where the tag end `mark` ("%}" or "#}") at `at` ends, after what whitespace control removes; 0: none
  // here.
  size_t tag_end(size_t at, std::string_view mark) const {
    const bool signed_end = (peek(at) == '-' || peek(at) == '+') && s_.substr(at + 1, 2) == mark;
    if (signed_end) return peek(at) == '-' ? skip_space(at + 3) : at + 3;
    if (s_.substr(std::min(at, s_.size()), 2) != mark) return 0;
    return at + 2 + (peek(at + 2) == '\n' ? 1 : 0);
  }

  void read_comment(size_t inside) {
    const size_t end = s_.find("#}", inside);
    if (end == std::string::npos) fail("a comment '{#' is never closed, expected '#}'", line_);
    const char sign = end > inside ? s_[end - 1] : '\0';
    move_to(tag_end(sign == '-' || sign == '+' ? end - 1 : end, "#}"));
  }

  // {% raw %} ... {% endraw %}: the text between is data. False: another block.
  bool read_raw(size_t inside) {
    const size_t word = skip_space(inside);
    if (s_.substr(word, 3) != "raw") return false;
    const size_t close = skip_space(word + 3);
    size_t begin = 0;
    if (s_.substr(close, 2) == "%}") begin = close + 2;
    if (s_.substr(close, 3) == "-%}") begin = skip_space(close + 3);
    if (begin == 0) return false;
    move_to(begin);
    for (size_t at = s_.find("{%", pos_); at != std::string::npos; at = s_.find("{%", at + 1)) {
      const char sign = peek(at + 2) == '-' || peek(at + 2) == '+' ? peek(at + 2) : '\0';
      const size_t name = skip_space(at + 2 + (sign != '\0' ? 1 : 0));
      if (s_.substr(std::min(name, s_.size()), 6) != "endraw") continue;
      const size_t end = tag_end(skip_space(name + 6), "%}");
      if (end == 0) continue;
      const std::string_view text = s_.substr(pos_, at - pos_);
      const std::string_view kept = text_before(text, sign, false);
      const int line = line_;
      add_data(kept);
      line_ = line;
      move_to(end);
      return true;
    }
    fail("a 'raw' block is never closed, expected '{% endraw %}'", line_);
  }

  void read_expression(bool is_variable, int begin_line) {
    std::string open;  // brackets that are still open
    for (;;) {
      pos_ = skip_lines(pos_);
      if (pos_ >= s_.size()) {
        fail(std::string("the template ends inside '") + (is_variable ? "{{" : "{%") + "', expected '" +
                 (is_variable ? "}}" : "%}") + "'",
             begin_line);
      }
      if (open.empty() && read_end(is_variable)) return;
      read_token(open);
    }
  }

  size_t skip_lines(size_t at) {
    const size_t end = skip_space(at);
    count_lines(s_.substr(at, end - at));
    return end;
  }

  bool read_end(bool is_variable) {
    size_t end = 0;
    if (is_variable) {
      if (s_.substr(pos_, 3) == "-}}") end = skip_space(pos_ + 3);
      if (s_.substr(pos_, 2) == "}}") end = pos_ + 2;
    } else {
      end = tag_end(pos_, "%}");
    }
    if (end == 0) return false;
    add(is_variable ? TokenKind::VariableEnd : TokenKind::BlockEnd);
    move_to(end);
    return true;
  }

  void read_token(std::string& open) {
    const char c = s_[pos_];
    size_t next = pos_;
    const char32_t code = decode_utf8(s_, next);
    if (c >= '0' && c <= '9') return read_number();
    if (is_name_start(code)) return read_name();
    if (c == '\'' || c == '"') return read_string(c);
    static constexpr std::string_view kOperators[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                                      "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                      ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    for (const std::string_view op : kOperators) {
      if (s_.substr(pos_, op.size()) != op) continue;
      balance(op[0], open);
      add(TokenKind::Operator).text = op;
      pos_ += op.size();
      return;
    }
    fail("unexpected character '" + std::string(s_.substr(pos_, next - pos_)) +
             "', expected a name, a value or an operator",
         line_);
  }

  void balance(char c, std::string& open) const {
    if (c == '(' || c == '[' || c == '{') open += c == '(' ? ')' : c == '[' ? ']' : '}';
    if (c != ')' && c != ']' && c != '}') return;
    if (open.empty()) fail(std::string("unexpected '") + c + "', no bracket is open", line_);
    if (open.back() != c) fail(std::string("unexpected '") + c + "', expected '" + open.back() + "'", line_);
    open.pop_back();
  }

  void read_name() {
    const size_t begin = pos_;
    while (pos_ < s_.size()) {
      size_t next = pos_;
      if (!is_word(decode_utf8(s_, next))) break;
      pos_ = next;
    }
    add(TokenKind::Name).text = s_.substr(begin, pos_ - begin);
  }

  // The end of `digits` that may have single underscores between them.
  template <class IsDigit>
  size_t digits_end(size_t at, IsDigit is_digit_char) const {
    while (is_digit_char(peek(at)) || (peek(at) == '_' && is_digit_char(peek(at + 1)))) ++at;
    return at;
  }

  void read_number() {
    const auto decimal = [](char c) { return c >= '0' && c <= '9'; };
    const size_t begin = pos_;
    const size_t whole = digits_end(begin, decimal);
    size_t end = whole;
    if (peek(end) == '.' && decimal(peek(end + 1))) end = digits_end(end + 1, decimal);
    if ((peek(end) | 0x20) == 'e') {
      const size_t digits = end + 1 + (peek(end + 1) == '+' || peek(end + 1) == '-' ? 1 : 0);
      if (decimal(peek(digits))) end = digits_end(digits, decimal);
    }
    const bool after_dot = begin > 0 && s_[begin - 1] == '.';
    if (end > whole && !after_dot) {
      add(TokenKind::Float).real = parse_float(s_.substr(begin, end - begin)).value_or(0);
      pos_ = end;
      return;
    }
    end = whole;
    if (s_[begin] == '0') {
      const char mark = static_cast<char>(peek(begin + 1) | 0x20);
      const int base = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 10;
      const auto in_base = [&](char c) { return hex_digit(c) >= 0 && hex_digit(c) < base; };
      const size_t digits = begin + 2 + (peek(begin + 2) == '_' ? 1 : 0);
      if (base != 10 && in_base(peek(digits))) {
        end = digits_end(digits, in_base);
      } else {
        end = digits_end(begin, [](char c) { return c == '0'; });
      }
    }
    const auto value = parse_int(s_.substr(begin, end - begin), 0);
    add(TokenKind::Integer).integer = value.value_or(0);
    pos_ = end;
  }

  void read_string(char quote) {
    size_t end = pos_ + 1;
    while (end < s_.size() && s_[end] != quote) end += s_[end] == '\\' ? 2 : 1;
    if (end >= s_.size()) fail(std::string("a string is never closed, expected ") + quote, line_);
    const std::string_view body = s_.substr(pos_ + 1, end - pos_ - 1);
    add(TokenKind::String).text = unescape(body);
    count_lines(body);
    pos_ = end + 1;
  }

  // The escapes of a Python string literal; an unknown one stays as it is.
  std::string unescape(std::string_view s) const {
    static constexpr std::string_view kLetters = "abfnrtv\\'\"";
    static constexpr std::string_view kMeaning = "\a\b\f\n\r\t\v\\'\"";
    std::string out;
    for (size_t i = 0; i < s.size();) {
      if (s[i] != '\\' || i + 1 >= s.size()) {
        out += s[i++];
        continue;
      }
      const char c = s[i + 1];
      const size_t letter = kLetters.find(c);
      if (c == '\n') {
        i += 2;
      } else if (letter != std::string_view::npos) {
        out += kMeaning[letter];
        i += 2;
      } else if (c >= '0' && c <= '7') {
        char32_t code = 0;
        size_t end = i + 1;
        for (; end < s.size() && end < i + 4 && s[end] >= '0' && s[end] <= '7'; ++end) {
          code = code * 8 + static_cast<char32_t>(s[end] - '0');
        }
        append_utf8(out, code);
        i = end;
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t n = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        append_utf8(out, read_hex(s.substr(i + 2, n), n));
        i += 2 + n;
      } else {
        out += '\\';
        ++i;
      }
    }
    return out;
  }

  char32_t read_hex(std::string_view digits, size_t n) const {
    char32_t code = 0;
    const bool complete = digits.size() == n &&
                          std::all_of(digits.begin(), digits.end(), [](char c) { return hex_digit(c) >= 0; });
    for (const char c : digits) code = code << 4 | static_cast<char32_t>(std::max(hex_digit(c), 0));
    if (!complete || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
      fail("a string has an escape with '" + std::string(digits) + "', expected " + std::to_string(n) +
               " hexadecimal digits of a character",
           line_);
    }
    return code;
  }

  std::string source_;
  std::string_view s_;
  size_t pos_ = 0;
  int line_ = 1;
  bool at_line_start_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) {
  return Lexer(source).run();
}

std::string describe(const Token& token) {
  switch (token.kind) {
    case TokenKind::Data:
      return "text";
    case TokenKind::VariableBegin:
      return "'{{'";
    case TokenKind::VariableEnd:
      return "'}}'";
    case TokenKind::BlockBegin:
      return "'{%'";
    case TokenKind::BlockEnd:
      return "'%}'";
    case TokenKind::String:
      return "a string";
    case TokenKind::Integer:
      return "the number " + int_to_string(token.integer);
    case TokenKind::Float:
      return "the number " + float_repr(token.real);
    case TokenKind::Name:
    case TokenKind::Operator:
      return "'" + token.text + "'";
    case TokenKind::End:
      return "the end of the template";
  }
  return "";
}

}  // namespace thermo::jinja
