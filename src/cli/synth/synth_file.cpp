#include "cli/synth/synth_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/units.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

constexpr uint64_t kAlignment = 32;
constexpr size_t kCountAt = 8;  // of the number of tensors: after magic and version

template <class T>
void append(std::vector<std::byte>& out, const T& value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof(T));
}

// The head of the file: the metadata as GgufWriter encodes it, then a directory of the tensors.
std::vector<std::byte> make_head(const GgufWriter& metadata, std::span<const SynthTensor> tensors) {
  std::vector<std::byte> head = metadata.to_bytes();
  const GgufFile parsed(head, "head");
  const std::span<const std::byte> last = parsed.metadata().back().value.bytes;
  head.resize(static_cast<size_t>(last.data() + last.size() - head.data()));  // without the padding
  const uint64_t n_tensors = tensors.size();
  std::memcpy(head.data() + kCountAt, &n_tensors, sizeof(n_tensors));
  uint64_t offset = 0;
  for (const SynthTensor& tensor : tensors) {
    append(head, static_cast<uint64_t>(tensor.name.size()));
    const auto* name = reinterpret_cast<const std::byte*>(tensor.name.data());
    head.insert(head.end(), name, name + tensor.name.size());
    append(head, static_cast<uint32_t>(tensor.dims.size()));
    for (const uint64_t dim : tensor.dims) append(head, dim);
    append(head, static_cast<uint32_t>(tensor.dtype));
    append(head, offset);
    offset += align_up(tensor.n_bytes(), kAlignment);
  }
  head.resize(align_up<uint64_t>(head.size(), kAlignment));
  return head;
}

}  // namespace

SynthFile::SynthFile(const std::string& path, const GgufWriter& metadata,
                     std::span<const SynthTensor> tensors)
    : path_(path), partial_path_(path + ".partial") {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw ConfigError(
        fmt::format("cannot write {}: it exists and is not a regular file; give another name", path));
  const std::vector<std::byte> head = make_head(metadata, tensors);
  uint64_t end = head.size();
  for (const SynthTensor& tensor : tensors) {
    offsets_.push_back(end);
    end += align_up(tensor.n_bytes(), kAlignment);
  }
  check_space(end);
  fd_ = ::open(partial_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0)
    throw ConfigError(fmt::format("cannot write {}: {}; check that the folder exists and is writable",
                                  partial_path_, std::strerror(errno)));
  if (::ftruncate(fd_, static_cast<off_t>(end)) != 0) error_ = errno;
  put(0, head);
}

SynthFile::~SynthFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(partial_path_.c_str());
}

// Better said now than after 19 of 20 GiB.
void SynthFile::check_space(uint64_t n_bytes) const {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::absolute(path_, error).parent_path();
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  if (error || space.available >= n_bytes) return;
  throw ConfigError(fmt::format(
      "cannot write {}: it needs {}, the disk has {} free; free some space or choose another disk", path_,
      format_bytes(n_bytes), format_bytes(space.available)));
}

void SynthFile::fail(int error) const {
  const bool full = error == ENOSPC || error == EDQUOT;
  throw ConfigError(
      fmt::format("cannot write {}: {}; {}", path_, std::strerror(error),
                  full ? "free some space or choose another disk" : "check the disk and the permissions"));
}

void SynthFile::write(size_t tensor, uint64_t offset, std::span<const std::byte> bytes) noexcept {
  put(offsets_[tensor] + offset, bytes);
}

void SynthFile::put(uint64_t at, std::span<const std::byte> bytes) noexcept {
  while (!bytes.empty() && !failed()) {
    const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      int none = 0;
      error_.compare_exchange_strong(none, errno);
      return;
    }
    at += static_cast<uint64_t>(n);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

void SynthFile::finish() {
  if (failed()) fail(error_.load());
  const int fd = std::exchange(fd_, -1);
  // A network file system may report a full disk only now.
  const bool ok = ::close(fd) == 0 && std::rename(partial_path_.c_str(), path_.c_str()) == 0;
  if (ok) return;
  const int error = errno;
  ::unlink(partial_path_.c_str());
  fail(error);
}

}  // namespace thermo
