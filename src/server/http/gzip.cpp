#include "server/http/compressed_body.h"

#include <algorithm>
#include <array>
#include <boost/beast/zlib/inflate_stream.hpp>
#include <cstdint>

namespace thermo {
namespace {

namespace zlib = boost::beast::zlib;

constexpr size_t kPiece = 64 * 1024;
constexpr size_t kHead = 10, kTail = 8;
constexpr uint8_t kHeadChecked = 2, kExtra = 4, kName = 8, kComment = 16, kUnknown = 0xe0;

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value & 1) != 0 ? 0xedb88320u ^ (value >> 1) : value >> 1;
    table[i] = value;
  }
  return table;
}

uint32_t crc32(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = crc_table();
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<uint8_t>(c)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

uint32_t little_endian(std::string_view bytes) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value |= static_cast<uint32_t>(static_cast<uint8_t>(bytes[i])) << (8 * i);
  return value;
}

// Takes the head off; false: it is none.
bool drop_head(std::string_view& bytes) {
  if (bytes.size() < kHead || !bytes.starts_with("\x1f\x8b\x08")) return false;
  const auto flags = static_cast<uint8_t>(bytes[3]);
  if ((flags & kUnknown) != 0) return false;
  bytes.remove_prefix(kHead);
  const auto drop = [&bytes](size_t n) {
    if (n > bytes.size()) return false;
    bytes.remove_prefix(n);
    return true;
  };
  if ((flags & kExtra) != 0) {
    if (bytes.size() < 2) return false;
    if (!drop(size_t{2} + static_cast<uint8_t>(bytes[0]) + size_t{256} * static_cast<uint8_t>(bytes[1])))
      return false;
  }
  for (const uint8_t text : {kName, kComment})
    if ((flags & text) != 0) {
      const size_t end = bytes.find('\0');
      if (end == std::string_view::npos || !drop(end + 1)) return false;
    }
  return (flags & kHeadChecked) == 0 || drop(2);
}

// Takes one member off the front of `bytes`.
Unpacked unpack_member(std::string_view& bytes, size_t max_bytes, std::string& out) {
  if (!drop_head(bytes)) return Unpacked::Broken;
  const size_t begin = out.size();
  zlib::inflate_stream stream;
  zlib::z_params at{};
  at.next_in = bytes.data();
  at.avail_in = bytes.size();
  boost::system::error_code error;
  while (error != zlib::error::end_of_stream) {
    if (out.size() >= max_bytes) return Unpacked::TooLarge;
    const size_t before = out.size();
    out.resize(std::min(before + kPiece, max_bytes));
    at.next_out = out.data() + before;
    at.avail_out = out.size() - before;
    stream.write(at, zlib::Flush::sync, error);
    const size_t n = out.size() - before - at.avail_out;
    out.resize(before + n);
    if (error == zlib::error::need_buffers) error = {};
    if (error && error != zlib::error::end_of_stream) return Unpacked::Broken;
    if (!error && n == 0 && at.avail_in == 0) return Unpacked::Broken;  // it is cut off
  }
  bytes.remove_prefix(bytes.size() - at.avail_in);
  const std::string_view text = std::string_view(out).substr(begin);
  const bool whole = bytes.size() >= kTail && little_endian(bytes) == crc32(text) &&
                     little_endian(bytes.substr(4)) == static_cast<uint32_t>(text.size());
  if (!whole) return Unpacked::Broken;
  bytes.remove_prefix(kTail);
  return Unpacked::Ok;
}

}  // namespace

Unpacked gunzip(std::string_view bytes, size_t max_bytes, std::string& out) {
  Unpacked result = Unpacked::Ok;
  do {
    result = unpack_member(bytes, max_bytes, out);
  } while (result == Unpacked::Ok && !bytes.empty());
  return result;
}

}  // namespace thermo
