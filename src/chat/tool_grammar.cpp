#include "chat/tool_grammar.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <stdexcept>

#include "chat/argument_value.h"
#include "grammar/json_schema.h"

namespace thermo {
namespace {

// Up to so many parameters of a tool may come in any order. Hundreds of tools make too large a grammar of
// that; then there are fewer.
constexpr size_t kMostAnyOrder[] = {6, 3, 0};

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class ToolRules {
 public:
  ToolRules(std::span<const Tool> tools, const ToolCallSyntax& syntax, size_t most_any_order)
      : tools_(tools), syntax_(syntax), most_any_order_(most_any_order), json_(rules_) {}

  // Throws Refused for a tool that cannot be used.
  Result<SchemaGrammar> compile() {
    const ExprId open = syntax_.open ? rules_.token(*syntax_.open) : rules_.text(kCallOpen);
    const ExprId close = syntax_.close ? rules_.token(*syntax_.close) : rules_.text(kCallClose);
    const ExprId call = rules_.named("call", rules_.sequence({open, body(), close}));
    std::vector<ExprId> parts{call};
    if (syntax_.parallel) parts.push_back(rules_.repeat(rules_.sequence({newlines(0, 2), call}), 0, -1));
    // Laguna ends a line before the turn.
    if (syntax_.dialect == ToolDialect::Laguna) parts.push_back(newlines(0, 1));
    const RuleId root = rules_.add_rule("calls");
    rules_.define(root, rules_.sequence(std::move(parts)));
    const Result<std::shared_ptr<const Grammar>> grammar = Grammar::compile(rules_, root);
    if (!grammar)
      return Error{ErrorCode::InvalidArgument,
                   fmt::format("the tools cannot be used: {}", grammar.error().message)};
    return SchemaGrammar{*grammar, ignored_};
  }

 private:
  ExprId newlines(int least, int most) { return rules_.repeat(rules_.text("\n"), least, most); }

  ExprId body() {
    const bool off = syntax_.grammar == ToolGrammar::Off;
    if (off && !syntax_.keep_names) return any_text({});
    std::vector<ExprId> calls;
    for (const Tool& tool : tools_) {
      std::vector<ExprId> parts = name(tool);
      if (off) {
        parts.push_back(any_text({}));
      } else if (syntax_.dialect == ToolDialect::Hermes) {
        json_arguments(tool, parts);
      } else {
        parts.push_back(parameters(tool));
        if (syntax_.dialect == ToolDialect::Qwen) parts.push_back(rules_.text("</function>\n"));
      }
      calls.push_back(rules_.sequence(std::move(parts)));
    }
    return rules_.choice(std::move(calls));
  }

  // A call up to its arguments.
  std::vector<ExprId> name(const Tool& tool) {
    switch (syntax_.dialect) {
      case ToolDialect::Qwen:
        return {rules_.text("\n<function=" + tool.name + ">\n")};
      case ToolDialect::Laguna:
        return {rules_.text(tool.name + "\n")};
      case ToolDialect::Hermes:
        break;
    }
    return {newlines(0, 1), rules_.text("{"),
            json_.space(),  rules_.text("\"name\":"),
            json_.space(),  rules_.text(json_text(tool.name) + ","),
            json_.space(),  rules_.text("\"arguments\":"),
            json_.space()};
  }

  // Text without these, and without what would end the call.
  ExprId any_text(std::vector<ExprId> forbidden) {
    if (!syntax_.close) forbidden.push_back(rules_.text(kCallClose));
    if (forbidden.empty()) return rules_.repeat(rules_.any_char(), 0, -1);
    return rules_.text_without(rules_.choice(std::move(forbidden)));
  }

  bool is_strict(const Tool& tool) const { return tool.strict || syntax_.grammar == ToolGrammar::Strict; }

  ExprId take(const Tool& tool, const Result<ExprId>& expr) const {
    if (!expr) throw Refused(fmt::format("tool '{}': {}", tool.name, expr.error().message));
    return *expr;
  }

  void note_ignored(const Tool& tool, const SchemaRules& schemas) {
    for (const std::string& path : schemas.ignored())
      ignored_.push_back(fmt::format("{}: {}", tool.name, path));
  }

  void json_arguments(const Tool& tool, std::vector<ExprId>& parts) {
    Json schema = tool.parameters.is_object() ? tool.parameters : Json{{"type", "object"}};
    // Only what is declared, where anything is.
    if (schema.contains("properties") && !schema["properties"].empty() &&
        !schema.contains("additionalProperties"))
      schema["additionalProperties"] = false;
    const Json& kept = documents_.emplace_back(std::make_unique<Json>(std::move(schema))).operator*();
    SchemaRules schemas(json_, kept, {.strict = is_strict(tool)});
    const Result<ExprId> arguments = schemas.add(kept, "#");
    if (!arguments && is_strict(tool)) take(tool, arguments);
    note_ignored(tool, schemas);
    parts.insert(parts.end(),
                 {arguments ? *arguments : json_.object(), json_.space(), rules_.text("}"), newlines(0, 1)});
  }

  struct Tags {
    std::string before_key, after_key, after_value;
  };
  const Tags& tags() const {
    static const Tags kQwen{"<parameter=", ">\n", "\n</parameter>\n"},
        kLaguna{"<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"};
    return syntax_.dialect == ToolDialect::Qwen ? kQwen : kLaguna;
  }

  // Any parameters in any order, each required one once. A rule for every set of required ones that is
  // missing.
  ExprId parameters(const Tool& tool) {
    static const Json kNone = Json::object();
    const Json& declared = tool.declared();
    const auto in_schema = [&](const char* key) -> const Json& {
      return declared.is_object() && declared.contains(key) ? declared[key] : kNone;
    };
    const Json& properties = in_schema("properties");
    const Json& required = in_schema("required");
    SchemaRules schemas(json_, tool.parameters, {.strict = is_strict(tool)});
    std::vector<ExprId> optional, needed;
    const ExprId text = rules_.named(tool.name + ": text", raw_text(properties));
    if (properties.is_object())
      for (const auto& [key, schema] : properties.items()) {
        const ExprId one = rules_.named(tool.name + ": " + key, parameter(tool, schemas, key, schema, text));
        const bool is_required =
            required.is_array() && std::find(required.begin(), required.end(), Json(key)) != required.end();
        (is_required ? needed : optional).push_back(one);
      }
    if (!properties.is_object() || properties.empty()) {
      if (in_schema("additionalProperties") == Json(false)) return rules_.text("");
      const ExprId key = rules_.repeat(
          rules_.chars({{'a', 'z'}, {'A', 'Z'}, {'0', '9'}, {'_', '_'}, {'-', '-'}, {'.', '.'}}), 1, 64);
      optional.push_back(
          rules_.named(tool.name + ": any",
                       rules_.sequence({rules_.text(tags().before_key), key, rules_.text(tags().after_key),
                                        text, rules_.text(tags().after_value)})));
    }
    note_ignored(tool, schemas);
    return rules_.rule(parameter_list(tool, optional, needed));
  }

  // Each part once, if they are few; otherwise optional ones may come again (the first one counts), and many
  // required ones come in the order of the schema.
  RuleId parameter_list(const Tool& tool, std::vector<ExprId> optional, std::vector<ExprId> needed) {
    size_t n_needed = needed.size();
    if (optional.size() + needed.size() <= most_any_order_ && has_names(tool)) {
      needed.insert(needed.end(), optional.begin(), optional.end());
      optional.clear();
    }
    const bool any_order = needed.size() <= most_any_order_;
    // Which of the needed ones are missing: a set, or how many at the end of the list.
    const size_t n_states = any_order ? size_t{1} << needed.size() : needed.size() + 1;
    const size_t must_be_gone = any_order ? (size_t{1} << n_needed) - 1 : SIZE_MAX;
    std::vector<RuleId> state(n_states);
    for (RuleId& rule : state) rule = rules_.add_rule(tool.name + ": parameters");
    for (size_t s = 0; s < n_states; ++s) {
      std::vector<ExprId> parts;
      if ((s & must_be_gone) == 0) parts.push_back(rules_.text(""));
      for (const ExprId one : optional) parts.push_back(rules_.sequence({one, rules_.rule(state[s])}));
      for (size_t i = 0; i < needed.size(); ++i) {
        if (any_order ? (s >> i & 1) == 0 : needed.size() - s != i) continue;
        const size_t next = any_order ? s & ~(size_t{1} << i) : s - 1;
        parts.push_back(rules_.sequence({needed[i], rules_.rule(state[next])}));
      }
      rules_.define(state[s], rules_.choice(std::move(parts)));
    }
    return state.back();
  }

  static bool has_names(const Tool& tool) {
    const Json& declared = tool.declared();
    return declared.is_object() && declared.contains("properties") && !declared["properties"].empty();
  }

  ExprId parameter(const Tool& tool, SchemaRules& schemas, const std::string& key, const Json& schema,
                   ExprId text) {
    const std::string path = "#/properties/" + key;
    const Json types = argument_types(&schema, tool.parameters);
    const bool takes_text = std::find(types.begin(), types.end(), "string") != types.end();
    ExprId value = text;
    if (takes_text && is_strict(tool)) {
      // A character that cannot begin a tag: how long a text is and where it ends are not asked together.
      const ExprId character = rules_.chars({{'<', '<'}}, true);
      value = take(tool, schemas.add_text(schema, path, {.any = text, .character = character}));
    } else if (!takes_text) {
      value = is_strict(tool) ? take(tool, schemas.add(schema, path))
                              : take(tool, schemas.add(Json{{"type", types}}, path));
      // As Python prints them: models that saw such calls write such calls.
      std::vector<ExprId> parts{value};
      if (std::find(types.begin(), types.end(), "boolean") != types.end()) {
        parts.push_back(rules_.text("True"));
        parts.push_back(rules_.text("False"));
      }
      if (std::find(types.begin(), types.end(), "null") != types.end()) parts.push_back(rules_.text("None"));
      if (!is_strict(tool)) value = rules_.choice(std::move(parts));
    }
    return rules_.sequence(
        {rules_.text(tags().before_key + key + tags().after_key), value, rules_.text(tags().after_value)});
  }

  // Any text that the parser of calls takes as one value: with no closing tag that something follows which
  // may follow it, and without the tag of another parameter.
  ExprId raw_text(const Json& properties) {
    const ExprId space =
        rules_.repeat(rules_.chars({{' ', ' '}, {'\t', '\t'}, {'\r', '\r'}, {'\n', '\n'}}), 0, -1);
    std::vector<ExprId> keys;
    if (properties.is_object())
      for (const auto& item : properties.items()) keys.push_back(rules_.text(item.key()));
    const bool qwen = syntax_.dialect == ToolDialect::Qwen;
    std::vector<ExprId> forbidden{rules_.sequence(
        {rules_.text(qwen ? "</parameter>" : "</arg_value>"), space,
         rules_.choice(qwen ? std::vector<ExprId>{rules_.text("<parameter="), rules_.text("</function>")}
                            : std::vector<ExprId>{rules_.text("<arg_key>")})})};
    if (!keys.empty())
      forbidden.push_back(rules_.sequence({rules_.text(tags().before_key), rules_.choice(std::move(keys)),
                                           rules_.text(qwen ? ">" : "</arg_key>")}));
    return any_text(std::move(forbidden));
  }

  std::span<const Tool> tools_;
  const ToolCallSyntax& syntax_;
  const size_t most_any_order_;
  RuleSet rules_;
  JsonRules json_;
  std::vector<std::unique_ptr<Json>> documents_;
  std::vector<std::string> ignored_;
};

}  // namespace

ToolDialect tool_dialect(std::string_view chat_template) {
  if (chat_template.find("<function=") != std::string_view::npos) return ToolDialect::Qwen;
  if (chat_template.find("<arg_key>") != std::string_view::npos) return ToolDialect::Laguna;
  return ToolDialect::Hermes;
}

std::string source_of_tool_calls(std::span<const Tool> tools, const ToolCallSyntax& syntax) {
  std::string source = fmt::format("calls {} {} {} {} {} {}\n", static_cast<int>(syntax.dialect),
                                   static_cast<int>(syntax.grammar), syntax.keep_names, syntax.parallel,
                                   syntax.open.value_or(-1), syntax.close.value_or(-1));
  for (const Tool& tool : tools)
    source += fmt::format("{} {} {}\n", Json(tool.name).dump(), tool.strict,
                          tool.parameters.dump(-1, ' ', false, Json::error_handler_t::replace));
  return source;
}

Result<SchemaGrammar> compile_tool_calls(std::span<const Tool> tools, const ToolCallSyntax& syntax) {
  try {
    Result<SchemaGrammar> calls = Error{};
    for (const size_t most : kMostAnyOrder) {
      calls = ToolRules(tools, syntax, most).compile();
      if (calls) break;
    }
    return calls;
  } catch (const Refused& refused) {
    return Error{ErrorCode::InvalidArgument, refused.what()};
  }
}

}  // namespace thermo
