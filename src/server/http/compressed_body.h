// Bodies that come compressed: gzip (RFC 1952) and Zstandard (RFC 8878).
#pragma once

#include <string>
#include <string_view>

namespace thermo {

enum class Unpacked { Ok, Broken, TooLarge };

// Append what was compressed to `out`, which has `max_bytes` at most; they stop where there would be more.
// A gzip body may have several members, one after the other: their texts are joined.
Unpacked gunzip(std::string_view bytes, size_t max_bytes, std::string& out);
// A frame that needs a window of more than 8 MiB, which no HTTP client may ask for (RFC 9659), is broken.
Unpacked unzstd(std::string_view bytes, size_t max_bytes, std::string& out);

}  // namespace thermo
