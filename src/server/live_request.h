// A request between the engine's thread and the one of the sockets. The engine pushes, the coroutine that
// answers takes; neither waits for the other.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <deque>
#include <iterator>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "chat/answer_constraint.h"
#include "engine/token_service.h"
#include "server/http/signal.h"
#include "server/metrics.h"

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
  // The thread of the sockets. Not more than a few at a time, so that other requests get their turn.
  std::vector<Event> take() {
    const std::lock_guard lock(mutex_);
    if (events_.size() <= kMaxTaken) {
      posted_ = false;
      std::vector<Event> all(std::make_move_iterator(events_.begin()),
                             std::make_move_iterator(events_.end()));
      events_.clear();
      return all;
    }
    const auto end = events_.begin() + kMaxTaken;
    std::vector<Event> taken(std::make_move_iterator(events_.begin()), std::make_move_iterator(end));
    events_.erase(events_.begin(), end);
    asio::post(io_, [self = shared_from_this()] { self->signal.raise(); });
    return taken;
  }

  // The thread of the sockets: from now on it is only waited for its end.
  void cancel_begins(const std::string& phase) {
    const std::lock_guard lock(mutex_);
    cancelled_in_ = phase;
    cancelled_at_ = std::chrono::steady_clock::now();
  }
  // The engine's thread: one of its answers has ended.
  void ended(Metrics& metrics) {
    const std::lock_guard lock(mutex_);
    if (cancelled_in_.empty()) return;
    metrics.observe("thermocline_cancel_latency_seconds",
                    std::chrono::duration<double>(std::chrono::steady_clock::now() - cancelled_at_).count(),
                    "phase=\"" + cancelled_in_ + "\"");
  }

  Signal signal;

  const std::string& shown_state() const {
    static const std::string kPaused = "paused";
    return paused ? kPaused : state;
  }

  // For those who look on; the thread of the sockets.
  std::string id, reply_id, key_name, dialect, session;
  std::string state = "queued";  // queued, prefill, reasoning, content, tool_call
  bool paused = false;           // its client does not read
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point first_token = {};
  const std::vector<std::vector<TokenId>>* prompts = nullptr;  // while it is listed
  int n_prompt = 0, n_cached = 0, n_prompt_done = 0, n_written = 0;
  SamplingParams sampling;
  int max_tokens = -1;  // of each answer; -1: what the context holds
  std::vector<RequestHandle> handles;
  std::vector<std::shared_ptr<AnswerConstraint>> constraints;  // of its answers; empty: there are none
  bool cancelled = false;                                      // by somebody else than its client

 private:
  static constexpr int kMaxTaken = 64;

  asio::io_context& io_;
  std::mutex mutex_;
  std::deque<Event> events_;
  bool posted_ = false;
  std::string cancelled_in_;  // phase; empty: it is not cancelled
  std::chrono::steady_clock::time_point cancelled_at_;
};

}  // namespace thermo
