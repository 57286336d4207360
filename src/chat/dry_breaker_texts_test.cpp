#include "chat/dry_breaker_texts.h"

#include <gtest/gtest.h>

#include "embedded/embedded_model.h"
#include "gguf/gguf_file.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer instance = [] {
    GgufFile file(embedded_model(), "embedded");
    return Tokenizer(*read_vocab(file));
  }();
  return instance;
}

std::shared_ptr<const DryBreakers> breakers_of(std::vector<std::string> texts) {
  return dry_breakers(tokenizer(), texts);
}

TEST(DryBreakerTexts, AreAllTokensThatHaveTheTextInThem) {
  const auto breakers = breakers_of({"\n"});
  EXPECT_EQ(breakers->longest(), 1);
  int n_found = 0;
  for (int32_t id = 0; id < tokenizer().vocab().n_tokens(); ++id) {
    const bool has = tokenizer().token_bytes(id).find('\n') != std::string_view::npos;
    n_found += has;
    ASSERT_EQ(breakers->length_at(std::vector<int32_t>{id}, 0), has ? 1 : 0) << id;
  }
  EXPECT_GT(n_found, 1);
}

TEST(DryBreakerTexts, MayBeginInsideOfATokenAndGoOn) {
  const std::string text = "zebra:quartz";  // no single token
  const auto breakers = breakers_of({text});
  EXPECT_GT(breakers->longest(), 1);
  for (const char* before : {"", "the ", "\n"}) {
    const std::vector<int32_t> ids = tokenizer().encode(before + text);
    int longest = 0;
    for (size_t i = 0; i < ids.size(); ++i) longest = std::max(longest, breakers->length_at(ids, i));
    EXPECT_GT(longest, 1) << before;
  }
  const std::vector<int32_t> other = tokenizer().encode("zebra;quartz");
  for (size_t i = 0; i < other.size(); ++i) EXPECT_EQ(breakers->length_at(other, i), 0);
}

TEST(DryBreakerTexts, AreLookedUpOnce) {
  DryBreakerCache cache;
  const auto first = cache.of(tokenizer(), {"\n", ":"});
  EXPECT_EQ(cache.of(tokenizer(), {"\n", ":"}), first);
  EXPECT_NE(cache.of(tokenizer(), {":"}), first);
  EXPECT_EQ(cache.of(tokenizer(), {}), cache.of(tokenizer(), {}));
  EXPECT_EQ(cache.of(tokenizer(), {})->longest(), 0);
  EXPECT_EQ(cache.of(tokenizer(), {"\n", ":"}), first);
}

}  // namespace
}  // namespace thermo
