#include "server/api/sealed_reasoning.h"

#include <span>

#include "base/base64.h"
#include "base/sha256.h"
#include "tokenizer/stream_decoder.h"

namespace thermo {
namespace {

constexpr std::string_view kKind = "thermocline-reasoning-1:";
constexpr size_t kChecked = 32;  // hexadecimal digits

std::string checksum(std::string_view text) {
  const std::string all = std::string(kKind) + std::string(text);
  return sha256_hex(std::as_bytes(std::span(all.data(), all.size()))).substr(0, kChecked);
}

}  // namespace

std::string seal_reasoning(std::string_view text) {
  return base64_encode(std::string(kKind) + checksum(text) + std::string(text));
}

std::optional<std::string> open_reasoning(std::string_view sealed) {
  const std::optional<std::string> bytes = base64_decode(sealed);
  if (!bytes || !bytes->starts_with(kKind) || bytes->size() < kKind.size() + kChecked) return std::nullopt;
  const std::string_view rest = std::string_view(*bytes).substr(kKind.size());
  const std::string_view text = rest.substr(kChecked);
  if (rest.substr(0, kChecked) != checksum(text)) return std::nullopt;
  Utf8Assembler valid;  // whoever computes the checksum may put any bytes there
  std::string out = valid.push(text);
  return out += valid.finish();
}

}  // namespace thermo
