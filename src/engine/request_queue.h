// Requests that wait for a slot, and which one is next. For one thread, or under its owner's lock.
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
  int64_t n_to_compute = 0;  // tokens of its prompt; once `is_counted`, without those that are known
  bool is_counted = false;
  bool sought_text = false;     // on a disk
  bool waits_for_text = false;  // which is read before it begins
};

class RequestQueue {
 public:
  void push(WaitingRequest waiting) {
    waiting.n_to_compute = static_cast<int64_t>(waiting.request.prompt.size());
    n_tokens_ += waiting.n_to_compute;
    waiting_.push_back(std::move(waiting));
  }
  // `change` may set what is known of each.
  template <class Change>
  void for_each(const Change& change) {
    n_tokens_ = 0;
    for (WaitingRequest& waiting : waiting_) {
      change(waiting);
      n_tokens_ += waiting.n_to_compute;
    }
  }
  // Keys take turns, then the sessions of a key; of those the oldest. nullptr: there is none that could
  // begin.
  WaitingRequest* next() {
    WaitingRequest* best = nullptr;
    for (WaitingRequest& one : waiting_)
      if (!one.waits_for_text && (best == nullptr || turn_of(one.request) < turn_of(best->request)))
        best = &one;
    return best;
  }
  // REQUIRES: there is a next one.
  WaitingRequest pop() {
    const WaitingRequest* const chosen = next();
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
  int n_ready() const {
    return static_cast<int>(std::count_if(waiting_.begin(), waiting_.end(),
                                          [](const WaitingRequest& one) { return !one.waits_for_text; }));
  }
  int64_t n_tokens() const { return n_tokens_; }  // to compute
  const WaitingRequest& oldest() const { return waiting_.front(); }
  // nullptr: none waits for one.
  const WaitingRequest* oldest_for_text() const {
    const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                    [](const WaitingRequest& one) { return one.waits_for_text; });
    return found == waiting_.end() ? nullptr : &*found;
  }

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
    n_tokens_ -= taken.n_to_compute;
    return taken;
  }

  std::list<WaitingRequest> waiting_;       // oldest first
  std::map<std::string, uint64_t> served_;  // the last turn of a key, and of a key's session
  uint64_t turn_ = 0;
  int64_t n_tokens_ = 0;
};

}  // namespace thermo
