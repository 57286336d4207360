// Template source to tokens, with the whitespace rules of jinja2 under trim_blocks and lstrip_blocks: the
// newline after a block or comment is removed, and so are spaces before one at the start of a line; "-"
// strips all whitespace on its side and "+" keeps it.
#pragma once

#include <string>
#include <vector>

#include "jinja/value.h"

namespace thermo::jinja {

enum class TokenKind : uint8_t {
  Data,  // text between tags
  VariableBegin,
  VariableEnd,
  BlockBegin,
  BlockEnd,
  Name,
  String,
  Integer,
  Float,
  Operator,
  End
};

struct Token {
  TokenKind kind = TokenKind::End;
  int line = 0;
  std::string text;  // of Data, Name, String (unescaped) and Operator
  Int integer = 0;
  double real = 0;
};

// Throws TemplateError. The last token is End.
std::vector<Token> tokenize(std::string_view source);

// The token in words, for messages.
std::string describe(const Token& token);

}  // namespace thermo::jinja
