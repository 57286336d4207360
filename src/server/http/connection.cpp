#include "server/http/connection.h"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/read.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/read.hpp>

namespace thermo {
namespace {

namespace beast = boost::beast;
namespace http = boost::beast::http;
using boost::system::error_code;

constexpr size_t kMaxPipelined = 64 * 1024;
constexpr size_t kBodyPiece = 64 * 1024;
constexpr int kGone = 499;                                  // the client; nothing was sent
constexpr auto kGoodbye = std::chrono::milliseconds(2000);  // for a client that is still sending

auto into(error_code& error) {
  return asio::redirect_error(asio::use_awaitable, error);
}

// Why a program before this server could take the bytes after this head for something else than the server
// does; nullptr: it could not.
const char* ambiguity_of(const http::request_header<>& head) {
  const auto count = [&head](http::field name) { return head.count(name); };
  if (count(http::field::host) > 1) return "the request has several Host lines; send one";
  if (head.version() >= 11 && count(http::field::host) == 0)
    return "the request has no Host line; HTTP/1.1 needs one";
  if (count(http::field::transfer_encoding) == 0) return nullptr;
  if (head.version() < 11) return "HTTP/1.0 has no Transfer-Encoding; send a Content-Length";
  if (count(http::field::transfer_encoding) > 1 ||
      !beast::iequals(head[http::field::transfer_encoding], "chunked"))
    return "this Transfer-Encoding is not known; send chunked or a Content-Length";
  return nullptr;
}

// Empty lines before a request belong to none. Whether there is something after them.
bool skip_empty_lines(beast::flat_buffer& buffer) {
  while (buffer.size() > 0) {
    const auto* bytes = static_cast<const char*>(buffer.data().data());
    if (bytes[0] == '\r' && buffer.size() == 1) return false;
    const size_t n = bytes[0] == '\n' ? 1 : bytes[0] == '\r' && bytes[1] == '\n' ? 2 : 0;
    if (n == 0) return true;
    buffer.consume(n);
  }
  return false;
}

}  // namespace

void Deadline::arm(std::chrono::milliseconds time) {
  fired_ = false;
  const uint64_t mine = ++*generation_;
  timer_.expires_after(time);
  timer_.async_wait([this, mine, generation = generation_](const error_code& error) {
    if (error || mine != *generation) return;
    fired_ = true;
    error_code ignored;
    if (closes_)
      socket_.close(ignored);
    else
      socket_.cancel(ignored);
  });
}

Connection::Connection(Socket socket, Listener listener, const HttpOptions& options, HttpHandler& handler)
    : socket_(std::move(socket)),
      listener_(listener),
      options_(options),
      handler_(handler),
      buffer_(options.max_header_bytes + kBodyPiece),
      read_deadline_(socket_, false),
      write_deadline_(socket_, true),
      sent_(socket_.get_executor()),
      watch_ended_(socket_.get_executor()) {}

asio::awaitable<void> Connection::run() {
  const auto self = shared_from_this();
  for (bool first = true;; first = false) {
    const auto begin = std::chrono::steady_clock::now();
    const bool asked = co_await wait_for_request(first);
    if (!asked) break;
    must_close_ = finishing_;
    // A new connection has one time for its first byte and the rest of the head.
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(
        first ? std::chrono::steady_clock::now() - begin : std::chrono::steady_clock::duration(0));
    const Next next = co_await read_request(options_.header_timeout - waited);
    if (next == Next::Close) break;
    if (next == Next::NextRequest) continue;
    watching_ = true;
    asio::co_spawn(
        socket_.get_executor(), [self]() -> asio::awaitable<void> { return self->watch(); }, asio::detached);
    co_await handler_.handle(*this);
    tell(kGone);
    callback_ = nullptr;
    co_await drain();
    watching_ = false;
    error_code ignored;
    socket_.cancel(ignored);
    co_await watch_ended_.wait();
    if (must_close_ || gone_ || finishing_) break;
  }
  co_await drain();
  if (!gone_) co_await close_gently();
  read_deadline_.disarm();
  write_deadline_.disarm();
  close();
}

asio::awaitable<void> Connection::turn_away() {
  const auto self = shared_from_this();
  refuse(503, "server_is_overloaded", "there are too many connections");
  co_await drain();
  co_await close_gently();
  read_deadline_.disarm();
  write_deadline_.disarm();
  close();
}

void Connection::finish() {
  finishing_ = true;
  error_code ignored;
  if (waiting_) socket_.cancel(ignored);
}

void Connection::close() {
  error_code ignored;
  socket_.close(ignored);
}

// The first byte of the next request.
asio::awaitable<bool> Connection::wait_for_request(bool first) {
  if (skip_empty_lines(buffer_)) co_return true;
  if (finishing_) co_return false;
  error_code error;
  waiting_ = true;
  read_deadline_.arm(first ? options_.header_timeout : options_.keepalive_timeout);
  do {
    buffer_.commit(co_await socket_.async_read_some(buffer_.prepare(4096), into(error)));
  } while (!error && !skip_empty_lines(buffer_));
  read_deadline_.disarm();
  waiting_ = false;
  co_return !error;
}

asio::awaitable<Connection::Next> Connection::read_request(std::chrono::milliseconds head_time) {
  Parser parser;
  parser.header_limit(static_cast<uint32_t>(options_.max_header_bytes));
  parser.body_limit(options_.max_body_bytes);
  request_ = {};
  told_ = false;
  error_code error;
  read_deadline_.arm(head_time);
  co_await http::async_read_header(socket_, buffer_, parser, into(error));
  read_deadline_.disarm();
  take_head(parser);
  if (error) {
    const bool silent = read_deadline_.fired() || error == http::error::end_of_stream ||
                        error == http::error::partial_message ||
                        error.category() == asio::error::get_system_category();
    if (!silent) refuse_bad_head(error);
    co_return Next::Close;
  }
  if (request_.headers.size() > options_.max_headers) {
    refuse(431, "headers_too_large", "the request has too many headers");
    co_return Next::Close;
  }
  if (const char* ambiguity = ambiguity_of(parser.get())) {
    refuse(400, "invalid_request", ambiguity);
    co_return Next::Close;
  }
  if (std::optional<HttpReply> refusal = handler_.admit(request_)) {
    refusal->close |= !parser.is_done();
    reply(std::move(*refusal));
    co_await drain();
    co_return must_close_ ? Next::Close : Next::NextRequest;
  }
  if (!parser.is_done() && beast::iequals(request_.header("expect"), "100-continue"))
    send("HTTP/1.1 100 Continue\r\n\r\n");
  const bool whole = co_await read_body(parser);
  if (!whole) {
    tell(kGone);
    co_return Next::Close;
  }
  request_.body = std::move(parser.get().body());
  co_return Next::Answer;
}

asio::awaitable<bool> Connection::read_body(Parser& parser) {
  error_code error;
  while (!parser.is_done()) {
    read_deadline_.arm(options_.body_timeout);
    co_await http::async_read_some(socket_, buffer_, parser, into(error));
    read_deadline_.disarm();
    if (!error) continue;
    if (read_deadline_.fired())
      refuse(408, "request_timeout", "the body of the request did not arrive");
    else if (error == http::error::body_limit)
      refuse(413, "body_too_large", "the body of the request is too large");
    else if (error == http::error::bad_chunk || error == http::error::bad_chunk_extension)
      refuse(400, "invalid_request", "the chunks of the request's body cannot be read");
    co_return false;
  }
  co_return true;
}

bool Connection::refuse_bad_head(const error_code& error) {
  if (error == http::error::header_limit || error == http::error::buffer_overflow)
    refuse(431, "headers_too_large", "the head of the request is too large");
  else if (error == http::error::body_limit)
    refuse(413, "body_too_large", "the body of the request is too large");
  else
    refuse(400, "invalid_request", "this is not an HTTP request");
  return false;
}

void Connection::take_head(const Parser& parser) {
  const auto& message = parser.get();
  request_.method = std::string(message.method_string());
  request_.http11 = message.version() >= 11;
  request_.keep_alive = parser.is_header_done() && message.keep_alive();
  request_.loopback = listener_.loopback;
  request_.unix_socket = listener_.unix_socket;
  for (const auto& field : message) {
    std::string name(field.name_string());
    for (char& c : name)
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    request_.headers.emplace_back(std::move(name), std::string(field.value()));
  }
  split_target({message.target().data(), message.target().size()}, request_);
}

void Connection::refuse(int status, const char* code, const char* message) {
  HttpReply refusal = handler_.refuse(request_, status, code, message);
  refusal.close = true;
  reply(std::move(refusal));
}

// While a request is answered: notices that the client is gone without writing to it, and keeps what it sends
// ahead.
asio::awaitable<void> Connection::watch() {
  while (watching_ && !gone_ && buffer_.size() < kMaxPipelined) {
    error_code error;
    co_await socket_.async_wait(Socket::wait_read, into(error));
    if (!watching_) break;
    if (error) {
      set_gone();
      break;
    }
    socket_.non_blocking(true, error);
    const size_t n = socket_.read_some(buffer_.prepare(4096), error);
    buffer_.commit(n);
    if (error && error != asio::error::would_block) set_gone();
  }
  watch_ended_.raise();
}

void Connection::tell(int status) {
  if (!std::exchange(told_, true)) handler_.replied(request_, gone_ ? kGone : status);
}

void Connection::set_gone() {
  if (gone_) return;
  gone_ = true;
  out_.clear();
  sent_.raise();
  if (callback_) callback_();
}

void Connection::reply(HttpReply reply) {
  must_close_ |= reply.close || !request_.keep_alive;
  reply.close = must_close_;
  tell(reply.status);
  std::string bytes = reply_head(reply, request_, false);
  if (request_.method != "HEAD") bytes += reply.body;
  send(std::move(bytes));
}

void Connection::begin_stream(HttpReply head) {
  chunked_ = request_.http11;
  must_close_ |= head.close || !request_.keep_alive || !chunked_;
  head.close = must_close_;
  tell(head.status);
  send(reply_head(head, request_, true));
}

void Connection::write(std::string_view bytes) {
  if (bytes.empty() || request_.method == "HEAD") return;
  send(chunked_ ? chunk_of(bytes) : std::string(bytes));
}

void Connection::end_stream() {
  if (chunked_ && request_.method != "HEAD") send("0\r\n\r\n");
}

void Connection::send(std::string bytes) {
  if (gone_) return;
  out_ += bytes;
  if (flushing_) return;
  // Mostly the system takes it at once: no coroutine, no timer, nobody woken.
  error_code error;
  socket_.non_blocking(true, error);
  const size_t n = socket_.write_some(asio::buffer(out_), error);
  if (error && error != asio::error::would_block) return set_gone();
  out_.erase(0, n);
  if (out_.empty()) return;
  flushing_ = true;
  asio::co_spawn(
      socket_.get_executor(),
      [self = shared_from_this()]() -> asio::awaitable<void> { return self->flush(); }, asio::detached);
}

asio::awaitable<void> Connection::flush() {
  while (!out_.empty() && !gone_) {
    sending_ = std::exchange(out_, {});
    for (n_sent_ = 0; n_sent_ < sending_.size() && !gone_;) {
      error_code error;
      write_deadline_.arm(options_.write_stall_timeout);
      const size_t n = co_await socket_.async_write_some(
          asio::buffer(sending_.data() + n_sent_, sending_.size() - n_sent_), into(error));
      n_sent_ += n;
      write_deadline_.disarm();
      if (error) set_gone();
    }
    sending_.clear();
    n_sent_ = 0;
  }
  flushing_ = false;
  sent_.raise();
  if (callback_) callback_();
}

asio::awaitable<void> Connection::drain() {
  while (flushing_) co_await sent_.wait();
}

// Closing with unread bytes would reset the connection, and the client might not see the reply.
asio::awaitable<void> Connection::close_gently() {
  error_code error;
  socket_.shutdown(Socket::shutdown_send, error);
  read_deadline_.arm(kGoodbye);
  std::string dropped(64 * 1024, '\0');
  while (!error) co_await socket_.async_read_some(asio::buffer(dropped), into(error));
  read_deadline_.disarm();
}

}  // namespace thermo
