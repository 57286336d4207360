// Symbols are interned at load, so that merging compares and looks up integers and never touches text.
//
// Pieces are nearly always words of a few bytes. For those a scan over an array of ranks is fastest, though
// quadratic. Long pieces (a megabyte of one letter is a legal request) use a linked list and a heap of (rank,
// position). An entry that a later merge has overtaken is recognised when it comes up, because the rank
// stored for its position has changed.
//
// Where a piece is longer still, a list per rank takes most of the work from the heap. The ranks are visited
// in order. A merge nearly always makes pairs of higher ranks, which wait in their lists; only pairs of lower
// ranks go into the heap. The lists need no sorting: a symbol is made by the same merges wherever it stands,
// so all of its kind are made in one visit, from left to right. 20 MB of blanks take a seventh of the time.
#include "tokenizer/merge_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <functional>
#include <unordered_map>

#include "base/check.h"
#include "base/error.h"
#include "gguf/gguf_value.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/unicode.h"

namespace thermo {
namespace {

constexpr size_t kShortPiece = 48;  // bytes up to which the quadratic scan is used
// Positions have 32 bits. No prompt comes near this; a longer piece is merged in parts.
constexpr size_t kLongestPiece = size_t{1} << 30;
constexpr size_t kLookEvery = size_t{64} << 10;  // pairs that are looked up or merged: a few milliseconds

uint64_t make_pair(uint32_t left, uint32_t right) {
  return uint64_t{left} << 32 | right;
}

}  // namespace

MergeTable::MergeTable(const Vocab& vocab, std::span<const std::string> merges)
    : n_tokens_(static_cast<uint32_t>(vocab.n_tokens())) {
  // Special tokens are left out on purpose: text that spells one must not become it by merging.
  std::unordered_map<std::string_view, uint32_t> symbols;
  symbols.reserve(n_tokens_);
  for (int32_t id = 0; id < vocab.n_tokens(); ++id) {
    const TokenType type = vocab.token_type(id);
    if (type != TokenType::Normal && type != TokenType::Byte) continue;
    symbols.try_emplace(vocab.token_text(id), static_cast<uint32_t>(id));
  }

  for (size_t byte = 0; byte < 256; ++byte) {
    std::string text;
    append_utf8(text, byte_to_char(static_cast<uint8_t>(byte)));
    const auto found = symbols.find(text);
    if (found == symbols.end()) {
      throw LoadError(
          fmt::format("tokenizer.ggml.tokens: no normal token for byte 0x{:02X} (\"{}\"), expected one for "
                      "each of the 256 bytes",
                      byte, text));
    }
    byte_symbols_[byte] = found->second;
  }

  std::deque<std::string> extra_texts;  // what keys of `symbols` point to where no token has the text
  const auto intern = [&](std::string_view text) {
    if (const auto found = symbols.find(text); found != symbols.end()) return found->second;
    const auto symbol = n_tokens_ + static_cast<uint32_t>(extra_bytes_.size());
    symbols.emplace(extra_texts.emplace_back(text), symbol);
    // A text with a character outside the alphabet is never made by merging; its bytes do not matter.
    std::string& bytes = extra_bytes_.emplace_back();
    for (size_t i = 0; i < text.size();) {
      const DecodedChar c = decode_utf8(text, i);
      bytes += static_cast<char>(char_to_byte(c.code).value_or(0));
      i += c.length;
    }
    return symbol;
  };

  const size_t n_slots = std::bit_ceil(std::max<size_t>(merges.size() * 2, 2));
  slots_.assign(n_slots, {kNoPair, kNoRank});
  hash_shift_ = 64 - std::countr_zero(n_slots);
  merged_.reserve(merges.size());
  std::string merged_text;
  for (const std::string& merge : merges) {
    const size_t space = merge.find(' ', 1);
    if (space == std::string::npos) {
      throw LoadError(
          fmt::format("tokenizer.ggml.merges: \"{}\" (number {}) has no space between its two parts",
                      escape_text(merge), merged_.size()));
    }
    const std::string_view left = std::string_view(merge).substr(0, space);
    const std::string_view right = std::string_view(merge).substr(space + 1);
    const auto rank = static_cast<uint32_t>(merged_.size());
    insert(make_pair(intern(left), intern(right)), rank);
    merged_text.assign(left);
    merged_text += right;
    merged_.push_back(intern(merged_text));
  }
}

void MergeTable::merge(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids,
                       const std::function<void()>* look) const {
  while (piece.size() > kLongestPiece) {
    merge_long(piece.substr(0, kLongestPiece), scratch, ids, look);
    piece.remove_prefix(kLongestPiece);
  }
  if (piece.size() <= kShortPiece) {
    merge_short(piece, ids);
  } else {
    merge_long(piece, scratch, ids, look);
  }
}

size_t MergeTable::slot_of(uint64_t pair) const noexcept {
  return static_cast<size_t>(pair * 0x9E3779B97F4A7C15 >> hash_shift_);
}

// Of duplicate pairs the first keeps its rank.
void MergeTable::insert(uint64_t pair, uint32_t rank) noexcept {
  size_t i = slot_of(pair);
  while (slots_[i].pair != kNoPair && slots_[i].pair != pair) i = (i + 1) & (slots_.size() - 1);
  if (slots_[i].pair == kNoPair) slots_[i] = {pair, rank};
}

uint32_t MergeTable::rank_of(uint32_t left, uint32_t right) const noexcept {
  const uint64_t pair = make_pair(left, right);
  size_t i = slot_of(pair);
  while (slots_[i].pair != pair) {
    if (slots_[i].pair == kNoPair) return kNoRank;
    i = (i + 1) & (slots_.size() - 1);
  }
  return slots_[i].rank;
}

void MergeTable::merge_short(std::string_view piece, std::vector<int32_t>& ids) const {
  std::array<uint32_t, kShortPiece> symbols;
  std::array<uint32_t, kShortPiece> ranks;  // of the pair (i, i + 1)
  size_t n = piece.size();
  for (size_t i = 0; i < n; ++i) symbols[i] = byte_symbols_[static_cast<uint8_t>(piece[i])];
  for (size_t i = 0; i + 1 < n; ++i) ranks[i] = rank_of(symbols[i], symbols[i + 1]);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i) {
      if (ranks[i] < ranks[best]) best = i;
    }
    if (ranks[best] == kNoRank) break;
    symbols[best] = merged_[ranks[best]];
    for (size_t i = best + 1; i + 1 < n; ++i) {
      symbols[i] = symbols[i + 1];
      ranks[i - 1] = ranks[i];
    }
    --n;
    if (best > 0) ranks[best - 1] = rank_of(symbols[best - 1], symbols[best]);
    if (best + 1 < n) ranks[best] = rank_of(symbols[best], symbols[best + 1]);
  }
  for (size_t i = 0; i < n; ++i) emit(symbols[i], ids);
}

