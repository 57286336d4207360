// Noise for the choice of a token: a pure function of (seed, choice, position, token), so a reply does not
// depend on batching, speculation, pauses or cache hits. A drafter may use the same noise to guess what the
// target will draw.
//
// argmax over v of logit_v / temperature + gumbel(v) is an exact sample of softmax(logit / temperature). With
// noise per token rather than one uniform number per position, a token that is cut off, or a logit that moves
// in its last bit, rarely changes the choice between the others.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace thermo {

// The finaliser of splitmix64: a bijection of 64 bits in which every input bit reaches every output bit.
constexpr uint64_t mix64(uint64_t z) noexcept {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

class PositionNoise {
 public:
  PositionNoise(uint64_t seed, uint32_t choice, int64_t position) noexcept
      : key_(mix64(mix64(mix64(seed + kStep) ^ choice) + static_cast<uint64_t>(position) * kStep)) {}

  // 64 random bits for this token: output `token` of a splitmix64 stream that starts at the key.
  uint64_t bits(int32_t token) const noexcept {
    return mix64(key_ + (static_cast<uint64_t>(static_cast<uint32_t>(token)) + 1) * kStep);
  }

  // In [0, 1), for choices that are not of a token.
  double uniform() const noexcept { return static_cast<double>(bits(-1) >> 11) * 0x1p-53; }

  // Standard Gumbel noise, finite.
  double gumbel(int32_t token) const noexcept { return gumbel_of(bits(token)); }

  static double gumbel_of(uint64_t bits) noexcept {
    const double uniform = std::min((static_cast<double>(bits) + 0.5) * 0x1p-64, 1.0 - 0x1p-53);  // in (0, 1)
    return -std::log(-std::log1p(-uniform));
  }

  // No less than gumbel_of(bits), without logarithms: with b leading zeros, uniform >= 2^-(b+1), and
  // -log1p(-u) >= u.
  static double gumbel_bound(uint64_t bits) noexcept {
    constexpr double kLn2 = 0.693147180559945309;
    return static_cast<double>(std::countl_zero(bits) + 1) * kLn2;
  }

 private:
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;
  uint64_t key_;
};

}  // namespace thermo
