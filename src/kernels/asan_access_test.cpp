#include "kernels/asan_access.h"

#if defined(__SANITIZE_ADDRESS__) && defined(__x86_64__)

#include <gtest/gtest.h>

#include <sanitizer/asan_interface.h>

#include <memory>

namespace thermo {
namespace {

TEST(AsanAccess, IsSureOnlyOfWhatTheSanitizerAllows) {
  int n_sure = 0;
  for (size_t size = 1; size <= 140; ++size) {
    const auto buffer = std::make_unique<char[]>(size);
    char* const begin = buffer.get();
    for (size_t n = 0; n <= 70; ++n)
      for (char* at = begin - 16; at < begin + size + 8; ++at) {
        if (!surely_accessible(at, n)) continue;
        ++n_sure;
        ASSERT_EQ(__asan_region_is_poisoned(at, n), nullptr)
            << n << " bytes at " << at - begin << " of " << size;
      }
  }
  EXPECT_GT(n_sure, 100'000);
}

TEST(AsanAccess, IsSureOfVectorsInABuffer) {
  alignas(64) static char buffer[256];
  for (const size_t n : {1, 2, 4, 8, 16, 32, 64})
    for (const char* at = buffer; at + n <= buffer + sizeof(buffer); ++at)
      EXPECT_TRUE(surely_accessible(at, n)) << n << " bytes at " << at - buffer;
}

}  // namespace
}  // namespace thermo

#endif
