// One connection: its requests one after the other, and a watch on the client while one is answered.
#pragma once

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <memory>
#include <optional>

#include "server/http/http_server.h"
#include "server/http/signal.h"

namespace thermo {

using Socket = asio::generic::stream_protocol::socket;

// Cancels or closes a socket when something takes too long.
class Deadline {
 public:
  Deadline(Socket& socket, bool closes) : socket_(socket), timer_(socket.get_executor()), closes_(closes) {}
  ~Deadline() { ++*generation_; }
  Deadline(const Deadline&) = delete;
  void arm(std::chrono::milliseconds time);
  void disarm() { ++*generation_, timer_.cancel(); }
  bool fired() const { return fired_; }  // since it was armed last

 private:
  Socket& socket_;
  asio::steady_timer timer_;
  bool closes_, fired_ = false;
  // A timer that has fired already may be too late for its operation, or for this.
  const std::shared_ptr<uint64_t> generation_ = std::make_shared<uint64_t>(0);
};

class Connection : public HttpExchange, public std::enable_shared_from_this<Connection> {
 public:
  struct Listener {
    bool loopback, unix_socket;
  };
  Connection(Socket socket, Listener listener, const HttpOptions& options, HttpHandler& handler);

  // Until the connection ends.
  asio::awaitable<void> run();
  // Answers 503 and ends.
  asio::awaitable<void> turn_away();
  // Ends now if no request is being answered, else after it.
  void finish();
  void close();

  const HttpRequest& request() const override { return request_; }
  void reply(HttpReply reply) override;
  void begin_stream(HttpReply head) override;
  void write(std::string_view bytes) override;
  void end_stream() override;
  size_t unsent_bytes() const override { return out_.size() + sending_.size() - n_sent_; }
  bool gone() const override { return gone_; }
  void notify(std::function<void()> callback) override { callback_ = std::move(callback); }

 private:
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  asio::awaitable<bool> wait_for_request(bool first);
  enum class Next { Answer, NextRequest, Close };
  asio::awaitable<Next> read_request(std::chrono::milliseconds head_time);
  asio::awaitable<bool> read_body(Parser& parser);
  bool refuse_bad_head(const boost::system::error_code& error);
  void take_head(const Parser& parser);
  void refuse(int status, const char* code, const char* message);
  asio::awaitable<void> watch();
  asio::awaitable<void> flush();
  void send(std::string bytes);
  asio::awaitable<void> drain();
  asio::awaitable<void> close_gently();
  void set_gone();
  void tell(int status);  // of the reply to the request that is read or answered

  Socket socket_;
  const Listener listener_;
  const HttpOptions& options_;
  HttpHandler& handler_;
  boost::beast::flat_buffer buffer_;
  Deadline read_deadline_, write_deadline_;
  Signal sent_, watch_ended_;
  std::function<void()> callback_;
  HttpRequest request_;

  std::string out_, sending_;
  size_t n_sent_ = 0;  // of sending_
  bool flushing_ = false, watching_ = false, waiting_ = false;
  bool gone_ = false, finishing_ = false, must_close_ = false, chunked_ = false;
  bool told_ = false;  // that there is a reply to this request
};

}  // namespace thermo
