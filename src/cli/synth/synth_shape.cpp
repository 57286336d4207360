#include "cli/synth/synth_shape.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

namespace thermo {
namespace {

constexpr int kInterval = 4;  // one full-attention layer in four, in all three families
constexpr int kTaps = 4;

// Matrices that write into the residual stream are drawn smaller, so that it grows slowly: after 40 layers to
// about twice the size of the embedding.
constexpr double kWriteGain = 0.5;

constexpr SynthShape kShapes[] = {
    {.name = "qwen35moe-35b-a3b",
     .arch = Arch::Qwen35Moe,
     .n_layer = 40,
     .n_embd = 2048,
     .n_vocab = 248320,
     .n_ctx = 262144,
     .n_head = 16,
     .n_head_window = 0,
     .n_head_kv = 2,
     .head_dim = 256,
     .n_rot = 64,
     .n_rot_window = 0,
     .n_ff = 0,
     .n_expert = 256,
     .n_expert_used = 8,
     .n_ff_expert = 512,
     .ssm_dim = 128,
     .ssm_n_head_k = 16,
     .ssm_n_head_v = 32,
     .window = 0,
     .tied = false},
    {.name = "qwen35-0.8b",
     .arch = Arch::Qwen35,
     .n_layer = 24,
     .n_embd = 1024,
     .n_vocab = 248320,
     .n_ctx = 262144,
     .n_head = 8,
     .n_head_window = 0,
     .n_head_kv = 2,
     .head_dim = 256,
     .n_rot = 64,
     .n_rot_window = 0,
     .n_ff = 3584,
     .n_expert = 0,
     .n_expert_used = 0,
     .n_ff_expert = 0,
     .ssm_dim = 128,
     .ssm_n_head_k = 16,
     .ssm_n_head_v = 16,
     .window = 0,
     .tied = true},
    {.name = "qwen35-9b",
     .arch = Arch::Qwen35,
     .n_layer = 32,
     .n_embd = 4096,
     .n_vocab = 248320,
     .n_ctx = 262144,
     .n_head = 16,
     .n_head_window = 0,
     .n_head_kv = 4,
     .head_dim = 256,
     .n_rot = 64,
     .n_rot_window = 0,
     .n_ff = 12288,
     .n_expert = 0,
     .n_expert_used = 0,
     .n_ff_expert = 0,
     .ssm_dim = 128,
     .ssm_n_head_k = 16,
     .ssm_n_head_v = 32,
     .window = 0,
     .tied = false},
    {.name = "qwen35-27b",
     .arch = Arch::Qwen35,
     .n_layer = 64,
     .n_embd = 5120,
     .n_vocab = 248320,
     .n_ctx = 262144,
     .n_head = 24,
     .n_head_window = 0,
     .n_head_kv = 4,
     .head_dim = 256,
     .n_rot = 64,
     .n_rot_window = 0,
     .n_ff = 17408,
     .n_expert = 0,
     .n_expert_used = 0,
     .n_ff_expert = 0,
     .ssm_dim = 128,
     .ssm_n_head_k = 16,
     .ssm_n_head_v = 48,
     .window = 0,
     .tied = false},
    {.name = "laguna-xs2",
     .arch = Arch::Laguna,
     .n_layer = 40,
     .n_embd = 2048,
     .n_vocab = 100352,
     .n_ctx = 131072,
     .n_head = 48,
     .n_head_window = 64,
     .n_head_kv = 8,
     .head_dim = 128,
     .n_rot = 64,
     .n_rot_window = 128,
     .n_ff = 8192,
     .n_expert = 256,
     .n_expert_used = 8,
     .n_ff_expert = 512,
     .ssm_dim = 0,
     .ssm_n_head_k = 0,
     .ssm_n_head_v = 0,
     .window = 512,
     .tied = false},
    // The smallest that every quantised type can hold: rows are multiples of 256.
    {.name = "qwen35moe-tiny",
     .arch = Arch::Qwen35Moe,
     .n_layer = 4,
     .n_embd = 256,
     .n_vocab = 512,
     .n_ctx = 2048,
     .n_head = 4,
     .n_head_window = 0,
     .n_head_kv = 2,
     .head_dim = 64,
     .n_rot = 16,
     .n_rot_window = 0,
     .n_ff = 0,
     .n_expert = 16,
     .n_expert_used = 4,
     .n_ff_expert = 256,
     .ssm_dim = 64,
     .ssm_n_head_k = 2,
     .ssm_n_head_v = 4,
     .window = 0,
     .tied = false},
    {.name = "qwen35-tiny",
     .arch = Arch::Qwen35,
     .n_layer = 4,
     .n_embd = 256,
     .n_vocab = 512,
     .n_ctx = 2048,
     .n_head = 4,
     .n_head_window = 0,
     .n_head_kv = 2,
     .head_dim = 64,
     .n_rot = 16,
     .n_rot_window = 0,
     .n_ff = 512,
     .n_expert = 0,
     .n_expert_used = 0,
     .n_ff_expert = 0,
     .ssm_dim = 64,
     .ssm_n_head_k = 2,
     .ssm_n_head_v = 4,
     .window = 0,
     .tied = true},
    {.name = "laguna-tiny",
     .arch = Arch::Laguna,
     .n_layer = 5,
     .n_embd = 256,
     .n_vocab = 512,
     .n_ctx = 2048,
     .n_head = 4,
     .n_head_window = 8,
     .n_head_kv = 2,
     .head_dim = 64,
     .n_rot = 32,
     .n_rot_window = 64,
     .n_ff = 512,
     .n_expert = 16,
     .n_expert_used = 4,
     .n_ff_expert = 256,
     .ssm_dim = 0,
     .ssm_n_head_k = 0,
     .ssm_n_head_v = 0,
     .window = 32,
     .tied = false},
};

using enum DType;
constexpr SynthQuant kQuants[] = {
    {"Q4_K_M", Q4_K, Q6_K, Q4_K, Q6_K, 15},       {"Q4_K_S", Q4_K, Q4_K, Q4_K, Q6_K, 14},
    {"Q5_K_M", Q5_K, Q6_K, Q5_K, Q6_K, 17},       {"Q5_K_S", Q5_K, Q5_K, Q5_K, Q6_K, 16},
    {"Q3_K_M", Q3_K, Q5_K, Q3_K, Q6_K, 12},       {"Q2_K", Q2_K, Q3_K, Q2_K, Q6_K, 10},
    {"Q6_K", Q6_K, Q6_K, Q6_K, Q6_K, 18},         {"Q8_0", Q8_0, Q8_0, Q8_0, Q8_0, 7},
    {"Q4_0", Q4_0, Q4_0, Q4_0, Q6_K, 2},          {"Q4_1", Q4_1, Q4_1, Q4_1, Q6_K, 3},
    {"Q5_0", Q5_0, Q5_0, Q5_0, Q6_K, 8},          {"Q5_1", Q5_1, Q5_1, Q5_1, Q6_K, 9},
    {"IQ4_NL", IQ4_NL, IQ4_NL, IQ4_NL, Q6_K, 25}, {"IQ4_XS", IQ4_XS, IQ4_XS, IQ4_XS, Q6_K, 30},
    {"MXFP4", MXFP4, MXFP4, Q8_0, Q8_0, 38},      {"F16", F16, F16, F16, F16, 1},
    {"BF16", BF16, BF16, BF16, BF16, 32},         {"F32", F32, F32, F32, F32, 0},
};

uint64_t u64(int value) {
  return static_cast<uint64_t>(value);
}

// The tensors of one model, in the order of the file.
class TensorList {
 public:
  explicit TensorList(const SynthOptions& options)
      : options_(options),
        shape_(*options.shape),
        stream_(shape_.tied ? 1.0 / std::sqrt(shape_.n_embd) : 1.0),
        write_gain_(kWriteGain * stream_) {}

