// Safetensors files: any bytes give either a refusal with a sentence, or tensors that lie inside the file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "base/error.h"
#include "safetensors/safetensors_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  try {
    unsigned sum = 0;
    for (const thermo::SafetensorsTensor& tensor : thermo::read_safetensors(bytes, "fuzz")) {
      if (tensor.shape.size() > 4) std::abort();
      for (const std::byte byte : tensor.bytes) sum += static_cast<unsigned>(byte);
      if (!tensor.bytes.empty() && (tensor.bytes.data() < bytes.data() ||
                                    tensor.bytes.data() + tensor.bytes.size() > bytes.data() + bytes.size()))
        std::abort();
    }
    if (sum == 0xFFFFFFFFu) std::abort();  // so that the bytes are read
  } catch (const thermo::LoadError& error) {
    if (*error.what() == '\0') std::abort();
  }
  return 0;
}
