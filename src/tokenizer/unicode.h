// The few facts about Unicode that tokenising needs: the classes that the pre-tokenizer's expressions name,
// and normal form C. Pure functions, any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/utf8.h"

namespace thermo {

// Bits of char_class(). Unassigned, private and surrogate code points have none of them.
inline constexpr uint8_t kClassLetter = 1;  // \p{L}
inline constexpr uint8_t kClassMark = 2;    // \p{M}
inline constexpr uint8_t kClassNumber = 4;  // \p{N}: Nd, Nl and No
inline constexpr uint8_t kClassSpace = 8;   // \s: White_Space
uint8_t char_class(char32_t c) noexcept;

// Normal form C of well-formed UTF-8. Text that a quick look shows to be normal is returned as it is;
// otherwise the result points into `storage`. Time is O(n log n) for every input.
std::string_view normalize_nfc(std::string_view text, std::string& storage);

}  // namespace thermo
