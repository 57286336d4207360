// The tokenizer with the vocabulary of a real file.
#include "tokenizer/vocab_gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "gguf/gguf_file.h"
#include "gguf/gguf_writer.h"
#include "tokenizer/bpe.h"
#include "tokenizer/stream_decoder.h"
#include "tokenizer/testing/small_vocab.h"
#include "tokenizer/unicode.h"

namespace thermo {
namespace {

using ::testing::HasSubstr;

// A file with the small vocabulary; `change` may spoil it.
std::vector<std::byte> small_file(const std::function<void(GgufWriter&)>& change = [](GgufWriter&) {}) {
  const VocabData data = testing::small_vocab("laguna");
  GgufWriter writer;
  writer.set("general.architecture", "laguna");
  writer.set("tokenizer.ggml.model", "gpt2");
  writer.set("tokenizer.ggml.pre", data.pre);
  writer.set_array("tokenizer.ggml.tokens", data.tokens);
  writer.set_array("tokenizer.ggml.token_type", data.types);
  writer.set_array("tokenizer.ggml.merges", data.merges);
  writer.set("tokenizer.ggml.eos_token_id", uint32_t{2});
  writer.set("tokenizer.ggml.padding_token_id", uint32_t{9});
  writer.set("tokenizer.ggml.mask_token_id", uint32_t{10});
  writer.set("tokenizer.ggml.add_bos_token", true);
  writer.set("tokenizer.chat_template", "{{ x }}");
  change(writer);
  return writer.to_bytes();
}

std::string load_error(const std::function<void(GgufWriter&)>& change) {
  const std::vector<std::byte> bytes = small_file(change);
  try {
    Tokenizer tokenizer(read_vocab(GgufFile(bytes, "small.gguf")).value());
  } catch (const LoadError& error) {
    return error.what();
  }
  return "loaded";
}

Tokenizer plankton() {
  const GgufFile file(THERMO_MODELS "/plankton-q4_k_m.gguf");
  return Tokenizer(read_vocab(file).value());
}

TEST(Plankton, GivesTheIdsOfTheReferenceTokenizer) {
  const Tokenizer tokenizer = plankton();
  std::ifstream file(THERMO_TEST_DATA "/plankton-tokens.json");
  const Json cases = Json::parse(file);
  ASSERT_GE(cases.size(), 30u);
  for (const Json& entry : cases) {
    const auto text = entry["text"].get<std::string>();
    const auto ids = entry["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer.encode(text), ids) << text;
    std::string storage;
    EXPECT_EQ(tokenizer.decode(ids, {.special = true}), normalize_nfc(text, storage));
    StreamDecoder decoder(tokenizer, {.special = true});
    std::string streamed;
    for (const int32_t id : ids) streamed += decoder.push(id);
    EXPECT_EQ(streamed + decoder.finish(), normalize_nfc(text, storage));
  }
}

TEST(Plankton, KnowsItsSpecialTokens) {
  const Tokenizer tokenizer = plankton();
  const Vocab& vocab = tokenizer.vocab();
  EXPECT_EQ(vocab.n_tokens(), 4096);
  EXPECT_EQ(vocab.eos(), vocab.find_special("<|im_end|>"));
  EXPECT_TRUE(vocab.is_end_of_generation(*vocab.find_special("<|endoftext|>")));
  EXPECT_FALSE(vocab.add_bos());
  EXPECT_NE(vocab.chat_template().find("<|im_start|>"), std::string::npos);
}

TEST(ReadVocab, AFileWithoutVocabularyIsNoError) {
  EXPECT_FALSE(read_vocab(GgufFile(THERMO_TEST_DATA "/qwen35moe-f32.gguf")).has_value());
}

TEST(ReadVocab, TakesEveryKey) {
  const std::vector<std::byte> bytes = small_file();
  const VocabData data = read_vocab(GgufFile(bytes, "small.gguf")).value();
  const VocabData expected = testing::small_vocab("laguna");
  EXPECT_EQ(data.tokens, expected.tokens);
  EXPECT_EQ(data.types, expected.types);
  EXPECT_EQ(data.merges, expected.merges);
  EXPECT_EQ(data.pre, "laguna");
  EXPECT_EQ(data.eos, 2u);
  EXPECT_EQ(data.pad, 9u);
  EXPECT_EQ(data.mask, 10u);
  EXPECT_FALSE(data.bos || data.eot || data.eom);
  EXPECT_TRUE(data.add_bos);
  EXPECT_FALSE(data.add_eos);
  EXPECT_EQ(data.chat_template, "{{ x }}");
}

TEST(ReadVocab, RefusesWhatItCannotTokeniseWith) {
  EXPECT_EQ(load_error([](GgufWriter&) {}), "loaded");
  EXPECT_THAT(load_error([](GgufWriter& w) { w.set("tokenizer.ggml.model", "llama"); }),
              HasSubstr("\"llama\" is not a supported"));
  EXPECT_THAT(load_error([](GgufWriter& w) { w.set("tokenizer.ggml.pre", "gpt-4o"); }),
              HasSubstr("supported: qwen2, qwen35, laguna"));
  EXPECT_THAT(load_error([](GgufWriter& w) { w.set("tokenizer.ggml.tokens", 3); }),
              HasSubstr("tokenizer.ggml.tokens"));
  EXPECT_THAT(
      load_error([](GgufWriter& w) { w.set_array("tokenizer.ggml.token_type", std::vector<int>{1}); }),
      HasSubstr("tokenizer.ggml.token_type"));
  EXPECT_EQ(load_error([](GgufWriter& w) { w.set("tokenizer.ggml.eos_token_id", int32_t{-1}); }), "loaded");
  EXPECT_THAT(load_error([](GgufWriter& w) { w.set("tokenizer.ggml.eos_token_id", "</s>"); }),
              HasSubstr("eos_token_id"));
  EXPECT_THAT(load_error([](GgufWriter& w) {
                w.set_array("tokenizer.ggml.merges", std::vector<std::string>{"a b", "ab"});
              }),
              HasSubstr("\"ab\" (number 1)"));
}

TEST(ReadVocab, RefusesMoreTokensThanEmbeddingRows) {
  const std::vector<float> row(4);
  EXPECT_THAT(load_error([&](GgufWriter& w) {
                w.add_tensor("token_embd.weight", DType::F32, {1, 4}, std::as_bytes(std::span(row)));
              }),
              HasSubstr("token_embd.weight has only 4 rows"));
}

}  // namespace
}  // namespace thermo
