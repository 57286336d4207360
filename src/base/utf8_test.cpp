#include "base/utf8.h"

#include <gtest/gtest.h>

#include "base/utf8_chars.h"

namespace thermo {
namespace {

std::string utf8(std::u32string_view codes) {
  std::string text;
  for (const char32_t c : codes) append_utf8(text, c);
  return text;
}

TEST(Utf8, EveryCodePointSurvivesEncodingAndDecoding) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(text, c);
    const DecodedChar decoded = decode_utf8(text, 0);
    ASSERT_TRUE(decoded.valid) << std::hex << static_cast<uint32_t>(c);
    ASSERT_EQ(decoded.code, c);
    ASSERT_EQ(decoded.length, text.size());
  }
}

TEST(Utf8, RejectsWhatIsNotWellFormed) {
  for (const char* bytes :
       {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xC2", "\xC2\x41", "\xE0\x9F\xBF", "\xE2\x82",
        "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF"}) {
    const DecodedChar c = decode_utf8(bytes, 0);
    EXPECT_FALSE(c.valid);
    EXPECT_EQ(c.code, kReplacement);
    EXPECT_EQ(c.length, 1u);
  }
}

TEST(Utf8, ReplacesEachByteThatBeginsNoCharacter) {
  std::string storage;
  EXPECT_EQ(replace_invalid_utf8("plain", storage), "plain");
  const std::string valid = utf8(U"é€😀");
  EXPECT_EQ(replace_invalid_utf8(valid, storage).data(), valid.data()) << "valid text is not copied";
  const std::string fffd(kReplacementUtf8);
  EXPECT_EQ(replace_invalid_utf8("a\xE2\x82z", storage), "a" + fffd + fffd + "z");
  EXPECT_EQ(replace_invalid_utf8("\xFF\xC3\xA9\xC3", storage), fffd + "\xC3\xA9" + fffd);
}

TEST(Utf8, CountsCharactersWhereTheyBegin) {
  EXPECT_EQ(count_utf8_chars(""), 0u);
  EXPECT_EQ(count_utf8_chars("a\u00e9\u20ac\U0001F600"), 4u);
  EXPECT_EQ(count_utf8_chars("\x82\xac and \xe2"), 6u);  // the end of one and the beginning of another
}

}  // namespace
}  // namespace thermo