  std::vector<SynthTensor> build() {
    const SynthQuant& quant = *options_.quant;
    const int n_vocab = options_.n_vocab > 0 ? options_.n_vocab : shape_.n_vocab;
    const int n_layer = options_.n_layer > 0 ? options_.n_layer : shape_.n_layer;
    add("token_embd.weight", shape_.tied ? quant.output : quant.embedding, {u64(shape_.n_embd), u64(n_vocab)},
        SynthFill::Embedding, stream_);
    for (il_ = 0; il_ < n_layer; ++il_) add_layer(is_recurrent(il_));
    if (options_.nextn) {
      add_layer(false);
      matrix("nextn.eh_proj", false, 2 * shape_.n_embd, shape_.n_embd);
      for (const char* name : {"nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"})
        norm(name, shape_.n_embd);
    }
    il_ = -1;
    add("output_norm.weight", F32, {u64(shape_.n_embd)}, SynthFill::Norm, 0.05);
    if (!shape_.tied)
      add("output.weight", quant.output, {u64(shape_.n_embd), u64(n_vocab)}, SynthFill::Matrix,
          1.0 / std::sqrt(shape_.n_embd));
    return std::move(tensors_);
  }

 private:
  bool is_recurrent(int il) const { return shape_.arch != Arch::Laguna && (il + 1) % kInterval != 0; }
  bool is_windowed(int il) const { return shape_.arch == Arch::Laguna && il % kInterval != 0; }

