#include "tokenizer/unicode.h"

#include <gtest/gtest.h>
#include <utf8proc.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <vector>

namespace thermo {
namespace {

std::string utf8(std::u32string_view codes) {
  std::string text;
  for (const char32_t c : codes) append_utf8(text, c);
  return text;
}

std::string nfc(std::string_view text) {
  std::string storage;
  return std::string(normalize_nfc(text, storage));
}

std::string nfc_by_utf8proc(std::string_view text) {
  utf8proc_uint8_t* result = nullptr;
  const auto n = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                              static_cast<utf8proc_ssize_t>(text.size()), &result,
                              static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  EXPECT_GE(n, 0);
  std::string normal(reinterpret_cast<const char*>(result), static_cast<size_t>(n));
  std::free(result);
  return normal;
}

TEST(Unicode, KnowsTheClassesOfThePreTokenizer) {
  EXPECT_EQ(char_class(U'a'), kClassLetter);
  EXPECT_EQ(char_class(U'你'), kClassLetter);
  EXPECT_EQ(char_class(0x0301), kClassMark);
  EXPECT_EQ(char_class(0x093F), kClassMark);
  EXPECT_EQ(char_class(U'7'), kClassNumber);
  EXPECT_EQ(char_class(0x2160), kClassNumber);  // Nl
  EXPECT_EQ(char_class(0x00BD), kClassNumber);  // No
  EXPECT_EQ(char_class(U'!'), 0);
  EXPECT_EQ(char_class(0x0378), 0) << "unassigned";
  EXPECT_EQ(char_class(0xE000), 0) << "private use";
}

TEST(Unicode, WhiteSpaceIsExactlyTheTwentyFiveCodePoints) {
  std::vector<char32_t> found;
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (char_class(c) == kClassSpace) found.push_back(c);
  }
  const std::vector<char32_t> expected = {
      0x09,   0x0A,   0x0B,   0x0C,   0x0D,   0x20,   0x85,   0xA0,   0x1680, 0x2000, 0x2001, 0x2002, 0x2003,
      0x2004, 0x2005, 0x2006, 0x2007, 0x2008, 0x2009, 0x200A, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000};
  EXPECT_EQ(found, expected);
}

TEST(Nfc, ReturnsNormalTextUntouched) {
  for (const std::string& text : {std::string("ascii only"), utf8(U"café 你好 한국어 Ω"), std::string()}) {
    std::string storage;
    EXPECT_EQ(normalize_nfc(text, storage).data(), text.data());
  }
}

TEST(Nfc, ComposesAndOrders) {
  EXPECT_EQ(nfc("a\xCC\x81"), "\xC3\xA1");
  EXPECT_EQ(nfc("x a\xCC\x81 y e\xCC\x80"), "x \xC3\xA1 y \xC3\xA8");
  EXPECT_EQ(nfc(utf8(U"\u1112\u1161\u11ab")), utf8(U"한"));
  EXPECT_EQ(nfc(utf8(U"\u212b")), utf8(U"Å")) << "singleton";
  EXPECT_EQ(nfc(utf8(U"\u0958")), utf8(U"\u0915\u093c")) << "excluded from composition";
  EXPECT_EQ(nfc(utf8(U"q\u0307\u0323")), utf8(U"q\u0323\u0307"));
  EXPECT_EQ(nfc(utf8(U"\u0344")), utf8(U"\u0308\u0301"));
}

TEST(Nfc, EqualsUtf8procForEveryCodePointAloneAndAfterALetter) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(text, c);
    ASSERT_EQ(nfc(text), nfc_by_utf8proc(text)) << std::hex << static_cast<uint32_t>(c);
    text.insert(0, "e");
    ASSERT_EQ(nfc(text), nfc_by_utf8proc(text)) << std::hex << static_cast<uint32_t>(c);
  }
}

TEST(Nfc, EqualsUtf8procOnRandomText) {
  std::mt19937 random(1);
  // Ranges rich in things that compose, decompose and reorder.
  const std::pair<char32_t, char32_t> ranges[] = {{0x20, 0x7E},     {0xC0, 0x17F},      {0x300, 0x36F},
                                                  {0x900, 0x9FF},   {0xB40, 0xBDF},     {0x1100, 0x11FF},
                                                  {0xAC00, 0xAC40}, {0x1E00, 0x1FFF},   {0x20D0, 0x2130},
                                                  {0xFB1D, 0xFB4F}, {0x1D15E, 0x1D164}, {0x2F800, 0x2FA1D}};
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    const size_t n = random() % 12;
    for (size_t i = 0; i < n; ++i) {
      const auto& [low, high] = ranges[random() % std::size(ranges)];
      append_utf8(text, low + static_cast<char32_t>(random() % (high - low + 1)));
    }
    ASSERT_EQ(nfc(text), nfc_by_utf8proc(text)) << text;
  }
}

// utf8proc orders marks by insertion: half a million of them in the wrong order took minutes.
TEST(Nfc, IsNotQuadraticInALongRunOfMarks) {
  std::string text = "a";
  for (int i = 0; i < 250000; ++i) text += i % 2 == 0 ? "\xCC\x81" : "\xCC\xA3";  // classes 230, 220
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(nfc(text).size(), text.size()) << "a letter of 1 byte and a mark of 2 became a letter of 3";
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

}  // namespace
}  // namespace thermo
