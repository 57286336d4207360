#include "base/utf8.h"

#include <cstdint>
#include <cstring>

#include "base/utf8_chars.h"

namespace thermo {

int utf8_sequence_length(uint8_t lead) noexcept {
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return 2;
  if (lead < 0xF0) return 3;
  return lead <= 0xF4 ? 4 : 0;
}

bool is_utf8_second_byte(uint8_t lead, uint8_t byte) noexcept {
  switch (lead) {
    case 0xE0:  // shorter forms exist
      return byte >= 0xA0 && byte <= 0xBF;
    case 0xED:  // surrogates
      return byte >= 0x80 && byte <= 0x9F;
    case 0xF0:
      return byte >= 0x90 && byte <= 0xBF;
    case 0xF4:  // above U+10FFFF
      return byte >= 0x80 && byte <= 0x8F;
    default:
      return is_utf8_continuation(static_cast<char>(byte));
  }
}

DecodedChar decode_utf8(std::string_view text, size_t pos) noexcept {
  constexpr DecodedChar kInvalid{kReplacement, 1, false};
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[pos + i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};
  const size_t length = static_cast<size_t>(utf8_sequence_length(lead));
  if (length == 0 || text.size() - pos < length || !is_utf8_second_byte(lead, byte(1))) return kInvalid;
  if (length == 2) return {static_cast<char32_t>((lead & 0x1F) << 6 | (byte(1) & 0x3F)), 2, true};
  if (!is_utf8_continuation(text[pos + 2])) return kInvalid;
  if (length == 3) {
    return {static_cast<char32_t>((lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F)), 3, true};
  }
  if (!is_utf8_continuation(text[pos + 3])) return kInvalid;
  return {static_cast<char32_t>((lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 |
                                (byte(3) & 0x3F)),
          4, true};
}

void append_utf8(std::string& out, char32_t c) {
  const auto tail = [&](int shift) { out += static_cast<char>(0x80 | (c >> shift & 0x3F)); };
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xC0 | c >> 6);
    tail(0);
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | c >> 12);
    tail(6);
    tail(0);
  } else {
    out += static_cast<char>(0xF0 | c >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

size_t skip_ascii(std::string_view text, size_t pos) noexcept {
  constexpr uint64_t kHighBits = 0x8080808080808080;
  for (uint64_t word; text.size() - pos >= sizeof word; pos += sizeof word) {
    std::memcpy(&word, text.data() + pos, sizeof word);
    if ((word & kHighBits) != 0) break;
  }
  while (pos < text.size() && static_cast<uint8_t>(text[pos]) < 0x80) ++pos;
  return pos;
}

std::string_view replace_invalid_utf8(std::string_view text, std::string& storage) {
  size_t copied = 0;  // text[0, copied) is in storage already
  bool changed = false;
  for (size_t i = skip_ascii(text, 0); i < text.size(); i = skip_ascii(text, i)) {
    const DecodedChar c = decode_utf8(text, i);
    if (!c.valid) {
      if (!changed) storage.clear();
      changed = true;
      storage.append(text, copied, i - copied);
      storage += kReplacementUtf8;
      copied = i + 1;
    }
    i += c.length;
  }
  if (!changed) return text;
  storage.append(text, copied);
  return storage;
}

std::string printable(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const DecodedChar c = decode_utf8(text, i);
    const bool obeyed =
        (c.code < 0x20 && c.code != '\n' && c.code != '\t') || (c.code >= 0x7F && c.code < 0xA0);
    if (obeyed || !c.valid) {
      out += kReplacementUtf8;
    } else {
      out += text.substr(i, c.length);
    }
    i += c.length;
  }
  return out;
}

}  // namespace thermo
