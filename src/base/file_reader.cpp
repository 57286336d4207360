#include "base/file_reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.h"
#include "base/units.h"

namespace thermo {
namespace {

// Reads until n bytes are there or the file ends. Returns how many; -1 with errno.
ssize_t read_fully(int fd, std::byte* to, size_t n, uint64_t offset) noexcept {
  size_t done = 0;
  while (done < n) {
    const ssize_t got = ::pread(fd, to + done, n - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -1;
    if (got == 0) break;
    done += static_cast<size_t>(got);
    if (done % FileReader::kAlign != 0) break;  // the end of the file; a direct read cannot go on from here
  }
  return static_cast<ssize_t>(done);
}

}  // namespace

FileReader::FileReader(const MappedFile& file) : file_(file) {
#ifdef O_DIRECT
  // The same file under a second description, even if the path now names another.
  const std::string link = fmt::format("/proc/self/fd/{}", file.descriptor());
  direct_fd_ = ::open(link.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
#endif
}

FileReader::~FileReader() {
  if (direct_fd_ >= 0) ::close(direct_fd_);
}

Result<const std::byte*> FileReader::read(uint64_t offset, uint64_t n, std::span<std::byte> buffer) const {
  THERMO_CHECK(buffer.size() >= buffer_bytes(n), "the buffer is too small for a read");
  const uint64_t begin = offset / kAlign * kAlign;
  const uint64_t end = align_up<uint64_t>(offset + n, kAlign);
  const uint64_t needed = offset + n - begin;
  ssize_t got = -1;
  if (direct_fd_ >= 0) got = read_fully(direct_fd_, buffer.data(), end - begin, begin);
  // Some file systems open for direct reading and then refuse.
  if (got < static_cast<ssize_t>(needed)) got = read_fully(file_.descriptor(), buffer.data(), needed, begin);
  if (got < 0)
    return Error{ErrorCode::Internal, fmt::format("cannot read {}: {}", file_.path(), std::strerror(errno))};
  if (got < static_cast<ssize_t>(needed))
    return Error{ErrorCode::Internal,
                 fmt::format("{} became shorter: it ends at {}, expected {} or more", file_.path(),
                             begin + static_cast<uint64_t>(got), offset + n)};
  return static_cast<const std::byte*>(buffer.data() + (offset - begin));
}

}  // namespace thermo
