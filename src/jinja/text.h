// UTF-8 text that remembers which of its bytes came from outside the template.
//
// A prompt mixes the template's own markup with what a user wrote. The tokenizer must cut special tokens in
// the first and never in the second, so the marks travel with the bytes through every string operation.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"  // ByteRange
#include "jinja/unicode.h"

namespace thermo::jinja {

struct Text {
  std::string bytes;
  std::vector<ByteRange> marks;  // ascending, never empty ranges, never touching

  Text() = default;
  explicit Text(std::string s) : bytes(std::move(s)) {}
  static Text all_marked(std::string s);

  size_t size() const noexcept { return bytes.size(); }
  bool empty() const noexcept { return bytes.empty(); }
  std::string_view view() const noexcept { return bytes; }

  void append(std::string_view s) { bytes.append(s); }
  void append(const Text& t) { append_slice(t, 0, t.size()); }
  // The bytes [begin, end) of `t` with their marks. REQUIRES: begin <= end <= t.size().
  void append_slice(const Text& t, size_t begin, size_t end);
  Text slice(size_t begin, size_t end) const;
  // Marks the bytes [begin, end). REQUIRES: no mark is after `begin`.
  void mark(size_t begin, size_t end);
};

// A text whose characters are `convert(code point, output)` of those of `t`; marks follow their characters.
template <class Convert>
Text convert_chars(const Text& t, Convert&& convert) {
  Text out;
  out.bytes.reserve(t.size());
  size_t next_mark = 0;
  for (size_t pos = 0; pos < t.size();) {
    while (next_mark < t.marks.size() && t.marks[next_mark].end <= pos) ++next_mark;
    const bool marked = next_mark < t.marks.size() && t.marks[next_mark].begin <= pos;
    const size_t begin = out.size();
    convert(decode_utf8(t.bytes, pos), out.bytes);
    if (marked) out.mark(begin, out.size());
  }
  return out;
}

}  // namespace thermo::jinja
