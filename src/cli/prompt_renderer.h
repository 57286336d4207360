// From the turns of a conversation to the ids of a prompt, through the model's chat template.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/options/options.h"
#include "tokenizer/bpe.h"

namespace thermo {

struct TemplateFlags {
  std::string chat_template = {};       // Jinja text, or "chatml"; empty: the model's own
  std::string chat_template_file = {};  // empty: none
  std::string kwargs = {};              // a JSON object for the template
  std::string reasoning = "auto";       // on, off, auto
};
void add_template_options(OptionSet& set, TemplateFlags& flags);

struct Turn {
  std::string role;  // "system", "user", "assistant"
  std::string content;
  std::string reasoning;  // of an assistant
};

struct RenderedPrompt {
  std::vector<int32_t> ids;
  bool in_reasoning = false;  // the answer begins inside an open <think>
};

class PromptRenderer {
 public:
  // `tokenizer` outlives this. Throws ConfigError: no template, one that is broken, kwargs that are no JSON
  // object.
  PromptRenderer(const Tokenizer& tokenizer, const TemplateFlags& flags);
  ~PromptRenderer();

  // The prompt for the next answer. `thinking` wins over --reasoning; nullopt: as the options say. Throws
  // ConfigError with the template's own message when it refuses the turns.
  RenderedPrompt render(std::span<const Turn> turns, std::optional<bool> thinking = std::nullopt) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Whether these ids end inside an open <think>.
bool ends_in_reasoning(const Tokenizer& tokenizer, std::span<const int32_t> ids);

}  // namespace thermo
