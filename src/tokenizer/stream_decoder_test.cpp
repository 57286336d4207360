#include "tokenizer/stream_decoder.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tokenizer/testing/small_vocab.h"
#include "tokenizer/unicode.h"

namespace thermo {
namespace {

constexpr const char* kFffd = "\xEF\xBF\xBD";

std::string assemble(std::string_view bytes) {
  Utf8Assembler assembler;
  std::string text = assembler.push(bytes);
  return text + assembler.finish();
}

TEST(StreamDecoder, HoldsBackAnIncompleteUtf8Character) {
  const Tokenizer tokenizer(testing::small_vocab());
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.push('a'), "a");
  EXPECT_EQ(decoder.push(0xF0), "");
  EXPECT_EQ(decoder.push(0x9F), "");
  EXPECT_EQ(decoder.push(0x99), "");
  EXPECT_EQ(decoder.push(0x82), "🙂");
  EXPECT_EQ(decoder.push(0xE4), "");
  EXPECT_EQ(decoder.finish(), kFffd);
  EXPECT_EQ(decoder.finish(), "");
}

TEST(StreamDecoder, ShowsControlTokensOnlyWhenAsked) {
  const Tokenizer tokenizer(testing::small_vocab());
  const int32_t id = *tokenizer.vocab().find_special("<|im_end|>");
  EXPECT_EQ(StreamDecoder(tokenizer).push(id), "");
  EXPECT_EQ(StreamDecoder(tokenizer, {.special = true}).push(id), "<|im_end|>");
}

TEST(Utf8Assembler, ReplacesWhatCannotBecomeACharacter) {
  const std::string f = kFffd;
  EXPECT_EQ(assemble("\xE2\x82\x41"), f + "A") << "one for an interrupted sequence";
  EXPECT_EQ(assemble("\x80\xBF"), f + f) << "one for each stray byte";
  EXPECT_EQ(assemble("\xE0\x80\x80"), f + f + f) << "80 may not follow E0";
  EXPECT_EQ(assemble("\xED\xA0\x80"), f + f + f) << "surrogate";
  EXPECT_EQ(assemble("\xF4\x90\x80\x80"), f + f + f + f) << "above U+10FFFF";
  EXPECT_EQ(assemble("\xF0\x9F\x99"), f) << "held bytes at the end give one";
  EXPECT_EQ(assemble("\xE2\x82\xE2\x82\xAC"), f + "€");
  EXPECT_EQ(assemble("\xC0\xAF\xFE"), f + f + f);
  EXPECT_EQ(assemble("\xC3\xC3\xA9"), f + "é");
}

TEST(Utf8Assembler, EmitsAtOnceWhatCanNoLongerChange) {
  Utf8Assembler assembler;
  EXPECT_EQ(assembler.push("\xE0"), "");
  EXPECT_EQ(assembler.push("\x80"), std::string(kFffd) + kFffd);
  EXPECT_EQ(assembler.push("b"), "b");
}

TEST(Utf8Assembler, TextDoesNotDependOnTheCuts) {
  const std::vector<std::string> parts = {"a",    "é",        "€",        "🙂",     "\x80",
                                          "\xE2", "\xE2\x82", "\xF0\x9F", "\xED\xA0", "\xF4\x90",
                                          "\xC3", "\xFF",     "\xF0",     "\xE0\x9F"};
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    std::string bytes;
    for (int i = 0; i < 4; ++i) bytes += parts[random() % parts.size()];
    const std::string whole = assemble(bytes);
    std::string storage;
    EXPECT_EQ(replace_invalid_utf8(whole, storage), whole) << "the output is valid";
    ASSERT_LE(bytes.size(), 16u);
    for (uint32_t cuts = 0; cuts < 1u << (bytes.size() - 1); ++cuts) {
      Utf8Assembler assembler;
      std::string text, part;
      for (size_t i = 0; i < bytes.size(); ++i) {
        part += bytes[i];
        if ((cuts >> i & 1) != 0 || i + 1 == bytes.size()) {
          text += assembler.push(part);
          part.clear();
        }
      }
      ASSERT_EQ(text + assembler.finish(), whole);
    }
  }
}

}  // namespace
}  // namespace thermo
