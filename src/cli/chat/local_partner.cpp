#include "cli/chat/local_partner.h"

#include <fmt/format.h>

#include <algorithm>

#include "experts/telemetry.h"

namespace thermo {

LocalPartner::LocalPartner(TextModel& model, const AnswerFlags& flags, bool context_shift,
                           const Terminal& terminal)
    : model_(model),
      context_shift_(context_shift),
      terminal_(terminal),
      renderer_(model.tokenizer(), template_options(flags.chat_template)),
      request_(answer_request(flags, model, false)),
      service_(model.engine(), EngineThreadOptions::for_one_user()) {}

void LocalPartner::use(const AnswerFlags& flags) {
  request_ = answer_request(flags, model_, false);
}

// The request's prompt from the turns. With --context-shift the oldest go until there is room for the answer:
// for -n tokens, or half of the context where that is less.
void LocalPartner::make_prompt(const std::string& system, std::vector<Turn>& turns,
                               std::optional<bool> thinking, size_t& n_dropped) {
  const int n_ctx = model_.engine().n_ctx();
  const int n_room = context_shift_ ? std::clamp(request_.max_tokens, 1, n_ctx / 2) : 1;
  const auto most = static_cast<size_t>(n_ctx - n_room);
  size_t first = 0;  // of the turns that stay
  while (true) {
    std::vector<Turn> all;
    if (!system.empty()) all.push_back({"system", system});
    all.insert(all.end(), turns.begin() + static_cast<std::ptrdiff_t>(first), turns.end());
    RenderedPrompt rendered = renderer_.render(all, {.thinking = thinking});
    const size_t n = rendered.ids.size();
    const bool can_drop = context_shift_ && turns.size() - first >= 3;
    if (n <= most || (!can_drop && n < static_cast<size_t>(n_ctx))) {
      turns.erase(turns.begin(), turns.begin() + static_cast<std::ptrdiff_t>(first));
      n_dropped = first;
      request_.prompt = std::move(rendered.ids);
      request_.answer.starts_in_reasoning = rendered.in_reasoning;
      return;
    }
    if (!can_drop)
      throw NoAnswer{context_shift_
                         ? fmt::format("the message has {} tokens and the context holds {}: shorten it, or "
                                       "start with a larger -c",
                                       n, n_ctx)
                         : fmt::format("the conversation has {} tokens and the context holds {}: /undo or "
                                       "/reset make room, or start with a larger -c or with --context-shift",
                                       n, n_ctx)};
    // A question goes with its answer.
    first += turns[first + 1].role == "assistant" ? 2 : 1;
  }
}

Answer LocalPartner::answer(const std::string& system, std::vector<Turn>& turns, std::optional<bool> thinking,
                            AnswerPrinter& printer, size_t& n_dropped) {
  make_prompt(system, turns, thinking, n_dropped);
  return print_answer(service_, model_.tokenizer(), request_, terminal_, &printer);
}

std::string LocalPartner::size_of(const std::string& text) const {
  return fmt::format("about {} tokens", model_.tokenizer().encode(text, {.parse_special = false}).size());
}

// Nothing is computed between answers.
std::vector<std::string> LocalPartner::facts() const {
  std::vector<std::string> lines = {
      fmt::format("{} of {} tokens in the context", service_.state().slots[0].n_held, service_.n_ctx())};
  if (std::string experts = describe(model_.engine()); !experts.empty()) lines.push_back(std::move(experts));
  return lines;
}

}  // namespace thermo
