// Token ids to valid UTF-8 as it arrives. One thread per object.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "tokenizer/bpe.h"

namespace thermo {

// Bytes that come in arbitrary parts, as valid UTF-8. A character is held back until it is complete (three
// bytes at most). Bytes that can no longer become one give U+FFFD at once: one for an interrupted sequence
// and one for each other stray byte. The text does not depend on how the bytes are cut up.
class Utf8Assembler {
 public:
  // The text that these bytes complete; may be empty.
  std::string push(std::string_view bytes);
  // At the end of the stream: one U+FFFD if a character was left incomplete. The object is as new.
  std::string finish();

  // Bytes that are held back.
  size_t n_held() const noexcept { return n_held_; }

 private:
  std::array<char, 3> held_{};
  size_t n_held_ = 0;
};

class StreamDecoder {
 public:
  // `tokenizer` outlives the decoder.
  explicit StreamDecoder(const Tokenizer& tokenizer, DecodeOptions options = {})
      : tokenizer_(&tokenizer), options_(options) {}

  std::string push(int32_t id) { return assembler_.push(tokenizer_->visible_bytes(id, options_)); }
  std::string finish() { return assembler_.finish(); }

 private:
  const Tokenizer* tokenizer_;
  DecodeOptions options_;
  Utf8Assembler assembler_;
};

}  // namespace thermo
