// The grammar language of llama.cpp:
//
//     # a comment
//     root ::= "{" ws pair ("," ws pair)* "}"     literals, rules, groups, * + ? {m} {m,} {m,n}
//     pair ::= [a-z_]{1,20} ":" ws [^\x00-\x1F,}]+
//     ws   ::= " "?  |  "\n"
//
// A rule ends with its line, unless the line ends inside parentheses or after a bar, or the next one begins
// with a bar. Escapes: \n \t \r \\ \" \[ \] \- \^ \xHH \uHHHH \UHHHHHHHH. A dot is any character.
#pragma once

#include <memory>
#include <string_view>

#include "base/result.h"
#include "grammar/grammar.h"

namespace thermo {

inline constexpr size_t kMaxGrammarBytes = 1 << 20;

// The grammar of the rule "root". InvalidArgument with line and column where the text is wrong.
Result<std::shared_ptr<const Grammar>> parse_gbnf(std::string_view text);

}  // namespace thermo
