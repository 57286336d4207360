#include "base/base64.h"

#include <algorithm>
#include <cstdint>

namespace thermo {
namespace {

constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

}  // namespace

std::string base64_encode(std::string_view bytes) {
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t n = std::min<size_t>(3, bytes.size() - i);
    uint32_t word = 0;
    for (size_t k = 0; k < 3; ++k) word = word << 8 | (k < n ? static_cast<uint8_t>(bytes[i + k]) : 0u);
    for (size_t k = 0; k < 4; ++k) out += k <= n ? kAlphabet[word >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

std::optional<std::string> base64_decode(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  const size_t n_padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  const std::string_view digits = text.substr(0, text.size() - n_padding);
  std::string out;
  out.reserve(text.size() / 4 * 3);
  uint32_t word = 0;
  for (size_t i = 0; i < digits.size(); ++i) {
    const size_t digit = kAlphabet.find(digits[i]);
    if (digit == std::string_view::npos) return std::nullopt;
    word = (word << 6 | static_cast<uint32_t>(digit)) & 0xFFFFFF;
    if (i % 4 == 0) continue;
    out += static_cast<char>(word >> (6 - 2 * (i % 4)));
  }
  // What is left over of the last digit is nothing.
  const uint32_t rest = n_padding == 2 ? word & 15 : n_padding == 1 ? word & 3 : 0;
  if (rest != 0) return std::nullopt;
  return out;
}

}  // namespace thermo
