// Which known word was probably meant.
#include <algorithm>

#include "cli/options/options.h"

namespace thermo {
namespace {

// Edit distance with neighbouring letters swapped counted as one edit.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before_last(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      size_t change = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({change, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
    before_last.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

}  // namespace

std::string nearest_match(std::string_view word, std::span<const std::string> candidates) {
  // A third of the letters may be wrong; more is another word. Of "-x" every other letter would be near.
  size_t best_distance = word.size() < 3 ? 1 : std::max<size_t>(1, word.size() / 3) + 1;
  std::string best;
  for (const std::string& candidate : candidates) {
    size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  if (!best.empty() || word.size() < 4) return best;
  for (const std::string& candidate : candidates)  // --temperature for --temp, and the other way round
    if (candidate.starts_with(word) || (candidate.size() > 5 && word.starts_with(candidate)))
      return candidate;
  return best;
}

}  // namespace thermo
