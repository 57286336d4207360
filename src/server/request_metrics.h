// What a finished answer adds to the counters.
#pragma once

#include <span>
#include <string>

#include "chat/answer.h"
#include "server/api/generation_request.h"
#include "server/http/http_message.h"
#include "server/metrics.h"
#include "server/prompt.h"

namespace thermo {

// Tokens, times, cache, drafts, format and calls of one answer to `request`.
void count_answer(Metrics& metrics, const GenerationRequest& request, const Answer& answer);
// What is known of an answer that will not end.
void take_unfinished(const AnswerParser& parser, const AnswerStats& so_far, Answer& answer);
// A request at its end, however it came there: counts it with its answers and writes its line into the log.
struct EndedRequest {
  const GenerationRequest& request;
  const HttpRequest& http;
  const std::string& key_name;
  const char* outcome;                 // "ok", "error", "cancelled"
  std::string phase;                   // in which it was cancelled: "queued", "prefill", "decode"
  double seconds;                      // since it came
  std::vector<const Answer*> answers;  // also those that did not end
};
void count_request(Metrics& metrics, const ServerOptions& options, const EndedRequest& ended);
// How long its rules took to make and to follow.
void count_constraints(Metrics& metrics, const PreparedRequest& prepared);
// A prompt that left a known text and had to be computed from further back; the log can say where.
void note_divergence(Metrics& metrics, const Tokenizer& tokenizer, const std::string& request_id,
                     std::span<const TokenId> prompt, const TokenUsage& usage);

}  // namespace thermo
