#include "jinja/unicode.h"

#include <algorithm>

#include "base/utf8.h"

namespace thermo::jinja {

namespace {

bool contains(const CodeRangeTable& table, char32_t c) noexcept {
  const CodeRange* end = table.ranges + table.n_ranges;
  const CodeRange* it = std::lower_bound(table.ranges, end, static_cast<uint32_t>(c),
                                         [](const CodeRange& r, uint32_t code) { return r.last < code; });
  return it != end && it->first <= c && (c - it->first) % it->stride == 0;
}

// False, and nothing appended, if the table does not have the character.
bool append_mapped(std::string& out, const CaseTable& table, char32_t c) {
  const uint32_t code = c;
  const CaseStep* steps_end = table.steps + table.n_steps;
  const CaseStep* step = std::lower_bound(table.steps, steps_end, code,
                                          [](const CaseStep& s, uint32_t x) { return s.last < x; });
  if (step != steps_end && step->first <= code && (code - step->first) % step->stride == 0) {
    append_utf8(out, static_cast<char32_t>(static_cast<int64_t>(code) + step->delta));
    return true;
  }
  const CaseSpecial* specials_end = table.specials + table.n_specials;
  const CaseSpecial* special = std::lower_bound(table.specials, specials_end, code,
                                                [](const CaseSpecial& s, uint32_t x) { return s.code < x; });
  if (special == specials_end || special->code != code) return false;
  for (const uint32_t mapped : special->mapped) {
    if (mapped != 0) append_utf8(out, mapped);
  }
  return true;
}

}  // namespace

char32_t decode_utf8(std::string_view s, size_t& pos) noexcept {
  const DecodedChar c = thermo::decode_utf8(s, pos);
  const char32_t code = c.valid ? c.code : kStrayByte + static_cast<unsigned char>(s[pos]);
  pos += c.length;
  return code;
}

size_t previous_code_point(std::string_view s, size_t end) noexcept {
  for (size_t back = 2; back <= 4 && back <= end; ++back)
    if (const DecodedChar c = thermo::decode_utf8(s, end - back); c.valid && c.length == back)
      return end - back;
  return end - 1;
}

void append_utf8(std::string& out, char32_t code) {
  if (code < kStrayByte) return thermo::append_utf8(out, code);
  out.push_back(static_cast<char>(code - kStrayByte));
}

bool is_ascii(std::string_view s) noexcept {
  return skip_ascii(s, 0) == s.size();
}

size_t count_code_points(std::string_view s) noexcept {
  size_t count = 0;
  for (size_t pos = 0; pos < s.size(); ++count) decode_utf8(s, pos);
  return count;
}

bool is_space(char32_t c) noexcept {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_alpha(char32_t c) noexcept {
  return contains(kAlpha, c);
}
bool is_decimal(char32_t c) noexcept {
  return contains(kDecimal, c);
}
bool is_digit(char32_t c) noexcept {
  return contains(kDigit, c);
}
bool is_numeric(char32_t c) noexcept {
  return contains(kNumeric, c);
}
bool is_alnum(char32_t c) noexcept {
  return is_alpha(c) || is_numeric(c) || is_digit(c) || is_decimal(c);
}
bool is_lower(char32_t c) noexcept {
  return contains(kLowercase, c);
}
bool is_upper(char32_t c) noexcept {
  return contains(kUppercase, c);
}
bool is_title(char32_t c) noexcept {
  return contains(kTitlecase, c);
}
bool is_printable(char32_t c) noexcept {
  return c < kStrayByte && !contains(kNotPrintable, c);
}
bool is_word(char32_t c) noexcept {
  return c == '_' || is_alnum(c);
}

void append_upper(std::string& out, char32_t c) {
  if (!append_mapped(out, kToUpper, c)) append_utf8(out, c);
}
void append_lower(std::string& out, char32_t c) {
  if (!append_mapped(out, kToLower, c)) append_utf8(out, c);
}
void append_title(std::string& out, char32_t c) {
  if (!append_mapped(out, kToTitle, c)) append_upper(out, c);
}
void append_folded(std::string& out, char32_t c) {
  if (!append_mapped(out, kCaseFold, c)) append_lower(out, c);
}

}  // namespace thermo::jinja
