// A server answers, over its OpenAI API: ours, or any other.
#pragma once

#include "cli/chat/chat_partner.h"

namespace thermo {

struct ServerAddress {
  std::string url;    // "http://127.0.0.1:8080"
  std::string key;    // empty: none
  std::string model;  // empty: whichever it has
};

class ServerPartner : public ChatPartner {
 public:
  // Throws ConfigError for flags that a request cannot bring. `terminal` outlives this.
  ServerPartner(ServerAddress address, const AnswerFlags& flags, const Terminal& terminal);

  void use(const AnswerFlags& flags) override;
  Answer answer(const std::string& system, std::vector<Turn>& turns, std::optional<bool> thinking,
                AnswerPrinter& printer, size_t& n_dropped) override;
  std::string size_of(const std::string& text) const override;
  std::vector<std::string> facts() const override;

 private:
  ServerAddress address_;
  const Terminal& terminal_;
  Json body_;  // of every request, but for its messages
};

}  // namespace thermo
