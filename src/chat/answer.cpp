#include "chat/answer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <utility>

#include "base/error.h"

namespace thermo {
namespace {

// From the engine's thread to the one that waits for the answer.
class EventQueue {
 public:
  void push(TokenEvent event) {
    {
      const std::lock_guard lock(mutex_);
      events_.push_back(std::move(event));
    }
    changed_.notify_one();
  }
  // What has come; nothing after a few milliseconds.
  std::vector<TokenEvent> take() {
    constexpr std::chrono::milliseconds kPatience{20};
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kPatience, [this] { return !events_.empty(); });
    return std::exchange(events_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<TokenEvent> events_;
};

struct CancelAtEnd {
  TokenService& service;
  RequestHandle handle;
  ~CancelAtEnd() { service.cancel(handle); }  // no effect on one that has ended
};

std::vector<GeneratedToken> picked(std::span<const GeneratedToken> tokens, std::span<const size_t> indices) {
  std::vector<GeneratedToken> list;
  for (const size_t index : indices) list.push_back(tokens[index]);
  return list;
}

[[noreturn]] void throw_step_error(const Error& error) {
  ExitCode code = ExitCode::Internal;
  if (error.code == ErrorCode::OutOfMemory) code = ExitCode::Memory;
  if (error.code == ErrorCode::DeviceFault) code = ExitCode::DeviceFault;
  if (error.code == ErrorCode::Unsupported) code = ExitCode::Model;
  if (error.code == ErrorCode::InvalidArgument || error.code == ErrorCode::ContextFull)
    code = ExitCode::Usage;
  throw ThermoError(code, error.message, error.remedy);
}

}  // namespace

void AnswerStats::take(const TokenUsage& usage) {
  n_prompt = usage.n_prompt;
  n_cached = usage.n_cached;
  n_completion = usage.n_completion;
  queue_seconds = usage.queue_seconds;
  prompt_seconds = usage.prompt_seconds;
  predicted_seconds = usage.predicted_seconds;
  first_token_seconds = usage.first_token_seconds;
  seed = usage.seed;
  draft = usage.draft;
}

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

void take_result(const AnswerParser& parser, const AnswerConstraint* constraint, FinishReason reason,
                 std::span<const GeneratedToken> tokens, Answer& answer) {
  answer.context_full = reason == FinishReason::ContextFull;
  answer.finish_reason = reason == FinishReason::Length || answer.context_full ? "length" : "stop";
  answer.stop_text = parser.matched_stop();
  if (parser.stopped()) answer.finish_reason = "stop";
  answer.tool_calls = parser.calls();
  answer.repairs = parser.repairs();
  const bool called = std::any_of(answer.tool_calls.begin(), answer.tool_calls.end(),
                                  [](const ToolCall& call) { return call.complete; });
  if (answer.finish_reason == "stop" && called) answer.finish_reason = "tool_calls";
  answer.reasoning = parser.reasoning();
  answer.content = parser.content();
  answer.n_reasoning_tokens = parser.n_reasoning_tokens();
  answer.n_call_tokens = static_cast<int>(parser.call_tokens().size());
  if (constraint != nullptr) {
    if (const char* how = constraint->reasoning_close()) answer.stats.reasoning_close = how;
    answer.n_forced_tokens = constraint->n_forced();
    answer.n_forced_reasoning_tokens = constraint->n_forced_reasoning();
  } else if (!answer.reasoning.empty() && (!answer.content.empty() || called)) {
    answer.stats.reasoning_close = "natural";
  }
  if (tokens.empty()) return;
  answer.logprobs = {.content = picked(tokens, parser.content_tokens()),
                     .reasoning = picked(tokens, parser.reasoning_tokens()),
                     .calls = picked(tokens, parser.call_tokens())};
}

AnswerLogprobs take_logprobs(AnswerParser& parser, std::span<const GeneratedToken> tokens, bool all) {
  if (tokens.empty()) return {};
  AnswerLogprobs taken{.content = picked(tokens, parser.take_content_tokens())};
  if (!all) return taken;
  taken.reasoning = picked(tokens, parser.take_reasoning_tokens());
  taken.calls = picked(tokens, parser.take_call_tokens());
  return taken;
}

std::function<bool(TokenId)> stop_watch(const Tokenizer& tokenizer, const AnswerOptions& options) {
  if (options.stops.empty()) return {};
  return [parser = std::make_shared<AnswerParser>(tokenizer, options)](TokenId token) {
    parser->push(token);
    return parser->stopped();
  };
}

Answer generate_answer(TokenService& service, const Tokenizer& tokenizer, const AnswerRequest& request,
                       const AnswerObserver& observer) {
  const auto n_prompt = static_cast<int>(request.prompt.size());
  TokenRequest asked;
  asked.prompt = request.prompt;
  asked.marks = {n_prompt};  // a later turn that spells the answer differently comes back to here
  asked.options.sampling = request.sampling;
  // More than the context holds is clamped, not refused.
  const int room = service.n_ctx() - n_prompt + 1;
  asked.options.max_tokens = request.max_tokens < 0 ? -1 : std::min(request.max_tokens, room);
  asked.options.stop_tokens.assign(tokenizer.vocab().end_of_generation().begin(),
                                   tokenizer.vocab().end_of_generation().end());
  std::shared_ptr<AnswerConstraint> constraint;
  if (request.rules)
    constraint = std::make_shared<AnswerConstraint>(
        request.rules, request.answer.split_reasoning && request.answer.starts_in_reasoning);
  asked.options.constraint = constraint;
  asked.options.ends_after = stop_watch(tokenizer, request.answer);
  const auto events = std::make_shared<EventQueue>();  // an observer may throw while the request goes on
  asked.on_event = [events](TokenEvent event) { events->push(std::move(event)); };
  const Result<RequestHandle> handle = service.submit(std::move(asked));
  if (!handle) throw_step_error(handle.error());
  const CancelAtEnd cancel_at_end{service, *handle};

  Answer answer;
  AnswerParser parser(tokenizer, request.answer);
  std::vector<GeneratedToken> tokens;
  int n_taken = 0;
  bool stopping = false;
  const auto look = [&] {
    if (stopping) return;
    answer.interrupted = observer.cancelled && observer.cancelled();
    stopping = answer.interrupted || parser.stopped();
    if (stopping) service.cancel(*handle);
  };
  const auto show = [&observer](const AnswerParser::Events& parsed) {
    if (observer.on_events && !parsed.empty()) observer.on_events(parsed);
  };
  for (;;) {
    for (const TokenEvent& event : events->take()) {
      if (const auto* read = std::get_if<PromptRead>(&event); read && observer.on_prompt && !stopping)
        observer.on_prompt(read->done, read->total);
      if (const auto* written = std::get_if<TokensWritten>(&event)) {
        if (constraint && constraint->is_lost()) throw ConfigError(AnswerConstraint::why_lost());
        AnswerParser::Events parsed;  // of all tokens of a step: they are shown at once
        for (const GeneratedToken& token : written->tokens) {
          if (stopping) break;  // written before the service heard of it
          ++n_taken;
          if (!token.logprobs.empty()) tokens.push_back(token);
          AnswerParser::Events more = parser.push(token.id);
          std::move(more.begin(), more.end(), std::back_inserter(parsed));
          look();
        }
        show(parsed);
      }
      const auto* const ended = std::get_if<TokensEnded>(&event);
      if (ended == nullptr) continue;
      if (ended->error) throw_step_error(*ended->error);
      show(parser.finish(ended->reason == FinishReason::Stop && !stopping));
      answer.stats.take(ended->usage);
      if (stopping) answer.stats.n_completion = n_taken;
      take_result(parser, constraint.get(), stopping ? FinishReason::Cancelled : ended->reason, tokens,
                  answer);
      return answer;
    }
    look();
  }
}

}  // namespace thermo
