// A file mapped read-only as a whole; unmapped by the destructor.
//
// Looking at a page that is no longer there, because the file became shorter or its disk failed, would end
// the program (SIGBUS). Here such pages read as zero, and lost() tells; who uses the file asks before it
// passes on what it made of it.
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
  // Of any file, also of one that is closed again.
  static bool any_lost() noexcept;

  // Hints; a refusal by the system is no error.
  void advise_sequential() const noexcept;
  // Tells the system that this range is no longer needed in memory.
  void release(size_t offset, size_t length) const noexcept;

  // Stays open as long as this, for those who read instead of looking (FileReader).
  int descriptor() const noexcept { return fd_; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  int fd_ = -1;
  int guard_ = -1;  // who is told when a page cannot be read; -1: nobody, it ends the program
};

}  // namespace thermo
