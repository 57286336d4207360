#include "jinja/attribute_path.h"

#include <algorithm>

#include "jinja/py_string.h"

namespace thermo::jinja {

namespace {

std::vector<Value> split_path(const Text& path) {
  std::vector<Value> parts;
  for (Text& part : split(path, ".", -1)) {
    const bool is_number = !part.empty() && std::all_of(part.bytes.begin(), part.bytes.end(),
                                                        [](char c) { return c >= '0' && c <= '9'; });
    const auto number = is_number ? parse_int(part.bytes) : std::nullopt;
    parts.push_back(number ? Value::integer(*number)
                           : Value(Kind::String, std::make_shared<Str>(nullptr, std::move(part), false)));
  }
  return parts;
}

}  // namespace

Value lower_if_string(Interpreter& vm, const Value& v) {
  return v.is_string() ? vm.heap.string(to_lower(v.text())) : v;
}

AttributePath AttributePath::one(const Value& attribute) {
  AttributePath path;
  if (attribute.is_string()) {
    path.paths_.push_back(split_path(attribute.text()));
  } else if (!attribute.is_none() && !attribute.is_undefined()) {
    path.paths_.push_back({attribute});
  }
  return path;
}

AttributePath AttributePath::several(const Value& attribute) {
  if (!attribute.is_string()) return one(attribute);
  AttributePath path;
  for (const Text& name : split(attribute.text(), ",", -1)) path.paths_.push_back(split_path(name));
  return path;
}

Value AttributePath::follow(Interpreter& vm, Value item, const Parts& parts) const {
  for (const Value& part : parts) {
    item = vm.get_subscript(item, part);
    if (default_ && item.is_undefined()) item = *default_;
  }
  return item;
}

Value AttributePath::get(Interpreter& vm, const Value& item) const {
  return paths_.empty() ? item : follow(vm, item, paths_[0]);
}

Value AttributePath::get_key(Interpreter& vm, const Value& item, bool ignore_case) const {
  const auto finish = [&](const Value& v) { return ignore_case ? lower_if_string(vm, v) : v; };
  if (paths_.size() <= 1) return finish(get(vm, item));
  std::vector<Value> keys;
  for (const Parts& parts : paths_) keys.push_back(finish(follow(vm, item, parts)));
  return vm.heap.list(std::move(keys));
}

}  // namespace thermo::jinja
