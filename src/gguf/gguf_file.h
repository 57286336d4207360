// Reads GGUF files (version 2 and 3): header, metadata, tensor directory. Tensor data is never copied.
//
// The input is untrusted. The constructors check every length, type, shape and byte range before anything
// is handed out (limits: gguf_parse.cpp), and throw LoadError with one sentence that names the file.
// What is handed out - strings, values, tensor data - are views of the mapping or of the caller's bytes.
//
// A model may be split over several files (`NAME-00001-of-00003.gguf`). Open the first; the others are found
// beside it. The tensors of all files appear as one directory; the metadata is that of the first.
//
// Immutable after construction: any thread may read. Moving keeps all views valid.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "gguf/gguf_value.h"
#include "tensor/dtype.h"

namespace thermo {

struct GgufEntry {
  std::string_view key;
  GgufValue value;
};

struct GgufTensor {
  std::string_view name;
  DType dtype = DType::F32;
  int n_dims = 0;                            // as written in the file, 0..4
  std::array<uint64_t, 4> dims{1, 1, 1, 1};  // dims[0] is contiguous; missing ones are 1
  uint64_t n_bytes = 0;                      // never 0
  const std::byte* data = nullptr;           // normally a multiple of 32, but a file may choose less
  int part = 0;                              // which file of a split model
  uint64_t file_offset = 0;                  // of `data`, from the start of that file

  uint64_t n_elements() const noexcept { return dims[0] * dims[1] * dims[2] * dims[3]; }
};

// "[2048, 512, 256]": the dimensions as written in the file.
std::string describe_shape(const GgufTensor& tensor);

// "PREFIX-00001-of-00003.gguf"; `number` counts from 1.
std::string split_part_path(std::string_view prefix, uint64_t number, uint64_t count);

class GgufFile {
 public:
  // Maps the file, and its siblings when it is the first of a split model.
  explicit GgufFile(const std::string& path);
  // Reads bytes that the caller keeps alive and unchanged; `name` stands for the path in messages.
  // A part of a split model is refused: its siblings cannot be found.
  GgufFile(std::span<const std::byte> bytes, std::string name);
  // What another format holds, as this one would: `metadata` is a file without tensors, the tensors are views
  // of `files`. REQUIRES: their sizes are right.
  struct OtherTensor {
    std::string name;
    DType dtype;
    std::vector<uint64_t> dims;  // dims[0] is contiguous
    std::span<const std::byte> bytes;
    int part;  // which of `files`
  };
  GgufFile(std::string name, std::vector<std::byte> metadata, std::vector<OtherTensor> tensors,
           std::vector<MappedFile> files);

  const std::string& path() const noexcept { return path_; }
  uint32_t version() const noexcept { return version_; }

  // Tensors. The order is that of the directory, part after part.
  std::span<const GgufTensor> tensors() const noexcept { return tensors_; }
  // nullptr when there is none of that name.
  const GgufTensor* find_tensor(std::string_view name) const noexcept;
  const GgufTensor& require_tensor(std::string_view name) const;
  uint64_t total_tensor_bytes() const noexcept { return total_tensor_bytes_; }

  // The mapped files, for advise and release; nullptr when the bytes are the caller's.
  int n_parts() const noexcept;
  const MappedFile* part(int index) const noexcept;
  // Why data read from it must not be used: a file became shorter, or its disk failed, while it was open.
  // Empty: no such thing was noticed.
  std::string fault() const;

  // Metadata, in file order.
  std::span<const GgufEntry> metadata() const noexcept { return metadata_; }
  // nullptr when the key is absent.
  const GgufValue* find(std::string_view key) const noexcept;

  // Typed metadata. find_*: nullopt when the key is absent, which is not an error. require_*: absent is an
  // error. Both throw LoadError naming the key, the expected and the found type when the value is something
  // else. Integers may be stored in any width and sign as long as the value fits; floats as f32 or f64.
  std::optional<uint64_t> find_uint(std::string_view key, uint64_t max = kMaxUint) const;
  std::optional<int64_t> find_int(std::string_view key) const;
  std::optional<double> find_float(std::string_view key) const;
  std::optional<bool> find_bool(std::string_view key) const;
  std::optional<std::string_view> find_string(std::string_view key) const;
  uint64_t require_uint(std::string_view key, uint64_t max = kMaxUint) const;
  double require_float(std::string_view key) const;
  std::string_view require_string(std::string_view key) const;

  // Arrays, decoded by the call: keep the result.
  std::optional<std::vector<uint64_t>> find_uints(std::string_view key, uint64_t max = kMaxUint) const;
  std::optional<std::vector<int64_t>> find_ints(std::string_view key) const;
  std::optional<std::vector<std::string_view>> find_strings(std::string_view key) const;
  std::vector<int64_t> require_ints(std::string_view key) const;
  std::vector<std::string_view> require_strings(std::string_view key) const;

  // One value for each of n (layers): an array of exactly n, or a scalar that holds for all.
  std::optional<std::vector<uint64_t>> find_uint_each(std::string_view key, size_t n,
                                                      uint64_t max = kMaxUint) const;
  std::optional<std::vector<bool>> find_bool_each(std::string_view key, size_t n) const;
  std::vector<uint64_t> require_uint_each(std::string_view key, size_t n, uint64_t max = kMaxUint) const;
  std::vector<bool> require_bool_each(std::string_view key, size_t n) const;

 private:
  static constexpr uint64_t kMaxUint = std::numeric_limits<uint64_t>::max();

  GgufFile() = default;
  void read_part(std::span<const std::byte> bytes, int part);  // path_ is its name
  void open_siblings();
  void index_tensors();

  std::string path_;
  std::vector<MappedFile> mappings_;  // what the views below point into; empty for the caller's bytes
  std::vector<std::byte> other_metadata_;
  std::vector<OtherTensor> other_tensors_;
  uint32_t version_ = 0;
  std::vector<GgufEntry> metadata_;
  std::vector<GgufTensor> tensors_;
  // Positions in the vectors above, sorted by key and by name. Binary search and not a hash table, because
  // names are untrusted and a million of them can be made to collide.
  std::vector<uint32_t> metadata_by_key_;
  std::vector<uint32_t> tensors_by_name_;
  uint64_t total_tensor_bytes_ = 0;
};

}  // namespace thermo
