#include "tokenizer/stop_matcher.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace thermo {

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::erase_if(stops_, [](const std::string& stop) { return stop.empty(); });
  std::stable_sort(stops_.begin(), stops_.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
  for (const std::string& stop : stops_) begins_stop_[static_cast<uint8_t>(stop[0])] = true;
}

std::string StopMatcher::push(std::string_view bytes) {
  if (matched_) return {};
  held_ += bytes;
  return advance(false);
}

std::string StopMatcher::flush() {
  if (matched_) return {};
  return advance(true);
}

// Emits up to the first position at which a stop string matches or, unless at_end, may still match.
std::string StopMatcher::advance(bool at_end) {
  size_t pos = 0;
  for (; pos < held_.size(); ++pos) {
    if (!begins_stop_[static_cast<uint8_t>(held_[pos])]) continue;
    const std::string_view rest = std::string_view(held_).substr(pos);
    bool open = false;
    // Longest first, so an open candidate seen before a match is longer than it.
    for (size_t i = 0; i < stops_.size() && !open && !matched_; ++i) {
      if (rest.starts_with(stops_[i])) {
        matched_ = i;
      } else if (!at_end && std::string_view(stops_[i]).starts_with(rest)) {
        open = true;
      }
    }
    if (open || matched_) break;
  }
  std::string visible = held_.substr(0, pos);
  held_.erase(0, matched_ ? held_.size() : pos);
  return visible;
}

}  // namespace thermo
