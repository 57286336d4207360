#include "engine/speed_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "gguf/gguf_file.h"

namespace thermo {
namespace {

// All weights as one type: bytes of a token, of all its experts together, and multiply-adds of a prompt's.
TokenWork work_of(double core_gb, double expert_gb, double core_macs, double expert_macs, double state_gb,
                  int n_layers, double expert_share) {
  return {.types = {{.dtype = DType::Q4_K,
                     .core_bytes = static_cast<uint64_t>(core_gb * 1e9),
                     .expert_bytes = static_cast<uint64_t>(expert_gb * 1e9),
                     .core_macs = core_macs,
                     .expert_macs = expert_macs}},
          .state_bytes = static_cast<uint64_t>(state_gb * 1e9),
          .state_macs = 0.0,
          .n_layers = n_layers,
          .expert_share = expert_share};
}

const TokenWork kSparse = work_of(1.50, 0.59, 1.43e9, 1.0e9, 0.13, 40, 8.0 / 256);  // 35B-A3B
const TokenWork kDense = work_of(16.9, 0.0, 24.3e9, 0.0, 0.3, 64, 0.0);             // 27B
const TokenWork kParts = work_of(6.54, 10.36, 7.2e9, 17.1e9, 0.3, 64, 1.0);         // the same in parts

// A processor of a server with so many of its cores, as measured; its types of weights together.
MachineRates cores(int n) {
  const double read = n <= 4 ? 45e9 : n <= 8 ? 85e9 : 130e9;
  MachineRates machine{.types = {}, .read = read, .small_s = 5e-6 * n / 8, .cache_gain = 1.0};
  for (const DType dtype : {DType::Q4_K, DType::F32})
    machine.types[dtype] = {
        .one_row = 16e9 * n, .few_rows = (n <= 8 ? 60e9 : 45e9) * n, .many_rows = 115e9 * n};
  return machine;
}

// An H200. `warpgroups`: with the kernels that came after the first runs.
CardRates card(double hot_share, double link, bool parts = false, bool warpgroups = false) {
  return {.read = 4620e9,
          .n_multiprocessors = 132,
          .warpgroups = warpgroups,
          .link = link,
          .hot_share = hot_share,
          .parts = parts,
          .n_batch = 2048};
}

void expect_within(double got, double measured, double share) {
  EXPECT_GT(got, (1.0 - share) * measured);
  EXPECT_LT(got, (1.0 + share) * measured);
}

// Measured on one machine that was held to fewer cores, less of its card and a slower link.
TEST(SpeedModel, ExpectsWhatWasMeasured) {
  constexpr double kShare = 0.2, kSlow = 12.9e9, kFast = 26.8e9;
  const auto check = [&](const SpeedEstimate& speed, double decode, double prefill) {
    expect_within(speed.decode, decode, kShare);
    expect_within(speed.prefill, prefill, kShare);
  };
  check(expected_speed(kSparse, cores(8), card(0.28, kFast)), 146, 934);
  check(expected_speed(kSparse, cores(8), card(0.50, kFast)), 190, 1327);
  check(expected_speed(kSparse, cores(8), card(0.72, kFast)), 247, 2296);
  check(expected_speed(kSparse, cores(4), card(0.28, kSlow)), 84.5, 452);
  check(expected_speed(kSparse, cores(8), card(1.0, kFast)), 686, 18265);
  check(expected_speed(kParts, cores(8), card(0.10, kFast, true)), 7.4, 1369);
  check(expected_speed(kParts, cores(16), card(0.51, kFast, true)), 18.8, 2396);
  check(expected_speed(kDense, cores(8), card(1.0, kFast, false, true)), 165, 8279);
  check(expected_speed(kSparse, cores(8), card(1.0, kFast, false, true)), 686, 20633);
  expect_within(expected_speed(kDense, cores(8), card(1.0, kFast)).prefill, 3781, kShare);
  check(expected_speed(kSparse, cores(16), 512, false), 40.4, 336);
  check(expected_speed(kSparse, cores(8), 512, false), 31.2, 210);
  check(expected_speed(kSparse, cores(4), 512, false), 19.5, 117);
  check(expected_speed(kDense, cores(16), 512, false), 7.9, 56);
}

// The head was counted for every token of a prompt: a third of the work of a small model.
TEST(SpeedModel, CountsTheHeadForDecodingOnly) {
  for (const char* name : {"qwen35moe", "qwen35", "laguna", "qwen3moe"}) {
    SCOPED_TRACE(name);
    const GgufFile file(std::string(THERMO_TEST_DATA) + "/" + name + "-f32.gguf");
    const ModelConfig config = read_model_config(file);
    const TokenWork work = token_work(config, Weights::bind(config, file));
    ASSERT_EQ(work.types.size(), 1u);
    const TypeWork& floats = work.types.front();
    const double head = static_cast<double>(config.n_vocab) * config.n_embd;
    EXPECT_EQ(4.0 * (floats.core_macs + head), static_cast<double>(floats.core_bytes));
    EXPECT_EQ(4.0 * floats.expert_macs, static_cast<double>(floats.expert_bytes));
  }
}

// Attention was not counted: the prompts of a model with many heads were expected a third too fast.
TEST(SpeedModel, CountsTheAttentionOfAPrompt) {
  const GgufFile file(std::string(THERMO_TEST_DATA) + "/laguna-f32.gguf");
  const ModelConfig config = read_model_config(file);
  double want = 0.0;
  for (int row = 0; row < kPromptRows; ++row)
    for (const Layer& layer : config.network.layers) {
      const Block& block = *layer.find(BlockKind::Attention);
      const int n_seen = block.window > 0 ? std::min(block.window, row + 1) : row + 1;
      want += 2.0 * n_seen * block.n_head * config.head_dim;
    }
  TokenWork work = token_work(config, Weights::bind(config, file));
  EXPECT_NEAR(work.attention_macs, want / kPromptRows, 1e-6 * want / kPromptRows);

  const double with = expected_speed(work, cores(8), kPromptRows, false).prefill;
  work.attention_macs = 0.0;
  EXPECT_GT(expected_speed(work, cores(8), kPromptRows, false).prefill, 1.01 * with);
}

TEST(SpeedModel, GrowsWithWhatAMachineHas) {
  double before = 0.0;
  for (const double hot : {0.0, 0.3, 0.6, 0.9, 1.0}) {
    const double now = expected_speed(kSparse, cores(8), card(hot, 25e9)).decode;
    EXPECT_GT(now, before) << hot;
    before = now;
  }
  const CardRates half = card(0.5, 12e9), better = card(0.5, 50e9);
  EXPECT_GT(expected_speed(kSparse, cores(8), better).decode, expected_speed(kSparse, cores(8), half).decode);
  EXPECT_GT(expected_speed(kSparse, cores(8), better).prefill,
            expected_speed(kSparse, cores(8), half).prefill);
  EXPECT_GT(expected_speed(kSparse, cores(16), half).decode, expected_speed(kSparse, cores(4), half).decode);
}

}  // namespace
}  // namespace thermo
