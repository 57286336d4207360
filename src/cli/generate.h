// One answer: prompt ids in, text out as it comes, with what was measured on the way.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/answer.h"
#include "cli/progress.h"
#include "cli/terminal.h"
#include "engine/engine.h"

namespace thermo {

struct AnswerRequest {
  std::vector<TokenId> prompt;
  SamplingParams sampling;
  int max_tokens = -1;
  AnswerOptions answer;
};

struct AnswerStats {
  int n_prompt = 0;      // all ids of the prompt
  int n_cached = 0;      // of them, reused from the conversation before
  int n_completion = 0;  // sampled ids, the end token included
  double prompt_seconds = 0.0;
  double predicted_seconds = 0.0;
  double first_token_seconds = 0.0;  // from the start of the request
  uint64_t seed = 0;

  double prompt_rate() const;     // tokens per second; 0 when there is nothing to divide
  double predicted_rate() const;  // over n - 1 intervals
  // "prompt 12 tokens, 845.1 tok/s | answer 20 tokens, 402.7 tok/s"
  std::string describe() const;
};

struct Answer {
  std::string reasoning;
  std::string content;
  std::string finish_reason;  // "stop" or "length"
  bool interrupted = false;
  bool context_full = false;
  int n_reasoning_tokens = 0;
  std::vector<GeneratedToken> content_logprobs;  // of the visible tokens; empty unless asked for
  AnswerStats stats;
};

// Runs the request in `session`, reusing what it holds. `show` gets every piece as it becomes certain. Ctrl-C
// ends the answer (within an InterruptScope). Throws ConfigError when the prompt does not fit the context.
Answer generate_answer(Session& session, const Tokenizer& tokenizer, int n_ctx, const AnswerRequest& request,
                       const Terminal& terminal, const std::function<void(const AnswerParser::Piece&)>& show);

// Throws ConfigError when a prompt of this many tokens leaves no room for an answer.
void check_prompt_fits(size_t n_prompt, int n_ctx, int n_ctx_train);

// Writes an answer for people: reasoning dim, content plain, one line end at the end.
class AnswerPrinter {
 public:
  enum class Reasoning { Hide, Stdout, Stderr };
  AnswerPrinter(const Terminal& terminal, Reasoning reasoning) : terminal_(terminal), reasoning_(reasoning) {}
  void print(const AnswerParser::Piece& piece);
  // Ends the last line, if the answer has not done so itself.
  void finish();

 private:
  void close_reasoning();

  const Terminal& terminal_;
  Reasoning reasoning_;
  bool reasoning_open_ = false;
  bool wrote_content_ = false;
  char last_ = '\n';
};

}  // namespace thermo
