// A model file with some keys and tensors changed.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "gguf/gguf_file.h"
#include "gguf/gguf_writer.h"

namespace thermo {

// Copies a file; `add` sets keys and adds tensors, and tensors that `keep` is false for and keys of `dropped`
// are left out.
struct EditedFile {
  std::vector<std::byte> bytes;
  std::vector<std::vector<std::byte>> owned;  // of tensors that `add` made

  GgufFile open() const { return GgufFile(std::span<const std::byte>(bytes), "edited"); }

  EditedFile(const GgufFile& source, const std::function<void(GgufWriter&, EditedFile&)>& add,
             const std::function<bool(const GgufTensor&)>& keep = {},
             const std::vector<std::string_view>& dropped = {}) {
    GgufWriter writer;
    for (const GgufEntry& entry : source.metadata())
      if (std::find(dropped.begin(), dropped.end(), entry.key) == dropped.end())
        writer.set(entry.key, entry.value);
    for (const GgufTensor& tensor : source.tensors()) {
      if (keep && !keep(tensor)) continue;
      writer.add_tensor(tensor.name, tensor.dtype, {tensor.dims.begin(), tensor.dims.begin() + tensor.n_dims},
                        std::span(tensor.data, tensor.n_bytes));
    }
    if (add) add(writer, *this);
    bytes = writer.to_bytes();
  }

  // For `add`: a tensor of zeros.
  void add_zeros(GgufWriter& writer, std::string_view name, const std::vector<uint64_t>& dims) {
    uint64_t n = sizeof(float);
    for (const uint64_t dim : dims) n *= dim;
    writer.add_tensor(name, DType::F32, dims, owned.emplace_back(n));
  }
};

}  // namespace thermo
