#include "cli/options/constraint_options.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/log.h"
#include "cli/input.h"
#include "grammar/gbnf.h"
#include "grammar/json_schema.h"

namespace thermo {
namespace {

std::shared_ptr<const Grammar> schema_grammar(const std::string& text, const std::string& source) {
  const Json schema = Json::parse(text, nullptr, false);
  if (schema.is_discarded())
    throw ConfigError(fmt::format("{}: this is not JSON; an example of a schema: {}", source,
                                  R"({"type": "object", "properties": {"name": {"type": "string"}}})"));
  Result<SchemaGrammar> compiled = compile_json_schema(schema);
  if (!compiled) throw ConfigError(fmt::format("{}: {}", source, compiled.error().message));
  for (const std::string& path : compiled->ignored)
    log_warning("schema", "{}: {} is not enforced", source, path);
  return compiled->grammar;
}

std::shared_ptr<const Grammar> grammar_of(const ConstraintFlags& flags) {
  const int n_given = !flags.grammar.empty() + !flags.grammar_file.empty() + !flags.json_schema.empty() +
                      !flags.json_schema_file.empty();
  if (n_given > 1)
    throw ConfigError(
        "--grammar, --grammar-file, --json-schema and --json-schema-file exclude each other: give one of "
        "them");
  if (!flags.json_schema.empty()) return schema_grammar(flags.json_schema, "--json-schema");
  if (!flags.json_schema_file.empty())
    return schema_grammar(read_text_file(flags.json_schema_file), flags.json_schema_file);
  if (n_given == 0) return nullptr;
  const bool in_file = !flags.grammar_file.empty();
  const std::string text = in_file ? read_text_file(flags.grammar_file) : flags.grammar;
  auto grammar = parse_gbnf(text);
  if (!grammar)
    throw ConfigError(
        fmt::format("{}: {}", in_file ? flags.grammar_file : "--grammar", grammar.error().message));
  return *grammar;
}

}  // namespace

void add_constraint_options(OptionSet& set, ConstraintFlags& flags) {
  set.section("Format");
  set.value("-j,--json-schema", "JSON", flags.json_schema,
            "the answer is JSON that fits this schema; {}: any JSON");
  set.value("-jf,--json-schema-file", "FILE", flags.json_schema_file, "file with the schema");
  set.value("--grammar", "TEXT", flags.grammar, "the answer follows this grammar, in llama.cpp's GBNF");
  set.value("--grammar-file", "FILE", flags.grammar_file, "file with the grammar");
  set.contradict_each_other({"--json-schema", "--json-schema-file", "--grammar", "--grammar-file"});
  set.value("--reasoning-budget-message", "TEXT", flags.budget_message,
            "text that ends the reasoning when it reaches --reasoning-budget")
      .advanced();
}

std::shared_ptr<const AnswerRules> answer_rules(const ConstraintFlags& flags, const TextModel& model,
                                                const ReasoningLimits& reasoning) {
  ConstraintOptions options;
  options.grammar = grammar_of(flags);
  if (!options.grammar && reasoning.budget <= 0) return nullptr;
  options.may_reason = reasoning.may_reason;
  options.reasoning_budget = reasoning.budget;
  if (model.card() && model.card()->thinking_terminator)
    options.budget_message = *model.card()->thinking_terminator;
  if (flags.budget_message) options.budget_message = *flags.budget_message;
  auto rules = AnswerRules::compile(model.tokenizer(), model.token_trie(), std::move(options));
  if (!rules) throw ConfigError(rules.error().message);
  return *rules;
}

}  // namespace thermo
