#include "chat/argument_value.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <optional>

namespace thermo {
namespace {

constexpr int kMaxDepth = 64;  // of literals
constexpr int kMaxOpenings = 10'000;

// The types that a schema allows, as bits.
enum : uint32_t {
  kString = 1,
  kInteger = 2,
  kNumber = 4,
  kBoolean = 8,
  kNull = 16,
  kObject = 32,
  kArray = 64
};
constexpr uint32_t kAnything = 127;

uint32_t type_of_name(const Json& name) {
  if (name == "string") return kString;
  if (name == "integer") return kInteger;
  if (name == "number") return kNumber | kInteger;
  if (name == "boolean") return kBoolean;
  if (name == "null") return kNull;
  if (name == "object") return kObject;
  if (name == "array") return kArray;
  return 0;
}

uint32_t type_of_value(const Json& value) {
  if (value.is_string()) return kString;
  if (value.is_number_integer()) return kInteger;
  if (value.is_number()) return kNumber;
  if (value.is_boolean()) return kBoolean;
  if (value.is_null()) return kNull;
  return value.is_object() ? kObject : kArray;
}

// "#/$defs/name"; nullptr for one that leads nowhere or outside.
const Json* follow(const Json& reference, const Json& root) {
  if (!reference.is_string()) return nullptr;
  const std::string& path = reference.get_ref<const std::string&>();
  if (!path.starts_with('#')) return nullptr;
  try {
    const Json::json_pointer pointer(path.substr(1));
    return root.contains(pointer) ? &root.at(pointer) : nullptr;
  } catch (const Json::exception&) {
    return nullptr;
  }
}

// A walk over the schemas that one stands for. Alternatives that refer to others, or to themselves, could be
// followed for ever: beyond a limit they allow anything.
class TypeFinder {
 public:
  explicit TypeFinder(const Json& root) : root_(root) {}

  uint32_t types_of(const Json& schema) {
    if (++n_schemas_ > kMaxSchemas || !schema.is_object()) return kAnything;
    if (const auto found = schema.find("$ref"); found != schema.end()) {
      const Json* target = follow(*found, root_);
      return target ? types_of(*target) : kAnything;
    }
    uint32_t types = 0;
    const auto add_values = [&types](const Json& values) {
      for (const Json& value : values) types |= type_of_value(value);
    };
    if (const auto found = schema.find("const"); found != schema.end()) return type_of_value(*found);
    if (const auto found = schema.find("enum"); found != schema.end() && found->is_array()) {
      add_values(*found);
      return types;
    }
    for (const char* key : {"anyOf", "oneOf"})
      if (const auto found = schema.find(key); found != schema.end() && found->is_array())
        for (size_t i = 0; i < found->size() && n_schemas_ <= kMaxSchemas; ++i)
          types |= types_of((*found)[i]);
    if (const auto found = schema.find("type"); found != schema.end()) {
      if (found->is_array()) {
        for (const Json& one : *found) types |= type_of_name(one);
      } else {
        types |= type_of_name(*found);
      }
    }
    if (types == 0) types = kAnything;
    if (const auto found = schema.find("allOf"); found != schema.end() && found->is_array())
      for (size_t i = 0; i < found->size() && n_schemas_ <= kMaxSchemas; ++i) types &= types_of((*found)[i]);
    if (const auto found = schema.find("nullable"); found != schema.end() && *found == true) types |= kNull;
    return types != 0 ? types : kAnything;
  }

 private:
  static constexpr int kMaxSchemas = 1000;

  const Json& root_;
  int n_schemas_ = 0;
};

uint32_t allowed_types(const Json& schema, const Json& root) {
  return TypeFinder(root).types_of(schema);
}

// The literals that Python prints: what a model writes that has seen str(dict) in its history.
class PythonLiteral {
 public:
  explicit PythonLiteral(std::string_view text) : text_(text) {}

  std::optional<Json> parse() {
    Json value;
    if (!read(value, 0)) return std::nullopt;
    skip_space();
    if (at_ != text_.size()) return std::nullopt;
    return value;
  }

