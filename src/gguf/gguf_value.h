// One metadata value of a GGUF file, as a view of its encoded bytes, and how to show it to people.
//
// Everything here is little-endian, as the file is; values are read byte by byte, so no alignment is needed.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace thermo {

// The values are the type ids of the file format.
enum class GgufType : uint32_t {
  U8 = 0,
  I8 = 1,
  U16 = 2,
  I16 = 3,
  U32 = 4,
  I32 = 5,
  F32 = 6,
  Bool = 7,
  String = 8,
  Array = 9,
  U64 = 10,
  I64 = 11,
  F64 = 12,
};
inline constexpr uint32_t kGgufTypeCount = 13;

// "u32", "string", "array".
const char* gguf_type_name(GgufType type);

// The fewest bytes that one value of this type takes in a file: its size, or a string's length field.
uint64_t gguf_type_min_bytes(GgufType type);

static_assert(std::endian::native == std::endian::little, "GGUF values are used as they are in the file");

// The number at an address that need not be aligned.
template <class T>
T load_unaligned(const std::byte* bytes) noexcept {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

// The file type of a C++ scalar.
template <class T>
requires std::is_arithmetic_v<T>
constexpr GgufType gguf_type_of() {
  if constexpr (std::is_same_v<T, bool>) return GgufType::Bool;
  if constexpr (std::is_floating_point_v<T>) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "GGUF has f32 and f64 only");
    return sizeof(T) == 4 ? GgufType::F32 : GgufType::F64;
  }
  switch (sizeof(T)) {
    case 1:
      return std::is_signed_v<T> ? GgufType::I8 : GgufType::U8;
    case 2:
      return std::is_signed_v<T> ? GgufType::I16 : GgufType::U16;
    case 4:
      return std::is_signed_v<T> ? GgufType::I32 : GgufType::U32;
    default:
      return std::is_signed_v<T> ? GgufType::I64 : GgufType::U64;
  }
}

// A view: valid as long as the file (or the span) it was read from. GgufFile hands out only values whose
// bytes it has checked: `bytes` holds exactly `count` well-formed elements.
struct GgufValue {
  GgufType type = GgufType::U8;
  GgufType element_type = GgufType::U8;  // of an array; otherwise the same as `type`
  uint64_t count = 1;                    // elements of an array; otherwise 1
  std::span<const std::byte> bytes;      // the elements as encoded, without an array's type and count

  bool is_array() const noexcept { return type == GgufType::Array; }
};

// An array without what follows its first n elements. REQUIRES: it has that many.
GgufValue first_elements(const GgufValue& array, uint64_t n);

// "u32", "array of 248320 string".
std::string describe_type(const GgufValue& value);

// For people: `"qwen35moe"`, `[0.5, 1, 2, ... 40 in all]`. Strings longer than max_text bytes and arrays
// longer than max_elements are shortened; what a terminal would act on is escaped.
std::string describe_value(const GgufValue& value, size_t max_text = 100, size_t max_elements = 8);

// Text from a file made safe to print: control characters and bytes that are no UTF-8 become \n, \xNN.
// Longer than max_bytes: cut, with "..." at the end.
std::string escape_text(std::string_view text, size_t max_bytes = 100);

}  // namespace thermo
