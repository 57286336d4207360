// SHA-256 (FIPS 180-4): fingerprints of what a benchmark computed, hashes of keys.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace thermo {

// 64 hexadecimal digits.
std::string sha256_hex(std::span<const std::byte> bytes);

}  // namespace thermo
