// What the architectures make of the keys of a file: which blocks, which tensors, which options. Every tensor
// of a file must be named once, with its shape.
#include "model/network.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "base/error.h"
#include "gguf/gguf_file.h"
#include "model/model_config.h"
#include "model/testing/edited_file.h"

namespace thermo {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

GgufFile fixture(const std::string& name) {
  return GgufFile(std::string(THERMO_TEST_DATA) + "/" + name + "-f32.gguf");
}
GgufFile plankton() {
  return GgufFile(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
}

std::vector<std::string> lines_of(const ModelConfig& config) {
  std::vector<std::string> lines;
  for (const LayerLine& line : describe_layers(config.network))
    lines.push_back(line.layers + ": " + line.text);
  return lines;
}

std::vector<BlockKind> kinds_of(const std::vector<Block>& blocks) {
  std::vector<BlockKind> kinds;
  for (const Block& block : blocks) kinds.push_back(block.kind);
  return kinds;
}

const Block& attention_of(const ModelConfig& config, int layer) {
  return *config.network.layers[static_cast<size_t>(layer)].find(BlockKind::Attention);
}

void expect_to_name_every_tensor(const GgufFile& file) {
  const ModelConfig config = read_model_config(file);
  std::map<std::string_view, int> named;
  const auto note = [&](const std::vector<Block>& blocks) {
    for (const Block& block : blocks)
      for (const TensorSpec& spec : block.tensors) {
        ++named[spec.name];
        const GgufTensor* const tensor = file.find_tensor(spec.name);
        ASSERT_NE(tensor, nullptr) << spec.name;
        for (size_t d = 0; d < 4; ++d)
          EXPECT_EQ(tensor->dims[d], d < spec.shape.size() ? static_cast<uint64_t>(spec.shape[d]) : 1u)
              << spec.name;
      }
  };
  note(config.network.input);
  for (const Layer& layer : config.network.layers) note(layer.blocks);
  note(config.network.output);
  for (const GgufTensor& tensor : file.tensors()) EXPECT_GE(named[tensor.name], 1) << tensor.name;
}

TEST(Network, NamesEveryTensorOfEveryFile) {
  for (const char* name : {"qwen35moe", "qwen35", "laguna", "qwen3moe"}) {
    SCOPED_TRACE(name);
    expect_to_name_every_tensor(fixture(name));
  }
  expect_to_name_every_tensor(plankton());
}

TEST(Network, DescribesPlankton) {
  const ModelConfig config = read_model_config(plankton());
  EXPECT_THAT(
      lines_of(config),
      ElementsAre("0-2, 4-6: DeltaNet 4 heads | experts 4 of 16, 256 wide, softmax router, gated shared "
                  "expert 256",
                  "3, 7: attention 4 heads, sigmoid gate by element | experts 4 of 16, 256 wide, softmax "
                  "router, gated shared expert 256",
                  "8: next-token input | attention 4 heads, sigmoid gate by element | experts 4 of 16, 256 "
                  "wide, softmax router, gated shared expert 256 | norm and head"));
  EXPECT_EQ(config.n_recurrent_layers(), 6);
  EXPECT_EQ(config.n_routed_layers(), 8);
  // The next-token block has the trunk's head.
  EXPECT_EQ(config.network.layers[8].blocks.back().find(Role::Output)->name,
            config.network.output.front().find(Role::Output)->name);
}

TEST(Network, DescribesQwen35) {
  EXPECT_THAT(lines_of(read_model_config(fixture("qwen35"))),
              ElementsAre("0-2: DeltaNet 4 heads | FFN 128",
                          "3: attention 4 heads, sigmoid gate by element | FFN 128"));
  EXPECT_THAT(
      lines_of(read_model_config(fixture("qwen35moe"))),
      ElementsAre(
          "0-2: DeltaNet 4 heads | experts 4 of 16, 32 wide, softmax router, gated shared expert 32",
          "3: attention 4 heads, sigmoid gate by element | experts 4 of 16, 32 wide, softmax router, gated "
          "shared expert 32"));
}

TEST(Network, DescribesLaguna) {
  const ModelConfig config = read_model_config(fixture("laguna"));
  EXPECT_THAT(lines_of(config),
              ElementsAre("0: attention 4 heads, softplus gate by head | FFN 128",
                          "1-3: attention 6 heads, softplus gate by head, window 16 | experts 4 of 16, 32 "
                          "wide, sigmoid router with bias, shared expert 32",
                          "4: attention 4 heads, softplus gate by head | experts 4 of 16, 32 wide, sigmoid "
                          "router with bias, shared expert 32"));
  // Windowed layers rotate differently.
  ASSERT_EQ(config.ropes.size(), 2u);
  EXPECT_EQ(attention_of(config, 0).rope, 0);
  EXPECT_EQ(attention_of(config, 1).rope, 1);
  EXPECT_NE(config.ropes[0].freq_base, config.ropes[1].freq_base);
}

std::string refusal_of(const EditedFile& file) {
  try {
    read_model_config(file.open());
  } catch (const LoadError& error) {
    return error.what();
  }
  return "";
}

std::vector<bool> windows_of(const ModelConfig& config) {
  std::vector<bool> windows;
  for (int il = 0; il < config.n_layer; ++il) windows.push_back(attention_of(config, il).window > 0);
  return windows;
}

// Other converters name or number the types of layers, and list the dense ones.
TEST(Network, ReadsTheTypesOfLagunasLayers) {
  const GgufFile source = fixture("laguna");
  const std::vector<bool> want{true, false, true, true, false};
  const std::string types = "laguna.attention.layer_types";
  std::vector<std::string> names;
  std::vector<uint32_t> numbers;
  for (const bool windowed : want) {
    names.push_back(windowed ? "sliding_attention" : "full_attention");
    numbers.push_back(windowed ? 1 : 0);
  }
  const auto with = [&](const std::function<void(GgufWriter&)>& set) {
    return EditedFile(source, [&](GgufWriter& writer, EditedFile&) { set(writer); });
  };
  EXPECT_EQ(windows_of(read_model_config(with([&](auto& w) { w.set_array(types, names); }).open())), want);
  EXPECT_EQ(windows_of(read_model_config(with([&](auto& w) { w.set_array(types, numbers); }).open())), want);
  EXPECT_EQ(windows_of(read_model_config(with([&](auto& w) {
                                           w.set_array(types, names);
                                           w.set_array("laguna.attention.sliding_window_pattern", want);
                                         }).open())),
            want);
  EXPECT_THAT(refusal_of(with([&](auto& w) {
                w.set_array(types, names);
                w.set("laguna.attention.sliding_window_pattern", uint32_t{4});
              })),
              HasSubstr("differ about the layers that have a window"));
  names[2] = "linear_attention";
  EXPECT_THAT(refusal_of(with([&](auto& w) { w.set_array(types, names); })), HasSubstr("'linear_attention'"));
  names.pop_back();
  names[2] = "full_attention";
  EXPECT_THAT(refusal_of(with([&](auto& w) { w.set_array(types, names); })), HasSubstr("names 4 layers"));
}

TEST(Network, ReadsTheListOfLagunasDenseLayers) {
  const GgufFile source = fixture("laguna");
  const auto with = [&](std::vector<uint32_t> list, std::vector<std::string_view> dropped) {
    return EditedFile(
        source, [&](GgufWriter& writer, EditedFile&) { writer.set_array("laguna.dense_layers", list); }, {},
        dropped);
  };
  const ModelConfig config = read_model_config(with({0, 3}, {"laguna.leading_dense_block_count"}).open());
  EXPECT_EQ(config.n_routed_layers(), 3);
  EXPECT_FALSE(config.network.layers[3].routed());
  EXPECT_EQ(refusal_of(with({0}, {})), "");
  EXPECT_THAT(refusal_of(with({1}, {})), HasSubstr("differ about the layers that have a dense FFN"));
  EXPECT_THAT(refusal_of(with({9}, {})), HasSubstr("laguna.dense_layers"));
}

TEST(Network, TakesAScaleOfZeroAsNotSet) {
  const EditedFile file(fixture("laguna"), [](GgufWriter& writer, EditedFile&) {
    writer.set("laguna.expert_weights_scale", 0.0F);
  });
  EXPECT_EQ(read_model_config(file.open()).route.weights_scale, 1.0F);
}

TEST(Network, ReadsTheEndsOfYarnInBothSpellings) {
  for (const char* prefix : {"yarn_beta_", "beta_"}) {
    const EditedFile file(fixture("laguna"), [&](GgufWriter& writer, EditedFile&) {
      const std::string scaling = "laguna.rope.scaling.";
      writer.set(scaling + "type", "yarn");
      writer.set(scaling + "factor", 32.0F);
      writer.set(scaling + "original_context_length", uint32_t{64});
      writer.set(scaling + prefix + "fast", 64.0F);
      writer.set(scaling + prefix + "slow", 0.0F);
    });
    const RopeConfig rope = read_model_config(file.open()).ropes[0];
    EXPECT_EQ(rope.beta_fast, 64.0);
    EXPECT_EQ(rope.beta_slow, 1.0);  // not set
  }
}

TEST(Network, FindsTheWidthOfExpertsWhereTheFileDoesNotSay) {
  const EditedFile file(fixture("qwen3moe"), {}, {}, {"qwen3moe.expert_feed_forward_length"});
  EXPECT_EQ(read_model_config(file.open()).n_ff_expert, 32);
  const EditedFile neither(fixture("qwen3moe"), {}, {},
                           {"qwen3moe.expert_feed_forward_length", "qwen3moe.feed_forward_length"});
  EXPECT_THAT(refusal_of(neither), HasSubstr("expert_feed_forward_length"));
}

TEST(Network, SaysWhatItTookForTheSizeOfAHead) {
  const GgufFile source = fixture("qwen3moe");
  const EditedFile no_key(source, {}, {}, {"qwen3moe.attention.key_length"});
  EXPECT_THAT(refusal_of(no_key), HasSubstr("key_length is missing and was taken as 16"));
  const EditedFile no_value(source, {}, {}, {"qwen3moe.attention.value_length"});
  EXPECT_THAT(refusal_of(no_value), HasSubstr("value_length is missing and was taken as 16"));
  const EditedFile odd(source, [](GgufWriter& writer, EditedFile&) {
    for (const char* key : {"qwen3moe.attention.key_length", "qwen3moe.attention.value_length"})
      writer.set(key, uint32_t{20});
  });
  EXPECT_THAT(refusal_of(odd), HasSubstr("is 20, not a multiple of 8"));
}

TEST(Network, DescribesQwen3Moe) {
  const ModelConfig config = read_model_config(fixture("qwen3moe"));
  EXPECT_THAT(lines_of(config), ElementsAre("0-2: attention 4 heads, no gate | experts 4 of 12, 32 wide, "
                                            "softmax router, no shared expert"));
  ASSERT_EQ(config.ropes.size(), 1u);
  EXPECT_EQ(config.ropes[0].n_rot, config.head_dim);
  EXPECT_NE(attention_of(config, 0).n_head * config.head_dim, config.n_embd);
  EXPECT_EQ(config.network.widest(Role::Gate), 0);
  EXPECT_EQ(config.n_ff_shared, 0);
}

TEST(Network, PutsTapsWhereTheyAreAskedFor) {
  ModelConfig config = read_model_config(fixture("qwen3moe"));
  insert_taps(config.network, config.n_layer, {1, 3});
  EXPECT_EQ(config.network.n_taps, 2);
  EXPECT_THAT(kinds_of(config.network.layers[0].blocks),
              ElementsAre(BlockKind::Attention, BlockKind::FeedForward));
  EXPECT_THAT(kinds_of(config.network.layers[1].blocks),
              ElementsAre(BlockKind::Tap, BlockKind::Attention, BlockKind::FeedForward));
  EXPECT_EQ(config.network.layers[1].blocks[0].tap, 0);
  EXPECT_THAT(kinds_of(config.network.output), ElementsAre(BlockKind::Head, BlockKind::Tap));
  EXPECT_EQ(config.network.output[1].tap, 1);
  EXPECT_EQ(config.network.output[1].tap_of, TapOf::Normed);
}

TEST(Network, TapsTheStreamAfterTheLastLayer) {
  ModelConfig config = read_model_config(fixture("qwen3moe"));
  const int last = config.n_layer - 1;
  EXPECT_EQ(output_state(0, config.n_layer), 1);
  EXPECT_EQ(output_state(last, config.n_layer), last_stream(config.n_layer));
  insert_taps(config.network, config.n_layer, {output_state(last, config.n_layer)});
  EXPECT_THAT(kinds_of(config.network.layers[static_cast<size_t>(last)].blocks),
              ElementsAre(BlockKind::Attention, BlockKind::FeedForward, BlockKind::Tap));
  EXPECT_THAT(kinds_of(config.network.output), ElementsAre(BlockKind::Head));
}

TEST(Network, KnowsWhereRowsMixNoMore) {
  for (const char* name : {"qwen35moe", "qwen35", "laguna", "qwen3moe"}) {
    ModelConfig config = read_model_config(fixture(name));
    EXPECT_EQ(first_block_of_single_rows(config.network, config.n_layer), size_t{1}) << name;
    const int last = config.n_layer - 1;
    insert_taps(config.network, config.n_layer, {last});  // before the last layer
    EXPECT_EQ(first_block_of_single_rows(config.network, config.n_layer), size_t{2}) << name;
    for (const int state : {config.n_layer, last_stream(config.n_layer)}) {
      ModelConfig tapped = read_model_config(fixture(name));
      insert_taps(tapped.network, tapped.n_layer, {state});
      EXPECT_EQ(first_block_of_single_rows(tapped.network, tapped.n_layer), std::nullopt) << name;
    }
  }
}

TEST(Network, TakesNoTapsUnlessAsked) {
  ModelConfig config = read_model_config(fixture("qwen3moe"));
  insert_taps(config.network, config.n_layer, {});
  EXPECT_EQ(config.network.n_taps, 0);
}

}  // namespace
}  // namespace thermo
