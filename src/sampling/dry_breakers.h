// Where repeated runs end for DRY: sequences of tokens over which no run extends, such as the end of a line.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace thermo {

class DryBreakers {
 public:
  // REQUIRES: at least one token.
  void add(std::span<const int32_t> sequence) {
    tails_[sequence.front()].emplace_back(sequence.begin() + 1, sequence.end());
    longest_ = std::max(longest_, static_cast<int>(sequence.size()));
    for (const int32_t token : sequence) {
      smallest_ = std::min(smallest_, token);
      largest_ = std::max(largest_, token);
    }
  }
  int longest() const { return longest_; }  // tokens of a sequence; 0: there is none
  // Whether all of them are tokens of such a vocabulary.
  bool fit(int n_vocab) const { return smallest_ >= 0 && largest_ < n_vocab; }
  // Tokens of the longest sequence that begins at `text[at]` and is all there; 0: none does.
  int length_at(std::span<const int32_t> text, size_t at) const {
    const auto found = tails_.find(text[at]);
    if (found == tails_.end()) return 0;
    const std::span<const int32_t> rest = text.subspan(at + 1);
    size_t longest = 0;
    for (const std::vector<int32_t>& tail : found->second)
      if (tail.size() <= rest.size() && std::equal(tail.begin(), tail.end(), rest.begin()))
        longest = std::max(longest, tail.size() + 1);
    return static_cast<int>(longest);
  }

 private:
  std::unordered_map<int32_t, std::vector<std::vector<int32_t>>> tails_;  // what follows the first token
  int longest_ = 0;
  int32_t smallest_ = 0, largest_ = -1;
};

}  // namespace thermo
