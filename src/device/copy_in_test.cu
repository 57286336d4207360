#include "device/copy_in.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "device/buffer.h"
#include "device/testing/skip_without_gpu.h"

namespace thermo {
namespace {

TEST(CopyInCuda, CopiesExactlyWhatItIsAskedFor) {
  SKIP_WITHOUT_GPU();
  constexpr size_t kGuard = 64, kMost = 90'000;
  const Stream stream;
  PinnedBuffer from(kMost);
  for (size_t i = 0; i < kMost; ++i) from.data()[i] = static_cast<std::byte>(i * 7 + i / 251);
  for (const size_t n :
       {size_t{0}, size_t{4}, size_t{252}, size_t{1024}, size_t{1028}, size_t{81'924}, kMost}) {
    const DeviceBuffer to(kMost + 2 * kGuard);
    ASSERT_EQ(cudaMemset(to.data(), 0xee, to.size()), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the stream does not wait for it
    copy_in_cuda(to.data() + kGuard, from.data(), n, stream.view());
    ASSERT_TRUE(stream.synchronize());
    std::vector<std::byte> got(to.size());
    ASSERT_EQ(cudaMemcpy(got.data(), to.data(), got.size(), cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(std::memcmp(got.data() + kGuard, from.data(), n), 0) << n;
    for (size_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(got[i], std::byte{0xee}) << n;
      EXPECT_EQ(got[kGuard + n + i], std::byte{0xee}) << n;
    }
  }
}

}  // namespace
}  // namespace thermo
