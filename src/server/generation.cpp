#include "server/generation.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"
#include "server/generation_impl.h"
#include "server/operations.h"
#include "server/preparation.h"
#include "server/prompt_log.h"
#include "server/request_metrics.h"

namespace thermo {
namespace {

constexpr size_t kPauseAbove = 1 << 20, kResumeBelow = 1 << 18;  // unsent bytes
constexpr auto kForever = std::chrono::hours(24 * 365);
constexpr double kSpaceEvery = 15.0;  // seconds

}  // namespace

Generation::Generation(ServerState& server, HttpExchange& exchange, PreparedRequest prepared,
                       CallerInfo caller, Continuation* continuation)
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

Generation::~Generation() {
  cancel_all();
  if (!is_listed_) return;
  server_.live.erase(listed_);
  if (--server_.by_key[caller_.key_name] == 0) server_.by_key.erase(caller_.key_name);
}

asio::awaitable<void> Generation::answer(Headers headers) {
  try {
    co_await follow(headers);
  } catch (const std::exception& error) {
    if (!begun_) throw;
    // A reply would stand in the middle of the stream: its own error event ends it.
    log_error("server", "req={} failed: {}", exchange_.request().id, error.what());
    end_with(
        {500, "internal_error", fmt::format("request {} failed inside the server", exchange_.request().id)});
  }
}

asio::awaitable<void> Generation::follow(const Headers& headers) {
  exchange_.notify([live = live_] { live->signal.raise(); });
  begin_reply(headers);
  co_await wait_for_answers();
  if (exchange_.gone() || live_->cancelled) cancelled();
  if (exchange_.gone()) co_return;
  if (failure_) {
    flush_due(Clock::time_point::max());
    end_with(*failure_);
  } else {
    finish_reply(headers);
  }
}

// What can be sent before anything is known.
void Generation::begin_reply(const Headers& headers) {
  streaming_ = request().stream;
  spaces_ = !streaming_ && exchange_.request().header("x-keepalive") == "whitespace";
  if (streaming_) {
    exchange_.begin_stream(stream_head(headers));
    begun_ = true;
    send(writer_->begin(prepared_.n_prompt()));
  } else if (spaces_) {
    HttpReply head;
    head.headers = headers;
    head.headers.emplace_back("Cache-Control", "no-store");
    exchange_.begin_stream(std::move(head));
    begun_ = true;
  }
  const std::chrono::duration<double> usual = server_.options.ping_interval;
  const double seconds = spaces_ ? kSpaceEvery : request().ping_seconds.value_or(usual.count());
  ping_ = seconds > 0.0 ? std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))
                        : Clock::duration(kForever);
}

// Until all have ended, or something is wrong: failure_, or a client that is gone.
asio::awaitable<void> Generation::wait_for_answers() {
  while (is_open() && !failure_) {
    const Clock::time_point when = std::min({last_sent_ + ping_, next_limit(), next_due()});
    co_await live_->signal.wait_until(when);
    if (exchange_.gone() || live_->cancelled) break;
    for (auto& [index, event] : live_->take()) take(index, std::move(event));
    const Clock::time_point now = Clock::now();
    flush_due(now);
    check_reader();
    if (is_open()) check_limits(now);
    if (is_open() && !failure_ && now >= last_sent_ + ping_) send_sign_of_life();
  }
}

Generation::Clock::time_point Generation::time_of(std::chrono::milliseconds limit) const {
  return limit.count() > 0 ? live_->since + limit : Clock::time_point::max();
}

// When the request has to end, or to begin.
Generation::Clock::time_point Generation::next_limit() const {
  const Clock::time_point end = time_of(server_.options.request_timeout);
  return live_->state == "queued" ? std::min(end, time_of(server_.options.queue_timeout)) : end;
}

void Generation::check_limits(Clock::time_point now) {
  const bool queued = live_->state == "queued";
  if (server_.cancelling || (server_.draining && queued)) {
    failure_ = shutting_down();
  } else if (now >= time_of(server_.options.request_timeout)) {
    failure_ = ApiError(504, "timeout", "the request took too long");
  } else if (queued && now >= time_of(server_.options.queue_timeout)) {
    failure_ = ApiError(503, "queue_timeout", "no slot became free in time; try again later");
    failure_->retry_seconds = retry_seconds(server_);
  }
}

