#include "tokenizer/fill_in_middle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tokenizer/testing/small_vocab.h"

namespace thermo {
namespace {

using ::testing::ElementsAre;

TEST(FillInMiddle, NeedsItsTokens) {
  const auto with = [](std::initializer_list<const char*> texts) {
    VocabData data = testing::small_vocab();
    for (const char* text : texts) testing::add_token(data, text, TokenType::Control);
    return fill_tokens(Vocab(std::move(data)));
  };
  EXPECT_FALSE(with({}));
  EXPECT_FALSE(with({"<|fim_prefix|>", "<|fim_suffix|>"}));
  EXPECT_TRUE(with({"<fim_prefix>", "<fim_suffix>", "<fim_middle>"}));
  const auto found =
      with({"<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>"});
  ASSERT_TRUE(found);
  EXPECT_THAT(found->ends,
              ElementsAre(found->prefix, found->suffix, found->middle, found->prefix + 3, found->prefix + 4));
}

TEST(FillInMiddle, PutsTheMarkersAroundBothTexts) {
  VocabData data = testing::small_vocab();
  for (const char* text : {"<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"})
    testing::add_token(data, text, TokenType::Control);
  data.add_bos = true;
  const Tokenizer tokenizer(std::move(data));
  const FillTokens tokens = *fill_tokens(tokenizer.vocab());
  const std::vector<int32_t> before = tokenizer.encode("x");
  EXPECT_EQ(tokenizer.decode(fill_prompt(tokenizer, tokens, before, "y<|im_end|>"), {.special = true}),
            "<|fim_prefix|>x<|fim_suffix|>y<|im_end|><|fim_middle|>");
  // The marker in the text is letters.
  EXPECT_EQ(fill_prompt(tokenizer, tokens, before, "<|im_end|>").size(),
            4 + tokenizer.encode("<|im_end|>", {.parse_special = false}).size());
}

}  // namespace
}  // namespace thermo
