#include "server/api/fields.h"

#include <fmt/format.h>

#include <cmath>

#include "base/json_limits.h"

namespace thermo {
namespace {

ApiError no_json(const std::string& message) {
  return {400, "invalid_json", message};
}

}  // namespace

Json parse_body(std::string_view body) {
  if (const std::string what = beyond_limits(body); !what.empty())
    throw no_json("the body cannot be read: " + what);
  Json json;
  try {
    json = Json::parse(body);
  } catch (const Json::exception& error) {
    std::string message = error.what();
    if (const size_t at = message.find("] "); at != std::string::npos) message.erase(0, at + 2);
    // The library quotes the input, which need not be UTF-8.
    std::string plain;
    for (const char c : message.substr(0, 200)) plain += c >= ' ' && c <= '~' ? c : '?';
    throw no_json("the body is not JSON: " + plain);
  }
  if (!json.is_object()) throw no_json("the body is JSON but not an object");
  return json;
}

Fields::Fields(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
  if (!object.is_object()) throw invalid_value(path_, fmt::format("{}: an object was expected", path_));
}

std::string Fields::path(const std::string& name) const {
  return path_.empty() ? name : path_ + "." + name;
}

const Json* Fields::find(const std::string& name) {
  known_.insert(name);
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

std::optional<double> Fields::number(const std::string& name, double low, double high) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) throw invalid_value(path(name), path(name) + ": a number was expected");
  const double number = value->get<double>();
  if (!(number >= low && number <= high))
    throw invalid_value(path(name), fmt::format("{}: {} is outside {}..{}", path(name), number, low, high));
  return number;
}

std::optional<int64_t> Fields::integer(const std::string& name, int64_t low, int64_t high) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  const bool whole = value->is_number_integer() ||
                     (value->is_number_float() && std::trunc(value->get<double>()) == value->get<double>() &&
                      std::abs(value->get<double>()) < 9e15);
  if (!whole) throw invalid_value(path(name), path(name) + ": a whole number was expected");
  const bool huge = value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  const int64_t number = huge                       ? INT64_MAX
                         : value->is_number_float() ? static_cast<int64_t>(value->get<double>())
                                                    : value->get<int64_t>();
  if (huge || number < low || number > high)
    throw invalid_value(path(name),
                        fmt::format("{}: {} is outside {}..{}", path(name), value->dump(), low, high));
  return number;
}

std::optional<bool> Fields::boolean(const std::string& name) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) throw invalid_value(path(name), path(name) + ": true or false was expected");
  return value->get<bool>();
}

std::optional<std::string> Fields::string(const std::string& name) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) throw invalid_value(path(name), path(name) + ": a string was expected");
  return value->get<std::string>();
}

const Json* Fields::array(const std::string& name) {
  const Json* value = find(name);
  if (value != nullptr && !value->is_array())
    throw invalid_value(path(name), path(name) + ": a list was expected");
  return value;
}

const Json* Fields::object(const std::string& name) {
  const Json* value = find(name);
  if (value != nullptr && !value->is_object())
    throw invalid_value(path(name), path(name) + ": an object was expected");
  return value;
}

const Json& Fields::require(const std::string& name) {
  const Json* value = find(name);
  if (value == nullptr)
    throw ApiError(400, "missing_required_parameter", "the member '" + path(name) + "' is missing",
                   path(name));
  return *value;
}

void Fields::accept(std::initializer_list<const char*> names) {
  known_.insert(names.begin(), names.end());
}

void Fields::refuse(const std::string& name, const std::string& why) {
  const Json* value = find(name);
  if (value == nullptr || *value == Json(false) || *value == Json(0)) return;
  if ((value->is_array() || value->is_object() || value->is_string()) && value->empty()) return;
  throw unsupported(path(name), path(name) + ": " + why);
}

std::vector<std::string> Fields::unknown() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : object_.items())
    if (!known_.contains(name) && !value.is_null()) names.push_back(path(name));
  return names;
}

std::string element_path(const std::string& path, size_t index) {
  return fmt::format("{}[{}]", path, index);
}

}  // namespace thermo