void MergeTable::merge_long(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids,
                            const std::function<void()>* look) const {
  const auto n = static_cast<uint32_t>(piece.size());
  std::vector<Scratch::Link>& links = scratch.links;
  std::vector<uint64_t>& heap = scratch.heap;
  links.clear();
  links.reserve(n);
  heap.clear();
  // Positions by rank. A visit to all ranks must not cost more than a heap for all positions.
  const bool by_rank = n >= merged_.size() / 8;
  std::vector<std::vector<uint32_t>> later(by_rank ? merged_.size() : 0);
  uint32_t first_later = by_rank ? 0 : kNoRank;  // lower ranks go into the heap

  size_t n_pairs = 0;
  const auto count_pair = [&] {
    if (++n_pairs % kLookEvery == 0 && look != nullptr) (*look)();
  };
  // The lowest rank on top, then the lowest position.
  const auto entry = [](uint32_t rank, uint32_t i) { return uint64_t{rank} << 32 | i; };
  // True: the pair that begins at i is the last of the heap, which is to be put in order.
  const auto add_pair = [&](uint32_t i) {
    Scratch::Link& link = links[i];
    link.rank = link.next < n ? rank_of(link.symbol, links[link.next].symbol) : kNoRank;
    if (link.rank == kNoRank) return false;
    if (link.rank < first_later) {
      heap.push_back(entry(link.rank, i));
      return true;
    }
    later[link.rank].push_back(i);
    return false;
  };
  const auto push_pair = [&](uint32_t i) {
    if (add_pair(i)) std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  const auto merge_at = [&](uint32_t i, uint32_t rank) {
    count_pair();
    Scratch::Link& link = links[i];
    if (link.rank != rank) return;  // overtaken
    Scratch::Link& gone = links[link.next];
    gone.rank = kNoRank;
    link.symbol = merged_[rank];
    link.next = gone.next;
    if (link.next < n) links[link.next].previous = i;
    push_pair(i);
    if (i > 0) push_pair(link.previous);
  };
  const auto merge_heap_below = [&](uint64_t end) {
    while (!heap.empty() && heap.front() < end) {
      const uint64_t lowest = heap.front();
      std::pop_heap(heap.begin(), heap.end(), std::greater<>());
      heap.pop_back();
      merge_at(static_cast<uint32_t>(lowest), static_cast<uint32_t>(lowest >> 32));
    }
  };

  for (uint32_t i = 0; i < n; ++i) {
    count_pair();
    const uint32_t symbol = byte_symbols_[static_cast<uint8_t>(piece[i])];
    links.push_back({symbol, kNoRank, i - 1, i + 1});  // the first one's `previous` is not read
  }
  for (uint32_t i = 0; i < n; ++i) {
    count_pair();
    add_pair(i);
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  for (uint32_t rank = 0; rank < later.size(); ++rank) {
    first_later = rank + 1;
    std::vector<uint32_t> positions = std::move(later[rank]);
    THERMO_DCHECK(std::is_sorted(positions.begin(), positions.end()), "positions of a rank ascend");
    for (const uint32_t i : positions) {
      merge_heap_below(entry(rank, i));
      merge_at(i, rank);
    }
  }
  merge_heap_below(UINT64_MAX);
  for (uint32_t i = 0; i < n; i = links[i].next) emit(links[i].symbol, ids);
}

void MergeTable::emit(uint32_t symbol, std::vector<int32_t>& ids) const {
  if (symbol < n_tokens_) {
    ids.push_back(static_cast<int32_t>(symbol));
    return;
  }
  for (const char byte : extra_bytes_[symbol - n_tokens_]) {
    ids.push_back(static_cast<int32_t>(byte_symbols_[static_cast<uint8_t>(byte)]));
  }
}

}  // namespace thermo
