#include "jinja/value_ops.h"

#include <cmath>
#include <functional>

namespace thermo::jinja {

namespace {

constexpr int kMaxNesting = 200;

void check_nesting(const Value& v, int depth) {
  if (depth > kMaxNesting)
    fail("a value is nested more than " + std::to_string(kMaxNesting) + " levels deep");
  if (v.object() != nullptr && v.object()->heap != nullptr) v.object()->heap->step();
}

bool same_items(const std::vector<Value>& a, const std::vector<Value>& b, int depth) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!equals(a[i], b[i], depth)) return false;
  }
  return true;
}

bool same_dicts(Dict& a, Dict& b, int depth) {
  if (a.entries.size() != b.entries.size()) return false;
  for (const auto& [key, value] : a.entries) {
    const Value* other = b.find(key);
    if (other == nullptr || !equals(value, *other, depth)) return false;
  }
  return true;
}

}  // namespace

std::string type_name(const Value& v) {
  switch (v.kind()) {
    case Kind::Undefined:
      return "Undefined";
    case Kind::None:
      return "NoneType";
    case Kind::Bool:
      return "bool";
    case Kind::Integer:
      return "int";
    case Kind::Float:
      return "float";
    case Kind::String:
      return "str";
    case Kind::List:
      return "list";
    case Kind::Tuple:
      return "tuple";
    case Kind::Dict:
      return "dict";
    case Kind::Range:
      return "range";
    case Kind::View: {
      const ViewKind kind = v.dict_view().view_kind;
      return kind == ViewKind::Keys ? "dict_keys" : kind == ViewKind::Values ? "dict_values" : "dict_items";
    }
    case Kind::Generator:
      return "generator";
    case Kind::Namespace:
      return "Namespace";
    case Kind::Loop:
      return "LoopContext";
    case Kind::Callable:
      return "function";
  }
  return "object";
}

std::string object_name(const Value& v) {
  if (v.is_none()) return "None";
  if (v.is(Kind::Namespace)) return "jinja2.utils.Namespace object";
  return type_name(v) + " object";
}

bool truthy(const Value& v) {
  switch (v.kind()) {
    case Kind::Undefined:
    case Kind::None:
      return false;
    case Kind::Bool:
    case Kind::Integer:
      return v.as_int() != 0;
    case Kind::Float:
      return v.as_double() != 0;
    default: {
      const auto n = length_or_none(v);
      return !n || *n != 0;
    }
  }
}

bool equals(const Value& a, const Value& b, int depth) {
  check_nesting(a, depth);
  if (a.is_number() && b.is_number()) {
    if (a.is_integer() && b.is_integer()) return a.as_int() == b.as_int();
    return a.as_double() == b.as_double();
  }
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::Undefined:
    case Kind::None:
      return true;
    case Kind::String:
      return a.view() == b.view();
    case Kind::List:
    case Kind::Tuple:
      return a.object() == b.object() || same_items(a.list().items, b.list().items, depth + 1);
    case Kind::Dict:
      return a.object() == b.object() || same_dicts(a.dict(), b.dict(), depth + 1);
    case Kind::Range: {
      const Range &x = a.range(), &y = b.range();
      return x.length == y.length &&
             (x.length == 0 || (x.start == y.start && (x.length == 1 || x.step == y.step)));
    }
    case Kind::View: {
      const View &x = a.dict_view(), &y = b.dict_view();
      if (x.view_kind != y.view_kind || x.view_kind == ViewKind::Values) return a.object() == b.object();
      if (x.view_kind == ViewKind::Items) return same_dicts(x.dict.dict(), y.dict.dict(), depth + 1);
      if (x.dict.dict().entries.size() != y.dict.dict().entries.size()) return false;
      for (const auto& entry : x.dict.dict().entries) {
        if (y.dict.dict().find(entry.first) == nullptr) return false;
      }
      return true;
    }
    default:
      return a.object() == b.object();
  }
}

bool identical(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::None:
      return true;
    case Kind::Bool:
    case Kind::Integer:
      return a.as_int() == b.as_int();
    case Kind::Float:
      return a.as_double() == b.as_double();
    case Kind::String:
      return a.object() == b.object() || a.view() == b.view();
    default:
      return a.object() == b.object();
  }
}

bool less(const Value& a, const Value& b, int depth) {
  check_nesting(a, depth);
  require_defined(a);
  require_defined(b);
  if (a.is_number() && b.is_number()) {
    if (a.is_integer() && b.is_integer()) return a.as_int() < b.as_int();
    return a.as_double() < b.as_double();
  }
  if (a.is_string() && b.is_string()) return a.view() < b.view();  // UTF-8 sorts like code points
  if (a.is_sequence() && a.kind() == b.kind()) {
    const auto &x = a.list().items, &y = b.list().items;
    for (size_t i = 0; i < x.size() && i < y.size(); ++i) {
      if (!equals(x[i], y[i], depth + 1)) return less(x[i], y[i], depth + 1);
    }
    return x.size() < y.size();
  }
  fail("cannot order a value of type " + type_name(a) + " and one of type " + type_name(b) +
       "; both must be numbers, strings or lists");
}

