// The tokens of a template as the parsers read them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "jinja/lexer.h"

namespace thermo::jinja {

class TokenStream {
 public:
  explicit TokenStream(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  const Token& current() const { return tokens_[at_]; }
  const Token& next() const { return tokens_[at_ + 1 < tokens_.size() ? at_ + 1 : at_]; }
  void advance() {
    if (at_ + 1 < tokens_.size()) ++at_;
  }
  size_t position() const { return at_; }

  bool at_operator(std::string_view op) const { return is_operator(current(), op); }
  bool at_name(std::string_view name) const { return is_name(current(), name); }
  bool skip_operator(std::string_view op);
  bool skip_name(std::string_view name);
  void expect(TokenKind kind, const std::string& shown);
  void expect_operator(std::string_view op);
  void expect_name(std::string_view name);
  std::string expect_any_name(const std::string& expected);
  // Whether a token of [begin, end) is that name.
  bool names_between(size_t begin, size_t end, std::string_view name) const;
  [[noreturn]] void fail_unexpected(const std::string& expected) const;

  static bool is_operator(const Token& t, std::string_view op) {
    return t.kind == TokenKind::Operator && t.text == op;
  }
  static bool is_name(const Token& t, std::string_view name) {
    return t.kind == TokenKind::Name && t.text == name;
  }

  int nesting = 0;  // of the expression being parsed

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
};

}  // namespace thermo::jinja
