// SHA-256 (FIPS 180-4): of downloads as they come, of keys, of what a benchmark computed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace thermo {

class Sha256 {
 public:
  void update(std::span<const std::byte> bytes) noexcept;
  // 64 hexadecimal digits of what was given so far; nothing may follow.
  std::string finish() noexcept;

 private:
  void add_block(const std::byte* block) noexcept;

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> pending_;
  size_t n_pending_ = 0;
  uint64_t n_bytes_ = 0;
};

// All at once.
std::string sha256_hex(std::span<const std::byte> bytes);

}  // namespace thermo
