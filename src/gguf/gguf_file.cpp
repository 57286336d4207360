#include "gguf/gguf_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "gguf/gguf_parse.h"

namespace thermo {
namespace {

constexpr uint64_t kMaxParts = 65535;  // split.count is a u16

// A path of the form PREFIX-00001-of-00003.gguf.
struct SplitName {
  std::string_view prefix;
  uint64_t number;
  uint64_t count;
};

std::optional<SplitName> parse_split_name(std::string_view path) {
  constexpr std::string_view kPattern = "-ddddd-of-ddddd.gguf";
  if (path.size() < kPattern.size()) return std::nullopt;
  const std::string_view tail = path.substr(path.size() - kPattern.size());
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  for (size_t i = 0; i < tail.size(); ++i)
    if (kPattern[i] == 'd' ? !is_digit(tail[i]) : tail[i] != kPattern[i]) return std::nullopt;
  const auto number_at = [&](size_t start) {
    uint64_t number = 0;
    for (size_t i = start; i < start + 5; ++i) number = number * 10 + static_cast<uint64_t>(tail[i] - '0');
    return number;
  };
  return SplitName{path.substr(0, path.size() - tail.size()), number_at(1), number_at(10)};
}

// Calls visit(integer) with the value at `bytes` in its own type; false when `type` is not an integer.
template <class Visit>
bool visit_integer(GgufType type, const std::byte* bytes, Visit visit) {
  switch (type) {
    case GgufType::U8:
      return visit(load_unaligned<uint8_t>(bytes)), true;
    case GgufType::I8:
      return visit(load_unaligned<int8_t>(bytes)), true;
    case GgufType::U16:
      return visit(load_unaligned<uint16_t>(bytes)), true;
    case GgufType::I16:
      return visit(load_unaligned<int16_t>(bytes)), true;
    case GgufType::U32:
      return visit(load_unaligned<uint32_t>(bytes)), true;
    case GgufType::I32:
      return visit(load_unaligned<int32_t>(bytes)), true;
    case GgufType::U64:
      return visit(load_unaligned<uint64_t>(bytes)), true;
    case GgufType::I64:
      return visit(load_unaligned<int64_t>(bytes)), true;
    default:
      return false;
  }
}

bool is_integer(GgufType type) {
  return type != GgufType::F32 && type != GgufType::F64 && type != GgufType::Bool &&
         type != GgufType::String && type != GgufType::Array;
}

// What an accessor asks for: which stored types it takes, how an element becomes a T (nullopt: out of range),
// and how to say so. Scalars, arrays and "each" share it.
struct AsUint {
  using T = uint64_t;
  uint64_t max;
  static constexpr const char* kOne = "an unsigned integer";
  static constexpr const char* kMany = "unsigned integers";
  static bool takes(GgufType type) { return is_integer(type); }
  std::optional<T> decode(GgufType type, const std::byte* bytes) const {
    std::optional<T> result;
    visit_integer(type, bytes, [&](auto value) {
      if (std::cmp_greater_equal(value, 0) && std::cmp_less_equal(value, max)) result = static_cast<T>(value);
    });
    return result;
  }
  std::string range() const { return fmt::format("an integer from 0 to {}", max); }
};

struct AsInt {
  using T = int64_t;
  static constexpr const char* kOne = "an integer";
  static constexpr const char* kMany = "integers";
  static bool takes(GgufType type) { return is_integer(type); }
  static std::optional<T> decode(GgufType type, const std::byte* bytes) {
    std::optional<T> result;
    visit_integer(type, bytes, [&](auto value) {
      if (std::in_range<T>(value)) result = static_cast<T>(value);
    });
    return result;
  }
  static std::string range() { return "an integer below 2^63"; }
};

struct AsFloat {
  using T = double;
  static constexpr const char* kOne = "a float";
  static bool takes(GgufType type) { return type == GgufType::F32 || type == GgufType::F64; }
  static std::optional<T> decode(GgufType type, const std::byte* bytes) {
    return type == GgufType::F32 ? static_cast<double>(load_unaligned<float>(bytes))
                                 : load_unaligned<double>(bytes);
  }
  static std::string range() { return kOne; }
};

struct AsBool {
  using T = bool;
  static constexpr const char* kOne = "a bool";
  static constexpr const char* kMany = "bools";
  static bool takes(GgufType type) { return type == GgufType::Bool; }
  static std::optional<T> decode(GgufType, const std::byte* bytes) {
    return load_unaligned<uint8_t>(bytes) != 0;
  }
  static std::string range() { return kOne; }
};

struct AsString {
  using T = std::string_view;
  static constexpr const char* kOne = "a string";
  static constexpr const char* kMany = "strings";
  static bool takes(GgufType type) { return type == GgufType::String; }
  static std::optional<T> decode(GgufType, const std::byte* bytes) {
    return std::string_view(reinterpret_cast<const char*>(bytes) + 8,
                            static_cast<size_t>(load_unaligned<uint64_t>(bytes)));
  }
  static std::string range() { return kOne; }
};

[[noreturn]] void fail_type(const GgufFile& file, std::string_view key, const GgufValue& found,
                            std::string_view expected) {
  throw LoadError(fmt::format(
      "{}: metadata key '{}' is {} ({}), expected {}; convert the model again with a "
      "current converter",
      file.path(), escape_text(key), describe_type(found), describe_value(found, 40, 4), expected));
}

[[noreturn]] void fail_missing(const GgufFile& file, std::string_view key, std::string_view expected) {
  throw LoadError(
      fmt::format("{}: metadata key '{}' is missing, expected {}; convert the model again with a "
                  "current converter",
                  file.path(), escape_text(key), expected));
}

template <class As>
std::optional<typename As::T> find_one(const GgufFile& file, std::string_view key, const As& as) {
  const GgufValue* value = file.find(key);
  if (!value) return std::nullopt;
  if (value->is_array() || !as.takes(value->type)) fail_type(file, key, *value, as.kOne);
  const std::optional<typename As::T> result = as.decode(value->type, value->bytes.data());
  if (!result) fail_type(file, key, *value, as.range());
  return result;
}

// REQUIRES: an array whose elements As takes.
template <class As>
std::vector<typename As::T> decode_array(const GgufFile& file, std::string_view key, const GgufValue& value,
                                         const As& as) {
  std::vector<typename As::T> result;
  result.reserve(value.count);
  const std::byte* next = value.bytes.data();
  for (uint64_t i = 0; i < value.count; ++i) {
    const std::optional<typename As::T> element = as.decode(value.element_type, next);
    if (!element)
      throw LoadError(
          fmt::format("{}: element {} of metadata key '{}' is out of range, expected {}; convert the "
                      "model again with a current converter",
                      file.path(), i, escape_text(key), as.range()));
    result.push_back(*element);
    next += gguf_type_min_bytes(value.element_type);
    if constexpr (std::is_same_v<As, AsString>) next += element->size();
  }
  return result;
}

template <class As>
std::optional<std::vector<typename As::T>> find_many(const GgufFile& file, std::string_view key,
                                                     const As& as) {
  const GgufValue* value = file.find(key);
  if (!value) return std::nullopt;
  if (!value->is_array() || !as.takes(value->element_type))
    fail_type(file, key, *value, fmt::format("an array of {}", as.kMany));
  return decode_array(file, key, *value, as);
}

template <class As>
std::optional<std::vector<typename As::T>> find_each(const GgufFile& file, std::string_view key, size_t n,
                                                     const As& as) {
  const GgufValue* value = file.find(key);
  if (!value) return std::nullopt;
  if (!value->is_array() && as.takes(value->type))
    return std::vector<typename As::T>(n, *find_one(file, key, as));
  if (!value->is_array() || !as.takes(value->element_type) || value->count != n)
    fail_type(file, key, *value, fmt::format("{} or an array of exactly {} {}", as.kOne, n, as.kMany));
  return decode_array(file, key, *value, as);
}

template <class T>
T require(std::optional<T> found, const GgufFile& file, std::string_view key, const std::string& expected) {
  if (!found) fail_missing(file, key, expected);
  return *std::move(found);
}

template <class As>
typename As::T require_one(const GgufFile& file, std::string_view key, const As& as) {
  return require(find_one(file, key, as), file, key, as.kOne);
}

template <class As>
std::vector<typename As::T> require_many(const GgufFile& file, std::string_view key, const As& as) {
  return require(find_many(file, key, as), file, key, fmt::format("an array of {}", as.kMany));
}

template <class As>
std::vector<typename As::T> require_each(const GgufFile& file, std::string_view key, size_t n, const As& as) {
  return require(find_each(file, key, n, as), file, key,
                 fmt::format("{} or an array of exactly {} {}", as.kOne, n, as.kMany));
}

}  // namespace

std::string describe_shape(const GgufTensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.dims.begin(), tensor.dims.begin() + tensor.n_dims, ", "));
}

