#include "hub/hub_reference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"

namespace thermo {
namespace {

using ::testing::HasSubstr;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(HubReference, SaysHowAnAddressIsWritten) {
  for (const auto& [address, reference] : {std::pair{"https://huggingface.co/o/r", "hf:o/r"},
                                           {"http://hf.co/o/r/", "hf:o/r"},
                                           {"hf.co/o/r:Q4_K_M", "hf:o/r:Q4_K_M"},
                                           {"https://huggingface.co/o/r/tree/main", "hf:o/r"}}) {
    EXPECT_TRUE(is_hub_address(address));
    EXPECT_THAT(error_of([&] { parse_hub_reference(address); }),
                ::testing::EndsWith(std::string("write ") + reference));
  }
  EXPECT_FALSE(is_hub_address("hf:o/r"));
  EXPECT_FALSE(is_hub_address("https://example.org/o/r"));
}

TEST(HubReference, ReadsOwnerRepositoryAndQuantisation) {
  for (const char* text : {"hf:unsloth/Qwen3.5-35B-A3B-GGUF:q4_k_m", "unsloth/Qwen3.5-35B-A3B-GGUF:q4_k_m"}) {
    const HubReference reference = parse_hub_reference(text);
    EXPECT_EQ(reference.owner, "unsloth");
    EXPECT_EQ(reference.repo, "Qwen3.5-35B-A3B-GGUF");
    EXPECT_EQ(reference.quant, "q4_k_m");
    EXPECT_EQ(reference.describe(), "hf:unsloth/Qwen3.5-35B-A3B-GGUF:q4_k_m");
  }
  EXPECT_EQ(parse_hub_reference("a/b").quant, "");
}

TEST(HubReference, RefusesWhatIsNone) {
  for (const char* text : {"", "hf:", "a", "a/", "/b", "a/b/c", "a/b:", "../b", "a/..", "a/b:../x", "a b/c",
                           "a/b:x:y", "a/b\n", "-a/b", ".a/b"})
    EXPECT_THAT(error_of([&] { parse_hub_reference(text); }), HasSubstr("expected")) << text;
}

TEST(HubReference, LetsNoPathOut) {
  for (const char* path : {"a", "a/b.gguf", "..a/b", "a b"}) EXPECT_TRUE(is_safe_path(path)) << path;
  for (const char* path : {"", "/a", "a//b", "a/../b", "..", ".", "a/.", "a\\b", "c:x", "a\tb"})
    EXPECT_FALSE(is_safe_path(path)) << path;
}

std::vector<HubModel> models(const std::vector<std::string>& names) {
  std::vector<HubFile> files;
  for (const std::string& name : names) files.push_back({.path = name, .bytes = 10});
  return models_of(files);
}

TEST(HubModels, TakesModelFilesAndJoinsParts) {
  const auto found =
      models({"README.md", "M-Q4_K_M.gguf", "mmproj-F16.gguf", "M.imatrix.gguf", "M-UD-Q4_K_XL.gguf",
              "BF16/M-BF16-00002-of-00002.gguf", "BF16/M-BF16-00001-of-00002.gguf",
              "M-Q8_0-00001-of-00003.gguf", "m.IQ4_XS.gguf", "../out-Q4_0.gguf", "plain.gguf"});
  std::vector<std::string> quants;
  for (const HubModel& model : found) quants.push_back(model.quant);
  EXPECT_THAT(quants, ::testing::ElementsAre("BF16", "Q4_K_M", "Q8_0", "UD-Q4_K_XL", "IQ4_XS", ""));
  EXPECT_EQ(found[0].parts.size(), 2u);
  EXPECT_EQ(found[0].name(), "BF16/M-BF16-00001-of-00002.gguf");
  EXPECT_EQ(found[0].bytes(), 20u);
  EXPECT_TRUE(found[0].is_complete());
  EXPECT_FALSE(found[2].is_complete());
}

TEST(HubModels, ChoosesTheOneThatIsMeant) {
  const auto found = models({"M-Q4_K_M.gguf", "M-Q8_0.gguf", "sub/M-Q2_K.gguf"});
  const auto chosen = [&](const char* text) { return choose_model(found, parse_hub_reference(text)).name(); };
  EXPECT_EQ(chosen("a/b"), "M-Q4_K_M.gguf");
  EXPECT_EQ(chosen("a/b:q8_0"), "M-Q8_0.gguf");
  EXPECT_EQ(chosen("a/b:M-Q2_K.gguf"), "sub/M-Q2_K.gguf");
  EXPECT_EQ(chosen("a/b:sub/M-Q2_K.gguf"), "sub/M-Q2_K.gguf");
  EXPECT_THAT(error_of([&] { chosen("a/b:Q3_K_S"); }),
              HasSubstr("it has no Q3_K_S (there are Q4_K_M, Q8_0, Q2_K)"));
  EXPECT_THAT(error_of([&] { choose_model(models({"x.txt"}), parse_hub_reference("a/b")); }),
              HasSubstr("no GGUF file"));
  EXPECT_THAT(error_of([&] {
                choose_model(models({"a-Q2_K.gguf", "a-Q3_K.gguf"}), parse_hub_reference("a/b"));
              }),
              HasSubstr("say which"));
  EXPECT_THAT(error_of([&] {
                choose_model(models({"a-Q2_K.gguf", "b-Q2_K.gguf"}), parse_hub_reference("a/b:q2_k"));
              }),
              HasSubstr("name the file"));
}

}  // namespace
}  // namespace thermo
