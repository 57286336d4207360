// The container, in file order:
//
//   "GGUF" | u32 version | u64 tensor_count | u64 kv_count
//   kv_count     x  { string key | u32 type | value }
//   tensor_count x  { string name | u32 n_dims | u64 dim[n_dims] | u32 type | u64 offset }
//   padding to `alignment`
//   data: each tensor at data_start + offset
//
//   string = u64 length, bytes.   array = u32 element type, u64 count, elements.
//
// Nothing in it is trusted: a length is compared with what is left of the file before it is used, memory is
// reserved only for counts that the remaining bytes can hold, and sums and products are checked for overflow.
#include "gguf/gguf_parse.h"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "base/error.h"
#include "base/units.h"

namespace thermo {
namespace {

constexpr uint64_t kHeaderBytes = 24;
constexpr uint64_t kMaxTensors = 1 << 20;
constexpr uint64_t kMaxEntries = 1 << 16;
constexpr uint64_t kMinTensorInfoBytes = 24;  // no name, no dimensions
constexpr uint64_t kMinEntryBytes = 14;       // a key of one byte, a value of one byte
constexpr uint64_t kMaxKeyBytes = 64 * KiB;
constexpr uint64_t kMaxStringBytes = 64 * MiB;
constexpr uint64_t kMaxTensorNameBytes = 63;
constexpr uint64_t kMaxArrayCount = 1ULL << 30;
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxAlignment = 65536;
constexpr uint64_t kMaxElements = (1ULL << 63) - 1;

constexpr const char* kFetchAgain =
    "the file is damaged or its download was cut off, compare its size with the original or fetch it again";
constexpr const char* kConvertAgain = "convert the model again with a current converter";

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// What the start of a file that is not GGUF looks like, and what to do about it.
std::string describe_first_bytes(std::span<const std::byte> bytes) {
  const std::string_view text = as_text(bytes.first(std::min<size_t>(bytes.size(), 64)));
  struct Signature {
    std::string_view start;
    const char* meaning;
  };
  static constexpr Signature kSignatures[] = {
      {"version https://git-lfs", "it is a Git LFS pointer, run `git lfs pull` to fetch the file itself"},
      {"<!DOCTYPE", "it is a web page, the download link led to a page and not to the file"},
      {"<!doctype", "it is a web page, the download link led to a page and not to the file"},
      {"<html", "it is a web page, the download link led to a page and not to the file"},
      {std::string_view("PK\x03\x04", 4),
       "it is a ZIP archive, perhaps a PyTorch checkpoint, convert it to GGUF"},
      {std::string_view("\x1f\x8b", 2), "it is gzip-compressed, unpack it first"},
      {std::string_view("\x28\xb5\x2f\xfd", 4), "it is zstd-compressed, unpack it first"},
      {"tjgg", "it is in the GGJT format that came before GGUF, fetch a newer file of the model"},
      {"lmgg", "it is in the GGML format that came before GGUF, fetch a newer file of the model"},
      {"fmgg", "it is in the GGMF format that came before GGUF, fetch a newer file of the model"},
      {"\x7f"
       "ELF",
       "it is a program"},
      {"{", "it looks like JSON, give the .gguf file and not a configuration"},
  };
  for (const Signature& signature : kSignatures)
    if (text.starts_with(signature.start)) return signature.meaning;
  if (text.size() > 9 && text[8] == '{' && load_unaligned<uint64_t>(bytes.data()) < kMaxStringBytes)
    return "it looks like a safetensors file, convert it to GGUF";
  if (text.find_first_not_of('\0') == std::string_view::npos)
    return "it begins with zeros, the download has probably not finished";
  return "give the path of a .gguf file";
}

class Parser {
 public:
  Parser(std::span<const std::byte> bytes, const std::string& name, int part)
      : bytes_(bytes), name_(name), part_(part) {}

  ParsedGguf parse() {
    read_header();
    read_metadata();
    read_alignment();
    read_directory();
    check_overlaps();
    return std::move(parsed_);
  }

