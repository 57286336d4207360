#include "server/stdio/pipe_server.h"

#include <atomic>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <list>
#include <map>
#include <vector>

#include "base/json_limits.h"
#include "base/log.h"
#include "server/generation.h"
#include "server/operations.h"
#include "server/stdio/line_pipe.h"

namespace thermo {
namespace {

constexpr size_t kMaxEnded = 64;  // answers that may be continued

const char* path_of(Dialect dialect) {
  switch (dialect) {
    case Dialect::Completions:
      return "/v1/completions";
    case Dialect::Responses:
      return "/v1/responses";
    case Dialect::Messages:
      return "/v1/messages";
    default:
      return "/v1/chat/completions";
  }
}

// One run of a request.
class PipeExchange : public HttpExchange {
 public:
  PipeExchange(LinePipe& pipe, std::string tag, HttpRequest request, uint64_t run)
      : pipe_(pipe), tag_(std::move(tag)), request_(std::move(request)), run_(run) {}

  const HttpRequest& request() const override { return request_; }
  void reply(HttpReply reply) override {
    Json body = Json::parse(reply.body, nullptr, false);
    failed_ = true;
    pipe_.send(
        pipe_line(tag_, "error", {{"run", run_}, {"status", reply.status}, {"data", std::move(body)}}));
  }
  void begin_stream(HttpReply head) override {
    Json members = {{"run", run_}};
    for (const auto& [name, value] : head.headers) {
      if (name == "X-Ignored-Fields") members["ignored_fields"] = value;
      if (name == "X-Ignored-Tools") members["ignored_tools"] = value;
      if (name == "X-Queue-Position") members["queue_position"] = std::stoi(value);
    }
    pipe_.send(pipe_line(tag_, "start", members));
  }
  void write(std::string_view bytes) override { pipe_.send(pipe_lines_of_stream(tag_, bytes)); }
  void end_stream() override {}
  size_t unsent_bytes() const override { return pipe_.unsent_bytes(); }
  bool gone() const override { return gone_; }
  void notify(std::function<void()> callback) override { callback_ = std::move(callback); }

  const std::string& tag() const { return tag_; }
  uint64_t run() const { return run_; }
  bool failed() const { return failed_; }
  void wake() const {
    if (callback_) callback_();
  }
  void cancel() {
    gone_ = true;
    wake();
  }

 private:
  LinePipe& pipe_;
  const std::string tag_;
  const HttpRequest request_;
  const uint64_t run_;
  std::function<void()> callback_;
  bool gone_ = false, failed_ = false;
};

}  // namespace

struct PipeServer::Impl : std::enable_shared_from_this<PipeServer::Impl> {
  // A request, while it runs and as long as it may go on.
  struct Entry {
    Dialect dialect{};
    std::string body;
    Continuation so_far;
    std::shared_ptr<PipeExchange> exchange;  // nullptr: it does not run
    uint64_t run = 0;
  };

  ServerState& server;
  ApiHandler& handler;
  std::map<std::string, std::shared_ptr<Entry>> entries;  // by id
  std::list<std::string> ended;                           // ids of those that do not run, oldest first
  uint64_t last_run = 0;
  std::atomic<int> n_running{0}, n_lines{0};
  std::atomic<bool> input_ended{false}, broken{false};
  std::unique_ptr<LinePipe> pipe;

  Impl(ServerState& s, ApiHandler& h) : server(s), handler(h) {}

