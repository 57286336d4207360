#include "server/http/http_server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <cstdlib>
#include <list>
#include <set>

#include "base/error.h"
#include "base/log.h"
#include "base/open_files.h"
#include "server/http/access.h"
#include "server/http/connection.h"

namespace thermo {
namespace {

using asio::ip::tcp;
using Local = asio::local::stream_protocol;
using boost::system::error_code;

constexpr int kBacklog = 4096;
constexpr int kSendBuffer = 128 * 1024;

struct ListenUrl {
  std::string unix_path;  // empty: TCP
  int descriptor = -1;    // of a socket that listens already; -1: none
  std::string host;
  uint16_t port = 8080;
};

ListenUrl parse_url(const std::string& url) {
  const auto bad = [&](const char* why) {
    return ConfigError(
        fmt::format("cannot listen on '{}': {}; write http://127.0.0.1:8080 or unix:/path", url, why));
  };
  ListenUrl out;
  if (url.starts_with("fd:")) {
    out.descriptor = std::atoi(url.c_str() + 3);
    return out;
  }
  if (url.starts_with("unix:")) {
    out.unix_path = url.substr(5);
    if (out.unix_path.starts_with("//")) out.unix_path.erase(0, 2);
    if (out.unix_path.empty() || out.unix_path.size() > 100)
      throw bad("the path has no or too many characters");
    return out;
  }
  if (url.starts_with("https://")) throw bad("TLS is not built in, put a proxy in front");
  std::string rest = url.starts_with("http://") ? url.substr(7) : url;
  if (rest.ends_with('/')) rest.pop_back();
  const size_t bracket = rest.find(']');
  const size_t colon = rest.find(':', bracket == std::string::npos ? 0 : bracket);
  out.host = rest.substr(0, colon);
  if (out.host.starts_with('[') && out.host.ends_with(']'))
    out.host = out.host.substr(1, out.host.size() - 2);
  if (out.host.empty()) throw bad("the host is missing");
  if (colon == std::string::npos) return out;
  const std::string port = rest.substr(colon + 1);
  if (port.empty() || port.size() > 5 || port.find_first_not_of("0123456789") != std::string::npos ||
      std::stoi(port) > 65535)
    throw bad("the port is not a number from 0 to 65535");
  out.port = static_cast<uint16_t>(std::stoi(port));
  return out;
}

// So many that files, pipes and what libraries open have descriptors, too.
int most_connections(int asked) {
  constexpr uint64_t kOthers = 64;
  const uint64_t limit = raise_open_file_limit();
  const uint64_t most = std::max(limit > kOthers ? limit - kOthers : 0, limit / 4);
  if (limit == 0 || most >= static_cast<uint64_t>(asked)) return asked;
  log_warning("server",
              "the system allows {} open files, so at most {} connections are served at a time, not {}",
              limit, most, asked);
  return static_cast<int>(most);
}

[[noreturn]] void throw_listen(const std::string& url, const std::string& why) {
  throw ThermoError(ExitCode::Listen,
                    fmt::format("cannot listen on {}: {}; choose another address or port", url, why));
}

}  // namespace

namespace {

// Where a socket listens; the family is AF_UNSPEC for what is no socket.
sockaddr_storage address_of(int descriptor) {
  sockaddr_storage address{};
  socklen_t n = sizeof(address);
  int listens = 0;
  socklen_t n_listens = sizeof(listens);
  if (getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &n_listens) != 0 || listens == 0) return {};
  if (getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &n) != 0) return {};
  return address;
}

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == 127;
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

}  // namespace

bool is_local_listener(const std::string& url) {
  const ListenUrl parsed = parse_url(url);
  if (parsed.descriptor >= 0) {
    const sockaddr_storage address = address_of(parsed.descriptor);
    return address.ss_family == AF_UNIX || is_loopback(address);
  }
  return !parsed.unix_path.empty() || is_loopback_name(parsed.host);
}

struct HttpServer::Impl : std::enable_shared_from_this<HttpServer::Impl> {
  asio::io_context& io;
  const HttpOptions options;
  HttpHandler& handler;
  std::list<tcp::acceptor> tcp_acceptors;
  std::list<Local::acceptor> unix_acceptors;
  std::vector<std::string> unix_paths, urls;
  std::list<std::weak_ptr<Connection>> connections;
  int n_open = 0, max_open;
  bool exposed = false;
  // A descriptor that is given up to tell a client that there are no others.
  int spare = ::open("/dev/null", O_RDONLY | O_CLOEXEC);