  void add(std::string name, DType dtype, std::vector<uint64_t> dims, SynthFill fill, double scale) {
    tensors_.push_back({std::move(name), dtype, std::move(dims), fill, static_cast<float>(scale), il_});
  }
  std::string block(std::string_view name) const { return fmt::format("blk.{}.{}", il_, name); }
  void norm(std::string_view name, int n) {
    add(block(name) + ".weight", F32, {u64(n)}, SynthFill::Norm, 0.05);
  }
  // n_expert 0: a plain matrix. `more`: one of those that get more bits in some layers.
  void matrix(std::string_view name, bool more, int n_in, int n_out, double gain = 1.0, int n_expert = 0) {
    const bool is_more = more && gets_more_bits(il_, shape_.n_layer);
    std::vector<uint64_t> dims{u64(n_in), u64(n_out)};
    if (n_expert > 0) dims.push_back(u64(n_expert));
    add(block(name) + ".weight", is_more ? options_.quant->more : options_.quant->plain, std::move(dims),
        SynthFill::Matrix, gain / std::sqrt(n_in));
  }

  void add_layer(bool recurrent) {
    const bool laguna = shape_.arch == Arch::Laguna;
    norm("attn_norm", shape_.n_embd);
    if (recurrent) {
      add_delta_net();
    } else {
      add_attention();
    }
    norm(laguna ? "ffn_norm" : "post_attention_norm", shape_.n_embd);
    if (shape_.n_expert > 0 && !(laguna && il_ == 0)) {
      add_experts();
    } else {
      matrix("ffn_gate", false, shape_.n_embd, shape_.n_ff);
      matrix("ffn_up", false, shape_.n_embd, shape_.n_ff);
      matrix("ffn_down", true, shape_.n_ff, shape_.n_embd, write_gain_);
    }
  }

  void add_attention() {
    const int n_head = is_windowed(il_) ? shape_.n_head_window : shape_.n_head;
    const int n_q = n_head * shape_.head_dim, n_kv = shape_.n_head_kv * shape_.head_dim;
    const bool laguna = shape_.arch == Arch::Laguna;
    matrix("attn_q", false, shape_.n_embd, laguna ? n_q : 2 * n_q);
    matrix("attn_k", false, shape_.n_embd, n_kv);
    matrix("attn_v", true, shape_.n_embd, n_kv);
    matrix("attn_output", false, n_q, shape_.n_embd, write_gain_);
    norm("attn_q_norm", shape_.head_dim);
    norm("attn_k_norm", shape_.head_dim);
    if (laguna) matrix("attn_gate", false, shape_.n_embd, n_head);
  }

  void add_delta_net() {
    const int n_v = shape_.ssm_n_head_v, inner = n_v * shape_.ssm_dim;
    const int n_channels = 2 * shape_.ssm_n_head_k * shape_.ssm_dim + inner;
    matrix("attn_qkv", true, shape_.n_embd, n_channels);
    matrix("attn_gate", false, shape_.n_embd, inner);
    matrix("ssm_alpha", false, shape_.n_embd, n_v);
    matrix("ssm_beta", false, shape_.n_embd, n_v);
    add(block("ssm_conv1d.weight"), F32, {u64(kTaps), u64(n_channels)}, SynthFill::Matrix,
        1.0 / std::sqrt(kTaps));
    add(block("ssm_a"), F32, {u64(n_v)}, SynthFill::Decay, 0.0);
    add(block("ssm_dt.bias"), F32, {u64(n_v)}, SynthFill::TimeStep, 0.0);
    norm("ssm_norm", shape_.ssm_dim);
    matrix("ssm_out", false, inner, shape_.n_embd, write_gain_);
  }

  void add_experts() {
    const int n_embd = shape_.n_embd, n_ff = shape_.n_ff_expert;
    add(block("ffn_gate_inp.weight"), F32, {u64(n_embd), u64(shape_.n_expert)}, SynthFill::Router, 0.0);
    if (shape_.arch == Arch::Laguna)
      add(block("exp_probs_b.bias"), F32, {u64(shape_.n_expert)}, SynthFill::Matrix, 0.01);
    matrix("ffn_gate_exps", false, n_embd, n_ff, 1.0, shape_.n_expert);
    matrix("ffn_up_exps", false, n_embd, n_ff, 1.0, shape_.n_expert);
    matrix("ffn_down_exps", true, n_ff, n_embd, write_gain_, shape_.n_expert);
    if (shape_.arch != Arch::Laguna)
      add(block("ffn_gate_inp_shexp.weight"), F32, {u64(n_embd)}, SynthFill::Matrix, 1.0 / std::sqrt(n_embd));
    matrix("ffn_gate_shexp", false, n_embd, n_ff);
    matrix("ffn_up_shexp", false, n_embd, n_ff);
    matrix("ffn_down_shexp", true, n_ff, n_embd, write_gain_);
  }

