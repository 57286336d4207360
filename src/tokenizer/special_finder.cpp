#include "tokenizer/special_finder.h"

namespace thermo {

SpecialFinder::SpecialFinder(const Vocab& vocab) : nodes_(1) {
  for (int32_t id = 0; id < vocab.n_tokens(); ++id) {
    const bool control = vocab.is_control(id);
    if (!control && vocab.token_type(id) != TokenType::UserDefined) continue;
    if (!vocab.token_text(id).empty()) insert(vocab.token_text(id), id, control);
  }
}

std::optional<SpecialMatch> SpecialFinder::find(std::string_view text, size_t from, size_t to,
                                                bool controls) const noexcept {
  for (size_t begin = from; begin < to; ++begin) {
    uint32_t node = roots_[static_cast<uint8_t>(text[begin])];
    if (node == 0) continue;
    std::optional<SpecialMatch> longest;
    for (size_t end = begin + 1; node != 0; ++end) {
      if (nodes_[node].id >= 0 && (controls || !nodes_[node].control)) {
        longest = SpecialMatch{begin, end, nodes_[node].id};
      }
      if (end == to) break;
      node = child(node, static_cast<uint8_t>(text[end]));
    }
    if (longest) return longest;
  }
  return std::nullopt;
}

void SpecialFinder::insert(std::string_view text, int32_t id, bool control) {
  uint32_t node = 0;
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    uint32_t next = node == 0 ? roots_[byte] : child(node, byte);
    if (next == 0) {
      next = static_cast<uint32_t>(nodes_.size());
      nodes_.push_back({.next_sibling = node == 0 ? 0 : nodes_[node].first_child, .byte = byte});
      (node == 0 ? roots_[byte] : nodes_[node].first_child) = next;
    }
    node = next;
  }
  if (nodes_[node].id < 0) {  // of two tokens with the same text the first counts
    nodes_[node].id = id;
    nodes_[node].control = control;
  }
}

uint32_t SpecialFinder::child(uint32_t node, uint8_t byte) const noexcept {
  for (uint32_t c = nodes_[node].first_child; c != 0; c = nodes_[c].next_sibling) {
    if (nodes_[c].byte == byte) return c;
  }
  return 0;
}

}  // namespace thermo
