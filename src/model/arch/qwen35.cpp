// qwen35moe and qwen35: Gated DeltaNet layers with full attention every fourth, experts or a dense FFN in
// each.
#include <fmt/format.h>

#include <algorithm>

#include "gguf/gguf_file.h"
#include "model/arch/architecture.h"
#include "model/arch/blocks.h"

namespace thermo {
namespace {

void read_rope(const Keys& keys, ModelConfig& config) {
  RopeConfig rope;
  rope.freq_base = keys.positive_number("rope.freq_base");
  rope.n_rot =
      keys.rope_dims("rope.dimension_count", keys.positive_or("rope.dimension_count", 1024, config.head_dim),
                     config.head_dim);
  keys.read_scaling(rope);
  if (const auto sections = keys.file().find_uints(keys.key("rope.dimension_sections"))) {
    // Text has equal components, so the sections only have to make sense.
    uint64_t sum = 0;
    for (uint64_t section : *sections) sum += std::min<uint64_t>(section, kMaxWidth);
    if (sum > static_cast<uint64_t>(rope.n_rot / 2))
      keys.fail("rope.dimension_sections",
                fmt::format("add up to {}, expected at most {}", sum, rope.n_rot / 2));
  }
  config.ropes = {rope};
}

void read_delta_net(const Keys& keys, ModelConfig& config) {
  config.ssm_taps = keys.positive("ssm.conv_kernel", 8);
  config.ssm_dim = keys.positive("ssm.state_size", 1024);
  config.ssm_n_head_k = keys.positive("ssm.group_count", kMaxHeads);
  config.ssm_n_head_v = keys.positive("ssm.time_step_rank", kMaxHeads);
  if (config.ssm_n_head_v % config.ssm_n_head_k != 0)
    keys.fail("ssm.time_step_rank", fmt::format("is {}, expected a multiple of ssm.group_count {}",
                                                config.ssm_n_head_v, config.ssm_n_head_k));
  const int inner = keys.positive("ssm.inner_size", kMaxWidth);
  if (inner != config.ssm_inner())
    keys.fail("ssm.inner_size",
              fmt::format("is {}, expected time_step_rank x state_size = {}", inner, config.ssm_inner()));
  if (config.ssm_dim % kHeadMultiple != 0)
    keys.not_supported("ssm.state_size",
                       fmt::format("is {}, not a multiple of {}", config.ssm_dim, kHeadMultiple));
}

void add_layers(const Keys& keys, ModelConfig& config) {
  const int n_block = config.n_layer + config.n_nextn;
  const std::vector<int> heads = read_heads(keys, config);
  const int interval = keys.positive_or("full_attention_interval", kMaxLayers, 4);
  const auto recurrent =
      keys.file().find_bool_each(keys.key("attention.recurrent_layers"), static_cast<size_t>(n_block));
  constexpr std::string_view kNorm = "post_attention_norm.weight";
  for (int il = 0; il < n_block; ++il) {
    const bool delta = recurrent ? (*recurrent)[static_cast<size_t>(il)] : (il + 1) % interval != 0;
    Layer& layer = config.network.layers.emplace_back();
    if (delta && il < config.n_layer)  // next-token blocks always attend
      layer.blocks.push_back(delta_net_block(config, il));
    else
      layer.blocks.push_back(attention_block(
          config, il, {.n_head = heads[static_cast<size_t>(il)], .gate = HeadGate::SigmoidElement}));
    layer.blocks.push_back(config.is_moe()
                               ? routed_block(keys, config, il, {.norm = kNorm, .shared_weight = true})
                               : dense_block(config, il, kNorm));
  }
  add_ends(keys, config);
  if (config.n_nextn > 0) add_nextn(keys, config);
}

struct Size {
  std::string_view name;
  int n_layer, n_embd, n_vocab, n_ctx, n_head, n_head_kv, head_dim, n_rot;
  int n_ff;                                  // dense
  int n_expert, n_expert_used, n_ff_expert;  // the shared expert is as wide as a routed one
  int ssm_dim, ssm_n_head_k, ssm_n_head_v;
  bool tied;
};

ModelShape shape_of(const Size& s) {
  // Time, height and width in turn: n_rot / 2 pairs in all.
  const int pairs = s.n_rot / 2, third = (pairs + 2) / 3;
  ModelShape shape{s.name, s.tied, {}};
  shape.keys = {{"block_count", s.n_layer},
                {"context_length", s.n_ctx},
                {"embedding_length", s.n_embd},
                {"vocab_size", s.n_vocab},
                {"attention.head_count", s.n_head},
                {"attention.head_count_kv", s.n_head_kv},
                {"attention.key_length", s.head_dim},
                {"attention.value_length", s.head_dim},
                {"attention.layer_norm_rms_epsilon", 1e-6F},
                {"rope.dimension_count", s.n_rot},
                {"rope.freq_base", 1e7F},
                {"rope.dimension_sections", std::vector<int>{third, third, pairs - 2 * third, 0}},
                {"ssm.conv_kernel", 4},
                {"ssm.state_size", s.ssm_dim},
                {"ssm.group_count", s.ssm_n_head_k},
                {"ssm.time_step_rank", s.ssm_n_head_v},
                {"ssm.inner_size", s.ssm_n_head_v * s.ssm_dim},
                {"full_attention_interval", 4}};
  if (s.n_expert > 0) {
    shape.keys.push_back({"expert_count", s.n_expert});
    shape.keys.push_back({"expert_used_count", s.n_expert_used});
    shape.keys.push_back({"expert_feed_forward_length", s.n_ff_expert});
    shape.keys.push_back({"expert_shared_feed_forward_length", s.n_ff_expert});
  } else {
    shape.keys.push_back({"feed_forward_length", s.n_ff});
  }
  return shape;
}

void describe_moe(const Keys& keys, ModelConfig& config) {
  read_rope(keys, config);
  read_delta_net(keys, config);
  read_experts(keys, config);
  config.route.gating = Gating::Softmax;  // fixed by the architecture, whatever the metadata says
  config.n_ff_shared = keys.positive("expert_shared_feed_forward_length", kMaxWidth);
  add_layers(keys, config);
}

void describe_dense(const Keys& keys, ModelConfig& config) {
  read_rope(keys, config);
  read_delta_net(keys, config);
  config.n_ff = keys.positive("feed_forward_length", kMaxWidth);
  add_layers(keys, config);
}

// The tiny ones are the smallest that every quantised type can hold: rows are multiples of 256.
std::vector<ModelShape> shapes_moe() {
  return {shape_of({"qwen35moe-35b-a3b", 40, 2048, 248320, 262144, 16, 2, 256, 64, 0, 256, 8, 512, 128, 16,
                    32, false}),
          shape_of({"qwen35moe-tiny", 4, 256, 512, 2048, 4, 2, 64, 16, 0, 16, 4, 256, 64, 2, 4, false})};
}

std::vector<ModelShape> shapes_dense() {
  return {
      shape_of({"qwen35-0.8b", 24, 1024, 248320, 262144, 8, 2, 256, 64, 3584, 0, 0, 0, 128, 16, 16, true}),
      shape_of({"qwen35-9b", 32, 4096, 248320, 262144, 16, 4, 256, 64, 12288, 0, 0, 0, 128, 16, 32, false}),
      shape_of({"qwen35-27b", 64, 5120, 248320, 262144, 24, 4, 256, 64, 17408, 0, 0, 0, 128, 16, 48, false}),
      shape_of({"qwen35-tiny", 4, 256, 512, 2048, 4, 2, 64, 16, 512, 0, 0, 0, 64, 2, 4, true})};
}

}  // namespace

constinit const Architecture kQwen35Moe{
    .name = "qwen35moe", .describe = describe_moe, .shapes = shapes_moe, .nextn = true};
constinit const Architecture kQwen35{
    .name = "qwen35", .describe = describe_dense, .shapes = shapes_dense, .nextn = true};

}  // namespace thermo
