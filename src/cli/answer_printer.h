// Answers for people, as they are made.
#pragma once

#include <string>

#include "chat/answer.h"
#include "chat/text_model.h"
#include "cli/options/model_options.h"
#include "cli/terminal.h"

namespace thermo {

// Reasoning dim, content plain, one line end at the end.
class AnswerPrinter {
 public:
  // Reasoning goes to stdout if that is a terminal, else to stderr if it was asked for.
  AnswerPrinter(const Terminal& terminal, bool show_reasoning);
  void print(const AnswerParser::Events& events);
  // Ends the last line, if the answer has not done so itself.
  void finish();

 private:
  enum class Reasoning { Hide, Stdout, Stderr };
  void print_reasoning(const std::string& piece);
  void print_content(const std::string& piece);
  void close_reasoning();

  const Terminal& terminal_;
  Reasoning reasoning_;
  bool reasoning_open_ = false;
  bool wrote_content_ = false;
  char last_ = '\n';
};

// Runs the request with a progress line and through `printer` (nullptr: in silence). Ctrl-C ends the answer
// (within an InterruptScope).
Answer print_answer(TokenService& service, const Tokenizer& tokenizer, const AnswerRequest& request,
                    const Terminal& terminal, AnswerPrinter* printer);

// Loads the weights, with a progress line, and notes what is unusual about the options.
void load_model(TextModel& model, EngineOptions options, const EngineFlags& flags, const Terminal& terminal);

}  // namespace thermo
