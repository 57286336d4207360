// Strict UTF-8, and ranges of bytes in a text. Pure functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace thermo {

// A range [begin, end) of bytes.
struct ByteRange {
  size_t begin;
  size_t end;
  bool operator==(const ByteRange&) const = default;
};

inline constexpr char32_t kReplacement = 0xFFFD;
inline constexpr std::string_view kReplacementUtf8 = "\xEF\xBF\xBD";

struct DecodedChar {
  char32_t code;    // kReplacement when no well-formed sequence begins here
  uint32_t length;  // bytes; 1 when not well-formed
  bool valid;
};

// The character that begins at `text[pos]`. REQUIRES: pos < text.size().
DecodedChar decode_utf8(std::string_view text, size_t pos) noexcept;

// REQUIRES: a code point that is not a surrogate.
void append_utf8(std::string& out, char32_t c);

// How many bytes a sequence with this first byte has: 1 to 4, or 0 for a byte that begins none
// (80-C1, F5-FF).
int utf8_sequence_length(uint8_t lead) noexcept;

// Whether `byte` may be the second byte after `lead`. The third and fourth are always 80-BF.
bool is_utf8_second_byte(uint8_t lead, uint8_t byte) noexcept;

// Index of the first byte at or after `pos` that is not ASCII, or text.size().
size_t skip_ascii(std::string_view text, size_t pos) noexcept;

// The text with U+FFFD for each byte at which no well-formed sequence begins. Well-formed text is returned as
// it is, and `storage` is not touched; otherwise the result points into `storage`.
std::string_view replace_invalid_utf8(std::string_view text, std::string& storage);

// Text of a model, a file or a stranger for people: control characters, which a terminal would obey, become
// U+FFFD, and so does what is no UTF-8. Line ends and tabs stay.
std::string printable(std::string_view text);

}  // namespace thermo
