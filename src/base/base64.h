// Bytes as text, in the alphabet of RFC 4648 with padding.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace thermo {

std::string base64_encode(std::string_view bytes);
// The bytes of such a text; nullopt: it is none.
std::optional<std::string> base64_decode(std::string_view text);

}  // namespace thermo
