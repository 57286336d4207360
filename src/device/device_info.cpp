#include "device/device_info.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string_view>

#include "device/cuda_check.h"

namespace thermo {

namespace {
DeviceInfo g_in_use;

// What cards of a kind have, as the programming guide says.
struct CardLimits {
  std::string_view name;
  int compute_capability;
  size_t max_shared_bytes;  // of one block
};
constexpr CardLimits kLimits[] = {
    {"75", 75, 64 << 10}, {"80", 80, 163 << 10}, {"86", 86, 99 << 10}, {"89", 89, 99 << 10}};

// THERMO_MAX_SM: the program takes a newer card for one of these, so that every choice of a kernel is theirs.
const CardLimits* pretended_card() {
  const char* const name = std::getenv("THERMO_MAX_SM");
  if (name == nullptr || *name == '\0') return nullptr;
  const auto at = std::find_if(std::begin(kLimits), std::end(kLimits),
                               [&](const CardLimits& c) { return c.name == name; });
  if (at != std::end(kLimits)) return at;
  throw ConfigError(
      fmt::format("THERMO_MAX_SM is '{}', expected 75, 80, 86 or 89; unset it for no limit", name));
}

// Why there is no device. The runtime calls a missing driver one that is too old.
std::string reason(cudaError_t status) {
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess && version == 0) return "there is no NVIDIA driver";
  if (status == cudaErrorInsufficientDriver)
    return fmt::format("the NVIDIA driver is for CUDA {}.{}, this program needs {}.{} or newer",
                       version / 1000, version % 1000 / 10, CUDART_VERSION / 1000,
                       CUDART_VERSION % 1000 / 10);
  if (status == cudaSuccess || status == cudaErrorNoDevice) return "there is no NVIDIA GPU";
  return cudaGetErrorString(status);
}
}  // namespace

const DeviceInfo& device_in_use() noexcept {
  return g_in_use;
}

std::vector<DeviceInfo> list_devices(std::string* why_none) {
  std::vector<DeviceInfo> devices;
  int n = 0;
  const cudaError_t status = cudaGetDeviceCount(&n);
  if (status != cudaSuccess || n == 0) {
    if (why_none != nullptr) *why_none = reason(status);
    return devices;
  }
  const CardLimits* const limits = pretended_card();
  for (int i = 0; i < n; ++i) {
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, i) != cudaSuccess) continue;
    DeviceInfo info;
    info.index = i;
    info.name = p.name;
    info.compute_capability = p.major * 10 + p.minor;
    info.n_multiprocessors = p.multiProcessorCount;
    info.total_bytes = p.totalGlobalMem;
    info.max_shared_bytes = p.sharedMemPerBlockOptin;
    char bus_id[32] = {};
    if (cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), i) == cudaSuccess) info.bus_id = bus_id;
    if (limits != nullptr) {
      info.compute_capability = std::min(info.compute_capability, limits->compute_capability);
      info.max_shared_bytes = std::min(info.max_shared_bytes, limits->max_shared_bytes);
    }
    devices.push_back(std::move(info));
  }
  return devices;
}

DeviceInfo use_device(int index) {
  std::string why;
  const std::vector<DeviceInfo> devices = list_devices(&why);
  for (DeviceInfo device : devices) {
    if (device.index != index) continue;
    if (!device.usable())
      throw CudaError(
          ExitCode::Device,
          fmt::format("{} has compute capability {}.{}, expected 7.5 or newer; use the CPU", device.name,
                      device.compute_capability / 10, device.compute_capability % 10),
          Remedy::Processor);
    cuda_check(cudaSetDevice(index), "choosing the GPU");
    size_t free_bytes = 0, total_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "asking the GPU for its memory");
    device.free_bytes = free_bytes;
    g_in_use = device;
    return device;
  }
  throw CudaError(ExitCode::Device,
                  devices.empty()
                      ? fmt::format("no usable GPU: {}; use the CPU", why)
                      : fmt::format("there is no cuda:{}, this machine has {} GPU(s)", index, devices.size()),
                  Remedy::Processor);
}

}  // namespace thermo
