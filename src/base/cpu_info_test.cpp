#include "base/cpu_info.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace thermo {
namespace {

TEST(CpuInfo, KnowsTheMemoryWhereNoFileCanBeOpened) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const uint64_t available = available_memory_bytes();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_GT(available, 0u);
}

}  // namespace
}  // namespace thermo
