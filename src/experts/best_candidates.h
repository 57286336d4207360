// The best few of many experts, in order: those that should move to the device, or leave it.
#pragma once

#include <array>
#include <cstddef>

namespace thermo {

inline constexpr int kCandidates = 16;  // remembered of a layer, each way in and out

struct Candidate {
  int id = -1;
  float value = 0.0f;
};

// The best few by an order.
struct BestCandidates {
  std::array<Candidate, kCandidates> list;
  int n = 0;

  template <class Before>
  void offer(Candidate c, const Before& before) noexcept {
    if (n == kCandidates) {
      if (!before(c, list[kCandidates - 1])) return;
      --n;
    }
    int at = n++;
    for (; at > 0 && before(c, list[static_cast<size_t>(at) - 1]); --at)
      list[static_cast<size_t>(at)] = list[static_cast<size_t>(at) - 1];
    list[static_cast<size_t>(at)] = c;
  }
  void remove(int at) noexcept {
    for (--n; at < n; ++at) list[static_cast<size_t>(at)] = list[static_cast<size_t>(at) + 1];
  }
};

}  // namespace thermo
