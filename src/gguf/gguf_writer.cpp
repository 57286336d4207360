#include "gguf/gguf_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "base/units.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr uint32_t kVersion = 3;
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxAlignment = 65536;
constexpr size_t kMaxTensorNameBytes = 63;
constexpr size_t kMaxDims = 4;
constexpr uint64_t kMaxFileBytes = 1ULL << 62;
constexpr std::string_view kAlignmentKey = "general.alignment";

// A file that gets its final name only in publish(); otherwise the destructor removes it.
class OutputFile {
 public:
  OutputFile(const std::string& path, uint64_t total_bytes) : path_(path) {
    std::error_code ignored;
    const std::filesystem::file_status status = std::filesystem::status(path, ignored);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
      throw LoadError(
          fmt::format("cannot write {}: it exists and is not a regular file; give another name", path));
    // If the path is a link, the file it names is replaced, not the link.
    if (std::filesystem::is_symlink(path, ignored)) {
      const std::filesystem::path target = std::filesystem::canonical(path, ignored);
      if (!target.empty()) path_ = target.string();
    }
    partial_path_ = path_ + ".partial";
    fd_ = ::open(partial_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd_ < 0)
      throw LoadError(fmt::format("cannot write {}: {}; check that the folder exists and is writable",
                                  partial_path_, std::strerror(errno)));
    check_space(total_bytes);
    buffer_.reserve(kBufferBytes);
  }

  ~OutputFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!published_) ::unlink(partial_path_.c_str());
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void put(std::span<const std::byte> bytes) {
    if (buffer_.size() + bytes.size() > kBufferBytes) flush();
    if (bytes.size() >= kBufferBytes) {
      write_all(bytes);
    } else {
      buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    }
  }

  // Writes what is buffered and closes; a network file system may report a full disk only now.
  void close() {
    flush();
    if (::close(std::exchange(fd_, -1)) != 0) fail(errno);
  }

  // REQUIRES: close() was called.
  void publish() {
    if (std::rename(partial_path_.c_str(), path_.c_str()) != 0) fail(errno);
    published_ = true;
  }

 private:
  static constexpr size_t kBufferBytes = 1 * MiB;

  [[noreturn]] void fail(int error) const {
    const char* advice = error == ENOSPC || error == EDQUOT ? "free some space or choose another disk"
                                                            : "check the disk and the permissions";
    throw LoadError(fmt::format("cannot write {} after {}: {}; {}", path_, format_bytes(written_),
                                std::strerror(error), advice));
  }

  // Better to fail now than after 19 of 20 GiB. The constructor has not finished, so it cleans up itself.
  void check_space(uint64_t total_bytes) {
    std::error_code error;
    const std::filesystem::space_info space = std::filesystem::space(partial_path_, error);
    if (error || space.available >= total_bytes) return;
    ::close(fd_);
    ::unlink(partial_path_.c_str());
    throw LoadError(
        fmt::format("cannot write {}: it needs {}, the disk has {} free; free some space or choose "
                    "another disk",
                    path_, format_bytes(total_bytes), format_bytes(space.available)));
  }

  void flush() {
    write_all(buffer_);
    buffer_.clear();
  }

  void write_all(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(fd_, bytes.data(), std::min<size_t>(bytes.size(), GiB));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail(errno);
      written_ += static_cast<uint64_t>(n);
      bytes = bytes.subspan(static_cast<size_t>(n));
    }
  }

  std::string path_;
  std::string partial_path_;
  std::vector<std::byte> buffer_;
  uint64_t written_ = 0;
  int fd_ = -1;
  bool published_ = false;
};

}  // namespace

// Not inlined: GCC 12 otherwise warns of an overflow that cannot happen (a growing vector of bytes).
[[gnu::noinline]] void GgufWriter::append_bytes(std::vector<std::byte>& out,
                                                std::span<const std::byte> bytes) {
  out.insert(out.end(), bytes.begin(), bytes.end());
}

void GgufWriter::append_string(std::vector<std::byte>& out, std::string_view text) {
  append(out, static_cast<uint64_t>(text.size()));
  append_bytes(out, std::as_bytes(std::span(text)));
}

void GgufWriter::set(std::string_view key, std::string_view value) {
  std::vector<std::byte> encoded;
  append(encoded, static_cast<uint32_t>(GgufType::String));
  append_string(encoded, value);
  set_encoded(key, std::move(encoded));
}

void GgufWriter::set(std::string_view key, const GgufValue& value) {
  std::vector<std::byte> encoded;
  append(encoded, static_cast<uint32_t>(value.type));
  if (value.is_array()) {
    append(encoded, static_cast<uint32_t>(value.element_type));
    append(encoded, value.count);
  }
  encoded.insert(encoded.end(), value.bytes.begin(), value.bytes.end());
  set_encoded(key, std::move(encoded));
}

void GgufWriter::set_encoded(std::string_view key, std::vector<std::byte> encoded) {
  THERMO_CHECK(!key.empty() && key.size() <= 64 * KiB, "a metadata key has 1 to 65536 bytes");
  const auto at =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.key == key; });
  if (at != entries_.end()) {
    at->encoded = std::move(encoded);
  } else {
    entries_.push_back({std::string(key), std::move(encoded)});
  }
}

