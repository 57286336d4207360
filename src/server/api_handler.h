// The HTTP side of the APIs: who may, which endpoint, and errors in the words of each dialect.
#pragma once

#include "server/generation.h"
#include "server/http/http_server.h"
#include "server/routes.h"
#include "server/server_state.h"
#include "server/token_endpoints.h"

namespace thermo {

class ApiHandler : public HttpHandler {
 public:
  // `on_shutdown` is called when a caller with the right key asks for it.
  ApiHandler(ServerState& server, std::function<void()> on_shutdown)
      : server_(server), on_shutdown_(std::move(on_shutdown)) {}

  std::optional<HttpReply> admit(HttpRequest& head) override;
  HttpReply refuse(HttpRequest& head, int status, const std::string& code,
                   const std::string& message) override;
  asio::awaitable<void> handle(HttpExchange& exchange) override;
  void replied(const HttpRequest& request, int status) override;
  // The same for a request of the program's owner, which needs no admission, and which may go on later.
  asio::awaitable<void> handle_owner(HttpExchange& exchange, Continuation& continuation);

  // What a small body asks for: of a request that is answered, or of the heat of experts.
  struct Order {
    std::string action, id, name;
  };

 private:
  using Headers = std::vector<std::pair<std::string, std::string>>;

  std::string path_of(const HttpRequest& request) const;  // below the prefix; empty: it is not
  void give_id(HttpRequest& request) const;
  Headers headers_of(const HttpRequest& request) const;
  HttpReply error_reply(const HttpRequest& request, const ApiError& error) const;
  HttpReply preflight(const HttpRequest& request) const;
  void note_refusal(const HttpRequest& request, const ApiError& error) const;
  std::optional<Access::Caller> caller_of(const HttpRequest& request) const;
  void check(const HttpRequest& request, const RouteMatch& match) const;
  void check_state(const Route& route) const;
  asio::awaitable<void> answer(HttpExchange& exchange, const RouteMatch& match, Continuation* continuation);
  asio::awaitable<void> dispatch(HttpExchange& exchange, const RouteMatch& match, Continuation* continuation);
  // nullptr: the client is gone.
  asio::awaitable<std::unique_ptr<TokenReply>> token_endpoint(HttpExchange& exchange, const Route& route);
  Json body_of(const HttpRequest& request) const;
  asio::awaitable<HttpReply> deep_health(const HttpRequest& request);
  asio::awaitable<int> n_cached(std::vector<TokenId> prompt);
  LiveRequest& live_request(std::string_view id, const std::optional<Access::Caller>& caller);
  HttpReply obey(const Order& order, const RouteMatch& match, const std::optional<Access::Caller>& caller);
  HttpReply look(const HttpRequest& request, const RouteMatch& match);

  ServerState& server_;
  std::function<void()> on_shutdown_;
};

}  // namespace thermo
