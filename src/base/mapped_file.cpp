#include "base/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
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

// Mapped files, for the signal handler: it may not lock.
struct Guard {
  std::atomic<bool> taken{false};
  std::atomic<uintptr_t> begin{0}, end{0};  // begin 0: nothing
  std::atomic<bool> lost{false};
};
std::array<Guard, 256> guards;
std::atomic<bool> lost_any{false};
struct sigaction handler_before {};
uintptr_t page_bytes = 4096;

// Zeros from the page that could not be read to the end of its file. Addresses outside our files go to the
// handler that was there before.
void on_bus_error(int, siginfo_t* info, void*) noexcept {
  const int saved_errno = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  bool known = false;
  for (Guard& guard : guards) {
    const uintptr_t begin = guard.begin.load(), end = guard.end.load();
    if (begin == 0 || address < begin || address >= end) continue;
    const uintptr_t page = address / page_bytes * page_bytes;
    // The bare system call: what a sanitizer wraps around mmap() is not made for signal handlers.
    known = ::syscall(SYS_mmap, page, end - page, PROT_READ,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != -1;
    guard.lost.store(true);
    lost_any.store(true);
    break;
  }
  if (!known) {
    ::sigaction(SIGBUS, &handler_before, nullptr);
    ::raise(SIGBUS);  // delivered when this returns
  }
  errno = saved_errno;
}

void install_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGBUS, &action, &handler_before);
  });
}

// -1: too many files are open.
int guard(const void* data, size_t size) {
  install_handler();
  for (size_t i = 0; i < guards.size(); ++i) {
    Guard& guard = guards[i];
    if (guard.taken.exchange(true)) continue;
    guard.lost.store(false);
    const auto begin = reinterpret_cast<uintptr_t>(data);
    guard.end.store(begin + (size + page_bytes - 1) / page_bytes * page_bytes);
    guard.begin.store(begin);
    return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  FileDescriptor file{
      ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};  // a FIFO is no file to wait for
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
  if (address == MAP_FAILED && errno == ENOMEM)
    throw MemoryError(
        fmt::format("cannot map {}: the address space is used up; raise its limit (ulimit -v)", path));
  if (address == MAP_FAILED) throw LoadError(fmt::format("cannot map {}: {}", path, std::strerror(errno)));
  data_ = static_cast<const std::byte*>(address);
  fd_ = std::exchange(file.fd, -1);
  guard_ = guard(data_, size_);
}

MappedFile::~MappedFile() {
  if (guard_ >= 0) {
    Guard& guard = guards[static_cast<size_t>(guard_)];
    guard.begin.store(0);
    guard.taken.store(false);
  }
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
  if (fd_ >= 0) ::close(fd_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      fd_(std::exchange(other.fd_, -1)),
      guard_(std::exchange(other.guard_, -1)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(fd_, other.fd_);
  std::swap(guard_, other.guard_);
  return *this;
}

bool MappedFile::lost() const noexcept {
  return guard_ >= 0 && guards[static_cast<size_t>(guard_)].lost.load(std::memory_order_relaxed);
}
bool MappedFile::any_lost() noexcept {
  return lost_any.load(std::memory_order_relaxed);
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
