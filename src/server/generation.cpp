#include "server/generation.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"
#include "server/constraint.h"
#include "server/engine_error.h"
#include "server/event_pacer.h"
#include "server/operations.h"
#include "server/preparation.h"
#include "server/prompt_log.h"
#include "server/request_metrics.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPauseAbove = 1 << 20, kResumeBelow = 1 << 18;  // unsent bytes
constexpr auto kForever = std::chrono::hours(24 * 365);
constexpr double kSpaceEvery = 15.0;  // seconds

class Generation {
 public:
  Generation(ServerState& server, HttpExchange& exchange, PreparedRequest prepared, CallerInfo caller,
             Continuation* continuation)
      : server_(server),
        model_(*server.model),
        exchange_(exchange),
        prepared_(std::move(prepared)),
        caller_(std::move(caller)),
        continuation_(continuation),
        live_(std::make_shared<LiveRequest>(server.io)),
        writer_(make_reply_writer({.request = &prepared_.request,
                                   .tokenizer = model_.tokenizer,
                                   .model = model_.id,
                                   .fingerprint = model_.fingerprint,
                                   .request_id = exchange.request().id,
                                   .echoed_prompts = prepared_.echoed_prompts,
                                   .reasoning_fields = server.options.reasoning_fields})) {}
  ~Generation();

  // Throws ApiError when it is refused.
  void submit();
  // Throws as long as nothing was sent.
  asio::awaitable<void> answer(std::vector<std::pair<std::string, std::string>> headers);

 private:
  asio::awaitable<void> follow(std::vector<std::pair<std::string, std::string>> headers);
  void end_with(const ApiError& error);
  struct Choice {
    AnswerParser parser;
    EventPacer pacer;
    std::function<bool(TokenId)> ends_after;
    Answer answer = {};
    std::vector<GeneratedToken> tokens = {};  // all that the parser got, when log probabilities are asked for
    std::vector<TokenId> ids = {};
    int n_tokens = 0;  // up to a stop text
    int n_cached = 0, n_read = 0;                // of its prompt
    Clock::time_point started = {}, first = {};  // reading, and the first token
    bool stopping = false, ended = false;
  };

  const GenerationRequest& request() const { return prepared_.request; }
  // The conversation that the request belongs to.
  const std::string& session() const {
    if (!request().session_key.empty()) return request().session_key;
    return caller_.session_hint.empty() ? request().user : caller_.session_hint;
  }
  void list();
  // There are no more answers at once than slots: a prompt after those waits here until an earlier one is
  // answered, so that the queue has room for others. The answers of a prompt after its first one wait until
  // the first has read it: then they share it.
  TokenRequest token_request(int index);
  void submit_one(int index, TokenRequest tokens);
  void submit_later(int index);
  void submit_others(int index);
  void submit_prompts();
  void take(int index, TokenEvent event);
  void take_tokens(int index, const std::vector<GeneratedToken>& tokens);
  void take_end(int index, const TokensEnded& ended);
  void keep_turn(int index);
  void go_on(Choice& choice, TokenRequest& tokens);
  void show(int index, AnswerParser::Events events);
  void flush(int index);
  void flush_due(Clock::time_point now);
  Clock::time_point next_due() const;  // of what is held back
  AnswerStats stats_so_far(const Choice& choice) const;
  void send(const std::string& bytes);
  void cancel_all();
  void check_reader();
  void record(const char* outcome);
  ApiError refusal(const Error& error, size_t n_prompt) const {
    return engine_error(error, server_, request().dialect, n_prompt, exchange_.request().id);
  }
  std::string phase() const {
    return live_->state == "queued" || live_->state == "prefill" ? live_->state : "decode";
  }

  ServerState& server_;
  const ServedModel& model_;
  HttpExchange& exchange_;
  PreparedRequest prepared_;
  CallerInfo caller_;
  Continuation* const continuation_;
  std::shared_ptr<LiveRequest> live_;
  std::unique_ptr<ReplyWriter> writer_;
  std::vector<Choice> choices_;
  int next_ = 0;  // the first answer to the first prompt that was not submitted
  ExpertCounts experts_before_;
  std::optional<ApiError> failure_;
  std::list<std::shared_ptr<LiveRequest>>::iterator listed_ = {};
  bool is_listed_ = false, streaming_ = false, first_shown_ = false;
  bool begun_ = false;  // the status was sent
  Clock::time_point last_sent_ = Clock::now();
};

