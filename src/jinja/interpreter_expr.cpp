// Expressions.
#include "jinja/builtins.h"
#include "jinja/depth_guard.h"
#include "jinja/interpreter.h"
#include "jinja/loop_state.h"

namespace thermo::jinja {

Value Interpreter::eval(const Expr& e) {
  const DepthGuard guard(*this, e.line);
  switch (e.kind) {
    case ExprKind::Constant:
      return e.constant;
    case ExprKind::Name:
      return eval_name(e);
    case ExprKind::List:
      return heap.list(eval_all(e.children));
    case ExprKind::Tuple:
      return heap.tuple(eval_all(e.children));
    case ExprKind::Dict:
      return eval_dict(e);
    case ExprKind::Attribute:
      return get_attribute(eval(*e.children[0]), e.name);
    case ExprKind::Item: {
      const Value object = eval(*e.children[0]);
      return get_subscript(object, eval(*e.children[1]));
    }
    case ExprKind::Slice:
      return eval_slice(e);
    case ExprKind::Call:
      return eval_call(e);
    case ExprKind::Filter:
      return eval_filter(e, eval(*e.children[0]));
    case ExprKind::Test: {
      const Value input = eval(*e.children[0]);
      CallArgs args = eval_arguments(e.arguments);
      return Value::boolean(apply_test(e.name, input, args));
    }
    case ExprKind::Not:
      return Value::boolean(!truthy(eval(*e.children[0])));
    case ExprKind::Negate:
      return negate(eval(*e.children[0]));
    case ExprKind::Plus:
      return negate(negate(eval(*e.children[0])));
    case ExprKind::Binary: {
      const Value left = eval(*e.children[0]);
      return binary(heap, e.op, left, eval(*e.children[1]));
    }
    case ExprKind::Concat:
      return eval_concat(e);
    case ExprKind::Compare:
      return Value::boolean(eval_compare(e));
    case ExprKind::And: {
      Value left = eval(*e.children[0]);
      return truthy(left) ? eval(*e.children[1]) : left;
    }
    case ExprKind::Or: {
      Value left = eval(*e.children[0]);
      return truthy(left) ? left : eval(*e.children[1]);
    }
    case ExprKind::Conditional:
      return eval_conditional(e);
  }
  return Value();
}

Value Interpreter::eval_name(const Expr& e) {
  if (const Value* found = scope_->find(e.name)) return *found;
  return Value::undefined("'" + e.name + "' is undefined");
}

Value Interpreter::eval_dict(const Expr& e) {
  const Value dict = heap.dict();
  for (size_t i = 0; i + 1 < e.children.size(); i += 2) {
    const Value key = eval(*e.children[i]);
    dict.dict().set(key, eval(*e.children[i + 1]));
  }
  return dict;
}

Value Interpreter::eval_slice(const Expr& e) {
  const Value object = eval(*e.children[0]);
  const auto part = [&](size_t i) { return e.children[i] ? eval(*e.children[i]) : Value::none(); };
  const Value start = part(1);
  const Value stop = part(2);
  const Value step = part(3);
  return get_slice(heap, object, start, stop, step);
}

Value Interpreter::eval_conditional(const Expr& e) {
  if (truthy(eval(*e.children[1]))) return eval(*e.children[0]);
  if (e.children[2] != nullptr) return eval(*e.children[2]);
  return Value::undefined("the inline 'if' on line " + std::to_string(e.line) +
                          " was false and has no 'else'");
}

Value Interpreter::eval_concat(const Expr& e) {
  Text out;
  for (const ExprPtr& child : e.children) {
    const Value part = eval(*child);
    if (part.is_string()) {
      heap.check_size(out.size() + part.view().size());
      out.append(part.text());
    } else {
      out.append(to_text(part));
    }
  }
  return heap.string(std::move(out));
}

bool Interpreter::eval_compare(const Expr& e) {
  Value left = eval(*e.children[0]);
  for (size_t i = 0; i < e.comparisons.size(); ++i) {
    Value right = eval(*e.children[i + 1]);
    bool holds = false;
    switch (e.comparisons[i]) {
      case CompareOp::Equal:
        holds = equals(left, right);
        break;
      case CompareOp::NotEqual:
        holds = !equals(left, right);
        break;
      case CompareOp::Less:
        holds = less(left, right);
        break;
      case CompareOp::LessEqual:
        holds = less(left, right) || equals(left, right);
        break;
      case CompareOp::Greater:
        holds = less(right, left);
        break;
      case CompareOp::GreaterEqual:
        holds = less(right, left) || equals(left, right);
        break;
      case CompareOp::In:
        holds = contains(heap, right, left);
        break;
      case CompareOp::NotIn:
        holds = !contains(heap, right, left);
        break;
    }
    if (!holds) return false;
    left = std::move(right);
  }
  return true;
}

std::vector<Value> Interpreter::eval_all(const std::vector<ExprPtr>& list) {
  std::vector<Value> values;
  values.reserve(list.size());
  for (const ExprPtr& e : list) values.push_back(eval(*e));
  return values;
}

CallArgs Interpreter::eval_arguments(const Arguments& arguments) {
  CallArgs args;
  args.positional = eval_all(arguments.positional);
  for (const auto& [name, e] : arguments.keywords) args.keywords.emplace_back(name, eval(*e));
  if (arguments.star != nullptr) {
    for (Value& value : to_vector(heap, eval(*arguments.star))) args.positional.push_back(std::move(value));
  }
  if (arguments.double_star != nullptr) {
    const Value mapping = eval(*arguments.double_star);
    if (!mapping.is(Kind::Dict)) fail("'**' needs a mapping, seen " + type_name(mapping));
    for (const auto& [key, value] : mapping.dict().entries) {
      if (!key.is_string()) fail("'**' needs keys that are strings, seen " + type_name(key));
      args.keywords.emplace_back(key.view(), value);
    }
  }
  return args;
}

Value Interpreter::eval_call(const Expr& e) {
  const Expr& callee = *e.children[0];
  if (callee.kind != ExprKind::Attribute) {
    const Value function = eval(callee);
    CallArgs args = eval_arguments(e.arguments);
    line = e.line;
    return call(function, args);
  }
  const Value object = eval(*callee.children[0]);
  require_defined(object);
  const Method method = find_method(object.kind(), callee.name);
  const Value function = method == nullptr ? get_attribute(object, callee.name) : Value();
  CallArgs args = eval_arguments(e.arguments);
  line = e.line;
  return method != nullptr ? method(*this, object, args) : call(function, args);
}

Value Interpreter::eval_filter(const Expr& e, const Value& input) {
  CallArgs args = eval_arguments(e.arguments);
  line = e.line;
  return apply_filter(e.name, input, args);
}

Value Interpreter::call(const Value& callee, CallArgs& args) {
  const DepthGuard guard(*this, line);
  if (callee.is(Kind::Callable)) {
    const Value keep = callee;  // the function may replace the variable that holds it
    return keep.callable().function(*this, args);
  }
  if (callee.is(Kind::Loop) && callee.loop().call_again) return callee.loop().call_again(*this, args);
  if (callee.is_undefined()) fail(callee.undefined_reason() + ", so it cannot be called");
  fail("a value of type " + type_name(callee) + " cannot be called");
}

std::optional<Value> Interpreter::find_attribute(const Value& object, const std::string& name) {
  if (object.is(Kind::Namespace)) {
    if (const Value* found = object.name_space().attributes.find(name)) return *found;
    return std::nullopt;
  }
  if (object.is(Kind::Loop)) return loop_attribute(*this, object, name);
  if (object.is(Kind::Tuple) && object.list().is_group) {
    if (name == "grouper") return object.list().items[0];
    if (name == "list") return object.list().items[1];
  }
  if (object.is(Kind::Callable) && name == "name") return heap.string(object.callable().name);
  const Method method = find_method(object.kind(), name);
  if (method == nullptr) return std::nullopt;
  return heap.callable(
      name, [object, method](Interpreter& vm, CallArgs& args) { return method(vm, object, args); });
}

Value Interpreter::get_attribute(const Value& object, const std::string& name) {
  if (object.is_undefined()) fail(object.undefined_reason() + ", so it has no attribute '" + name + "'");
  if (auto found = find_attribute(object, name)) return *found;
  if (object.is(Kind::Dict)) {
    if (const Value* found = object.dict().find(name)) return *found;
  }
  return Value::undefined("'" + object_name(object) + "' has no attribute '" + name + "'");
}

Value Interpreter::get_subscript(const Value& object, const Value& key) {
  if (object.is_undefined()) {
    fail(object.undefined_reason() + ", so it has no element " + repr(key).bytes);
  }
  if (auto found = get_item(heap, object, key)) return *found;
  if (key.is_string()) {
    if (auto found = find_attribute(object, std::string(key.view()))) return *found;
    return Value::undefined("'" + object_name(object) + "' has no attribute " + repr(key).bytes);
  }
  return Value::undefined(object_name(object) + " has no element " + repr(key).bytes);
}

}  // namespace thermo::jinja
