// Requests that wait for a slot, and whose turn it is. One thread, or under its owner's lock.
#pragma once

#include <algorithm>
#include <chrono>
#include <list>
#include <map>

#include "engine/token_service.h"

namespace thermo {

struct WaitingRequest {
  RequestHandle handle;
  TokenRequest request;
  std::chrono::steady_clock::time_point since;
};

class RequestQueue {
 public:
  void push(WaitingRequest waiting) {
    n_tokens_ += static_cast<int64_t>(waiting.request.prompt.size());
    waiting_.push_back(std::move(waiting));
  }
  // Keys take turns, then the sessions of a key; of those the oldest. REQUIRES: not empty.
  const WaitingRequest& next() const {
    return *std::min_element(waiting_.begin(), waiting_.end(), [this](const auto& a, const auto& b) {
      return turn_of(a.request) < turn_of(b.request);
    });
  }
  WaitingRequest pop() {
    const WaitingRequest* const chosen = &next();
    auto best = waiting_.begin();
    while (&*best != chosen) ++best;
    served_[best->request.fairness_key] = ++turn_;
    served_[session_of(best->request)] = turn_;
    if (served_.size() > kMaxRemembered) served_.clear();
    return take(best);
  }
  // The request with this handle, if it still waits.
  std::optional<WaitingRequest> remove(RequestHandle handle) {
    for (auto it = waiting_.begin(); it != waiting_.end(); ++it)
      if (it->handle == handle) return take(it);
    return std::nullopt;
  }
  bool empty() const { return waiting_.empty(); }
  int size() const { return static_cast<int>(waiting_.size()); }
  int64_t n_tokens() const { return n_tokens_; }
  const WaitingRequest& oldest() const { return waiting_.front(); }

 private:
  static constexpr size_t kMaxRemembered = 4096;

  static std::string session_of(const TokenRequest& request) {
    return request.fairness_key + '\0' + request.session_key;
  }
  std::pair<uint64_t, uint64_t> turn_of(const TokenRequest& request) const {
    const auto when = [this](const std::string& key) {
      const auto found = served_.find(key);
      return found == served_.end() ? 0 : found->second;
    };
    return {when(request.fairness_key), when(session_of(request))};
  }
  WaitingRequest take(std::list<WaitingRequest>::iterator it) {
    WaitingRequest taken = std::move(*it);
    waiting_.erase(it);
    n_tokens_ -= static_cast<int64_t>(taken.request.prompt.size());
    return taken;
  }

  std::list<WaitingRequest> waiting_;       // oldest first
  std::map<std::string, uint64_t> served_;  // the last turn of a key, and of a key's session
  uint64_t turn_ = 0;
  int64_t n_tokens_ = 0;
};

}  // namespace thermo
