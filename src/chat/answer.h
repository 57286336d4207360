// One answer: prompt ids in, events out as they come, with what was measured on the way.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "chat/answer_constraint.h"
#include "chat/answer_parser.h"
#include "engine/token_service.h"

namespace thermo {

struct AnswerRequest {
  std::vector<TokenId> prompt;
  SamplingParams sampling;
  int max_tokens = -1;
  AnswerOptions answer;
  std::shared_ptr<const AnswerRules> rules;  // what it may say; nullptr: anything
};

struct AnswerStats {
  int n_prompt = 0;            // all ids of the prompt
  int n_cached = 0;            // of them, reused from the conversation before
  int n_completion = 0;        // sampled ids, the end token included
  double queue_seconds = 0.0;  // before anything was computed
  double prompt_seconds = 0.0;
  double predicted_seconds = 0.0;
  double first_token_seconds = 0.0;  // from the start of the request
  uint64_t seed = 0;
  std::string reasoning_close;  // how reasoning ended: "natural", "budget", "reserve", "client", "loop",
                                // "tool_call"; empty: there was none, or it goes on
  std::optional<double> experts_hot_ratio;  // of the uses of experts meanwhile; nullopt: none were counted
  DraftTelemetry draft;                     // of this answer

  void take(const TokenUsage& usage);
  double prompt_rate() const;     // tokens per second; 0 when there is nothing to divide
  double predicted_rate() const;  // over n - 1 intervals
  // "prompt 12 tokens, 845.1 tok/s | answer 20 tokens, 402.7 tok/s"
  std::string describe() const;
};

// Tokens of an answer with their log probabilities.
struct AnswerLogprobs {
  std::vector<GeneratedToken> content = {};                // the visible ones
  std::vector<GeneratedToken> reasoning = {}, calls = {};  // with their markers
};

struct Answer {
  std::string reasoning;
  std::string content;
  std::vector<ToolCall> tool_calls;
  std::string finish_reason;   // "stop", "length" or "tool_calls"
  std::string stop_text = {};  // the stop text that ended it; empty: none did
  bool interrupted = false;
  bool context_full = false;
  int n_reasoning_tokens = 0, n_call_tokens = 0;
  int n_forced_tokens = 0, n_forced_reasoning_tokens = 0;  // written because nothing else could be
  ToolCallRepairs repairs;
  AnswerLogprobs logprobs;                      // empty unless asked for
  std::vector<GeneratedToken> prompt_logprobs;  // of the prompt's tokens; the first one has none
  AnswerStats stats;
};

// What the parser has after finish(), and how the answer and its reasoning ended. `constraint`: that of the
// answer; nullptr: anything could be said. `tokens`: all that were pushed, with their log probabilities;
// empty when nobody asked for them.
void take_result(const AnswerParser& parser, const AnswerConstraint* constraint, FinishReason reason,
                 std::span<const GeneratedToken> tokens, Answer& answer);

// Of `tokens`, all that were pushed, those whose text came since the last time; `all`: also of reasoning and
// calls.
AnswerLogprobs take_logprobs(AnswerParser& parser, std::span<const GeneratedToken> tokens, bool all);

// For GenerateOptions::ends_after: follows an answer to its stop text. Empty: it has none. `tokenizer`
// outlives it.
std::function<bool(TokenId)> stop_watch(const Tokenizer& tokenizer, const AnswerOptions& options);

// Who follows an answer while it is made; each may be empty.
struct AnswerObserver {
  std::function<void(int done, int total)> on_prompt;  // tokens of the prompt
  std::function<void(const AnswerParser::Events&)> on_events;
  std::function<bool()> cancelled;  // asked after each token, and every few milliseconds
};

// Asks the service and waits for the answer; the observer is called on this thread. Throws ConfigError when
// the prompt does not fit the context, or when the answer cannot be held to its rules.
Answer generate_answer(TokenService& service, const Tokenizer& tokenizer, const AnswerRequest& request,
                       const AnswerObserver& observer);

// Throws ConfigError when a prompt of this many tokens leaves no room for an answer.
void check_prompt_fits(size_t n_prompt, int n_ctx, int n_ctx_train);

}  // namespace thermo
