// The alphabet of byte-level BPE: each byte is written as one printable character, so that a vocabulary
// of arbitrary bytes fits into a list of strings. 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF stand for
// themselves; the other 68 bytes are U+0100, U+0101, ... in increasing order (space is U+0120).
#pragma once

#include <array>
#include <cstdint>
#include <optional>

namespace thermo {

namespace byte_alphabet_detail {

constexpr bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

inline constexpr int kShifted = 68;

struct Tables {
  std::array<uint16_t, 256> to_char{};
  std::array<uint8_t, kShifted> from_shifted{};
};

constexpr Tables make_tables() {
  Tables tables;
  int next = 0;
  for (int byte = 0; byte < 256; ++byte) {
    if (stands_for_itself(byte)) {
      tables.to_char[static_cast<size_t>(byte)] = static_cast<uint16_t>(byte);
    } else {
      tables.from_shifted[static_cast<size_t>(next)] = static_cast<uint8_t>(byte);
      tables.to_char[static_cast<size_t>(byte)] = static_cast<uint16_t>(0x100 + next++);
    }
  }
  return tables;
}

inline constexpr Tables kTables = make_tables();

}  // namespace byte_alphabet_detail

constexpr char32_t byte_to_char(uint8_t byte) {
  return byte_alphabet_detail::kTables.to_char[byte];
}

// nullopt for a character outside the alphabet.
constexpr std::optional<uint8_t> char_to_byte(char32_t c) {
  using namespace byte_alphabet_detail;
  if (c < 0x100) {
    if (!stands_for_itself(static_cast<int>(c))) return std::nullopt;
    return static_cast<uint8_t>(c);
  }
  if (c >= 0x100 + kShifted) return std::nullopt;
  return kTables.from_shifted[c - 0x100];
}

static_assert(byte_to_char(' ') == 0x120 && byte_to_char('\n') == 0x10A && byte_to_char(0xAD) == 0x143);

}  // namespace thermo
