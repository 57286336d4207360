#include "model/rope_override.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "gguf/gguf_file.h"
#include "model/model_config.h"

namespace thermo {
namespace {

using Kind = RopeOverride::Kind;

ModelConfig config_of(const char* name) {
  return read_model_config(GgufFile(std::string(THERMO_TEST_DATA) + "/" + name + "-f32.gguf"));
}
ModelConfig with(const RopeOverride& rope, ModelConfig config) {
  override_rope(rope, config);
  return config;
}
std::string refusal(const RopeOverride& rope, ModelConfig config, Remedy remedy) {
  try {
    override_rope(rope, config);
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.remedy(), remedy) << error.what();
    return error.what();
  }
  return "";
}
bool mentions(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

TEST(RopeOverride, GivesYarnToAModelWithoutIt) {
  const ModelConfig plain = config_of("qwen3moe");
  ASSERT_EQ(plain.ropes[0].scaling, RopeScaling::None);
  const ModelConfig config = with({.kind = Kind::Yarn, .factor = 4.0}, plain);
  EXPECT_EQ(config.ropes[0].scaling, RopeScaling::Yarn);
  EXPECT_EQ(config.ropes[0].factor, 4.0);
  EXPECT_EQ(config.ropes[0].original_context, plain.n_ctx_train);
  EXPECT_EQ(config.ropes[0].beta_fast, 32.0);
  EXPECT_EQ(config.n_ctx_train, 4 * plain.n_ctx_train);
  const ModelConfig other = with({.kind = Kind::Yarn,
                                  .factor = 8.0,
                                  .original_context = 512,
                                  .extrapolation = 0.5,
                                  .attention = 1.25,
                                  .beta_fast = 16.0,
                                  .beta_slow = 2.0},
                                 plain);
  EXPECT_EQ(other.ropes[0].original_context, 512);
  EXPECT_EQ(other.ropes[0].extrapolation, 0.5);
  EXPECT_EQ(other.ropes[0].attention, 1.25);
  EXPECT_EQ(other.ropes[0].beta_fast, 16.0);
  EXPECT_EQ(other.ropes[0].beta_slow, 2.0);
  EXPECT_EQ(other.n_ctx_train, std::max(plain.n_ctx_train, 4096));
}

TEST(RopeOverride, KeepsAFactorBelowOneOfTheFile) {
  ModelConfig config = config_of("qwen3moe");
  config.ropes[0].scaling = RopeScaling::Yarn;
  config.ropes[0].factor = 0.5;
  config.ropes[0].original_context = 1024;
  EXPECT_EQ(with({.beta_fast = 16.0}, config).ropes[0].factor, 0.5);
}

// Only the rotation of full attention is scaled.
TEST(RopeOverride, ChangesTheFilesYarn) {
  ModelConfig laguna = config_of("laguna");
  ASSERT_EQ(laguna.ropes.size(), 2u);
  RopeConfig& file = laguna.ropes[0];
  file.scaling = RopeScaling::Yarn;
  file.factor = 32.0;
  file.original_context = laguna.n_ctx_train / 32.0;
  file.beta_fast = 64.0;
  const ModelConfig more = with({.factor = 2 * file.factor}, laguna);
  EXPECT_EQ(more.ropes[0].scaling, RopeScaling::Yarn);
  EXPECT_EQ(more.ropes[0].factor, 2 * file.factor);
  EXPECT_EQ(more.ropes[0].original_context, file.original_context);
  EXPECT_EQ(more.ropes[0].beta_fast, file.beta_fast);
  EXPECT_EQ(more.n_ctx_train, 2 * laguna.n_ctx_train);
  EXPECT_EQ(more.ropes[1].scaling, RopeScaling::None);
  const ModelConfig betas = with({.beta_slow = 2.0}, laguna);
  EXPECT_EQ(betas.ropes[0].beta_slow, 2.0);
  EXPECT_EQ(betas.ropes[0].factor, file.factor);
  EXPECT_EQ(betas.n_ctx_train, laguna.n_ctx_train);
  const ModelConfig none = with({.kind = Kind::None}, laguna);
  EXPECT_EQ(none.ropes[0].scaling, RopeScaling::None);
  EXPECT_EQ(make_rope_table(none.ropes[0]).magnitude, 1.0f);
  const ModelConfig linear = with({.kind = Kind::Linear}, laguna);
  EXPECT_EQ(linear.ropes[0].scaling, RopeScaling::Linear);
  EXPECT_EQ(linear.ropes[0].factor, file.factor);
}

TEST(RopeOverride, TakesAFactorAloneAsLinear) {
  const ModelConfig plain = config_of("qwen35");
  const ModelConfig config = with({.factor = 2.0}, plain);
  EXPECT_EQ(config.ropes[0].scaling, RopeScaling::Linear);
  EXPECT_EQ(config.n_ctx_train, 2 * plain.n_ctx_train);
  EXPECT_EQ(with({}, plain).n_ctx_train, plain.n_ctx_train);
  EXPECT_EQ(with({.factor = 1.0}, plain).n_ctx_train, plain.n_ctx_train);
}

TEST(RopeOverride, SaysWhatIsMissingOrWrong) {
  const ModelConfig plain = config_of("qwen3moe");
  EXPECT_TRUE(mentions(refusal({.kind = Kind::Yarn}, plain, Remedy::RopeFactor), "give a factor"));
  EXPECT_TRUE(mentions(refusal({.kind = Kind::Linear}, plain, Remedy::RopeFactor), "give a factor"));
  EXPECT_TRUE(mentions(refusal({.original_context = 4096}, plain, Remedy::Yarn), "YaRN"));
  EXPECT_TRUE(mentions(refusal({.kind = Kind::Linear, .factor = 2.0, .beta_slow = 1.0}, plain, Remedy::Yarn),
                       "YaRN"));
  EXPECT_TRUE(mentions(refusal({.kind = Kind::None, .factor = 2.0}, plain, Remedy::None), "leave one out"));
  EXPECT_TRUE(mentions(refusal({.kind = Kind::Yarn, .factor = 0.5}, plain, Remedy::None), "1 to 65536"));
  EXPECT_TRUE(mentions(
      refusal({.kind = Kind::Yarn, .factor = 2.0, .beta_fast = 1.0, .beta_slow = 1.0}, plain, Remedy::None),
      "expected more than the slow end"));
}

}  // namespace
}  // namespace thermo
