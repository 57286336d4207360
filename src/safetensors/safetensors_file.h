// Reads safetensors files: a JSON directory, then the tensors' bytes, which are never copied.
//
// The input is untrusted: every length, type, shape and byte range is checked before anything is handed out,
// and a violation throws LoadError with one sentence that names the file.
//
// This folder reads checkpoints in that format; it includes base, tensor and gguf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "tensor/dtype.h"

namespace thermo {

struct SafetensorsTensor {
  std::string name;
  std::string type;             // as the file says: "BF16"
  std::optional<DType> dtype;   // nullopt: none that this program computes with
  std::vector<uint64_t> shape;  // the last one is contiguous
  std::span<const std::byte> bytes;
};

// The directory and its tensors, in the order of their names. `bytes` must stay; `name` stands for the path
// in messages.
std::vector<SafetensorsTensor> read_safetensors(std::span<const std::byte> bytes, std::string_view name);

}  // namespace thermo
