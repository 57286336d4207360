// What a request asks the engine for, and when.
#include <fmt/format.h>

#include <algorithm>

#include "server/engine_error.h"
#include "server/generation_impl.h"
#include "server/operations.h"

namespace thermo {

const std::string& Generation::session() const {
  if (!request().session_key.empty()) return request().session_key;
  return caller_.session_hint.empty() ? request().user : caller_.session_hint;
}

void Generation::list() {
  live_->id = exchange_.request().id;
  live_->reply_id = writer_->id();
  live_->key_name = caller_.key_name;
  live_->dialect = dialect_name(request().dialect);
  live_->session = session();
  live_->n_prompt = prepared_.n_prompt();
  live_->sampling = prepared_.options.sampling;
  live_->max_tokens = prepared_.options.max_tokens;
  live_->constraints = prepared_.constraints;
  live_->prompts = &prepared_.prompts;
  listed_ = server_.live.insert(server_.live.end(), live_);
  is_listed_ = true;
  ++server_.by_key[caller_.key_name];
}

void Generation::submit() {
  const int limit = server_.options.key_concurrency;
  if (limit > 0 && server_.by_key[caller_.key_name] >= limit) {
    ApiError error(429, "rate_limit_exceeded", fmt::format("this key has {} requests already", limit));
    error.retry_seconds = retry_seconds(server_);
    throw error;
  }
  list();
  experts_before_ = model_.service->state().experts;
  add_choices();
  TokenRequest tokens = token_request(0);
  if (continuation_ != nullptr) go_on(choices_.front(), tokens);
  submit_one(0, std::move(tokens));
  next_ = request().n;
  submit_prompts();
}

void Generation::add_choices() {
  AnswerOptions options;
  options.starts_in_reasoning = prepared_.in_reasoning;
  options.split_reasoning = request().reasoning_format != ReasoningFormat::InText;
  options.stops = request().stops;
  options.stop_everywhere = request().stop_everywhere;
  if (request().tool_choice.mode != CallChoice::Mode::None) options.tools = request().tools;
  const size_t n = prepared_.prompts.size() * static_cast<size_t>(request().n);
  for (size_t i = 0; i < n; ++i)
    choices_.push_back({.parser = AnswerParser(*model_.tokenizer, options),
                        .pacer = EventPacer(server_.options.stream_coalesce),
                        .ends_after = stop_watch(*model_.tokenizer, options)});
  live_->handles.assign(n, {});
}

TokenRequest Generation::token_request(int index) {
  const int c = index % request().n;
  TokenRequest tokens;
  tokens.prompt = prepared_.prompts[static_cast<size_t>(index / request().n)];
  tokens.options = prepared_.options;
  tokens.options.sampling.choice = static_cast<uint32_t>(c);
  if (!prepared_.constraints.empty())
    tokens.options.constraint = prepared_.constraints[static_cast<size_t>(index)];
  tokens.options.ends_after = choices_[static_cast<size_t>(index)].ends_after;
  tokens.fairness_key = caller_.key_name;
  tokens.session_key = session();
  tokens.marks = prepared_.marks;
  if (request().n > 1) tokens.marks.push_back(static_cast<int>(tokens.prompt.size()) - 1);
  tokens.side_request = request().side_request || c > 0;
  tokens.admitted = index > 0;
  tokens.on_event = [live = live_, index, &metrics = server_.metrics](TokenEvent event) {
    if (std::holds_alternative<TokensEnded>(event)) live->ended(metrics);
    live->push(index, std::move(event));
  };
  return tokens;
}

void Generation::submit_one(int index, TokenRequest tokens) {
  const size_t n_prompt = tokens.prompt.size();  // with what earlier runs wrote
  const Result<RequestHandle> handle = model_.service->submit(std::move(tokens));
  if (!handle) throw refusal(handle.error(), n_prompt);
  live_->handles[static_cast<size_t>(index)] = *handle;
}

// After the first ones: a refusal ends the whole.
void Generation::submit_later(int index) {
  if (failure_) return;
  try {
    submit_one(index, token_request(index));
  } catch (const ApiError& error) {
    failure_ = error;
  }
}

void Generation::submit_others(int index) {
  if (index % request().n != 0) return;
  for (int other = index + 1; other < index + request().n; ++other) {
    if (live_->handles[static_cast<size_t>(other)] != RequestHandle{}) return;
    submit_later(other);
  }
}

// Not for a client that does not read.
void Generation::submit_prompts() {
  const int n = request().n, n_at_once = std::max(1, model_.service->n_slots() / n);
  int n_open = 0;
  for (int first = 0; first < next_; first += n)
    n_open += std::any_of(choices_.begin() + first, choices_.begin() + first + n,
                          [](const Choice& c) { return !c.ended; });
  for (; next_ < static_cast<int>(choices_.size()) && n_open < n_at_once && !live_->paused && !failure_;
       next_ += n, ++n_open)
    submit_later(next_);
}

// The answer begins after what earlier runs wrote.
void Generation::go_on(Choice& choice, TokenRequest& tokens) {
  continuation_->single = request().n == 1 && prepared_.prompts.size() == 1;
  continuation_->resume(choice.parser, tokens, model_.service->n_ctx());
  if (!prepared_.constraints.empty()) prepared_.constraints.front()->begin_run();
  if (!request().logprobs) return;
  for (const TokenId token : continuation_->written) choice.tokens.push_back({.id = token, .logprobs = {}});
}

void Generation::cancel_all() {
  for (size_t i = 0; i < live_->handles.size(); ++i)
    if (!choices_[i].ended) model_.service->cancel(live_->handles[i]);
}

ApiError Generation::refusal(const Error& error, size_t n_prompt) const {
  return engine_error(error, server_, request().dialect, n_prompt, exchange_.request().id);
}

}  // namespace thermo