  Impl(asio::io_context& context, HttpOptions o, HttpHandler& h)
      : io(context), options(std::move(o)), handler(h), max_open(most_connections(options.max_connections)) {}
  ~Impl() {
    if (spare >= 0) ::close(spare);
  }

  void listen_tcp(const std::string& url, const ListenUrl& parsed);
  void listen_unix(const std::string& url, const ListenUrl& parsed);
  void listen_descriptor(const std::string& url, int descriptor);
  void begin(tcp::acceptor& acceptor);
  template <class Acceptor>
  asio::awaitable<void> accept(Acceptor& acceptor, Connection::Listener listener);
  template <class Acceptor>
  asio::awaitable<void> turn_one_away(Acceptor& acceptor, Connection::Listener listener);
  void start(Socket socket, Connection::Listener listener);
};

void HttpServer::Impl::listen_tcp(const std::string& url, const ListenUrl& parsed) {
  error_code error;
  tcp::resolver resolver(io);
  const auto found = resolver.resolve(parsed.host, std::to_string(parsed.port),
                                      tcp::resolver::passive | tcp::resolver::address_configured, error);
  if (error || found.empty()) throw_listen(url, "the host is not known");
  // A name may have several addresses: 127.0.0.1 and ::1. A free port is the same for all of them.
  std::set<tcp::endpoint> bound;
  uint16_t port = parsed.port;
  for (const auto& one : found) {
    const tcp::endpoint endpoint(one.endpoint().address(), port);
    if (bound.contains(endpoint)) continue;
    tcp::acceptor& acceptor = tcp_acceptors.emplace_back(io);
    acceptor.open(endpoint.protocol(), error);
    if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error && endpoint.protocol() == tcp::v6() && found.size() > 1)
      acceptor.set_option(asio::ip::v6_only(true), error);
    if (!error) acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(kBacklog, error);
    if (error) {
      tcp_acceptors.pop_back();
      const bool is_missing = error == asio::error::address_family_not_supported ||
                              error == boost::system::errc::address_not_available;
      const bool is_taken = parsed.port == 0 && !bound.empty();  // the port that was free elsewhere
      if (found.size() > 1 && (is_missing || is_taken)) continue;
      throw_listen(url, error.message());
    }
    begin(acceptor);
    port = acceptor.local_endpoint().port();
    bound.emplace(endpoint.address(), port);
  }
  if (bound.empty()) throw_listen(url, "none of its addresses is one of this machine");
}

void HttpServer::Impl::begin(tcp::acceptor& acceptor) {
  const tcp::endpoint endpoint = acceptor.local_endpoint();
  const bool loopback = endpoint.address().is_loopback();
  exposed |= !loopback;
  const bool v6 = endpoint.address().is_v6();
  urls.push_back(fmt::format("http://{}{}{}:{}", v6 ? "[" : "", endpoint.address().to_string(), v6 ? "]" : "",
                             endpoint.port()));
  asio::co_spawn(io, accept(acceptor, {loopback, false}), asio::detached);
}

// A supervisor made it and removes its file.
void HttpServer::Impl::listen_descriptor(const std::string& url, int descriptor) {
  error_code error;
  const sockaddr_storage address = address_of(descriptor);
  if (address.ss_family == AF_UNIX) {
    Local::acceptor& acceptor = unix_acceptors.emplace_back(io);
    acceptor.assign(Local(), descriptor, error);
    if (error) throw_listen(url, error.message());
    urls.push_back("unix:" + acceptor.local_endpoint().path());
    asio::co_spawn(io, accept(acceptor, {true, true}), asio::detached);
    return;
  }
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6)
    throw_listen(url, "the descriptor that was passed is no listening stream socket");
  tcp::acceptor& acceptor = tcp_acceptors.emplace_back(io);
  acceptor.assign(address.ss_family == AF_INET ? tcp::v4() : tcp::v6(), descriptor, error);
  if (error) throw_listen(url, error.message());
  begin(acceptor);
}

void HttpServer::Impl::listen_unix(const std::string& url, const ListenUrl& parsed) {
  error_code error;
  struct stat info {};
  if (::stat(parsed.unix_path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) throw_listen(url, "there is a file that is not a socket");
    Local::socket probe(io);
    probe.connect(Local::endpoint(parsed.unix_path), error);
    if (!error) throw_listen(url, "another server is listening there");
    ::unlink(parsed.unix_path.c_str());
  }
  Local::acceptor& acceptor = unix_acceptors.emplace_back(io);
  acceptor.open(Local(), error);
  if (!error) acceptor.bind(Local::endpoint(parsed.unix_path), error);
  // Nobody can connect before it listens, so nobody gets in with wider permissions.
  if (!error && ::chmod(parsed.unix_path.c_str(), static_cast<mode_t>(options.unix_socket_mode)) != 0)
    error.assign(errno, boost::system::system_category());
  if (!error) acceptor.listen(kBacklog, error);
  if (error) throw_listen(url, error.message());
  unix_paths.push_back(parsed.unix_path);
  urls.push_back("unix:" + parsed.unix_path);
  asio::co_spawn(io, accept(acceptor, {true, true}), asio::detached);
}

