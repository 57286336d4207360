#include "cli/verify/verify_float.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>

#include "cli/verify/verify_ways.h"
#include "gguf/gguf_file.h"
#include "gguf/gguf_writer.h"
#include "kernels/attention/attention.h"
#include "kernels/dequantize/dequantize.h"

namespace thermo {
namespace {

bool is_float(DType dtype) {
  return dtype == DType::F32 || dtype == DType::F16 || dtype == DType::BF16;
}

// "blk.7.attn_q.weight" -> 7; nullopt for what belongs to no layer.
std::optional<int> layer_of(std::string_view name) {
  constexpr std::string_view kStart = "blk.";
  if (!name.starts_with(kStart)) return std::nullopt;
  int layer = 0;
  const auto [end, error] = std::from_chars(name.data() + kStart.size(), name.data() + name.size(), layer);
  return error == std::errc{} && end != name.data() + name.size() && *end == '.' ? std::optional(layer)
                                                                                 : std::nullopt;
}

uint64_t float_bytes(const GgufTensor& tensor) {
  return is_float(tensor.dtype) ? tensor.n_bytes : tensor.n_elements() * sizeof(float);
}

// How many of the first layers fit into max_bytes as floats.
int layers_that_fit(const GgufFile& file, int n_layer, uint64_t max_bytes) {
  uint64_t bytes = 0;
  std::map<int, uint64_t> of_layer;
  for (const GgufTensor& tensor : file.tensors()) {
    const std::optional<int> layer = layer_of(tensor.name);
    (layer ? of_layer[*layer] : bytes) += float_bytes(tensor);
  }
  int n = 0;
  while (n < n_layer && (bytes += of_layer[n]) <= max_bytes) ++n;
  return n;
}

// Hands out a tensor as floats, a row at a time.
TensorSource decoded(const GgufTensor& tensor) {
  return [&tensor](const ByteSink& sink) {
    const auto n_cols = static_cast<int64_t>(tensor.dims[0]);
    const uint64_t n_rows = tensor.n_elements() / tensor.dims[0], bytes = tensor.n_bytes / n_rows;
    std::vector<float> row(tensor.dims[0]);
    for (uint64_t r = 0; r < n_rows; ++r) {
      dequantize_row(tensor.dtype, tensor.data + r * bytes, n_cols, row.data());
      sink(std::as_bytes(std::span(row)));
    }
  };
}

// The first n_layers layers of the file, without the next-token block, matrices as floats.
std::vector<std::byte> as_floats(const GgufFile& file, int n_layers) {
  const std::string architecture(file.require_string("general.architecture"));
  const std::string n_blocks_key = architecture + ".block_count",
                    nextn_key = architecture + ".nextn_predict_layers",
                    dense_key = architecture + ".dense_layers";  // numbers of layers
  const uint64_t n_blocks = file.require_uint(n_blocks_key), n = static_cast<uint64_t>(n_layers);
  GgufWriter writer;
  for (const GgufEntry& entry : file.metadata()) {
    if (entry.key.starts_with("split.") || entry.key == n_blocks_key || entry.key == nextn_key) continue;
    const bool of_each_layer =
        entry.value.is_array() && entry.value.count == n_blocks && entry.key.starts_with(architecture + ".");
    if (entry.key == dense_key) {
      std::vector<uint64_t> dense = *file.find_uints(dense_key);
      std::erase_if(dense, [n](uint64_t layer) { return layer >= n; });
      writer.set_array(entry.key, dense);
    } else {
      writer.set(entry.key, of_each_layer ? first_elements(entry.value, n) : entry.value);
    }
  }
  writer.set(n_blocks_key, static_cast<uint32_t>(n_layers));
  for (const GgufTensor& tensor : file.tensors()) {
    if (const std::optional<int> layer = layer_of(tensor.name); layer && *layer >= n_layers) continue;
    const std::vector<uint64_t> dims{tensor.dims.begin(), tensor.dims.begin() + tensor.n_dims};
    if (is_float(tensor.dtype) || !dtype_info(tensor.dtype).is_weight)
      writer.add_tensor(tensor.name, tensor.dtype, dims, std::span(tensor.data, tensor.n_bytes));
    else
      writer.add_tensor(tensor.name, DType::F32, dims, decoded(tensor));
  }
  return writer.to_bytes();
}

}  // namespace

bool is_quantised(const GgufFile& file) {
  return std::any_of(file.tensors().begin(), file.tensors().end(), [](const GgufTensor& tensor) {
    return dtype_info(tensor.dtype).is_weight && !is_float(tensor.dtype);
  });
}

FloatEvaluation evaluate_in_floats(const GgufFile& file, const ModelConfig& config,
                                   std::span<const TokenId> ids, const EngineOptions& options,
                                   uint64_t max_bytes) {
  FloatEvaluation result;
  result.n_layers = layers_that_fit(file, config.n_layer, max_bytes);
  if (result.n_layers < std::min(2, config.n_layer)) return {};  // of one layer nothing could be compared
  const std::vector<std::byte> bytes = as_floats(file, result.n_layers);
  const GgufFile floats(bytes, "the model as floats");
  EngineOptions plain;
  plain.n_ctx = options.n_ctx;
  plain.n_batch = options.n_batch;
  plain.n_threads = options.n_threads;
  plain.n_sequences = 2;  // VerifyWays has two
  plain.k_type = plain.v_type = KvType::F32;
  plain.device = {.kind = DeviceChoice::Kind::Cpu};
  plain.repack = false;
  for (int k = 0; k <= result.n_layers; ++k) plain.taps.push_back(k);
  Engine engine(floats, plain);
  result.outputs =
      VerifyWays(engine).in_chunks(ids, std::min(engine.n_batch(), static_cast<int>(ids.size())), true);
  if (result.n_layers < config.n_layer) {
    result.outputs.logits.clear();
    result.outputs.hidden.pop_back();  // it has the final norm, which comes later in the whole model
  }
  return result;
}

double rounding_bound(int k) {
  constexpr double kProduct = 8.0 / 127.0 / 3.4641;  // of its deviation
  return 2.0 * kProduct * std::sqrt(4.0 * k);
}

}  // namespace thermo
