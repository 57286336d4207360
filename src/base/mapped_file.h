// A file mapped read-only as a whole; unmapped by the destructor.
//
// Access to a page that is no longer there, because the file became shorter or its disk failed, would end the
// program (SIGBUS). Here such pages read as zero and lost() says so. Users of the file ask lost() before they
// pass on what they made of it.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace thermo {

class MappedFile {
 public:
  // Throws LoadError: missing, a directory, empty, not readable.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  const std::string& path() const noexcept { return path_; }

  // A page could not be read since the file was mapped.
  bool lost() const noexcept;
  // Of any file, even one that is closed already.
  static bool any_lost() noexcept;

  // Hints; a refusal by the system is not an error.
  void advise_sequential() const noexcept;
  // Tells the system that this range is no longer needed in memory.
  void release(size_t offset, size_t length) const noexcept;

  // Stays open as long as this object, for callers that read instead of using the mapping (FileReader).
  int descriptor() const noexcept { return fd_; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  int fd_ = -1;
  int guard_ = -1;  // entry for the signal handler; -1: none, a page that cannot be read ends the program
};

}  // namespace thermo
