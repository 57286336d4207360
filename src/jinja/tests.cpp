// What may follow `is`.
#include "jinja/builtins.h"
#include "jinja/py_string.h"

namespace thermo::jinja {

namespace {

bool test_defined(Interpreter&, const Value& v, CallArgs&) {
  return !v.is_undefined();
}
bool test_undefined(Interpreter&, const Value& v, CallArgs&) {
  return v.is_undefined();
}
bool test_none(Interpreter&, const Value& v, CallArgs&) {
  return v.is_none();
}
bool test_boolean(Interpreter&, const Value& v, CallArgs&) {
  return v.is(Kind::Bool);
}
bool test_true(Interpreter&, const Value& v, CallArgs&) {
  return v.is(Kind::Bool) && v.as_bool();
}
bool test_false(Interpreter&, const Value& v, CallArgs&) {
  return v.is(Kind::Bool) && !v.as_bool();
}
bool test_integer(Interpreter&, const Value& v, CallArgs&) {
  return v.is(Kind::Integer);
}
bool test_float(Interpreter&, const Value& v, CallArgs&) {
  return v.is(Kind::Float);
}
bool test_number(Interpreter&, const Value& v, CallArgs&) {
  return v.is_number();
}
bool test_string(Interpreter&, const Value& v, CallArgs&) {
  return v.is_string();
}
bool test_mapping(Interpreter&, const Value& v, CallArgs&) {
  return v.is(Kind::Dict);
}
bool test_iterable(Interpreter&, const Value& v, CallArgs&) {
  return Iter::can_iterate(v) || v.is(Kind::Loop);
}
bool test_callable(Interpreter&, const Value& v, CallArgs&) {
  return v.is(Kind::Callable) || v.is(Kind::Loop) || v.is_undefined();
}
bool test_escaped(Interpreter&, const Value& v, CallArgs&) {
  return v.is_string() && v.str().markup;
}

// What has a length and items by key; undefined has both in Python.
bool test_sequence(Interpreter&, const Value& v, CallArgs&) {
  return length_or_none(v).has_value() && !v.is(Kind::View);
}

bool is_divisible(Interpreter& vm, const Value& v, const Value& by, Int remainder) {
  return equals(binary(vm.heap, BinaryOp::Mod, v, by), Value::integer(remainder));
}
bool test_even(Interpreter& vm, const Value& v, CallArgs&) {
  return is_divisible(vm, v, Value::integer(2), 0);
}
bool test_odd(Interpreter& vm, const Value& v, CallArgs&) {
  return is_divisible(vm, v, Value::integer(2), 1);
}
bool test_divisibleby(Interpreter& vm, const Value& v, CallArgs& args) {
  const BoundArgs a("divisibleby", args, {"num"}, 1);
  return is_divisible(vm, v, a[0], 0);
}

const Value& operand(const CallArgs& args) {
  if (args.positional.size() != 1 || !args.keywords.empty()) {
    fail("this test compares with one value, seen " + std::to_string(args.positional.size()));
  }
  return args.positional[0];
}
bool test_eq(Interpreter&, const Value& v, CallArgs& args) {
  return equals(v, operand(args));
}
bool test_ne(Interpreter&, const Value& v, CallArgs& args) {
  return !equals(v, operand(args));
}
bool test_lt(Interpreter&, const Value& v, CallArgs& args) {
  return less(v, operand(args));
}
bool test_gt(Interpreter&, const Value& v, CallArgs& args) {
  return less(operand(args), v);
}
bool test_le(Interpreter&, const Value& v, CallArgs& args) {
  return less(v, operand(args)) || equals(v, operand(args));
}
bool test_ge(Interpreter&, const Value& v, CallArgs& args) {
  return less(operand(args), v) || equals(v, operand(args));
}
bool test_in(Interpreter& vm, const Value& v, CallArgs& args) {
  return contains(vm.heap, operand(args), v);
}
bool test_sameas(Interpreter&, const Value& v, CallArgs& args) {
  return identical(v, operand(args));
}

// Cased letters, all of them of that case.
bool has_case(const Value& v, bool lower) {
  bool found = false;
  const Text t = to_text(v);
  for (size_t pos = 0; pos < t.size();) {
    const char32_t c = decode_utf8(t.bytes, pos);
    if (is_title(c) || (lower ? is_upper(c) : is_lower(c))) return false;
    found |= lower ? is_lower(c) : is_upper(c);
  }
  return found;
}
bool test_lower(Interpreter&, const Value& v, CallArgs&) {
  return has_case(v, true);
}
bool test_upper(Interpreter&, const Value& v, CallArgs&) {
  return has_case(v, false);
}

bool test_filter(Interpreter&, const Value& v, CallArgs&) {
  return v.is_string() && find_filter(v.view()) != nullptr;
}
bool test_test(Interpreter&, const Value& v, CallArgs&) {
  return v.is_string() && find_test(v.view()) != nullptr;
}

}  // namespace

const TestTable& tests() {
  static const TestTable kTable = {
      {"defined", test_defined},
      {"undefined", test_undefined},
      {"none", test_none},
      {"boolean", test_boolean},
      {"true", test_true},
      {"false", test_false},
      {"integer", test_integer},
      {"float", test_float},
      {"number", test_number},
      {"string", test_string},
      {"mapping", test_mapping},
      {"iterable", test_iterable},
      {"sequence", test_sequence},
      {"callable", test_callable},
      {"escaped", test_escaped},
      {"even", test_even},
      {"odd", test_odd},
      {"divisibleby", test_divisibleby},
      {"eq", test_eq},
      {"==", test_eq},
      {"equalto", test_eq},
      {"ne", test_ne},
      {"!=", test_ne},
      {"lt", test_lt},
      {"<", test_lt},
      {"lessthan", test_lt},
      {"gt", test_gt},
      {">", test_gt},
      {"greaterthan", test_gt},
      {"le", test_le},
      {"<=", test_le},
      {"ge", test_ge},
      {">=", test_ge},
      {"in", test_in},
      {"sameas", test_sameas},
      {"lower", test_lower},
      {"upper", test_upper},
      {"filter", test_filter},
      {"test", test_test},
  };
  return kTable;
}

}  // namespace thermo::jinja
