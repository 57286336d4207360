// JSON schemas to grammars: every text that the grammar accepts is JSON that fits the schema. Members come in
// the order in which the schema has them.
//
// Enforced: type (also lists), properties, required, additionalProperties, items, prefixItems, minItems,
// maxItems, enum, const, anyOf, oneOf (as anyOf), allOf, $ref within the schema (also to itself), nullable,
// minLength, maxLength, pattern (as regex_rules.h reads it), format (date, time, date-time, duration, uuid,
// ipv4, ipv6, email, hostname, uri), minimum, maximum and their exclusive forms. Remarks (title, description,
// default, ...) mean nothing. Other keywords cannot be enforced: an error where the schema is strict,
// otherwise listed. Always listed, never an error: an upper bound above 10,000, which answers hardly reach,
// and the lengths of a string that has a pattern.
//
// Numbers have at most 16 digits before the point. Where a schema gives no type, its keywords tell: one with
// "properties" is an object.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "grammar/grammar.h"
#include "grammar/json_rules.h"
#include "grammar/regex_rules.h"

namespace thermo {

struct SchemaOptions {
  // What cannot be enforced is an error, and objects have no members beyond those declared unless they say
  // so.
  bool strict = false;
};

struct SchemaGrammar {
  std::shared_ptr<const Grammar> grammar;
  std::vector<std::string> ignored;  // keywords that are not enforced, by their path: "#/items/uniqueItems"
};

// InvalidArgument: one sentence with the path of what cannot be used.
Result<SchemaGrammar> compile_json_schema(const Json& schema, const SchemaOptions& options = {});

// Any JSON object: the `json_object` of the OpenAI API.
std::shared_ptr<const Grammar> any_json_object();

// Adds schemas to a grammar that has more than JSON. One for each document; all that is given outlives it.
class SchemaRules {
 public:
  // What may stand where a string is written as it is, without quotes and escapes.
  struct FreeText {
    ExprId any;        // any text
    ExprId character;  // one character of it
  };

  SchemaRules(JsonRules& json, const Json& root, const SchemaOptions& options)
      : json_(json), rules_(json.rules()), root_(root), options_(options) {}

  // The values of a schema that is a part of the root, at this path.
  Result<ExprId> add(const Json& schema, const std::string& path);
  // The same, but a string stands there as it is. What lies inside of an object or a list is JSON.
  Result<ExprId> add_text(const Json& schema, const std::string& path, const FreeText& text);
  const std::vector<std::string>& ignored() const { return ignored_; }

 private:
  struct Refused;
  using Compile = std::function<ExprId(const Json& schema, const std::string& path)>;

  [[noreturn]] static void refuse(const std::string& path, const std::string& message);
  template <class Make>
  Result<ExprId> guarded(const Make& make);
  void list_ignored(const std::string& path, const std::string& keyword);
  void not_enforced(const std::string& path, const std::string& keyword);
  std::optional<int> bound_of(const Json& schema, const std::string& path, const char* keyword);
  static void check_nesting(const Json& schema, const std::string& path);
  void check_keywords(const Json& schema, const std::string& path);
  void count_part(const std::string& path, int depth);
  std::vector<std::string> types_of(const Json& schema, const std::string& path) const;
  ExprId compile(const Json& schema, const std::string& path, int depth);
  ExprId compile_rule(const Json& schema, const std::string& path, int depth);
  std::optional<ExprId> compile_whole(const Json& schema, const std::string& path, const Compile& compile_it);
  std::vector<ExprId> compile_alternatives(const Json& schema, const std::string& path,
                                           const Compile& compile_it);
  ExprId compile_values(const Json& schema, const std::string& path);
  ExprId compile_type(const std::string& type, const Json& schema, const std::string& path, int depth);
  ExprId compile_object(const Json& schema, const std::string& path, int depth);
  ExprId compile_array(const Json& schema, const std::string& path, int depth);
  ExprId compile_string(const Json& schema, const std::string& path);
  ExprId compile_text(const Json& schema, const std::string& path, const FreeText& text, int depth);
  ExprId compile_free_text(const Json& schema, const std::string& path, const FreeText& text);
  ExprId compile_number(const Json& schema, const std::string& path, bool integer);
  std::optional<ExprId> compile_pattern(const Json& schema, const std::string& path, const CharWriter& write);
  Json merged(const Json& a, const Json& b, const std::string& path);
  std::vector<Json> values_of(const Json& schema, const std::string& path) const;
  ExprId comma(ExprId part) { return rules_.sequence({rules_.text(","), json_.space(), part}); }

  JsonRules& json_;
  RuleSet& rules_;
  const Json& root_;
  SchemaOptions options_;
  std::map<std::string, RuleId> by_text_;  // schemas that refer to others
  std::vector<std::string> ignored_;
  size_t n_compiled_ = 0, merge_work_left_ = 1'000'000;
};

}  // namespace thermo