std::string split_part_path(std::string_view prefix, uint64_t number, uint64_t count) {
  return fmt::format("{}-{:05}-of-{:05}.gguf", prefix, number, count);
}

GgufFile::GgufFile(const std::string& path) : path_(path) {
  mappings_.emplace_back(path);
  read_part(mappings_.front().bytes(), 0);
  open_siblings();
  index_tensors();
}

GgufFile::GgufFile(std::span<const std::byte> bytes, std::string name) : path_(std::move(name)) {
  read_part(bytes, 0);
  if (find_uint("split.count", kMaxParts).value_or(0) > 1)
    throw LoadError(
        fmt::format("{}: it is one part of a split model, whose other parts cannot be found from memory; "
                    "open the first part by its path or merge the parts",
                    path_));
  index_tensors();
}

GgufFile::GgufFile(std::string name, std::vector<std::byte> metadata, std::vector<OtherTensor> tensors,
                   std::vector<MappedFile> files)
    : path_(std::move(name)),
      mappings_(std::move(files)),
      other_metadata_(std::move(metadata)),
      other_tensors_(std::move(tensors)) {
  read_part(other_metadata_, 0);
  for (const OtherTensor& tensor : other_tensors_) {
    GgufTensor& view = tensors_.emplace_back();
    view.name = tensor.name;
    view.dtype = tensor.dtype;
    view.n_dims = static_cast<int>(tensor.dims.size());
    std::copy(tensor.dims.begin(), tensor.dims.end(), view.dims.begin());
    view.n_bytes = tensor.bytes.size();
    view.data = tensor.bytes.data();
    view.part = tensor.part;
    view.file_offset =
        static_cast<uint64_t>(view.data - mappings_[static_cast<size_t>(tensor.part)].bytes().data());
  }
  index_tensors();
}

