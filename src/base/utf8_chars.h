// Characters of UTF-8 by their bytes alone, for those who count or cut and need no code points (utf8.h has
// these). Each character is counted where it begins.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace thermo {

// 80-BF: a byte that continues a character.
constexpr bool is_utf8_continuation(char byte) noexcept {
  return (static_cast<uint8_t>(byte) & 0xC0) == 0x80;
}

inline size_t count_utf8_chars(std::string_view text) noexcept {
  return text.size() - static_cast<size_t>(std::count_if(text.begin(), text.end(), is_utf8_continuation));
}

}  // namespace thermo
