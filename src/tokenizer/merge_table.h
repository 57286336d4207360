// Byte-pair merging of one piece of text.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/vocab.h"

namespace thermo {

// Immutable after construction: any thread, each with its own Scratch.
class MergeTable {
 public:
  // Working memory of merge(), kept by the caller so that one text allocates it once.
  struct Scratch {
    struct Link {
      uint32_t symbol;
      uint32_t rank;  // of the pair that it begins; none also where it was merged into the one before
      uint32_t previous, next;
    };
    std::vector<Link> links;
    std::vector<uint64_t> heap;
  };

  // Throws LoadError: a merge without a separating space, a byte without a token.
  MergeTable(const Vocab& vocab, std::span<const std::string> merges);

  // Appends the ids of one piece: starting from single bytes, the adjacent pair of lowest rank is merged,
  // the leftmost where ranks are equal, until no pair has a rank. Time is O(n log n).
  // Only normal tokens come out, never a special one, whatever the text. `look` is called now and then during
  // a long piece; what it throws ends the call.
  void merge(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids,
             const std::function<void()>* look = nullptr) const;

 private:
  // One slot of an open-addressing table. Symbols are token ids; a merge may also make a text that is not a
  // token, which gets a number from n_tokens_ on.
  struct Slot {
    uint64_t pair;  // left symbol << 32 | right symbol
    uint32_t rank;
  };
  static constexpr uint32_t kNoRank = UINT32_MAX;
  static constexpr uint64_t kNoPair = UINT64_MAX;

  void insert(uint64_t pair, uint32_t rank) noexcept;
  size_t slot_of(uint64_t pair) const noexcept;
  uint32_t rank_of(uint32_t left, uint32_t right) const noexcept;
  void merge_short(std::string_view piece, std::vector<int32_t>& ids) const;
  void merge_long(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids,
                  const std::function<void()>* look) const;
  void emit(uint32_t symbol, std::vector<int32_t>& ids) const;

  uint32_t n_tokens_;
  std::array<uint32_t, 256> byte_symbols_;
  std::vector<Slot> slots_;
  int hash_shift_ = 0;
  std::vector<uint32_t> merged_;          // by rank: the symbol that the pair becomes
  std::vector<std::string> extra_bytes_;  // by symbol - n_tokens_: its bytes
};

}  // namespace thermo
