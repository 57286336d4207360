// A request between the engine's thread and the one of the sockets. The engine pushes, the coroutine that
// answers takes; neither waits for the other.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/token_service.h"
#include "server/http/signal.h"

namespace thermo {

class LiveRequest : public std::enable_shared_from_this<LiveRequest> {
 public:
  using Event = std::pair<int, TokenEvent>;  // of which choice

  explicit LiveRequest(asio::io_context& io) : signal(io.get_executor()), io_(io) {}

  // Any thread.
  void push(int choice, TokenEvent event) {
    const std::lock_guard lock(mutex_);
    events_.emplace_back(choice, std::move(event));
    if (std::exchange(posted_, true)) return;
    asio::post(io_, [self = shared_from_this()] { self->signal.raise(); });
  }
  // The thread of the sockets.
  std::vector<Event> take() {
    const std::lock_guard lock(mutex_);
    posted_ = false;
    return std::exchange(events_, {});
  }

  Signal signal;

  // For those who look on; the thread of the sockets.
  std::string id, reply_id, key_name, dialect, session;
  std::string state = "queued";  // queued, prefill, reasoning, content, tool_call, paused
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  int n_prompt = 0, n_cached = 0, n_prompt_done = 0, n_written = 0;
  std::vector<RequestHandle> handles;
  bool cancelled = false;  // by somebody else than its client

 private:
  asio::io_context& io_;
  std::mutex mutex_;
  std::vector<Event> events_;
  bool posted_ = false;
};

}  // namespace thermo
