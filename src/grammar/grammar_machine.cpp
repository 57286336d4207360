#include "grammar/grammar_machine.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace thermo {
namespace {

uint64_t mix(uint64_t h) {
  h = (h ^ h >> 32) * 0xD6E8FEB86659FD93u;
  return h ^ h >> 32;
}

}  // namespace

uint32_t GrammarMachine::PlaceSets::intern(std::span<const Place> places) {
  if (table_.size() < 2 * (size() + 1)) grow();
  uint64_t hash = places.size();
  for (const Place& p : places) hash = mix(hash ^ (static_cast<uint64_t>(p.at) << 32 | p.callers));
  for (size_t i = hash & (table_.size() - 1);; i = (i + 1) & (table_.size() - 1)) {
    if (table_[i] == 0) {
      places_.insert(places_.end(), places.begin(), places.end());
      begins_.push_back(places_.size());
      table_[i] = static_cast<uint32_t>(size());
      return table_[i] - 1;
    }
    const std::span<const Place> known = get(table_[i] - 1);
    if (std::equal(known.begin(), known.end(), places.begin(), places.end())) return table_[i] - 1;
  }
}

void GrammarMachine::PlaceSets::grow() {
  table_.assign(std::max<size_t>(64, 4 * table_.size()), 0);
  for (uint32_t id = 0; id < size(); ++id) {
    uint64_t hash = get(id).size();
    for (const Place& p : get(id)) hash = mix(hash ^ (static_cast<uint64_t>(p.at) << 32 | p.callers));
    size_t i = hash & (table_.size() - 1);
    while (table_[i] != 0) i = (i + 1) & (table_.size() - 1);
    table_[i] = id + 1;
  }
}

GrammarMachine::GrammarMachine(std::shared_ptr<const Grammar> grammar) : grammar_(std::move(grammar)) {
  std::vector<Place> none;
  node_of(none);  // kDead
  const Place end{kEnd, 0}, outside{kOutside, 0};
  const uint32_t at_end = callers_.intern({&end, 1});
  outside_ = callers_.intern({&outside, 1});
  found_.clear();
  add_place({grammar_->start(grammar_->root()), at_end});
  start_ = close();
}

GrammarMachine::State GrammarMachine::at_place(uint32_t at) {
  found_.clear();
  add_place({at, outside_});
  return close();
}

std::span<const GrammarMachine::Place> GrammarMachine::bases(State state) const {
  std::span<const Place> all = states_.get(state);
  while (!all.empty() && all.back().at >= kOutside) all = all.first(all.size() - 1);  // sorted last
  return all;
}

// The number of a set of bases, whose order does not matter.
GrammarMachine::State GrammarMachine::node_of(std::vector<Place>& places) {
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  const State state = states_.intern(places);
  if (state == nodes_.size()) {
    Node& node = nodes_.emplace_back();
    for (const Place& place : places) {
      node.can_end = node.can_end || place.at == kEnd;
      node.has_left = node.has_left || place.at == kOutside;
    }
  }
  return state;
}

void GrammarMachine::add_place(Place place) {
  constexpr size_t kFew = 24;  // up to there a look at each is quicker than a table
  if (found_.size() < kFew) {
    if (std::find(found_.begin(), found_.end(), place) != found_.end()) return;
  } else {
    const auto key = [](const Place& p) { return static_cast<uint64_t>(p.at) << 32 | p.callers; };
    if (found_.size() == kFew) {
      seen_.clear();
      for (const Place& p : found_) seen_.insert(key(p));
    }
    if (!seen_.insert(key(place)).second) return;
  }
  found_.push_back(place);
}

// The state of the places in found_, after all returns that are possible there.
GrammarMachine::State GrammarMachine::close() {
  bases_.clear();
  for (size_t i = 0; i < found_.size(); ++i) {
    const Place place = found_[i];
    if (place.at >= kOutside) {
      bases_.push_back({place.at, 0});
      continue;
    }
    if (grammar_->goes_on(place.at)) bases_.push_back(place);
    if (grammar_->state(place.at).final)
      for (const Place& caller : callers_.get(place.callers)) add_place(caller);
  }
  if (bases_.size() > kMaxBases) {
    has_given_up_ = true;
    return kDead;
  }
  return node_of(bases_);
}

GrammarMachine::State GrammarMachine::find_step(State state, uint8_t byte) {
  if (!nodes_[state].next) {
    expand(state);
    if ((*nodes_[state].next)[byte] == kDead) return kDead;
  }
  found_.clear();
  for (const Place& item : nodes_[state].items)
    for (const Grammar::ByteEdge& edge : grammar_->byte_edges(item.at))
      if (byte >= edge.first && byte <= edge.last) add_place({edge.target, item.callers});
  const State next = close();
  return (*nodes_[state].next)[byte] = next;  // after close(), which may add nodes
}

