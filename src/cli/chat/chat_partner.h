// Who answers a conversation: a model in this program, or a server.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "chat/answer.h"
#include "chat/prompt_renderer.h"
#include "cli/answer_printer.h"
#include "cli/options/answer_options.h"

namespace thermo {

// A message that could not be answered; the text says why.
struct NoAnswer {
  std::string why;
};

class ChatPartner {
 public:
  virtual ~ChatPartner() = default;

  // For later answers. Throws ConfigError.
  virtual void use(const AnswerFlags& flags) = 0;
  // To the last turn, through `printer`. May drop the oldest turns where it was told so, and says how many.
  // Throws NoAnswer. Ctrl-C ends the answer.
  virtual Answer answer(const std::string& system, std::vector<Turn>& turns, std::optional<bool> thinking,
                        AnswerPrinter& printer, size_t& n_dropped) = 0;
  // "about 120 tokens".
  virtual std::string size_of(const std::string& text) const = 0;
  // What there is to say between two answers, as lines.
  virtual std::vector<std::string> facts() const = 0;
};

}  // namespace thermo
