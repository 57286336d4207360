// Reads ranges of a mapped file with read calls. An error, or a file that became shorter, gives a message;
// access through the mapping would raise a signal. Bypasses the page cache where the system allows it: the
// caller keeps what is read here, and on a slow processor the copy into the cache costs more than the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/mapped_file.h"
#include "base/result.h"

namespace thermo {

class FileReader {
 public:
  // `file` must outlive it. Any number of threads may read.
  explicit FileReader(const MappedFile& file);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // Bytes [offset, offset + n) of the file, somewhere in `buffer`: aligned to kAlign, buffer_bytes(n) long.
  Result<const std::byte*> read(uint64_t offset, uint64_t n, std::span<std::byte> buffer) const;

  static constexpr uint64_t kAlign = 4096;
  static constexpr uint64_t buffer_bytes(uint64_t n) { return n + 3 * kAlign; }

  const MappedFile& file() const { return file_; }

 private:
  const MappedFile& file_;
  int direct_fd_ = -1;
};

}  // namespace thermo