void GgufFile::read_part(std::span<const std::byte> bytes, int part) {
  ParsedGguf parsed = parse_gguf(bytes, path_, part);
  version_ = parsed.version;
  metadata_ = std::move(parsed.metadata);
  metadata_by_key_ = std::move(parsed.metadata_by_key);
  tensors_ = std::move(parsed.tensors);
}

void GgufFile::open_siblings() {
  const uint64_t count = find_uint("split.count", kMaxParts).value_or(0);
  // A merged file keeps the keys, with a count of 0 or 1.
  if (count <= 1) return;
  const uint64_t number = require_uint("split.no", kMaxParts) + 1;
  const std::optional<SplitName> name = parse_split_name(path_);
  if (number != 1)
    throw LoadError(fmt::format("{}: it is part {} of a model split into {} files; give the first part, {}",
                                path_, number, count,
                                split_part_path(name ? name->prefix : std::string_view("NAME"), 1, count)));
  if (!name || name->number != 1 || name->count != count)
    throw LoadError(
        fmt::format("{}: it is part 1 of a model split into {} files, but its name does not say so; rename "
                    "the files to {} and so on",
                    path_, count, split_part_path("NAME", 1, count)));
  const uint64_t n_tensors = require_uint("split.tensors.count");

  for (uint64_t i = 1; i < count; ++i) {
    GgufFile sibling;
    sibling.path_ = split_part_path(name->prefix, i + 1, count);
    try {
      sibling.mappings_.emplace_back(sibling.path_);
    } catch (const LoadError& error) {
      throw LoadError(fmt::format("{}: the model is split into {} files, and part {} is not usable: {}",
                                  path_, count, i + 1, error.what()));
    }
    sibling.read_part(sibling.mappings_.front().bytes(), static_cast<int>(i));
    const uint64_t sibling_number = sibling.require_uint("split.no", kMaxParts) + 1;
    const uint64_t sibling_count = sibling.require_uint("split.count", kMaxParts);
    if (sibling_number != i + 1 || sibling_count != count)
      throw LoadError(
          fmt::format("{}: it says it is part {} of {}, expected part {} of {}; was a file renamed or taken "
                      "from another model?",
                      sibling.path_, sibling_number, sibling_count, i + 1, count));
    const uint64_t sibling_n_tensors = sibling.find_uint("split.tensors.count").value_or(n_tensors);
    if (sibling_n_tensors != n_tensors)
      throw LoadError(
          fmt::format("{}: it says the whole model has {} tensors, part 1 says {}; was a file taken from "
                      "another model?",
                      sibling.path_, sibling_n_tensors, n_tensors));
    mappings_.push_back(std::move(sibling.mappings_.front()));
    tensors_.insert(tensors_.end(), sibling.tensors_.begin(), sibling.tensors_.end());
  }
  if (tensors_.size() != n_tensors)
    throw LoadError(
        fmt::format("{}: its {} parts hold {} tensors, expected {} (split.tensors.count); fetch the parts "
                    "again",
                    path_, count, tensors_.size(), n_tensors));
}

