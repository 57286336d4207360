#include "base/units.h"

#include <gtest/gtest.h>

namespace thermo {
namespace {

TEST(Units, ParsesSizesAsPeopleWriteThem) {
  EXPECT_EQ(parse_bytes("4096"), 4096u);
  EXPECT_EQ(parse_bytes("11G"), 11 * GiB);
  EXPECT_EQ(parse_bytes("1.5GiB"), GiB + GiB / 2);
  EXPECT_EQ(parse_bytes("512 MiB"), 512 * MiB);
  EXPECT_EQ(parse_bytes("64k"), 64 * KiB);
  EXPECT_EQ(parse_bytes("12B"), 12u);
}

TEST(Units, RefusesWhatIsNoSize) {
  for (const char* text : {"", "G", "-1", "12X", "12GiBs", "nan", "inf", "1e30G", "60%"})
    EXPECT_FALSE(parse_bytes(text).has_value()) << text;
}

TEST(Units, FormatsWithTwoDigits) {
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(21155768832ull), "19.70 GiB");
}

TEST(Units, CatchesOverflow) {
  EXPECT_FALSE(checked_mul(1ull << 33, 1ull << 31).has_value());
  EXPECT_EQ(checked_mul(1ull << 32, 1ull << 31), 1ull << 63);
  EXPECT_FALSE(checked_add(~0ull, 1).has_value());
  EXPECT_EQ(align_up(33, 32), 64);
}

}  // namespace
}  // namespace thermo
