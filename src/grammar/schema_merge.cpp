#include "grammar/schema_merge.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <stdexcept>

namespace thermo {
namespace {

constexpr int kMaxDepth = 50;
constexpr size_t kMaxAlternatives = 256, kMaxParts = 1000;

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Json types_of(const Json& type) {
  return type.is_array() ? type : Json::array({type});
}

bool contains(const Json& list, const Json& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

size_t size_of(const Json& value) {
  size_t n = 1;
  if (value.is_structured())
    for (const Json& item : value) n += size_of(item);
  return n;
}

class Merger {
 public:
  Merger(const Json& root, size_t& work_left) : root_(root), work_left_(work_left) {}

  Json merge(const Json& a, const Json& b, int depth) {
    if (depth > kMaxDepth) throw Refused("its parts refer to each other without end");
    const size_t work = size_of(a) + size_of(b);
    if (work > work_left_) throw Refused("its parts are too large, or too many, to be put together");
    work_left_ -= work;
    if (a.is_boolean()) return a.get<bool>() ? b : a;
    if (b.is_boolean()) return b.get<bool>() ? a : b;
    if (!a.is_object() || !b.is_object()) throw Refused("an object or a boolean was expected");
    if (a.contains("$ref")) return merge(follow(a), b, depth + 1);
    if (b.contains("$ref")) return merge(a, follow(b), depth + 1);
    Json out = a;
    properties(a, b, out, depth);
    for (const auto& [key, value] : b.items()) {
      if (key == "properties" || key == "additionalProperties") continue;
      if (!out.contains(key))
        out[key] = value;
      else if (out[key] != value)
        keyword(key, value, out, depth);
    }
    return out;
  }

 private:
  // The schema that it refers to, with what stands beside the reference.
  Json follow(const Json& schema) const {
    const Json& reference = schema["$ref"];
    const Json* target =
        reference.is_string() ? resolve_reference(root_, reference.get_ref<const std::string&>()) : nullptr;
    if (target == nullptr) throw Refused(fmt::format("the reference {} leads nowhere", reference.dump()));
    Json beside = schema;
    beside.erase("$ref");
    const bool plain = std::none_of(beside.items().begin(), beside.items().end(),
                                    [](const auto& item) { return has_meaning(item.key()); });
    return plain ? *target : Json{{"allOf", Json::array({*target, beside})}};
  }

  static Json both(const Json& a, const Json& b) {
    if (a == b) return a;
    return Json{{"allOf", Json::array({a, b})}};
  }

  // A property that one side does not name is what that side says of all others.
  static void properties(const Json& a, const Json& b, Json& out, int) {
    static const Json kNone = Json::object(), kAny = true;
    const auto object_of = [](const Json& schema) -> const Json& {
      const auto found = schema.find("properties");
      return found != schema.end() && found->is_object() ? *found : kNone;
    };
    const auto others_of = [](const Json& schema) -> const Json& {
      const auto found = schema.find("additionalProperties");
      return found != schema.end() ? *found : kAny;
    };
    const Json &in_a = object_of(a), &in_b = object_of(b), &others_a = others_of(a), &others_b = others_of(b);
    const auto open = [](const Json& others) { return others == kAny; };
    Json merged = Json::object();
    for (const auto& [key, schema] : in_a.items())
      merged[key] = in_b.contains(key) ? both(schema, in_b[key])
                    : open(others_b)   ? schema
                                       : both(schema, others_b);
    for (const auto& [key, schema] : in_b.items())
      if (!in_a.contains(key)) merged[key] = open(others_a) ? schema : both(others_a, schema);
    if (!merged.empty()) out["properties"] = std::move(merged);
    if (a.contains("additionalProperties") || b.contains("additionalProperties"))
      out["additionalProperties"] = open(others_a)            ? others_b
                                    : open(others_b)          ? others_a
                                    : others_a == Json(false) ? others_a
                                    : others_b == Json(false) ? others_b
                                                              : both(others_a, others_b);
  }

  void keyword(const std::string& key, const Json& value, Json& out, int depth) {
    Json& own = out[key];
    const auto is_one_of = [&key](std::initializer_list<std::string_view> names) {
      return std::find(names.begin(), names.end(), key) != names.end();
    };
    if (!has_meaning(key)) return;
    if (key == "type") {
      Json common = Json::array();
      const Json own_types = types_of(own), other_types = types_of(value);
      for (const Json& type : own_types) {
        if (contains(other_types, type)) common.push_back(type);
        if (type == "number" && contains(other_types, "integer")) common.push_back("integer");
        if (type == "integer" && contains(other_types, "number") && !contains(other_types, "integer"))
          common.push_back("integer");
      }
      own = common;
    } else if (key == "required") {
      for (const Json& name : value)
        if (!contains(own, name)) own.push_back(name);
    } else if (key == "enum") {
      Json common = Json::array();
      for (const Json& item : own)
        if (contains(value, item)) common.push_back(item);
      own = common;
    } else if (key == "const") {
      out["enum"] = Json::array();  // two different ones: nothing
    } else if (is_one_of({"minimum", "exclusiveMinimum", "minLength", "minItems"}) && own.is_number() &&
               value.is_number()) {
      own = own > value ? own : value;
    } else if (is_one_of({"maximum", "exclusiveMaximum", "maxLength", "maxItems"}) && own.is_number() &&
               value.is_number()) {
      own = own < value ? own : value;
    } else if (key == "items") {
      own = both(own, value);
    } else if (key == "nullable") {
      own = own == Json(true) && value == Json(true);
    } else if (key == "allOf" && own.is_array() && value.is_array()) {
      for (const Json& part : value) own.push_back(part);
      if (own.size() > kMaxParts) throw Refused(fmt::format("more than {} parts of \"allOf\"", kMaxParts));
    } else if (is_one_of({"anyOf", "oneOf"}) && own.is_array() && value.is_array()) {
      if (own.size() * value.size() > kMaxAlternatives)
        throw Refused(fmt::format("more than {} combinations of alternatives", kMaxAlternatives));
      Json pairs = Json::array();
      for (const Json& first : own)
        for (const Json& second : value) pairs.push_back(merge(first, second, depth + 1));
      own = pairs;
    } else {
      throw Refused(fmt::format("two different values of \"{}\" cannot be put together", key));
    }
  }

  const Json& root_;
  size_t& work_left_;
};

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

bool has_meaning(std::string_view keyword) {
  static constexpr std::array kRemarks = {
      "$schema",     "$id",          "id",          "$comment",        "$anchor",          "$defs",
      "definitions", "title",        "description", "default",         "example",          "examples",
      "deprecated",  "readOnly",     "writeOnly",   "contentEncoding", "contentMediaType", "discriminator",
      "xml",         "externalDocs", "strict"};
  return !keyword.starts_with("x-") && std::find(kRemarks.begin(), kRemarks.end(), keyword) == kRemarks.end();
}

const Json* resolve_reference(const Json& root, std::string_view reference) {
  if (reference.empty() || reference[0] != '#') return nullptr;
  reference.remove_prefix(1);
  const Json* at = &root;
  while (!reference.empty()) {
    if (reference[0] != '/') return nullptr;
    const size_t end = std::min(reference.find('/', 1), reference.size());
    const std::string_view coded = reference.substr(1, end - 1);
    std::string name;
    for (size_t i = 0; i < coded.size(); ++i) {
      if (coded[i] == '~' && i + 1 < coded.size()) {
        name += coded[++i] == '0' ? '~' : '/';
      } else if (coded[i] == '%' && i + 2 < coded.size() && hex_value(coded[i + 1]) >= 0 &&
                 hex_value(coded[i + 2]) >= 0) {
        name += static_cast<char>(16 * hex_value(coded[i + 1]) + hex_value(coded[i + 2]));
        i += 2;
      } else {
        name += coded[i];
      }
    }
    if (at->is_object() && at->contains(name)) {
      at = &(*at)[name];
    } else if (at->is_array()) {
      size_t index = 0;
      const auto [last, error] = std::from_chars(name.data(), name.data() + name.size(), index);
      if (error != std::errc() || last != name.data() + name.size() || index >= at->size()) return nullptr;
      at = &(*at)[index];
    } else {
      return nullptr;
    }
    reference.remove_prefix(end);
  }
  return at;
}

Result<Json> merge_schemas(const Json& a, const Json& b, const Json& root, size_t& work_left) {
  try {
    return Merger(root, work_left).merge(a, b, 0);
  } catch (const Refused& refused) {
    return Error{ErrorCode::InvalidArgument, refused.what()};
  }
}

}  // namespace thermo