 private:
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw LoadError(fmt::format("{}: {}", name_, fmt::format(format, std::forward<Args>(args)...)));
  }

  uint64_t remaining() const { return bytes_.size() - position_; }

  // The next n bytes; `what` names them when the file ends before.
  const std::byte* take(uint64_t n, const char* what) {
    if (n > remaining())
      fail("the file ends at byte {} inside {}, which needs {} bytes from byte {} on; {}", bytes_.size(),
           what, n, position_, kFetchAgain);
    const std::byte* start = bytes_.data() + position_;
    position_ += n;
    return start;
  }

  template <class T>
  T read(const char* what) {
    return load_unaligned<T>(take(sizeof(T), what));
  }

  std::string_view read_string(uint64_t max_bytes, const char* what) {
    const uint64_t start = position_;
    const uint64_t length = read<uint64_t>(what);
    if (length > max_bytes)
      fail("{} at byte {} is {} bytes long, expected at most {}; {}", what, start, length, max_bytes,
           kFetchAgain);
    return {reinterpret_cast<const char*>(take(length, what)), static_cast<size_t>(length)};
  }

  void read_header() {
    if (!as_text(bytes_).starts_with("GGUF")) {
      const auto first = bytes_.first(std::min<size_t>(bytes_.size(), 4));
      if (bytes_.empty()) fail("it is empty, expected a GGUF file; was the download cut off?");
      fail("not a GGUF file: it begins with \"{}\", expected \"GGUF\"; {}", escape_text(as_text(first)),
           describe_first_bytes(bytes_));
    }
    if (bytes_.size() < kHeaderBytes)
      fail("it has {} bytes, a GGUF header alone has {}; {}", bytes_.size(), kHeaderBytes, kFetchAgain);
    position_ = 4;
    const uint32_t version = read<uint32_t>("the version");
    if (version == 1) fail("GGUF version 1, expected 2 or 3; {}", kConvertAgain);
    if (version != 0 && (version & 0xFFFF) == 0)
      fail(
          "it was written for big-endian machines, expected little-endian; fetch the little-endian file of "
          "the model");
    if (version > 3)
      fail("GGUF version {}, this program reads 2 and 3; look for a newer thermocline", version);
    if (version < 2) fail("GGUF version {}, expected 2 or 3; {}", version, kFetchAgain);
    parsed_.version = version;
    n_tensors_ = read<uint64_t>("the tensor count");
    n_entries_ = read<uint64_t>("the metadata count");
    check_count("tensors", n_tensors_, kMaxTensors, kMinTensorInfoBytes);
    check_count("metadata entries", n_entries_, kMaxEntries, kMinEntryBytes);
  }

  // Called again before memory is reserved: the metadata has used up bytes since.
  void check_count(const char* what, uint64_t count, uint64_t cap, uint64_t min_bytes) const {
    if (count > cap)
      fail("the header announces {} {}, expected at most {}; {}", count, what, cap, kFetchAgain);
    if (count > remaining() / min_bytes)
      fail("the header announces {} {}, but only {} bytes follow; {}", count, what, remaining(), kFetchAgain);
  }

  void read_metadata() {
    parsed_.metadata.reserve(n_entries_);
    for (uint64_t i = 0; i < n_entries_; ++i) {
      const std::string_view key = read_string(kMaxKeyBytes, "a metadata key");
      if (key.empty()) fail("metadata entry {} has an empty key, expected a name; {}", i, kFetchAgain);
      parsed_.metadata.push_back({key, read_value(key)});
    }
    const std::vector<GgufEntry>& entries = parsed_.metadata;
    parsed_.metadata_by_key = sorted_order(entries, &GgufEntry::key);
    for (size_t i = 1; i < entries.size(); ++i) {
      const std::string_view key = entries[parsed_.metadata_by_key[i]].key;
      if (key == entries[parsed_.metadata_by_key[i - 1]].key)
        fail("metadata key '{}' appears twice, expected once; {}", escape_text(key), kConvertAgain);
    }
  }