size_t hash_string(std::string_view s) {
  return std::hash<std::string_view>{}(s);
}

size_t hash_value(const Value& v, int depth) {
  check_nesting(v, depth);
  switch (v.kind()) {
    case Kind::Bool:
    case Kind::Integer:
    case Kind::Float:
      return std::hash<double>{}(v.as_double());
    case Kind::String:
      return hash_string(v.view());
    case Kind::None:
      return 0x9e37;
    case Kind::Undefined:
      return 0x79b9;
    case Kind::Tuple: {
      size_t h = 0x345678;
      for (const Value& item : v.list().items) h = h * 1000003 ^ hash_value(item, depth + 1);
      return h;
    }
    case Kind::List:
    case Kind::Dict:
    case Kind::View:
      fail("a value of type " + type_name(v) + " cannot be a dict key");
    case Kind::Range:
      return static_cast<size_t>(v.range().length);
    default:
      return std::hash<const void*>{}(v.object());
  }
}

std::optional<size_t> length_or_none(const Value& v) {
  switch (v.kind()) {
    case Kind::Undefined:
      return 0;
    case Kind::String:
      return v.str().ascii ? v.view().size() : count_code_points(v.view());
    case Kind::List:
    case Kind::Tuple:
      return v.list().items.size();
    case Kind::Dict:
      return v.dict().entries.size();
    case Kind::Range:
      return static_cast<size_t>(v.range().length);
    case Kind::View:
      return v.dict_view().dict.dict().entries.size();
    default:
      return std::nullopt;
  }
}

size_t length(const Value& v) {
  const auto n = length_or_none(v);
  if (!n) fail("a value of type " + type_name(v) + " has no length; use '| list' on a generator first");
  return *n;
}

bool Iter::can_iterate(const Value& v) {
  return v.is_undefined() || v.is(Kind::Generator) || length_or_none(v).has_value();
}

Iter::Iter(Heap& heap, Value source) : heap_(&heap), source_(std::move(source)) {
  if (!can_iterate(source_)) {
    fail("a value of type " + type_name(source_) +
         " is not iterable; expected a list, a mapping or a string");
  }
}

bool Iter::next(Value& out) {
  heap_->step();
  switch (source_.kind()) {
    case Kind::String: {
      const std::string_view s = source_.view();
      if (at_ >= s.size()) return false;
      const size_t begin = at_;
      decode_utf8(s, at_);
      out = heap_->string(source_.text().slice(begin, at_), source_.str().markup);
      return true;
    }
    case Kind::List:
    case Kind::Tuple:
      if (at_ >= source_.list().items.size()) return false;
      out = source_.list().items[at_++];
      return true;
    case Kind::Dict:
      if (at_ >= source_.dict().entries.size()) return false;
      out = source_.dict().entries[at_++].first;
      return true;
    case Kind::View: {
      const View& view = source_.dict_view();
      const auto& entries = view.dict.dict().entries;
      if (at_ >= entries.size()) return false;
      const auto& [key, value] = entries[at_++];
      out = view.view_kind == ViewKind::Keys     ? key
            : view.view_kind == ViewKind::Values ? value
                                                 : heap_->tuple({key, value});
      return true;
    }
    case Kind::Range: {
      const Range& r = source_.range();
      if (static_cast<Int>(at_) >= r.length) return false;
      out = Value::integer(r.start + static_cast<Int>(at_++) * r.step);
      return true;
    }
    case Kind::Generator: {
      const Heap::PullGuard guard(*heap_);
      return source_.generator().next(out);
    }
    default:
      return false;
  }
}

std::vector<Value> to_vector(Heap& heap, const Value& v) {
  std::vector<Value> out;
  Iter it(heap, v);
  for (Value item; it.next(item);) {
    if (out.size() % 1024 == 0) heap.check_size(out.size() * sizeof(Value));
    out.push_back(std::move(item));
  }
  return out;
}

bool contains(Heap& heap, const Value& container, const Value& item) {
  if (container.is_string()) {
    if (!item.is_string()) {
      fail("'in' on a string needs a string on its left, seen " + type_name(item));
    }
    heap.charge_bytes(container.view().size());
    return container.view().find(item.view()) != std::string_view::npos;
  }
  if (container.is(Kind::Dict)) {
    hash_value(item);
    return container.dict().find(item) != nullptr;
  }
  if (container.is(Kind::Range) && item.is_integer()) {
    const Range& r = container.range();
    Int offset = 0;
    if (__builtin_sub_overflow(item.as_int(), r.start, &offset)) return false;
    return offset % r.step == 0 && offset / r.step >= 0 && offset / r.step < r.length;
  }
  if (!Iter::can_iterate(container)) {
    fail("'in' needs a list, a mapping or a string on its right, seen " + type_name(container));
  }
  Iter it(heap, container);
  for (Value candidate; it.next(candidate);) {
    if (identical(candidate, item) || equals(candidate, item)) return true;
  }
  return false;
}

void require_defined(const Value& v) {
  if (v.is_undefined()) fail(v.undefined_reason());
}

}  // namespace thermo::jinja
