// The `attribute` argument of filters: "a.b", "0", 1, or several with commas for sort.
#pragma once

#include <optional>
#include <vector>

#include "jinja/interpreter.h"

namespace thermo::jinja {

Value lower_if_string(Interpreter& vm, const Value& v);

class AttributePath {
 public:
  // None or undefined: the item itself.
  static AttributePath one(const Value& attribute);
  // "a,b" gives a list of both, to sort by.
  static AttributePath several(const Value& attribute);

  void set_default(Value value) { default_ = std::move(value); }
  Value get(Interpreter& vm, const Value& item) const;
  // The same with strings in lower case.
  Value get_key(Interpreter& vm, const Value& item, bool ignore_case) const;

 private:
  using Parts = std::vector<Value>;
  Value follow(Interpreter& vm, Value item, const Parts& parts) const;

  std::vector<Parts> paths_;
  std::optional<Value> default_;
};

}  // namespace thermo::jinja
