#include "sampling/token_history.h"

#include <algorithm>

namespace thermo {

void TokenCounts::add(int32_t token) {
  const auto [found, added] = index_.try_emplace(token, entries_.size());
  if (added)
    entries_.push_back({token, 1});
  else
    ++entries_[found->second].count;
}

void TokenCounts::remove(int32_t token) {
  const auto found = index_.find(token);
  const size_t place = found->second;
  if (--entries_[place].count > 0) return;
  entries_[place] = entries_.back();
  index_[entries_[place].token] = place;
  entries_.pop_back();
  index_.erase(token);
}

int32_t TokenWindow::push(int32_t token) {
  if (last_n_ == 0) return kNothing;
  tokens_.push_back(token);
  const auto n = static_cast<size_t>(last_n_);
  if (last_n_ < 0 || tokens_.size() <= n) return kNothing;
  const int32_t left = tokens_[tokens_.size() - n - 1];
  if (tokens_.size() >= 2 * n + 64) tokens_.erase(tokens_.begin(), tokens_.end() - last_n_);
  return left;
}

std::span<const int32_t> TokenWindow::tokens() const noexcept {
  const std::span<const int32_t> all(tokens_);
  return last_n_ < 0 ? all : all.last(std::min(all.size(), static_cast<size_t>(last_n_)));
}

std::span<const RepeatedRun> RunFinder::find(std::span<const int32_t> history, int min_length,
                                             const DryBreakers* breakers) {
  runs_.clear();
  index_.clear();
  const int n = static_cast<int>(history.size());
  const auto from_end = [&](int i) { return history[static_cast<size_t>(n - 1 - i)]; };

  // No run extends over a breaker: one that begins `at` tokens from the end may reach into the run.
  int limit = n;
  const int reach = breakers == nullptr ? 0 : breakers->longest() - 1;
  for (int at = 0; at < n && at < limit + reach; ++at) {
    if (from_end(at) < 0) limit = std::min(limit, at);
    if (breakers == nullptr) continue;
    const int length = breakers->length_at(history, static_cast<size_t>(n - 1 - at));
    if (length > 0) limit = std::min(limit, at - length + 1);
  }
  if (limit < min_length) return runs_;

  // The Z algorithm on the reversed history: match_[i] = how many tokens before distance i (itself included)
  // equal the ones at the end. [left, right) is the match found so far that reaches furthest. Linear time.
  match_.assign(static_cast<size_t>(n), 0);
  int left = 0, right = 0;
  for (int i = 1; i < n; ++i) {
    int length = i < right ? std::min(right - i, match_[static_cast<size_t>(i - left)]) : 0;
    while (i + length < n && from_end(length) == from_end(i + length)) ++length;
    match_[static_cast<size_t>(i)] = length;
    if (i + length > right) {
      left = i;
      right = i + length;
    }
    const int run = std::min(length, limit);
    if (run < min_length || from_end(i - 1) < 0) continue;
    const auto [found, added] = index_.try_emplace(from_end(i - 1), runs_.size());
    if (added)
      runs_.push_back({from_end(i - 1), run});
    else
      runs_[found->second].length = std::max(runs_[found->second].length, run);
  }
  return runs_;
}

}  // namespace thermo
