#include "server/continuation.h"

#include <algorithm>

#include "base/utf8_chars.h"
#include "chat/answer_constraint.h"

namespace thermo {

void Continuation::resume(AnswerParser& parser, TokenRequest& tokens, int n_ctx) {
  finish_reason.clear();
  n_to_skip = 0;
  if (written.empty()) return;
  size_t n_held = n_shown;
  for (const TokenId token : written) {
    for (const AnswerEvent& event : parser.push(token)) n_held -= std::min(n_held, event.text.size());
    if (tokens.options.constraint != nullptr) tokens.options.constraint->accept(token);
    if (tokens.options.ends_after) tokens.options.ends_after(token);
  }
  n_to_skip = n_held;  // the end of a run shows what was held back, with its tokens
  parser.skip_tokens();
  tokens.prompt.insert(tokens.prompt.end(), written.begin(), written.end());
  tokens.options.sampling.seed = seed;
  const int room = n_ctx - static_cast<int>(tokens.prompt.size()) + 1;
  if (tokens.options.max_tokens > room) tokens.options.max_tokens = -1;
}

void Continuation::keep_new(AnswerParser::Events& events) {
  for (AnswerEvent& event : events) {
    size_t n = std::min(n_to_skip, event.text.size());
    n_to_skip -= n;
    while (n > 0 && n < event.text.size() && is_utf8_continuation(event.text[n])) ++n;
    event.text.erase(0, n);
    n_shown += event.text.size();
  }
  std::erase_if(events, [](const AnswerEvent& event) {
    const bool text = event.kind == AnswerEvent::Kind::Reasoning || event.kind == AnswerEvent::Kind::Content;
    return text && event.text.empty();
  });
}

}  // namespace thermo