  GgufType read_type(std::string_view key, const char* what) {
    const uint32_t id = read<uint32_t>("a value type");
    if (id >= kGgufTypeCount)
      fail("metadata key '{}' has {} {}, expected 0 to {}; {}", escape_text(key), what, id,
           kGgufTypeCount - 1, kFetchAgain);
    return static_cast<GgufType>(id);
  }

  GgufValue read_value(std::string_view key) {
    GgufValue value;
    value.type = value.element_type = read_type(key, "value type");
    if (value.is_array()) {
      value.element_type = read_type(key, "element type");
      if (value.element_type == GgufType::Array)
        fail("metadata key '{}' is an array of arrays, which this program does not read; {}",
             escape_text(key), kConvertAgain);
      value.count = read<uint64_t>("an array's count");
      if (value.count > kMaxArrayCount)
        fail("metadata key '{}' is an array of {} elements, expected at most {}; {}", escape_text(key),
             value.count, kMaxArrayCount, kFetchAgain);
      if (value.count > remaining() / gguf_type_min_bytes(value.element_type))
        fail("metadata key '{}' is an array of {} {}, but only {} bytes follow; {}", escape_text(key),
             value.count, gguf_type_name(value.element_type), remaining(), kFetchAgain);
    }
    const uint64_t start = position_;
    if (value.element_type == GgufType::String) {
      for (uint64_t i = 0; i < value.count; ++i) read_string(kMaxStringBytes, "a metadata string");
    } else {
      take(value.count * gguf_type_min_bytes(value.element_type), "a metadata value");
    }
    value.bytes = bytes_.subspan(start, position_ - start);
    return value;
  }

  void read_alignment() {
    const GgufEntry* entry =
        find_sorted(parsed_.metadata, parsed_.metadata_by_key, &GgufEntry::key, "general.alignment");
    if (!entry) return;
    if (entry->value.type != GgufType::U32)
      fail("metadata key 'general.alignment' is {}, expected u32; {}", describe_type(entry->value),
           kConvertAgain);
    alignment_ = load_unaligned<uint32_t>(entry->value.bytes.data());
    if (alignment_ == 0 || (alignment_ & (alignment_ - 1)) != 0 || alignment_ > kMaxAlignment)
      fail("metadata key 'general.alignment' is {}, expected a power of two up to {}; {}", alignment_,
           kMaxAlignment, kConvertAgain);
  }

  void read_directory() {
    check_count("tensors", n_tensors_, kMaxTensors, kMinTensorInfoBytes);
    parsed_.tensors.reserve(n_tensors_);
    for (uint64_t i = 0; i < n_tensors_; ++i) parsed_.tensors.push_back(read_tensor_info());
    // No overflow: position_ is at most the file's size, far below 2^64.
    const uint64_t data_start = align_up(position_, alignment_);
    for (GgufTensor& tensor : parsed_.tensors) place(tensor, data_start);
  }

  // One directory entry; file_offset is still relative to the data.
  GgufTensor read_tensor_info() {
    GgufTensor tensor;
    tensor.part = part_;
    tensor.name = read_string(kMaxTensorNameBytes, "a tensor name");
    const uint32_t n_dims = read<uint32_t>("a tensor's dimension count");
    if (n_dims > tensor.dims.size())
      fail("tensor '{}' has {} dimensions, expected at most 4; {}", escape_text(tensor.name), n_dims,
           kFetchAgain);
    tensor.n_dims = static_cast<int>(n_dims);
    uint64_t n_elements = 1;
    for (uint32_t d = 0; d < n_dims; ++d) {
      const uint64_t dim = read<uint64_t>("a tensor's dimensions");
      if (dim == 0 || dim > kMaxElements)
        fail("tensor '{}' has dimension {} of {}, expected 1 to 2^63-1; {}", escape_text(tensor.name), d, dim,
             kFetchAgain);
      if (n_elements > kMaxElements / dim)
        fail("tensor '{}' has more than 2^63-1 elements, which no file can hold; {}",
             escape_text(tensor.name), kFetchAgain);
      n_elements *= dim;
      tensor.dims[d] = dim;
    }
    read_tensor_type(tensor, n_elements);
    tensor.file_offset = read<uint64_t>("a tensor's offset");
    return tensor;
  }