uint64_t GgufWriter::alignment() const {
  const auto at =
      std::find_if(entries_.begin(), entries_.end(), [](const Entry& e) { return e.key == kAlignmentKey; });
  if (at == entries_.end()) return kDefaultAlignment;
  THERMO_CHECK(load_unaligned<uint32_t>(at->encoded.data()) == static_cast<uint32_t>(GgufType::U32),
               "general.alignment is a u32");
  const uint64_t value = load_unaligned<uint32_t>(at->encoded.data() + sizeof(uint32_t));
  THERMO_CHECK(value != 0 && (value & (value - 1)) == 0 && value <= kMaxAlignment,
               "general.alignment is a power of two up to 65536");
  return value;
}

void GgufWriter::add_tensor(std::string_view name, DType dtype, const std::vector<uint64_t>& dims,
                            std::span<const std::byte> bytes) {
  add_tensor(name, dtype, dims, [bytes](const ByteSink& sink) { sink(bytes); });
  THERMO_CHECK(bytes.size() == tensors_.back().n_bytes, "the bytes of a tensor have the size its shape says");
}

void GgufWriter::add_tensor(std::string_view name, DType dtype, const std::vector<uint64_t>& dims,
                            TensorSource source) {
  THERMO_CHECK(name.size() <= kMaxTensorNameBytes, "a tensor name has at most 63 bytes");
  THERMO_CHECK(dims.size() <= kMaxDims, "a tensor has at most 4 dimensions");
  const DTypeInfo& info = dtype_info(dtype);
  const uint64_t ne0 = dims.empty() ? 1 : dims[0];
  THERMO_CHECK(ne0 % static_cast<uint64_t>(info.block_elements) == 0, "a row is a whole number of blocks");
  uint64_t n_bytes = row_bytes(dtype, ne0);
  for (size_t i = 1; i < dims.size(); ++i) {
    const std::optional<uint64_t> product = checked_mul(n_bytes, dims[i]);
    THERMO_CHECK(product, "the size of a tensor fits 64 bits");
    n_bytes = *product;
  }
  THERMO_CHECK(n_bytes > 0, "no dimension of a tensor is 0");
  THERMO_CHECK(n_bytes < kMaxFileBytes, "a tensor has less than 2^62 bytes");
  for (const Tensor& other : tensors_) THERMO_CHECK(other.name != name, "tensor names are unique");
  tensors_.push_back({std::string(name), dtype, dims, n_bytes, std::move(source)});
}

GgufWriter::Layout GgufWriter::lay_out() const {
  Layout layout;
  layout.alignment = alignment();
  std::vector<std::byte>& head = layout.head;
  append(head, kMagic);
  append(head, kVersion);
  append(head, static_cast<uint64_t>(tensors_.size()));
  append(head, static_cast<uint64_t>(entries_.size()));
  for (const Entry& entry : entries_) {
    append_string(head, entry.key);
    head.insert(head.end(), entry.encoded.begin(), entry.encoded.end());
  }
  uint64_t offset = 0;
  for (const Tensor& tensor : tensors_) {
    append_string(head, tensor.name);
    append(head, static_cast<uint32_t>(tensor.dims.size()));
    for (const uint64_t dim : tensor.dims) append(head, dim);
    append(head, static_cast<uint32_t>(tensor.dtype));
    append(head, offset);
    offset += align_up(tensor.n_bytes, layout.alignment);
    THERMO_CHECK(offset < kMaxFileBytes, "a file has less than 2^62 bytes");
  }
  head.resize(align_up<uint64_t>(head.size(), layout.alignment));
  layout.total_bytes = head.size() + offset;
  return layout;
}

void GgufWriter::emit(const Layout& layout, const ByteSink& sink) const {
  sink(layout.head);
  const std::vector<std::byte> zeros(layout.alignment);
  for (const Tensor& tensor : tensors_) {
    uint64_t n_bytes = 0;
    tensor.source([&](std::span<const std::byte> bytes) {
      n_bytes += bytes.size();
      THERMO_CHECK(n_bytes <= tensor.n_bytes, "a tensor source handed out more bytes than the tensor has");
      sink(bytes);
    });
    THERMO_CHECK(n_bytes == tensor.n_bytes, "a tensor source handed out fewer bytes than the tensor has");
    sink(std::span(zeros).first(align_up(n_bytes, layout.alignment) - n_bytes));
  }
}

void GgufWriter::write(const std::string& path) const {
  const Layout layout = lay_out();
  OutputFile file(path, layout.total_bytes);
  emit(layout, [&](std::span<const std::byte> bytes) { file.put(bytes); });
  file.close();
  file.publish();
}

std::vector<std::byte> GgufWriter::to_bytes() const {
  const Layout layout = lay_out();
  std::vector<std::byte> out;
  out.reserve(layout.total_bytes);
  emit(layout, [&](std::span<const std::byte> bytes) { out.insert(out.end(), bytes.begin(), bytes.end()); });
  return out;
}

}  // namespace thermo
