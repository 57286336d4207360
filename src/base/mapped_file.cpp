#include "base/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace thermo {
namespace {

// Closes the descriptor when the constructor throws.
struct FileDescriptor {
  int fd;
  ~FileDescriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  FileDescriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0)
    throw LoadError(
        fmt::format("cannot open {}: {}; check the path and its permissions", path, std::strerror(errno)));
  struct stat facts {};
  if (::fstat(file.fd, &facts) != 0)
    throw LoadError(fmt::format("cannot read the size of {}: {}", path, std::strerror(errno)));
  if (!S_ISREG(facts.st_mode))
    throw LoadError(fmt::format("{} is not a regular file; give the path of a .gguf file", path));
  if (facts.st_size == 0) throw LoadError(fmt::format("{} is empty; was the download cut off?", path));
  size_ = static_cast<size_t>(facts.st_size);
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
  if (address == MAP_FAILED) throw LoadError(fmt::format("cannot map {}: {}", path, std::strerror(errno)));
  data_ = static_cast<const std::byte*>(address);
  fd_ = std::exchange(file.fd, -1);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
  if (fd_ >= 0) ::close(fd_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(fd_, other.fd_);
  return *this;
}

void MappedFile::advise_sequential() const noexcept {
  ::madvise(const_cast<std::byte*>(data_), size_, MADV_SEQUENTIAL);
}

void MappedFile::release(size_t offset, size_t length) const noexcept {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t begin = (offset + page - 1) / page * page;
  const size_t end = (offset + length) / page * page;
  if (end > begin && end <= size_)
    ::madvise(const_cast<std::byte*>(data_) + begin, end - begin, MADV_DONTNEED);
}

}  // namespace thermo
