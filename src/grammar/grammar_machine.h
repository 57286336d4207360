// Runs a grammar over bytes. All that can still happen is one number, a state: the set of places in rules
// where the text may be, each with the callers it returns to. States are made when they are first reached and
// then remembered, with what each byte leads to, so that a text that goes over known ground costs a table
// look-up per byte.
//
// Callers of a rule that was entered at one point of the text are one shared set, whatever way led there.
// So an ambiguous grammar costs little more than a plain one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "grammar/grammar.h"

namespace thermo {

// One thread at a time.
class GrammarMachine {
 public:
  using State = uint32_t;
  static constexpr State kDead = 0;  // no text goes on from here

  explicit GrammarMachine(std::shared_ptr<const Grammar> grammar);

  State start() const { return start_; }
  State step(State state, uint8_t byte) {
    const Node& node = nodes_[state];
    if (node.next && (*node.next)[byte] != kUnknown) return (*node.next)[byte];
    return find_step(state, byte);
  }
  State walk(State state, std::string_view bytes) {
    for (const char c : bytes) {
      if (state == kDead) break;
      state = step(state, static_cast<uint8_t>(c));
    }
    return state;
  }
  // The text so far is complete.
  bool can_end(State state) const { return nodes_[state].can_end; }
  // Nothing but the end is possible.
  bool must_end(State state) const { return nodes_[state].can_end && bases(state).empty(); }
  // A text that can be read in more than kMaxBases ways is not followed: it counts as one that the grammar
  // does not have. Whether one was met so far.
  bool has_given_up() const { return has_given_up_; }
  // The same, after a look at the first few states that texts lead to.
  bool gives_up_soon();
  // So much is remembered that it is better to begin again.
  bool is_full() const { return nodes_.size() > kMaxNodes || callers_.n_places() > kMaxPlaces; }
  // The same state in another machine for the same grammar.
  State copy_to(GrammarMachine& other, State state) const;

  // A place in the grammar and the callers that it returns to.
  struct Place {
    uint32_t at;       // a state of the grammar
    uint32_t callers;  // a set of places
    auto operator<=>(const Place&) const = default;
  };
  // The places from which the others of a state follow by calls alone. Nothing for a text that must end.
  std::span<const Place> bases(State state) const;
  // Where the text is at this place of the grammar and nobody knows the callers.
  State at_place(uint32_t at);
  // A state reached from at_place(): the rule was left, so that the callers would decide.
  bool has_left(State state) const { return nodes_[state].has_left; }

  const Grammar& grammar() const { return *grammar_; }
  const std::shared_ptr<const Grammar>& shared_grammar() const { return grammar_; }

 private:
  static constexpr State kUnknown = UINT32_MAX;
  static constexpr uint32_t kEnd = UINT32_MAX, kOutside = UINT32_MAX - 1;  // as Place::at: returns to nowhere
  static constexpr size_t kMaxNodes = 50'000, kMaxPlaces = 2'000'000, kMaxBases = 4'000;
  static constexpr size_t kFirstStates = 64;  // of gives_up_soon()

  // Sets of places, each kept once and numbered. Sorted.
  class PlaceSets {
   public:
    uint32_t intern(std::span<const Place> places);  // the number; new ones are ascending
    std::span<const Place> get(uint32_t id) const {
      return std::span(places_).subspan(begins_[id], begins_[id + 1] - begins_[id]);
    }
    size_t size() const { return begins_.size() - 1; }
    size_t n_places() const { return places_.size(); }

   private:
    void grow();
    std::vector<Place> places_;
    std::vector<size_t> begins_{0};
    std::vector<uint32_t> table_;  // open addressing; 0: free, else number + 1
  };
  struct Node {
    bool can_end = false, has_left = false;
    // After expand():
    std::vector<Place> items = {};  // places from which a byte can be read
    std::unique_ptr<std::array<State, 256>> next = {};
  };
  struct Entry;

  State find_step(State state, uint8_t byte);
  State node_of(std::vector<Place>& places);
  void add_place(Place place);
  State close();
  void expand(State state);

  std::shared_ptr<const Grammar> grammar_;
  PlaceSets callers_;
  PlaceSets states_;  // bases of each node; kEnd and kOutside among them are its flags
  std::vector<Node> nodes_;
  State start_ = kDead;
  uint32_t outside_ = 0;  // callers: unknown
  bool has_given_up_ = false;

  // Scratch of find_step().
  std::vector<Place> found_, bases_;
  std::unordered_set<uint64_t> seen_;
};

}  // namespace thermo
