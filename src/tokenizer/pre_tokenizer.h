// Cuts text into the pieces that BPE merges within: words, digits, punctuation, white space.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace thermo {

// Qwen2 is that of the Qwen3 models, too.
enum class PreTokenizer : uint8_t { Qwen2, Qwen35, Laguna };

// Whether a text is brought to normal form C before it is cut.
constexpr bool normalizes(PreTokenizer kind) {
  return kind != PreTokenizer::Laguna;
}

// Walks over the pieces of a text from left to right. Together they are the whole text.
class PieceScanner {
 public:
  // REQUIRES: `text` is well-formed UTF-8 and outlives the scanner.
  PieceScanner(PreTokenizer kind, std::string_view text) : kind_(kind), text_(text) {}

  // The next piece; empty at the end of the text.
  std::string_view next();

 private:
  PreTokenizer kind_;
  std::string_view text_;
  size_t pos_ = 0;
  size_t run_end_ = 0;  // laguna: end of the run of newlines, or of other characters, around pos_
};

}  // namespace thermo
