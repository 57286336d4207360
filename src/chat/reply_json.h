// The reply objects of the OpenAI chat and completion APIs, and their parts.
#pragma once

#include <span>
#include <string>

#include "base/json.h"
#include "chat/answer.h"

namespace thermo {

// What a reply says about who made it.
struct ReplyIdentity {
  std::string model;
  std::string fingerprint;  // changes when the same request may give another answer
};

// One JSON object and a line end. `raw`: a text_completion object instead of a chat.completion.
std::string reply_json(const Answer& answer, const Tokenizer& tokenizer, const ReplyIdentity& identity,
                       bool raw);

Json usage_json(const AnswerStats& stats, int n_reasoning);
Json timings_json(const AnswerStats& stats);
// {"role", "content", ...}; the calls have their ids.
Json message_json(const Answer& answer);
// {"content": [entries], "refusal": null}; null without tokens.
Json logprobs_json(std::span<const GeneratedToken> tokens, const Tokenizer& tokenizer);
// The entries alone.
Json logprob_entries(std::span<const GeneratedToken> tokens, const Tokenizer& tokenizer);
// One entry of it: {"token", "logprob", "bytes"}.
Json logprob_entry(const TokenLogprob& logprob, const Tokenizer& tokenizer);

}  // namespace thermo
