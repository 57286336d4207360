#include "server/api_handler.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/log_fields.h"
#include "base/utf8.h"
#include "server/experts_view.h"
#include "server/live_view.h"
#include "server/on_worker.h"
#include "server/operations.h"
#include "server/request_body.h"
#include "server/wanted_work.h"

namespace thermo {
namespace {

constexpr auto kHeatCopy = std::chrono::milliseconds(250);  // copies are 200 ms apart
constexpr auto kDeepHealth = std::chrono::seconds(30);
constexpr auto kProbeAlone = std::chrono::milliseconds(1000);  // before what is done for others counts, too
constexpr auto kLook = std::chrono::milliseconds(20);          // where there is no room for it
constexpr size_t kShownHost = 100;

bool is_id(std::string_view text) {
  const auto good = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  return !text.empty() && text.size() <= 128 && std::all_of(text.begin(), text.end(), good);
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

ApiError needs_admin() {
  return {403, "feature_disabled", "this needs an administrator's key"};
}

// What the body of an order says, whoever it is for.
ApiHandler::Order order_of(const Json& body) {
  Fields fields(body);
  return {.action = fields.string("action").value_or(""),
          .id = fields.string("id").value_or(""),
          .name = fields.string("name").value_or("")};
}

// The name is that of a file beside the heat file; empty: the heat file itself.
void check_heat_name(const ApiHandler::Order& order, const ServedModel& model) {
  const std::string& name = order.name;
  if (name.empty()) return;
  if (!is_id(name) || name.starts_with('.'))
    throw invalid_value("name",
                        "name: 1 to 128 letters, digits, '_', '.' or '-' were expected, not '.' first");
  if (model.heat_file.empty() || order.action == "reset")
    throw unsupported("name", order.action == "reset"
                                  ? "name: heat is reset without a file; leave it out"
                                  : "name: heat is not kept here; start the server with a heat file");
  const auto path = std::filesystem::path(model.heat_file).replace_filename(name + ".json");
  if (order.action == "load" && !std::filesystem::exists(path))
    throw ApiError(404, "not_found", fmt::format("there is no heat called '{}'; save it first", name),
                   "name");
}

void check_body_type(const HttpRequest& request) {
  if (request.method != "POST") return;
  if (const std::string_view encoding = request.header("content-encoding"); !is_known_encoding(encoding))
    throw ApiError(
        415, "unsupported_media_type",
        fmt::format("a body with the encoding '{}' cannot be read; gzip, zstd or none was expected",
                    encoding.substr(0, 100)));
  const std::string type = lower(request.header("content-type"));
  const std::string kind = type.substr(0, type.find_first_of("; "));
  const size_t charset = type.find("charset=");
  const bool utf8 = charset == std::string::npos || type.find("utf-8", charset) != std::string::npos ||
                    type.find("utf8", charset) != std::string::npos;
  if (!kind.empty() && (kind != "application/json" || !utf8))
    throw ApiError(415, "unsupported_media_type", "the body has to be application/json in UTF-8");
}

}  // namespace

std::string ApiHandler::path_of(const HttpRequest& request) const {
  const std::string& prefix = server_.options.api_prefix;
  if (prefix.empty()) return request.path;
  if (!request.path.starts_with(prefix)) return {};
  const std::string rest = request.path.substr(prefix.size());
  return rest.empty() ? "/" : rest.starts_with('/') ? rest : std::string();
}

void ApiHandler::give_id(HttpRequest& request) const {
  if (!request.id.empty()) return;
  const std::string_view given = request.header("x-request-id");
  request.id = is_id(given) ? std::string(given) : fresh_id("req_");
}

ApiHandler::Headers ApiHandler::headers_of(const HttpRequest& request) const {
  Headers headers = {{"Server", server_.server_name()}, {"X-Request-Id", request.id}};
  if (dialect_of(path_of(request)) == Dialect::Messages) headers.emplace_back("request-id", request.id);
  for (auto& header : server_.access.origin_headers(request.header("origin")))
    headers.push_back(std::move(header));
  return headers;
}

HttpReply ApiHandler::error_reply(const HttpRequest& request, const ApiError& error) const {
  const Dialect dialect = dialect_of(path_of(request));
  HttpReply reply = json_reply(error_json(error, dialect, request.id), status_of(error, dialect));
  reply.headers = headers_of(request);
  reply.headers.emplace_back("Cache-Control", "no-store");
  if (error.status == 401) reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (error.status == 429 || error.status == 503) {
    const int seconds = std::clamp(error.retry_seconds, 1, 60);
    reply.headers.emplace_back("Retry-After", std::to_string(seconds));
    reply.headers.emplace_back("retry-after-ms", std::to_string(seconds * 1000));
    reply.headers.emplace_back("x-should-retry", error.may_retry ? "true" : "false");
  }
  return reply;
}

HttpReply ApiHandler::refuse(HttpRequest& head, int status, const std::string& code,
                             const std::string& message) {
  give_id(head);
  const ApiError error(status, code, message);
  note_refusal(head, error);
  return error_reply(head, error);
}

// A request that ended before anything was generated.
void ApiHandler::note_refusal(const HttpRequest& request, const ApiError& error) const {
  constexpr size_t kShownMethod = 16, kShownPath = 200;
  const RouteMatch match = find_route(request.method, path_of(request));
  const int status = status_of(error, dialect_of(path_of(request)));
  server_.metrics.count("thermocline_request_errors_total", fmt::format("code=\"{}\"", error.code));
  if (match.route != nullptr && match.route->generates && (error.status == 503 || error.status == 429))
    server_.metrics.count("thermocline_requests_total",
                          fmt::format("dialect=\"{}\",outcome=\"rejected\",finish_reason=\"\"",
                                      dialect_name(match.route->dialect)));
  const std::string method = request.method.substr(0, kShownMethod),
                    path = request.path.substr(0, kShownPath);
  log_with_fields(LogLevel::Info, "server",
                  fmt::format("req={} {} {} {} {}", request.id, method, path, status, error.code),
                  {{"req", request.id},
                   {"method", method},
                   {"path", path},
                   {"status", int64_t{status}},
                   {"code", error.code}});
}

void ApiHandler::replied(const HttpRequest& request, int status) {
  const RouteMatch match = find_route(request.method, path_of(request));
  server_.metrics.count(
      "thermocline_http_requests_total",
      fmt::format("method=\"{}\",route=\"{}\",code=\"{}\"", match.route ? match.route->method : "other",
                  match.route ? match.route->path : "other", status));
}

HttpReply ApiHandler::preflight(const HttpRequest& request) const {
  HttpReply reply;
  reply.status = 204;
  reply.content_type.clear();
  reply.headers = headers_of(request);
  for (auto& header : server_.access.preflight_headers(request.header("origin"),
                                                       request.header("access-control-request-headers")))
    reply.headers.push_back(std::move(header));
  return reply;
}

std::optional<Access::Caller> ApiHandler::caller_of(const HttpRequest& request) const {
  return server_.access.caller(request.header("authorization"), request.header("x-api-key"),
                               request.unix_socket);
}

// In this order: the host, whose page sends it, the path, the key, whether it can be served now, the form of
// the body.
void ApiHandler::check(const HttpRequest& request, const RouteMatch& match) const {
  if (request.loopback && !request.unix_socket && !server_.access.host_allowed(request.header("host")))
    throw ApiError(403, "host_not_allowed",
                   fmt::format("this server is for programs on its own machine, and '{}' is not one of its "
                               "names; use 127.0.0.1, or allow this name when the server is started",
                               printable(host_name(request.header("host").substr(0, kShownHost)))));
  const bool reads = request.method == "GET" || request.method == "HEAD" || request.method == "OPTIONS";
  if (!reads && !server_.access.page_may_write(request.header("origin"), request.header("sec-fetch-site"),
                                               request.header("host")))
    throw ApiError(403, "origin_not_allowed",
                   "a page of another site may not use this server; its origin has to be allowed when the "
                   "server is started");
  if (match.route == nullptr && match.allowed.empty())
    throw ApiError(404, "not_found", fmt::format("there is nothing at {}", request.path.substr(0, 200)));
  if (match.route == nullptr)
    throw ApiError(405, "method_not_allowed", fmt::format("use {} here", match.allowed));
  const Route& route = *match.route;
  const bool off = (route.endpoint == Endpoint::Slots && !server_.options.serve_slots) ||
                   (route.endpoint == Endpoint::Props && !server_.options.serve_props) ||
                   (route.endpoint == Endpoint::Metrics && !server_.options.serve_metrics);
  if (off) throw ApiError(403, "feature_disabled", "this endpoint is switched off");
  const bool needs_key =
      route.key == Route::Key::Metrics ? server_.options.metrics_need_key : route.key != Route::Key::None;
  if (needs_key) {
    const std::optional<Access::Caller> caller = caller_of(request);
    if (!caller)
      throw ApiError(401, "invalid_api_key", "a valid API key is needed: send it as a bearer token");
    if (route.key == Route::Key::Admin && !caller->admin) throw needs_admin();
  }
  check_state(route);
  check_body_type(request);
}

// Whether it can be served now.
void ApiHandler::check_state(const Route& route) const {
  if (server_.draining && route.generates) throw shutting_down();
  if (route.needs_model) require_model(server_);
  if (route.generates && queue_is_full(server_)) {
    ApiError error(503, "server_is_overloaded", "the queue is full; try again later");
    error.retry_seconds = retry_seconds(server_);
    throw error;
  }
}

std::optional<HttpReply> ApiHandler::admit(HttpRequest& head) {
  give_id(head);
  const RouteMatch match = find_route(head.method, path_of(head));
  try {
    if (head.method == "OPTIONS" && !head.header("access-control-request-method").empty())
      return preflight(head);
    check(head, match);
    return std::nullopt;
  } catch (const ApiError& error) {
    note_refusal(head, error);
    HttpReply reply = error_reply(head, error);
    if (error.status == 405) reply.headers.emplace_back("Allow", match.allowed);
    return reply;
  }
}

asio::awaitable<void> ApiHandler::handle(HttpExchange& exchange) {
  const RouteMatch match = find_route(exchange.request().method, path_of(exchange.request()));
  co_await answer(exchange, match, nullptr);
}

asio::awaitable<void> ApiHandler::handle_owner(HttpExchange& exchange, Continuation& continuation) {
  const RouteMatch match = find_route(exchange.request().method, path_of(exchange.request()));
  co_await answer(exchange, match, &continuation);
}

asio::awaitable<void> ApiHandler::answer(HttpExchange& exchange, const RouteMatch& match,
                                         Continuation* continuation) {
  std::optional<ApiError> failure;
  try {
    if (continuation != nullptr) check_state(*match.route);
    co_await dispatch(exchange, match, continuation);
  } catch (const ApiError& error) {
    failure = error;
  } catch (const std::exception& error) {
    log_error("server", "req={} failed: {}", exchange.request().id, error.what());
    failure =
        ApiError(500, "internal_error", "request " + exchange.request().id + " failed inside the server");
  }
  if (failure) {
    if (!failure->counted) note_refusal(exchange.request(), *failure);
    exchange.reply(error_reply(exchange.request(), *failure));
  }
}

asio::awaitable<void> ApiHandler::dispatch(HttpExchange& exchange, const RouteMatch& match,
                                           Continuation* continuation) {
  const Route& route = *match.route;
  const HttpRequest& request = exchange.request();
  Headers headers = headers_of(request);
  if (route.generates) {
    CallerInfo caller;
    if (const std::optional<Access::Caller> known = caller_of(request)) caller.key_name = known->name;
    for (const char* name : {"x-session-id", "session-id", "x-claude-code-session-id", "x-session-affinity"})
      if (caller.session_hint.empty()) caller.session_hint = request.header(name);
    co_await generate(server_, exchange, route.dialect, std::move(caller), std::move(headers), continuation);
    co_return;
  }
  if (route.endpoint == Endpoint::LiveView) {
    const std::optional<Access::Caller> caller = caller_of(request);
    co_await show_live(server_, exchange, caller && caller->admin, std::move(headers));
    co_return;
  }
  if (route.endpoint == Endpoint::Experts && server_.model != nullptr) {
    // What is shown is the copy after this one.
    server_.model->service->expert_heat();
    Signal later(server_.io.get_executor());
    co_await later.wait_until(std::chrono::steady_clock::now() + kHeatCopy);
  }
  HttpReply reply;
  if (route.needs_model) {
    const std::unique_ptr<TokenReply> answer = co_await token_endpoint(exchange, route);
    if (answer == nullptr) co_return;  // the client is gone
    reply = json_reply(answer->body);
  } else if (route.endpoint == Endpoint::Health && request.query_value("deep") == "1") {
    reply = co_await deep_health(request);
  } else if (route.endpoint == Endpoint::Control || route.endpoint == Endpoint::Heat) {
    const std::unique_ptr<Order> order =
        co_await on_worker(server_.workers, [this, &request] { return order_of(body_of(request)); });
    reply = obey(*order, match, caller_of(request));
  } else {
    reply = look(request, match);
  }
  reply.headers.insert(reply.headers.end(), headers.begin(), headers.end());
  reply.headers.emplace_back("Cache-Control", "no-store");
  exchange.reply(std::move(reply));
}

asio::awaitable<std::unique_ptr<TokenReply>> ApiHandler::token_endpoint(HttpExchange& exchange,
                                                                        const Route& route) {
  const std::optional<Access::Caller> caller = caller_of(exchange.request());
  const std::string owner = caller ? caller->name : std::string();
  const auto work = [this, &exchange, &route, &owner](const std::function<void()>& look) {
    const Json body = body_of(exchange.request());
    look();
    return token_reply(route.endpoint, body, server_, owner, look);
  };
  std::unique_ptr<TokenReply> reply = co_await on_worker_while_wanted(server_, exchange, work);
  if (reply && !reply->to_look_up.empty())
    reply->body["n_cached"] = co_await n_cached(std::move(reply->to_look_up));
  co_return std::move(reply);
}

Json ApiHandler::body_of(const HttpRequest& request) const {
  return body_json(request, server_.options.http.max_body_bytes);
}

// Whether the engine still writes: a token for nobody. Where that one has to wait for others, it is enough
// that they get on.
asio::awaitable<HttpReply> ApiHandler::deep_health(const HttpRequest& request) {
  if (!caller_of(request))
    throw ApiError(401, "invalid_api_key", "a valid API key is needed: send it as a bearer token");
  require_model(server_);
  struct Probe {
    explicit Probe(asio::any_io_executor executor) : done(std::move(executor)) {}
    Signal done;
    bool wrote = false;
  };
  const asio::any_io_executor here = co_await asio::this_coro::executor;
  const auto probe = std::make_shared<Probe>(here);
  TokenService& service = *server_.model->service;
  const auto work_done = [&service] {
    const TokenServiceState state = service.state();
    return state.steps.n() + state.n_written;
  };
  const auto begin = std::chrono::steady_clock::now();
  const uint64_t before = work_done();
  TokenRequest tokens;
  tokens.prompt = server_.model->tokenizer->encode("1");
  tokens.options.max_tokens = 1;
  tokens.options.sampling.temperature = 0.0f;
  tokens.side_request = true;
  tokens.on_event = [probe, here](TokenEvent event) {
    const auto* const ended = std::get_if<TokensEnded>(&event);
    if (ended == nullptr) return;
    asio::post(here, [probe, wrote = !ended->error] {
      probe->wrote = wrote;
      probe->done.raise();
    });
  };
  const Result<RequestHandle> handle = service.submit(std::move(tokens));
  if (!handle && handle.error().code != ErrorCode::Busy)
    throw ApiError(503, "engine_failed", handle.error().message);
  const auto pause = handle ? kProbeAlone : kLook;
  bool ended = false, works = false;
  for (auto now = begin; !ended && !works && now < begin + kDeepHealth;
       now = std::chrono::steady_clock::now()) {
    ended = co_await probe->done.wait_until(std::min(now + pause, begin + kDeepHealth));
    works = ended ? probe->wrote : work_done() != before;
  }
  if (!ended && handle) service.cancel(*handle);
  if (!works) throw ApiError(503, "engine_failed", "the engine wrote nothing in time");
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  co_return json_reply({{"status", "ok"}, {"ms", took.count()}});
}

// What the engine has of a prompt: after the step that runs.
asio::awaitable<int> ApiHandler::n_cached(std::vector<TokenId> prompt) {
  struct Found {
    explicit Found(asio::any_io_executor executor) : done(std::move(executor)) {}
    Signal done;
    int n = 0;
  };
  const asio::any_io_executor here = co_await asio::this_coro::executor;
  const auto found = std::make_shared<Found>(here);
  server_.model->service->look_up(std::move(prompt), [found, here](int n) {
    found->n = n;
    asio::post(here, [found] { found->done.raise(); });
  });
  co_await found->done.wait();
  co_return found->n;
}

// By its own id or that of its reply; the caller's own, or anybody's for an administrator.
LiveRequest& ApiHandler::live_request(std::string_view id, const std::optional<Access::Caller>& caller) {
  for (const auto& live : server_.live)
    if (caller && (caller->admin || caller->name == live->key_name) &&
        (live->id == id || live->reply_id == id))
      return *live;
  throw ApiError(404, "not_found", "there is no such request");
}

HttpReply ApiHandler::obey(const Order& order, const RouteMatch& match,
                           const std::optional<Access::Caller>& caller) {
  if (match.route->endpoint == Endpoint::Control) {
    if (order.action != "reasoning_end") throw invalid_value("action", "action: reasoning_end was expected");
    for (const auto& constraint : live_request(order.id, caller).constraints) constraint->end_reasoning();
    return json_reply({{"success", true}});
  }
  require_model(server_);
  if (order.action != "save" && order.action != "load" && order.action != "reset")
    throw invalid_value("action", "action: save, load or reset was expected");
  check_heat_name(order, *server_.model);
  server_.model->service->order(order.action == "save"   ? HeatOrder::Save
                                : order.action == "load" ? HeatOrder::Load
                                                         : HeatOrder::Reset,
                                order.name);
  return json_reply({{"action", order.action}, {"status", "ordered"}});
}

HttpReply ApiHandler::look(const HttpRequest& request, const RouteMatch& match) {
  const std::optional<Access::Caller> caller = caller_of(request);
  switch (match.route->endpoint) {
    case Endpoint::Models:
      return json_reply(models_json(server_));
    case Endpoint::Model:
      return json_reply(model_json(server_, match.rest));
    case Endpoint::Health:
      return health_reply(server_);
    case Endpoint::Live:
      return json_reply({{"status", "alive"}});
    case Endpoint::Ready:
      return ready_reply(server_);
    case Endpoint::Version:
      return json_reply(server_.options.version);
    case Endpoint::Metrics: {
      HttpReply reply;
      const bool open =
          request.header("accept").find("application/openmetrics-text") != std::string_view::npos;
      reply.content_type = open ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
                                : "text/plain; version=0.0.4; charset=utf-8";
      reply.body = metrics_text(server_);
      if (open) reply.body = open_metrics(reply.body);
      return reply;
    }
    case Endpoint::Props:
      return json_reply(props_json(server_, caller && caller->admin));
    case Endpoint::Slots: {
      const bool with_prompts = request.query_value("prompt") == "1";
      if (with_prompts && !(caller && caller->admin)) throw needs_admin();
      const Json slots = slots_json(server_, with_prompts);
      const bool all_busy = std::all_of(slots.begin(), slots.end(),
                                        [](const Json& s) { return s["is_processing"] == Json(true); });
      if (all_busy && request.query_value("fail_on_no_slot") == "1")
        throw ApiError(503, "server_is_overloaded", "no slot is free");
      return json_reply(slots);
    }
    case Endpoint::Requests:
      return json_reply(requests_json(server_));
    case Endpoint::CancelRequest: {
      LiveRequest& live = live_request(match.rest, caller);
      live.cancelled = true;
      live.signal.raise();
      return json_reply({{"id", match.rest}, {"cancelled", true}});
    }
    case Endpoint::Plan:
      require_model(server_);
      return json_reply(server_.model->plan);
    case Endpoint::Experts:
      return experts_reply(server_, request.query_value("format", "json"),
                           request.query_value("window", "all"));
    case Endpoint::Shutdown:
      on_shutdown_();
      return json_reply({{"status", "shutting down"}});
    default:
      throw ApiError(
          501, "not_supported",
          "this server generates text; it has no embeddings, ranking, audio, images, files or batches. For "
          "the first four, run a model made for them elsewhere; send the requests of a batch one by one");
  }
}

}  // namespace thermo
