// The options of an answer, for `run` and `chat`, and what they become.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "chat/answer.h"
#include "chat/prompt_renderer.h"
#include "chat/text_model.h"
#include "cli/options/constraint_options.h"
#include "cli/options/model_options.h"

namespace thermo {

struct TemplateFlags {
  std::string chat_template = {};       // Jinja text, or "chatml"; empty: the model's own
  std::string chat_template_file = {};  // empty: none
  std::string kwargs = {};              // a JSON object for the template
  std::string reasoning = "auto";       // on, off, auto
  int reasoning_budget = -1;            // tokens; -1: any number, 0: no reasoning
};
// Section "Template".
void add_template_options(OptionSet& set, TemplateFlags& flags);
// Reads the file. Throws ConfigError.
TemplateOptions template_options(const TemplateFlags& flags);

struct AnswerFlags {
  int max_tokens = -1;
  std::string system_prompt, system_prompt_file;
  std::vector<std::string> stops;
  std::optional<int> n_logprobs;
  bool show_reasoning = false;
  ConstraintFlags constraint;
  SamplingFlags sampling;
  TemplateFlags chat_template;
};
// Sections "Answer", "Sampling" and "Template".
void add_answer_options(OptionSet& set, AnswerFlags& flags);

// The system prompt from its option or its file; empty: none.
std::string system_prompt(const AnswerFlags& flags);

// Throws ConfigError: -n and --stop that no answer can have.
void check_limits(const AnswerFlags& flags);

// What every answer of these flags has in common; the prompt is left empty. Throws ConfigError.
AnswerRequest answer_request(const AnswerFlags& flags, const TextModel& model, bool raw);

}  // namespace thermo
