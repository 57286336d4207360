#include "jinja/builtins.h"

#include <algorithm>
#include <ctime>

#include "jinja/loop_state.h"

namespace thermo::jinja {

namespace {

constexpr Int kMaxRange = 100'000;  // as jinja2's sandbox
constexpr size_t kMaxCount = 10'000'000;

template <class Table>
typename Table::mapped_type find_in(const Table& table, std::string_view name) {
  const auto it = table.find(name);
  return it == table.end() ? nullptr : it->second;
}

Value make_range(Interpreter& vm, CallArgs& args) {
  const BoundArgs a("range", args, {"start", "stop", "step"}, 1);
  const bool only_stop = args.positional.size() == 1;
  const Int start = only_stop ? 0 : a.integer(0, 0);
  const Int stop = only_stop ? a.integer(0, 0) : a.integer(1, 0);
  const Int step = a.integer(2, 1);
  constexpr Int kEdge = Int{1} << 64;
  if (step == 0) fail("range() needs a step that is not zero");
  if (start < -kEdge || start > kEdge || stop < -kEdge || stop > kEdge || step < -kEdge || step > kEdge) {
    fail("range() needs numbers of 64 bits");
  }
  Value range = vm.heap.range(start, stop, step);
  if (range.range().length > kMaxRange) {
    fail("range() gives at most " + int_to_string(kMaxRange) + " numbers, seen " +
         int_to_string(range.range().length));
  }
  return range;
}

void add_pairs(Interpreter& vm, Dict& dict, const Value& source) {
  if (source.is(Kind::Dict)) {
    const auto entries = source.dict().entries;  // a copy: dict.update(itself)
    for (const auto& [key, value] : entries) dict.set(key, value);
    return;
  }
  Iter it(vm.heap, source);
  for (Value pair; it.next(pair);) {
    const std::vector<Value> items = to_vector(vm.heap, pair);
    if (items.size() != 2) fail("a dict is made of pairs, seen " + std::to_string(items.size()) + " values");
    dict.set(items[0], items[1]);
  }
}

Value make_dict(Interpreter& vm, CallArgs& args) {
  Value dict = vm.heap.dict();
  add_dict_arguments(vm, dict.dict(), args, "dict");
  return dict;
}

Value make_namespace(Interpreter& vm, CallArgs& args) {
  Value space = vm.heap.name_space();
  add_dict_arguments(vm, space.name_space().attributes, args, "namespace");
  return space;
}

// An object with next(), reset() and current, stored as a namespace. The heap keeps namespaces until the end,
// so the functions may refer to its attributes.
Value make_cycler(Interpreter& vm, CallArgs& args) {
  if (args.positional.empty()) fail("cycler() needs at least one value");
  const Value items = vm.heap.list(args.positional);
  const Value cycler = vm.heap.name_space();
  auto at = std::make_shared<size_t>(0);
  Dict& attributes = cycler.name_space().attributes;
  const auto show = [items, at](Dict& d, Heap& heap) {
    d.set(heap.string("current"), items.list().items[*at % items.list().items.size()]);
  };
  show(attributes, vm.heap);
  attributes.set(vm.heap.string("next"),
                 vm.heap.callable("next", [=, &attributes](Interpreter& in, CallArgs&) {
                   Value current = items.list().items[(*at)++ % items.list().items.size()];
                   show(attributes, in.heap);
                   return current;
                 }));
  attributes.set(vm.heap.string("reset"),
                 vm.heap.callable("reset", [=, &attributes](Interpreter& in, CallArgs&) {
                   *at = 0;
                   show(attributes, in.heap);
                   return Value::none();
                 }));
  return cycler;
}

Value make_joiner(Interpreter& vm, CallArgs& args) {
  const BoundArgs a("joiner", args, {"sep"});
  const Value separator = vm.heap.string(a.string_or(0, ", "));
  auto used = std::make_shared<bool>(false);
  return vm.heap.callable("joiner", [separator, used](Interpreter& in, CallArgs&) {
    return std::exchange(*used, true) ? separator : in.heap.string("");
  });
}

Value raise_exception(Interpreter&, CallArgs& args) {
  const BoundArgs a("raise_exception", args, {"message"}, 1);
  fail(to_text(a[0]).bytes);
}

Value strftime_now(Interpreter& vm, CallArgs& args) {
  const BoundArgs a("strftime_now", args, {"format"}, 1);
  const std::time_t seconds =
      std::chrono::system_clock::to_time_t(vm.now.value_or(std::chrono::system_clock::now()));
  std::tm parts{};
  localtime_r(&seconds, &parts);
  char buffer[512];
  const std::string format = a.text(0).bytes;
  if (format.empty()) return vm.heap.string("");
  const size_t n = std::strftime(buffer, sizeof buffer, format.c_str(), &parts);
  if (n == 0) fail("strftime_now() gives at most " + std::to_string(sizeof buffer - 1) + " bytes");
  return vm.heap.string(std::string_view(buffer, n));
}

Value loop_cycle(Interpreter&, const Value& loop, CallArgs& args) {
  if (args.positional.empty()) fail("loop.cycle() needs at least one value");
  return args.positional[loop.loop().index0 % args.positional.size()];
}

Value loop_changed(Interpreter&, const Value& loop, CallArgs& args) {
  auto& last = loop.loop().last_changed;
  bool same = last.has_value() && last->size() == args.positional.size();
  for (size_t i = 0; same && i < last->size(); ++i) same = equals((*last)[i], args.positional[i]);
  last = args.positional;
  return Value::boolean(!same);
}

}  // namespace

void add_dict_arguments(Interpreter& vm, Dict& dict, CallArgs& args, const char* function) {
  if (args.positional.size() > 1) fail(std::string(function) + "() takes at most one value");
  if (!args.positional.empty()) add_pairs(vm, dict, args.positional[0]);
  for (const auto& [name, value] : args.keywords) dict.set(vm.heap.string(name), value);
}

Filter find_filter(std::string_view name) {
  for (const FilterTable* table :
       {&text_filters(), &value_filters(), &sequence_filters(), &select_filters()}) {
    if (const Filter filter = find_in(*table, name)) return filter;
  }
  return nullptr;
}

Test find_test(std::string_view name) {
  return find_in(tests(), name);
}

Method find_method(Kind kind, std::string_view name) {
  switch (kind) {
    case Kind::String:
      return find_in(string_methods(), name);
    case Kind::List:
      return find_in(list_methods(), name);
    case Kind::Tuple:
      return find_in(tuple_methods(), name);
    case Kind::Dict:
      return find_in(dict_methods(), name);
    case Kind::Loop:
      return name == "cycle" ? loop_cycle : name == "changed" ? loop_changed : nullptr;
    default:
      return nullptr;
  }
}

Value Interpreter::apply_filter(const std::string& name, const Value& input, CallArgs& args) {
  const Filter filter = find_filter(name);
  if (filter == nullptr) fail("unknown filter '" + name + "'");
  return filter(*this, input, args);
}

bool Interpreter::apply_test(const std::string& name, const Value& input, CallArgs& args) {
  const Test test = find_test(name);
  if (test == nullptr) fail("unknown test '" + name + "' after 'is'");
  return test(*this, input, args);
}

void define_globals(Interpreter& vm) {
  const auto add = [&](const char* name, Callable::Function function) {
    vm.define(name, vm.heap.callable(name, std::move(function)));
  };
  add("range", make_range);
  add("dict", make_dict);
  add("namespace", make_namespace);
  add("cycler", make_cycler);
  add("joiner", make_joiner);
  add("raise_exception", raise_exception);
  add("strftime_now", strftime_now);
}

std::optional<Value> loop_attribute(Interpreter& vm, const Value& loop, std::string_view name) {
  LoopState& state = loop.loop();
  const auto number = [](size_t n) { return Value::integer(static_cast<Int>(n)); };
  if (name == "index") return number(state.index0 + 1);
  if (name == "index0") return number(state.index0);
  if (name == "first") return Value::boolean(state.index0 == 0);
  if (name == "last") return Value::boolean(state.peek() == nullptr);
  if (name == "length") return number(state.length());
  if (name == "revindex") return number(state.length() - state.index0);
  if (name == "revindex0") return number(state.length() - state.index0 - 1);
  if (name == "depth") return number(static_cast<size_t>(state.depth0) + 1);
  if (name == "depth0") return number(static_cast<size_t>(state.depth0));
  if (name == "previtem")
    return state.index0 == 0 ? Value::undefined("there is no previous item") : state.previous;
  if (name == "nextitem") {
    const Value* next = state.peek();
    return next != nullptr ? *next : Value::undefined("there is no next item");
  }
  const Method method = find_method(Kind::Loop, name);
  if (method == nullptr) return std::nullopt;
  return vm.heap.callable(std::string(name),
                          [loop, method](Interpreter& in, CallArgs& args) { return method(in, loop, args); });
}

BoundArgs::BoundArgs(std::string_view function, const CallArgs& args,
                     std::initializer_list<std::string_view> names, size_t n_required)
    : function_(function), names_(names), values_(names.size(), nullptr) {
  if (args.positional.size() > names_.size()) {
    fail("'" + std::string(function) + "' takes at most " + std::to_string(names_.size()) + " values, seen " +
         std::to_string(args.positional.size()));
  }
  for (size_t i = 0; i < args.positional.size(); ++i) values_[i] = &args.positional[i];
  for (const auto& [name, value] : args.keywords) {
    const auto it = std::find(names_.begin(), names_.end(), name);
    if (it == names_.end()) fail("'" + std::string(function) + "' has no parameter named '" + name + "'");
    const auto i = static_cast<size_t>(it - names_.begin());
    if (values_[i] != nullptr) fail(describe(i) + " is given twice");
    values_[i] = &value;
  }
  for (size_t i = 0; i < n_required; ++i) {
    if (values_[i] == nullptr) fail(describe(i) + " is missing");
  }
}

std::string BoundArgs::describe(size_t i) const {
  return "parameter '" + std::string(names_[i]) + "' of '" + std::string(function_) + "'";
}

const Value& BoundArgs::operator[](size_t i) const {
  static const Value kUndefined;
  return values_[i] != nullptr ? *values_[i] : kUndefined;
}

Int BoundArgs::integer(size_t i, Int otherwise) const {
  if (values_[i] == nullptr) return otherwise;
  require_defined(*values_[i]);
  if (!values_[i]->is_integer()) fail(describe(i) + " must be an integer, seen " + type_name(*values_[i]));
  return values_[i]->as_int();
}

size_t BoundArgs::count(size_t i, size_t otherwise) const {
  const Int n = integer(i, static_cast<Int>(otherwise));
  if (n > static_cast<Int>(kMaxCount)) fail(describe(i) + " must be at most " + std::to_string(kMaxCount));
  return n < 0 ? 0 : static_cast<size_t>(n);
}

const Text& BoundArgs::text(size_t i) const {
  require_defined(*values_[i]);
  if (!values_[i]->is_string()) fail(describe(i) + " must be a string, seen " + type_name(*values_[i]));
  return values_[i]->text();
}

std::string BoundArgs::string_or(size_t i, std::string_view otherwise) const {
  return values_[i] != nullptr ? text(i).bytes : std::string(otherwise);
}

Value soft_string(Interpreter& vm, const Value& v) {
  return v.is_string() ? v : vm.heap.string(to_text(v));
}

}  // namespace thermo::jinja
