// Characters as Python's str sees them: UTF-8 in and out, character classes, case mappings.
//
// Bytes that are not valid UTF-8 are kept: each decodes to kStrayByte + byte and encodes back to that byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace thermo::jinja {

inline constexpr char32_t kStrayByte = 0x40000000;

// The code point at byte `pos`, which is moved past it. REQUIRES: pos < s.size().
char32_t decode_utf8(std::string_view s, size_t& pos) noexcept;

// The start of the code point that ends at byte `end`. REQUIRES: 0 < end <= s.size().
size_t previous_code_point(std::string_view s, size_t end) noexcept;

void append_utf8(std::string& out, char32_t code);
bool is_ascii(std::string_view s) noexcept;
size_t count_code_points(std::string_view s) noexcept;

bool is_space(char32_t c) noexcept;  // str.isspace: White_Space plus U+001C-001F
bool is_alpha(char32_t c) noexcept;
bool is_decimal(char32_t c) noexcept;
bool is_digit(char32_t c) noexcept;
bool is_numeric(char32_t c) noexcept;
bool is_alnum(char32_t c) noexcept;
bool is_lower(char32_t c) noexcept;
bool is_upper(char32_t c) noexcept;
bool is_title(char32_t c) noexcept;
bool is_printable(char32_t c) noexcept;
bool is_word(char32_t c) noexcept;  // \w of a regular expression

// Append the mapped character; one may become up to three.
void append_upper(std::string& out, char32_t c);
void append_lower(std::string& out, char32_t c);
void append_title(std::string& out, char32_t c);
void append_folded(std::string& out, char32_t c);

// The tables that the functions above use; unicode_classes.cpp and unicode_cases.cpp are generated.
struct CodeRange {  // first, first + stride, ... last
  uint32_t first, last, stride;
};
struct CodeRangeTable {
  const CodeRange* ranges;
  size_t n_ranges;
};
struct CaseStep {  // first, first + stride, ... last: add delta
  uint32_t first, last;
  int32_t stride, delta;
};
struct CaseSpecial {  // zero-padded
  uint32_t code;
  uint32_t mapped[3];
};
struct CaseTable {
  const CaseStep* steps;
  size_t n_steps;
  const CaseSpecial* specials;
  size_t n_specials;
};
extern const CodeRangeTable kAlpha, kDecimal, kDigit, kNumeric, kLowercase, kUppercase, kTitlecase,
    kNotPrintable;
extern const CaseTable kToUpper, kToLower;
extern const CaseTable kToTitle;   // where it differs from kToUpper
extern const CaseTable kCaseFold;  // where it differs from kToLower

}  // namespace thermo::jinja