Generation::~Generation() {
  cancel_all();
  if (!is_listed_) return;
  server_.live.erase(listed_);
  if (--server_.by_key[caller_.key_name] == 0) server_.by_key.erase(caller_.key_name);
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
  for (size_t p = 0; p < prepared_.prompts.size(); ++p)
    for (int c = 0; c < request().n; ++c) {
      AnswerOptions answer;
      answer.starts_in_reasoning = prepared_.in_reasoning;
      answer.split_reasoning = request().reasoning_format != ReasoningFormat::InText;
      answer.stops = request().stops;
      answer.stop_everywhere = request().stop_everywhere;
      if (request().tool_choice.mode != CallChoice::Mode::None) answer.tools = request().tools;
      choices_.push_back({.parser = AnswerParser(*model_.tokenizer, answer),
                          .pacer = EventPacer(server_.options.stream_coalesce),
                          .ends_after = stop_watch(*model_.tokenizer, answer)});
    }
  live_->handles.assign(choices_.size(), {});
  TokenRequest tokens = token_request(0);
  if (continuation_ != nullptr) go_on(choices_.front(), tokens);
  submit_one(0, std::move(tokens));
  next_ = request().n;
  submit_prompts();
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

asio::awaitable<void> Generation::answer(std::vector<std::pair<std::string, std::string>> headers) {
  try {
    co_await follow(std::move(headers));
  } catch (const std::exception& error) {
    if (!begun_) throw;
    // A reply would stand in the middle of the stream: its own error event ends it.
    log_error("server", "req={} failed: {}", exchange_.request().id, error.what());
    end_with(
        {500, "internal_error", fmt::format("request {} failed inside the server", exchange_.request().id)});
  }
}

asio::awaitable<void> Generation::follow(std::vector<std::pair<std::string, std::string>> headers) {
  exchange_.notify([live = live_] { live->signal.raise(); });
  streaming_ = request().stream;
  if (streaming_) {
    exchange_.begin_stream(stream_head(headers));
    begun_ = true;
    send(writer_->begin(prepared_.n_prompt()));
  }
  // A client that asks for it gets spaces before its reply, so that nothing between gives the connection up.
  const bool spaces = !streaming_ && exchange_.request().header("x-keepalive") == "whitespace";
  if (spaces) {
    HttpReply head;
    head.headers = headers;
    head.headers.emplace_back("Cache-Control", "no-store");
    exchange_.begin_stream(std::move(head));
    begun_ = true;
  }
  const double asked = spaces ? kSpaceEvery
                              : request().ping_seconds.value_or(
                                    std::chrono::duration<double>(server_.options.ping_interval).count());
  const auto ping = asked > 0.0
                        ? std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(asked))
                        : Clock::duration(kForever);
  const Clock::time_point begin = live_->since;
  const auto limit = [&](std::chrono::milliseconds time) {
    return time.count() > 0 ? begin + Clock::duration(time) : begin + kForever;
  };
  const Clock::time_point must_end = limit(server_.options.request_timeout),
                          must_start = limit(server_.options.queue_timeout);
  const auto open = [this] {
    return std::any_of(choices_.begin(), choices_.end(), [](const Choice& c) { return !c.ended; });
  };
  while (open() && !failure_) {
    const bool queued = live_->state == "queued";
    const Clock::time_point when =
        std::min({last_sent_ + ping, must_end, queued ? must_start : must_end, next_due()});
    co_await live_->signal.wait_until(when);
    if (exchange_.gone() || live_->cancelled) break;
    for (auto& [index, event] : live_->take()) take(index, std::move(event));
    const Clock::time_point now = Clock::now();
    flush_due(now);
    check_reader();
    const bool leaving = server_.cancelling || (server_.draining && live_->state == "queued");
    if (leaving && open()) failure_ = shutting_down();
    if (now >= must_end && open()) failure_ = ApiError(504, "timeout", "the request took too long");
    if (now >= must_start && live_->state == "queued" && open()) {
      failure_ = ApiError(503, "queue_timeout", "no slot became free in time; try again later");
      failure_->retry_seconds = retry_seconds(server_);
    }
    if (open() && !failure_ && now >= last_sent_ + ping) {
      // A client that has something to read needs no sign of life, and must not fill our memory.
      const bool has_read = exchange_.unsent_bytes() == 0;
      if (streaming_ && has_read) send(writer_->heartbeat());
      if (spaces && has_read) send(" ");
      last_sent_ = now;
    }
  }
  if (exchange_.gone() || live_->cancelled) {
    server_.metrics.count("thermocline_cancelled_total", fmt::format("phase=\"{}\"", phase()));
    record("cancelled");
    if (continuation_ != nullptr) continuation_->finish_reason = "cancelled";
    live_->cancel_begins(phase());
    if (exchange_.gone()) co_return;
    failure_ = ApiError(503, "cancelled", "the request was cancelled");
    failure_->may_retry = false;  // a client that tries again would undo it
  }
  if (failure_) {
    flush_due(Clock::time_point::max());
    end_with(*failure_);
    co_return;
  }
  std::vector<Answer> answers;
  for (Choice& choice : choices_) answers.push_back(std::move(choice.answer));
  if (streaming_) {
    send(writer_->end(answers));
    exchange_.end_stream();
  } else if (spaces) {
    send(json_reply(writer_->whole(answers)).body);
    exchange_.end_stream();
  } else {
    HttpReply reply = json_reply(writer_->whole(answers));
    reply.headers = headers;
    reply.headers.emplace_back("Cache-Control", "no-store");
    const double ms = std::chrono::duration<double>(Clock::now() - begin).count() * 1e3;
    reply.headers.emplace_back("openai-processing-ms", fmt::format("{:.0f}", ms));
    exchange_.reply(std::move(reply));
  }
  log_prompt(server_, prepared_, exchange_.request().id, writer_->id(), answers);
  for (size_t i = 0; i < choices_.size(); ++i) choices_[i].answer = std::move(answers[i]);
  record("ok");
}

