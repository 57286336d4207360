// What the penalties look back on: the tokens of a window, counts of distinct tokens, and repeated runs.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "sampling/dry_breakers.h"

namespace thermo {

// How often each token occurs. Entries are in one array, because they are walked for every sampled token.
class TokenCounts {
 public:
  struct Entry {
    int32_t token;
    int32_t count;
  };
  void add(int32_t token);
  // REQUIRES: added more often than removed.
  void remove(int32_t token);
  std::span<const Entry> entries() const noexcept { return entries_; }

 private:
  std::vector<Entry> entries_;
  std::unordered_map<int32_t, size_t> index_;  // token to its index in entries_
};

// The last n tokens, oldest first, as one contiguous span.
class TokenWindow {
 public:
  explicit TokenWindow(int last_n) : last_n_(last_n) {}  // -1: all
  // Returns the token that left the window, or kNothing.
  int32_t push(int32_t token);
  std::span<const int32_t> tokens() const noexcept;

  static constexpr int32_t kNothing = -2;

 private:
  int last_n_;
  std::vector<int32_t> tokens_;  // the window is its end; the beginning is dropped now and then
};

// A token that would continue the run at the end of the history in the way an earlier equal run was
// continued.
struct RepeatedRun {
  int32_t next;
  int length;  // of the longest such run
};

// Finds those whose runs have at least `min_length` tokens, with no breaker and no negative token among them.
// `breakers` may be nullptr.
class RunFinder {
 public:
  std::span<const RepeatedRun> find(std::span<const int32_t> history, int min_length,
                                    const DryBreakers* breakers);

 private:
  std::vector<int> match_;  // per distance from the end: tokens that match those at the end
  std::vector<RepeatedRun> runs_;
  std::unordered_map<int32_t, size_t> index_;  // next to its index in runs_
};

}  // namespace thermo
