// The methods of list, tuple and dict.
//
// Those that change a container work as in plain jinja2; the sandbox of transformers refuses them, so a
// template that uses them was written for another engine.
#include <algorithm>

#include "jinja/builtins.h"

namespace thermo::jinja {

namespace {

constexpr size_t kItemBytes = sizeof(Value) * 2;  // a growing vector holds up to twice its size

std::vector<Value>& changing(Interpreter& vm, const Value& self) {
  vm.heap.remember_mutable(self.shared());
  return self.list().items;
}

void count_growth(Interpreter& vm, const Value& self, size_t n_items) {
  if (self.list().heap == nullptr) return;
  vm.heap.add_live(n_items * kItemBytes);
  self.list().counted_bytes += n_items * kItemBytes;
}

// An index as list.insert and list.pop take it: from the end when negative.
Int wrap_index(Int i, size_t n) {
  return i < 0 ? i + static_cast<Int>(n) : i;
}

std::ptrdiff_t find_item(Interpreter& vm, const Value& self, const Value& wanted) {
  const auto& items = self.list().items;
  for (size_t i = 0; i < items.size(); ++i) {
    vm.heap.step();
    if (equals(items[i], wanted)) return static_cast<std::ptrdiff_t>(i);
  }
  fail("the list has no item " + repr(wanted).bytes);
}

Value list_append(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("append", args, {"object"}, 1);
  count_growth(vm, self, 1);
  changing(vm, self).push_back(a[0]);
  return Value::none();
}

Value list_extend(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("extend", args, {"iterable"}, 1);
  const std::vector<Value> added = to_vector(vm.heap, a[0]);
  count_growth(vm, self, added.size());
  auto& items = changing(vm, self);
  items.insert(items.end(), added.begin(), added.end());
  return Value::none();
}

Value list_insert(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("insert", args, {"index", "object"}, 2);
  auto& items = changing(vm, self);
  vm.heap.step(items.size());
  count_growth(vm, self, 1);
  const Int at =
      std::clamp<Int>(wrap_index(a.integer(0, 0), items.size()), 0, static_cast<Int>(items.size()));
  items.insert(items.begin() + static_cast<std::ptrdiff_t>(at), a[1]);
  return Value::none();
}

Value list_pop(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("pop", args, {"index"});
  auto& items = changing(vm, self);
  const Int at = wrap_index(a.integer(0, -1), items.size());
  if (at < 0 || at >= static_cast<Int>(items.size())) {
    fail("'pop' of index " + int_to_string(a.integer(0, -1)) + " in a list of " +
         std::to_string(items.size()));
  }
  vm.heap.step(items.size() - static_cast<size_t>(at));
  Value item = items[static_cast<size_t>(at)];
  items.erase(items.begin() + static_cast<std::ptrdiff_t>(at));
  return item;
}

Value list_remove(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("remove", args, {"value"}, 1);
  auto& items = changing(vm, self);
  items.erase(items.begin() + find_item(vm, self, a[0]));
  return Value::none();
}

Value list_clear(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("clear", args, {});
  const std::vector<Value> gone = std::move(changing(vm, self));  // freed after the list is whole again
  self.list().items.clear();
  return Value::none();
}

Value list_reverse(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("reverse", args, {});
  auto& items = changing(vm, self);
  vm.heap.step(items.size());
  std::reverse(items.begin(), items.end());
  return Value::none();
}

Value list_sort(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("sort", args, {"key", "reverse"});
  if (a.has(0)) fail("'key' of 'sort' is not supported; use the filter 'sort(attribute=...)'");
  const bool reverse = a.flag(1, false);
  std::vector<Value> sorted = self.list().items;
  std::stable_sort(sorted.begin(), sorted.end(), [&](const Value& x, const Value& y) {
    vm.heap.step();
    return reverse ? less(y, x) : less(x, y);
  });
  changing(vm, self) = std::move(sorted);
  return Value::none();
}

Value list_copy(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("copy", args, {});
  return vm.heap.list(self.list().items);
}

Value list_count(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("count", args, {"value"}, 1);
  vm.heap.step(self.list().items.size());
  return Value::integer(std::count_if(self.list().items.begin(), self.list().items.end(),
                                      [&](const Value& item) { return equals(item, a[0]); }));
}

Value list_index(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("index", args, {"value"}, 1);
  return Value::integer(find_item(vm, self, a[0]));
}

Dict& changing_dict(Interpreter& vm, const Value& self) {
  vm.heap.remember_mutable(self.shared());
  return self.dict();
}

Value dict_get(Interpreter&, const Value& self, CallArgs& args) {
  const BoundArgs a("get", args, {"key", "default"}, 1);
  if (!args.keywords.empty()) fail("'get' takes no keywords; write the default as the second value");
  hash_value(a[0]);
  const Value* found = self.dict().find(a[0]);
  if (found != nullptr) return *found;
  return args.positional.size() > 1 ? args.positional[1] : Value::none();
}

Value dict_items(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("items", args, {});
  return vm.heap.view(ViewKind::Items, self);
}

Value dict_keys(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("keys", args, {});
  return vm.heap.view(ViewKind::Keys, self);
}

Value dict_values(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("values", args, {});
  return vm.heap.view(ViewKind::Values, self);
}

Value dict_copy(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("copy", args, {});
  Value copy = vm.heap.dict();
  for (const auto& [key, value] : self.dict().entries) copy.dict().set(key, value);
  return copy;
}

Value dict_update(Interpreter& vm, const Value& self, CallArgs& args) {
  add_dict_arguments(vm, changing_dict(vm, self), args, "update");
  return Value::none();
}

Value dict_setdefault(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("setdefault", args, {"key", "default"}, 1);
  hash_value(a[0]);
  if (const Value* found = self.dict().find(a[0])) return *found;
  Value value = a.has(1) ? a[1] : Value::none();
  changing_dict(vm, self).set(a[0], value);
  return value;
}

Value dict_pop(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("pop", args, {"key", "default"}, 1);
  hash_value(a[0]);
  const Value* found = self.dict().find(a[0]);
  if (found == nullptr) {
    if (args.positional.size() > 1) return args.positional[1];
    fail("'pop' did not find the key " + repr(a[0]).bytes);
  }
  Value value = *found;
  changing_dict(vm, self).erase(a[0]);
  return value;
}

Value dict_popitem(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("popitem", args, {});
  if (self.dict().entries.empty()) fail("'popitem' of an empty dict");
  const auto [key, value] = self.dict().entries.back();
  changing_dict(vm, self).erase(key);
  return vm.heap.tuple({key, value});
}

Value dict_clear(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("clear", args, {});
  const auto gone = std::move(changing_dict(vm, self).entries);
  self.dict().clear();
  return Value::none();
}

}  // namespace

const MethodTable& list_methods() {
  static const MethodTable kTable = {
      {"append", list_append}, {"extend", list_extend}, {"insert", list_insert},   {"pop", list_pop},
      {"remove", list_remove}, {"clear", list_clear},   {"reverse", list_reverse}, {"sort", list_sort},
      {"copy", list_copy},     {"count", list_count},   {"index", list_index},
  };
  return kTable;
}

const MethodTable& tuple_methods() {
  static const MethodTable kTable = {{"count", list_count}, {"index", list_index}};
  return kTable;
}

const MethodTable& dict_methods() {
  static const MethodTable kTable = {
      {"get", dict_get},
      {"items", dict_items},
      {"keys", dict_keys},
      {"values", dict_values},
      {"copy", dict_copy},
      {"update", dict_update},
      {"setdefault", dict_setdefault},
      {"pop", dict_pop},
      {"popitem", dict_popitem},
      {"clear", dict_clear},
  };
  return kTable;
}

}  // namespace thermo::jinja
