// SHA-256 (FIPS 180-4), for the fingerprint of what a benchmark computed.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace thermo {

// 64 hexadecimal digits.
std::string sha256_hex(std::span<const std::byte> bytes);

}  // namespace thermo