void GgufFile::index_tensors() {
  tensors_by_name_ = sorted_order(tensors_, &GgufTensor::name);
  for (size_t i = 1; i < tensors_.size(); ++i) {
    const std::string_view name = tensors_[tensors_by_name_[i]].name;
    if (name == tensors_[tensors_by_name_[i - 1]].name)
      throw LoadError(
          fmt::format("{}: tensor '{}' appears twice, expected once; convert the model again with a "
                      "current converter",
                      path_, escape_text(name)));
  }
  for (const GgufTensor& tensor : tensors_) total_tensor_bytes_ += tensor.n_bytes;
}

int GgufFile::n_parts() const noexcept {
  return std::max(1, static_cast<int>(mappings_.size()));
}

const MappedFile* GgufFile::part(int index) const noexcept {
  const size_t i = static_cast<size_t>(index);  // a negative one becomes too large
  return i < mappings_.size() ? &mappings_[i] : nullptr;
}

std::string GgufFile::fault() const {
  for (const MappedFile& mapping : mappings_)
    if (mapping.lost())
      return fmt::format(
          "{} became shorter while it was in use, or its disk failed; get the whole file and start again",
          mapping.path());
  return {};
}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const noexcept {
  return find_sorted(tensors_, tensors_by_name_, &GgufTensor::name, name);
}

const GgufTensor& GgufFile::require_tensor(std::string_view name) const {
  const GgufTensor* tensor = find_tensor(name);
  if (!tensor)
    throw LoadError(
        fmt::format("{}: tensor '{}' is missing among its {} tensors; is the file complete and of the "
                    "architecture it names?",
                    path_, escape_text(name), tensors_.size()));
  return *tensor;
}

const GgufValue* GgufFile::find(std::string_view key) const noexcept {
  const GgufEntry* entry = find_sorted(metadata_, metadata_by_key_, &GgufEntry::key, key);
  return entry ? &entry->value : nullptr;
}

std::optional<uint64_t> GgufFile::find_uint(std::string_view key, uint64_t max) const {
  return find_one(*this, key, AsUint{max});
}
std::optional<int64_t> GgufFile::find_int(std::string_view key) const {
  return find_one(*this, key, AsInt{});
}
std::optional<double> GgufFile::find_float(std::string_view key) const {
  return find_one(*this, key, AsFloat{});
}
std::optional<bool> GgufFile::find_bool(std::string_view key) const {
  return find_one(*this, key, AsBool{});
}
std::optional<std::string_view> GgufFile::find_string(std::string_view key) const {
  return find_one(*this, key, AsString{});
}

uint64_t GgufFile::require_uint(std::string_view key, uint64_t max) const {
  return require_one(*this, key, AsUint{max});
}
double GgufFile::require_float(std::string_view key) const {
  return require_one(*this, key, AsFloat{});
}
std::string_view GgufFile::require_string(std::string_view key) const {
  return require_one(*this, key, AsString{});
}

std::optional<std::vector<uint64_t>> GgufFile::find_uints(std::string_view key, uint64_t max) const {
  return find_many(*this, key, AsUint{max});
}
std::optional<std::vector<int64_t>> GgufFile::find_ints(std::string_view key) const {
  return find_many(*this, key, AsInt{});
}
std::optional<std::vector<std::string_view>> GgufFile::find_strings(std::string_view key) const {
  return find_many(*this, key, AsString{});
}

std::vector<int64_t> GgufFile::require_ints(std::string_view key) const {
  return require_many(*this, key, AsInt{});
}
std::vector<std::string_view> GgufFile::require_strings(std::string_view key) const {
  return require_many(*this, key, AsString{});
}

std::optional<std::vector<uint64_t>> GgufFile::find_uint_each(std::string_view key, size_t n,
                                                              uint64_t max) const {
  return find_each(*this, key, n, AsUint{max});
}
std::optional<std::vector<bool>> GgufFile::find_bool_each(std::string_view key, size_t n) const {
  return find_each(*this, key, n, AsBool{});
}

std::vector<uint64_t> GgufFile::require_uint_each(std::string_view key, size_t n, uint64_t max) const {
  return require_each(*this, key, n, AsUint{max});
}
std::vector<bool> GgufFile::require_bool_each(std::string_view key, size_t n) const {
  return require_each(*this, key, n, AsBool{});
}

}  // namespace thermo
