#include "tokenizer/stream_decoder.h"

#include "base/utf8_chars.h"
#include "tokenizer/unicode.h"

namespace thermo {

std::string Utf8Assembler::push(std::string_view bytes) {
  std::string text;
  text.reserve(n_held_ + bytes.size());
  for (size_t i = 0; i < bytes.size();) {
    const auto byte = static_cast<uint8_t>(bytes[i]);
    if (n_held_ == 0) {
      if (byte < 0x80) {
        const size_t end = skip_ascii(bytes, i);
        text.append(bytes, i, end - i);
        i = end;
        continue;
      }
      if (utf8_sequence_length(byte) == 0) {
        text += kReplacementUtf8;
      } else {
        held_[n_held_++] = bytes[i];
      }
      ++i;
      continue;
    }
    const auto lead = static_cast<uint8_t>(held_[0]);
    const bool continues = n_held_ == 1 ? is_utf8_second_byte(lead, byte) : is_utf8_continuation(bytes[i]);
    if (!continues) {  // the byte itself is looked at again, as a first one
      text += finish();
      continue;
    }
    if (n_held_ + 1 == static_cast<size_t>(utf8_sequence_length(lead))) {
      text.append(held_.data(), n_held_);
      text += bytes[i];
      n_held_ = 0;
    } else {
      held_[n_held_++] = bytes[i];
    }
    ++i;
  }
  return text;
}

std::string Utf8Assembler::finish() {
  const bool incomplete = n_held_ != 0;
  n_held_ = 0;
  return std::string(incomplete ? kReplacementUtf8 : std::string_view{});
}

}  // namespace thermo