// Where the status was sent, the error is in the body; otherwise it is thrown.
void Generation::end_with(const ApiError& error) {
  if (!live_->cancelled) record("error");
  if (continuation_ != nullptr) continuation_->finish_reason = "error";
  server_.metrics.count("thermocline_request_errors_total", fmt::format("code=\"{}\"", error.code));
  if (!begun_) {
    ApiError told(error);
    told.counted = true;
    throw told;
  }
  send(streaming_ ? writer_->fail(error)
                  : error_json(error, request().dialect, exchange_.request().id).dump());
  exchange_.end_stream();
}

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

Clock::time_point Generation::next_due() const {
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

void Generation::send(const std::string& bytes) {
  if (bytes.empty()) return;
  const Clock::time_point now = Clock::now();
  if (first_shown_)
    server_.metrics.observe("thermocline_inter_token_seconds",
                            std::chrono::duration<double>(now - last_sent_).count());
  first_shown_ = live_->n_written > 0;
  last_sent_ = now;
  exchange_.write(bytes);
}

// A client that does not read must not fill our memory: its answers wait.
void Generation::check_reader() {
  const size_t unsent = exchange_.unsent_bytes();
  const bool pause = unsent > (live_->paused ? kResumeBelow : kPauseAbove);
  if (std::exchange(live_->paused, pause) == pause) return;
  for (const RequestHandle handle : live_->handles) model_.service->pause(handle, pause);
  if (!pause) submit_prompts();
}

void Generation::record(const char* outcome) {
  const bool over = std::all_of(choices_.begin(), choices_.end(), [](const Choice& c) { return c.ended; });
  if (over) count_constraints(server_.metrics, prepared_);  // the engine has let go of them
  EndedRequest ended{.request = request(),
                     .http = exchange_.request(),
                     .key_name = caller_.key_name,
                     .outcome = outcome,
                     .phase = std::string_view(outcome) == "cancelled" ? phase() : std::string(),
                     .seconds = std::chrono::duration<double>(Clock::now() - live_->since).count(),
                     .answers = {}};
  for (Choice& choice : choices_) {
    if (choice.answer.finish_reason.empty())
      take_unfinished(choice.parser, stats_so_far(choice), choice.answer);
    ended.answers.push_back(&choice.answer);
  }
  count_request(server_.metrics, server_.options, ended);
}

}  // namespace

asio::awaitable<void> generate(ServerState& server, HttpExchange& exchange, Dialect dialect,
                               CallerInfo caller, std::vector<std::pair<std::string, std::string>> headers,
                               Continuation* continuation) {
  const Clock::time_point came = Clock::now();
  Preparation made = co_await prepare_on_worker(server, exchange, dialect, caller.key_name, continuation);
  if (exchange.gone()) {  // while its prompt was made
    if (continuation != nullptr) continuation->finish_reason = "cancelled";
    server.metrics.count("thermocline_cancelled_total", "phase=\"queued\"");
    count_request(server.metrics, server.options,
                  {.request = made.request,
                   .http = exchange.request(),
                   .key_name = caller.key_name,
                   .outcome = "cancelled",
                   .phase = "queued",
                   .seconds = std::chrono::duration<double>(Clock::now() - came).count(),
                   .answers = {}});
    co_return;
  }
  if (made.overflow) {
    const auto writer = make_reply_writer({.request = &made.request,
                                           .tokenizer = server.model->tokenizer,
                                           .model = server.model->id,
                                           .fingerprint = server.model->fingerprint,
                                           .request_id = exchange.request().id});
    exchange.begin_stream(stream_head(std::move(headers)));
    exchange.write(writer->begin(0));
    exchange.write(writer->fail(*made.overflow));
    exchange.end_stream();
    server.metrics.count("thermocline_requests_total",
                         "dialect=\"responses\",outcome=\"error\",finish_reason=\"\"");
    server.metrics.count("thermocline_request_errors_total", fmt::format("code=\"{}\"", made.overflow->code));
    log_info("server", "req={} responses error {}", exchange.request().id, made.overflow->code);
    co_return;
  }
  if (made.prepared->n_spliced > 0)
    server.metrics.count("thermocline_turn_store_splices_total", "", made.prepared->n_spliced);
  if (!made.prepared->request.ignored_fields.empty())
    headers.emplace_back("X-Ignored-Fields", header_list(made.prepared->request.ignored_fields));
  if (!made.prepared->request.ignored_tools.empty())
    headers.emplace_back("X-Ignored-Tools", header_list(made.prepared->request.ignored_tools));
  const TokenServiceState state = server.model->service->state();
  const int n_free = static_cast<int>(state.slots.size()) - state.n_running;
  headers.emplace_back("X-Queue-Position", fmt::format("{}", n_free > 0 ? 0 : state.n_waiting + 1));
  Generation generation(server, exchange, std::move(*made.prepared), std::move(caller), continuation);
  generation.submit();
  co_await generation.answer(std::move(headers));
}

}  // namespace thermo
