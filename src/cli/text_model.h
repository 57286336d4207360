// What `run` and `chat` share: the tokenizer and the engine of a model, and the options of an answer.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/generate.h"
#include "cli/options/model_options.h"
#include "cli/prompt_renderer.h"
#include "gguf/gguf_file.h"

namespace thermo {

struct AnswerFlags {
  int max_tokens = -1;
  std::string system_prompt, system_prompt_file;
  std::vector<std::string> stops;
  std::optional<int> n_logprobs;
  bool show_reasoning = false;
  SamplingFlags sampling;
  TemplateFlags chat_template;
};
// Sections "Answer", "Sampling" and "Template".
void add_answer_options(OptionSet& set, AnswerFlags& flags);

// The system prompt from its option or its file; empty: none.
std::string system_prompt(const AnswerFlags& flags);

// A model with text. Members in the order of their lifetimes: the engine reads the file.
class TextModel {
 public:
  // Opens the file and reads the vocabulary; loads no weights. Throws LoadError.
  explicit TextModel(const std::string& model);

  // Loads the weights, with a progress line.
  void load(const EngineOptions& options, const Terminal& terminal);

  const GgufFile& file() const { return file_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  const std::string& id() const { return id_; }
  const ModelConfig& config() const { return config_; }
  int n_ctx_train() const { return config_.n_ctx_train; }
  Engine& engine() { return *engine_; }  // REQUIRES: load()

  // What every answer of these flags has in common; the prompt is left empty. Throws ConfigError.
  AnswerRequest make_request(const AnswerFlags& flags, bool raw) const;

 private:
  GgufFile file_;
  std::string id_;
  ModelConfig config_;  // before the vocabulary: an unknown architecture is the better message
  Tokenizer tokenizer_;
  std::unique_ptr<Engine> engine_;
};

// Which of the places for reasoning an answer uses.
AnswerPrinter::Reasoning reasoning_place(const Terminal& terminal, bool show_reasoning);

}  // namespace thermo
