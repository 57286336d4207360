#include "grammar/schema_values.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/utf8.h"
#include "grammar/grammar.h"

namespace thermo {

std::vector<std::string> schema_types(const Json& schema) {
  std::vector<std::string> types;
  if (const auto type = schema.find("type"); type != schema.end()) {
    if (type->is_string()) types.push_back(type->get<std::string>());
    if (type->is_array())
      for (const Json& name : *type)
        if (name.is_string() &&
            std::find(types.begin(), types.end(), name.get_ref<const std::string&>()) == types.end())
          types.push_back(name.get<std::string>());
    return types;
  }
  static const std::vector<std::pair<std::string, std::vector<const char*>>> kAbout = {
      {"object", {"properties", "required", "additionalProperties"}},
      {"array", {"items", "prefixItems", "minItems", "maxItems"}},
      {"string", {"minLength", "maxLength", "pattern", "format"}},
      {"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}},
  };
  for (const auto& [type, keywords] : kAbout)
    if (std::any_of(keywords.begin(), keywords.end(), [&](const char* k) { return schema.contains(k); }))
      types.push_back(type);
  return types;
}

bool fits_scalar_keywords(const Json& value, const Json& schema) {
  if (schema.contains("type")) {
    const std::vector<std::string> types = schema_types(schema);
    const auto has = [&](const char* type) {
      return std::find(types.begin(), types.end(), type) != types.end();
    };
    const bool whole = value.is_number_integer() ||
                       (value.is_number() && std::floor(value.get<double>()) == value.get<double>());
    const bool fits = (value.is_null() && (has("null") || schema.value("nullable", Json()) == Json(true))) ||
                      (value.is_boolean() && has("boolean")) || (value.is_string() && has("string")) ||
                      (value.is_object() && has("object")) || (value.is_array() && has("array")) ||
                      (value.is_number() && (has("number") || (whole && has("integer"))));
    if (!fits) return false;
  }
  if (value.is_number()) {
    const double x = value.get<double>();
    const auto bound = [&](const char* keyword) -> std::optional<double> {
      const auto found = schema.find(keyword);
      return found != schema.end() && found->is_number() ? std::optional(found->get<double>()) : std::nullopt;
    };
    if (x < bound("minimum").value_or(x) || x > bound("maximum").value_or(x)) return false;
    if (const auto above = bound("exclusiveMinimum"); above && x <= *above) return false;
    if (const auto below = bound("exclusiveMaximum"); below && x >= *below) return false;
  }
  if (value.is_string()) {
    const std::string& text = value.get_ref<const std::string&>();
    int n = 0;
    for (size_t i = 0; i < text.size(); i += decode_utf8(text, i).length) ++n;
    if (n < count_of(schema, "minLength").value_or(0) || n > count_of(schema, "maxLength").value_or(n))
      return false;
  }
  return true;
}

std::optional<int> count_of(const Json& schema, const char* keyword) {
  const auto found = schema.find(keyword);
  if (found == schema.end() || !found->is_number()) return std::nullopt;
  const double value = found->get<double>();
  if (!(value >= 0.0 && value <= Grammar::kMaxRepeats) || value != std::floor(value)) return std::nullopt;
  return static_cast<int>(value);
}

std::string pattern_of_format(const std::string& format) {
  static const std::string kDate =
      R"(\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])))";
  static const std::string kTime =
      R"(([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d))";
  static const std::string kByte = R"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d))";
  static const std::string kHex = "[0-9a-fA-F]{1,4}";
  static const std::string kLabel = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?";
  static const std::map<std::string, std::string> kPatterns = {
      {"date", kDate},
      {"time", kTime},
      {"date-time", kDate + "T" + kTime},
      {"duration", R"(P(\d{1,9}D(T\d{1,9}[HMS])?|T\d{1,9}[HMS]|\d{1,9}[YMW]))"},
      {"uuid", "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"},
      {"ipv4", "(" + kByte + R"(\.){3})" + kByte},
      {"ipv6", "((" + kHex + ":){7}" + kHex + "|(" + kHex + ":){1,6}:" + kHex + "|::(" + kHex + ":){0,5}" +
                   kHex + ")"},
      {"email", R"([A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@)" + kLabel + R"((\.)" + kLabel + ")+"},
      {"hostname", kLabel + R"((\.)" + kLabel + ")*"},
      {"uri", R"([A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]+)"},
  };
  const auto found = kPatterns.find(format);
  return found == kPatterns.end() ? "" : "^(" + found->second + ")$";
}

int nesting_of(const Json& value) {
  // By hand: a value of a schema may be nested more deeply than calls may be.
  int deepest = 0;
  std::vector<std::pair<const Json*, int>> work{{&value, 0}};
  while (!work.empty()) {
    const auto [at, depth] = work.back();
    work.pop_back();
    deepest = std::max(deepest, depth);
    if (at->is_structured())
      for (const auto& item : *at) work.emplace_back(&item, depth + 1);
  }
  return deepest;
}

}  // namespace thermo
