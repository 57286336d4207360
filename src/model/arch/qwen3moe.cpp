// qwen3moe: attention without a gate in every layer, softmax-routed experts without a shared one.
// Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-480B-A35B.
#include "model/arch/architecture.h"
#include "model/arch/blocks.h"

namespace thermo {
namespace {

void describe(const Keys& keys, ModelConfig& config) {
  RopeConfig rope;
  rope.freq_base = keys.positive_number("rope.freq_base");
  rope.n_rot = keys.positive_or("rope.dimension_count", 1024, config.head_dim);
  if (rope.n_rot != config.head_dim) keys.fail("rope.dimension_count", "is not the size of a head");
  keys.read_scaling(rope);
  config.ropes = {rope};

  read_experts(keys, config);
  config.route.gating = Gating::Softmax;  // fixed by the architecture, as is the renormalisation
  if (keys.count_or("expert_shared_feed_forward_length", kMaxWidth, 0) != 0)
    keys.fail("expert_shared_feed_forward_length", "is not 0, but qwen3moe has no shared expert");

  const std::vector<int> heads = read_heads(keys, config);
  for (int il = 0; il < config.n_layer; ++il)
    config.network.layers.push_back({{attention_block(config, il, {.n_head = heads[static_cast<size_t>(il)]}),
                                      routed_block(keys, config, il, {.norm = "ffn_norm.weight"})}});
  add_ends(keys, config);
}

ModelShape shape_of(std::string_view name, int n_layer, int n_embd, int n_vocab, int n_ctx, int n_head,
                    int n_head_kv, int head_dim, float freq_base, int n_expert, int n_used, int n_ff_expert) {
  return {name,
          false,
          {{"block_count", n_layer},
           {"context_length", n_ctx},
           {"embedding_length", n_embd},
           {"vocab_size", n_vocab},
           {"attention.head_count", n_head},
           {"attention.head_count_kv", n_head_kv},
           {"attention.key_length", head_dim},
           {"attention.value_length", head_dim},
           {"attention.layer_norm_rms_epsilon", 1e-6F},
           {"rope.freq_base", freq_base},
           {"expert_count", n_expert},
           {"expert_used_count", n_used},
           {"expert_feed_forward_length", n_ff_expert}}};
}

std::vector<ModelShape> shapes() {
  return {
      shape_of("qwen3moe-30b-a3b", 48, 2048, 151936, 262144, 32, 4, 128, 1e7F, 128, 8, 768),
      shape_of("qwen3moe-235b-a22b", 94, 4096, 151936, 262144, 64, 4, 128, 5e6F, 128, 8, 1536),
      shape_of("qwen3moe-480b-a35b", 62, 6144, 151936, 262144, 96, 8, 128, 1e7F, 160, 8, 2560),
      shape_of("qwen3moe-tiny", 4, 256, 512, 2048, 8, 2, 64, 1e6F, 16, 4, 256),
  };
}

}  // namespace

constinit const Architecture kQwen3Moe{.name = "qwen3moe", .describe = describe, .shapes = shapes};

}  // namespace thermo
