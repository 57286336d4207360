#include "jinja/token_stream.h"

#include <algorithm>

namespace thermo::jinja {

bool TokenStream::skip_operator(std::string_view op) {
  if (!at_operator(op)) return false;
  advance();
  return true;
}

bool TokenStream::skip_name(std::string_view name) {
  if (!at_name(name)) return false;
  advance();
  return true;
}

void TokenStream::expect(TokenKind kind, const std::string& shown) {
  if (current().kind != kind) fail_unexpected(shown);
  advance();
}

void TokenStream::expect_operator(std::string_view op) {
  if (!skip_operator(op)) fail_unexpected("'" + std::string(op) + "'");
}

void TokenStream::expect_name(std::string_view name) {
  if (!skip_name(name)) fail_unexpected("'" + std::string(name) + "'");
}

std::string TokenStream::expect_any_name(const std::string& expected) {
  if (current().kind != TokenKind::Name) fail_unexpected(expected);
  std::string name = current().text;
  advance();
  return name;
}

bool TokenStream::names_between(size_t begin, size_t end, std::string_view name) const {
  return std::any_of(tokens_.begin() + static_cast<std::ptrdiff_t>(begin),
                     tokens_.begin() + static_cast<std::ptrdiff_t>(end),
                     [&](const Token& t) { return is_name(t, name); });
}

void TokenStream::fail_unexpected(const std::string& expected) const {
  fail("unexpected " + describe(current()) + ", expected " + expected, current().line);
}

}  // namespace thermo::jinja
