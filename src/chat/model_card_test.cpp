#include "chat/model_card.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"

namespace thermo {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class ModelCardTest : public ::testing::Test {
 protected:
  ModelCardTest() {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~ModelCardTest() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return (folder_ / name).string();
  }
  std::string refusal(const std::string& text) const {
    try {
      read_model_card(write("bad.card.json", text));
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  }

  const fs::path folder_ = fs::path(testing::TempDir()) / "model-card";
};

TEST_F(ModelCardTest, SetsWhatItNamesAndNothingElse) {
  const ModelCard card = read_model_card(write("m.card.json", R"({
      "name": "m", "source": "https://example.org/m", "verified_at": "2026-01-01", "notes": "none",
      "sampling": {"temperature": 0.6, "top_k": 40, "presence_penalty": 1.5},
      "max_tokens": 1000, "reasoning_efforts": {"low": 7, "huge": 100000}, "reply_reserve": 50,
      "thinking_terminator": "\nEnough.\n"})"));
  SamplingParams params;
  params.top_p = 0.5f;
  card.apply(params);
  EXPECT_EQ(params.temperature, 0.6f);
  EXPECT_EQ(params.top_k, 40);
  EXPECT_EQ(params.presence_penalty, 1.5f);
  EXPECT_EQ(params.top_p, 0.5f);
  EXPECT_EQ(card.max_tokens, 1000);
  EXPECT_EQ(card.reply_reserve, 50);
  EXPECT_EQ(card.thinking_terminator, "\nEnough.\n");
  EXPECT_EQ(card.reasoning_efforts, (std::map<std::string, int>{{"huge", 100000}, {"low", 7}}));
}

TEST_F(ModelCardTest, SaysWhatIsWrong) {
  EXPECT_THAT(refusal("[1]"), HasSubstr("a JSON object was expected"));
  EXPECT_THAT(refusal("{"), HasSubstr("bad.card.json cannot be used"));
  EXPECT_THAT(refusal(R"({"temperature": 1})"), HasSubstr("'temperature' is not known"));
  EXPECT_THAT(refusal(R"({"sampling": {"temp": 1}})"), HasSubstr("sampling.temp is not known"));
  EXPECT_THAT(refusal(R"({"sampling": {"top_k": 1.5}})"), HasSubstr("top_k is 1.5, a whole number"));
  EXPECT_THAT(refusal(R"({"sampling": {"temperature": 9}})"), HasSubstr("temperature is 9, expected 0 to 5"));
  EXPECT_THAT(refusal(R"({"max_tokens": -1})"), HasSubstr("a number of tokens was expected"));
  EXPECT_THAT(refusal(R"({"reasoning_efforts": {"low": "many"}})"), HasSubstr("reasoning_efforts.low"));
  EXPECT_THAT(refusal(R"({"sampling": 3})"), HasSubstr("an object was expected"));
}

TEST_F(ModelCardTest, IsFoundByTheNameOfTheModel) {
  const fs::path data = fs::path(THERMO_TEST_DATA) / "qwen35-f32.gguf";
  const GgufFile file(data.string());
  const fs::path model = folder_ / "Some-Model-Q4.gguf", part = folder_ / "Big-00001-of-00002.gguf";
  fs::create_symlink(data, model);
  fs::create_symlink(data, part);
  EXPECT_EQ(find_model_card(model.string(), file), std::nullopt);
  write("Some-Model-Q4.card.json", R"({"max_tokens": 5})");
  write("Big.card.json", R"({"max_tokens": 6})");
  EXPECT_EQ(find_model_card(model.string(), file)->max_tokens, 5);
  EXPECT_EQ(find_model_card(part.string(), file)->max_tokens, 6);
  EXPECT_EQ(find_model_card("", file), std::nullopt);
}

}  // namespace
}  // namespace thermo