bool GrammarMachine::gives_up_soon() {
  std::vector<State> reached{start_};
  for (size_t i = 0; i < reached.size() && i < kFirstStates && !has_given_up_; ++i)
    for (int byte = 0; byte < 256; ++byte) {
      const State next = step(reached[i], static_cast<uint8_t>(byte));
      const bool is_new = std::find(reached.begin(), reached.end(), next) == reached.end();
      if (next != kDead && is_new && reached.size() < kFirstStates) reached.push_back(next);
    }
  return has_given_up_;
}

// Callers of a rule that is entered at this point of the text.
struct GrammarMachine::Entry {
  std::vector<Place> callers = {};
  std::vector<std::pair<uint32_t, uint32_t>> called_by = {};  // where to go on, and a rule entered here too
  std::vector<uint32_t> same_as = {};                         // rules entered here that end with this one
};

// The places where a byte can be read: the bases, and the starts of all rules that are called from there.
// Which bytes lead nowhere is known then.
void GrammarMachine::expand(State state) {
  std::vector<Place> items;
  std::unordered_map<uint32_t, Entry> entries;
  std::vector<uint32_t> entered;
  const auto entry = [&](uint32_t rule) -> Entry& {
    const auto [found, added] = entries.try_emplace(rule);
    if (added) entered.push_back(rule);
    return found->second;
  };
  const auto reads = [&](uint32_t at) { return !grammar_->byte_edges(at).empty(); };
  for (const Place& base : bases(state)) {
    if (reads(base.at)) items.push_back(base);
    for (const Grammar::Call& call : grammar_->calls(base.at)) {
      std::vector<Place>& callers = entry(call.rule).callers;
      const std::span<const Place> own = callers_.get(base.callers);
      if (call.tail)
        callers.insert(callers.end(), own.begin(), own.end());
      else
        callers.push_back({call.target, base.callers});
    }
  }
  for (size_t i = 0; i < entered.size(); ++i) {
    const uint32_t rule = entered[i];
    for (const Grammar::Call& call : grammar_->calls(grammar_->start(rule))) {
      Entry& called = entry(call.rule);
      if (call.tail)
        called.same_as.push_back(rule);
      else
        called.called_by.emplace_back(call.target, rule);
    }
  }
  // Callers first: a rule's rank is above those of the rules that may call it here.
  std::sort(entered.begin(), entered.end(),
            [&](uint32_t a, uint32_t b) { return grammar_->rank(a) < grammar_->rank(b); });
  std::unordered_map<uint32_t, uint32_t> numbers;
  for (const uint32_t rule : entered) {
    Entry& e = entries.at(rule);
    for (const auto& [target, caller] : e.called_by) e.callers.push_back({target, numbers.at(caller)});
    for (const uint32_t caller : e.same_as) {
      const std::span<const Place> same = callers_.get(numbers.at(caller));
      e.callers.insert(e.callers.end(), same.begin(), same.end());
    }
    std::sort(e.callers.begin(), e.callers.end());
    e.callers.erase(std::unique(e.callers.begin(), e.callers.end()), e.callers.end());
    const uint32_t number = numbers[rule] = callers_.intern(e.callers);
    if (reads(grammar_->start(rule))) items.push_back({grammar_->start(rule), number});
  }
  auto next = std::make_unique<std::array<State, 256>>();
  next->fill(kDead);
  for (const Place& item : items)
    for (const Grammar::ByteEdge& edge : grammar_->byte_edges(item.at))
      std::fill(next->begin() + edge.first, next->begin() + edge.last + 1, kUnknown);
  nodes_[state].items = std::move(items);
  nodes_[state].next = std::move(next);
}

GrammarMachine::State GrammarMachine::copy_to(GrammarMachine& other, State state) const {
  // Callers are numbered after those they return to, so ascending order has every set's parts before it.
  std::vector<uint32_t> needed, work;
  std::unordered_map<uint32_t, uint32_t> numbers;
  const auto need = [&](std::span<const Place> places) {
    for (const Place& place : places)
      if (place.at < kOutside && numbers.try_emplace(place.callers, 0).second) {
        needed.push_back(place.callers);
        work.push_back(place.callers);
      }
  };
  need(states_.get(state));
  while (!work.empty()) {
    const uint32_t id = work.back();
    work.pop_back();
    need(callers_.get(id));
  }
  std::sort(needed.begin(), needed.end());
  std::vector<Place> places;
  const auto translate = [&](std::span<const Place> from) {
    places.assign(from.begin(), from.end());
    for (Place& place : places)
      if (place.at < kOutside) place.callers = numbers.at(place.callers);
    std::sort(places.begin(), places.end());
  };
  for (const uint32_t id : needed) {
    translate(callers_.get(id));
    numbers[id] = other.callers_.intern(places);
  }
  translate(states_.get(state));
  return other.node_of(places);
}

}  // namespace thermo
