// A recorded model with its matrices in Q8_0: what only quantised weights take, such as the few launches of a
// decoded row on a GPU, then has a test for every architecture.
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
  explicit QuantisedFile(const GgufFile& source) {
    GgufWriter writer;
    for (const GgufEntry& entry : source.metadata()) writer.set(entry.key, entry.value);
    std::vector<std::vector<std::byte>> owned;
    for (const GgufTensor& tensor : source.tensors()) {
      const std::vector<uint64_t> dims{tensor.dims.begin(), tensor.dims.begin() + tensor.n_dims};
      const bool router = tensor.name.find("ffn_gate_inp") != std::string_view::npos;
      if (dims.size() < 2 || dims[0] % 32 != 0 || router) {
        writer.add_tensor(tensor.name, tensor.dtype, dims, std::span(tensor.data, tensor.n_bytes));
        continue;
      }
      const auto n = static_cast<int64_t>(tensor.n_elements());
      std::vector<float> values(static_cast<size_t>(n));
      dequantize_row(tensor.dtype, tensor.data, n, values.data());
      std::vector<std::byte>& bytes = owned.emplace_back(row_bytes(DType::Q8_0, static_cast<uint64_t>(n)));
      quantize_row(DType::Q8_0, values.data(), n, bytes.data());
      writer.add_tensor(tensor.name, DType::Q8_0, dims, bytes);
    }
    bytes_ = writer.to_bytes();
  }
  GgufFile open() const { return GgufFile(std::span<const std::byte>(bytes_), "quantised"); }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace thermo
