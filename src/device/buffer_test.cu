#include "device/buffer.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "device/stream.h"
#include "device/testing/skip_without_gpu.h"

namespace thermo {
namespace {

// A large buffer takes milliseconds to clear. What is written to its beginning at once must not be cleared
// too.
TEST(DeviceBufferGpu, IsClearBeforeAnyStreamWritesToIt) {
  SKIP_WITHOUT_GPU();
  constexpr size_t kBytes = size_t{2} << 30;
  const Stream stream;
  PinnedBuffer host(2 * sizeof(int));
  int* const values = host.as<int>();
  for (int round = 0; round < 3; ++round) {
    const DeviceBuffer buffer(kBytes);
    values[0] = 42 + round;
    cudaMemcpyAsync(buffer.data(), values, sizeof(int), cudaMemcpyHostToDevice, stream.view().handle);
    stream.synchronize();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    cudaMemcpy(values, buffer.data(), 2 * sizeof(int), cudaMemcpyDeviceToHost);
    EXPECT_EQ(values[0], 42 + round);
    EXPECT_EQ(values[1], 0);
  }
}

}  // namespace
}  // namespace thermo
