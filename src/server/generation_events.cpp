// What becomes of the engine's events: text for the client, and what is kept of an answer.
#include <algorithm>

#include "server/constraint.h"
#include "server/generation_impl.h"
#include "server/request_metrics.h"

namespace thermo {

void Generation::take(int index, TokenEvent event) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  if (auto* read = std::get_if<PromptRead>(&event)) {
    if (live_->state == "queued") live_->state = "prefill";
    live_->n_cached = choice.n_cached = read->n_cached;
    if (choice.started == Clock::time_point{}) choice.started = Clock::now();
    live_->n_prompt_done = choice.n_read = read->done;
    const double ms = std::chrono::duration<double>(Clock::now() - live_->since).count() * 1e3;
    if (streaming_ && request().return_progress)
      send(writer_->progress(read->done, read->total, read->n_cached, ms));
    if (read->done == read->total) submit_others(index);
  } else if (auto* prompt = std::get_if<PromptTokens>(&event)) {
    std::vector<GeneratedToken>& told = choice.answer.prompt_logprobs;
    told.insert(told.end(), prompt->tokens.begin(), prompt->tokens.end());
    const size_t n_prompt =
        prepared_.prompts[static_cast<size_t>(index) / static_cast<size_t>(request().n)].size();
    if (streaming_ && told.size() == n_prompt) send(writer_->echo(index, told));
  } else if (auto* written = std::get_if<TokensWritten>(&event)) {
    submit_others(index);
    if (!choice.stopping) take_tokens(index, written->tokens);
  } else {
    take_end(index, std::get<TokensEnded>(event));
  }
}

void Generation::take_tokens(int index, const std::vector<GeneratedToken>& tokens) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  if (!prepared_.constraints.empty() && prepared_.constraints[static_cast<size_t>(index)]->is_lost()) {
    if (!failure_) failure_ = lost_format(request().format);
    return;
  }
  AnswerParser::Events events;
  for (const GeneratedToken& token : tokens) {
    if (choice.n_tokens++ == 0) choice.first = Clock::now();
    choice.ids.push_back(token.id);
    if (live_->n_written++ == 0) live_->first_token = Clock::now();
    if (continuation_ != nullptr) continuation_->written.push_back(token.id);
    if (request().logprobs) choice.tokens.push_back(token);
    AnswerParser::Events more = choice.parser.push(token.id);
    if (request().logprobs) {
      show(index, std::move(more));  // each piece with its own tokens
    } else {
      events.insert(events.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
    }
    if (choice.parser.stopped()) {
      choice.stopping = true;
      model_.service->cancel(live_->handles[static_cast<size_t>(index)]);
      break;
    }
  }
  live_->state = choice.parser.in_reasoning() ? "reasoning" : "content";
  if (!choice.parser.calls().empty()) live_->state = "tool_call";
  show(index, std::move(events));
}

void Generation::show(int index, AnswerParser::Events events) {
  if (continuation_ != nullptr) continuation_->keep_new(events);
  if (!streaming_) return;
  EventPacer& pacer = choices_[static_cast<size_t>(index)].pacer;
  pacer.add(std::move(events));
  const std::optional<Clock::time_point> due = pacer.due();
  if (request().logprobs || (due && *due <= Clock::now())) flush(index);
}

// Sends what was held back.
void Generation::flush(int index) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  const AnswerLogprobs tokens = take_logprobs(choice.parser, choice.tokens, request().logprobs_of_all);
  if (request().timings_per_token) writer_->set_stats(stats_so_far(choice));
  send(writer_->pieces(index, merged(choice.pacer.take(Clock::now())), tokens));
}

Generation::Clock::time_point Generation::next_due() const {
  Clock::time_point first = Clock::time_point::max();
  for (const Choice& choice : choices_) first = std::min(first, choice.pacer.due().value_or(first));
  return first;
}

void Generation::flush_due(Clock::time_point now) {
  for (size_t i = 0; i < choices_.size(); ++i)
    if (const auto due = choices_[i].pacer.due(); due && *due <= now) flush(static_cast<int>(i));
}

// As this side sees it; what the engine measured comes at the end.
AnswerStats Generation::stats_so_far(const Choice& choice) const {
  const auto seconds = [](Clock::duration time) { return std::chrono::duration<double>(time).count(); };
  AnswerStats stats;
  stats.n_prompt = choice.n_read;
  stats.n_cached = choice.n_cached;
  stats.n_completion = choice.n_tokens;
  if (choice.n_tokens == 0) return stats;
  stats.queue_seconds = seconds(choice.started - live_->since);
  stats.prompt_seconds = seconds(choice.first - choice.started);
  stats.first_token_seconds = seconds(choice.first - live_->since);
  stats.predicted_seconds = seconds(Clock::now() - choice.first);
  return stats;
}

void Generation::take_end(int index, const TokensEnded& ended) {
  if (!ended.error && ended.reason != FinishReason::Cancelled) submit_others(index);  // an empty answer, too
  Choice& choice = choices_[static_cast<size_t>(index)];
  choice.ended = true;
  if (ended.error) {
    if (!failure_) failure_ = refusal(*ended.error, prepared_.prompts.front().size());
    return;
  }
  if (ended.reason == FinishReason::Cancelled && !choice.stopping) {
    if (!failure_) failure_ = ApiError(503, "shutting_down", "the engine is shutting down");
    return;
  }
  const AnswerConstraint* const rules =
      prepared_.constraints.empty() ? nullptr : prepared_.constraints[static_cast<size_t>(index)].get();
  show(index, choice.parser.finish(ended.reason == FinishReason::Stop));
  if (streaming_) flush(index);
  Answer& answer = choice.answer;
  take_result(choice.parser, rules, choice.stopping ? FinishReason::Stop : ended.reason, choice.tokens,
              answer);
  const TokenUsage& usage = ended.usage;
  if (continuation_ != nullptr) {
    continuation_->finish_reason = answer.finish_reason;
    continuation_->single = continuation_->single && answer.tool_calls.empty();
    if (!continuation_->seed) continuation_->seed = usage.seed;
  }
  AnswerStats& stats = answer.stats;
  stats.take(usage);
  const ExpertCounts experts = model_.service->state().experts;
  if (experts.n_uses > experts_before_.n_uses)
    stats.experts_hot_ratio = static_cast<double>(experts.hot_uses - experts_before_.hot_uses) /
                              static_cast<double>(experts.n_uses - experts_before_.n_uses);
  if (choice.stopping) stats.n_completion = choice.n_tokens;
  if (streaming_) send(writer_->finish(index, answer));
  keep_turn(index);
  submit_prompts();
  note_divergence(server_.metrics, *model_.tokenizer, exchange_.request().id,
                  prepared_.prompts[static_cast<size_t>(index) / static_cast<size_t>(request().n)], usage);
}

// For the prompt of the next turn. A text that a stop cut is not what the model wrote.
void Generation::keep_turn(int index) {
  const Choice& choice = choices_[static_cast<size_t>(index)];
  if (request().dialect == Dialect::Completions || request().continue_last_turn || choice.stopping) return;
  const Turn turn{.role = "assistant",
                  .content = choice.answer.content,
                  .reasoning = choice.answer.reasoning,
                  .tool_calls = choice.answer.tool_calls};
  server_.turns->remember(caller_.key_name, prepared_.prompts.front(), turn,
                          continuation_ != nullptr ? continuation_->written : choice.ids,
                          model_.tokenizer->vocab());
}

}  // namespace thermo