  // Sets dtype and n_bytes.
  void read_tensor_type(GgufTensor& tensor, uint64_t n_elements) {
    const uint32_t id = read<uint32_t>("a tensor's type");
    const std::optional<DType> dtype = dtype_from_id(id);
    if (!dtype)
      fail(
          "tensor '{}' has type {} (id {}), which this program does not read; fetch the model in another "
          "quantization, for instance Q4_K_M or Q8_0",
          escape_text(tensor.name), file_type_name(id), id);
    const DTypeInfo& info = dtype_info(*dtype);
    const uint64_t block_elements = static_cast<uint64_t>(info.block_elements);
    if (tensor.dims[0] % block_elements != 0)
      fail("tensor '{}' has rows of {} elements, expected a multiple of {} for type {}; {}",
           escape_text(tensor.name), tensor.dims[0], block_elements, info.name, kConvertAgain);
    const std::optional<uint64_t> n_bytes =
        checked_mul(n_elements / block_elements, static_cast<uint64_t>(info.block_bytes));
    if (!n_bytes)
      fail("tensor '{}' of shape {} has more than 2^64 bytes, which no file can hold; {}",
           escape_text(tensor.name), describe_shape(tensor), kFetchAgain);
    tensor.dtype = *dtype;
    tensor.n_bytes = *n_bytes;
  }

  void place(GgufTensor& tensor, uint64_t data_start) const {
    const uint64_t offset = tensor.file_offset;
    if (offset % alignment_ != 0)
      fail("tensor '{}' has offset {}, expected a multiple of the alignment {}; {}", escape_text(tensor.name),
           offset, alignment_, kConvertAgain);
    const std::optional<uint64_t> begin = checked_add(data_start, offset);
    const std::optional<uint64_t> end = begin ? checked_add(*begin, tensor.n_bytes) : std::nullopt;
    if (!end || *end > bytes_.size())
      fail(
          "tensor '{}' needs {} bytes from offset {} of the data, which begins at byte {}, but the file has "
          "only {} "
          "bytes; {}",
          escape_text(tensor.name), tensor.n_bytes, offset, data_start, bytes_.size(), kFetchAgain);
    tensor.file_offset = *begin;
    tensor.data = bytes_.data() + *begin;
  }

  void check_overlaps() const {
    std::vector<const GgufTensor*> by_offset;
    by_offset.reserve(parsed_.tensors.size());
    for (const GgufTensor& tensor : parsed_.tensors) by_offset.push_back(&tensor);
    std::sort(by_offset.begin(), by_offset.end(),
              [](const GgufTensor* a, const GgufTensor* b) { return a->file_offset < b->file_offset; });
    for (size_t i = 1; i < by_offset.size(); ++i) {
      const GgufTensor& before = *by_offset[i - 1];
      const GgufTensor& after = *by_offset[i];
      if (before.file_offset + before.n_bytes > after.file_offset)
        fail("tensors '{}' and '{}' share bytes from byte {} on, expected separate ranges; {}",
             escape_text(before.name), escape_text(after.name), after.file_offset, kFetchAgain);
    }
  }

  std::span<const std::byte> bytes_;
  const std::string& name_;
  int part_;
  uint64_t position_ = 0;
  uint64_t n_tensors_ = 0;
  uint64_t n_entries_ = 0;
  uint64_t alignment_ = kDefaultAlignment;
  ParsedGguf parsed_;
};

}  // namespace

ParsedGguf parse_gguf(std::span<const std::byte> bytes, const std::string& name, int part) {
  return Parser(bytes, name, part).parse();
}

}  // namespace thermo
