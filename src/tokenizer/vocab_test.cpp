#include "tokenizer/vocab.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tokenizer/testing/small_vocab.h"

namespace thermo {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::small_vocab;

std::string load_error(VocabData data) {
  try {
    Vocab vocab(std::move(data));
  } catch (const LoadError& error) {
    return error.what();
  }
  return "loaded";
}

TEST(ByteAlphabet, IsOneToOne) {
  for (int byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(char_to_byte(byte_to_char(static_cast<uint8_t>(byte))), byte);
  }
  EXPECT_EQ(char_to_byte(U' '), std::nullopt);
  EXPECT_EQ(char_to_byte(0x144), std::nullopt);
  EXPECT_EQ(char_to_byte(U'你'), std::nullopt);
}

TEST(Vocab, GivesTheBytesOfEveryKindOfToken) {
  VocabData data = small_vocab();
  const int32_t outside = testing::add_token(data, "\xC4\xA0你", TokenType::Normal);
  const Vocab vocab(std::move(data));
  for (int32_t byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(vocab.token_bytes(byte), std::string(1, static_cast<char>(byte)));
  }
  EXPECT_EQ(vocab.token_bytes(*vocab.find_special("<think>")), "<think>");
  EXPECT_EQ(vocab.token_bytes(outside), " 你") << "a character outside the alphabet is itself";
  EXPECT_EQ(vocab.token_bytes(outside - 1), "") << "unused";
  EXPECT_EQ(vocab.token_bytes(-1), "");
  EXPECT_EQ(vocab.token_bytes(vocab.n_tokens()), "") << "padding rows of the output matrix";
}

TEST(Vocab, QwenStopsAtItsEndMarkersWhateverTheFileNames) {
  for (const char* const pre : {"qwen2", "qwen35"}) {
    VocabData data = small_vocab(pre);
    data.eos = 65;
    data.eom = 66;
    const Vocab vocab(std::move(data));
    EXPECT_THAT(vocab.end_of_generation(),
                ElementsAre(65, 66, *vocab.find_special("<|endoftext|>"), *vocab.find_special("<|im_end|>")));
    EXPECT_TRUE(vocab.is_end_of_generation(65));
    EXPECT_FALSE(vocab.is_end_of_generation(*vocab.find_special("<|im_start|>")));
    EXPECT_FALSE(vocab.is_end_of_generation(-1));
  }
}

TEST(Vocab, LagunaEndsATurnEvenIfAnOlderFileTypesItUserDefined) {
  VocabData data = small_vocab("laguna");
  for (size_t i = 0; i < data.tokens.size(); ++i) {
    if (data.tokens[i] == "</assistant>") data.types[i] = static_cast<int32_t>(TokenType::UserDefined);
  }
  data.eos = 2;
  const Vocab vocab(std::move(data));
  const int32_t end = *vocab.find_special("</assistant>");
  EXPECT_EQ(vocab.token_type(end), TokenType::Control);
  EXPECT_EQ(vocab.eot(), end);
  EXPECT_THAT(vocab.end_of_generation(), ElementsAre(2, end));
}

TEST(Vocab, FindsOnlySpecialTokensByText) {
  const Vocab vocab(small_vocab());
  EXPECT_TRUE(vocab.find_special("<|im_start|>"));
  EXPECT_FALSE(vocab.find_special("a"));
  EXPECT_FALSE(vocab.find_special("[PAD1]"));
  EXPECT_FALSE(vocab.find_special(""));
}

TEST(Vocab, RefusesAnUnknownPreTokenizerAndListsWhatIsSupported) {
  const std::string error = load_error(small_vocab("gpt-4o"));
  EXPECT_THAT(error, HasSubstr("\"gpt-4o\""));
  EXPECT_THAT(error, HasSubstr("qwen2, qwen35, laguna"));
}

TEST(Vocab, IgnoresSpecialIdsOutsideTheVocabulary) {
  VocabData data = small_vocab();
  data.eos = 4000000000u;
  data.pad = static_cast<uint32_t>(data.tokens.size());
  const Vocab vocab(std::move(data));
  EXPECT_FALSE(vocab.eos() || vocab.pad());
  EXPECT_TRUE(vocab.is_end_of_generation(*vocab.find_special("<|im_end|>")));
}

TEST(Vocab, RefusesListsThatDoNotFit) {
  VocabData empty;
  empty.pre = "qwen35";
  EXPECT_THAT(load_error(std::move(empty)), HasSubstr("tokenizer.ggml.tokens: empty"));

  VocabData few_types = small_vocab();
  few_types.types.pop_back();
  EXPECT_THAT(load_error(std::move(few_types)), HasSubstr("tokenizer.ggml.token_type"));

  VocabData bad_type = small_vocab();
  bad_type.types[7] = 9;
  EXPECT_THAT(load_error(std::move(bad_type)), HasSubstr("9 for token 7"));

  VocabData more_types = small_vocab();
  more_types.types.push_back(1);
  EXPECT_EQ(load_error(std::move(more_types)), "loaded");
}

}  // namespace
}  // namespace thermo
