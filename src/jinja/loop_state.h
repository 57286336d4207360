// The `loop` variable of a for statement. Items are pulled one at a time, so a filter condition sees what
// the body of the previous iteration did; only last, nextitem and length look ahead.
#pragma once

#include <deque>
#include <functional>
#include <optional>

#include "jinja/value_ops.h"

namespace thermo::jinja {

struct LoopState : Object {
  LoopState(Heap* owner, Value source, std::function<bool(Value&)> pull, int loop_depth)
      : Object(owner), iterable(std::move(source)), pull_item(std::move(pull)), depth0(loop_depth) {}

  // Moves to the next item; false at the end.
  bool advance();
  // The item after the current one.
  const Value* peek();
  size_t length();

  Value iterable;  // what the loop runs over when nothing is filtered out: its length is known
  std::function<bool(Value&)> pull_item;
  bool is_filtered = false;
  std::deque<Value> ahead;
  Value previous, current;
  size_t index0 = static_cast<size_t>(-1);
  int depth0 = 0;
  std::optional<size_t> known_length;
  std::optional<std::vector<Value>> last_changed;            // loop.changed()
  std::function<Value(Interpreter&, CallArgs&)> call_again;  // loop(...) of a recursive loop
};

inline LoopState& Value::loop() const noexcept {
  return static_cast<LoopState&>(*object_);
}

}  // namespace thermo::jinja
