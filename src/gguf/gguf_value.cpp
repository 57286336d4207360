#include "gguf/gguf_value.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "base/utf8.h"

namespace thermo {
namespace {

constexpr const char* kTypeNames[kGgufTypeCount] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                    "bool", "string", "array", "u64", "i64", "f64"};
constexpr uint64_t kTypeMinBytes[kGgufTypeCount] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};

std::string describe_text(std::string_view text, size_t max_text) {
  if (text.size() <= max_text) return fmt::format("\"{}\"", escape_text(text, max_text));
  return fmt::format("\"{}\" ({} bytes)", escape_text(text, max_text), text.size());
}

// Appends one element and returns its encoded size.
uint64_t append_element(std::string& out, GgufType type, const std::byte* bytes, size_t max_text) {
  const auto append = [&](auto value) { fmt::format_to(std::back_inserter(out), "{}", value); };
  switch (type) {
    case GgufType::U8:
      append(static_cast<unsigned>(load_unaligned<uint8_t>(bytes)));
      break;
    case GgufType::I8:
      append(static_cast<int>(load_unaligned<int8_t>(bytes)));
      break;
    case GgufType::U16:
      append(load_unaligned<uint16_t>(bytes));
      break;
    case GgufType::I16:
      append(load_unaligned<int16_t>(bytes));
      break;
    case GgufType::U32:
      append(load_unaligned<uint32_t>(bytes));
      break;
    case GgufType::I32:
      append(load_unaligned<int32_t>(bytes));
      break;
    case GgufType::F32:
      append(load_unaligned<float>(bytes));
      break;
    case GgufType::Bool:
      append(load_unaligned<uint8_t>(bytes) != 0);
      break;
    case GgufType::U64:
      append(load_unaligned<uint64_t>(bytes));
      break;
    case GgufType::I64:
      append(load_unaligned<int64_t>(bytes));
      break;
    case GgufType::F64:
      append(load_unaligned<double>(bytes));
      break;
    case GgufType::String: {
      const uint64_t length = load_unaligned<uint64_t>(bytes);
      out += describe_text({reinterpret_cast<const char*>(bytes) + 8, static_cast<size_t>(length)}, max_text);
      return 8 + length;
    }
    case GgufType::Array:
      check_failed(__FILE__, __LINE__, "type", "GgufFile lets no array inside an array through");
  }
  return gguf_type_min_bytes(type);
}

}  // namespace

const char* gguf_type_name(GgufType type) {
  const uint32_t id = static_cast<uint32_t>(type);
  THERMO_CHECK(id < kGgufTypeCount, "a GgufType that is no enumerator");
  return kTypeNames[id];
}

uint64_t gguf_type_min_bytes(GgufType type) {
  const uint32_t id = static_cast<uint32_t>(type);
  THERMO_CHECK(id < kGgufTypeCount, "a GgufType that is no enumerator");
  return kTypeMinBytes[id];
}

GgufValue first_elements(const GgufValue& array, uint64_t n) {
  THERMO_CHECK(array.is_array() && n <= array.count, "an array of fewer elements");
  uint64_t n_bytes = 0;
  if (array.element_type != GgufType::String)
    n_bytes = n * gguf_type_min_bytes(array.element_type);
  else
    for (uint64_t i = 0; i < n; ++i) n_bytes += 8 + load_unaligned<uint64_t>(array.bytes.data() + n_bytes);
  GgufValue first = array;
  first.count = n;
  first.bytes = array.bytes.first(n_bytes);
  return first;
}

std::string describe_type(const GgufValue& value) {
  if (!value.is_array()) return gguf_type_name(value.type);
  return fmt::format("array of {} {}", value.count, gguf_type_name(value.element_type));
}

std::string describe_value(const GgufValue& value, size_t max_text, size_t max_elements) {
  std::string out;
  if (!value.is_array()) {
    append_element(out, value.type, value.bytes.data(), max_text);
    return out;
  }
  const uint64_t shown = std::min<uint64_t>(value.count, max_elements);
  const std::byte* next = value.bytes.data();
  out += '[';
  for (uint64_t i = 0; i < shown; ++i) {
    if (i > 0) out += ", ";
    next += append_element(out, value.element_type, next, max_text);
  }
  if (shown < value.count) out += fmt::format("{}... {} in all", shown > 0 ? ", " : "", value.count);
  out += ']';
  return out;
}

std::string escape_text(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    const DecodedChar decoded = decode_utf8(text, i);
    // Above ASCII, too, there are control characters that a terminal may act on.
    const bool is_plain = decoded.valid && decoded.code >= 0xA0;
    const size_t length = c < 0x80 || !is_plain ? 1 : decoded.length;
    if (i + length > max_bytes) return out + "...";
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c < 0x20 || c == 0x7F || (c >= 0x80 && !is_plain)) {
      out += fmt::format("\\x{:02x}", c);
    } else {
      out += text.substr(i, length);
    }
    i += length;
  }
  return out;
}

}  // namespace thermo
