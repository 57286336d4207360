// For tests over real sockets: a server whose engine plays tokens, and a client.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

#include "chat/text_model.h"
#include "engine/scripted_engine.h"
#include "server/server.h"

namespace thermo {

using namespace std::chrono_literals;

inline const TextModel& plankton() {
  static const TextModel model("");
  return model;
}
inline const PromptRenderer& renderer() {
  static const PromptRenderer one(plankton().tokenizer(), {});
  return one;
}

inline std::vector<TokenId> tokens_of(const std::string& text) {
  return plankton().tokenizer().encode(text);
}

// A client that is nothing but a socket.
class Client {
 public:
  explicit Client(const std::string& url) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(std::stoi(url.substr(url.rfind(':') + 1))));
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    const int small = 4096;
    setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    EXPECT_EQ(::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    timeval limit{.tv_sec = 120, .tv_usec = 0};
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  ~Client() { close(); }
  Client(const Client&) = delete;

  void close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }
  void send(const std::string& bytes) {
    EXPECT_EQ(::send(socket_, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  }
  void post(const std::string& path, const std::string& body) {
    send("POST " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: " +
         std::to_string(body.size()) + "\r\n\r\n" + body);
  }
  // Until `text` came so often, or (empty) until the server closed.
  std::string read_until(const std::string& text, int n_times = 1) {
    char piece[4096];
    const auto has_come = [&] {
      size_t at = 0;
      for (int i = 0; i < n_times; ++i) {
        at = seen_.find(text, at);
        if (at == std::string::npos) return false;
        at += text.size();
      }
      return true;
    };
    while (text.empty() || !has_come()) {
      const ssize_t n = ::recv(socket_, piece, sizeof(piece), 0);
      if (n <= 0) break;
      seen_.append(piece, static_cast<size_t>(n));
    }
    return seen_;
  }

 private:
  int socket_;
  std::string seen_;
};

// A server with an engine that plays tokens.
struct Running {
  explicit Running(ScriptedEngineOptions engine, ServerOptions options = {},
                   const Tokenizer* tokenizer = &plankton().tokenizer())
      : server(with_free_port(std::move(options))), service(std::move(engine)) {
    server.set_ready(served(service, tokenizer));
  }
  ~Running() { server.stop(); }
  static ServedModel served(TokenService& service, const Tokenizer* tokenizer = &plankton().tokenizer()) {
    ServedModel model;
    model.id = "m";
    model.tokenizer = tokenizer;
    model.renderer = &renderer();
    model.service = &service;
    model.trie = std::make_shared<const TokenTrie>(tokenizer->vocab());
    model.chat_template = renderer().source();
    return model;
  }
  static ServerOptions with_free_port(ServerOptions options) {
    options.http.listen = {"http://127.0.0.1:0"};
    return options;
  }
  std::string url() const { return server.urls().front(); }
  bool idle() const {
    const TokenServiceState state = service.state();
    return state.n_running == 0 && state.n_waiting == 0;
  }
  // Long before what was asked for would be over.
  void expect_idle() const {
    expect_soon([this] { return idle(); });
  }
  static void expect_soon(const std::function<bool()>& what) {
    const auto end = std::chrono::steady_clock::now() + 20s;
    while (!what() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(what());
  }

  Server server;
  ScriptedEngine service;  // goes first: see Server::stop()
};

inline const std::string kAsk =
    R"({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": false}})";
inline const std::string kStream =
    R"({"stream": true, "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": false}})";

}  // namespace thermo
