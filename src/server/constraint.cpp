#include "server/constraint.h"

#include <fmt/format.h>

#include <algorithm>

#include "grammar/gbnf.h"
#include "grammar/json_schema.h"

namespace thermo {
namespace {

constexpr int kLeastReply = 16;  // tokens that the end of a thought leaves for what follows it

std::shared_ptr<const Grammar> grammar_of(const OutputFormat& format, GrammarCache& grammars,
                                          std::vector<std::string>& ignored) {
  const auto schema = [&](bool strict) {
    const std::string source = fmt::format(
        "schema {} {}", strict, format.schema.dump(-1, ' ', false, Json::error_handler_t::replace));
    const Result<SchemaGrammar> compiled =
        grammars.get(source, [&] { return compile_json_schema(format.schema, {.strict = strict}); });
    if (!compiled) throw ApiError(400, "invalid_json_schema", compiled.error().message, format.path);
    for (const std::string& path : compiled->ignored) ignored.push_back(format.path + path);
    return compiled->grammar;
  };
  switch (format.kind) {
    case OutputFormat::Kind::Text:
      return nullptr;
    case OutputFormat::Kind::JsonObject:
      return format.schema.is_null() ? any_json_object() : schema(false);
    case OutputFormat::Kind::JsonSchema:
      return schema(format.strict);
    case OutputFormat::Kind::Grammar:
      break;
  }
  const Result<SchemaGrammar> parsed = grammars.get("gbnf " + format.grammar, [&]() -> Result<SchemaGrammar> {
    const Result<std::shared_ptr<const Grammar>> one = parse_gbnf(format.grammar);
    if (!one) return one.error();
    return SchemaGrammar{*one, {}};
  });
  if (!parsed) throw ApiError(400, "invalid_grammar", parsed.error().message, format.path);
  return parsed->grammar;
}

const char* format_error_code(const OutputFormat& format) {
  return format.kind == OutputFormat::Kind::Text      ? "invalid_tool_schema"
         : format.kind == OutputFormat::Kind::Grammar ? "invalid_grammar"
                                                      : "invalid_json_schema";
}

}  // namespace

ApiError lost_format(const OutputFormat& format) {
  return {400, format_error_code(format), AnswerConstraint::why_lost(),
          format.kind == OutputFormat::Kind::Text ? "tools" : format.path};
}

std::vector<std::shared_ptr<AnswerConstraint>> make_constraints(const GenerationRequest& request,
                                                                const ServedModel& model,
                                                                const ServerOptions& server,
                                                                bool in_reasoning, int max_tokens, size_t n,
                                                                std::vector<std::string>& ignored) {
  ConstraintOptions options;
  options.may_reason = request.dialect != Dialect::Completions &&
                       request.reasoning_format != ReasoningFormat::InText && request.thinking != false;
  // Some templates leave it to the model to open a thought.
  const bool may_open = options.may_reason && model.chat_template.find("think>") != std::string::npos;
  const bool thinks = in_reasoning || may_open;
  if (thinks) options.reasoning_budget = request.thinking_budget.value_or(server.reasoning_budget);
  if (!server.budget_message.empty()) options.budget_message = server.budget_message;
  if (thinks) {
    // So much of the answer is kept for what follows the reasoning.
    const int reserve = std::min(server.reply_reserve, max_tokens / 4), most = max_tokens - reserve;
    options.keeps_reserve = options.reasoning_budget < 0 || most < options.reasoning_budget;
    if (options.keeps_reserve) {
      options.reasoning_budget = most;
      // The sentence that ends the reasoning is written out of it, too.
      if (static_cast<int>(model.tokenizer->encode(options.budget_message).size()) + kLeastReply > reserve)
        options.budget_message.clear();
    }
  }
  options.ends_loops = thinks && server.loop_guard;
  options.grammar = grammar_of(request.format, *model.grammars, ignored);
  options.grammars = model.grammars;
  const CallChoice& choice = request.tool_choice;
  if (choice.mode != CallChoice::Mode::None)
    for (const Tool& tool : request.tools)
      if (choice.names.empty() ||
          std::find(choice.names.begin(), choice.names.end(), tool.name) != choice.names.end())
        options.tools.push_back(tool);
  options.tool_choice = choice.mode == CallChoice::Mode::Required ? ToolChoice::Required : ToolChoice::Auto;
  options.tool_dialect = tool_dialect(model.chat_template);
  options.tool_grammar = server.tool_grammar;
  options.keep_tool_names = !choice.names.empty();
  options.parallel_calls = request.parallel_tools;
  // A thought can be ended from outside, too.
  if (!thinks && options.grammar == nullptr && options.tools.empty()) return {};

  const Result<std::shared_ptr<const AnswerRules>> rules =
      AnswerRules::compile(*model.tokenizer, model.trie, options);
  if (!rules && rules.error().code == ErrorCode::Unsupported)
    throw ApiError(400, format_error_code(request.format), rules.error().message, request.format.path);
  if (!rules) throw ApiError(400, "invalid_tool_schema", rules.error().message, "tools");
  for (const std::string& path : (*rules)->ignored()) ignored.push_back(path);
  std::vector<std::shared_ptr<AnswerConstraint>> constraints;
  for (size_t i = 0; i < n; ++i)
    constraints.push_back(std::make_shared<AnswerConstraint>(*rules, in_reasoning));
  return constraints;
}

}  // namespace thermo
