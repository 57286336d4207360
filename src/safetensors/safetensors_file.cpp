#include "safetensors/safetensors_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/json.h"
#include "base/json_limits.h"
#include "base/units.h"

namespace thermo {
namespace {

// Finds a member without looking at all of them; a directory has many.
using SortedJson = nlohmann::json;

constexpr uint64_t kMaxDirectoryBytes = 100'000'000;
constexpr JsonLimits kDirectoryLimits{.members = 100'000, .work = UINT64_MAX};
constexpr size_t kMaxDims = 4, kMaxShown = 80;

struct TypeSize {
  std::string_view name;
  uint64_t bytes;
  std::optional<DType> dtype;
};
constexpr TypeSize kTypes[] = {
    {"F32", 4, DType::F32}, {"F16", 2, DType::F16}, {"BF16", 2, DType::BF16}, {"F64", 8, {}},
    {"I64", 8, {}},         {"I32", 4, {}},         {"I16", 2, {}},           {"I8", 1, {}},
    {"U64", 8, {}},         {"U32", 4, {}},         {"U16", 2, {}},           {"U8", 1, {}},
    {"BOOL", 1, {}},        {"F8_E4M3", 1, {}},     {"F8_E5M2", 1, {}},
};

// A name in a message: what it is made of is not ours.
std::string shown(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, kMaxShown)) out += c >= ' ' && c <= '~' ? c : '?';
  return out;
}

// Of the outermost object of valid JSON that is not empty.
size_t n_members(std::string_view text) {
  size_t n = 1, depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') ++i;
    if (c == '"') in_string = !in_string;
    if (in_string) continue;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (c == ',' && depth == 1) ++n;
  }
  return n;
}

class Reader {
 public:
  Reader(std::span<const std::byte> bytes, std::string_view path) : bytes_(bytes), path_(path) {}

  std::vector<SafetensorsTensor> read() {
    uint64_t n = 0;
    if (bytes_.size() < sizeof(n)) fail("it is shorter than its first number");
    std::memcpy(&n, bytes_.data(), sizeof(n));
    if (n > bytes_.size() - sizeof(n) || n > kMaxDirectoryBytes)
      fail(fmt::format("its directory has {} bytes, the file {}", n, bytes_.size()));
    data_ = bytes_.subspan(sizeof(n) + static_cast<size_t>(n));
    const SortedJson directory = parse(bytes_.subspan(sizeof(n), static_cast<size_t>(n)));
    std::vector<SafetensorsTensor> tensors;
    for (const auto& [name, entry] : directory.items())
      if (name != "__metadata__") tensors.push_back(tensor(name, entry));
    if (tensors.empty()) fail("there are no tensors in it");
    check_overlap(tensors);
    std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    return tensors;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw LoadError(fmt::format("{}: {}; the file is damaged or no safetensors file", path_, what));
  }

  SortedJson parse(std::span<const std::byte> text) const {
    const std::string_view json(reinterpret_cast<const char*>(text.data()), text.size());
    if (const std::string what = beyond_limits(json, kDirectoryLimits); !what.empty())
      fail("its directory cannot be read: " + what);
    SortedJson directory = SortedJson::parse(json, nullptr, false);
    if (!directory.is_object()) fail("its directory is not a JSON object");
    // The library keeps the last of two equal keys; here they are refused.
    if (!directory.empty() && directory.size() != n_members(json)) fail("a tensor is in its directory twice");
    return directory;
  }

  SafetensorsTensor tensor(const std::string& name, const SortedJson& entry) const {
    const auto refuse = [&](const std::string& what) {
      fail(fmt::format("tensor '{}' {}", shown(name), what));
    };
    const auto field = [&](const char* key) -> const SortedJson& {
      if (!entry.is_object() || !entry.contains(key)) refuse(fmt::format("has no {}", key));
      return entry[key];
    };
    SafetensorsTensor out{.name = name, .type = {}, .dtype = {}, .shape = {}, .bytes = {}};
    const SortedJson& type = field("dtype");
    if (type.is_string()) out.type = type.get<std::string>();
    const auto known = std::find_if(std::begin(kTypes), std::end(kTypes),
                                    [&](const TypeSize& t) { return t.name == out.type; });
    if (known == std::end(kTypes)) refuse(fmt::format("has type '{}', which is not known", shown(out.type)));
    out.dtype = known->dtype;
    const SortedJson& shape = field("shape");
    if (!shape.is_array() || shape.size() > kMaxDims) refuse("has no shape of up to four dimensions");
    uint64_t n_bytes = known->bytes;
    for (const SortedJson& dim : shape) {
      if (!dim.is_number_unsigned()) refuse("has a dimension that is not a number");
      out.shape.push_back(dim.get<uint64_t>());
      const std::optional<uint64_t> product = checked_mul(n_bytes, out.shape.back());
      if (!product) refuse("is larger than any file");
      n_bytes = *product;
    }
    const SortedJson& offsets = field("data_offsets");
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned())
      refuse("has no two data_offsets");
    const uint64_t begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
    if (begin > end || end > data_.size())
      refuse(fmt::format("lies at {} to {} of {} bytes", begin, end, data_.size()));
    if (end - begin != n_bytes)
      refuse(fmt::format("has {} bytes, its shape and type {}", end - begin, n_bytes));
    out.bytes = data_.subspan(static_cast<size_t>(begin), static_cast<size_t>(n_bytes));
    return out;
  }

  void check_overlap(const std::vector<SafetensorsTensor>& tensors) const {
    std::vector<const SafetensorsTensor*> order;
    for (const SafetensorsTensor& tensor : tensors)
      if (!tensor.bytes.empty()) order.push_back(&tensor);
    std::sort(order.begin(), order.end(),
              [](const auto* a, const auto* b) { return a->bytes.data() < b->bytes.data(); });
    for (size_t i = 1; i < order.size(); ++i)
      if (order[i]->bytes.data() < order[i - 1]->bytes.data() + order[i - 1]->bytes.size())
        fail(fmt::format("tensors '{}' and '{}' overlap", shown(order[i - 1]->name), shown(order[i]->name)));
  }

  std::span<const std::byte> bytes_, data_;
  std::string_view path_;
};

}  // namespace

std::vector<SafetensorsTensor> read_safetensors(std::span<const std::byte> bytes, std::string_view name) {
  return Reader(bytes, name).read();
}

}  // namespace thermo
