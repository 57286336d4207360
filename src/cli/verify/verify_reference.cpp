#include "cli/verify/verify_reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "gguf/gguf_file.h"
#include "kernels/dequantize/dequantize.h"

namespace thermo {
namespace {

constexpr uint64_t kMaxTokens = 1 << 20;

[[noreturn]] void fail(const GgufFile& file, const std::string& what) {
  throw LoadError(fmt::format("{}: {}; is it a reference file for this model?", file.path(), what));
}

const GgufTensor& require(const GgufFile& file, const std::string& name) {
  const GgufTensor* tensor = file.find_tensor(name);
  if (!tensor) fail(file, fmt::format("there is no tensor `{}`", name));
  return *tensor;
}

}  // namespace

std::vector<int32_t> read_reference_numbers(const GgufFile& file, const std::string& name) {
  const GgufTensor& tensor = require(file, name);
  const uint64_t n = tensor.n_elements();
  if (tensor.dtype != DType::I32 || tensor.dims[0] != n || n > kMaxTokens)
    fail(file, fmt::format("`{}` is {} {}, expected I32 [n]", name, dtype_name(tensor.dtype),
                           describe_shape(tensor)));
  std::vector<int32_t> numbers(n);
  std::memcpy(numbers.data(), tensor.data, n * sizeof(int32_t));
  return numbers;
}

std::vector<TokenId> read_reference_ids(const GgufFile& file, const std::string& name,
                                        const ModelConfig& config) {
  std::vector<TokenId> ids = read_reference_numbers(file, name);
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= config.n_vocab)
      fail(file, fmt::format("{}[{}] is {}, the model has {} tokens", name, i, ids[i], config.n_vocab));
  return ids;
}

std::vector<float> read_reference_rows(const GgufFile& file, const std::string& name, int row_size,
                                       size_t n_tokens) {
  const GgufTensor& tensor = require(file, name);
  if (!dtype_info(tensor.dtype).is_weight)
    fail(file, fmt::format("`{}` is {}, expected F32", name, dtype_name(tensor.dtype)));
  if (tensor.dims[0] != static_cast<uint64_t>(row_size) || tensor.n_elements() != tensor.dims[0] * n_tokens)
    fail(file,
         fmt::format("`{}` is {}, expected [{}, {}]", name, describe_shape(tensor), row_size, n_tokens));
  std::vector<float> values(tensor.n_elements());
  dequantize_row(tensor.dtype, tensor.data, static_cast<int64_t>(values.size()), values.data());
  if (!std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); }))
    fail(file, fmt::format("`{}` has values that are not numbers", name));
  return values;
}

Reference read_reference(const GgufFile& file, const ModelConfig& config) {
  Reference reference;
  reference.ids = read_reference_ids(file, "ids", config);
  const size_t n_tokens = reference.ids.size();
  reference.outputs.logits = read_reference_rows(file, "logits", config.n_vocab, n_tokens);
  const bool any_hidden =
      std::any_of(file.tensors().begin(), file.tensors().end(),
                  [](const GgufTensor& tensor) { return tensor.name.starts_with("hidden."); });
  if (!any_hidden) return reference;
  const std::string one_more = fmt::format("hidden.{}", config.n_layer + 1);
  if (file.find_tensor(one_more))
    fail(file, fmt::format("there is a tensor `{}`, the model has {} layers", one_more, config.n_layer));
  for (int k = 0; k <= config.n_layer; ++k)
    reference.outputs.hidden.push_back(
        read_reference_rows(file, fmt::format("hidden.{}", k), config.n_embd, n_tokens));
  return reference;
}

TensorError compare_tensor(std::span<const float> ours, std::span<const float> reference, int row_size) {
  double sum = 0.0, sum_squares = 0.0;
  for (const float value : reference) {
    sum += value;
    sum_squares += static_cast<double>(value) * value;
  }
  const double n = static_cast<double>(reference.size());
  double deviation = std::sqrt(std::max(0.0, sum_squares / n - (sum / n) * (sum / n)));
  // What is constant but for rounding has no spread to compare with, but a size.
  const double size = std::sqrt(sum_squares / n);
  if (deviation < 1e-6 * size) deviation = size;
  TensorError error;
  double sum_errors = 0.0;
  for (size_t i = 0; i < reference.size(); ++i) {
    double difference = std::fabs(static_cast<double>(ours[i]) - reference[i]);
    if (!std::isfinite(difference)) difference = std::numeric_limits<double>::infinity();
    sum_errors += difference * difference;
    if (difference > error.largest) {
      error.largest = difference;
      error.row = static_cast<int>(i / static_cast<size_t>(row_size));
    }
  }
  // Of nothing but zeros any error is infinitely large.
  if (error.largest > 0.0) {
    error.relative = error.largest / deviation;
    error.rms = std::sqrt(sum_errors / n) / deviation;
  }
  return error;
}

int count_equal_argmax(std::span<const float> ours, std::span<const float> reference, int row_size) {
  const auto best = [row_size](std::span<const float> values, size_t at) {
    const auto row = values.subspan(at, static_cast<size_t>(row_size));
    return std::max_element(row.begin(), row.end()) - row.begin();
  };
  int n = 0;
  for (size_t at = 0; at < reference.size(); at += static_cast<size_t>(row_size))
    if (best(ours, at) == best(reference, at)) ++n;
  return n;
}

}  // namespace thermo
