// Sizes and integer arithmetic that every layer needs.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace thermo {

inline constexpr uint64_t KiB = 1024;
inline constexpr uint64_t MiB = 1024 * KiB;
inline constexpr uint64_t GiB = 1024 * MiB;

template <std::integral T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Rounds up to a multiple of `step`; `step` need not be a power of two.
template <std::integral T>
constexpr T align_up(T value, T step) {
  return ceil_div(value, step) * step;
}

// a * b and a + b, or nullopt when they overflow: file sizes are untrusted.
constexpr std::optional<uint64_t> checked_mul(uint64_t a, uint64_t b) {
  if (a != 0 && b > std::numeric_limits<uint64_t>::max() / a) return std::nullopt;
  return a * b;
}
constexpr std::optional<uint64_t> checked_add(uint64_t a, uint64_t b) {
  if (b > std::numeric_limits<uint64_t>::max() - a) return std::nullopt;
  return a + b;
}

// "19.70 GiB", "512 B": for people.
std::string format_bytes(uint64_t bytes);

// "11G", "512MiB", "4096": bytes, or nullopt when it is not a size. K M G T are powers of 1024, as is KiB.
std::optional<uint64_t> parse_bytes(std::string_view text);

}  // namespace thermo
