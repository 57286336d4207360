// The scanner is checked against the regular expressions themselves, written as ordered alternatives with
// explicit backtracking, on code points.
#include "tokenizer/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tokenizer/unicode.h"

namespace thermo {
namespace {

using ::testing::ElementsAre;
using Codes = std::u32string;
using Matches = std::function<bool(char32_t)>;

std::string utf8(std::u32string_view codes) {
  std::string text;
  for (const char32_t c : codes) append_utf8(text, c);
  return text;
}

std::vector<std::string> split(PreTokenizer kind, std::string_view text) {
  std::vector<std::string> pieces;
  PieceScanner scanner(kind, text);
  for (std::string_view piece = scanner.next(); !piece.empty(); piece = scanner.next())
    pieces.emplace_back(piece);
  return pieces;
}

// One element of an expression: a class, repeated min to max times, greedily.
struct Repeat {
  Matches matches;
  size_t min, max;
};

constexpr size_t kNoMatch = static_cast<size_t>(-1);
constexpr size_t kMany = static_cast<size_t>(-1);

// End of the match of elements[k...] at pos, trying longer repetitions first; kNoMatch when there is none.
size_t match_sequence(const Codes& text, size_t pos, const std::vector<Repeat>& elements, size_t k,
                      const std::function<bool(size_t)>& look_ahead) {
  if (k == elements.size()) return look_ahead(pos) ? pos : kNoMatch;
  size_t n = 0;
  while (n < elements[k].max && pos + n < text.size() && elements[k].matches(text[pos + n])) ++n;
  for (;; --n) {
    if (n < elements[k].min) return kNoMatch;
    const size_t end = match_sequence(text, pos + n, elements, k + 1, look_ahead);
    if (end != kNoMatch || n == 0) return end;
  }
}

std::vector<Codes> split_by_regex(const Codes& text, bool marks_in_words) {
  const auto has = [](char32_t c, int bits) { return (char_class(c) & bits) != 0; };
  const int word_bits = marks_in_words ? kClassLetter | kClassMark : kClassLetter;
  const Matches word = [=](char32_t c) { return has(c, word_bits); };
  const Matches number = [=](char32_t c) { return has(c, kClassNumber); };
  const Matches space = [=](char32_t c) { return has(c, kClassSpace); };
  const Matches newline = [](char32_t c) { return c == U'\r' || c == U'\n'; };
  const Matches prefix = [=](char32_t c) { return !newline(c) && !has(c, kClassLetter | kClassNumber); };
  const Matches blank = [](char32_t c) { return c == U' '; };
  const Matches punctuation = [=](char32_t c) { return !has(c, kClassSpace | kClassNumber | word_bits); };
  const auto letter = [](char32_t wanted) -> Repeat {
    return {[=](char32_t c) { return c == wanted || (wanted >= U'a' && c == wanted - 0x20); }, 1, 1};
  };
  struct Alternative {
    std::vector<Repeat> elements;
    bool not_before_text = false;  // (?!\S)
  };
  std::vector<Alternative> alternatives;
  for (const char32_t* ending : {U"'s", U"'t", U"'re", U"'ve", U"'m", U"'ll", U"'d"}) {
    Alternative a;
    for (const char32_t c : std::u32string_view(ending)) a.elements.push_back(letter(c));
    alternatives.push_back(a);
  }
  alternatives.push_back({{{prefix, 0, 1}, {word, 1, kMany}}});
  alternatives.push_back({{{number, 1, 1}}});
  alternatives.push_back({{{blank, 0, 1}, {punctuation, 1, kMany}, {newline, 0, kMany}}});
  alternatives.push_back({{{space, 0, kMany}, {newline, 1, kMany}}});
  alternatives.push_back({{{space, 1, kMany}}, true});
  alternatives.push_back({{{space, 1, kMany}}});

  std::vector<Codes> pieces;
  for (size_t pos = 0; pos < text.size();) {
    size_t end = kNoMatch;
    for (const Alternative& a : alternatives) {
      const auto look_ahead = [&](size_t at) {
        return !a.not_before_text || at == text.size() || space(text[at]);
      };
      end = match_sequence(text, pos, a.elements, 0, look_ahead);
      if (end != kNoMatch) break;
    }
    if (end == kNoMatch) {
      ADD_FAILURE() << "no alternative matches";
      end = pos + 1;
    }
    pieces.push_back(text.substr(pos, end - pos));
    pos = end;
  }
  return pieces;
}

std::vector<std::string> split_by_regex(PreTokenizer kind, const Codes& text) {
  std::vector<Codes> runs;
  if (kind == PreTokenizer::Laguna) {
    for (const char32_t c : text) {
      if (runs.empty() || (runs.back().back() == U'\n') != (c == U'\n')) runs.emplace_back();
      runs.back() += c;
    }
  } else {
    runs.push_back(text);
  }
  std::vector<std::string> pieces;
  for (const Codes& run : runs) {
    for (const Codes& piece : split_by_regex(run, kind == PreTokenizer::Qwen35))
      pieces.push_back(utf8(piece));
  }
  return pieces;
}

TEST(PreTokenizer, CutsCodeAsQwenDoes) {
  EXPECT_THAT(split(PreTokenizer::Qwen35, "def f(x):\n    return x ** 2\n"),
              ElementsAre("def", " f", "(x", "):\n", "   ", " return", " x", " **", " ", "2", "\n"));
}

TEST(PreTokenizer, KnowsContractionsInEitherCase) {
  EXPECT_THAT(split(PreTokenizer::Qwen35, "It's I'VE 'Lx"), ElementsAre("It", "'s", " I", "'VE", " '", "Lx"));
  EXPECT_THAT(split(PreTokenizer::Qwen35, utf8(U"a'\u017f")), ElementsAre("a", utf8(U"'\u017f")));
}

TEST(PreTokenizer, MarksBelongToWordsInQwen35AndToPunctuationInOthers) {
  const std::string text = utf8(U"\u0915\u093f\u0915 !\u0301");
  EXPECT_THAT(split(PreTokenizer::Qwen35, text),
              ElementsAre(utf8(U"\u0915\u093f\u0915"), " !", utf8(U"\u0301")));
  for (const PreTokenizer kind : {PreTokenizer::Qwen2, PreTokenizer::Laguna})
    EXPECT_THAT(split(kind, text), ElementsAre(utf8(U"\u0915"), utf8(U"\u093f\u0915"), utf8(U" !\u0301")));
}

TEST(PreTokenizer, LagunaDoesNotLookPastANewline) {
  EXPECT_THAT(split(PreTokenizer::Laguna, "a.\n\n  b  \n"),
              ElementsAre("a", ".", "\n\n", " ", " b", "  ", "\n"));
  for (const PreTokenizer kind : {PreTokenizer::Qwen2, PreTokenizer::Qwen35})
    EXPECT_THAT(split(kind, "a.\n\n  b  \n"), ElementsAre("a", ".\n\n", " ", " b", "  \n"));
}

TEST(PreTokenizer, EmptyTextHasNoPieces) {
  EXPECT_TRUE(split(PreTokenizer::Qwen35, "").empty());
  EXPECT_TRUE(split(PreTokenizer::Laguna, "").empty());
}

TEST(PreTokenizer, EqualsTheRegularExpressionOnRandomText) {
  const Codes interesting =
      U"''''aabsStTreEvVmMlLdD  \t\r\n\n\n.,!-_(07½Ⅷé你\u0301\u093f\u0903\u20dd\u00a0\u2003\u0085"
      U"\u2028\u3000\u200b\ufeff\u001c\u180e\u017f\u0378\ue000\ufffd😀𝟘";
  std::mt19937 random(7);
  for (int round = 0; round < 60000; ++round) {
    Codes text;
    const size_t n = random() % 14;
    for (size_t i = 0; i < n; ++i) {
      char32_t c = interesting[random() % interesting.size()];
      if (random() % 16 == 0) c = static_cast<char32_t>(random() % 0x11000);
      if (c >= 0xD800 && c <= 0xDFFF) c = U'x';
      text += c;
    }
    for (const PreTokenizer kind : {PreTokenizer::Qwen2, PreTokenizer::Qwen35, PreTokenizer::Laguna}) {
      ASSERT_EQ(split(kind, utf8(text)), split_by_regex(kind, text)) << ::testing::PrintToString(utf8(text));
    }
  }
}

}  // namespace
}  // namespace thermo
