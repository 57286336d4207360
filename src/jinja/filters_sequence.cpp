// Filters that take a sequence as a whole: order, ends, groups, sums.
#include <algorithm>

#include "jinja/attribute_path.h"
#include "jinja/builtins.h"
#include "jinja/py_string.h"

namespace thermo::jinja {

namespace {

struct Keyed {
  Value key, value;
};

// Sorts by key, stable; a reverse sort keeps the order of equal items too.
void sort_by_key(Interpreter& vm, std::vector<Keyed>& items, bool reverse) {
  std::stable_sort(items.begin(), items.end(), [&](const Keyed& a, const Keyed& b) {
    vm.heap.step();
    return reverse ? less(b.key, a.key) : less(a.key, b.key);
  });
}

std::vector<Keyed> with_keys(Interpreter& vm, const Value& input, const AttributePath& path,
                             bool ignore_case) {
  std::vector<Keyed> out;
  for (Value& item : to_vector(vm.heap, input)) {
    Value key = path.get_key(vm, item, ignore_case);
    out.push_back({std::move(key), std::move(item)});
  }
  return out;
}

Value to_list(Interpreter& vm, const std::vector<Keyed>& items) {
  std::vector<Value> values;
  values.reserve(items.size());
  for (const Keyed& item : items) values.push_back(item.value);
  return vm.heap.list(std::move(values));
}

Value filter_sort(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("sort", args, {"reverse", "case_sensitive", "attribute"});
  auto items = with_keys(vm, input, AttributePath::several(a[2]), !a.flag(1, false));
  sort_by_key(vm, items, a.flag(0, false));
  return to_list(vm, items);
}

Value filter_dictsort(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("dictsort", args, {"case_sensitive", "by", "reverse"});
  const std::string by = a.string_or(1, "key");
  if (by != "key" && by != "value") fail("'by' of 'dictsort' must be 'key' or 'value', seen '" + by + "'");
  if (!input.is(Kind::Dict)) fail("'dictsort' needs a mapping, seen " + type_name(input));
  std::vector<Keyed> items;
  for (const auto& [key, value] : input.dict().entries) {
    const Value& sorted_by = by == "key" ? key : value;
    items.push_back(
        {a.flag(0, false) ? sorted_by : lower_if_string(vm, sorted_by), vm.heap.tuple({key, value})});
  }
  sort_by_key(vm, items, a.flag(2, false));
  return to_list(vm, items);
}

Value filter_groupby(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("groupby", args, {"attribute", "default", "case_sensitive"}, 1);
  AttributePath path = AttributePath::one(a[0]);
  if (a.has(1)) path.set_default(a[1]);
  auto items = with_keys(vm, input, path, !a.flag(2, false));
  sort_by_key(vm, items, false);
  std::vector<Value> groups;
  for (size_t i = 0; i < items.size();) {
    size_t end = i;
    std::vector<Value> members;
    for (; end < items.size() && equals(items[end].key, items[i].key); ++end)
      members.push_back(items[end].value);
    const Value group = vm.heap.tuple({path.get(vm, items[i].value), vm.heap.list(std::move(members))});
    group.list().is_group = true;
    groups.push_back(group);
    i = std::max(end, i + 1);  // a key such as nan is not equal to itself
  }
  return vm.heap.list(std::move(groups));
}

Value filter_reverse(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("reverse", args, {});
  if (input.is_string()) {
    return get_slice(vm.heap, input, Value::none(), Value::none(), Value::integer(-1));
  }
  auto items = std::make_shared<std::vector<Value>>(to_vector(vm.heap, input));
  if (input.is(Kind::Generator)) {
    std::reverse(items->begin(), items->end());
    return vm.heap.list(std::move(*items));
  }
  return vm.heap.generator([items](Value& out) {
    if (items->empty()) return false;
    out = std::move(items->back());
    items->pop_back();
    return true;
  });
}

Value filter_first(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("first", args, {});
  Value item;
  if (Iter(vm.heap, input).next(item)) return item;
  return Value::undefined("there is no first item, the sequence is empty");
}

Value filter_last(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("last", args, {});
  if (input.is(Kind::Generator)) fail("'last' does not work on a generator; use '| list' first");
  const std::vector<Value> items = to_vector(vm.heap, input);
  return items.empty() ? Value::undefined("there is no last item, the sequence is empty") : items.back();
}

Value filter_list(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("list", args, {});
  return vm.heap.list(to_vector(vm.heap, input));
}

Value filter_join(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("join", args, {"d", "attribute"});
  const Text separator = to_text(a[0]);
  const AttributePath path = AttributePath::one(a[1]);
  Text out;
  bool first = true;
  Iter it(vm.heap, input);
  for (Value item; it.next(item);) {
    if (!first) out.append(separator);
    first = false;
    out.append(to_text(path.get(vm, item)));
    vm.heap.check_size(out.size());
  }
  return vm.heap.string(std::move(out));
}

Value filter_sum(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("sum", args, {"attribute", "start"});
  const AttributePath path = AttributePath::one(a[0]);
  Value total = a[1].is_undefined() ? Value::integer(0) : a[1];
  if (total.is_string()) fail("'sum' cannot add strings; use 'join'");
  Iter it(vm.heap, input);
  for (Value item; it.next(item);) total = binary(vm.heap, BinaryOp::Add, total, path.get(vm, item));
  return total;
}

Value extreme(Interpreter& vm, const Value& input, CallArgs& args, bool wants_max) {
  const BoundArgs a(wants_max ? "max" : "min", args, {"case_sensitive", "attribute"});
  const AttributePath path = AttributePath::one(a[1]);
  const bool ignore_case = !a.flag(0, false);
  Iter it(vm.heap, input);
  Value best;
  if (!it.next(best)) return Value::undefined("there is no item, the sequence is empty");
  Value best_key = path.get_key(vm, best, ignore_case);
  for (Value item; it.next(item);) {
    Value key = path.get_key(vm, item, ignore_case);
    if (wants_max ? less(best_key, key) : less(key, best_key)) {
      best = item;
      best_key = std::move(key);
    }
  }
  return best;
}

Value filter_min(Interpreter& vm, const Value& input, CallArgs& args) {
  return extreme(vm, input, args, false);
}
Value filter_max(Interpreter& vm, const Value& input, CallArgs& args) {
  return extreme(vm, input, args, true);
}

Value filter_items(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("items", args, {});
  if (!input.is(Kind::Dict) && !input.is_undefined())
    fail("'items' needs a mapping, seen " + type_name(input));
  const Value view = input.is_undefined() ? input : vm.heap.view(ViewKind::Items, input);
  return vm.heap.generator([it = Iter(vm.heap, view)](Value& out) mutable { return it.next(out); });
}

// Lists of `line_count` items, the last one filled up.
Value filter_batch(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("batch", args, {"linecount", "fill_with"}, 1);
  const size_t per_list = a.count(0, 1);
  const std::optional<Value> fill = a.has(1) ? std::optional<Value>(a[1]) : std::nullopt;
  return vm.heap.generator([&vm, it = Iter(vm.heap, input), per_list, fill](Value& out) mutable {
    std::vector<Value> items;
    for (Value item; items.size() < std::max<size_t>(per_list, 1) && it.next(item);) items.push_back(item);
    if (items.empty()) return false;
    while (fill && items.size() < per_list) {
      vm.heap.step();
      items.push_back(*fill);
    }
    out = vm.heap.list(std::move(items));
    return true;
  });
}

// `slices` lists of about equal length.
Value filter_slice(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("slice", args, {"slices", "fill_with"}, 1);
  const size_t n_slices = a.count(0, 1);
  if (n_slices == 0) fail("'slice' needs at least one slice");
  const std::vector<Value> items = to_vector(vm.heap, input);
  const size_t each = items.size() / n_slices;
  const size_t longer = items.size() % n_slices;
  vm.heap.step(n_slices);
  std::vector<Value> lists;
  for (size_t i = 0, at = 0; i < n_slices; ++i) {
    const size_t n = each + (i < longer ? 1 : 0);
    const auto from = items.begin() + static_cast<std::ptrdiff_t>(at);
    std::vector<Value> part(from, from + static_cast<std::ptrdiff_t>(n));
    if (a.has(1) && i >= longer) part.push_back(a[1]);
    lists.push_back(vm.heap.list(std::move(part)));
    at += n;
  }
  return vm.heap.generator(
      [it = Iter(vm.heap, vm.heap.list(std::move(lists)))](Value& out) mutable { return it.next(out); });
}

}  // namespace

const FilterTable& sequence_filters() {
  static const FilterTable kTable = {
      {"sort", filter_sort},       {"dictsort", filter_dictsort}, {"groupby", filter_groupby},
      {"reverse", filter_reverse}, {"first", filter_first},       {"last", filter_last},
      {"list", filter_list},       {"join", filter_join},         {"sum", filter_sum},
      {"min", filter_min},         {"max", filter_max},           {"items", filter_items},
      {"batch", filter_batch},     {"slice", filter_slice},
  };
  return kTable;
}

}  // namespace thermo::jinja
