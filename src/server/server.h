// The server as its owner sees it: it listens, is told when the model is ready, and ends in good order.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/server_options.h"

namespace thermo {

class Server {
 public:
  // Listens, and answers from then on (503 until there is a model). Throws ConfigError, and ThermoError with
  // ExitCode::Listen.
  explicit Server(ServerOptions options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // These may be called from any thread.
  std::vector<std::string> urls() const;
  void set_progress(std::string stage, double ratio);
  void set_ready(ServedModel model);
  // Other keys, hosts and origins from the next request on.
  void set_access(const AccessOptions& access);
  // Also serves the lines of this descriptor, and answers on the other one; see stdio/pipe_server.h. Once,
  // after set_ready().
  void serve_pipe(int in, int out);
  // Everything that came through the pipe was answered and nothing more will come.
  bool pipe_ended() const;
  // Refuses new requests and lets running ones finish within the grace; the rest is cancelled. Returns when
  // nobody is served any more. `hurry`: asked now and then; true ends the grace.
  void shut_down(const std::function<bool()>& hurry = {});
  // Closes every connection and ends the threads; what still runs is cancelled. The engine goes after this
  // and before the server: it may still tell how cancelled requests ended. False: a worker is not ready after
  // the grace, and still uses what the server was given; the program must end without taking that down.
  bool stop();
  // Somebody asked for the end over HTTP.
  bool shutdown_requested() const;
  // The engine cannot go on: why; empty while it can.
  std::string fault() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
