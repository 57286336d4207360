#include "jinja/loop_state.h"

namespace thermo::jinja {

const Value* LoopState::peek() {
  if (ahead.empty()) {
    Value item;
    if (!pull_item(item)) return nullptr;
    ahead.push_back(std::move(item));
  }
  return &ahead.front();
}

bool LoopState::advance() {
  if (peek() == nullptr) return false;
  previous = std::move(current);
  current = std::move(ahead.front());
  ahead.pop_front();
  ++index0;
  return true;
}

size_t LoopState::length() {
  if (known_length) return *known_length;
  if (!is_filtered) known_length = length_or_none(iterable);
  if (!known_length) {
    for (Value item; pull_item(item);) ahead.push_back(std::move(item));
    known_length = index0 + 1 + ahead.size();
  }
  return *known_length;
}

}  // namespace thermo::jinja
