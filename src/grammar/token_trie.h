// The tokens of a vocabulary by their bytes, for asking a grammar about all of them at once.
//
// Text is what ordinary tokens write. Control tokens and the markers of a chat (a user-defined token in angle
// brackets, like <tool_call>) are no text, even where a text has the same letters: they are in the trie by
// token_code(). Tokens that can never be a part of UTF-8 are not in it, nor are those without bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/vocab.h"

namespace thermo {

// Immutable: any thread. Made once for a tokenizer.
class TokenTrie {
 public:
  explicit TokenTrie(const Vocab& vocab);

  // In order of a walk that goes down first. Depth 0 is the first byte of a token.
  struct Node {
    uint32_t end;  // the first node that is not below this one
    uint32_t tokens_begin, tokens_end;
    uint16_t depth;
    uint8_t byte;
  };

  // Two tries: of plain tokens and of the others. A plain token is whole characters, each of which can stand
  // in a JSON string as it is and begins no markup: what a state that takes any text takes anyway.
  std::span<const Node> plain() const { return plain_; }
  std::span<const Node> others() const { return others_; }
  std::span<const int32_t> tokens(const Node& node) const {
    return std::span(ids_).subspan(node.tokens_begin, node.tokens_end - node.tokens_begin);
  }
  static bool is_plain_byte(uint8_t byte) {
    return byte >= 0x20 && byte != '"' && byte != '\\' && byte != '<';
  }
  // One bit for each token of the vocabulary, the lowest of the first word for token 0.
  std::span<const uint64_t> plain_mask() const { return plain_mask_; }
  // Plain tokens of more characters than that.
  std::span<const int32_t> plain_longer_than(int n_characters) const {
    const auto n = std::min(static_cast<size_t>(n_characters), n_longer_.size());
    return std::span(plain_by_length_).first(n == n_longer_.size() ? 0 : n_longer_[n]);
  }
  int longest_plain() const { return static_cast<int>(n_longer_.size()); }  // characters

  // What the token writes, as bytes of a grammar; empty for one that is never allowed.
  std::string_view bytes(int32_t token) const {
    const auto i = static_cast<size_t>(token);
    if (token < 0 || i + 1 >= begins_.size()) return {};
    return std::string_view(bytes_).substr(begins_[i], begins_[i + 1] - begins_[i]);
  }
  bool is_text(int32_t token) const {
    const std::string_view code = bytes(token);
    return !code.empty() && static_cast<uint8_t>(code[0]) != 0xFF;
  }
  // Those that end a generation: allowed where the text is complete.
  std::span<const int32_t> ends() const { return ends_; }
  bool is_end(int32_t token) const { return std::find(ends_.begin(), ends_.end(), token) != ends_.end(); }
  int32_t n_tokens() const { return static_cast<int32_t>(begins_.size()) - 1; }
  size_t n_mask_words() const { return plain_mask_.size(); }

 private:
  void sort_by_length(std::span<const int32_t> tokens);
  std::vector<Node> build(std::vector<int32_t> tokens);

  std::vector<Node> plain_, others_;
  std::vector<int32_t> ids_;
  std::vector<uint64_t> plain_mask_;
  std::vector<int32_t> plain_by_length_;  // the longest first
  std::vector<size_t> n_longer_;          // [n]: so many have more than n characters
  std::string bytes_;
  std::vector<size_t> begins_{0};
  std::vector<int32_t> ends_;
};

}  // namespace thermo
