#include "model/arch/blocks.h"

#include <fmt/format.h>

#include "gguf/gguf_file.h"

namespace thermo {
namespace {

TensorSpec matrix(Role role, std::string name, int n_in, int n_out) {
  return {.role = role, .form = TensorForm::Matrix, .name = std::move(name), .shape = {n_in, n_out}};
}
TensorSpec vector(Role role, std::string name, std::vector<int> shape) {
  return {.role = role, .form = TensorForm::Vector, .name = std::move(name), .shape = std::move(shape)};
}
TensorSpec lookup(Role role, std::string name, int n_in, int n_out) {
  return {.role = role, .form = TensorForm::Lookup, .name = std::move(name), .shape = {n_in, n_out}};
}
TensorSpec experts(Role role, std::string name, std::vector<int> shape, int row_begin, int n_rows) {
  return {.role = role,
          .form = TensorForm::Experts,
          .name = std::move(name),
          .shape = std::move(shape),
          .row_begin = row_begin,
          .n_rows = n_rows};
}

// The name, or another one where the file lacks it.
std::string name_or(const Keys& keys, std::string name, const char* other) {
  return keys.has_tensor(name) ? name : other;
}

void add_ffn(const ModelConfig& c, int il, const char* suffix, int n_ff, Block& block) {
  const auto name = [&](const char* part) {
    return tensor_name(il, fmt::format("ffn_{}{}.weight", part, suffix));
  };
  block.tensors.push_back(matrix(Role::FfnGate, name("gate"), c.n_embd, n_ff));
  block.tensors.push_back(matrix(Role::FfnUp, name("up"), c.n_embd, n_ff));
  block.tensors.push_back(matrix(Role::FfnDown, name("down"), n_ff, c.n_embd));
}

const char* const kOutput = "output.weight";
const char* const kEmbedding = "token_embd.weight";
const char* const kOutputNorm = "output_norm.weight";

}  // namespace

std::string tensor_name(int layer, std::string_view name) {
  return fmt::format("blk.{}.{}", layer, name);
}

std::vector<int> read_heads(const Keys& keys, const ModelConfig& config) {
  std::vector<int> heads = keys.positive_each(
      "attention.head_count", static_cast<size_t>(config.n_layer + config.n_nextn), kMaxHeads);
  for (size_t i = 0; i < heads.size(); ++i)
    if (heads[i] % config.n_head_kv != 0)
      keys.fail("attention.head_count",
                fmt::format("is {} in layer {}, expected a multiple of the {} key heads", heads[i], i,
                            config.n_head_kv));
  return heads;
}

void read_experts(const Keys& keys, ModelConfig& config) {
  config.route.n_expert = keys.positive("expert_count", kMaxExperts);
  config.route.n_expert_used = keys.positive("expert_used_count", kMaxExperts);
  if (config.route.n_expert_used > config.route.n_expert)
    keys.fail("expert_used_count", fmt::format("is {}, expected at most the {} experts",
                                               config.route.n_expert_used, config.route.n_expert));
  constexpr std::string_view kWidth = "expert_feed_forward_length";
  if (keys.file().find(keys.key(kWidth)) == nullptr) {
    // As llama.cpp takes it.
    config.n_ff_expert = keys.count_or("feed_forward_length", kMaxWidth, 0) / config.route.n_expert_used;
    if (config.n_ff_expert > 0) return;
  }
  config.n_ff_expert = keys.positive(kWidth, kMaxWidth);
}

void add_ends(const Keys& keys, ModelConfig& config) {
  config.network.input = {{.kind = BlockKind::Embedding,
                           .tensors = {lookup(Role::Embedding, kEmbedding, config.n_embd, config.n_vocab)}}};
  config.network.output = {
      {.kind = BlockKind::Head,
       .tensors = {vector(Role::Norm, kOutputNorm, {config.n_embd}),
                   matrix(Role::Output, name_or(keys, kOutput, kEmbedding), config.n_embd, config.n_vocab)}}};
}

Block attention_block(const ModelConfig& c, int il, const AttentionOptions& o) {
  const int q_dim = o.n_head * c.head_dim;
  const auto name = [&](const char* part) { return tensor_name(il, part); };
  const int q_rows = o.gate == HeadGate::SigmoidElement ? 2 * q_dim : q_dim;
  Block block{.kind = BlockKind::Attention,
              .tensors = {vector(Role::Norm, name("attn_norm.weight"), {c.n_embd}),
                          matrix(Role::Q, name("attn_q.weight"), c.n_embd, q_rows),
                          matrix(Role::K, name("attn_k.weight"), c.n_embd, c.n_kv_dim()),
                          matrix(Role::V, name("attn_v.weight"), c.n_embd, c.n_kv_dim())},
              .n_head = o.n_head,
              .window = o.window,
              .gate = o.gate,
              .rope = o.rope};
  if (o.gate == HeadGate::SoftplusHead || o.gate == HeadGate::SoftplusElement)
    block.tensors.push_back(matrix(Role::Gate, name("attn_gate.weight"), c.n_embd,
                                   o.gate == HeadGate::SoftplusHead ? o.n_head : q_dim));
  block.tensors.push_back(vector(Role::QNorm, name("attn_q_norm.weight"), {c.head_dim}));
  block.tensors.push_back(vector(Role::KNorm, name("attn_k_norm.weight"), {c.head_dim}));
  block.tensors.push_back(matrix(Role::Output, name("attn_output.weight"), q_dim, c.n_embd));
  return block;
}

Block delta_net_block(const ModelConfig& c, int il) {
  const auto name = [&](const char* part) { return tensor_name(il, part); };
  return {.kind = BlockKind::DeltaNet,
          .tensors = {vector(Role::Norm, name("attn_norm.weight"), {c.n_embd}),
                      matrix(Role::Qkv, name("attn_qkv.weight"), c.n_embd, c.ssm_channels()),
                      matrix(Role::Z, name("attn_gate.weight"), c.n_embd, c.ssm_inner()),
                      matrix(Role::Alpha, name("ssm_alpha.weight"), c.n_embd, c.ssm_n_head_v),
                      matrix(Role::Beta, name("ssm_beta.weight"), c.n_embd, c.ssm_n_head_v),
                      vector(Role::Conv, name("ssm_conv1d.weight"), {c.ssm_taps, c.ssm_channels()}),
                      vector(Role::Decay, name("ssm_a"), {c.ssm_n_head_v}),
                      vector(Role::TimeStep, name("ssm_dt.bias"), {c.ssm_n_head_v}),
                      vector(Role::InnerNorm, name("ssm_norm.weight"), {c.ssm_dim}),
                      matrix(Role::Output, name("ssm_out.weight"), c.ssm_inner(), c.n_embd)}};
}

Block dense_block(const ModelConfig& c, int il, std::string_view norm) {
  Block block{.kind = BlockKind::FeedForward,
              .tensors = {vector(Role::Norm, tensor_name(il, norm), {c.n_embd})}};
  add_ffn(c, il, "", c.n_ff, block);
  return block;
}

Block routed_block(const Keys& keys, const ModelConfig& c, int il, const RoutedOptions& o) {
  const int n_expert = c.route.n_expert, n_ff = c.n_ff_expert;
  const auto name = [&](const char* part) { return tensor_name(il, part); };
  Block block{.kind = BlockKind::FeedForward,
              .tensors = {vector(Role::Norm, tensor_name(il, o.norm), {c.n_embd}),
                          matrix(Role::Router, name("ffn_gate_inp.weight"), c.n_embd, n_expert)}};
  block.route = c.route;
  if (o.router_bias) block.tensors.push_back(vector(Role::RouterBias, name("exp_probs_b.bias"), {n_expert}));
  if (c.n_ff_shared > 0) {
    add_ffn(c, il, "_shexp", c.n_ff_shared, block);
    if (o.shared_weight)
      block.tensors.push_back(vector(Role::SharedWeight, name("ffn_gate_inp_shexp.weight"), {c.n_embd}));
  }
  const std::string fused = name("ffn_gate_up_exps.weight");
  const bool is_fused = keys.has_tensor(fused);  // rows 0..n_ff-1 gate, the rest up
  const int in_rows = is_fused ? 2 * n_ff : n_ff;
  block.tensors.push_back(experts(Role::ExpertGate, is_fused ? fused : name("ffn_gate_exps.weight"),
                                  {c.n_embd, in_rows, n_expert}, 0, n_ff));
  block.tensors.push_back(experts(Role::ExpertUp, is_fused ? fused : name("ffn_up_exps.weight"),
                                  {c.n_embd, in_rows, n_expert}, is_fused ? n_ff : 0, n_ff));
  block.tensors.push_back(
      experts(Role::ExpertDown, name("ffn_down_exps.weight"), {n_ff, c.n_embd, n_expert}, 0, c.n_embd));
  return block;
}

void add_nextn(const Keys& keys, ModelConfig& c) {
  const int il = c.n_layer;
  const auto name = [&](const char* part) { return tensor_name(il, part); };
  std::vector<Block>& blocks = c.network.layers[static_cast<size_t>(il)].blocks;
  blocks.insert(
      blocks.begin(),
      {.kind = BlockKind::NextnInput,
       .tensors = {lookup(Role::Embedding, name_or(keys, name("nextn.embed_tokens.weight"), kEmbedding),
                          c.n_embd, c.n_vocab),
                   vector(Role::EmbeddingNorm, name("nextn.enorm.weight"), {c.n_embd}),
                   vector(Role::StateNorm, name("nextn.hnorm.weight"), {c.n_embd}),
                   matrix(Role::StateProjection, name("nextn.eh_proj.weight"), 2 * c.n_embd, c.n_embd)}});
  blocks.push_back(
      {.kind = BlockKind::Head,
       .tensors = {
           vector(Role::Norm, name_or(keys, name("nextn.shared_head_norm.weight"), kOutputNorm), {c.n_embd}),
           matrix(Role::Output,
                  name_or(keys, name("nextn.shared_head_head.weight"),
                          c.network.output.front().find(Role::Output)->name.c_str()),
                  c.n_embd, c.n_vocab)}});
}

}  // namespace thermo
