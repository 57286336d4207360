// Which GPUs this machine has. Without a driver or a card there are none, which is not an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace thermo {

struct DeviceInfo {
  int index = 0;
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  int n_multiprocessors = 0;
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;
  size_t max_shared_bytes = 0;  // of one block
  std::string bus_id;           // "0000:65:00.0"

  bool usable() const { return compute_capability >= 75; }
};

// In the order of the driver. With THERMO_MAX_SM=75, 80, 86 or 89 they have the compute capability and the
// shared memory of such a card at most; that is for tests of a program that was compiled to PTX of that kind.
// `why_none`: a sentence when the list is empty, may be null.
std::vector<DeviceInfo> list_devices(std::string* why_none);
// Makes `index` the device of the calling thread. Throws CudaError when there is no such device or it is too
// old.
DeviceInfo use_device(int index);
// The device that use_device() chose last; kernels ask it before they choose a variant. Its free_bytes are of
// that time.
const DeviceInfo& device_in_use() noexcept;
// Whether it can start a kernel while the previous one ends.
inline bool dependent_launch() noexcept {
  return device_in_use().compute_capability >= 90;
}

}  // namespace thermo