  void take_line(const LineSplitter::Line& line);
  void take(PipeCommand command);
  void start(const std::string& id, std::shared_ptr<Entry> entry);
  asio::awaitable<void> run(std::shared_ptr<Entry> entry);
  void finished(const std::string& id, const std::shared_ptr<Entry>& entry);
  void list(const std::string& id);
  void cancel_all();
};

PipeServer::PipeServer(ServerState& server, ApiHandler& handler, int in, int out)
    : impl_(std::make_shared<Impl>(server, handler)) {
  // The callbacks run as long as the pipe, which this owns.
  Impl* const m = impl_.get();
  LinePipe::Callbacks callbacks;
  callbacks.on_line = [m](LineSplitter::Line line) {
    ++m->n_lines;
    asio::post(m->server.io, [self = m->shared_from_this(), line = std::move(line)] {
      self->take_line(line);
      --self->n_lines;
    });
  };
  callbacks.on_end = [m] { m->input_ended = true; };
  callbacks.on_drained = [m] {
    asio::post(m->server.io, [self = m->shared_from_this()] {
      for (const auto& [id, entry] : self->entries)
        if (entry->exchange) entry->exchange->wake();
    });
  };
  callbacks.on_broken = [m] {
    m->broken = true;
    asio::post(m->server.io, [self = m->shared_from_this()] { self->cancel_all(); });
  };
  const ServedModel& model = *server.model;
  impl_->pipe = std::make_unique<LinePipe>(in, out, server.options.http.max_body_bytes, std::move(callbacks));
  impl_->pipe->send(pipe_line("", "ready",
                              {{"model", model.id},
                               {"n_ctx", model.service->n_ctx()},
                               {"slots", model.service->n_slots()},
                               {"server", server.server_name()}}));
  impl_->pipe->start();
}

PipeServer::~PipeServer() {
  impl_->pipe->stop();  // a coroutine that is late may still send
}

bool PipeServer::ended() const {
  // In this order: lines are counted before the input ends, requests before their lines are done, and what is
  // sent before its request is.
  const bool idle =
      impl_->input_ended && impl_->n_lines == 0 && impl_->n_running == 0 && impl_->pipe->unsent_bytes() == 0;
  return impl_->broken || idle;
}

int PipeServer::n_running() const {
  return impl_->n_running;
}

void PipeServer::close_all() {
  impl_->cancel_all();
}

void PipeServer::Impl::cancel_all() {
  for (const auto& [id, entry] : entries)
    if (entry->exchange) entry->exchange->cancel();
}

void PipeServer::Impl::take_line(const LineSplitter::Line& line) {
  std::string id;
  try {
    if (line.too_long)
      throw ApiError(413, "body_too_large", "a line is longer than this server takes; see its limits");
    // Known before the rest is judged, so that a refusal finds its way.
    if (beyond_limits(line.text).empty())
      if (const Json json = Json::parse(line.text, nullptr, false); json.is_object() && json.contains("id"))
        if (json["id"].is_string()) id = json["id"];
    take(parse_command(line.text));
  } catch (const ApiError& error) {
    pipe->send(
        pipe_line(id, "error", {{"status", error.status}, {"data", error_json(error, Dialect::Chat, "")}}));
  }
}

void PipeServer::Impl::take(PipeCommand command) {
  if (command.op == PipeCommand::Op::List) return list(command.id);
  const auto found = entries.find(command.id);
  const bool running = found != entries.end() && found->second->exchange != nullptr;
  if (command.op == PipeCommand::Op::Start) {
    if (running) throw invalid_value("id", "id: a request with this id is already running");
    ended.remove(command.id);
    auto entry = std::make_shared<Entry>();
    entry->dialect = command.dialect;
    entry->body = std::move(command.body);
    return start(command.id, std::move(entry));
  }
  const auto not_there = [&](const char* why) { return ApiError(404, "not_found", why, "id"); };
  if (found == entries.end()) throw not_there("there is no request with this id");
  const std::shared_ptr<Entry> entry = found->second;
  if (command.run && *command.run != entry->run) throw not_there("this run of the request is over");
  if (command.op == PipeCommand::Op::Cancel) {
    if (running) entry->exchange->cancel();  // one that has ended said so
    return;
  }
  if (running) throw invalid_value("id", "id: the request is still running");
  if (!entry->so_far.can_continue())
    throw invalid_value("id", "id: this answer is complete, or one of several; it cannot be continued");
  ended.remove(command.id);
  entry->so_far.max_tokens = command.max_tokens;
  start(command.id, entry);
}

void PipeServer::Impl::start(const std::string& id, std::shared_ptr<Entry> entry) {
  HttpRequest request;
  request.method = "POST";
  request.path = server.options.api_prefix + path_of(entry->dialect);
  request.body = entry->body;
  request.id = id;
  entry->run = ++last_run;
  entry->exchange = std::make_shared<PipeExchange>(*pipe, id, std::move(request), entry->run);
  entries[id] = entry;
  ++n_running;
  asio::co_spawn(
      server.io, [self = shared_from_this(), entry]() -> asio::awaitable<void> { co_await self->run(entry); },
      asio::detached);
}

asio::awaitable<void> PipeServer::Impl::run(std::shared_ptr<Entry> entry) {
  const std::shared_ptr<PipeExchange> exchange = entry->exchange;
  co_await handler.handle_owner(*exchange, entry->so_far);
  finished(exchange->tag(), entry);
}

void PipeServer::Impl::finished(const std::string& id, const std::shared_ptr<Entry>& entry) {
  const std::shared_ptr<PipeExchange> exchange = std::exchange(entry->exchange, nullptr);
  if (!exchange->failed())
    pipe->send(pipe_line(id, "done",
                         {{"run", exchange->run()},
                          {"finish_reason", entry->so_far.finish_reason},
                          {"can_continue", entry->so_far.can_continue()}}));
  ended.push_back(id);
  if (ended.size() > kMaxEnded) {
    entries.erase(ended.front());
    ended.pop_front();
  }
  --n_running;
}

void PipeServer::Impl::list(const std::string& id) {
  Json waiting = Json::array();
  for (const std::string& one : ended)
    if (const auto found = entries.find(one); found != entries.end() && found->second->so_far.can_continue())
      waiting.push_back(
          {{"id", one}, {"run", found->second->run}, {"generated", found->second->so_far.written.size()}});
  pipe->send(
      pipe_line(id, "list", {{"requests", requests_json(server)}, {"can_continue", std::move(waiting)}}));
}

}  // namespace thermo
