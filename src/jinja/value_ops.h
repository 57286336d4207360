// What Python's operators and built-in functions do to values. All of it may throw TemplateError.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "jinja/value.h"

namespace thermo::jinja {

enum class BinaryOp : uint8_t { Add, Sub, Mul, Div, FloorDiv, Mod, Pow };

// The name of the Python type ("str", "NoneType", ...).
std::string type_name(const Value& v);
// As jinja2 names an object in messages about undefined values ("dict object", "None").
std::string object_name(const Value& v);

bool truthy(const Value& v);
bool equals(const Value& a, const Value& b, int depth = 0);
bool identical(const Value& a, const Value& b);
// a < b; fails when Python has no order for the two.
bool less(const Value& a, const Value& b, int depth = 0);
size_t hash_value(const Value& v, int depth = 0);  // fails for what Python calls unhashable
size_t hash_string(std::string_view s);

// str() and repr().
Text to_text(const Value& v);
Text repr(const Value& v, int depth = 0);
std::string int_to_string(Int i);
std::string float_repr(double d);
// Digits with an optional sign, "_" between digits, spaces around: what int(text, base) takes.
std::optional<Int> parse_int(std::string_view s, int base = 10);
std::optional<double> parse_float(std::string_view s);

// len(), fails for what has none. length_or_none: no length.
std::optional<size_t> length_or_none(const Value& v);
size_t length(const Value& v);

// Gives the values that a `for` would see, one at a time.
class Iter {
 public:
  Iter(Heap& heap, Value source);
  static bool can_iterate(const Value& v);
  bool next(Value& out);

 private:
  Heap* heap_;
  Value source_;
  size_t at_ = 0;
};
std::vector<Value> to_vector(Heap& heap, const Value& v);

bool contains(Heap& heap, const Value& container, const Value& item);
Value binary(Heap& heap, BinaryOp op, const Value& a, const Value& b);
Value negate(const Value& v);

// obj[key], without the fallback to attributes; nullopt where Python raises TypeError or LookupError.
std::optional<Value> get_item(Heap& heap, const Value& object, const Value& key);
// obj[start:stop:step]; absent parts are none.
Value get_slice(Heap& heap, const Value& object, const Value& start, const Value& stop, const Value& step);

// Fails with the reason when the value is undefined.
void require_defined(const Value& v);
// &, <, >, ' and " as entities.
Text escape_html(const Text& t);

}  // namespace thermo::jinja
