// What a template can call by name: filters, tests, methods, global functions.
//
// To add one, write the function in the file of its topic and add it to that file's table.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "jinja/interpreter.h"

namespace thermo::jinja {

using Filter = Value (*)(Interpreter& vm, const Value& input, CallArgs& args);
using Test = bool (*)(Interpreter& vm, const Value& input, CallArgs& args);
using Method = Value (*)(Interpreter& vm, const Value& self, CallArgs& args);

using FilterTable = std::unordered_map<std::string_view, Filter>;
using TestTable = std::unordered_map<std::string_view, Test>;
using MethodTable = std::unordered_map<std::string_view, Method>;

const FilterTable& text_filters();      // filters_text.cpp
const FilterTable& value_filters();     // filters_value.cpp
const FilterTable& sequence_filters();  // filters_sequence.cpp
const FilterTable& select_filters();    // filters_select.cpp
const TestTable& tests();               // tests.cpp
const MethodTable& string_methods();    // methods_string.cpp
const MethodTable& list_methods();      // methods_container.cpp
const MethodTable& tuple_methods();
const MethodTable& dict_methods();

// nullptr when there is none of that name.
Filter find_filter(std::string_view name);
Test find_test(std::string_view name);
Method find_method(Kind kind, std::string_view name);

// range, dict, namespace, cycler, joiner, raise_exception, strftime_now.
void define_globals(Interpreter& vm);
std::optional<Value> loop_attribute(Interpreter& vm, const Value& loop, std::string_view name);

// The arguments of a call by parameter name. Too many, unknown and missing ones are errors.
class BoundArgs {
 public:
  BoundArgs(std::string_view function, const CallArgs& args, std::initializer_list<std::string_view> names,
            size_t n_required = 0);

  // Whether the argument was given, and is not none.
  bool has(size_t i) const { return values_[i] != nullptr && !values_[i]->is_none(); }
  // The argument, undefined when it was not given.
  const Value& operator[](size_t i) const;
  Int integer(size_t i, Int otherwise) const;
  size_t count(size_t i, size_t otherwise) const;  // an integer from 0 to 10 million
  bool flag(size_t i, bool otherwise) const {
    return values_[i] != nullptr ? truthy(*values_[i]) : otherwise;
  }
  // REQUIRES: given. Fails when it is not a string.
  const Text& text(size_t i) const;
  std::string string_or(size_t i, std::string_view otherwise) const;

 private:
  std::string describe(size_t i) const;

  std::string_view function_;
  std::vector<std::string_view> names_;
  std::vector<const Value*> values_;
};

// What dict(...), namespace(...) and dict.update(...) take: a mapping or pairs, then keywords.
void add_dict_arguments(Interpreter& vm, Dict& dict, CallArgs& args, const char* function);

// A string stays as it is; anything else becomes str() of it.
Value soft_string(Interpreter& vm, const Value& v);

}  // namespace thermo::jinja
