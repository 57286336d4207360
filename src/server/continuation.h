// An answer that can go on where it ended: what was written so far, and how it ended.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "chat/answer_parser.h"
#include "engine/token_service.h"

namespace thermo {

struct Continuation {
  std::vector<TokenId> written = {};   // by all runs
  size_t n_shown = 0;                  // bytes of text that were sent
  size_t n_to_skip = 0;                // bytes of the next text that an earlier run has shown
  std::optional<uint64_t> seed = {};   // of the first run
  std::string finish_reason = {};      // of the last run; "cancelled", "error"
  bool single = true;                  // one answer, without calls of tools
  std::optional<int> max_tokens = {};  // of the next run, instead of the request's own

  bool can_continue() const {
    return single && (finish_reason == "length" || (finish_reason == "cancelled" && !written.empty()));
  }
  // Before a run: `parser` and the constraint of `tokens` are brought to the end of what was written, which
  // follows the prompt. `n_ctx`: tokens of the context.
  void resume(AnswerParser& parser, TokenRequest& tokens, int n_ctx);
  // Drops what an earlier run has shown, and counts what is shown now.
  void keep_new(AnswerParser::Events& events);
};

}  // namespace thermo
