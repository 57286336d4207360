#include <gtest/gtest.h>
#include <zstd.h>

#include <random>

#include "server/http/compressed_body.h"

namespace thermo {
namespace {

constexpr size_t kPlenty = 1 << 24;

std::string packed(const std::string& text, int window_log = 0) {
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  if (window_log > 0) {
    ZSTD_CCtx_setParameter(context, ZSTD_c_windowLog, window_log);
    ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 0);
  }
  std::string out(ZSTD_compressBound(text.size()), '\0');
  // In pieces: the size of the text is not known, so that the window stays as it was asked for.
  ZSTD_inBuffer in{text.data(), text.size(), 0};
  ZSTD_outBuffer to{out.data(), out.size(), 0};
  if (window_log > 0) {
    ZSTD_inBuffer half{text.data(), text.size() / 2, 0};
    ZSTD_compressStream2(context, &to, &half, ZSTD_e_continue);
    in.pos = half.pos;
  }
  EXPECT_EQ(ZSTD_compressStream2(context, &to, &in, ZSTD_e_end), 0u);
  ZSTD_freeCCtx(context);
  out.resize(to.pos);
  return out;
}

TEST(Zstd, GivesBackWhatWasCompressed) {
  std::mt19937 random(1);
  for (const size_t n : {0, 1, 100, 65535, 65536, 65537, 500000}) {
    std::string text;
    for (size_t i = 0; i < n; ++i) text += static_cast<char>(random() % 7 + (i % 1000 == 0 ? 100 : 0));
    std::string out = "before ";
    EXPECT_EQ(unzstd(packed(text), kPlenty, out), Unpacked::Ok) << n;
    EXPECT_EQ(out, "before " + text) << n;
  }
  std::string two;
  EXPECT_EQ(unzstd(packed("one ") + packed("two"), kPlenty, two), Unpacked::Ok);
  EXPECT_EQ(two, "one two");
}

TEST(Zstd, StopsAtTheLimit) {
  const std::string bomb = packed(std::string(10'000'000, ' '));
  EXPECT_LT(bomb.size(), 20'000u);
  std::string out;
  EXPECT_EQ(unzstd(bomb, 1'000'000, out), Unpacked::TooLarge);
  EXPECT_LE(out.size(), 1'000'000u);
}

TEST(Zstd, TakesNoLargeWindow) {
  const std::string text(100'000, 'x');
  std::string out;
  EXPECT_EQ(unzstd(packed(text, 23), kPlenty, out), Unpacked::Ok);
  EXPECT_EQ(unzstd(packed(text, 27), kPlenty, out), Unpacked::Broken);
}

TEST(Zstd, RefusesWhatIsDamaged) {
  const std::string good = packed("What is 17 + 25? What is 17 + 25?");
  for (size_t n = 0; n < good.size(); ++n) {
    std::string out;
    EXPECT_EQ(unzstd(good.substr(0, n), kPlenty, out), Unpacked::Broken) << n;
  }
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good, out;
    bad[at] = static_cast<char>(bad[at] ^ 0x55);
    EXPECT_NE(unzstd(bad, kPlenty, out), Unpacked::Ok) << at;
  }
  std::string out;
  EXPECT_EQ(unzstd(good + "x", kPlenty, out), Unpacked::Broken);
}

}  // namespace
}  // namespace thermo
