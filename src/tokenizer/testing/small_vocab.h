// A vocabulary small enough to read, for tests and fuzzing.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "tokenizer/byte_alphabet.h"
#include "tokenizer/unicode.h"
#include "tokenizer/vocab.h"

namespace thermo::testing {

// Bytes written in the byte alphabet.
inline std::string to_alphabet(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) append_utf8(text, byte_to_char(static_cast<uint8_t>(byte)));
  return text;
}

inline int32_t add_token(VocabData& data, std::string text, TokenType type) {
  data.tokens.push_back(std::move(text));
  data.types.push_back(static_cast<int32_t>(type));
  return static_cast<int32_t>(data.tokens.size() - 1);
}

// Adds a merge of two byte strings and, if it is not there yet, the token it makes.
inline void add_merge(VocabData& data, std::string_view left, std::string_view right) {
  data.merges.push_back(to_alphabet(left) + " " + to_alphabet(right));
  std::string merged = to_alphabet(left) + to_alphabet(right);
  if (std::find(data.tokens.begin(), data.tokens.end(), merged) == data.tokens.end()) {
    add_token(data, std::move(merged), TokenType::Normal);
  }
}

// Tokens 0-255 are the bytes, in order; then merges; then specials, which small_vocab().find_special names.
inline VocabData small_vocab(std::string pre = "qwen35") {
  VocabData data;
  data.pre = std::move(pre);
  for (int byte = 0; byte < 256; ++byte) {
    add_token(data, to_alphabet(std::string(1, static_cast<char>(byte))), TokenType::Normal);
  }
  const std::initializer_list<std::pair<std::string_view, std::string_view>> merges = {
      {"a", "a"},   {"a", "b"},    {"aa", "aa"},     {" ", "a"}, {"t", "h"},   {"th", "e"},
      {" ", "the"}, {"l", "l"},    {".", "\n"},      {" ", " "}, {"  ", "  "}, {"\n", "\n"},
      {"b", "a"},   {"ab", "ba"},  {"\xC3", "\xA9"}, {"e", "l"}, {"el", "l"},  {"\xE4", "\xB8"},
      {"'", "s"},   {"aaaa", "a"}, {"<", "t"},       {"i", "m"}, {"\r", "\n"}, {"\xEF", "\xBF"},
  };
  for (const auto& [left, right] : merges) add_merge(data, left, right);
  for (const char* text : {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im", "</assistant>"}) {
    add_token(data, text, TokenType::Control);
  }
  for (const char* text : {"<think>", "</think>", "<t"}) add_token(data, text, TokenType::UserDefined);
  add_token(data, "[PAD1]", TokenType::Unused);
  return data;
}

}  // namespace thermo::testing
