#include "device/locked_pool.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <vector>

#include "base/units.h"
#include "device/testing/skip_without_gpu.h"

namespace thermo {
namespace {

TEST(LockedPoolCuda, GivesPiecesThatNobodyElseHas) {
  SKIP_WITHOUT_GPU();
  LockedPool pool(0, 64 * MiB);
  const auto none = std::make_shared<Event>();
  std::vector<LockedBuffer> taken;
  std::set<std::byte*> addresses;
  for (int i = 0; i < 24; ++i) {
    const size_t n_bytes = i % 5 == 0 ? 3 * MiB + 17 : i % 5 == 1 ? 100 : 8 * MiB;
    taken.push_back(pool.take(n_bytes));
    LockedBuffer& buffer = taken.back();
    ASSERT_GE(buffer.size(), n_bytes);
    ASSERT_LE(buffer.size(), n_bytes + n_bytes / 8 + HostBuffer::kPageBytes);
    std::memset(buffer.data(), i + 1, buffer.size());
    ASSERT_TRUE(addresses.insert(buffer.data()).second);
    if (i % 7 == 6) {  // some come back meanwhile
      addresses.erase(taken.front().data());
      pool.give_back(std::move(taken.front()), none);
      taken.erase(taken.begin());
    }
  }
  for (size_t i = 0; i < taken.size(); ++i)
    EXPECT_EQ(taken[i].data()[0], taken[i].data()[taken[i].size() - 1]) << i;
}

TEST(LockedPoolCuda, TakesCopiesFromTheDevice) {
  SKIP_WITHOUT_GPU();
  LockedPool pool(0, 64 * MiB);
  const DeviceBuffer device(4 * MiB);
  ASSERT_EQ(cudaMemset(device.data(), 7, device.size()), cudaSuccess);
  for (int i = 0; i < 6; ++i) {
    const LockedBuffer buffer = pool.take(device.size());
    ASSERT_EQ(cudaMemcpy(buffer.data(), device.data(), device.size(), cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(buffer.data()[device.size() - 1], std::byte{7});
  }
}

}  // namespace
}  // namespace thermo
