// Normal form C is done here in pieces instead of by utf8proc_map() on the whole text, for two reasons.
// Nearly all text is normal already, so most of it should be skipped, not copied. And utf8proc orders
// combining marks by insertion: a megabyte of marks in the wrong order would keep it busy for minutes.
//
// A code point is *stable* when it has combining class 0, never combines with what comes before it and never
// changes alone. Text may be cut before any stable code point and the parts normalised separately (UAX #15,
// section 9). So only the stretch from the last stable code point before an unstable one to the next stable
// one needs work.
#include "tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

namespace thermo {
namespace {

bool is_white_space(char32_t c) noexcept {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

constexpr auto kDecompose = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE);
constexpr auto kCompose = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);

// Appends the full canonical decomposition of one code point.
void append_decomposed(std::vector<utf8proc_int32_t>& out, char32_t c) {
  constexpr size_t kRoom = 32;  // the longest canonical decomposition has 4 code points
  const size_t old_size = out.size();
  out.resize(old_size + kRoom);
  int boundary_class = 0;
  const utf8proc_ssize_t n = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), out.data() + old_size,
                                                     kRoom, kDecompose, &boundary_class);
  out.resize(old_size + static_cast<size_t>(std::clamp<utf8proc_ssize_t>(n, 0, kRoom)));
}

void compose(std::vector<utf8proc_int32_t>& codes) {
  const auto n =
      utf8proc_normalize_utf32(codes.data(), static_cast<utf8proc_ssize_t>(codes.size()), kCompose);
  codes.resize(static_cast<size_t>(std::max<utf8proc_ssize_t>(n, 0)));
}

int combining_class(utf8proc_int32_t c) noexcept {
  return utf8proc_get_property(c)->combining_class;
}

class StableTable {
 public:
  StableTable() : stable_(kLimit, true) {
    std::vector<utf8proc_int32_t> codes;
    for (char32_t c = 0x80; c < kLimit; ++c) {
      if (combining_class(static_cast<utf8proc_int32_t>(c)) != 0) stable_[c] = false;
      codes.clear();
      append_decomposed(codes, c);
      if (codes.size() == 1 && codes[0] == static_cast<utf8proc_int32_t>(c)) continue;
      // The end of a decomposition may combine with what comes before it.
      for (size_t i = 1; i < codes.size(); ++i) stable_[static_cast<size_t>(codes[i])] = false;
      compose(codes);
      if (codes.size() != 1 || codes[0] != static_cast<utf8proc_int32_t>(c)) stable_[c] = false;
    }
  }
  bool is_stable(char32_t c) const noexcept { return c < kLimit && stable_[c]; }

 private:
  // Nothing above has a decomposition today. Such code points count as unstable: slower, never wrong.
  static constexpr size_t kLimit = 0x30000;
  std::vector<bool> stable_;
};

// Built at the first text that is not ASCII: a few milliseconds, 24 KiB.
const StableTable& stable_table() {
  static const StableTable table;
  return table;
}

// Appends normal form C of `part`. `codes` is scratch space.
void append_normalized(std::string& out, std::string_view part, std::vector<utf8proc_int32_t>& codes) {
  codes.clear();
  for (size_t i = 0; i < part.size();) {
    const DecodedChar c = decode_utf8(part, i);
    append_decomposed(codes, c.code);
    i += c.length;
  }
  for (size_t i = 0; i < codes.size();) {
    size_t end = i;
    while (end < codes.size() && combining_class(codes[end]) != 0) ++end;
    std::stable_sort(codes.begin() + static_cast<std::ptrdiff_t>(i),
                     codes.begin() + static_cast<std::ptrdiff_t>(end),
                     [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    i = end + 1;
  }
  compose(codes);
  for (const utf8proc_int32_t c : codes) append_utf8(out, static_cast<char32_t>(c));
}

}  // namespace

uint8_t char_class(char32_t c) noexcept {
  if (is_white_space(c)) return kClassSpace;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return kClassLetter;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
      return kClassMark;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return kClassNumber;
    default:
      return 0;
  }
}

std::string_view normalize_nfc(std::string_view text, std::string& storage) {
  size_t i = skip_ascii(text, 0);
  if (i == text.size()) return text;

  const StableTable& table = stable_table();
  std::vector<utf8proc_int32_t> codes;
  size_t copied = 0;
  bool changed = false;
  size_t last_stable = i == 0 ? 0 : i - 1;  // start of the code point before i, itself stable; i when none
  while (i < text.size()) {
    const DecodedChar c = decode_utf8(text, i);
    if (table.is_stable(c.code)) {
      const size_t next = skip_ascii(text, i + c.length);
      last_stable = next == i + c.length ? i : next - 1;
      i = next;
      continue;
    }
    size_t end = i + c.length;
    while (end < text.size()) {
      const DecodedChar next = decode_utf8(text, end);
      if (table.is_stable(next.code)) break;
      end += next.length;
    }
    if (!changed) storage.clear();
    changed = true;
    storage.append(text, copied, last_stable - copied);
    append_normalized(storage, text.substr(last_stable, end - last_stable), codes);
    copied = end;
    last_stable = end;
    i = end;
  }
  if (!changed) return text;
  storage.append(text, copied);
  return storage;
}

}  // namespace thermo
