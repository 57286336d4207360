// Arithmetic, items and slices.
#include <algorithm>
#include <cmath>

#include "jinja/format.h"
#include "jinja/value_ops.h"

namespace thermo::jinja {

namespace {

constexpr Int kMaxCount = Int{1} << 62;  // lengths and indices are clamped to this

const char* symbol(BinaryOp op) {
  switch (op) {
    case BinaryOp::Add:
      return "+";
    case BinaryOp::Sub:
      return "-";
    case BinaryOp::Mul:
      return "*";
    case BinaryOp::Div:
      return "/";
    case BinaryOp::FloorDiv:
      return "//";
    case BinaryOp::Mod:
      return "%";
    case BinaryOp::Pow:
      return "**";
  }
  return "?";
}

[[noreturn]] void fail_overflow(BinaryOp op) {
  fail(std::string("the result of '") + symbol(op) + "' does not fit into 128 bits");
}

Value int_power(Heap& heap, Int base, Int exponent) {
  if (exponent < 0) {
    if (base == 0) fail("zero cannot be raised to a negative power");
    return Value::real(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  Int result = 1;
  while (exponent > 0) {
    heap.step();
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) fail_overflow(BinaryOp::Pow);
    exponent >>= 1;
    if (exponent > 0 && __builtin_mul_overflow(base, base, &base)) fail_overflow(BinaryOp::Pow);
  }
  return Value::integer(result);
}

Value int_arithmetic(Heap& heap, BinaryOp op, Int a, Int b) {
  Int result = 0;
  bool overflow = false;
  switch (op) {
    case BinaryOp::Add:
      overflow = __builtin_add_overflow(a, b, &result);
      break;
    case BinaryOp::Sub:
      overflow = __builtin_sub_overflow(a, b, &result);
      break;
    case BinaryOp::Mul:
      overflow = __builtin_mul_overflow(a, b, &result);
      break;
    case BinaryOp::Div:
      return Value::real(static_cast<double>(a) / static_cast<double>(b));
    case BinaryOp::FloorDiv:
      if (b == -1) {
        overflow = __builtin_sub_overflow(Int{0}, a, &result);
      } else {
        result = a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
      }
      break;
    case BinaryOp::Mod:
      result = b == -1 ? 0 : a % b;
      if (result != 0 && (result < 0) != (b < 0)) result += b;
      break;
    case BinaryOp::Pow:
      return int_power(heap, a, b);
  }
  if (overflow) fail_overflow(op);
  return Value::integer(result);
}

Value float_arithmetic(BinaryOp op, double a, double b) {
  switch (op) {
    case BinaryOp::Add:
      return Value::real(a + b);
    case BinaryOp::Sub:
      return Value::real(a - b);
    case BinaryOp::Mul:
      return Value::real(a * b);
    case BinaryOp::Div:
      return Value::real(a / b);
    case BinaryOp::Pow:
      if (a == 0 && b < 0) fail("zero cannot be raised to a negative power");
      if (a < 0 && std::isfinite(b) && b != std::floor(b)) fail("a negative number has no fractional power");
      return Value::real(std::pow(a, b));
    case BinaryOp::FloorDiv:
    case BinaryOp::Mod: {
      // As CPython: the remainder takes the sign of the divisor, the quotient follows from it.
      double mod = std::fmod(a, b);
      double div = (a - mod) / b;
      if (mod != 0) {
        if ((b < 0) != (mod < 0)) {
          mod += b;
          div -= 1;
        }
      } else {
        mod = std::copysign(0.0, b);
      }
      if (op == BinaryOp::Mod) return Value::real(mod);
      if (div == 0) return Value::real(std::copysign(0.0, a / b));
      const double floored = std::floor(div);
      return Value::real(div - floored > 0.5 ? floored + 1 : floored);
    }
  }
  return Value();
}

Value repeat(Heap& heap, const Value& v, Int times) {
  const Int size = v.is_string() ? static_cast<Int>(v.view().size())
                                 : static_cast<Int>(v.list().items.size() * sizeof(Value));
  times = std::max<Int>(times, 0);
  heap.check_size(static_cast<size_t>(std::min(size * std::min(times, kMaxCount), kMaxCount)));
  const auto n = size == 0 ? 0 : static_cast<size_t>(times);
  heap.step(n);
  if (v.is_string()) {
    Text out;
    for (size_t i = 0; i < n; ++i) out.append(v.text());
    return heap.string(std::move(out), v.str().markup);
  }
  std::vector<Value> items;
  for (size_t i = 0; i < n; ++i) items.insert(items.end(), v.list().items.begin(), v.list().items.end());
  return v.is(Kind::List) ? heap.list(std::move(items)) : heap.tuple(std::move(items));
}

Value add_strings(Heap& heap, const Value& a, const Value& b) {
  heap.check_size(a.view().size() + b.view().size());
  const bool markup = a.str().markup || b.str().markup;
  Text out;
  out.bytes.reserve(a.view().size() + b.view().size());
  out.append(markup && !a.str().markup ? escape_html(a.text()) : a.text());
  out.append(markup && !b.str().markup ? escape_html(b.text()) : b.text());
  return heap.string(std::move(out), markup);
}

// What fills in a markup format is escaped first, unless it is markup itself.
Value escape_arguments(Heap& heap, const Value& v) {
  if (v.is_string()) return v.str().markup ? v : heap.string(escape_html(v.text()), true);
  if (!v.is(Kind::Tuple)) return v;
  std::vector<Value> items;
  for (const Value& item : v.list().items) items.push_back(escape_arguments(heap, item));
  return heap.tuple(std::move(items));
}

struct SliceBounds {
  Int start, step, count;
};

// slice(start, stop, step).indices(n).
SliceBounds slice_bounds(Int n, const Value& start, const Value& stop, const Value& step) {
  for (const Value* part : {&start, &stop, &step}) {
    if (!part->is_none() && !part->is_integer()) fail("a slice needs integers, seen " + type_name(*part));
  }
  const Int by = step.is_none() ? 1 : std::clamp(step.as_int(), -kMaxCount, kMaxCount);
  if (by == 0) fail("the step of a slice cannot be zero");
  const Int low = by > 0 ? 0 : -1;
  const Int high = by > 0 ? n : n - 1;
  const auto bound = [&](const Value& v, Int otherwise) {
    if (v.is_none()) return otherwise;
    Int i = std::clamp(v.as_int(), -kMaxCount, kMaxCount);
    if (i < 0) i += n;
    return std::clamp(i, low, high);
  };
  const Int first = bound(start, by > 0 ? low : high);
  const Int past = bound(stop, by > 0 ? high : low);
  const Int span = by > 0 ? past - first : first - past;
  const Int stride = by > 0 ? by : -by;
  return SliceBounds{first, by, span <= 0 ? 0 : (span - 1) / stride + 1};
}

Value slice_string(Heap& heap, const Value& v, const SliceBounds& s) {
  const Text& t = v.text();
  heap.charge_bytes(t.size());
  const bool markup = v.str().markup;
  std::vector<size_t> starts;  // of every character, and the end; not needed for ASCII
  if (!v.str().ascii) {
    for (size_t pos = 0; pos < t.size();) {
      starts.push_back(pos);
      decode_utf8(t.bytes, pos);
    }
    starts.push_back(t.size());
  }
  const auto offset = [&](Int i) {
    return starts.empty() ? static_cast<size_t>(i) : starts[static_cast<size_t>(i)];
  };
  if (s.count == 0) return heap.string(Text(), markup);
  if (s.step == 1) return heap.string(t.slice(offset(s.start), offset(s.start + s.count)), markup);
  Text out;
  for (Int k = 0; k < s.count; ++k) {
    const Int i = s.start + k * s.step;
    out.append_slice(t, offset(i), offset(i + 1));
    heap.step();
  }
  return heap.string(std::move(out), markup);
}

}  // namespace

Value binary(Heap& heap, BinaryOp op, const Value& a, const Value& b) {
  if (op == BinaryOp::Mod && a.is_string()) {
    const bool markup = a.str().markup;
    return heap.string(format_percent(heap, a.text(), markup ? escape_arguments(heap, b) : b), markup);
  }
  require_defined(a);
  require_defined(b);
  if (a.is_number() && b.is_number()) {
    const bool divides = op == BinaryOp::Div || op == BinaryOp::FloorDiv || op == BinaryOp::Mod;
    if (divides && b.as_double() == 0) fail(std::string("division by zero in '") + symbol(op) + "'");
    if (a.is_integer() && b.is_integer()) return int_arithmetic(heap, op, a.as_int(), b.as_int());
    return float_arithmetic(op, a.as_double(), b.as_double());
  }
  if (op == BinaryOp::Add) {
    if (a.is_string() && b.is_string()) return add_strings(heap, a, b);
    if (a.is_sequence() && a.kind() == b.kind()) {
      std::vector<Value> items = a.list().items;
      items.insert(items.end(), b.list().items.begin(), b.list().items.end());
      return a.is(Kind::List) ? heap.list(std::move(items)) : heap.tuple(std::move(items));
    }
  }
  if (op == BinaryOp::Mul) {
    if ((a.is_string() || a.is_sequence()) && b.is_integer()) return repeat(heap, a, b.as_int());
    if ((b.is_string() || b.is_sequence()) && a.is_integer()) return repeat(heap, b, a.as_int());
  }
  fail(std::string("'") + symbol(op) + "' does not work on " + type_name(a) + " and " + type_name(b) +
       (op == BinaryOp::Add && (a.is_string() || b.is_string()) ? "; use '~' to join text" : ""));
}

Value negate(const Value& v) {
  require_defined(v);
  if (v.is_integer()) {
    Int result = 0;
    if (__builtin_sub_overflow(Int{0}, v.as_int(), &result)) fail_overflow(BinaryOp::Sub);
    return Value::integer(result);
  }
  if (v.is(Kind::Float)) return Value::real(-v.as_double());
  fail("'-' needs a number, seen " + type_name(v));
}

std::optional<Value> get_item(Heap& heap, const Value& object, const Value& key) {
  require_defined(object);
  if (object.is(Kind::Dict)) {
    if (key.is_sequence() || key.is(Kind::Dict) || key.is(Kind::View)) return std::nullopt;
    const Value* found = key.is_string() ? object.dict().find(key.view()) : object.dict().find(key);
    return found != nullptr ? std::optional<Value>(*found) : std::nullopt;
  }
  if (!key.is_integer()) return std::nullopt;
  const bool indexable = object.is_string() || object.is_sequence() || object.is(Kind::Range);
  if (!indexable) return std::nullopt;
  const auto n = static_cast<Int>(length(object));
  Int i = key.as_int();
  if (i < 0) i += n;
  if (i < 0 || i >= n) return std::nullopt;
  if (object.is_sequence()) return object.list().items[static_cast<size_t>(i)];
  if (object.is(Kind::Range)) return Value::integer(object.range().start + i * object.range().step);
  return slice_string(heap, object, {i, 1, 1});
}

Value get_slice(Heap& heap, const Value& object, const Value& start, const Value& stop, const Value& step) {
  require_defined(object);
  const bool sliceable = object.is_string() || object.is_sequence() || object.is(Kind::Range);
  if (!sliceable)
    fail("a value of type " + type_name(object) + " has no slices, expected a list or a string");
  const auto bounds = slice_bounds(static_cast<Int>(length(object)), start, stop, step);
  if (object.is_string()) return slice_string(heap, object, bounds);
  if (object.is(Kind::Range)) {
    const Range& r = object.range();
    const Int first = r.start + bounds.start * r.step;
    Int by = 0;
    Int past = 0;
    if (__builtin_mul_overflow(r.step, bounds.step, &by) || __builtin_mul_overflow(bounds.count, by, &past) ||
        __builtin_add_overflow(first, past, &past)) {
      fail("the step of a slice of a range is too large");
    }
    return heap.range(first, past, by);
  }
  std::vector<Value> items;
  items.reserve(static_cast<size_t>(bounds.count));
  for (Int k = 0; k < bounds.count; ++k) {
    items.push_back(object.list().items[static_cast<size_t>(bounds.start + k * bounds.step)]);
  }
  return object.is(Kind::List) ? heap.list(std::move(items)) : heap.tuple(std::move(items));
}

}  // namespace thermo::jinja
