// Filters on single values and numbers.
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "jinja/builtins.h"

namespace thermo::jinja {

namespace {

Value filter_default(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("default", args, {"default_value", "boolean"});
  const bool replace = input.is_undefined() || (a.flag(1, false) && !truthy(input));
  if (!replace) return input;
  const bool given = !args.positional.empty() || !a[0].is_undefined();
  return given ? a[0] : vm.heap.string("");
}

Value filter_length(Interpreter&, const Value& input, CallArgs& args) {
  const BoundArgs a("length", args, {});
  return Value::integer(static_cast<Int>(length(input)));
}

Value filter_abs(Interpreter&, const Value& input, CallArgs& args) {
  const BoundArgs a("abs", args, {});
  require_defined(input);
  if (!input.is_number()) fail("'abs' needs a number, seen " + type_name(input));
  if (input.is(Kind::Float)) return Value::real(std::fabs(input.as_double()));
  return input.as_int() < 0 ? negate(input) : Value::integer(input.as_int());
}

std::optional<Int> float_to_int(double d) {
  if (!(std::fabs(d) < 1e37)) return std::nullopt;
  return static_cast<Int>(d);
}

Value filter_int(Interpreter&, const Value& input, CallArgs& args) {
  const BoundArgs a("int", args, {"default", "base"});
  require_defined(input);
  std::optional<Int> found;
  if (input.is_integer()) found = input.as_int();
  if (input.is(Kind::Float)) found = float_to_int(input.as_double());
  if (input.is_string()) {
    const Int base = a.integer(1, 10);
    if (base != 0 && (base < 2 || base > 36))
      fail("'base' of 'int' must be 0 or from 2 to 36, seen " + int_to_string(base));
    found = parse_int(input.view(), static_cast<int>(base));
    if (!found) {
      if (const auto d = parse_float(input.view())) found = float_to_int(*d);
    }
  }
  if (found) return Value::integer(*found);
  return args.positional.empty() && args.keywords.empty() ? Value::integer(0) : a[0];
}

Value filter_float(Interpreter&, const Value& input, CallArgs& args) {
  const BoundArgs a("float", args, {"default"});
  require_defined(input);
  if (input.is_number()) return Value::real(input.as_double());
  if (input.is_string()) {
    if (const auto d = parse_float(input.view())) return Value::real(*d);
  }
  return args.positional.empty() && args.keywords.empty() ? Value::real(0) : a[0];
}

// round(d, n) of Python: the exact decimal value, ties to even.
double round_decimal(double d, Int digits) {
  if (!std::isfinite(d) || digits > 300) return d;
  if (digits < 0) {
    if (digits < -308) return 0;
    const double scale = std::pow(10.0, static_cast<double>(-digits));
    return std::nearbyint(d / scale) * scale;
  }
  char buffer[700];
  std::snprintf(buffer, sizeof buffer, "%.*f", static_cast<int>(digits), d);
  return std::strtod(buffer, nullptr);
}

Value filter_round(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("round", args, {"precision", "method"});
  const Int digits = a.integer(0, 0);
  const std::string method = a.string_or(1, "common");
  require_defined(input);
  if (!input.is_number()) fail("'round' needs a number, seen " + type_name(input));
  if (method == "common") {
    if (input.is(Kind::Float)) return Value::real(round_decimal(input.as_double(), digits));
    if (digits >= 0) return Value::integer(input.as_int());
    return Value::integer(float_to_int(round_decimal(input.as_double(), digits)).value_or(0));
  }
  if (method != "ceil" && method != "floor") {
    fail("'method' of 'round' must be 'common', 'ceil' or 'floor', seen '" + method + "'");
  }
  const Value scale = binary(vm.heap, BinaryOp::Pow, Value::integer(10), Value::integer(digits));
  const double scaled = binary(vm.heap, BinaryOp::Mul, input, scale).as_double();
  return binary(vm.heap, BinaryOp::Div,
                Value::real(method == "ceil" ? std::ceil(scaled) : std::floor(scaled)), scale);
}

// getattr() alone: unlike `.`, it does not look at the keys of a mapping.
Value filter_attr(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("attr", args, {"name"}, 1);
  const std::string name = to_text(a[0]).bytes;
  if (input.is(Kind::Dict) && find_method(Kind::Dict, name) == nullptr) {
    return Value::undefined("'dict object' has no attribute '" + name + "'");
  }
  return vm.get_attribute(input, name);
}

}  // namespace

const FilterTable& value_filters() {
  static const FilterTable kTable = {
      {"default", filter_default}, {"d", filter_default},   {"length", filter_length},
      {"count", filter_length},    {"abs", filter_abs},     {"int", filter_int},
      {"float", filter_float},     {"round", filter_round}, {"attr", filter_attr},
  };
  return kTable;
}

}  // namespace thermo::jinja
