// The published tokenizers cut with a regular expression. A general engine needs Unicode classes,
// look-ahead and backtracking for it and is slow; the expressions are simple enough to be scanned by hand.
//
// qwen35:
//   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*
//   |\s*[\r\n]+|\s+(?!\S)|\s+
// qwen2:
//   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*
//   |\s*[\r\n]+|\s+(?!\S)|\s+
// laguna first cuts into runs [^\n]+|[\n]+ and applies the expression of qwen2 to each run alone.
//
// They differ in where combining marks belong: words (qwen35) or punctuation (the others). Case is folded in
// ASCII only: full folding would let U+017F be the s of 's.
#include "tokenizer/pre_tokenizer.h"

#include <array>

#include "tokenizer/unicode.h"

namespace thermo {
namespace {

constexpr std::array<uint8_t, 128> make_ascii_classes() {
  std::array<uint8_t, 128> classes{};
  for (int c = '0'; c <= '9'; ++c) classes[static_cast<size_t>(c)] = kClassNumber;
  for (int c = 'a'; c <= 'z'; ++c) classes[static_cast<size_t>(c)] = kClassLetter;
  for (int c = 'A'; c <= 'Z'; ++c) classes[static_cast<size_t>(c)] = kClassLetter;
  for (int c = '\t'; c <= '\r'; ++c) classes[static_cast<size_t>(c)] = kClassSpace;
  classes[' '] = kClassSpace;
  return classes;
}
constexpr std::array<uint8_t, 128> kAsciiClasses = make_ascii_classes();

bool is_newline(char c) {
  return c == '\n' || c == '\r';
}

// Finds the end of the piece that begins at a given position.
class PieceEnd {
 public:
  PieceEnd(PreTokenizer kind, std::string_view text)
      : text_(text),
        word_(kind == PreTokenizer::Qwen35 ? kClassLetter | kClassMark : kClassLetter),
        not_punctuation_(word_ | kClassNumber | kClassSpace) {}

  // REQUIRES: pos < text.size().
  size_t find(size_t pos) const {
    if (text_[pos] == '\'') {
      if (const size_t length = contraction_length(pos + 1); length != 0) return pos + 1 + length;
    }
    const Char first = at(pos);
    // A word, after at most one character that is neither letter, digit nor newline.
    if ((first.cls & kClassNumber) != 0) return first.end;
    if ((first.cls & word_) != 0) return skip_while_in(word_, first.end);
    const bool newline = is_newline(text_[pos]);
    if (!newline && first.end < text_.size()) {
      const Char second = at(first.end);
      if ((second.cls & word_) != 0) return skip_while_in(word_, second.end);
    }
    // Punctuation, with one space before it and all newlines after it.
    size_t punctuation = pos;
    if (text_[pos] == ' ') punctuation = pos + 1;
    const size_t end = skip_punctuation(punctuation);
    if (end > punctuation) return skip_newlines(end);
    return white_space_end(pos);
  }

 private:
  struct Char {
    uint8_t cls;
    size_t end;
  };

  Char at(size_t pos) const {
    const auto byte = static_cast<uint8_t>(text_[pos]);
    if (byte < 0x80) return {kAsciiClasses[byte], pos + 1};
    const DecodedChar c = decode_utf8(text_, pos);
    return {char_class(c.code), pos + c.length};
  }

  size_t skip_while_in(int classes, size_t pos) const {
    while (pos < text_.size()) {
      const Char c = at(pos);
      if ((c.cls & classes) == 0) break;
      pos = c.end;
    }
    return pos;
  }

  size_t skip_punctuation(size_t pos) const {
    while (pos < text_.size()) {
      const Char c = at(pos);
      if ((c.cls & not_punctuation_) != 0) break;
      pos = c.end;
    }
    return pos;
  }

  size_t skip_newlines(size_t pos) const {
    while (pos < text_.size() && is_newline(text_[pos])) ++pos;
    return pos;
  }

  // Length of what may follow an apostrophe: s t m d re ve ll; 0 when it is none of them.
  size_t contraction_length(size_t pos) const {
    const auto letter = [&](size_t i) { return i < text_.size() ? text_[i] | 0x20 : 0; };
    const int first = letter(pos);
    switch (first) {
      case 's':
      case 't':
      case 'm':
      case 'd':
        return 1;
      case 'r':
      case 'v':
        return letter(pos + 1) == 'e' ? 2 : 0;
      case 'l':
        return letter(pos + 1) == 'l' ? 2 : 0;
      default:
        return 0;
    }
  }

  // Up to the last newline of the run if it has one. Otherwise all of it except the last character, which
  // goes to the word that follows; all of it if nothing follows or it is a single character.
  size_t white_space_end(size_t pos) const {
    size_t end = pos;
    size_t last = pos;          // start of the last character of the run
    size_t newlines_end = pos;  // end of the last newline in it
    while (end < text_.size()) {
      const Char c = at(end);
      if ((c.cls & kClassSpace) == 0) break;
      if (is_newline(text_[end])) newlines_end = c.end;
      last = end;
      end = c.end;
    }
    if (newlines_end > pos) return newlines_end;
    if (end < text_.size() && last > pos) return last;
    return end;
  }

  std::string_view text_;
  int word_;
  int not_punctuation_;
};

}  // namespace

std::string_view PieceScanner::next() {
  if (pos_ == text_.size()) return {};
  if (kind_ != PreTokenizer::Laguna) {
    run_end_ = text_.size();
  } else if (pos_ == run_end_) {
    const size_t end = text_[pos_] == '\n' ? text_.find_first_not_of('\n', pos_) : text_.find('\n', pos_);
    run_end_ = end == std::string_view::npos ? text_.size() : end;
  }
  const size_t begin = pos_;
  pos_ = PieceEnd(kind_, text_.substr(0, run_end_)).find(begin);
  return text_.substr(begin, pos_ - begin);
}

}  // namespace thermo
