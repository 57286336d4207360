#include "grammar/token_trie.h"

#include <algorithm>

#include "base/utf8_chars.h"
#include "grammar/rule_set.h"
#include "grammar/utf8_automaton.h"

namespace thermo {
namespace {

bool writes_text(const Vocab& vocab, int32_t id) {
  const TokenType type = vocab.token_type(id);
  if (type == TokenType::Control || type == TokenType::Unknown || vocab.is_end_of_generation(id))
    return false;
  const std::string_view bytes = vocab.token_bytes(id);
  return type != TokenType::UserDefined || !(bytes.starts_with('<') && bytes.ends_with('>'));
}

// Whether the bytes can be a part of well-formed UTF-8: at worst they begin and end inside a character.
bool can_be_utf8(std::string_view bytes) {
  size_t begin = 0;
  while (begin < bytes.size() && begin < 3 && is_utf8_continuation(bytes[begin])) ++begin;
  uint8_t state = kUtf8Whole;
  for (const char c : bytes.substr(begin)) {
    state = utf8_next(state, static_cast<uint8_t>(c));
    if (state == kUtf8Broken) return false;
  }
  return true;
}

bool is_plain(std::string_view bytes) {
  uint8_t state = kUtf8Whole;
  for (const char c : bytes) {
    if (!TokenTrie::is_plain_byte(static_cast<uint8_t>(c))) return false;
    state = utf8_next(state, static_cast<uint8_t>(c));
    if (state == kUtf8Broken) return false;
  }
  return state == kUtf8Whole;
}

}  // namespace

TokenTrie::TokenTrie(const Vocab& vocab) {
  const int32_t n = vocab.n_tokens();
  ends_.assign(vocab.end_of_generation().begin(), vocab.end_of_generation().end());
  plain_mask_.assign((static_cast<size_t>(n) + 63) / 64, 0);
  std::vector<int32_t> plain_tokens, other_tokens;
  for (int32_t id = 0; id < n; ++id) {
    const std::string_view bytes = vocab.token_bytes(id);
    if (!writes_text(vocab, id)) {
      bytes_ += token_code(id);
      other_tokens.push_back(id);
    } else if (!bytes.empty() && bytes.size() < UINT16_MAX && can_be_utf8(bytes)) {
      bytes_ += bytes;
      if (is_plain(bytes)) {
        plain_tokens.push_back(id);
        plain_mask_[static_cast<size_t>(id) / 64] |= uint64_t{1} << (id % 64);
      } else {
        other_tokens.push_back(id);
      }
    }
    begins_.push_back(bytes_.size());
  }
  sort_by_length(plain_tokens);
  plain_ = build(std::move(plain_tokens));
  others_ = build(std::move(other_tokens));
}

void TokenTrie::sort_by_length(std::span<const int32_t> tokens) {
  const auto length = [this](int32_t token) { return count_utf8_chars(bytes(token)); };
  std::vector<std::vector<int32_t>> by_length;
  for (const int32_t token : tokens) {
    const size_t n = length(token);
    if (by_length.size() <= n) by_length.resize(n + 1);
    by_length[n].push_back(token);
  }
  n_longer_.assign(by_length.empty() ? 0 : by_length.size() - 1, 0);
  for (size_t n = by_length.size(); n-- > 1;) {
    plain_by_length_.insert(plain_by_length_.end(), by_length[n].begin(), by_length[n].end());
    n_longer_[n - 1] = plain_by_length_.size();
  }
}

std::vector<TokenTrie::Node> TokenTrie::build(std::vector<int32_t> tokens) {
  std::sort(tokens.begin(), tokens.end(), [this](int32_t a, int32_t b) {
    const int order = bytes(a).compare(bytes(b));
    return order != 0 ? order < 0 : a < b;
  });
  std::vector<Node> nodes;
  std::vector<uint32_t> path;  // the nodes of the last token's bytes
  std::string_view last;
  for (const int32_t id : tokens) {
    const std::string_view text = bytes(id);
    size_t common = 0;
    while (common < last.size() && common < text.size() && last[common] == text[common]) ++common;
    for (size_t i = common; i < path.size(); ++i) nodes[path[i]].end = static_cast<uint32_t>(nodes.size());
    path.resize(common);
    for (size_t i = common; i < text.size(); ++i) {
      path.push_back(static_cast<uint32_t>(nodes.size()));
      const auto at = static_cast<uint32_t>(ids_.size());
      nodes.push_back({.end = 0,
                       .tokens_begin = at,
                       .tokens_end = at,
                       .depth = static_cast<uint16_t>(i),
                       .byte = static_cast<uint8_t>(text[i])});
    }
    // Tokens of the same bytes come one after the other.
    ids_.push_back(id);
    nodes[path.back()].tokens_end = static_cast<uint32_t>(ids_.size());
    last = text;
  }
  for (const uint32_t node : path) nodes[node].end = static_cast<uint32_t>(nodes.size());
  return nodes;
}

}  // namespace thermo
