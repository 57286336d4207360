// Stop strings on a stream of text. One thread per object.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace thermo {

// Lets text through up to the first stop string: the leftmost match, and the longest of those that begin
// there. The match and all text after it are not emitted. Text that may still become a match is held back.
// What comes out, and which string matched, does not depend on how the text is cut up; so a match is decided
// only once no stop string that began earlier, or there and is longer, can still complete.
class StopMatcher {
 public:
  // Empty strings are ignored.
  explicit StopMatcher(std::vector<std::string> stops);

  // The text that is now certain to be visible. Nothing after a match.
  std::string push(std::string_view bytes);

  // At the end of the stream: what was held back, or what comes before a match that was still open for a
  // longer one. Call matched() after it.
  std::string flush();

  size_t n_held() const noexcept { return held_.size(); }
  bool matched() const noexcept { return matched_.has_value(); }
  // The stop string that matched; empty before. Valid as long as the matcher.
  std::string_view matched_stop() const noexcept {
    return matched() ? stops_[*matched_] : std::string_view{};
  }

 private:
  std::string advance(bool at_end);

  std::vector<std::string> stops_;  // longest first
  std::array<bool, 256> begins_stop_{};
  std::string held_;
  std::optional<size_t> matched_;
};

}  // namespace thermo
