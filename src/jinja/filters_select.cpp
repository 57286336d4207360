// map, select, reject and unique: generators over another sequence, which pull one item at a time.
#include <memory>

#include "jinja/attribute_path.h"
#include "jinja/builtins.h"

namespace thermo::jinja {

namespace {

// A generator that pulls from `input` through `keep`, which may change an item or drop it.
Value pull_through(Interpreter& vm, const Value& input, std::function<bool(Value&)> keep) {
  // As jinja2, which looks at the truth of the input first: none and 0 give nothing, True is not iterable.
  const Value source = truthy(input) ? input : Value();
  auto it = std::make_shared<Iter>(vm.heap, source);
  return vm.heap.generator([it, keep = std::move(keep)](Value& out) {
    while (it->next(out)) {
      if (keep(out)) return true;
    }
    return false;
  });
}

Value filter_map(Interpreter& vm, const Value& input, CallArgs& args) {
  if (args.positional.empty()) {
    const BoundArgs a("map", args, {"attribute", "default"}, 1);
    AttributePath path = AttributePath::one(a[0]);
    if (a.has(1)) path.set_default(a[1]);
    return pull_through(vm, input, [&vm, path](Value& item) {
      item = path.get(vm, item);
      return true;
    });
  }
  const Value name = args.positional[0];
  if (!name.is_string()) fail("'map' needs the name of a filter, seen " + type_name(name));
  CallArgs rest = args;
  rest.positional.erase(rest.positional.begin());
  return pull_through(vm, input, [&vm, filter = std::string(name.view()), rest](Value& item) {
    CallArgs copy = rest;
    item = vm.apply_filter(filter, item, copy);
    return true;
  });
}

Value select(Interpreter& vm, const Value& input, CallArgs& args, bool by_attribute, bool wanted) {
  CallArgs rest = args;
  const auto take_first = [&rest] {
    Value first = std::move(rest.positional.front());
    rest.positional.erase(rest.positional.begin());
    return first;
  };
  AttributePath path;
  if (by_attribute) {
    if (rest.positional.empty()) fail("'selectattr' and 'rejectattr' need the name of an attribute");
    path = AttributePath::one(take_first());
  }
  std::string test;
  if (!rest.positional.empty()) {
    const Value name = take_first();
    if (!name.is_string()) fail("expected the name of a test, seen " + type_name(name));
    test = name.view();
  }
  return pull_through(vm, input, [&vm, path, test, rest, wanted](Value& item) {
    const Value tested = path.get(vm, item);
    if (test.empty()) return truthy(tested) == wanted;
    CallArgs copy = rest;
    return vm.apply_test(test, tested, copy) == wanted;
  });
}

Value filter_select(Interpreter& vm, const Value& v, CallArgs& args) {
  return select(vm, v, args, false, true);
}
Value filter_reject(Interpreter& vm, const Value& v, CallArgs& args) {
  return select(vm, v, args, false, false);
}
Value filter_selectattr(Interpreter& vm, const Value& v, CallArgs& args) {
  return select(vm, v, args, true, true);
}
Value filter_rejectattr(Interpreter& vm, const Value& v, CallArgs& args) {
  return select(vm, v, args, true, false);
}

Value filter_unique(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("unique", args, {"case_sensitive", "attribute"});
  const AttributePath path = AttributePath::one(a[1]);
  const bool ignore_case = !a.flag(0, false);
  const Value seen = vm.heap.dict();
  auto it = std::make_shared<Iter>(vm.heap, input);
  return vm.heap.generator([&vm, it, path, ignore_case, seen](Value& out) {
    while (it->next(out)) {
      const Value key = path.get_key(vm, out, ignore_case);
      hash_value(key);
      if (seen.dict().find(key) != nullptr) continue;
      seen.dict().set(key, Value::none());
      return true;
    }
    return false;
  });
}

}  // namespace

const FilterTable& select_filters() {
  static const FilterTable kTable = {
      {"map", filter_map},
      {"select", filter_select},
      {"reject", filter_reject},
      {"selectattr", filter_selectattr},
      {"rejectattr", filter_rejectattr},
      {"unique", filter_unique},
  };
  return kTable;
}

}  // namespace thermo::jinja
