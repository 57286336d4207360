#include "cli/synth/synth_shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cli/bench/bench_text.h"
#include "gguf/gguf_file.h"
#include "model/drafter_network.h"

namespace thermo {
namespace {

// Matrices that write into the residual stream are drawn smaller, so that it grows slowly: after 40 layers to
// about twice the size of the embedding.
constexpr double kWriteGain = 0.5;

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

// How a tensor is drawn and in which type it is stored, by what it is to its block.
class TensorList {
 public:
  TensorList(const SynthOptions& options, const ModelConfig& config)
      : options_(options),
        config_(config),
        tied_(options.shape->model.tied),
        stream_(tied_ ? 1.0 / std::sqrt(config.n_embd) : 1.0),
        write_gain_(kWriteGain * stream_) {}

  std::vector<SynthTensor> build() {
    const Network& net = config_.network;
    add_blocks(-1, net.input);
    add_blocks(-1, net.features);
    for (size_t il = 0; il < net.layers.size(); ++il) add_blocks(static_cast<int>(il), net.layers[il].blocks);
    add_blocks(-1, net.output);
    return std::move(tensors_);
  }

 private:
  void add_blocks(int il, const std::vector<Block>& blocks) {
    for (const Block& block : blocks)
      for (const TensorSpec& spec : block.tensors)
        if (!spec.of_target && names_.insert(spec.name).second) add(il, block, spec);
  }

  void add(int il, const Block& block, const TensorSpec& spec) {
    const SynthQuant& quant = *options_.quant;
    SynthTensor tensor{spec.name, F32, {spec.shape.begin(), spec.shape.end()}, SynthFill::Matrix, 0.0F, il};
    double scale = 1.0 / std::sqrt(spec.shape[0]);
    switch (spec.role) {
      case Role::Embedding:
        tensor.fill = SynthFill::Embedding;
        tensor.dtype = tied_ ? quant.output : quant.embedding;
        scale = stream_;
        break;
      case Role::Router:
        tensor.fill = SynthFill::Router;
        break;
      case Role::RouterBias:
        scale = 0.01;
        break;
      case Role::Conv:
      case Role::SharedWeight:
        break;
      case Role::Decay:
        tensor.fill = SynthFill::Decay;
        break;
      case Role::TimeStep:
        tensor.fill = SynthFill::TimeStep;
        break;
      default:
        if (spec.form == TensorForm::Vector) {
          tensor.fill = SynthFill::Norm;
          scale = 0.05;
        } else if (block.kind == BlockKind::Head) {
          tensor.dtype = quant.output;
        } else {
          tensor.dtype = more_bits(il, spec.role) ? quant.more : quant.plain;
          if (writes(spec.role)) scale *= write_gain_;
        }
    }
    tensor.scale = static_cast<float>(scale);
    tensors_.push_back(std::move(tensor));
  }

  // The first layers keep the types that they have in the whole model.
  bool more_bits(int il, Role role) const {
    return (role == Role::V || role == Role::Qkv || role == Role::FfnDown || role == Role::ExpertDown) &&
           gets_more_bits(il, options_.shape->config.n_layer);
  }
  // Into the residual stream.
  static bool writes(Role role) {
    return role == Role::Output || role == Role::FfnDown || role == Role::ExpertDown;
  }

