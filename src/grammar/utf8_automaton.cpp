#include "grammar/utf8_automaton.h"

#include <algorithm>
#include <string>

#include "base/utf8.h"

namespace thermo {
namespace {

ByteSequence encode(char32_t c) {
  std::string bytes;
  append_utf8(bytes, c);
  ByteSequence sequence;
  for (const char b : bytes) sequence.push_back({static_cast<uint8_t>(b), static_cast<uint8_t>(b)});
  return sequence;
}

// Cuts a range until its first and last character differ only in bytes before which all are equal and after
// which all run over everything.
void add_range(char32_t first, char32_t last, std::vector<ByteSequence>& out) {
  if (first > last) return;
  // Border of lengths and the gap of surrogates.
  for (const char32_t border :
       {char32_t{0x80}, char32_t{0x800}, char32_t{0xD800}, char32_t{0xE000}, char32_t{0x10000}})
    if (first < border && last >= border) {
      add_range(first, border - 1, out);
      return add_range(border, last, out);
    }
  if (first >= 0xD800 && last <= 0xDFFF) return;
  for (int bits = 6; bits <= 18 && last >= 0x80; bits += 6) {
    const char32_t low = (char32_t{1} << bits) - 1;
    if ((first & ~low) == (last & ~low)) break;
    if ((first & low) != 0) {
      add_range(first, first | low, out);
      return add_range((first | low) + 1, last, out);
    }
    if ((last & low) != low) {
      add_range(first, (last & ~low) - 1, out);
      return add_range(last & ~low, last, out);
    }
  }
  ByteSequence sequence = encode(first);
  const ByteSequence end = encode(last);
  for (size_t i = 0; i < sequence.size(); ++i) sequence[i].last = end[i].last;
  out.push_back(std::move(sequence));
}

}  // namespace

std::vector<ByteSequence> utf8_sequences(std::span<const CharRange> ranges) {
  std::vector<ByteSequence> out;
  for (const CharRange& range : ranges) add_range(range.first, range.last, out);
  return out;
}

uint8_t utf8_next(uint8_t state, uint8_t byte) {
  enum : uint8_t { Whole, One, Two, Three, AfterE0, AfterED, AfterF0, AfterF4 };
  const auto within = [byte](int first, int last, uint8_t next) {
    return byte >= first && byte <= last ? next : kUtf8Broken;
  };
  switch (state) {
    case Whole:
      if (byte < 0x80) return Whole;
      if (byte < 0xC2 || byte > 0xF4) return kUtf8Broken;
      if (byte < 0xE0) return One;
      if (byte < 0xF0) return byte == 0xE0 ? AfterE0 : byte == 0xED ? AfterED : Two;
      return byte == 0xF0 ? AfterF0 : byte == 0xF4 ? AfterF4 : Three;
    case One:
      return within(0x80, 0xBF, Whole);
    case Two:
      return within(0x80, 0xBF, One);
    case Three:
      return within(0x80, 0xBF, Two);
    case AfterE0:
      return within(0xA0, 0xBF, One);
    case AfterED:
      return within(0x80, 0x9F, One);
    case AfterF0:
      return within(0x90, 0xBF, Two);
    case AfterF4:
      return within(0x80, 0x8F, Two);
    default:
      return kUtf8Broken;
  }
}

}  // namespace thermo
