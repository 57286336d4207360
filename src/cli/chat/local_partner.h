// A model of this program answers. The slot keeps its tokens between turns; only what is new is evaluated.
#pragma once

#include "chat/text_model.h"
#include "cli/chat/chat_partner.h"
#include "engine/engine_thread.h"

namespace thermo {

class LocalPartner : public ChatPartner {
 public:
  // The references outlive this. `context_shift`: old turns are dropped when the context is full.
  LocalPartner(TextModel& model, const AnswerFlags& flags, bool context_shift, const Terminal& terminal);

  void use(const AnswerFlags& flags) override;
  Answer answer(const std::string& system, std::vector<Turn>& turns, std::optional<bool> thinking,
                AnswerPrinter& printer, size_t& n_dropped) override;
  std::string size_of(const std::string& text) const override;
  std::vector<std::string> facts() const override;

 private:
  void make_prompt(const std::string& system, std::vector<Turn>& turns, std::optional<bool> thinking,
                   size_t& n_dropped);

  TextModel& model_;
  const bool context_shift_;
  const Terminal& terminal_;
  PromptRenderer renderer_;
  AnswerRequest request_;
  EngineThread service_;
};

}  // namespace thermo