  const SynthOptions& options_;
  const ModelConfig& config_;
  bool tied_;
  // Deviation of the embedding. One that is the output matrix too is small, so that logits stay near 1.
  double stream_;
  double write_gain_;
  std::set<std::string> names_;
  std::vector<SynthTensor> tensors_;
};

// What an architecture makes of the keys, before there are tensors.
ModelConfig config_of(const SynthOptions& options) {
  GgufWriter writer;
  set_synth_metadata(options, writer);
  const std::vector<std::byte> bytes = writer.to_bytes();
  const GgufFile file(std::span<const std::byte>(bytes), std::string(options.shape->name));
  if (options.shape->drafter) {
    // Of the model only what the keys must agree with.
    ModelConfig target;
    target.n_embd = static_cast<int>(file.require_uint(fmt::format("{}.embedding_length", kDflashName)));
    target.n_vocab = static_cast<int>(file.require_uint(fmt::format("{}.vocab_size", kDflashName)));
    target.n_layer = kMaxLayers;
    return read_dflash_config(file, target).model;
  }
  std::vector<std::string_view> tensors{"token_embd.weight"};
  if (!options.shape->model.tied) tensors.push_back("output.weight");
  const std::string nextn_norm =
      fmt::format("blk.{}.nextn.shared_head_norm.weight",
                  file.require_uint(fmt::format("{}.block_count", options.shape->arch)) - 1);
  if (options.nextn) tensors.push_back(nextn_norm);
  return read_model_config(file, tensors);
}

std::vector<SynthShape> describe_shapes() {
  std::vector<SynthShape> shapes;
  for (const Architecture* architecture : architectures())
    for (ModelShape& model : architecture->shapes())
      shapes.push_back({model.name, architecture->name, architecture->nextn, false, std::move(model), {}});
  for (ModelShape& model : dflash_shapes())
    shapes.push_back({model.name, kDflashName, false, true, std::move(model), {}});
  for (SynthShape& shape : shapes) {
    SynthOptions options;
    options.shape = &shape;
    options.quant = kQuants;
    shape.config = config_of(options);
  }
  return shapes;
}

// Of a drafter, as its file has them: counted from 1.
constexpr std::string_view kCaptured = "target_layers";

// As many inputs as before, from the first layers of the model.
std::vector<int32_t> captured_layers(std::vector<int32_t> layers, int n_layer) {
  if (n_layer == 0 || layers.back() <= n_layer) return layers;
  const int n = static_cast<int>(layers.size());
  for (int i = 0; i < n; ++i)
    layers[static_cast<size_t>(i)] = n == 1 ? n_layer : 1 + i * (n_layer - 1) / (n - 1);
  return layers;
}

}  // namespace

std::span<const SynthShape> synth_shapes() {
  static const std::vector<SynthShape> shapes = describe_shapes();
  return shapes;
}
std::span<const SynthQuant> synth_quants() {
  return kQuants;
}

int SynthShape::n_layer() const {
  if (!drafter) return config.n_layer;
  for (const ShapeKey& key : model.keys)
    if (key.key == kCaptured) return std::get<std::vector<int>>(key.value).back() + 2;
  return 0;
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
  return TensorList(options, config_of(options)).build();
}

void set_synth_metadata(const SynthOptions& options, GgufWriter& writer) {
  const SynthShape& shape = *options.shape;
  const std::string arch(shape.arch);
  int n_whole = 0;
  for (const ShapeKey& key : shape.model.keys)
    if (key.key == "block_count") n_whole = std::get<int>(key.value);
  const int n_layer = options.n_layer > 0 && !shape.drafter ? options.n_layer : n_whole;
  const auto set = [&](std::string_view key, auto value) {
    writer.set(fmt::format("{}.{}", arch, key), value);
  };

  writer.set("general.architecture", arch);
  writer.set("general.type", "model");
  writer.set("general.name", fmt::format("Synthetic {}", shape.name));
  writer.set("general.description",
             fmt::format("random weights of real shape: seed {}, skew {}, locality {}, first {} of {} layers",
                         options.seed, options.skew, options.locality, n_layer, n_whole));
  writer.set("general.quantization_version", uint32_t{2});
  writer.set("general.file_type", options.quant->file_type);
  for (const ShapeKey& key : shape.model.keys) {
    if (key.key.starts_with("tokenizer.")) {
      const int id = std::get<int>(key.value);
      writer.set(key.key,
                 static_cast<uint32_t>(options.n_vocab > 0 ? std::min(id, options.n_vocab - 1) : id));
    } else if (key.key == kCaptured) {
      writer.set_array(fmt::format("{}.{}", arch, key.key),
                       captured_layers(std::get<std::vector<int>>(key.value), options.n_layer));
    } else if (const int* number = std::get_if<int>(&key.value)) {
      set(key.key, static_cast<uint32_t>(*number));
    } else if (const auto* flags = std::get_if<std::vector<bool>>(&key.value)) {
      writer.set_array(fmt::format("{}.{}", arch, key.key), *flags);
    } else if (const auto* list = std::get_if<std::vector<int>>(&key.value)) {
      std::vector<int32_t> values(*list);
      if (values.size() == static_cast<size_t>(n_whole)) values.resize(static_cast<size_t>(n_layer));
      writer.set_array(fmt::format("{}.{}", arch, key.key), values);
    } else if (const float* real = std::get_if<float>(&key.value)) {
      set(key.key, *real);
    } else if (const bool* flag = std::get_if<bool>(&key.value)) {
      set(key.key, *flag);
    } else {
      set(key.key, std::get<std::string_view>(key.value));
    }
  }
  set("block_count", static_cast<uint32_t>(n_layer + (options.nextn ? 1 : 0)));
  if (options.nextn) set("nextn_predict_layers", uint32_t{1});
  if (options.n_ctx > 0) set("context_length", static_cast<uint32_t>(options.n_ctx));
  if (options.n_vocab > 0) set("vocab_size", static_cast<uint32_t>(options.n_vocab));
  if (options.locality > 0.0) writer.set(kTopicTokensKey, static_cast<uint32_t>(kTopicTokens));
  writer.set("tokenizer.ggml.model", "none");
}

}  // namespace thermo
