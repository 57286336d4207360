#include "server/http/compressed_body.h"

#include <gtest/gtest.h>

#include <boost/beast/zlib/deflate_stream.hpp>
#include <random>

namespace thermo {
namespace {

namespace zlib = boost::beast::zlib;

// One byte at a time, as slow as the definition.
uint32_t slow_crc(const std::string& text) {
  uint32_t crc = ~0u;
  for (const char c : text) {
    crc ^= static_cast<uint8_t>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0u);
  }
  return ~crc;
}

std::string little_endian(uint32_t value) {
  std::string bytes;
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

std::string gzip(const std::string& text, char flags = 0, const std::string& fields = "") {
  zlib::deflate_stream stream;
  std::string packed(stream.upper_bound(text.size()) + 64, '\0');
  zlib::z_params at{};
  at.next_in = text.data();
  at.avail_in = text.size();
  at.next_out = packed.data();
  at.avail_out = packed.size();
  boost::system::error_code error;
  stream.write(at, zlib::Flush::finish, error);
  packed.resize(packed.size() - at.avail_out);
  std::string head("\x1f\x8b\x08\0\0\0\0\0\0\x03", 10);
  head[3] = flags;
  return head + fields + packed + little_endian(slow_crc(text)) +
         little_endian(static_cast<uint32_t>(text.size()));
}

constexpr size_t kPlenty = 1 << 24;

TEST(Gzip, GivesBackWhatWasCompressed) {
  std::mt19937 random(1);
  for (const size_t n : {0, 1, 100, 65535, 65536, 65537, 500000}) {
    std::string text;
    for (size_t i = 0; i < n; ++i) text += static_cast<char>(random() % 7 + (i % 1000 == 0 ? 100 : 0));
    std::string out = "before ";
    EXPECT_EQ(gunzip(gzip(text), kPlenty, out), Unpacked::Ok) << n;
    EXPECT_EQ(out, "before " + text) << n;
  }
}

TEST(Gzip, ReadsOptionalFields) {
  const std::string text = "{}", extra("\x02\0ab", 4), name("body.json\0", 10), check("\x12\x34", 2);
  std::string out;
  EXPECT_EQ(gunzip(gzip(text, 4 | 8 | 2, extra + name + check), kPlenty, out), Unpacked::Ok);
  EXPECT_EQ(out, text);
}

TEST(Gzip, JoinsTheTextsOfSeveralMembers) {
  const std::string two = gzip("What is ") + gzip("17 + 25?"), three = two + gzip("");
  for (const std::string& packed : {two, three}) {
    std::string out;
    EXPECT_EQ(gunzip(packed, kPlenty, out), Unpacked::Ok);
    EXPECT_EQ(out, "What is 17 + 25?");
  }
  std::string out;
  EXPECT_EQ(gunzip(gzip("What is ") + gzip("17 + 25?"), 12, out), Unpacked::TooLarge);
  EXPECT_EQ(gunzip(two.substr(0, two.size() - 1), kPlenty, out), Unpacked::Broken);
}

TEST(Gzip, StopsAtTheLimit) {
  const std::string bomb = gzip(std::string(10'000'000, ' '));
  EXPECT_LT(bomb.size(), 20'000u);
  std::string out;
  EXPECT_EQ(gunzip(bomb, 1'000'000, out), Unpacked::TooLarge);
  EXPECT_LE(out.size(), 1'000'000u);
}

TEST(Gzip, RefusesWhatIsDamaged) {
  const std::string good = gzip("What is 17 + 25? What is 17 + 25?");
  for (size_t n = 0; n < good.size(); ++n) {
    std::string out;
    EXPECT_EQ(gunzip(good.substr(0, n), kPlenty, out), Unpacked::Broken) << n;
  }
  for (size_t at = 0; at < good.size(); ++at) {
    if (at >= 4 && at < 10) continue;  // time, speed and system mean nothing
    std::string bad = good, out;
    bad[at] = static_cast<char>(bad[at] ^ 0x55);
    EXPECT_EQ(gunzip(bad, kPlenty, out), Unpacked::Broken) << at;
  }
  std::string out;
  EXPECT_EQ(gunzip(good + "x", kPlenty, out), Unpacked::Broken);
}

}  // namespace
}  // namespace thermo