// A client that has something to read needs none, and must not fill our memory.
void Generation::send_sign_of_life() {
  if (exchange_.unsent_bytes() == 0 && streaming_) send(writer_->heartbeat());
  if (exchange_.unsent_bytes() == 0 && spaces_) send(" ");
  last_sent_ = Clock::now();
}

std::string Generation::phase() const {
  return live_->state == "queued" || live_->state == "prefill" ? live_->state : "decode";
}

void Generation::cancelled() {
  server_.metrics.count("thermocline_cancelled_total", fmt::format("phase=\"{}\"", phase()));
  record("cancelled");
  if (continuation_ != nullptr) continuation_->finish_reason = "cancelled";
  live_->cancel_begins(phase());
  failure_ = ApiError(503, "cancelled", "the request was cancelled");
  failure_->may_retry = false;  // a client that tries again would undo it
}

void Generation::finish_reply(const Headers& headers) {
  std::vector<Answer> answers;
  for (Choice& choice : choices_) answers.push_back(std::move(choice.answer));
  if (streaming_) {
    send(writer_->end(answers));
    exchange_.end_stream();
  } else if (spaces_) {
    send(json_reply(writer_->whole(answers)).body);
    exchange_.end_stream();
  } else {
    HttpReply reply = json_reply(writer_->whole(answers));
    reply.headers = headers;
    reply.headers.emplace_back("Cache-Control", "no-store");
    const double ms = std::chrono::duration<double>(Clock::now() - live_->since).count() * 1e3;
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

namespace {

using Clock = std::chrono::steady_clock;

// Of a client that was gone before its request was submitted.
void count_gone(ServerState& server, const HttpRequest& http, const GenerationRequest& request,
                const std::string& key_name, Clock::duration time) {
  server.metrics.count("thermocline_cancelled_total", "phase=\"queued\"");
  count_request(server.metrics, server.options,
                {.request = request,
                 .http = http,
                 .key_name = key_name,
                 .outcome = "cancelled",
                 .phase = "queued",
                 .seconds = std::chrono::duration<double>(time).count(),
                 .answers = {}});
}

// A stream that begins and says at once why it ends.
void fail_in_stream(ServerState& server, HttpExchange& exchange, const GenerationRequest& request,
                    const ApiError& error, Generation::Headers headers) {
  const auto writer = make_reply_writer({.request = &request,
                                         .tokenizer = server.model->tokenizer,
                                         .model = server.model->id,
                                         .fingerprint = server.model->fingerprint,
                                         .request_id = exchange.request().id});
  exchange.begin_stream(stream_head(std::move(headers)));
  exchange.write(writer->begin(0));
  exchange.write(writer->fail(error));
  exchange.end_stream();
  const std::string dialect = dialect_name(request.dialect);
  server.metrics.count("thermocline_requests_total",
                       fmt::format("dialect=\"{}\",outcome=\"error\",finish_reason=\"\"", dialect));
  server.metrics.count("thermocline_request_errors_total", fmt::format("code=\"{}\"", error.code));
  log_info("server", "req={} {} error {}", exchange.request().id, dialect, error.code);
}

}  // namespace

asio::awaitable<void> generate(ServerState& server, HttpExchange& exchange, Dialect dialect,
                               CallerInfo caller, std::vector<std::pair<std::string, std::string>> headers,
                               Continuation* continuation) {
  const Clock::time_point came = Clock::now();
  Preparation made = co_await prepare_on_worker(server, exchange, dialect, caller.key_name, continuation);
  if (exchange.gone()) {
    if (continuation != nullptr) continuation->finish_reason = "cancelled";
    count_gone(server, exchange.request(), made.request, caller.key_name, Clock::now() - came);
    co_return;
  }
  if (made.overflow) {
    fail_in_stream(server, exchange, made.request, *made.overflow, std::move(headers));
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