 private:
  bool read(Json& value, int depth) {
    skip_space();
    if (depth > kMaxDepth || at_ == text_.size()) return false;
    const char c = text_[at_];
    if (c == '{') return read_dict(value, depth);
    if (c == '[' || c == '(') return read_list(value, depth);
    if (c == '"' || c == '\'') return read_string(value);
    for (const auto& [word, meaning] :
         {std::pair<const char*, Json>{"True", true}, {"False", false}, {"None", nullptr}})
      if (text_.substr(at_).starts_with(word)) {
        at_ += std::string_view(word).size();
        value = meaning;
        return true;
      }
    return read_number(value);
  }

  bool read_dict(Json& value, int depth) {
    value = Json::object();
    ++at_;
    while (!take('}')) {
      Json key, member;
      if (!read(key, depth + 1) || !key.is_string() || !take(':') || !read(member, depth + 1)) return false;
      value[key.get<std::string>()] = std::move(member);
      if (!take(',') && !next_is('}')) return false;
    }
    return true;
  }

  bool read_list(Json& value, int depth) {
    const char close = text_[at_] == '[' ? ']' : ')';
    value = Json::array();
    ++at_;
    while (!take(close)) {
      Json member;
      if (!read(member, depth + 1)) return false;
      value.push_back(std::move(member));
      if (!take(',') && !next_is(close)) return false;
    }
    return true;
  }

  bool read_string(Json& value) {
    const char quote = text_[at_++];
    std::string out;
    while (at_ < text_.size() && text_[at_] != quote) {
      char c = text_[at_++];
      if (c == '\\') {
        if (at_ == text_.size()) return false;
        c = text_[at_++];
        if (c == 'n')
          c = '\n';
        else if (c == 't')
          c = '\t';
        else if (c == 'r')
          c = '\r';
        else if (c != '\\' && c != '\'' && c != '"')
          return false;
      }
      out += c;
    }
    if (at_ == text_.size()) return false;
    ++at_;
    value = std::move(out);
    return true;
  }

  bool read_number(Json& value) {
    const size_t begin = at_;
    while (at_ < text_.size() &&
           (std::isdigit(static_cast<unsigned char>(text_[at_])) || std::strchr("+-.eE", text_[at_])))
      ++at_;
    value = Json::parse(text_.substr(begin, at_ - begin), nullptr, false);
    return value.is_number();
  }

  void skip_space() {
    while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_])) ++at_;
  }
  bool next_is(char c) {
    skip_space();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool take(char c) {
    if (!next_is(c)) return false;
    ++at_;
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
};

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

std::string dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

bool nests_too_deeply(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return c == '[' || c == '{'; }) > kMaxOpenings;
}

std::string quote_json(std::string_view text) {
  return dump(Json(std::string(text)));
}

bool takes_only_strings(const Json* schema, const Json& root) {
  return schema == nullptr || allowed_types(*schema, root) == kString;
}

Json argument_types(const Json* schema, const Json& root) {
  const uint32_t types = schema ? allowed_types(*schema, root) : kString;
  Json names = Json::array();
  for (const char* name : {"string", "number", "integer", "boolean", "null", "object", "array"})
    if ((types & type_of_name(name)) == type_of_name(name)) names.push_back(name);
  if ((types & kNumber) != 0 && (types & kInteger) == 0) names.push_back("number");
  return names;
}

std::string argument_json(const std::string& text, const Json* schema, const Json& root) {
  const uint32_t types = schema ? allowed_types(*schema, root) : kString;
  if (types == kString) return quote_json(text);
  const std::string bare = trimmed(text);
  if ((types & kNull) && (bare == "null" || bare == "None")) return "null";
  if (types & kBoolean) {
    std::string lower = bare;
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    if (lower == "true" || lower == "false") return lower;
  }
  if (!bare.empty() && (types & (kInteger | kNumber)) &&
      (bare[0] == '-' || std::isdigit(static_cast<unsigned char>(bare[0])))) {
    const bool whole = bare.find_first_of(".eE") == std::string::npos;
    if ((whole || (types & kNumber)) && Json::accept(bare))
      return bare;  // the literal itself: no digit is lost
  }
  if ((types & (kObject | kArray)) && !nests_too_deeply(bare)) {
    Json value = Json::parse(bare, nullptr, false);
    if (value.is_discarded()) value = PythonLiteral(bare).parse().value_or(Json());
    if ((value.is_object() && (types & kObject)) || (value.is_array() && (types & kArray)))
      return dump(value);
  }
  return quote_json(text);
}

}  // namespace thermo
