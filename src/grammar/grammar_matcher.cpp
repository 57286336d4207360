#include "grammar/grammar_matcher.h"

#include <algorithm>
#include <map>

#include "grammar/utf8_automaton.h"

namespace thermo {
namespace {

bool has_bit(std::span<const uint64_t> mask, int32_t token) {
  const auto i = static_cast<size_t>(token);
  return i / 64 < mask.size() && (mask[i / 64] >> (i % 64) & 1) != 0;
}

void set_bit(std::span<uint64_t> mask, int32_t token) {
  mask[static_cast<size_t>(token) / 64] |= uint64_t{1} << (token % 64);
}

void clear_bit(std::span<uint64_t> mask, int32_t token) {
  mask[static_cast<size_t>(token) / 64] &= ~(uint64_t{1} << (token % 64));
}

}  // namespace

// Whether every plain token leads from the state to itself.
bool TokenMachine::takes_any_text(GrammarMachine::State state) {
  std::map<std::pair<GrammarMachine::State, uint8_t>, bool> seen;
  std::vector<std::pair<GrammarMachine::State, uint8_t>> work{{state, kUtf8Whole}};
  while (!work.empty()) {
    const auto [at, utf8] = work.back();
    work.pop_back();
    for (int b = 0; b < 256; ++b) {
      const auto byte = static_cast<uint8_t>(b);
      if (!TokenTrie::is_plain_byte(byte)) continue;
      const uint8_t next_utf8 = utf8_next(utf8, byte);
      if (next_utf8 == kUtf8Broken) continue;
      const GrammarMachine::State next = machine_.step(at, byte);
      if (next == GrammarMachine::kDead || (next_utf8 == kUtf8Whole && next != state)) return false;
      if (next_utf8 != kUtf8Whole && seen.try_emplace({next, next_utf8}, true).second)
        work.emplace_back(next, next_utf8);
    }
  }
  return true;
}

constexpr uint32_t kNoCharacter = UINT32_MAX, kSeveralPlaces = UINT32_MAX - 1;

// The one place of the grammar that every plain character leads to.
uint32_t TokenMachine::after_any_character(uint32_t at) {
  if (const auto found = after_any_.find(at); found != after_any_.end()) return found->second;
  const Grammar& grammar = machine_.grammar();
  uint32_t after = kNoCharacter;
  bool first = true, same = true;
  const auto reach = [&](uint32_t place) {
    same = same && (first || place == after);
    first = false;
    after = place;
  };
  std::vector<std::pair<uint32_t, uint8_t>> seen{{at, kUtf8Whole}};
  for (size_t i = 0; same && i < seen.size(); ++i) {
    const auto [place, utf8] = seen[i];
    same = same && grammar.calls(place).empty();
    for (int b = 0; same && b < 256; ++b) {
      const auto byte = static_cast<uint8_t>(b);
      const uint8_t next_utf8 = TokenTrie::is_plain_byte(byte) ? utf8_next(utf8, byte) : kUtf8Broken;
      if (next_utf8 == kUtf8Broken) continue;
      uint32_t target = kNoCharacter;
      for (const Grammar::ByteEdge& edge : grammar.byte_edges(place)) {
        if (byte < edge.first || byte > edge.last) continue;
        same = same && (target == kNoCharacter || target == edge.target);
        target = edge.target;
      }
      if (target == kNoCharacter || next_utf8 == kUtf8Whole)
        reach(target);
      else if (std::find(seen.begin(), seen.end(), std::pair(target, next_utf8)) == seen.end())
        seen.emplace_back(target, next_utf8);
    }
  }
  return after_any_[at] = same ? after : kSeveralPlaces;
}

std::optional<TokenMachine::TextRoom> TokenMachine::text_room(uint32_t at) {
  const Grammar& grammar = machine_.grammar();
  TextRoom room{0, false};
  for (; room.n_characters < trie_->longest_plain(); ++room.n_characters) {
    const uint32_t next = after_any_character(at);
    if (next == kSeveralPlaces) return std::nullopt;
    if (next == kNoCharacter) break;
    at = next;
    room.left = room.left || grammar.state(at).final;
  }
  return room;
}

void TokenMachine::walk(std::span<const TokenTrie::Node> nodes, GrammarMachine::State start, PlaceMask& out) {
  for (uint32_t i = 0; i < nodes.size();) {
    const TokenTrie::Node& node = nodes[i];
    const size_t depth = node.depth;
    if (path_.size() <= depth) {
      path_.resize(depth + 1);
      left_.resize(depth + 1);
    }
    const GrammarMachine::State before = depth == 0 ? start : path_[depth - 1];
    // At the start itself other places stand for those who are returned to.
    const bool left = depth > 0 && (left_[depth - 1] != 0 || machine_.has_left(before));
    const GrammarMachine::State now =
        before == GrammarMachine::kDead ? GrammarMachine::kDead : machine_.step(before, node.byte);
    if (now == GrammarMachine::kDead && !left) {
      i = node.end;
      continue;
    }
    for (const int32_t token : trie_->tokens(node)) {
      if (now != GrammarMachine::kDead)
        set_bit(out.allowed, token);
      else
        out.undecided.push_back(token);
    }
    path_[depth] = now;
    left_[depth] = left ? 1 : 0;
    ++i;
  }
}

// The tokens of a state, as long as they are found soon; false: they are not.
bool TokenMachine::walk_few(std::span<const TokenTrie::Node> nodes, GrammarMachine::State start, Mask& mask) {
  constexpr int kMaxVisits = 3000;
  int n_visits = 0;
  for (uint32_t i = 0; i < nodes.size();) {
    const TokenTrie::Node& node = nodes[i];
    const size_t depth = node.depth;
    const GrammarMachine::State now = machine_.step(depth == 0 ? start : path_[depth - 1], node.byte);
    if (now == GrammarMachine::kDead) {
      i = node.end;
      continue;
    }
    if (++n_visits > kMaxVisits) return false;
    if (path_.size() <= depth) {
      path_.resize(depth + 1);
      left_.resize(depth + 1);
    }
    path_[depth] = now;
    for (const int32_t token : trie_->tokens(node)) set_bit(mask, token);
    ++i;
  }
  return true;
}

const TokenMachine::PlaceMask& TokenMachine::place_mask(uint32_t at) {
  if (const auto found = place_masks_.find(at); found != place_masks_.end()) return found->second;
  if (place_masks_.size() >= kMaxMasks) place_masks_.clear();
  PlaceMask& mask = place_masks_[at];
  mask.allowed.assign(trie_->n_mask_words(), 0);
  const GrammarMachine::State start = machine_.at_place(at);
  const std::optional<TextRoom> room = text_room(at);
  if (room || takes_any_text(start)) {
    mask.allowed.assign(trie_->plain_mask().begin(), trie_->plain_mask().end());
    const auto too_long = trie_->plain_longer_than(room ? room->n_characters : trie_->longest_plain());
    for (const int32_t token : too_long) {
      clear_bit(mask.allowed, token);
      if (room->left) mask.undecided.push_back(token);
    }
  } else {
    walk(trie_->plain(), start, mask);
  }
  walk(trie_->others(), start, mask);
  return mask;
}

std::shared_ptr<const TokenMachine::Mask> TokenMachine::mask(GrammarMachine::State state) {
  if (const auto found = masks_.find(state); found != masks_.end()) return found->second;
  if (masks_.size() >= kMaxMasks) masks_.clear();
  auto mask = std::make_shared<Mask>(trie_->n_mask_words(), 0);
  if (walk_few(trie_->others(), state, *mask) && walk_few(trie_->plain(), state, *mask))
    return masks_[state] = mask;
  // By value: masks of places add states to the machine.
  const std::span<const GrammarMachine::Place> bases = machine_.bases(state);
  const std::vector<GrammarMachine::Place> places(bases.begin(), bases.end());
  for (size_t i = 0; i < places.size(); ++i) {
    if (i > 0 && places[i].at == places[i - 1].at) continue;  // sorted by place
    const PlaceMask& known = place_mask(places[i].at);
    for (size_t word = 0; word < mask->size(); ++word) (*mask)[word] |= known.allowed[word];
    for (const int32_t token : known.undecided)
      if (!has_bit(*mask, token) && machine_.walk(state, trie_->bytes(token)) != GrammarMachine::kDead)
        set_bit(*mask, token);
  }
  masks_[state] = mask;
  return mask;
}

bool GrammarMatcher::allows(int32_t token) {
  const TokenTrie& trie = *machine_->trie();
  if (mask_ && !trie.is_end(token)) return has_bit(*mask_, token);
  if (trie.is_end(token)) return can_end();
  if (++n_asked_ > kAsksBeforeMask) return has_bit(*mask(), token);
  const std::string_view bytes = trie.bytes(token);
  return !bytes.empty() && machine_->machine().walk(state_, bytes) != GrammarMachine::kDead;
}

bool GrammarMatcher::accept_text(std::string_view bytes) {
  if (bytes.empty()) return false;
  const GrammarMachine::State next = machine_->machine().walk(state_, bytes);
  if (next == GrammarMachine::kDead) return false;
  state_ = next;
  n_asked_ = 0;
  mask_.reset();
  if (machine_->machine().is_full()) {
    auto fresh = std::make_shared<TokenMachine>(machine_->machine().shared_grammar(), machine_->trie());
    state_ = machine_->machine().copy_to(fresh->machine(), state_);
    machine_ = std::move(fresh);
  }
  return true;
}

}  // namespace thermo
