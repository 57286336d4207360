// The options that constrain an answer, and what they become.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "chat/answer_constraint.h"
#include "chat/text_model.h"
#include "cli/options/options.h"

namespace thermo {

struct ConstraintFlags {
  std::string grammar, grammar_file;          // GBNF; empty: none
  std::string json_schema, json_schema_file;  // empty: none
  std::optional<std::string> budget_message;  // nullopt: the usual one
};
// Section "Format".
void add_constraint_options(OptionSet& set, ConstraintFlags& flags);

struct ReasoningLimits {
  bool may_reason = true;
  int budget = -1;
};
// What the answers may say; nullptr: anything. Reads files. Throws ConfigError.
std::shared_ptr<const AnswerRules> answer_rules(const ConstraintFlags& flags, const TextModel& model,
                                                const ReasoningLimits& reasoning);

}  // namespace thermo
