// Finds the texts of special tokens in a prompt.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tokenizer/vocab.h"

namespace thermo {

struct SpecialMatch {
  size_t begin;
  size_t end;
  int32_t id;
};

// Immutable after construction: any thread.
class SpecialFinder {
 public:
  explicit SpecialFinder(const Vocab& vocab);

  // The leftmost special text in text[from, to), the longest where several begin; nullopt when there is
  // none. With `controls` false, only user-defined tokens are looked for.
  std::optional<SpecialMatch> find(std::string_view text, size_t from, size_t to,
                                   bool controls) const noexcept;

 private:
  // A trie over the bytes of the texts. Node 0 is the root and, as a link, means "none".
  struct Node {
    uint32_t first_child = 0;
    uint32_t next_sibling = 0;
    int32_t id = -1;  // the token whose text ends here
    bool control = false;
    uint8_t byte = 0;
  };

  void insert(std::string_view text, int32_t id, bool control);
  uint32_t child(uint32_t node, uint8_t byte) const noexcept;

  std::vector<Node> nodes_;
  std::array<uint32_t, 256> roots_{};  // by first byte: one look dismisses most positions of a text
};

}  // namespace thermo
