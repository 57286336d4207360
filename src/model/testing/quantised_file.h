// A recorded model with its matrices in Q8_0. It tests for every architecture what only quantised weights
// use, such as the few launches of a decoded row on a GPU. With `n_ff`, the FFNs of a dense model become that
// wide: their columns are repeated, each time a little smaller.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "gguf/gguf_file.h"
#include "gguf/gguf_writer.h"
#include "kernels/dequantize/dequantize.h"

namespace thermo {

class QuantisedFile {
 public:
  explicit QuantisedFile(const GgufFile& source, uint32_t n_ff = 0) {
    GgufWriter writer;
    for (const GgufEntry& entry : source.metadata()) writer.set(entry.key, entry.value);
    if (n_ff > 0)
      writer.set(std::string(source.require_string("general.architecture")) + ".feed_forward_length", n_ff);
    std::vector<std::vector<std::byte>> owned;
    for (const GgufTensor& tensor : source.tensors()) {
      std::vector<uint64_t> dims{tensor.dims.begin(), tensor.dims.begin() + tensor.n_dims};
      const bool router = tensor.name.find("ffn_gate_inp") != std::string_view::npos;
      if (dims.size() < 2 || dims[0] % 32 != 0 || router) {
        writer.add_tensor(tensor.name, tensor.dtype, dims, std::span(tensor.data, tensor.n_bytes));
        continue;
      }
      std::vector<float> values(tensor.n_elements());
      dequantize_row(tensor.dtype, tensor.data, static_cast<int64_t>(values.size()), values.data());
      if (n_ff > 0 && tensor.name.find("ffn_") != std::string_view::npos)
        widen(values, dims, tensor.name.find("ffn_down") != std::string_view::npos ? 0 : 1, n_ff);
      const auto n = static_cast<int64_t>(values.size());
      std::vector<std::byte>& bytes = owned.emplace_back(row_bytes(DType::Q8_0, static_cast<uint64_t>(n)));
      quantize_row(DType::Q8_0, values.data(), n, bytes.data());
      writer.add_tensor(tensor.name, DType::Q8_0, dims, bytes);
    }
    bytes_ = writer.to_bytes();
  }
  GgufFile open() const { return GgufFile(std::span<const std::byte>(bytes_), "quantised"); }

 private:
  // Of a matrix, the dimension `which`.
  static void widen(std::vector<float>& values, std::vector<uint64_t>& dims, size_t which, uint64_t to) {
    const uint64_t old = dims[which], columns = dims[0];
    dims[which] = to;
    std::vector<float> all;
    for (uint64_t r = 0; r < dims[1]; ++r)
      for (uint64_t c = 0; c < dims[0]; ++c) {
        const uint64_t turn = (which == 0 ? c : r) / old;
        const float factor = which == 0 ? static_cast<float>(old) / static_cast<float>(to)
                                        : 1.0f / (1.0f + 0.1f * static_cast<float>(turn));
        all.push_back(factor * values[(which == 0 ? r : r % old) * columns + (which == 0 ? c % old : c)]);
      }
    values = std::move(all);
  }

  std::vector<std::byte> bytes_;
};

}  // namespace thermo
