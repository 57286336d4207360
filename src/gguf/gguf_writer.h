// Writes GGUF files, version 3: for tests, for the embedded model and for synthetic models of real size.
//
//   GgufWriter writer;
//   writer.set("general.architecture", "qwen35moe");
//   writer.set("qwen35moe.block_count", uint32_t{40});
//   writer.add_tensor("output_norm.weight", DType::F32, {2048}, bytes);
//   writer.write("model.gguf");
//
// Tensor data is not held: a span is read, or a source is called, when the file is written, so files larger
// than memory are fine. One thread at a time. A failure to write throws LoadError; a tensor or a key that the
// format does not allow is a bug of the caller (THERMO_CHECK).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "gguf/gguf_value.h"
#include "tensor/dtype.h"

namespace thermo {

// Takes the next bytes of the file.
using ByteSink = std::function<void(std::span<const std::byte>)>;
// Hands a tensor's bytes to the sink in order, in pieces of any size. Called once per write.
using TensorSource = std::function<void(const ByteSink& sink)>;

class GgufWriter {
 public:
  // Metadata, in the order of the calls. Setting a key again replaces its value. The C++ type decides the
  // file type: uint32_t{3} is a u32, 3 an i32, 3.0F an f32. `general.alignment` (uint32_t) is obeyed.
  template <class T>
  requires std::is_arithmetic_v<T>
  void set(std::string_view key, T value) {
    std::vector<std::byte> encoded;
    append(encoded, static_cast<uint32_t>(gguf_type_of<T>()));
    append(encoded, value);
    set_encoded(key, std::move(encoded));
  }
  void set(std::string_view key, std::string_view value);
  void set(std::string_view key, const char* value) { set(key, std::string_view(value)); }
  // Copies a value of another file as it is. Copying from a split model: leave out the keys `split.*`.
  void set(std::string_view key, const GgufValue& value);

  template <class T>
  void set_array(std::string_view key, const std::vector<T>& values) {
    std::vector<std::byte> encoded;
    append(encoded, static_cast<uint32_t>(GgufType::Array));
    if constexpr (std::is_arithmetic_v<T>) {
      append(encoded, static_cast<uint32_t>(gguf_type_of<T>()));
    } else {
      append(encoded, static_cast<uint32_t>(GgufType::String));
    }
    append(encoded, static_cast<uint64_t>(values.size()));
    for (auto&& value : values) append(encoded, static_cast<const T&>(value));  // vector<bool> has no T&
    set_encoded(key, std::move(encoded));
  }

  // Adds a tensor; dims[0] is contiguous. REQUIRES: a new name of at most 63 bytes; at most 4 dimensions,
  // none 0; dims[0] a multiple of the block of `dtype`. REQUIRES: `bytes` has the tensor's size, and stays
  // valid until the last write.
  void add_tensor(std::string_view name, DType dtype, const std::vector<uint64_t>& dims,
                  std::span<const std::byte> bytes);
  // REQUIRES: `source` hands out exactly the tensor's size.
  void add_tensor(std::string_view name, DType dtype, const std::vector<uint64_t>& dims, TensorSource source);

  // Writes PATH.partial and renames it when complete: no incomplete file gets the final name, and a process
  // that has the old file mapped keeps it. Throws LoadError: not writable, not enough space.
  void write(const std::string& path) const;
  std::vector<std::byte> to_bytes() const;

 private:
  struct Entry {
    std::string key;
    std::vector<std::byte> encoded;  // type and value as in the file
  };
  struct Tensor {
    std::string name;
    DType dtype;
    std::vector<uint64_t> dims;
    uint64_t n_bytes;
    TensorSource source;
  };
  // Everything before the data, and the size of the whole.
  struct Layout {
    std::vector<std::byte> head;
    uint64_t alignment;
    uint64_t total_bytes;
  };

  template <class T>
  static void append(std::vector<std::byte>& out, const T& value) {
    if constexpr (std::is_arithmetic_v<T>) {
      append_bytes(out, std::as_bytes(std::span(&value, 1)));
    } else {
      append_string(out, value);
    }
  }
  static void append_bytes(std::vector<std::byte>& out, std::span<const std::byte> bytes);
  static void append_string(std::vector<std::byte>& out, std::string_view text);

  void set_encoded(std::string_view key, std::vector<std::byte> encoded);
  uint64_t alignment() const;
  Layout lay_out() const;
  void emit(const Layout& layout, const ByteSink& sink) const;

  std::vector<Entry> entries_;
  std::vector<Tensor> tensors_;
};

}  // namespace thermo
