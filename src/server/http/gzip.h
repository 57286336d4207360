// Bodies that come compressed (RFC 1952).
#pragma once

#include <string>
#include <string_view>

namespace thermo {

enum class Gunzip { Ok, Broken, TooLarge };

// Appends what was compressed to `out`, which has `max_bytes` at most; it stops where there would be more.
Gunzip gunzip(std::string_view bytes, size_t max_bytes, std::string& out);

}  // namespace thermo
