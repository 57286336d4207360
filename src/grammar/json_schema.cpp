#include "grammar/json_schema.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "grammar/grammar_compiler.h"
#include "grammar/schema_merge.h"
#include "grammar/schema_values.h"

namespace thermo {
namespace {

constexpr int kMaxDepth = 64;     // of schemas
constexpr int kMaxNesting = 250;  // of brackets
constexpr size_t kMaxSchemas = 20'000;

// What else it says of values, without remarks: definitions of a root would be copied for each of its parts.
Json beside(const Json& schema, std::string_view keyword) {
  Json others = Json::object();
  for (const auto& [key, value] : schema.items())
    if (key != keyword && has_meaning(key)) others[key] = value;
  return others;
}

}  // namespace

struct SchemaRules::Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void SchemaRules::refuse(const std::string& path, const std::string& message) {
  throw Refused(fmt::format("the schema cannot be used: {}: {}", path, message));
}

template <class Make>
Result<ExprId> SchemaRules::guarded(const Make& make) {
  try {
    return make();
  } catch (const Refused& refused) {
    return Error{ErrorCode::InvalidArgument, refused.what()};
  }
}

Result<ExprId> SchemaRules::add(const Json& schema, const std::string& path) {
  return guarded([&] {
    check_nesting(schema, path);
    return compile(schema, path, 0);
  });
}

Result<ExprId> SchemaRules::add_text(const Json& schema, const std::string& path, const FreeText& text) {
  return guarded([&] {
    check_nesting(schema, path);
    return compile_text(schema, path, text, 0);
  });
}

void SchemaRules::check_nesting(const Json& schema, const std::string& path) {
  if (nesting_of(schema) > kMaxNesting)
    refuse(path, fmt::format("nested more than {} levels deep", kMaxNesting));
}

Result<SchemaGrammar> compile_json_schema(const Json& schema, const SchemaOptions& options) {
  RuleSet rules;
  JsonRules json(rules);
  SchemaRules compiler(json, schema, options);
  const Result<ExprId> body = compiler.add(schema, "#");
  if (!body) return body.error();
  const RuleId root = rules.add_rule("#");
  rules.define(root, *body);
  auto grammar = Grammar::compile(rules, root);
  if (!grammar)
    return Error{grammar.error().code, fmt::format("the schema cannot be used: {}",
                                                   grammar.error().message == kMatchesNothing
                                                       ? "no JSON fits it; see that its keywords do "
                                                         "not contradict each other"
                                                       : grammar.error().message)};
  return SchemaGrammar{*grammar, compiler.ignored()};
}

std::shared_ptr<const Grammar> any_json_object() {
  RuleSet rules;
  JsonRules json(rules);
  const RuleId root = rules.add_rule("root");
  rules.define(root, json.object());
  return *Grammar::compile(rules, root);
}

void SchemaRules::not_enforced(const std::string& path, const std::string& keyword) {
  if (options_.strict)
    refuse(path,
           fmt::format("\"{}\" cannot be enforced; leave it out, or do not ask for \"strict\"", keyword));
  list_ignored(path, keyword);
}

void SchemaRules::list_ignored(const std::string& path, const std::string& keyword) {
  std::string whole = path + "/" + keyword;
  if (std::find(ignored_.begin(), ignored_.end(), whole) == ignored_.end())
    ignored_.push_back(std::move(whole));
}

// nullopt: there is none, or it is beyond what a grammar can count.
std::optional<int> SchemaRules::bound_of(const Json& schema, const std::string& path, const char* keyword) {
  const auto found = schema.find(keyword);
  if (found == schema.end()) return std::nullopt;
  if (const std::optional<int> count = count_of(schema, keyword)) return count;
  const double value = found->is_number() ? found->get<double>() : -1.0;
  if (value < 0.0 || value != std::floor(value))
    refuse(path, fmt::format("\"{}\" must be a whole number from 0 on", keyword));
  if (std::string_view(keyword).starts_with("max"))
    list_ignored(path, keyword);
  else
    not_enforced(path, keyword);
  return std::nullopt;
}

void SchemaRules::check_keywords(const Json& schema, const std::string& path) {
  static constexpr const char* kUnknown[] = {"not",
                                             "if",
                                             "multipleOf",
                                             "patternProperties",
                                             "uniqueItems",
                                             "contains",
                                             "minContains",
                                             "maxContains",
                                             "dependentRequired",
                                             "dependentSchemas",
                                             "dependencies",
                                             "propertyNames",
                                             "minProperties",
                                             "maxProperties",
                                             "unevaluatedProperties",
                                             "unevaluatedItems",
                                             "$dynamicRef",
                                             "$recursiveRef"};
  for (const char* keyword : kUnknown) {
    const auto found = schema.find(keyword);
    if (found == schema.end()) continue;
    const bool says_nothing = *found == Json(keyword == std::string_view("unevaluatedProperties") ||
                                             keyword == std::string_view("unevaluatedItems")) ||
                              (keyword == std::string_view("uniqueItems") && *found == Json(false)) ||
                              (keyword == std::string_view("minProperties") && *found == Json(0)) ||
                              (found->is_object() && found->empty() && keyword != std::string_view("not"));
    if (!says_nothing) not_enforced(path, keyword);
  }
}

Json SchemaRules::merged(const Json& a, const Json& b, const std::string& path) {
  Result<Json> both = merge_schemas(a, b, root_, merge_work_left_);
  if (!both) refuse(path, both.error().message);
  return std::move(*both);
}

void SchemaRules::count_part(const std::string& path, int depth) {
  if (depth > kMaxDepth) refuse(path, fmt::format("nested more than {} levels deep", kMaxDepth));
  if (++n_compiled_ > kMaxSchemas)
    refuse(path, fmt::format("the schema is too large: it has more than {} parts", kMaxSchemas));
}

// Those that it names, or that its keywords are about.
std::vector<std::string> SchemaRules::types_of(const Json& schema, const std::string& path) const {
  if (schema.contains("type")) {
    const Json& type = schema["type"];
    const bool known = type.is_string() ||
                       (type.is_array() &&
                        std::all_of(type.begin(), type.end(), [](const Json& t) { return t.is_string(); }));
    if (!known) refuse(path, "\"type\" must be a name or a list of names");
  }
  std::vector<std::string> types = schema_types(schema);
  if ((!types.empty() || schema.contains("type")) && schema.value("nullable", Json()) == Json(true) &&
      std::find(types.begin(), types.end(), "null") == types.end())
    types.push_back("null");
  return types;
}

ExprId SchemaRules::compile(const Json& schema, const std::string& path, int depth) {
  count_part(path, depth);
  if (schema.is_boolean()) return schema.get<bool>() ? json_.value() : rules_.choice({});
  if (!schema.is_object()) refuse(path, "an object or a boolean was expected");
  if (schema.contains("$ref") || schema.contains("allOf")) return compile_rule(schema, path, depth);
  check_keywords(schema, path);
  if (schema.contains("anyOf") || schema.contains("oneOf"))
    return rules_.choice(compile_alternatives(
        schema, path, [&](const Json& one, const std::string& at) { return compile(one, at, depth + 1); }));
  if (schema.contains("enum") || schema.contains("const")) return compile_values(schema, path);

  const std::vector<std::string> types = types_of(schema, path);
  if (types.empty() && !schema.contains("type")) return json_.value();
  std::vector<ExprId> parts;
  for (const std::string& type : types) parts.push_back(compile_type(type, schema, path, depth));
  return rules_.choice(std::move(parts));
}

// Compiles the one schema that "$ref" or "allOf" stands for; nullopt: a reference out of the schema.
std::optional<ExprId> SchemaRules::compile_whole(const Json& schema, const std::string& path,
                                                 const Compile& compile_it) {
  if (schema.contains("$ref")) {
    const Json& reference = schema["$ref"];
    if (!reference.is_string()) refuse(path, "\"$ref\" must be a text");
    const std::string& name = reference.get_ref<const std::string&>();
    const Json* target = resolve_reference(root_, name);
    if (target == nullptr && name.starts_with('#'))
      refuse(path, fmt::format("the reference {} leads nowhere", name));
    if (target == nullptr) {
      not_enforced(path, "$ref");
      return std::nullopt;
    }
    const Json others = beside(schema, "$ref");
    return others.empty() ? compile_it(*target, name) : compile_it(merged(*target, others, path), path);
  }
  const Json& parts = schema["allOf"];
  if (!parts.is_array()) refuse(path, "\"allOf\" must be a list");
  Json all = beside(schema, "allOf");
  for (const Json& part : parts) all = merged(all, part, path + "/allOf");
  return compile_it(all, path);
}

// A schema that refers to another one, perhaps to itself: a rule, once for each text.
ExprId SchemaRules::compile_rule(const Json& schema, const std::string& path, int depth) {
  const std::string text = schema.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (const auto found = by_text_.find(text); found != by_text_.end()) return rules_.rule(found->second);
  const RuleId rule = rules_.add_rule(path);
  by_text_[text] = rule;
  const std::optional<ExprId> whole = compile_whole(
      schema, path, [&](const Json& one, const std::string& at) { return compile(one, at, depth + 1); });
  rules_.define(rule, whole ? *whole : json_.value());
  return rules_.rule(rule);
}

// What stands beside the alternatives holds for each of them.
std::vector<ExprId> SchemaRules::compile_alternatives(const Json& schema, const std::string& path,
                                                      const Compile& compile_it) {
  const char* keyword = schema.contains("anyOf") ? "anyOf" : "oneOf";
  const Json& alternatives = schema[keyword];
  if (!alternatives.is_array() || alternatives.empty())
    refuse(path, fmt::format("\"{}\" must be a list of schemas", keyword));
  const Json others = beside(schema, keyword);
  std::vector<ExprId> parts;
  for (size_t i = 0; i < alternatives.size(); ++i) {
    const std::string at = fmt::format("{}/{}/{}", path, keyword, i);
    parts.push_back(compile_it(others.empty() ? alternatives[i] : merged(others, alternatives[i], at), at));
  }
  return parts;
}

std::vector<Json> SchemaRules::values_of(const Json& schema, const std::string& path) const {
  std::vector<Json> values;
  if (schema.contains("enum")) {
    const Json& list = schema["enum"];
    if (!list.is_array()) refuse(path, "\"enum\" must be a list");
    values.assign(list.begin(), list.end());
    if (schema.contains("const"))
      std::erase_if(values, [&](const Json& value) { return value != schema["const"]; });
  } else {
    values.push_back(schema["const"]);
  }
  std::erase_if(values, [&](const Json& value) { return !fits_scalar_keywords(value, schema); });
  for (const Json& value : values)
    if (nesting_of(value) > kMaxDepth) refuse(path, "a value is nested too deeply");
  return values;
}

ExprId SchemaRules::compile_values(const Json& schema, const std::string& path) {
  std::vector<ExprId> parts;
  for (const Json& value : values_of(schema, path)) parts.push_back(json_.exactly(value));
  return rules_.choice(std::move(parts));
}

ExprId SchemaRules::compile_type(const std::string& type, const Json& schema, const std::string& path,
                                 int depth) {
  if (type == "object") return compile_object(schema, path, depth);
  if (type == "array") return compile_array(schema, path, depth);
  if (type == "string") return compile_string(schema, path);
  if (type == "integer" || type == "number") return compile_number(schema, path, type == "integer");
  if (type == "boolean") return json_.boolean();
  if (type == "null") return json_.null();
  refuse(path, fmt::format("the type \"{}\" is not known", type));
}

// Members in order. `rest[i]` are those from i on after another one; an object begins with its first required
// member or with any before it.
ExprId SchemaRules::compile_object(const Json& schema, const std::string& path, int depth) {
  struct Member {
    std::string name;
    bool required;
    ExprId expr;
  };
  const Json properties = schema.value("properties", Json::object());
  const Json required = schema.value("required", Json::array());
  const Json others = schema.value("additionalProperties", Json(!options_.strict));
  if (!properties.is_object()) refuse(path, "\"properties\" must be an object");
  if (!required.is_array()) refuse(path, "\"required\" must be a list of names");
  if (!schema.contains("properties") && required.empty() && others == Json(true)) return json_.object();

  std::vector<Member> members;
  std::vector<std::string> names;
  const auto add_member = [&](const std::string& name, const Json& value, const std::string& at,
                              bool is_required) {
    if (!is_required && value == Json(false)) {
      names.push_back(name);  // must not be there
      return;
    }
    const ExprId expr = rules_.named(at, compile(value, at, depth + 1));
    members.push_back(
        {name, is_required,
         rules_.named(at, rules_.sequence({rules_.text(json_text(name) + ":"), json_.space(), expr}))});
    names.push_back(name);
  };
  for (const auto& [name, value] : properties.items())
    add_member(name, value, path + "/properties/" + name,
               std::find(required.begin(), required.end(), Json(name)) != required.end());
  for (const Json& name : required) {
    if (!name.is_string()) refuse(path, "\"required\" must be a list of names");
    if (!properties.contains(name.get_ref<const std::string&>()) &&
        std::find(names.begin(), names.end(), name.get_ref<const std::string&>()) == names.end())
      add_member(name.get<std::string>(), others, path + "/additionalProperties", true);
  }

  std::optional<ExprId> other;
  if (others != Json(false)) {
    const std::string at = path + "/additionalProperties";
    const ExprId value = rules_.named(at, compile(others, at, depth + 1));
    other =
        rules_.named(at, rules_.sequence({json_.key_except(names), rules_.text(":"), json_.space(), value}));
  }
  std::vector<ExprId> rest(members.size() + 1);
  rest.back() =
      rules_.named(path, rules_.sequence({other ? rules_.repeat(comma(*other), 0, -1) : rules_.text(""),
                                          json_.space(), rules_.text("}")}));
  for (size_t i = members.size(); i-- > 0;) {
    const ExprId member = comma(members[i].expr);
    rest[i] = rules_.named(
        path, rules_.sequence({members[i].required ? member : rules_.optional(member), rest[i + 1]}));
  }
  std::vector<ExprId> starts;
  bool may_be_empty = true;
  for (size_t i = 0; i < members.size() && may_be_empty; ++i) {
    starts.push_back(rules_.sequence({members[i].expr, rest[i + 1]}));
    may_be_empty = !members[i].required;
  }
  if (may_be_empty) {
    starts.push_back(rules_.text("}"));
    if (other) starts.push_back(rules_.sequence({*other, rest.back()}));
  }
  return rules_.sequence({rules_.text("{"), json_.space(), rules_.choice(std::move(starts))});
}

ExprId SchemaRules::compile_array(const Json& schema, const std::string& path, int depth) {
  // In older drafts a list of "items" is what "prefixItems" is now.
  const bool old = schema.contains("items") && schema["items"].is_array();
  const char* first_keyword = old ? "items" : "prefixItems";
  const char* rest_keyword = old ? "additionalItems" : "items";
  const Json first = schema.value(first_keyword, Json::array());
  const Json items = schema.value(rest_keyword, Json(true));
  if (!first.is_array()) refuse(path, fmt::format("\"{}\" must be a list", first_keyword));
  const std::optional<int> least = bound_of(schema, path, "minItems"),
                           most = bound_of(schema, path, "maxItems");

  const auto n_first = static_cast<int>(first.size());
  int n_least = least.value_or(0), n_most = most.value_or(-1);
  if (items == Json(false)) n_most = n_most < 0 ? n_first : std::min(n_most, n_first);
  if (n_most >= 0 && n_least > n_most) return rules_.choice({});
  if (n_most == 0) return json_.brackets(rules_.text(""));
  const std::string rest_path = path + "/" + rest_keyword;
  const ExprId item = rules_.named(rest_path, compile(items, rest_path, depth + 1));
  // After the elements before: from the n-th on, each with its comma.
  const auto more_items = [&](int n) {
    return rules_.repeat(comma(item), std::max(0, n_least - n), n_most < 0 ? -1 : std::max(0, n_most - n));
  };
  const int n_named = n_most < 0 ? n_first : std::min(n_first, n_most);
  ExprId rest = rules_.named(path, more_items(std::max(1, n_named)));
  for (int i = n_named; i-- > 1;) {
    const std::string at = fmt::format("{}/{}/{}", path, first_keyword, i);
    const ExprId element = rules_.sequence(
        {comma(rules_.named(at, compile(first[static_cast<size_t>(i)], at, depth + 1))), rest});
    rest = rules_.named(at, i < n_least ? element : rules_.optional(element));
  }
  const std::string at = fmt::format("{}/{}/0", path, first_keyword);
  const ExprId head = n_first > 0 ? rules_.named(at, compile(first[0], at, depth + 1)) : item;
  const ExprId elements = rules_.sequence({head, rest, json_.space()});
  return json_.brackets(n_least > 0 ? elements : rules_.optional(elements));
}

// The texts of a string's pattern, its own or that of its format; nullopt: none that can be enforced.
std::optional<ExprId> SchemaRules::compile_pattern(const Json& schema, const std::string& path,
                                                   const CharWriter& write) {
  std::string pattern;
  if (schema.contains("pattern")) {
    if (!schema["pattern"].is_string()) refuse(path, "\"pattern\" must be a text");
    pattern = schema["pattern"].get<std::string>();
    if (schema.contains("format")) not_enforced(path, "format");
  } else if (schema.contains("format")) {
    if (!schema["format"].is_string()) refuse(path, "\"format\" must be a text");
    pattern = pattern_of_format(schema["format"].get<std::string>());
    if (pattern.empty()) not_enforced(path, "format");
  }
  std::optional<ExprId> texts;
  if (!pattern.empty()) {
    const Result<ExprId> found = regex_expr(rules_, pattern, write);
    if (!found && options_.strict) refuse(path, fmt::format("\"pattern\": {}", found.error().message));
    if (!found) not_enforced(path, "pattern");
    if (found) texts = *found;
  }
  if (!texts) return texts;
  if (bound_of(schema, path, "minLength").value_or(0) > 0) list_ignored(path, "minLength");
  if (bound_of(schema, path, "maxLength")) list_ignored(path, "maxLength");
  return texts;
}

ExprId SchemaRules::compile_string(const Json& schema, const std::string& path) {
  const std::optional<ExprId> body =
      compile_pattern(schema, path, [this](const std::vector<CharRange>& ranges, bool negated) {
        return json_.string_char_of(ranges, negated);
      });
  if (body) return rules_.sequence({rules_.text("\""), *body, rules_.text("\"")});
  const std::optional<int> least = bound_of(schema, path, "minLength"),
                           most = bound_of(schema, path, "maxLength");
  if (!least && !most) return json_.string();
  if (most && least.value_or(0) > *most) return rules_.choice({});
  return json_.string_of(least.value_or(0), most.value_or(-1));
}

// As compile() does it, but strings stand there as they are.
ExprId SchemaRules::compile_text(const Json& schema, const std::string& path, const FreeText& text,
                                 int depth) {
  count_part(path, depth);
  if (schema.is_boolean()) return schema.get<bool>() ? text.any : rules_.choice({});
  if (!schema.is_object()) refuse(path, "an object or a boolean was expected");
  const Compile compile_it = [&](const Json& one, const std::string& at) {
    return compile_text(one, at, text, depth + 1);
  };
  if (schema.contains("$ref") || schema.contains("allOf"))
    return compile_whole(schema, path, compile_it).value_or(text.any);
  check_keywords(schema, path);
  std::vector<ExprId> parts;
  if (schema.contains("anyOf") || schema.contains("oneOf")) {
    parts = compile_alternatives(schema, path, compile_it);
  } else if (schema.contains("enum") || schema.contains("const")) {
    for (const Json& value : values_of(schema, path))
      parts.push_back(value.is_string() ? rules_.text(value.get_ref<const std::string&>())
                                        : json_.exactly(value));
  } else {
    const std::vector<std::string> types = types_of(schema, path);
    if (types.empty() && !schema.contains("type")) return text.any;
    for (const std::string& type : types)
      parts.push_back(type == "string" ? compile_free_text(schema, path, text)
                                       : compile_type(type, schema, path, depth));
  }
  // Any text is also what the others could be.
  if (std::find(parts.begin(), parts.end(), text.any) != parts.end()) return text.any;
  return rules_.choice(std::move(parts));
}

ExprId SchemaRules::compile_free_text(const Json& schema, const std::string& path, const FreeText& text) {
  const std::optional<ExprId> body = compile_pattern(
      schema, path,
      [this](const std::vector<CharRange>& ranges, bool negated) { return rules_.chars(ranges, negated); });
  if (body) return *body;
  const std::optional<int> least = bound_of(schema, path, "minLength"),
                           most = bound_of(schema, path, "maxLength");
  if (!least && !most) return text.any;
  if (most && least.value_or(0) > *most) return rules_.choice({});
  return rules_.repeat(text.character, least.value_or(0), most.value_or(-1));
}

ExprId SchemaRules::compile_number(const Json& schema, const std::string& path, bool integer) {
  NumberBounds bounds;
  const auto number = [&](const char* keyword) -> std::optional<double> {
    if (!schema.contains(keyword) || schema[keyword].is_boolean()) return std::nullopt;
    if (!schema[keyword].is_number()) refuse(path, fmt::format("\"{}\" must be a number", keyword));
    return schema[keyword].get<double>();
  };
  bounds.least = number("minimum");
  bounds.most = number("maximum");
  // In draft 4 the exclusive forms are flags.
  bounds.above_least = schema.value("exclusiveMinimum", Json()) == Json(true);
  bounds.below_most = schema.value("exclusiveMaximum", Json()) == Json(true);
  if (const auto above = number("exclusiveMinimum"); above && !(bounds.least && *bounds.least > *above)) {
    bounds.least = above;
    bounds.above_least = true;
  }
  if (const auto below = number("exclusiveMaximum"); below && !(bounds.most && *bounds.most < *below)) {
    bounds.most = below;
    bounds.below_most = true;
  }
  if (!bounds.least && !bounds.most) return integer ? json_.integer() : json_.number();
  const std::optional<ExprId> between =
      integer ? json_.integer_between(bounds) : json_.number_between(bounds);
  return between ? *between : rules_.choice({});
}

}  // namespace thermo
