#include "base/sha256.h"

#include <gtest/gtest.h>

#include <string>

namespace thermo {
namespace {

std::string hash_of(std::string_view text, size_t piece) {
  Sha256 hash;
  for (size_t at = 0; at < text.size(); at += piece)
    hash.update(std::as_bytes(std::span(text.substr(at, piece))));
  return hash.finish();
}

// The examples of the standard.
TEST(Sha256, GivesTheKnownValues) {
  EXPECT_EQ(hash_of("", 1), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hash_of("abc", 3), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hash_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hash_of(std::string(1000000, 'a'), 999),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, DoesNotDependOnThePieces) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>('a' + i % 26);
  for (size_t length : {55, 56, 57, 63, 64, 65, 119, 120, 128, 300})
    for (size_t piece : {1, 7, 63, 64, 65, 300})
      EXPECT_EQ(hash_of(text.substr(0, length), piece), hash_of(text.substr(0, length), length))
          << length << " " << piece;
}

}  // namespace
}  // namespace thermo
