#include "base/base64.h"

#include <gtest/gtest.h>

namespace thermo {
namespace {

// The vectors of RFC 4648.
TEST(Base64, WritesAndReadsBytes) {
  const std::pair<const char*, const char*> cases[] = {{"", ""},
                                                       {"f", "Zg=="},
                                                       {"fo", "Zm8="},
                                                       {"foo", "Zm9v"},
                                                       {"foob", "Zm9vYg=="},
                                                       {"fooba", "Zm9vYmE="},
                                                       {"foobar", "Zm9vYmFy"}};
  for (const auto& [bytes, text] : cases) {
    EXPECT_EQ(base64_encode(bytes), text);
    EXPECT_EQ(base64_decode(text), bytes);
  }
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  for (size_t n = 0; n <= all.size(); ++n) {
    const std::string bytes = all.substr(all.size() - n);
    EXPECT_EQ(base64_decode(base64_encode(bytes)), bytes) << n;
  }
}

TEST(Base64, RefusesOtherTexts) {
  for (const char* text :
       {"Z", "Zg", "Zg=", "Zg===", "Zh==", "Zm9=", "Zm 9", "Zm9v\n", "=", "====", "Zg==Zg==", "Zm9-", "Zm9_"})
    EXPECT_FALSE(base64_decode(text).has_value()) << text;
}

}  // namespace
}  // namespace thermo
