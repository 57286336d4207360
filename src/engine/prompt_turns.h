// Whose prompt a step reads, and how much of it. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace thermo {

// Prompts of which so little is left are short: they go first.
inline constexpr size_t kShortPrompt = 512;

struct PromptTurn {
  size_t prompt;  // which
  size_t most;    // rows of it
};

// Of `n_rows` rows, short prompts have half, so that a question does not wait for a long text to be read; the
// other half is for the others, the oldest first. Where there are only short ones, they have all.
// `n_left`: rows of each prompt, the oldest first; 0: it is not read now.
inline std::vector<PromptTurn> prompt_turns(std::span<const size_t> n_left, size_t n_rows) {
  const auto is_short = [](size_t n) { return n <= kShortPrompt; };
  const bool mixed = !std::all_of(n_left.begin(), n_left.end(), is_short);
  size_t n_short = mixed ? std::max<size_t>(n_rows / 2, 1) : n_rows;
  std::vector<PromptTurn> turns;
  for (size_t i = 0; i < n_left.size() && n_short > 0; ++i) {
    if (n_left[i] == 0 || !is_short(n_left[i])) continue;
    turns.push_back({i, std::min(n_left[i], n_short)});
    n_short -= turns.back().most;
  }
  for (size_t i = 0; i < n_left.size(); ++i)
    if (!is_short(n_left[i])) turns.push_back({i, n_left[i]});
  return turns;
}

}  // namespace thermo
