#include "chat/answer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/error.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

[[noreturn]] void throw_step_error(const Error& error) {
  ExitCode code = ExitCode::Internal;
  if (error.code == ErrorCode::OutOfMemory) code = ExitCode::Memory;
  if (error.code == ErrorCode::DeviceFault) code = ExitCode::DeviceFault;
  if (error.code == ErrorCode::InvalidArgument || error.code == ErrorCode::ContextFull)
    code = ExitCode::Usage;
  throw ThermoError(code, error.message, error.remedy);
}

}  // namespace

double AnswerStats::prompt_rate() const {
  return prompt_seconds > 0.0 ? (n_prompt - n_cached) / prompt_seconds : 0.0;
}

double AnswerStats::predicted_rate() const {
  return predicted_seconds > 0.0 && n_completion > 1 ? (n_completion - 1) / predicted_seconds : 0.0;
}

std::string AnswerStats::describe() const {
  const std::string cached = n_cached > 0 ? fmt::format(" ({} cached)", n_cached) : "";
  return fmt::format("prompt {} tokens{}, {:.1f} tok/s | answer {} tokens, {:.1f} tok/s", n_prompt, cached,
                     prompt_rate(), n_completion, predicted_rate());
}

void check_prompt_fits(size_t n_prompt, int n_ctx, int n_ctx_train) {
  if (n_prompt < static_cast<size_t>(n_ctx)) return;
  const bool can_grow = n_ctx < n_ctx_train;
  const std::string advice =
      can_grow ? fmt::format("shorten the prompt, or use a larger context (the model was made for {})",
                             n_ctx_train)
               : std::string("shorten the prompt");
  throw ConfigError(
      fmt::format("the prompt has {} tokens and the context holds {}, with no room for an answer: {}",
                  n_prompt, n_ctx, advice),
      can_grow ? Remedy::LargerContext : Remedy::None);
}

void take_result(const AnswerParser& parser, FinishReason reason, std::span<const GeneratedToken> tokens,
                 Answer& answer) {
  answer.context_full = reason == FinishReason::ContextFull;
  answer.finish_reason = reason == FinishReason::Length || answer.context_full ? "length" : "stop";
  answer.stop_text = parser.matched_stop();
  if (parser.stopped()) answer.finish_reason = "stop";
  answer.tool_calls = parser.calls();
  if (answer.finish_reason == "stop" && !answer.tool_calls.empty()) answer.finish_reason = "tool_calls";
  answer.reasoning = parser.reasoning();
  answer.content = parser.content();
  answer.n_reasoning_tokens = parser.n_reasoning_tokens();
  if (!tokens.empty())
    for (const size_t index : parser.content_tokens()) answer.content_logprobs.push_back(tokens[index]);
}

Answer generate_answer(Session& session, const Tokenizer& tokenizer, int n_ctx, const AnswerRequest& request,
                       const AnswerObserver& observer) {
  const auto cancelled = [&observer] { return observer.cancelled && observer.cancelled(); };
  const auto show = [&observer](const AnswerParser::Events& events) {
    if (observer.on_events && !events.empty()) observer.on_events(events);
  };
  Answer answer;
  answer.finish_reason = "stop";
  answer.stats.n_prompt = static_cast<int>(request.prompt.size());
  const Clock::time_point start = Clock::now();
  const Result<int> reused = session.set_tokens(request.prompt, [&](int done, int total) {
    if (observer.on_prompt) observer.on_prompt(done, total);
    return !cancelled();
  });
  if (!reused && reused.error().code == ErrorCode::Cancelled) {
    answer.interrupted = true;
    return answer;
  }
  if (!reused) throw_step_error(reused.error());
  answer.stats.n_cached = *reused;
  session.checkpoint();  // a later turn that spells the answer differently comes back to here
  answer.stats.prompt_seconds = seconds_since(start);

  GenerateOptions options;
  options.sampling = request.sampling;
  // More than the context holds is clamped, not refused.
  const int room = n_ctx - answer.stats.n_prompt + 1;
  options.max_tokens = request.max_tokens < 0 ? -1 : std::min(request.max_tokens, room);
  options.stop_tokens.assign(tokenizer.vocab().end_of_generation().begin(),
                             tokenizer.vocab().end_of_generation().end());
  if (request.rules)
    options.constraint = std::make_shared<AnswerConstraint>(
        request.rules, request.answer.split_reasoning && request.answer.starts_in_reasoning);

  AnswerParser parser(tokenizer, request.answer);
  std::vector<GeneratedToken> tokens;
  const Clock::time_point generation_start = Clock::now();
  Clock::time_point first_token = generation_start, last_token = generation_start;
  Result<GenerateResult> result = session.generate(options, [&](const GeneratedToken& token) {
    last_token = Clock::now();
    if (answer.stats.n_completion++ == 0) first_token = last_token;
    if (!token.logprobs.empty()) tokens.push_back(token);
    show(parser.push(token.id));
    answer.interrupted = cancelled();
    return !parser.stopped() && !answer.interrupted;
  });
  if (!result) throw_step_error(result.error());
  show(parser.finish(result->reason == FinishReason::Stop));

  if (result->reason == FinishReason::Stop) {
    ++answer.stats.n_completion;  // the end token
    last_token = Clock::now();
  }
  answer.stats.seed = result->seed;
  answer.stats.draft = result->draft;
  answer.stats.first_token_seconds = std::chrono::duration<double>(first_token - start).count();
  answer.stats.predicted_seconds = std::chrono::duration<double>(last_token - first_token).count();
  take_result(parser, result->reason, tokens, answer);
  return answer;
}

}  // namespace thermo
