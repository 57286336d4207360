// HTTP/1.1 on Boost.Beast: listeners, connections, limits. It knows nothing of the APIs: a handler answers.
//
// Everything runs on one thread, in coroutines; a handler that has long work takes it elsewhere and waits.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/http/http_message.h"

namespace thermo {

namespace asio = boost::asio;

struct HttpOptions {
  // "http://127.0.0.1:8080", "http://[::1]:0", "unix:/run/thermocline.sock".
  std::vector<std::string> listen = {"http://127.0.0.1:8080"};
  int unix_socket_mode = 0660;
  // Limits.
  size_t max_header_bytes = 32 * 1024;
  size_t max_headers = 100;
  size_t max_body_bytes = 64 * 1024 * 1024;
  int max_connections = 1024;  // fewer where the process may not have so many files open
  std::chrono::milliseconds header_timeout{10'000};
  std::chrono::milliseconds body_timeout{30'000};
  std::chrono::milliseconds keepalive_timeout{75'000};
  std::chrono::milliseconds write_stall_timeout{60'000};
};

// One request and the way back. Lives on the I/O thread until its handler returns.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;

  virtual const HttpRequest& request() const = 0;
  // The whole reply. Once, instead of a stream.
  virtual void reply(HttpReply reply) = 0;
  // A stream: its head, then any number of pieces, then its end. Nothing of this waits.
  virtual void begin_stream(HttpReply head) = 0;
  virtual void write(std::string_view bytes) = 0;
  virtual void end_stream() = 0;

  virtual size_t unsent_bytes() const = 0;
  // The client went away, or did not read for too long.
  virtual bool gone() const = 0;
  // Called once when that happens, and whenever everything was sent.
  virtual void notify(std::function<void()> callback) = 0;
};

class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  // When the head of a request is there, before its body: gives it its id, and returns a reply that refuses
  // it, or nullopt.
  virtual std::optional<HttpReply> admit(HttpRequest& head) = 0;
  // A request that could not be read: 400, 408, 413, 431, 503.
  virtual HttpReply refuse(HttpRequest& head, int status, const std::string& code,
                           const std::string& message) = 0;
  // Answers. Nothing it throws is caught: an exception ends the connection.
  virtual asio::awaitable<void> handle(HttpExchange& exchange) = 0;
  // Once for each request, also one that was refused: the status that was sent, or 499 where its client was
  // gone before that.
  virtual void replied(const HttpRequest& request, int status) = 0;
};

class HttpServer {
 public:
  // Binds; throws ThermoError with ExitCode::Listen. `handler` outlives it.
  HttpServer(asio::io_context& io, HttpOptions options, HttpHandler& handler);
  ~HttpServer();

  std::vector<std::string> urls() const;
  bool exposed() const;  // others than this machine can reach it
  int n_connections() const;
  // No new connections; idle ones are closed, the others end with their request.
  void stop_listening();
  // Closes every connection.
  void close_all();

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// Whether a listener of this URL is reached from this machine only. Throws ConfigError for what is no URL.
bool is_local_listener(const std::string& url);

}  // namespace thermo