// Where no descriptor is left: with the spare one, so that the client hears of it.
template <class Acceptor>
asio::awaitable<void> HttpServer::Impl::turn_one_away(Acceptor& acceptor, Connection::Listener listener) {
  if (spare >= 0) ::close(std::exchange(spare, -1));
  error_code error;
  acceptor.non_blocking(true, error);  // it may be gone meanwhile
  auto socket = acceptor.accept(error);
  if (!error) {
    const auto connection =
        std::make_shared<Connection>(Socket(std::move(socket)), listener, options, handler);
    co_await connection->turn_away();
  }
  spare = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
}

template <class Acceptor>
asio::awaitable<void> HttpServer::Impl::accept(Acceptor& acceptor, Connection::Listener listener) {
  const auto self = shared_from_this();
  for (;;) {
    error_code error;
    auto socket = co_await acceptor.async_accept(asio::redirect_error(asio::use_awaitable, error));
    if (error == asio::error::operation_aborted || error == asio::error::bad_descriptor) co_return;
    if (error) {  // no descriptors left, or the client is gone again
      if (error == boost::system::errc::too_many_files_open ||
          error == boost::system::errc::too_many_files_open_in_system)
        co_await turn_one_away(acceptor, listener);
      asio::steady_timer pause(io, std::chrono::milliseconds(20));
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
      continue;
    }
    if constexpr (std::is_same_v<Acceptor, tcp::acceptor>) {
      socket.set_option(tcp::no_delay(true), error);
      socket.set_option(asio::socket_base::keep_alive(true), error);
    }
    // What a slow client has not read stays with us, where it is counted.
    socket.set_option(asio::socket_base::send_buffer_size(kSendBuffer), error);
    start(Socket(std::move(socket)), listener);
  }
}

void HttpServer::Impl::start(Socket socket, Connection::Listener listener) {
  auto connection = std::make_shared<Connection>(std::move(socket), listener, options, handler);
  const bool too_many = n_open >= max_open;
  ++n_open;
  const auto place = connections.insert(connections.end(), connection);
  asio::co_spawn(
      io,
      [connection, too_many]() -> asio::awaitable<void> {
        return too_many ? connection->turn_away() : connection->run();
      },
      [self = shared_from_this(), place](std::exception_ptr failure) {
        self->connections.erase(place);
        --self->n_open;
        if (!failure) return;
        try {
          std::rethrow_exception(failure);
        } catch (const std::exception& error) {
          log_error("server", "a connection failed: {}", error.what());
        }
      });
}

HttpServer::HttpServer(asio::io_context& io, HttpOptions options, HttpHandler& handler)
    : impl_(std::make_shared<Impl>(io, std::move(options), handler)) {
  for (const std::string& url : impl_->options.listen) {
    const ListenUrl parsed = parse_url(url);
    if (parsed.descriptor >= 0)
      impl_->listen_descriptor(url, parsed.descriptor);
    else if (parsed.unix_path.empty())
      impl_->listen_tcp(url, parsed);
    else
      impl_->listen_unix(url, parsed);
  }
}

HttpServer::~HttpServer() {
  stop_listening();
}

std::vector<std::string> HttpServer::urls() const {
  return impl_->urls;
}
bool HttpServer::exposed() const {
  return impl_->exposed;
}
int HttpServer::n_connections() const {
  return impl_->n_open;
}

void HttpServer::stop_listening() {
  error_code ignored;
  for (auto& acceptor : impl_->tcp_acceptors) acceptor.close(ignored);
  for (auto& acceptor : impl_->unix_acceptors) acceptor.close(ignored);
  for (const std::string& path : std::exchange(impl_->unix_paths, {})) ::unlink(path.c_str());
  for (const auto& weak : impl_->connections)
    if (const auto connection = weak.lock()) connection->finish();
}

void HttpServer::close_all() {
  for (const auto& weak : impl_->connections)
    if (const auto connection = weak.lock()) connection->close();
}

}  // namespace thermo
