// Characters as sequences of bytes, for automata.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "grammar/rule_set.h"

namespace thermo {

struct ByteSpan {
  uint8_t first, last;
  auto operator<=>(const ByteSpan&) const = default;
};
// The UTF-8 of a range of characters: one to four ranges of bytes, one after the other.
using ByteSequence = std::vector<ByteSpan>;

// The characters of the ranges, surrogates left out, as sequences; together they are exactly those.
std::vector<ByteSequence> utf8_sequences(std::span<const CharRange> ranges);

// Well-formed UTF-8: the state after a byte, kUtf8Broken when it cannot follow. A text ends at kUtf8Whole.
inline constexpr uint8_t kUtf8Whole = 0, kUtf8Broken = 0xFF;
uint8_t utf8_next(uint8_t state, uint8_t byte);

}  // namespace thermo
