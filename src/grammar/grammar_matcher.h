// Which tokens may follow a text, by a grammar.
//
// One token is a walk over its bytes: a fraction of a microsecond where the machine knows the way. All tokens
// at once are a mask. Where few bytes can come next, a walk over the trie of tokens is short. Elsewhere most
// of the mask is known for each place in the grammar whatever called it: the tokens that stay inside the
// rule. Only those that leave it are asked one by one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "grammar/grammar_machine.h"
#include "grammar/token_trie.h"

namespace thermo {

// A grammar's machine with the tokens of a vocabulary. Shared by the matchers of one thread.
class TokenMachine {
 public:
  using Mask = std::vector<uint64_t>;  // as TokenTrie::plain_mask()

  TokenMachine(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const TokenTrie> trie)
      : machine_(std::move(grammar)), trie_(std::move(trie)) {}

  GrammarMachine& machine() { return machine_; }
  const std::shared_ptr<const TokenTrie>& trie() const { return trie_; }
  // The tokens that may come next, end tokens left out.
  std::shared_ptr<const Mask> mask(GrammarMachine::State state);

 private:
  // What is known of a place without its callers.
  struct PlaceMask {
    Mask allowed;
    std::vector<int32_t> undecided;  // leave the rule and go on
  };
  bool walk_few(std::span<const TokenTrie::Node> nodes, GrammarMachine::State start, Mask& mask);
  const PlaceMask& place_mask(uint32_t at);
  void walk(std::span<const TokenTrie::Node> nodes, GrammarMachine::State start, PlaceMask& out);
  bool takes_any_text(GrammarMachine::State state);
  // A place where any text may stand, up to a number of characters: how many there may be at least, and
  // whether the rule may be left after one of them. nullopt: it is no such place.
  struct TextRoom {
    int n_characters;
    bool left;
  };
  std::optional<TextRoom> text_room(uint32_t at);
  uint32_t after_any_character(uint32_t at);

  static constexpr size_t kMaxMasks = 256;  // of each kind; one is 31 KB for 248,320 tokens
  GrammarMachine machine_;
  std::shared_ptr<const TokenTrie> trie_;
  std::unordered_map<uint32_t, PlaceMask> place_masks_;
  std::unordered_map<GrammarMachine::State, std::shared_ptr<const Mask>> masks_;
  std::unordered_map<uint32_t, uint32_t> after_any_;  // of after_any_character()
  std::vector<GrammarMachine::State> path_;           // scratch of walk()
  std::vector<char> left_;
};

// A text that grows token by token. A copy is cheap and goes its own way. One thread at a time, together with
// the other matchers of the same machine.
class GrammarMatcher {
 public:
  explicit GrammarMatcher(std::shared_ptr<TokenMachine> machine)
      : machine_(std::move(machine)), state_(machine_->machine().start()) {}

  // Whether the token may come next. End tokens: whether the text is complete.
  bool allows(int32_t token);
  // False: it may not, and nothing has changed. Not for end tokens.
  bool accept(int32_t token) { return accept_text(machine_->trie()->bytes(token)); }
  // The same for bytes; none are refused.
  bool accept_text(std::string_view bytes);

  // All of them at once, end tokens left out.
  const std::shared_ptr<const TokenMachine::Mask>& mask() {
    if (!mask_) mask_ = machine_->mask(state_);
    return mask_;
  }

  bool can_end() const { return machine_->machine().can_end(state_); }
  bool must_end() const { return machine_->machine().must_end(state_); }

 private:
  static constexpr int kAsksBeforeMask = 64;

  std::shared_ptr<TokenMachine> machine_;
  GrammarMachine::State state_;
  int n_asked_ = 0;  // since the last accept
  std::shared_ptr<const TokenMachine::Mask> mask_;
};

}  // namespace thermo