  const SynthOptions& options_;
  const SynthShape& shape_;
  // Deviation of the embedding. One that is the output matrix too is small, so that logits stay near 1.
  double stream_;
  double write_gain_;
  int il_ = -1;
  std::vector<SynthTensor> tensors_;
};

}  // namespace

std::span<const SynthShape> synth_shapes() {
  return kShapes;
}
std::span<const SynthQuant> synth_quants() {
  return kQuants;
}

uint64_t SynthTensor::n_rows() const {
  uint64_t rows = 1;
  for (size_t i = 1; i < dims.size(); ++i) rows *= dims[i];
  return rows;
}

bool gets_more_bits(int il, int n_layer) {
  return il < n_layer / 8 || il >= 7 * n_layer / 8 || (il - n_layer / 8) % 3 == 2;
}

std::vector<SynthTensor> synth_tensors(const SynthOptions& options) {
  return TensorList(options).build();
}

void set_synth_metadata(const SynthOptions& options, GgufWriter& writer) {
  const SynthShape& shape = *options.shape;
  const bool laguna = shape.arch == Arch::Laguna;
  const std::string arch = laguna ? "laguna" : shape.n_expert > 0 ? "qwen35moe" : "qwen35";
  const int n_layer = options.n_layer > 0 ? options.n_layer : shape.n_layer;
  const auto set = [&](std::string_view key, int value) {
    writer.set(fmt::format("{}.{}", arch, key), static_cast<uint32_t>(value));
  };
  const auto set_float = [&](std::string_view key, float value) {
    writer.set(fmt::format("{}.{}", arch, key), value);
  };

  writer.set("general.architecture", arch);
  writer.set("general.type", "model");
  writer.set("general.name", fmt::format("Synthetic {}", shape.name));
  writer.set("general.description",
             fmt::format("random weights of real shape: seed {}, skew {}, first {} of {} layers",
                         options.seed, options.skew, n_layer, shape.n_layer));
  writer.set("general.quantization_version", uint32_t{2});
  writer.set("general.file_type", options.quant->file_type);
  set("block_count", n_layer + (options.nextn ? 1 : 0));
  if (options.nextn) set("nextn_predict_layers", 1);
  set("context_length", options.n_ctx > 0 ? options.n_ctx : shape.n_ctx);
  set("embedding_length", shape.n_embd);
  if (shape.n_ff > 0) set("feed_forward_length", shape.n_ff);
  if (laguna) {
    std::vector<int32_t> heads;
    for (int il = 0; il < n_layer; ++il)
      heads.push_back(il % kInterval == 0 ? shape.n_head : shape.n_head_window);
    writer.set_array("laguna.attention.head_count", heads);
  } else {
    set("attention.head_count", shape.n_head);
  }
  set("attention.head_count_kv", shape.n_head_kv);
  set("attention.key_length", shape.head_dim);
  set("attention.value_length", shape.head_dim);
  set_float("attention.layer_norm_rms_epsilon", 1e-6F);
  set("rope.dimension_count", shape.n_rot);
  set_float("rope.freq_base", laguna ? 500000.0F : 1e7F);
  if (shape.n_expert > 0) {
    set("expert_count", shape.n_expert);
    set("expert_used_count", shape.n_expert_used);
    set("expert_feed_forward_length", shape.n_ff_expert);
    set("expert_shared_feed_forward_length", shape.n_ff_expert);
  }
  if (laguna) {
    set("attention.sliding_window", shape.window);
    set("rope.dimension_count_swa", shape.n_rot_window);
    set_float("rope.freq_base_swa", 10000.0F);
    writer.set("laguna.rope.scaling.type", "yarn");
    set_float("rope.scaling.factor", 32.0F);
    set("rope.scaling.original_context_length", 4096);
    set_float("rope.scaling.yarn_beta_fast", 64.0F);
    set_float("rope.scaling.yarn_beta_slow", 1.0F);
    set("expert_gating_func", 2);
    writer.set("laguna.expert_weights_norm", true);
    set_float("expert_weights_scale", 2.5F);
    set("leading_dense_block_count", 1);
  } else {
    // Time, height and width in turn: n_rot / 2 pairs in all.
    const int pairs = shape.n_rot / 2, third = (pairs + 2) / 3;
    writer.set_array(arch + ".rope.dimension_sections",
                     std::vector<int32_t>{third, third, pairs - 2 * third, 0});
    set("ssm.conv_kernel", kTaps);
    set("ssm.state_size", shape.ssm_dim);
    set("ssm.group_count", shape.ssm_n_head_k);
    set("ssm.time_step_rank", shape.ssm_n_head_v);
    set("ssm.inner_size", shape.ssm_n_head_v * shape.ssm_dim);
    set("full_attention_interval", kInterval);
  }
  set("vocab_size", options.n_vocab > 0 ? options.n_vocab : shape.n_vocab);
  writer.set("tokenizer.ggml.model", "none");
}

}  // namespace thermo
