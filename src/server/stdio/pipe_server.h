// `serve --stdio`: requests over one pipe. A line starts, continues or cancels a request or asks what there
// is; the lines of all answers come back in between, each with the id of its request.
//
// The requests are those of the APIs, answered by the same code; only the way in and out differs. What comes
// through the pipe is the owner's own, so no key is needed.
#pragma once

#include <memory>

#include "server/api_handler.h"
#include "server/server_state.h"

namespace thermo {

class PipeServer {
 public:
  // Any thread. The model is ready; both outlive it. Requests run on the thread of the sockets.
  PipeServer(ServerState& server, ApiHandler& handler, int in, int out);
  ~PipeServer();  // not on that thread

  // Nothing more will come and everything was answered, or nobody reads the answers. Any thread.
  bool ended() const;
  // The requests that still run are given up. On the thread of the sockets.
  void close_all();
  int n_running() const;  // the same

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace thermo
